//! Address rows of requests: vAttention's interface (Table 4) over the places, with growth, shared prefixes and vacated
//! blocks.

use super::VmmError;
use super::places::Place;
use super::row::Use;
use super::state::{Command, Plan, Stripe, Vmm};
use lagoon_types::KvRun;
use std::ops::Range;

impl Vmm {
    /// First slot of an address row: token `t` is at slot `slot0 + t`. 0 before the row's first mapping.
    #[must_use]
    pub fn slot0(&self, row: usize) -> u32 {
        self.rows[row].range.start * self.layout.block_tokens()
    }

    /// Allocates an address row for a request: the prepared one, else the idle row with most stripes mapped.
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn alloc_reqid(&mut self) -> Result<usize, VmmError> {
        let row = self.next.take().or_else(|| self.best_idle()).ok_or(VmmError::NoRow)?;
        assert_eq!(self.rows[row].used, Use::Idle, "the next row is idle");
        // Holds the row's kept places; this maps nothing, so the plan cannot fail.
        let mut plan = self.begin();
        for at in 0..self.rows[row].high {
            self.places.hold(&mut plan, self.place_of(row, at));
        }
        let entry = &mut self.rows[row];
        entry.used = Use::Request;
        entry.tokens = 0;
        self.next = self.best_idle();
        Ok(row)
    }

    /// Frees a request's address row. Its exclusive stripes stay mapped for the next request; shared ones are unmapped.
    ///
    /// # Panics
    /// If the row has no request.
    pub fn free_reqid(&mut self, row: usize) -> Plan {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        let mut plan = self.begin_with(row);
        self.release_row(&mut plan, row);
        let entry = &mut self.rows[row];
        (entry.used, entry.tokens, entry.shared_tokens) = (Use::Idle, 0, 0);
        entry.vacant.clear();
        plan.next = Some(self.next);
        self.next = self.best_idle();
        plan
    }

    /// Maps physical memory for the first `lengths[row]` tokens of every active row, all or nothing; the length of rows
    /// without a request is 0. Reclaims kept stripes if no free one is left.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`] (preempt a request), [`VmmError::TooLong`]. State is unchanged then.
    pub fn step(&mut self, lengths: &[u32]) -> Result<Plan, VmmError> {
        assert_eq!(lengths.len(), self.config.batch_max as usize, "a length for every row");
        let before = self.counters;
        let mut plan = self.begin();
        for (row, tokens) in lengths.iter().enumerate() {
            if *tokens == 0 {
                continue;
            }
            assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
            let first = self.rows[row].tokens == 0;
            let found = u64::from(self.mapped(row).min(self.layout.stripes_for(*tokens)));
            if let Err(error) = self.extend(&mut plan, row, *tokens) {
                self.undo(plan);
                self.counters.refused += 1;
                return Err(error);
            }
            if first && self.rows[row].shared_tokens == 0 {
                self.counters.reused += found;
            }
        }
        for (row, tokens) in lengths.iter().enumerate().filter(|(_, tokens)| **tokens > 0) {
            if self.rows[row].tokens != *tokens {
                self.keep(&mut plan, row);
                self.rows[row].tokens = *tokens;
            }
        }
        let maps = plan.commands.iter().filter(|c| matches!(c, Command::Map { .. })).count() as u64;
        let moved = self.counters.moved - before.moved;
        self.counters.in_step += maps - moved;
        Ok(plan)
    }

    /// Maps the whole rBlocks of `from`'s first `tokens` tokens at the front of `to` as well. `to` is a request without
    /// tokens. Returns the number of tokens that `to` need not compute.
    ///
    /// # Errors
    /// [`VmmError::TooLong`], as [`Vmm::step`].
    ///
    /// # Panics
    /// If `from` has fewer tokens, or `to` has tokens.
    pub fn share(&mut self, from: usize, to: usize, tokens: u32) -> Result<(Plan, u32), VmmError> {
        let (source, target) = (&self.rows[from], &self.rows[to]);
        assert!(from != to && source.used == Use::Request && target.used == Use::Request, "two requests share");
        assert!(tokens <= source.tokens && target.tokens == 0, "only written tokens are shared, with an empty row");
        let blocks = tokens / self.layout.block_tokens();
        let stripes = blocks * self.layout.block_stripes();
        let front: Option<Vec<Stripe>> =
            (0..stripes).map(|at| self.places.at(self.place_of(from, at)).stripe()).collect();
        let Some(front) = front.filter(|f| !f.is_empty()) else { return Ok((self.begin(), 0)) };
        let tokens = blocks * self.layout.block_tokens();
        let mut plan = self.begin_with(from);
        self.keep(&mut plan, to);
        if let Err(error) = self.ensure_range(&mut plan, to, tokens) {
            self.undo(plan);
            return Err(error);
        }
        for (at, stripe) in (0..).zip(front) {
            let place = self.place_of(to, at);
            if self.places.at(place) != Place::Empty {
                self.places.unmap(&mut plan, place);
            }
            self.map_at(&mut plan, to, at, stripe);
            self.counters.shared += 1;
        }
        (self.rows[to].shared_tokens, self.rows[to].tokens) = (tokens, tokens);
        self.rows[from].shared_tokens = self.rows[from].shared_tokens.max(tokens);
        Ok((plan, tokens))
    }

