//! The study "queries cross once a node": of a step's creditors on another node, the first one asked passes the queries on to those
//! beside it over the node's fast link, waits for their partials and answers with one.
//!
//! [`Relays`] knows which creditors of a step wait for each other; the network ([`super::fabric`]) charges what they send.

use crate::place::Place;
use lagoon_types::StepId;
use std::collections::BTreeMap;

/// A step's creditors on one node.
#[derive(Debug)]
struct Group {
    relay: Place,
    /// When the relay had the queries, in microseconds.
    asked_us: u64,
    /// When it had the last partial so far.
    answered_us: u64,
    /// Creditors asked that have not answered.
    open: usize,
}

/// Names a group: debtor, step and node.
pub(super) type Key = (Place, StepId, usize);

/// Groups of steps in flight; see the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Relays(BTreeMap<Key, Group>);

/// A partial that was given to its relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merged {
    /// The relay waits for more.
    Part,
    /// The relay can answer at this time, in microseconds.
    All { relay: Place, at_us: u64 },
}

impl Relays {
    /// The relay of a group, and when it had the queries; `None` for the first creditor, which becomes the relay.
    pub(super) fn ask(&mut self, key: Key) -> Option<(Place, u64)> {
        let group = self.0.get_mut(&key)?;
        group.open += 1;
        Some((group.relay, group.asked_us))
    }

    /// Makes a creditor that has queries from `asked_us` on a relay.
    pub(super) fn begin(&mut self, key: Key, relay: Place, asked_us: u64) {
        self.0.insert(key, Group { relay, asked_us, answered_us: 0, open: 1 });
    }

    /// The relay of a group.
    pub(super) fn relay(&self, key: Key) -> Option<Place> {
        self.0.get(&key).map(|group| group.relay)
    }

    /// Drops the group of a step that its debtor has cancelled.
    pub(super) fn forget(&mut self, key: Key) {
        self.0.remove(&key);
    }

    /// A partial is at the relay from `at_us` on.
    pub(super) fn answer(&mut self, key: Key, at_us: u64) -> Merged {
        let Some(group) = self.0.get_mut(&key) else { return Merged::Part };
        group.answered_us = group.answered_us.max(at_us);
        group.open -= 1;
        if group.open > 0 {
            return Merged::Part;
        }
        let (relay, at_us) = (group.relay, group.answered_us);
        self.0.remove(&key);
        Merged::All { relay, at_us }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::Cluster;
    use super::super::hardware::LLAMA2_7B;
    use super::super::measure::{Job, Measured, run_one};
    use super::super::run::{Setting, Study};
    use super::super::traces::Request;
    use super::*;

    /// Two nodes of two instances each: a request that needs all four has two creditors on the other node.
    #[test]
    fn two_creditors_on_another_node_cost_its_network_one_query() {
        let run = |once_a_node| -> Measured {
            let setting = Setting {
                kv_tokens: 20_480,
                planner: false,
                study: Study { once_a_node, ..Study::default() },
                ..Setting::new(Cluster::multi(LLAMA2_7B, 16, 4), true, 512)
            };
            let requests = vec![Request { arrival_us: 0, prompt_tokens: 75_000, output_tokens: 40 }];
            run_one(&Job { setting, requests })
        };
        let (each, once) = (run(false), run(true));
        assert_eq!((each.finished, once.finished), (1, 1));
        let share = once.ethernet_bytes / each.ethernet_bytes;
        assert!((0.45..0.60).contains(&share), "{share}");
        assert!(once.tokens_per_s > 1.05 * each.tokens_per_s, "{} and {}", once.tokens_per_s, each.tokens_per_s);
    }

    #[test]
    fn a_relay_answers_when_it_has_the_last_partial_of_its_group() {
        let (mut relays, key) = (Relays::default(), (1, StepId(7), 2));
        assert_eq!(relays.ask(key), None);
        relays.begin(key, 20, 100);
        assert_eq!((relays.ask(key), relays.ask(key)), (Some((20, 100)), Some((20, 100))));
        let other = (1, StepId(8), 2);
        assert_eq!((relays.ask(other), relays.relay(other)), (None, None));
        assert_eq!(relays.answer(key, 500), Merged::Part);
        assert_eq!(relays.answer(key, 900), Merged::Part);
        // One that was there earlier does not make the last one earlier.
        assert_eq!(relays.answer(key, 300), Merged::All { relay: 20, at_us: 900 });
        assert_eq!(relays.relay(key), None, "the step is over");
        relays.begin(other, 21, 50);
        relays.forget(other);
        assert_eq!(relays.answer(other, 60), Merged::Part, "a cancelled step has no answer");
    }
}
