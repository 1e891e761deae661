//! Prefixes that gateways placed lately, for the pool's other gateways: each sends with its queries for the pool's state what it placed, and gets
//! what others did. Soft state: a gateway that knows less computes a prefix twice.

use lagoon_protocol::{PlacedPrefix, PrefixesKnown, PrefixesPlaced};
use lagoon_types::limits::{PLACED_HASHES_MAX, PREFIX_HASHES_MAX, PREFIX_PLACES_MAX};
use std::collections::VecDeque;

/// The latest placed prefixes, of at most `PREFIX_PLACES_MAX` hashes.
#[derive(Debug, Default)]
pub(super) struct PlacedPrefixes {
    placed: VecDeque<Placed>,
    /// Hashes of all in `placed`.
    hashes: usize,
    /// Number of the last one; numbers have no gaps.
    last: u64,
}

#[derive(Debug)]
struct Placed {
    gateway: u64,
    prefix: PlacedPrefix,
}

fn hashes(prefix: &PlacedPrefix) -> usize {
    prefix.hashes.len() / 8
}

impl PlacedPrefixes {
    /// Takes a gateway's prefixes and returns others' that it does not know. `term`: this gManager's.
    pub(super) fn exchange(&mut self, of: &PrefixesPlaced, term: u64) -> PrefixesKnown {
        let known = if of.term == term { of.known.min(self.last) } else { 0 };
        let before = self.last - self.placed.len() as u64;
        let mut reply = PrefixesKnown { placed: Vec::new(), last: known.max(before) };
        let mut left = PLACED_HASHES_MAX;
        for placed in self.placed.iter().skip(usize::try_from(reply.last - before).unwrap_or(usize::MAX)) {
            if placed.gateway != of.gateway {
                let Some(rest) = left.checked_sub(hashes(&placed.prefix)) else { break };
                left = rest;
                reply.placed.push(placed.prefix.clone());
            }
            reply.last += 1;
        }
        self.take(of);
        reply
    }

    fn take(&mut self, of: &PrefixesPlaced) {
        let mut left = PLACED_HASHES_MAX;
        for prefix in &of.placed {
            let is_whole = prefix.hashes.len().is_multiple_of(8) && (1..=PREFIX_HASHES_MAX).contains(&hashes(prefix));
            let Some(rest) = left.checked_sub(hashes(prefix)).filter(|_| is_whole) else { continue };
            left = rest;
            self.hashes += hashes(prefix);
            self.last += 1;
            self.placed.push_back(Placed { gateway: of.gateway, prefix: prefix.clone() });
        }
        while self.hashes > PREFIX_PLACES_MAX {
            let oldest = self.placed.pop_front().expect("hashes are of prefixes");
            self.hashes -= hashes(&oldest.prefix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(instance: u32, count: usize) -> PlacedPrefix {
        PlacedPrefix { instance, hashes: vec![7; 8 * count], tokens: 5 }
    }

    fn reported(gateway: u64, placed: Vec<PlacedPrefix>, known: u64) -> PrefixesPlaced {
        PrefixesPlaced { gateway, placed, known, term: 3 }
    }

    fn instances(known: &PrefixesKnown) -> Vec<u32> {
        known.placed.iter().map(|prefix| prefix.instance).collect()
    }

    #[test]
    fn each_gateway_gets_the_others_prefixes_once() {
        let mut of = PlacedPrefixes::default();
        assert_eq!(of.exchange(&reported(1, vec![prefix(10, 1), prefix(11, 2)], 0), 3), PrefixesKnown::default());
        let second = of.exchange(&reported(2, vec![prefix(20, 1)], 0), 3);
        assert_eq!((instances(&second), second.last), (vec![10, 11], 2));
        let first = of.exchange(&reported(1, vec![], 0), 3);
        assert_eq!((instances(&first), first.last), (vec![20], 3), "its own are not among them");
        assert_eq!(of.exchange(&reported(1, vec![], 3), 3), PrefixesKnown { placed: vec![], last: 3 });
        // What is known of another term's numbers says nothing of these.
        let later = PrefixesPlaced { term: 2, ..reported(2, vec![], 3) };
        assert_eq!(instances(&of.exchange(&later, 3)), [10, 11]);
        assert_eq!(of.exchange(&reported(9, vec![], 77), 3).last, 3, "a number that was never given");
    }

    #[test]
    fn the_oldest_are_forgotten_and_a_reply_is_bounded() {
        let mut of = PlacedPrefixes::default();
        let each = PREFIX_HASHES_MAX;
        let full: Vec<PlacedPrefix> = (0..PLACED_HASHES_MAX / each + 3).map(|_| prefix(1, each)).collect();
        for _ in 0..PREFIX_PLACES_MAX / PLACED_HASHES_MAX + 2 {
            of.exchange(&reported(1, full.clone(), 0), 3);
        }
        assert_eq!((of.hashes, of.placed.len()), (PREFIX_PLACES_MAX, PREFIX_PLACES_MAX / each));
        let counted = (PREFIX_PLACES_MAX + 2 * PLACED_HASHES_MAX) / each;
        assert_eq!(of.last, counted as u64, "of a message so many count");
        let (mut known, mut seen) = (0, 0);
        loop {
            let reply = of.exchange(&reported(2, vec![], known), 3);
            if reply.placed.is_empty() {
                break;
            }
            assert!(reply.placed.iter().map(hashes).sum::<usize>() <= PLACED_HASHES_MAX);
            seen += reply.placed.len();
            known = reply.last;
        }
        assert_eq!((seen, known), (of.placed.len(), of.last));
    }

    #[test]
    fn prefixes_of_no_hashes_of_too_many_and_of_parts_do_not_count() {
        let mut of = PlacedPrefixes::default();
        let part = PlacedPrefix { hashes: vec![1; 12], ..prefix(1, 1) };
        of.exchange(&reported(1, vec![prefix(1, 0), part, prefix(1, PREFIX_HASHES_MAX + 1)], 0), 3);
        assert_eq!((of.last, of.hashes), (0, 0));
    }
}