    /// Unmaps rBlocks of a request that are no longer local: moved away, or behind its window. Growth does not refill them.
    ///
    /// # Panics
    /// If the row has no request, or the blocks are not full yet.
    pub fn vacate(&mut self, row: usize, blocks: Range<u32>) -> Plan {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        assert!(blocks.end * self.layout.block_tokens() <= self.rows[row].tokens, "only full blocks move");
        let mut plan = self.begin_with(row);
        for at in self.stripes_of(blocks) {
            self.unmap_at(&mut plan, row, at);
            self.rows[row].vacant.insert(at);
        }
        plan
    }

    /// Maps memory at vacated rBlocks again; the caller then fills them.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`]; state is unchanged then.
    pub fn restore(&mut self, row: usize, blocks: Range<u32>) -> Result<Plan, VmmError> {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        let mut plan = self.begin_with(row);
        let vacant: Vec<u32> = self.stripes_of(blocks).filter(|at| self.rows[row].vacant.contains(at)).collect();
        if let Err(error) = self.ensure_free(&mut plan, vacant.len()) {
            self.undo(plan);
            return Err(error);
        }
        for at in vacant {
            let stripe = self.places.next_free().expect("made sure of");
            self.rows[row].vacant.remove(&at);
            self.map_at(&mut plan, row, at, stripe);
        }
        Ok(plan)
    }

