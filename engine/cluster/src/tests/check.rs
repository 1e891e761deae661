//! What must hold at every event of a run, and at rest.

use super::node::{RESERVE, Seq};
use super::world::World;
use lagoon_kv::Owner;
use lagoon_types::limits;
use std::collections::BTreeSet;

/// Ticks come up to this late.
const TICK_SLACK_MS: u64 = 200;

impl World {
    pub(super) fn check(&self) {
        for (n, node) in self.nodes.iter().enumerate() {
            let pool = &node.rm.pool;
            pool.check();
            let own: u32 = node.seqs.values().map(|s| s.table.local_blocks()).sum();
            let lent: u32 = node.rm.creditor.iter().map(|(_, _, _, first, end)| end - first).sum();
            assert_eq!((pool.counts().own, pool.counts().lent), (own, lent), "node {n}: blocks without a user");
            assert!(lent <= node.rm.config().lend_blocks_max);
            for (id, seq) in &node.seqs {
                self.check_tiles(seq);
                let local = seq.table.placements().iter().filter_map(|p| match p {
                    lagoon_kv::Placement::Local(block) => Some(*block),
                    _ => None,
                });
                local.for_each(|b| assert_eq!(pool.owner(b), Owner::Own(*id)));
                if let Some((_, since_ms)) = seq.borrow {
                    let age_ms = self.now_ms - since_ms;
                    assert!(age_ms <= limits::BORROW_DEADLINE_MS + TICK_SLACK_MS, "a borrow hangs for {age_ms} ms");
                }
            }
            let waiting = node.seqs.values().filter(|s| s.borrow.is_some()).count();
            assert_eq!(node.rm.debtor.borrowing(), waiting, "node {n}: negotiations without a sequence");
        }
        self.check_lent_contains_held();
    }

    /// Every visible position is listed exactly once, here or on creditors.
    fn check_tiles(&self, seq: &Seq) {
        let upto = seq.table.written();
        let first = seq.window_start() / seq.table.block_tokens() * seq.table.block_tokens();
        let mut local = Vec::new();
        seq.table.local_runs(upto, seq.window_start(), &mut local);
        let mut parts: Vec<(u32, u32)> = local.iter().map(|r| (r.first_pos, r.len)).collect();
        let remote = seq.table.remote_runs(upto, seq.window_start());
        parts.extend(remote.values().flatten().map(|r| (r.first_pos, r.len)));
        parts.sort_unstable();
        let mut at = first.min(upto);
        for (pos, len) in parts {
            assert_eq!(pos, at, "a position is listed twice or not at all");
            at += len;
        }
        assert_eq!(at, upto);
    }

    /// What debtors hold, their creditors lend to them: under the same epoch, and no entry of it freed.
    fn check_lent_contains_held(&self) {
        for node in &self.nodes {
            // Peers may have freed what a dead instance held that does not know it yet.
            if node.instance.is_some_and(|me| self.fenced.contains(&(me, node.incarnation))) {
                continue;
            }
            for (creditor, lease, epoch, first, end) in node.rm.debtor.held.iter() {
                if self.dead_leases.contains(&lease) {
                    continue;
                }
                let home = self.node_of(creditor).expect("a live lease's creditor has its number");
                let mut lent = self.nodes[home].rm.creditor.iter();
                let lent = lent.find(|l| l.1 == lease && l.3 <= first && end <= l.4);
                let (debtor, _, lent_epoch, _, _) = lent.expect("held entries are lent");
                assert_eq!((Some(debtor), lent_epoch), (node.instance, epoch));
            }
        }
    }

    /// Checks at rest that the lent blocks are the held ones, block for block.
    pub(super) fn check_rest(&self) {
        let row = |(peer, lease, epoch, first, end)| (peer, lease, epoch, first, end);
        let mut lent = BTreeSet::new();
        let mut held = BTreeSet::new();
        for node in &self.nodes {
            let me = node.instance.expect("everybody is registered at rest");
            assert_eq!((node.rm.debtor.borrowing(), node.rm.debtor.held.releasing()), (0, 0));
            lent.extend(node.rm.creditor.iter().map(row).map(|(peer, l, e, first, end)| (me, peer, l, e, first, end)));
            held.extend(
                node.rm.debtor.held.iter().map(row).map(|(peer, l, e, first, end)| (peer, me, l, e, first, end)),
            );
            let of_seqs: BTreeSet<_> = node.seqs.values().flat_map(|s| s.table.leases()).map(|l| l.lease).collect();
            assert!(node.rm.debtor.held.iter().all(|h| of_seqs.contains(&h.1)), "a lease without a sequence is held");
        }
        assert_eq!(lent, held);
        self.check_rows();
        assert_eq!(self.gmanager.ledger().iter().map(|r| r.blocks).sum::<u32>(), lent.iter().map(|l| l.5 - l.4).sum());
    }

    /// The gManager's placement map is what every instance would report now, by holder and by debtor.
    fn check_rows(&self) {
        let mut rows = BTreeSet::new();
        for node in &self.nodes {
            let me = node.instance.unwrap().0;
            rows.extend(node.rows().iter().map(|r| (me, r.debtor, r.seq, r.blocks)));
        }
        let entries = self.gmanager.placements().map(|r| (r.instance, r.entry.unwrap()));
        let known: BTreeSet<_> = entries.map(|(holder, e)| (holder, e.debtor, e.seq, e.blocks)).collect();
        assert_eq!(known, rows);
        let mut by_debtor = BTreeSet::new();
        for (debtor, view) in &self.gmanager.pool().instances {
            for (seq, request) in &view.requests {
                let local = (request.local > 0).then_some((debtor.0, debtor.0, seq.0, request.local));
                let remote = request.remote.iter().map(|r| (r.creditor.0, debtor.0, seq.0, r.blocks));
                by_debtor.extend(local.into_iter().chain(remote));
            }
        }
        assert_eq!(by_debtor, rows);
    }

    /// Checks at the end that no block is in use.
    pub(super) fn check_empty(&self) {
        self.check_rest();
        for node in &self.nodes {
            let counts = node.rm.pool.counts();
            assert_eq!(counts.free, counts.total);
            assert_eq!(node.rm.lendable(), node.rm.config().lend_blocks_max.min(counts.total - RESERVE));
        }
    }
}
