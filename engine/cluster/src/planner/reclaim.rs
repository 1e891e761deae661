//! Blocks leave a creditor that needs its memory back: home to their debtor if it has room, else to another creditor.
//! What finds no place stays; the creditor's own recall settles what cannot wait. Creditors that are drained are emptied
//! by the gManager itself (`gmanager/drain.rs`).

use super::Why;
use super::round::Round;
use lagoon_types::{InstanceId, SeqId};

/// Reclaims of all creditors that are short of memory.
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

/// Orders away `wanted` blocks of the creditor, if there is a place for them; debtors with most room at home first.
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

/// Requests of a debtor with blocks at a creditor that could move.
fn requests_at(round: &Round<'_>, debtor: usize, creditor: InstanceId) -> Vec<(SeqId, i64)> {
    let requests = round.nodes[debtor].view.requests.iter().filter(|(_, r)| !r.moving);
    let there = |r: &super::RequestView| -> i64 {
        r.remote.iter().filter(|p| p.creditor == creditor).map(|p| i64::from(p.sealed.min(p.blocks))).sum()
    };
    requests.map(|(seq, r)| (*seq, there(r))).filter(|(_, blocks)| *blocks > 0).collect()
}

/// Where blocks of `debtor` may go instead, and how many: home, or to the creditor with most to spare.
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