    /// Runs of a request's first `tokens` tokens: one, unless rBlocks were vacated.
    #[must_use]
    pub fn runs(&self, row: usize, tokens: u32) -> Vec<KvRun> {
        let (mut runs, slot0): (Vec<KvRun>, u32) = (Vec::new(), self.slot0(row));
        let (per, stripes) = (self.layout.block_tokens(), self.layout.block_stripes());
        for block in 0..self.layout.blocks_for(tokens) {
            let first_pos = block * per;
            let len = per.min(tokens - first_pos);
            if self.rows[row].vacant.contains(&(block * stripes)) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.first_pos + run.len == first_pos => run.len += len,
                _ => runs.push(KvRun { base: slot0 + first_pos, len, first_pos }),
            }
        }
        runs
    }

    fn idle(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.config.batch_max as usize).filter(|row| self.rows[*row].used == Use::Idle)
    }

    /// The idle row with most stripes mapped, the first of equals.
    fn best_idle(&self) -> Option<usize> {
        self.idle().max_by_key(|row| (self.mapped(*row), std::cmp::Reverse(*row)))
    }

    /// Stripes that are mapped in a row.
    fn mapped(&self, row: usize) -> u32 {
        let count =
            (0..self.rows[row].high).filter(|at| self.places.at(self.place_of(row, *at)) != Place::Empty).count();
        u32::try_from(count).expect("places fit u32")
    }

    /// Stripes that the row's range holds.
    pub(super) fn range_stripes(&self, row: usize) -> u32 {
        let range = &self.rows[row].range;
        (range.end - range.start) * self.layout.block_stripes()
    }

    /// An empty plan that saved this row's state.
    pub(super) fn begin_with(&self, row: usize) -> Plan {
        let mut plan = self.begin();
        self.keep(&mut plan, row);
        plan
    }

    /// Saves the row's state in the plan.
    pub(super) fn keep(&self, plan: &mut Plan, row: usize) {
        plan.rows.entry(row).or_insert_with(|| self.rows[row].clone());
    }

    /// Maps the row's first `tokens` tokens, reclaiming kept stripes of other places.
    fn extend(&mut self, plan: &mut Plan, row: usize, tokens: u32) -> Result<(), VmmError> {
        let stripes = self.layout.stripes_for(tokens);
        let missing = if stripes > self.range_stripes(row) { usize::MAX } else { self.empty_below(row, stripes).len() };
        if missing == 0 {
            return Ok(());
        }
        self.ensure_range(plan, row, tokens)?;
        let missing = self.empty_below(row, stripes).len();
        self.ensure_free(plan, missing)?;
        self.fill(plan, row, stripes);
        Ok(())
    }

    /// Empty places to fill among the row's first `stripes`.
    pub(super) fn empty_below(&self, row: usize, stripes: u32) -> Vec<u32> {
        let entry = &self.rows[row];
        let is_empty = |at: &u32| self.places.at(self.place_of(row, *at)) == Place::Empty;
        (0..stripes).filter(|at| !entry.vacant.contains(at) && is_empty(at)).collect()
    }

    /// Fills empty places among the row's first `stripes` with free stripes while there are any. Returns how many.
    pub(super) fn fill(&mut self, plan: &mut Plan, row: usize, stripes: u32) -> u32 {
        let mut filled = 0;
        for at in self.empty_below(row, stripes) {
            let Some(stripe) = self.places.next_free() else { break };
            self.keep(plan, row);
            self.map_at(plan, row, at, stripe);
            filled += 1;
        }
        filled
    }

    pub(super) fn map_at(&mut self, plan: &mut Plan, row: usize, at: u32, stripe: Stripe) {
        self.places.map(plan, self.place_of(row, at), stripe);
        self.rows[row].high = self.rows[row].high.max(at + 1);
    }

    /// Unmaps a place of a row, if it is mapped.
    pub(super) fn unmap_at(&mut self, plan: &mut Plan, row: usize, at: u32) {
        if self.places.at(self.place_of(row, at)) != Place::Empty {
            self.places.unmap(plan, self.place_of(row, at));
        }
    }

    /// Releases all places of a row, the last first, so that its front is reclaimed last.
    pub(super) fn release_row(&mut self, plan: &mut Plan, row: usize) {
        for at in (0..self.rows[row].high).rev() {
            self.places.release(plan, self.place_of(row, at));
        }
    }

    pub(super) fn place_of(&self, row: usize, at: u32) -> u32 {
        self.rows[row].range.start * self.layout.block_stripes() + at
    }

    /// The places of rBlocks of a row, from its first.
    pub(super) fn stripes_of(&self, blocks: Range<u32>) -> Range<u32> {
        blocks.start * self.layout.block_stripes()..blocks.end * self.layout.block_stripes()
    }

    /// Grows the row's range to `tokens` tokens; its mapped stripes move along if the range moves.
    pub(super) fn ensure_range(&mut self, plan: &mut Plan, row: usize, tokens: u32) -> Result<(), VmmError> {
        let needed = self.layout.blocks_for(tokens);
        let has = self.rows[row].range.len();
        if needed as usize <= has {
            return Ok(());
        }
        let most =
            if row < self.config.batch_max as usize { self.most_blocks } else { self.config.lent_row_blocks_max };
        let too_long = VmmError::TooLong { tokens, max: most.saturating_mul(self.layout.block_tokens()) };
        if needed > most {
            return Err(too_long);
        }
        let doubled = u32::try_from(2 * has).unwrap_or(u32::MAX);
        let generous = needed.max(self.first_blocks).max(doubled).min(most);
        if self.place(plan, row, generous) || self.place(plan, row, needed) {
            return Ok(());
        }
        // Idle rows need no addresses: their kept stripes are unmapped with them.
        let idle: Vec<usize> = self.idle().filter(|idle| *idle != row).collect();
        for idle in idle {
            self.keep(plan, idle);
            for at in (0..self.rows[idle].high).rev() {
                self.counters.reclaimed += u64::from(self.places.at(self.place_of(idle, at)) != Place::Empty);
                self.unmap_at(plan, idle, at);
            }
            self.rows[idle].high = 0;
            let range = std::mem::replace(&mut self.rows[idle].range, 0..0);
            self.give_range(plan, range);
            if self.place(plan, row, needed) {
                return Ok(());
            }
        }
        Err(too_long)
    }

    /// Moves the row to a free range of `blocks` rBlocks, if there is one.
    pub(super) fn place(&mut self, plan: &mut Plan, row: usize, blocks: u32) -> bool {
        let Some((start, len)) = self.addresses.best(blocks) else { return false };
        if len < blocks || blocks == 0 {
            return false;
        }
        self.keep(plan, row);
        assert_eq!(self.addresses.take_at(start, blocks), blocks, "the extent holds them");
        let range = start..start + blocks;
        plan.ranges.push((true, range.clone()));
        let was: Vec<(u32, Place)> =
            (0..self.rows[row].high).map(|at| (at, self.places.at(self.place_of(row, at)))).collect();
        let (old, old_first) = (self.rows[row].range.clone(), self.place_of(row, 0));
        self.rows[row].range = range;
        // At the new place first, so that every stripe is mapped somewhere at any time.
        for (at, state) in &was {
            state.stripe().into_iter().for_each(|stripe| self.places.map(plan, self.place_of(row, *at), stripe));
        }
        for (at, state) in was.iter().filter(|(_, state)| *state != Place::Empty) {
            self.places.unmap(plan, old_first + at);
            self.counters.moved += 1;
            if matches!(state, Place::Kept(..)) {
                self.places.release(plan, self.place_of(row, *at));
            }
        }
        self.give_range(plan, old);
        true
    }

    fn give_range(&mut self, plan: &mut Plan, range: Range<u32>) {
        if !range.is_empty() {
            range.clone().for_each(|block| self.addresses.give(block));
            plan.ranges.push((false, range));
        }
    }
}
