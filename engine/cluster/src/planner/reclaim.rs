//! Reclaims: blocks leave a creditor that is short of memory, home to their debtor if it has room, else to another
//! creditor. Blocks without a new place stay until the creditor recalls them itself. `gmanager/drain.rs` empties draining
//! creditors.

use super::Why;
use super::round::Round;
use lagoon_types::{InstanceId, SeqId};

/// Plans reclaims of all creditors that are short of memory.
pub(super) fn plan(round: &mut Round<'_>) {
    for creditor in 0..round.nodes.len() {
        let node = &round.nodes[creditor];
        if node.lent == 0 || node.is_left_alone() || node.view.draining {
            continue;
        }
        let (wanted, lent) = (node.deficit(), node.lent);
        if wanted > 0 {
            reclaim(round, creditor, wanted.min(lent));
        }
    }
}

/// Orders `wanted` blocks away from the creditor, as far as other instances have room; debtors with most room first.
fn reclaim(round: &mut Round<'_>, creditor: usize, mut wanted: i64) {
    let lent = &round.nodes[creditor].view.lent;
    let debtors = lent.iter().filter(|(_, blocks)| *blocks > 0).filter_map(|(id, _)| round.index(*id));
    let mut debtors: Vec<usize> = debtors.filter(|at| *at != creditor && !round.nodes[*at].is_left_alone()).collect();
    debtors.sort_by_key(|at| (-round.nodes[*at].surplus(), *at));
    for debtor in debtors {
        for (seq, mut there) in requests_at(round, debtor, round.nodes[creditor].id) {
            while wanted > 0 && there > 0 && !round.is_full() {
                let Some((target, room)) = place(round, debtor, creditor) else { break };
                let blocks = wanted.min(there).min(room);
                let ordered = round.order((debtor, seq), (creditor, target), blocks, Why::Reclaim, 0.0);
                (wanted, there) = (wanted - ordered, there - ordered);
                if ordered < blocks {
                    // The rest of a large move follows in a later round.
                    break;
                }
            }
        }
    }
}

/// Requests of a debtor with movable blocks at a creditor, and their number.
fn requests_at(round: &Round<'_>, debtor: usize, creditor: InstanceId) -> Vec<(SeqId, i64)> {
    let requests = round.nodes[debtor].view.requests.iter().filter(|(_, r)| !r.moving);
    let there = |r: &super::RequestView| -> i64 {
        r.remote.iter().filter(|p| p.creditor == creditor).map(|p| i64::from(p.sealed.min(p.blocks))).sum()
    };
    requests.map(|(seq, r)| (*seq, there(r))).filter(|(_, blocks)| *blocks > 0).collect()
}

/// Target for blocks of `debtor`, and its room: home, or the creditor with most spare blocks.
fn place(round: &mut Round<'_>, debtor: usize, from: usize) -> Option<(usize, i64)> {
    let home = round.nodes[debtor].surplus();
    let paused = round.nodes[debtor].view.paused;
    if home > 0 && !paused {
        return Some((debtor, home));
    }
    let others = round.creditors_for(debtor).into_iter().filter(|at| *at != from);
    let others = others.map(|at| (round.spare_to_lend(at).min(round.movable_in_time(from, at)), at));
    others.max_by_key(|(room, at)| (*room, usize::MAX - at)).filter(|(room, _)| *room > 0).map(|(room, at)| (at, room))
}
