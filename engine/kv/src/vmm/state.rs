//! [`Vmm`]: requests' rows, their growth, and what happens ahead of time.

use super::row::{Row, Slot, Use};
use super::{VmmError, VmmLayout};
use crate::extents::Extents;
use lagoon_types::KvRun;
use std::collections::BTreeMap;
use std::ops::Range;

/// Physical page groups that are mapped together, one in every tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stripe(pub u32);

/// What to do in every tensor; `place` counts page groups from the tensor's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Map { stripe: Stripe, place: u32 },
    Unmap { stripe: Stripe, place: u32 },
}

/// Commands to carry out in order, and what is needed to take them back.
#[derive(Debug)]
#[must_use = "the commands are to be carried out, or the plan undone"]
pub struct Plan {
    commands: Vec<Command>,
    rows: BTreeMap<usize, Row>,
    /// Ranges that were taken (true) or given back, in order.
    ranges: Vec<(bool, Range<u32>)>,
    next: Option<Option<usize>>,
    counters: VmmCounters,
}

impl Plan {
    #[must_use]
    pub fn commands(&self) -> &[Command] {
        &self.commands
    }

    /// Whether something is unmapped: kernels in flight must have ended first.
    #[must_use]
    pub fn unmaps(&self) -> bool {
        self.commands.iter().any(|c| matches!(c, Command::Unmap { .. }))
    }
}

/// How much there is, and when to act ahead of need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmConfig {
    /// Requests that run at once (B).
    pub batch_max: u32,
    /// Tokens of the longest request (L).
    pub context_max: u32,
    /// Rows for guests, and the rBlocks of the largest.
    pub guests_max: u32,
    pub guest_blocks_max: u32,
    /// Physical stripes.
    pub stripes: u32,
    /// Bytes of device addresses for all tensors together.
    pub address_bytes_max: u64,
    /// Where addresses do not suffice for every row at full length: whether rows begin short and grow by being mapped
    /// elsewhere, rather than the whole being refused.
    pub grow: bool,
    /// Stripes that are kept mapped in the row that the next request gets.
    pub eager_stripes: u32,
    /// Cached stripes are reclaimed when fewer than this many are free.
    pub reclaim_below: u32,
}

/// What has happened since the beginning, in stripes where it says nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmCounters {
    /// Mapped while a step waited.
    pub in_step: u64,
    /// Mapped one iteration ahead.
    pub ahead: u64,
    /// Mapped for the next request id before it was asked for.
    pub eager: u64,
    /// Found mapped by a request that had just come: what deferred reclamation saved.
    pub reused: u64,
    /// Cached, and unmapped for want of free ones.
    pub reclaimed: u64,
    /// Mapped a second time for a shared prefix.
    pub shared: u64,
    /// Mapped elsewhere because their row outgrew its range.
    pub moved: u64,
    /// rBlocks lent, recalled, and moved together.
    pub lent: u64,
    pub recalled: u64,
    pub compacted: u64,
    /// Steps that found no memory.
    pub refused: u64,
}

/// The accounting of one instance's KV memory. See the module for invariants.
#[derive(Debug)]
pub struct Vmm {
    pub(super) layout: VmmLayout,
    pub(super) config: VmmConfig,
    pub(super) rows: Vec<Row>,
    /// Free rBlocks of addresses.
    addresses: Extents,
    /// rBlocks of addresses in all.
    address_blocks: u32,
    /// rBlocks of a request's range at first, and at most.
    first_blocks: u32,
    most_blocks: u32,
    /// Places where each stripe is mapped; 0 is free.
    refs: Vec<u32>,
    free: Vec<Stripe>,
    /// Idle row that the next request gets.
    next: Option<usize>,
    pub(super) counters: VmmCounters,
}

