//! Request placement map (Infinite-LLM v2 §6.1): rBlocks of each request on each instance, as instances report them.
//!
//! Each instance's rows are kept as it sent them; the planner's view has them by debtor. Instances send changed rows; a
//! member whose full rows are missing is asked for them, and receives no blocks until then.

use super::GManager;
use super::member::{Blocks, Member};
use crate::planner::RemoteBlocks;
use lagoon_protocol::{AdminPlacements, Heartbeat, PlacementEntry, PlacementRow};
use lagoon_types::{InstanceId, SeqId, limits};
use std::ops::Bound;

impl GManager {
    /// Updates the rows from a heartbeat.
    pub(super) fn take_rows(&mut self, id: InstanceId, m: &Heartbeat) {
        if m.placements_full {
            self.drop_rows(id);
            if let Some(member) = self.members.get_mut(&id) {
                member.rows_complete = true;
            }
        }
        let Some(member) = self.members.get(&id).filter(|m| m.rows_complete) else { return };
        // Every row has at least one block.
        let rows_max = (member.registration.blocks_total as usize).min(limits::PLACEMENT_ROWS_MAX);
        for row in m.placements.iter().take(limits::HEARTBEAT_ROWS_MAX) {
            let key = (InstanceId(row.debtor), SeqId(row.seq));
            let known = self.members.get(&id).is_some_and(|m| m.rows.len() < rows_max || m.rows.contains_key(&key));
            if known || row.blocks == 0 {
                self.set_row(id, key, Blocks { blocks: row.blocks, sealed: row.blocks_sealed.min(row.blocks) });
            }
        }
    }

    /// Sets one row of `holder`; 0 blocks delete it.
    fn set_row(&mut self, holder: InstanceId, key: (InstanceId, SeqId), row: Blocks) {
        let Some(member) = self.members.get_mut(&holder) else { return };
        let old = if row.blocks == 0 { member.rows.remove(&key) } else { member.rows.insert(key, row) };
        let debtor = key.0;
        if debtor != holder && old.is_none() != (row.blocks == 0) {
            self.count_remote_request(debtor, holder, row.blocks > 0);
        }
        self.set_request(holder, key, row);
    }

    fn count_remote_request(&mut self, debtor: InstanceId, holder: InstanceId, more: bool) {
        let holders = self.remote_requests.entry(debtor).or_default();
        let count = holders.entry(holder).or_default();
        *count = if more { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            holders.remove(&holder);
            if holders.is_empty() {
                self.remote_requests.remove(&debtor);
            }
        }
    }

    /// Updates the same row in the planner's view.
    fn set_request(&mut self, holder: InstanceId, (debtor, seq): (InstanceId, SeqId), row: Blocks) {
        let moving = self.orders.rests(debtor, seq);
        let Some(view) = self.instance_view(debtor) else { return };
        if row.blocks == 0 && !view.requests.contains_key(&seq) {
            return;
        }
        let request = view.requests.entry(seq).or_default();
        request.moving = moving;
        if holder == debtor {
            (request.local, request.local_sealed) = (row.blocks, row.sealed);
        } else {
            let remote = RemoteBlocks { creditor: holder, blocks: row.blocks, sealed: row.sealed };
            match request.remote.binary_search_by_key(&holder, |r| r.creditor) {
                Ok(at) if row.blocks == 0 => drop(request.remote.remove(at)),
                Ok(at) => request.remote[at] = remote,
                Err(_) if row.blocks == 0 => {}
                Err(at) => request.remote.insert(at, remote),
            }
        }
        if request.local == 0 && request.remote.is_empty() {
            view.requests.remove(&seq);
        }
    }

    /// Forgets the rows of an instance.
    pub(super) fn drop_rows(&mut self, id: InstanceId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let rows = std::mem::take(&mut member.rows);
        for key in rows.into_keys() {
            if key.0 != id {
                self.count_remote_request(key.0, id, false);
            }
            self.set_request(id, key, Blocks::default());
        }
    }

    /// Restores a (re)joining debtor's requests in the planner's view from its creditors' rows.
    pub(super) fn gather_requests(&mut self, debtor: InstanceId) {
        let holders: Vec<InstanceId> =
            self.remote_requests.get(&debtor).into_iter().flatten().map(|(h, _)| *h).collect();
        for holder in holders {
            let Some(member) = self.members.get(&holder) else { continue };
            let range = (debtor, SeqId(0))..=(debtor, SeqId(u64::MAX));
            let rows: Vec<_> = member.rows.range(range).map(|(key, row)| (*key, *row)).collect();
            rows.into_iter().for_each(|(key, row)| self.set_request(holder, key, row));
        }
    }

    /// Rows of one request (holder, blocks), ascending by holder.
    pub(super) fn rows_of(&self, debtor: InstanceId, seq: SeqId) -> Vec<(InstanceId, Blocks)> {
        let remote = self.remote_requests.get(&debtor).into_iter().flatten().map(|(h, _)| *h);
        let mut holders: Vec<InstanceId> = remote.chain([debtor]).collect();
        holders.sort_unstable();
        holders.dedup();
        let row = |h: InstanceId| Some((h, *self.members.get(&h)?.rows.get(&(debtor, seq))?));
        holders.into_iter().filter_map(row).collect()
    }

    /// The request placement map, by holder, debtor and sequence.
    pub fn placements(&self) -> impl Iterator<Item = PlacementRow> + '_ {
        self.placements_of(AdminPlacements::default())
    }

    /// Rows of the placement map that an operator's query selects, after its last known row.
    pub(super) fn placements_of(&self, m: AdminPlacements) -> impl Iterator<Item = PlacementRow> + '_ {
        let AdminPlacements { debtor, seq, after_instance, after_debtor, after_seq } = m;
        let after = (InstanceId(after_debtor), SeqId(after_seq));
        let rows = move |(holder, member): (InstanceId, &'_ Member)| {
            let start = if holder.0 == after_instance { Bound::Excluded(after) } else { Bound::Unbounded };
            let wanted = move |key: &(InstanceId, SeqId)| {
                (debtor == 0 || key.0.0 == debtor) && seq.is_none_or(|seq| key.1.0 == seq)
            };
            let rows: Vec<PlacementRow> = member
                .rows
                .range((start, Bound::Unbounded))
                .filter(|(key, _)| wanted(key))
                .map(|((debtor, seq), row)| PlacementRow {
                    instance: holder.0,
                    entry: Some(PlacementEntry {
                        debtor: debtor.0,
                        seq: seq.0,
                        blocks: row.blocks,
                        blocks_sealed: row.sealed,
                    }),
                })
                .collect();
            rows
        };
        self.members.range(InstanceId(after_instance)..).flat_map(move |(id, member)| rows((*id, member)))
    }
}
