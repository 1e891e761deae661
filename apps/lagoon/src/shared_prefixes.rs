//! Where a pool's gateways sent prompts, as they report to each other with their queries for the pool's state: what this one is to report, and
//! what others have reported.

use crate::pool_client::PoolRow;
use lagoon_cluster::dispatch::{Placed, PlacedQueue};
use lagoon_protocol::{PlacedPrefix, PrefixesKnown, PrefixesPlaced};
use std::net::SocketAddr;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct SharedPrefixes {
    /// Number of this process for the others.
    gateway: u64,
    /// To be reported.
    own: PlacedQueue<SocketAddr>,
    /// Reported by others.
    others: PlacedQueue<SocketAddr>,
    /// What is known of others' numbers, and the term of these.
    known: u64,
    term: u64,
}

impl SharedPrefixes {
    pub(crate) fn new(gateway: u64) -> Self {
        Self { gateway, own: PlacedQueue::default(), others: PlacedQueue::default(), known: 0, term: 0 }
    }

    /// Notes where prompts went.
    pub(crate) fn add_own(&mut self, placed: Vec<Placed<SocketAddr>>) {
        self.own.add(placed);
    }

    /// What others reported since the last call.
    pub(crate) fn take(&mut self) -> Vec<Placed<SocketAddr>> {
        self.others.take()
    }

    /// What the next query says. Of instances that have no row any more nothing.
    pub(crate) fn query(&mut self, rows: &[PoolRow]) -> Box<PrefixesPlaced> {
        let placed = self.own.take().into_iter().filter_map(|placed| {
            let row = rows.iter().find(|row| row.http_addr.parse() == Ok(placed.instance))?;
            let hashes = placed.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
            Some(PlacedPrefix { instance: row.instance, hashes, tokens: placed.tokens })
        });
        let Self { gateway, known, term, .. } = *self;
        Box::new(PrefixesPlaced { gateway, placed: placed.collect(), known, term })
    }

    /// Takes the answer of the gManager of `term`, which has these `rows`.
    pub(crate) fn learn(&mut self, answer: PrefixesKnown, rows: &[PoolRow], term: u64) {
        (self.known, self.term) = (answer.last, term);
        let placed = answer.placed.into_iter().filter_map(|placed| {
            let row = rows.iter().find(|row| row.instance == placed.instance)?;
            let hashes = placed.hashes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
            Some(Placed { instance: row.http_addr.parse().ok()?, hashes, tokens: placed.tokens })
        });
        self.others.add(placed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::InstanceStatus;

    fn row(instance: u32) -> PoolRow {
        let http_addr = format!("127.0.0.1:{instance}");
        InstanceStatus { instance, http_addr, ..InstanceStatus::default() }.into()
    }

    fn placed(port: u16, hashes: &[u64]) -> Placed<SocketAddr> {
        Placed { instance: SocketAddr::from(([127, 0, 0, 1], port)), hashes: hashes.to_vec(), tokens: 9 }
    }

    #[test]
    fn a_placed_prefix_goes_from_one_gateway_to_another() {
        let (mut one, mut two, rows) = (SharedPrefixes::new(1), SharedPrefixes::new(2), [row(7), row(8)]);
        one.add_own(vec![placed(7, &[1, u64::MAX]), placed(99, &[3]), placed(8, &[4])]);
        let query = one.query(&rows);
        assert_eq!((query.gateway, query.placed.len(), query.known), (1, 2, 0), "99 is no instance");
        assert_eq!(one.query(&rows).placed, [], "reported once");
        two.learn(PrefixesKnown { placed: query.placed, last: 5 }, &rows[..1], 3);
        assert_eq!(two.take(), [placed(7, &[1, u64::MAX])], "8 is no instance here");
        assert_eq!(two.take(), []);
        let next = two.query(&rows);
        assert_eq!((next.known, next.term), (5, 3));
    }
}