impl Vmm {
    /// Nothing is mapped at first; the caller has the stripes.
    ///
    /// # Errors
    /// [`VmmError::Addresses`] where the addresses do not suffice and rows may not grow, or not even for short rows.
    pub fn new(layout: VmmLayout, config: VmmConfig) -> Result<Self, VmmError> {
        let block_bytes = u64::from(layout.block_stripes()) * layout.stripe_bytes();
        // Slots are numbered by u32, and the last number means none.
        let numbered = u64::from((u32::MAX - 1) / layout.block_tokens());
        let available = (config.address_bytes_max / block_bytes).min(numbered);
        let most = layout.blocks_for(config.context_max).max(1);
        let guests = u64::from(config.guests_max) * u64::from(config.guest_blocks_max);
        let needed = u64::from(config.batch_max) * u64::from(most) + guests;
        let short = |available: u64| {
            // Half of what is left goes to the rows' first ranges, the rest is for those that grow.
            let each = available.saturating_sub(guests) / 2 / u64::from(config.batch_max.max(1));
            u32::try_from(each).unwrap_or(u32::MAX).min(most)
        };
        let first = if needed <= available { most } else { short(available) };
        if needed > available && (!config.grow || first == 0) {
            let bytes = |blocks: u64| blocks.saturating_mul(block_bytes);
            return Err(VmmError::Addresses { needed: bytes(needed), available: bytes(available) });
        }
        let blocks = u32::try_from(needed.min(available)).expect("bounded by what u32 numbers");
        // Guests have their ranges for good, behind those of the requests.
        let mut rows = vec![Row::new(); config.batch_max as usize];
        let mut addresses = Extents::new(blocks);
        for guest in 1..=config.guests_max {
            let start = blocks - guest * config.guest_blocks_max;
            addresses.take_at(start, config.guest_blocks_max);
            rows.push(Row { range: start..start + config.guest_blocks_max, ..Row::new() });
        }
        Ok(Self {
            layout,
            config,
            rows,
            addresses,
            address_blocks: blocks,
            first_blocks: first,
            most_blocks: most,
            refs: vec![0; config.stripes as usize],
            free: (0..config.stripes).rev().map(Stripe).collect(),
            next: None,
            counters: VmmCounters::default(),
        })
    }

    #[must_use]
    pub fn layout(&self) -> &VmmLayout {
        &self.layout
    }

    #[must_use]
    pub fn config(&self) -> &VmmConfig {
        &self.config
    }

    #[must_use]
    pub fn counters(&self) -> VmmCounters {
        self.counters
    }

