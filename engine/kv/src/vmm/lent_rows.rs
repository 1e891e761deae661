//! Lent rows: address rows that hold rBlocks of debtors' sequences as runs.
//!
//! An rBlock of a lent row keeps its position at any address, so that windows and ALiBi stay right. Recalling one from the
//! middle leaves a gap in the addresses and splits a run; compacting closes gaps by remapping, without copying.

use super::VmmError;
use super::row::Use;
use super::state::{Plan, Vmm};
use lagoon_types::KvRun;
use std::ops::Range;

impl Vmm {
    /// Takes an idle row as a lent row and returns its number.
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn open_lent_row(&mut self) -> Result<usize, VmmError> {
        let first = self.config.batch_max as usize;
        let row = (first..self.rows.len()).find(|row| self.rows[*row].used == Use::Idle).ok_or(VmmError::NoRow)?;
        self.rows[row].used = Use::Lent;
        Ok(row)
    }

    /// Appends `blocks` rBlocks to a lent row, for the tokens from position `first_pos` on. Reclaims kept stripes if no free
    /// one is left.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`], [`VmmError::TooLong`] (compacting may help). State is unchanged then.
    pub fn lend(&mut self, row: usize, blocks: u32, first_pos: u32) -> Result<Plan, VmmError> {
        assert_eq!(self.rows[row].used, Use::Lent, "row {row} has no lent row");
        let (per, stripes) = (self.layout.block_tokens(), self.layout.block_stripes());
        let has = u32::try_from(self.rows[row].lent_rows.len()).expect("rBlocks fit u32");
        let mut plan = self.begin_with(row);
        let tokens = (has + blocks).saturating_mul(per);
        let wanted = (blocks * stripes) as usize;
        if let Err(error) = self.ensure_range(&mut plan, row, tokens).and_then(|()| self.ensure_free(&mut plan, wanted))
        {
            self.undo(plan);
            return Err(error);
        }
        let filled = self.fill(&mut plan, row, (has + blocks) * stripes);
        assert_eq!(filled as usize, wanted, "recalled places are vacant, so that only new ones are filled");
        self.rows[row].lent_rows.extend((0..blocks).map(|block| Some(first_pos + block * per)));
        self.counters.lent += u64::from(blocks);
        Ok(plan)
    }

    /// Recalls the lent row's rBlocks `blocks` (counted from its first, recalled ones included) and frees their memory.
    /// rBlocks that are recalled already are skipped.
    ///
    /// # Panics
    /// If `blocks` exceeds the lent row.
    pub fn recall(&mut self, row: usize, blocks: Range<u32>) -> Plan {
        assert_eq!(self.rows[row].used, Use::Lent, "row {row} has no lent row");
        let mut plan = self.begin_with(row);
        for block in blocks {
            if self.rows[row].lent_rows[block as usize].take().is_none() {
                continue;
            }
            for at in self.stripes_of(block..block + 1) {
                self.unmap_at(&mut plan, row, at);
                self.rows[row].vacant.insert(at);
            }
            self.counters.recalled += 1;
        }
        plan
    }

    /// Compacts the lent row's rBlocks over the recalled ones: afterwards they count from 0 without gaps.
    pub fn compact(&mut self, row: usize) -> Plan {
        assert_eq!(self.rows[row].used, Use::Lent, "row {row} has no lent row");
        let mut plan = self.begin_with(row);
        let mut to = 0;
        for from in 0..u32::try_from(self.rows[row].lent_rows.len()).expect("rBlocks fit u32") {
            let Some(first_pos) = self.rows[row].lent_rows[from as usize] else { continue };
            if from != to {
                for (source, target) in self.stripes_of(from..from + 1).zip(self.stripes_of(to..to + 1)) {
                    let stripe = self.places.at(self.place_of(row, source)).stripe();
                    // At the new place first, so that the stripe is mapped somewhere at any time.
                    self.map_at(&mut plan, row, target, stripe.expect("a lent row's block is mapped"));
                    self.unmap_at(&mut plan, row, source);
                    self.rows[row].vacant.remove(&target);
                    self.rows[row].vacant.insert(source);
                }
                self.rows[row].lent_rows[from as usize] = None;
                self.rows[row].lent_rows[to as usize] = Some(first_pos);
                self.counters.compacted += 1;
            }
            to += 1;
        }
        self.rows[row].lent_rows.truncate(to as usize);
        let high = to * self.layout.block_stripes();
        self.rows[row].high = high;
        self.rows[row].vacant.retain(|at| *at < high);
        plan
    }

    /// Closes a lent row and frees its memory and its row.
    pub fn close_lent_row(&mut self, row: usize) -> Plan {
        let blocks = u32::try_from(self.rows[row].lent_rows.len()).expect("rBlocks fit u32");
        let plan = self.recall(row, 0..blocks);
        let entry = &mut self.rows[row];
        (entry.used, entry.high) = (Use::Idle, 0);
        entry.lent_rows.clear();
        entry.vacant.clear();
        plan
    }

    /// Runs of a lent row's rBlocks, merged where consecutive in memory and in position.
    #[must_use]
    pub fn lent_row_runs(&self, row: usize) -> Vec<KvRun> {
        let per = self.layout.block_tokens();
        let mut runs: Vec<KvRun> = Vec::new();
        for (block, first_pos) in (0..).zip(&self.rows[row].lent_rows) {
            let Some(first_pos) = *first_pos else { continue };
            let base = self.slot0(row) + block * per;
            match runs.last_mut() {
                Some(run) if run.base + run.len == base && run.first_pos + run.len == first_pos => run.len += per,
                _ => runs.push(KvRun { base, len: per, first_pos }),
            }
        }
        runs
    }
}