    /// Bytes of addresses to reserve in every tensor.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        u64::from(self.address_blocks) * u64::from(self.layout.block_stripes()) * self.layout.shape().page_group_bytes
    }

    /// Stripes that are mapped nowhere.
    #[must_use]
    pub fn free_stripes(&self) -> u32 {
        u32::try_from(self.free.len()).expect("stripes fit u32")
    }

    /// Stripes that only idle rows hold.
    #[must_use]
    pub fn cached_stripes(&self) -> u32 {
        self.idle().map(|row| self.rows[row].mapped()).sum()
    }

    /// First slot of a row: a run of its token `t` has the base `slot0 + t`. 0 while nothing was ever mapped.
    #[must_use]
    pub fn slot0(&self, row: usize) -> u32 {
        self.rows[row].range.start * self.layout.block_tokens()
    }

    /// Gives a request its row, marked active: the one prepared for it, else the idle row with most mapped.
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn alloc_reqid(&mut self) -> Result<usize, VmmError> {
        let row = self.next.take().or_else(|| self.best_idle()).ok_or(VmmError::NoRow)?;
        let entry = &mut self.rows[row];
        assert_eq!(entry.used, Use::Idle, "the next row is idle");
        entry.used = Use::Request;
        entry.tokens = 0;
        self.next = self.best_idle();
        Ok(row)
    }

    /// Takes a request's row back. What it alone has mapped stays, for the next request; what it shares is unmapped.
    ///
    /// # Panics
    /// If the row has no request.
    pub fn free_reqid(&mut self, row: usize) -> Plan {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        let mut plan = self.begin_with(row);
        let shared: Vec<usize> =
            self.rows[row].stripes().filter(|(_, s)| self.refs[s.0 as usize] > 1).map(|(at, _)| at).collect();
        shared.into_iter().for_each(|at| self.unmap(&mut plan, row, at, Slot::Empty));
        let entry = &mut self.rows[row];
        entry.used = Use::Idle;
        entry.tokens = 0;
        entry.shared_tokens = 0;
        entry.slots.iter_mut().filter(|slot| **slot == Slot::Vacant).for_each(|slot| *slot = Slot::Empty);
        while entry.slots.last() == Some(&Slot::Empty) {
            entry.slots.pop();
        }
        plan.next = Some(self.next);
        self.next = self.best_idle();
        plan
    }

    /// Makes physical memory lie behind the first `lengths[row]` tokens of every active row, all or nothing. Rows of no
    /// request are 0. Cached stripes serve where no free one is left.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`] (preempt somebody), [`VmmError::TooLong`]. Nothing has changed then.
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
            let cached = u64::from(self.rows[row].mapped().min(self.layout.stripes_for(*tokens)));
            if let Err(error) = self.extend(&mut plan, row, *tokens, true) {
                self.undo(plan);
                self.counters.refused += 1;
                return Err(error);
            }
            if first && self.rows[row].shared_tokens == 0 {
                self.counters.reused += cached;
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

    /// What can be done while an iteration runs (§6.1): maps what every request needs to grow by one token, keeps the
    /// next request's row prepared, and, if it may `reclaim`, unmaps cached stripes while few are free. Never fails and
    /// takes nothing from anybody: what cannot be had is left to the next step. Unmaps nothing else.
    pub fn ahead(&mut self, reclaim: bool) -> Plan {
        let mut plan = self.begin();
        for row in 0..self.config.batch_max as usize {
            let entry = &self.rows[row];
            if entry.used != Use::Request || entry.tokens == 0 {
                continue;
            }
            let stripes = self.layout.stripes_for(entry.tokens + 1);
            if stripes <= self.range_stripes(row) {
                self.counters.ahead += u64::from(self.fill(&mut plan, row, stripes));
            }
        }
        if reclaim && self.free_stripes() < self.config.reclaim_below {
            self.reclaim(&mut plan, self.config.reclaim_below);
        }
        if let Some(row) = self.next
            && (!self.rows[row].range.is_empty() || self.place(&mut plan, row, self.first_blocks))
        {
            let stripes = self.config.eager_stripes.min(self.range_stripes(row));
            // Not below what makes the next call reclaim it again.
            let spare = self.free_stripes().saturating_sub(self.config.reclaim_below);
            let mapped = self.rows[row].empty_below(stripes).count();
            if mapped <= spare as usize {
                self.counters.eager += u64::from(self.fill(&mut plan, row, stripes));
            }
        }
        plan
    }

    /// Maps the front of `from`'s memory in `to`, too: as many whole rBlocks of the first `tokens` tokens as there are.
    /// `to` is a request that has not begun. Returns the tokens that it need not compute.
    ///
    /// # Errors
    /// [`VmmError::TooLong`], as [`Vmm::step`].
    ///
    /// # Panics
    /// If `from` has not got those tokens, or `to` has begun.
    pub fn share(&mut self, from: usize, to: usize, tokens: u32) -> Result<(Plan, u32), VmmError> {
        let (source, target) = (&self.rows[from], &self.rows[to]);
        assert!(from != to && source.used == Use::Request && target.used == Use::Request, "two requests share");
        assert!(tokens <= source.tokens && target.tokens == 0, "what is shared is written, and nothing of ours is");
        let blocks = tokens / self.layout.block_tokens();
        let stripes = (blocks * self.layout.block_stripes()) as usize;
        let front: Option<Vec<Stripe>> = (0..stripes)
            .map(|at| match source.slots.get(at) {
                Some(Slot::Mapped(stripe)) => Some(*stripe),
                _ => None,
            })
            .collect();
        let Some(front) = front.filter(|f| !f.is_empty()) else { return Ok((self.begin(), 0)) };
        let tokens = blocks * self.layout.block_tokens();
        let mut plan = self.begin_with(from);
        self.keep(&mut plan, to);
        if let Err(error) = self.ensure_range(&mut plan, to, tokens) {
            self.undo(plan);
            return Err(error);
        }
        for (at, stripe) in front.into_iter().enumerate() {
            if matches!(self.rows[to].slots.get(at), Some(Slot::Mapped(_))) {
                self.unmap(&mut plan, to, at, Slot::Empty);
            }
            self.map(&mut plan, to, at, stripe);
            self.counters.shared += 1;
        }
        (self.rows[to].shared_tokens, self.rows[to].tokens) = (tokens, tokens);
        self.rows[from].shared_tokens = self.rows[from].shared_tokens.max(tokens);
        Ok((plan, tokens))
    }

    /// Unmaps rBlocks of a request that it does not hold here any more: lent, or behind its window. Growth leaves the
    /// hole.
    ///
    /// # Panics
    /// If the row has no request, or the blocks are not full yet.
    pub fn vacate(&mut self, row: usize, blocks: Range<u32>) -> Plan {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        assert!(blocks.end * self.layout.block_tokens() <= self.rows[row].tokens, "only full blocks move");
        let mut plan = self.begin_with(row);
        let stripes = self.layout.block_stripes();
        for at in (blocks.start * stripes) as usize..(blocks.end * stripes) as usize {
            match self.rows[row].slots.get(at) {
                Some(Slot::Mapped(_)) => self.unmap(&mut plan, row, at, Slot::Vacant),
                _ => self.rows[row].set(at, Slot::Vacant),
            }
        }
        plan
    }

    /// Maps memory behind vacated rBlocks again, which the caller then fills.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`]; nothing has changed then.
    pub fn restore(&mut self, row: usize, blocks: Range<u32>) -> Result<Plan, VmmError> {
        assert_eq!(self.rows[row].used, Use::Request, "row {row} has no request");
        let mut plan = self.begin_with(row);
        let stripes = self.layout.block_stripes();
        let vacant: Vec<usize> = ((blocks.start * stripes) as usize..(blocks.end * stripes) as usize)
            .filter(|at| self.rows[row].slots.get(*at) == Some(&Slot::Vacant))
            .collect();
        if let Err(error) = self.ensure_free(&mut plan, vacant.len()) {
            self.undo(plan);
            return Err(error);
        }
        for at in vacant {
            let stripe = *self.free.last().expect("made sure of");
            self.rows[row].set(at, Slot::Empty);
            self.map(&mut plan, row, at, stripe);
        }
        Ok(plan)
    }

    /// The runs of a request's first `tokens` tokens: one, unless rBlocks were vacated.
    #[must_use]
    pub fn runs(&self, row: usize, tokens: u32) -> Vec<KvRun> {
        let (mut runs, slot0): (Vec<KvRun>, u32) = (Vec::new(), self.slot0(row));
        let (per, stripes) = (self.layout.block_tokens(), self.layout.block_stripes());
        for block in 0..self.layout.blocks_for(tokens) {
            let first_pos = block * per;
            let len = per.min(tokens - first_pos);
            if self.rows[row].slots.get((block * stripes) as usize) == Some(&Slot::Vacant) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.first_pos + run.len == first_pos => run.len += len,
                _ => runs.push(KvRun { base: slot0 + first_pos, len, first_pos }),
            }
        }
        runs
    }

    /// Takes a plan back whose commands could not be carried out, and were undone as far as they were.
    pub fn undo(&mut self, plan: Plan) {
        for command in plan.commands.into_iter().rev() {
            match command {
                Command::Map { stripe, .. } => {
                    let refs = &mut self.refs[stripe.0 as usize];
                    *refs -= 1;
                    if *refs == 0 {
                        self.free.push(stripe);
                    }
                }
                Command::Unmap { stripe, .. } => {
                    let refs = &mut self.refs[stripe.0 as usize];
                    if *refs == 0 {
                        assert_eq!(self.free.pop(), Some(stripe), "plans are undone in the reverse order");
                    }
                    *refs += 1;
                }
            }
        }
        for (taken, range) in plan.ranges.into_iter().rev() {
            if taken {
                range.for_each(|block| self.addresses.give(block));
            } else {
                let len = range.end - range.start;
                assert_eq!(self.addresses.take_at(range.start, len), len, "a range that was given back is free");
            }
        }
        for (row, before) in plan.rows {
            self.rows[row] = before;
        }
        if let Some(next) = plan.next {
            self.next = next;
        }
        self.counters = plan.counters;
    }

    /// Recounts everything from scratch and compares it with what is kept. Linear; for tests.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self) {
        let mut refs = vec![0; self.refs.len()];
        let mut addresses: Vec<u32> = self.addresses.iter().collect();
        for row in &self.rows {
            addresses.extend(row.range.clone());
            let places = (row.range.end - row.range.start) * self.layout.block_stripes();
            assert!(row.slots.len() <= places as usize, "mapped beyond the row's range");
            row.stripes().for_each(|(_, s)| refs[s.0 as usize] += 1);
        }
        addresses.sort_unstable();
        assert!(addresses.into_iter().eq(0..self.address_blocks), "addresses were lost or given twice");
        assert_eq!(refs, self.refs, "stripes are mapped as often as is counted");
        let mut free: Vec<u32> = self.free.iter().map(|s| s.0).collect();
        free.sort_unstable();
        let want = (0..).zip(&refs).filter(|(_, refs)| **refs == 0).map(|(at, _)| at);
        assert!(free.into_iter().eq(want), "the free stripes are those mapped nowhere");
        if let Some(next) = self.next {
            assert_eq!(self.rows[next].used, Use::Idle, "the next row is idle");
        }
        for row in self.idle() {
            assert!(
                self.rows[row].stripes().all(|(_, s)| self.refs[s.0 as usize] == 1),
                "cached stripes are not shared"
            );
        }
    }

    fn idle(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.config.batch_max as usize).filter(|row| self.rows[*row].used == Use::Idle)
    }

    /// The idle row with most mapped, the first of equals.
    fn best_idle(&self) -> Option<usize> {
        self.idle().max_by_key(|row| (self.rows[*row].mapped(), std::cmp::Reverse(*row)))
    }

    /// Stripes that the row's range holds.
    fn range_stripes(&self, row: usize) -> u32 {
        let range = &self.rows[row].range;
        (range.end - range.start) * self.layout.block_stripes()
    }

    fn begin(&self) -> Plan {
        let counters = self.counters;
        Plan { commands: Vec::new(), rows: BTreeMap::new(), ranges: Vec::new(), next: None, counters }
    }

    /// A plan that changes this row.
    pub(super) fn begin_with(&self, row: usize) -> Plan {
        let mut plan = self.begin();
        self.keep(&mut plan, row);
        plan
    }

    /// Keeps the row as it is for [`Vmm::undo`], if it is not kept yet.
    fn keep(&self, plan: &mut Plan, row: usize) {
        plan.rows.entry(row).or_insert_with(|| self.rows[row].clone());
    }

    /// Makes `tokens` tokens of the row mapped, taking what is cached elsewhere if it may.
    fn extend(&mut self, plan: &mut Plan, row: usize, tokens: u32, reclaim: bool) -> Result<(), VmmError> {
        let stripes = self.layout.stripes_for(tokens);
        let missing = self.rows[row].empty_below(stripes).count();
        if missing == 0 {
            return Ok(());
        }
        self.ensure_range(plan, row, tokens)?;
        if reclaim {
            self.ensure_free(plan, missing)?;
        }
        self.fill(plan, row, stripes);
        Ok(())
    }

    /// Fills empty places among the row's first `stripes` from the free ones, as far as they go. Returns how many.
    pub(super) fn fill(&mut self, plan: &mut Plan, row: usize, stripes: u32) -> u32 {
        let places: Vec<usize> = self.rows[row].empty_below(stripes).collect();
        let mut filled = 0;
        for at in places {
            let Some(&stripe) = self.free.last() else { break };
            self.keep(plan, row);
            self.map(plan, row, at, stripe);
            filled += 1;
        }
        filled
    }

    /// Makes `wanted` stripes free, by unmapping cached ones if need be.
    pub(super) fn ensure_free(&mut self, plan: &mut Plan, wanted: usize) -> Result<(), VmmError> {
        let available = self.free_stripes() + self.cached_stripes();
        if wanted > available as usize {
            let groups = |stripes: u64| stripes * u64::from(self.layout.tensors());
            return Err(VmmError::OutOfMemory { needed: groups(wanted as u64), available: groups(available.into()) });
        }
        self.reclaim(plan, u32::try_from(wanted).expect("at most what is available"));
        Ok(())
    }

    /// Unmaps cached stripes until `wanted` are free, or none is cached; the next request's row comes last.
    fn reclaim(&mut self, plan: &mut Plan, wanted: u32) {
        let mut rows: Vec<usize> = self.idle().collect();
        rows.sort_by_key(|row| (self.next == Some(*row), *row));
        for row in rows {
            while self.free_stripes() < wanted {
                let Some((at, _)) = self.rows[row].stripes().last() else { break };
                self.keep(plan, row);
                self.unmap(plan, row, at, Slot::Empty);
                self.counters.reclaimed += 1;
            }
        }
    }

    pub(super) fn map(&mut self, plan: &mut Plan, row: usize, at: usize, stripe: Stripe) {
        assert!(!matches!(self.rows[row].slots.get(at), Some(Slot::Mapped(_))), "place {at} of row {row} is taken");
        if self.refs[stripe.0 as usize] == 0 {
            assert_eq!(self.free.pop(), Some(stripe), "free stripes are taken from the end");
        }
        self.refs[stripe.0 as usize] += 1;
        self.rows[row].set(at, Slot::Mapped(stripe));
        plan.commands.push(Command::Map { stripe, place: self.place_of(&self.rows[row].range, at) });
    }

    pub(super) fn unmap(&mut self, plan: &mut Plan, row: usize, at: usize, leave: Slot) {
        let Some(Slot::Mapped(stripe)) = self.rows[row].slots.get(at).copied() else {
            panic!("nothing is mapped at place {at} of row {row}");
        };
        self.rows[row].set(at, leave);
        self.release(stripe);
        plan.commands.push(Command::Unmap { stripe, place: self.place_of(&self.rows[row].range, at) });
    }

    fn release(&mut self, stripe: Stripe) {
        let refs = &mut self.refs[stripe.0 as usize];
        *refs -= 1;
        if *refs == 0 {
            self.free.push(stripe);
        }
    }

    fn place_of(&self, range: &Range<u32>, at: usize) -> u32 {
        range.start * self.layout.block_stripes() + u32::try_from(at).expect("places fit u32")
    }

    /// Makes the row's range hold `tokens` tokens; what is mapped moves along if it has to lie elsewhere.
    pub(super) fn ensure_range(&mut self, plan: &mut Plan, row: usize, tokens: u32) -> Result<(), VmmError> {
        let needed = self.layout.blocks_for(tokens);
        let has = self.rows[row].range.len();
        if needed as usize <= has {
            return Ok(());
        }
        let most = if row < self.config.batch_max as usize { self.most_blocks } else { self.config.guest_blocks_max };
        let too_long = VmmError::TooLong { tokens, max: most.saturating_mul(self.layout.block_tokens()) };
        if needed > most {
            return Err(too_long);
        }
        let doubled = u32::try_from(2 * has).unwrap_or(u32::MAX);
        let generous = needed.max(self.first_blocks).max(doubled).min(most);
        if self.place(plan, row, generous) || self.place(plan, row, needed) {
            return Ok(());
        }
        // Idle rows need no addresses: what they cache goes with them.
        let idle: Vec<usize> = self.idle().filter(|idle| *idle != row).collect();
        for idle in idle {
            self.keep(plan, idle);
            let cached: Vec<usize> = self.rows[idle].stripes().map(|(at, _)| at).collect();
            for at in cached.into_iter().rev() {
                self.unmap(plan, idle, at, Slot::Empty);
                self.counters.reclaimed += 1;
            }
            let range = std::mem::replace(&mut self.rows[idle].range, 0..0);
            self.give_range(plan, range);
            if self.place(plan, row, needed) {
                return Ok(());
            }
        }
        Err(too_long)
    }

    /// Moves the row to a free range of `blocks` rBlocks, if there is one.
    fn place(&mut self, plan: &mut Plan, row: usize, blocks: u32) -> bool {
        let Some((start, len)) = self.addresses.best(blocks) else { return false };
        if len < blocks || blocks == 0 {
            return false;
        }
        self.keep(plan, row);
        assert_eq!(self.addresses.take_at(start, blocks), blocks, "the extent holds them");
        let range = start..start + blocks;
        plan.ranges.push((true, range.clone()));
        let old = std::mem::replace(&mut self.rows[row].range, range.clone());
        // At the new place first, so that every stripe is mapped somewhere at any time.
        let mapped: Vec<(usize, Stripe)> = self.rows[row].stripes().collect();
        for (at, stripe) in &mapped {
            self.refs[stripe.0 as usize] += 1;
            plan.commands.push(Command::Map { stripe: *stripe, place: self.place_of(&range, *at) });
        }
        for (at, stripe) in mapped {
            self.release(stripe);
            plan.commands.push(Command::Unmap { stripe, place: self.place_of(&old, at) });
            self.counters.moved += 1;
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
