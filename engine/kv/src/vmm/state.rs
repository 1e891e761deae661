//! [`Vmm`]: its state, direct rBlocks, and mapping ahead of time.

use super::places::{Place, Places};
use super::row::{Row, Use};
use super::{VmmError, VmmLayout};
use crate::extents::Extents;
use std::collections::BTreeMap;
use std::ops::Range;

/// Stripe: physical page groups that are mapped together, one in every tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stripe(pub u32);

/// Driver command for every tensor; `place` counts page groups from the tensor's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Map { stripe: Stripe, place: u32 },
    Unmap { stripe: Stripe, place: u32 },
}

/// Commands to execute in order, with the state to revert them.
#[derive(Debug)]
#[must_use = "the commands are to be carried out, or the plan undone"]
pub struct Plan {
    pub(super) commands: Vec<Command>,
    /// Previous states of places, in the order of the changes.
    pub(super) states: Vec<(u32, Place)>,
    pub(super) rows: BTreeMap<usize, Row>,
    /// Ranges that were taken (true) or returned, in order.
    pub(super) ranges: Vec<(bool, Range<u32>)>,
    pub(super) next: Option<Option<usize>>,
    counters: VmmCounters,
}

impl Plan {
    /// The commands, in the order in which they are carried out.
    #[must_use]
    pub fn commands(&self) -> &[Command] {
        &self.commands
    }

    /// Whether the plan unmaps memory: kernels in flight must have ended first.
    #[must_use]
    pub fn unmaps(&self) -> bool {
        self.commands.iter().any(|c| matches!(c, Command::Unmap { .. }))
    }
}

/// Sizes of a [`Vmm`], and thresholds of its work ahead of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmConfig {
    /// Direct rBlocks: the first rBlock addresses, which the caller assigns ([`Vmm::hold`]).
    pub direct_blocks: u32,
    /// Concurrent requests (B).
    pub batch_max: u32,
    /// Tokens of the longest request (L).
    pub context_max: u32,
    /// Number of lent rows (`lent_rows_max`), and rBlocks of each (`lent_row_blocks_max`).
    pub lent_rows_max: u32,
    pub lent_row_blocks_max: u32,
    /// Physical stripes.
    pub stripes: u32,
    /// Bytes of device addresses for all tensors together.
    pub address_bytes_max: u64,
    /// If addresses do not suffice for every address row at full length: whether rows begin short and grow by remapping at other
    /// addresses; else [`Vmm::new`] fails.
    pub grow: bool,
    /// Stripes to keep mapped in the row for the next request.
    pub eager_stripes: u32,
    /// Kept stripes are reclaimed when fewer than this many are free.
    pub reclaim_below: u32,
}

/// Counters since the start, in stripes unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmCounters {
    /// Mapped while a step waited.
    pub in_step: u64,
    /// Mapped one iteration ahead.
    pub ahead: u64,
    /// Mapped for the next request before it arrived.
    pub eager: u64,
    /// Found already mapped at the wanted place: kept by deferred reclamation, or mapped ahead (direct rBlocks).
    pub reused: u64,
    /// Kept stripes unmapped for lack of free ones.
    pub reclaimed: u64,
    /// Mapped once more for a shared prefix.
    pub shared: u64,
    /// Mapped at other addresses because their address row outgrew its range.
    pub moved: u64,
    /// rBlocks lent, recalled, and compacted.
    pub lent: u64,
    pub recalled: u64,
    pub compacted: u64,
    /// Number of requests refused for lack of memory.
    pub refused: u64,
}

/// Accounting of one instance's virtual KV memory. See the module for invariants.
#[derive(Debug)]
pub struct Vmm {
    pub(super) layout: VmmLayout,
    pub(super) config: VmmConfig,
    pub(super) places: Places,
    pub(super) rows: Vec<Row>,
    /// Free rBlocks of addresses.
    pub(super) addresses: Extents,
    /// Total rBlock addresses.
    address_blocks: u32,
    /// rBlocks of a request's range at first, and at most.
    pub(super) first_blocks: u32,
    pub(super) most_blocks: u32,
    /// Idle row for the next request.
    pub(super) next: Option<usize>,
    /// Direct rBlocks that the next iteration may need, and those that the next request may begin with.
    expected: [Vec<u32>; 2],
    pub(super) counters: VmmCounters,
}

impl Vmm {
    /// The initial state: nothing is mapped; the caller owns the stripes.
    ///
    /// # Errors
    /// [`VmmError::Addresses`] if the addresses do not suffice and rows may not grow, or not even for short rows.
    pub fn new(layout: VmmLayout, config: VmmConfig) -> Result<Self, VmmError> {
        let block_bytes = u64::from(layout.block_stripes()) * layout.stripe_bytes();
        // Slots are numbered by u32, and the last number means none.
        let numbered = u64::from((u32::MAX - 1) / layout.block_tokens());
        let available = (config.address_bytes_max / block_bytes).min(numbered);
        let most = layout.blocks_for(config.context_max).max(1);
        let lent_rows = u64::from(config.lent_rows_max) * u64::from(config.lent_row_blocks_max);
        let fixed = u64::from(config.direct_blocks) + lent_rows;
        let needed = u64::from(config.batch_max) * u64::from(most) + fixed;
        let short = |available: u64| {
            // Half of what is left goes to the rows' first ranges, the rest is for those that grow.
            let each = available.saturating_sub(fixed) / 2 / u64::from(config.batch_max.max(1));
            u32::try_from(each).unwrap_or(u32::MAX).min(most)
        };
        let first = if needed <= available { most } else { short(available) };
        if needed > available && (!config.grow || first == 0) {
            let bytes = |blocks: u64| blocks.saturating_mul(block_bytes);
            return Err(VmmError::Addresses { needed: bytes(needed), available: bytes(available) });
        }
        let blocks = u32::try_from(needed.min(available)).expect("bounded by what u32 numbers");
        // Lent rows have their ranges for good, behind those of the requests.
        let mut rows = vec![Row::new(0..0); config.batch_max as usize];
        let mut addresses = Extents::new(blocks);
        addresses.take_at(0, config.direct_blocks);
        for lent_row in 1..=config.lent_rows_max {
            let start = blocks - lent_row * config.lent_row_blocks_max;
            addresses.take_at(start, config.lent_row_blocks_max);
            rows.push(Row::new(start..start + config.lent_row_blocks_max));
        }
        Ok(Self {
            layout,
            config,
            places: Places::new(blocks * layout.block_stripes(), config.stripes),
            rows,
            addresses,
            address_blocks: blocks,
            first_blocks: first,
            most_blocks: most,
            next: None,
            expected: [Vec::new(), Vec::new()],
            counters: VmmCounters::default(),
        })
    }

    /// Sizes of tensors and page groups.
    #[must_use]
    pub fn layout(&self) -> &VmmLayout {
        &self.layout
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &VmmConfig {
        &self.config
    }

    /// Its counters, in page groups of one tensor.
    #[must_use]
    pub fn counters(&self) -> VmmCounters {
        self.counters
    }

    /// Bytes of addresses to reserve in every tensor.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        u64::from(self.address_blocks) * u64::from(self.layout.block_stripes()) * self.layout.shape().page_group_bytes
    }

    /// Number of unmapped stripes.
    #[must_use]
    pub fn free_stripes(&self) -> u32 {
        self.places.free()
    }

    /// Number of kept stripes: mapped, but held by no owner.
    #[must_use]
    pub fn kept_stripes(&self) -> u32 {
        self.places.kept()
    }

    /// Plans the work that overlaps with an iteration (vAttention §6.1): maps memory for every request to grow by one token,
    /// prepares the next request's row, and, with `reclaim`, unmaps kept stripes while fewer than `reclaim_below` are free.
    /// Never fails and unmaps no held stripe: work without free memory is left to the next step.
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
        let wanted = std::mem::take(&mut self.expected[0]);
        self.counters.ahead += u64::from(self.prepare(&mut plan, &wanted, 0));
        if reclaim && self.free_stripes() < self.config.reclaim_below {
            self.counters.reclaimed += u64::from(self.places.reclaim(&mut plan, self.config.reclaim_below));
        }
        // Keeps `reclaim_below` stripes free, or the next call would reclaim these again.
        let wanted = std::mem::take(&mut self.expected[1]);
        self.counters.eager += u64::from(self.prepare(&mut plan, &wanted, self.config.reclaim_below));
        if let Some(row) = self.next
            && (!self.rows[row].range.is_empty() || self.place(&mut plan, row, self.first_blocks))
        {
            let stripes = self.config.eager_stripes.min(self.range_stripes(row));
            let spare = self.free_stripes().saturating_sub(self.config.reclaim_below);
            if self.empty_below(row, stripes).len() <= spare as usize {
                self.counters.eager += u64::from(self.fill(&mut plan, row, stripes));
                self.release_row(&mut plan, row);
            }
        }
        plan
    }

    // Direct rBlocks: addresses that the caller assigns.

    /// Maps physical memory at whole direct rBlocks and holds them, all or nothing. rBlocks that are held already stay held.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`]: preempt a request. State is unchanged then.
    pub fn hold(&mut self, blocks: impl Iterator<Item = u32>) -> Result<Plan, VmmError> {
        let mut plan = self.begin();
        let mut missing = Vec::new();
        // Holds kept places first, so that they are not reclaimed for the others.
        for block in blocks {
            for place in self.direct(block) {
                match self.places.at(place) {
                    Place::Held(_) => {}
                    Place::Kept(..) => self.counters.reused += u64::from(self.places.hold(&mut plan, place)),
                    Place::Empty => missing.push(place),
                }
            }
        }
        missing.sort_unstable();
        missing.dedup();
        if let Err(error) = self.ensure_free(&mut plan, missing.len()) {
            self.undo(plan);
            self.counters.refused += 1;
            return Err(error);
        }
        for place in missing {
            let stripe = self.places.next_free().expect("made sure of");
            self.places.map(&mut plan, place, stripe);
            self.counters.in_step += 1;
        }
        Ok(plan)
    }

    /// Releases direct rBlocks: they stay mapped until another rBlock needs their memory; shared ones are unmapped at once.
    pub fn release(&mut self, blocks: Range<u32>) -> Plan {
        let mut plan = self.begin();
        // From behind, so that a row's front, which is needed first again, is reclaimed last.
        for block in blocks.rev() {
            self.direct(block).rev().for_each(|place| self.places.release(&mut plan, place));
        }
        plan
    }

    /// Maps the memory of held direct rBlocks `from` at the rBlocks from `to` on as well, which are not held. Neither holder
    /// may write there any more.
    ///
    /// # Panics
    /// If a source is not held, or a target is held.
    pub fn share_direct(&mut self, from: Range<u32>, to: u32) -> Plan {
        let mut plan = self.begin();
        for (from, to) in from.zip(to..) {
            for (from, to) in self.direct(from).zip(self.direct(to)) {
                let Place::Held(stripe) = self.places.at(from) else { panic!("shared stripes are held") };
                match self.places.at(to) {
                    Place::Empty => {}
                    Place::Kept(..) => self.places.unmap(&mut plan, to),
                    Place::Held(_) => panic!("place {to} is held"),
                }
                self.places.map(&mut plan, to, stripe);
                self.counters.shared += 1;
            }
        }
        plan
    }

    /// Sets the direct rBlocks that [`Vmm::ahead`] maps next: first those that the next iteration may write (`ahead`), then
    /// those that the next request may begin with (`next`). Replaces earlier ones.
    pub fn expect(&mut self, ahead: impl Iterator<Item = u32>, next: impl Iterator<Item = u32>) {
        self.expected = [ahead.collect(), next.collect()];
    }

    /// Whether a direct rBlock is mapped and held.
    #[must_use]
    pub fn is_held(&self, block: u32) -> bool {
        self.direct(block).all(|place| matches!(self.places.at(place), Place::Held(_)))
    }

    /// The places of a direct rBlock.
    fn direct(&self, block: u32) -> Range<u32> {
        assert!(block < self.config.direct_blocks, "block {block} is beyond those that the caller gives out");
        let stripes = self.layout.block_stripes();
        block * stripes..(block + 1) * stripes
    }

    /// Maps empty places of direct rBlocks as kept ones while more than `spare` stripes are free. Returns how many.
    fn prepare(&mut self, plan: &mut Plan, blocks: &[u32], spare: u32) -> u32 {
        let mut mapped = 0;
        for place in blocks.iter().flat_map(|block| self.direct(*block)).collect::<Vec<_>>() {
            if self.places.at(place) == Place::Empty
                && self.free_stripes() > spare
                && let Some(stripe) = self.places.next_free()
            {
                self.places.map(plan, place, stripe);
                self.places.release(plan, place);
                mapped += 1;
            }
        }
        mapped
    }

    // Plans.

    /// Reverts a plan that failed, after the caller undid its executed commands.
    pub fn undo(&mut self, plan: Plan) {
        self.places.undo(&plan);
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

    /// Recomputes all counts and compares them. Linear; for tests.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self) {
        self.places.check();
        let mut addresses: Vec<u32> = self.addresses.iter().chain(0..self.config.direct_blocks).collect();
        for row in &self.rows {
            addresses.extend(row.range.clone());
            let first = row.range.start * self.layout.block_stripes();
            let places = (row.range.end - row.range.start) * self.layout.block_stripes();
            assert!(row.high <= places, "mapped beyond the row's range");
            let state = |at: &u32| self.places.at(first + at);
            assert!((row.high..places).all(|at| state(&at) == Place::Empty), "mapped behind the row's last");
            assert!(row.vacant.iter().all(|at| state(at) == Place::Empty), "vacant places are empty");
            let held = (0..row.high).any(|at| matches!(state(&at), Place::Held(_)));
            assert!(row.used != Use::Idle || !held, "an idle row holds nothing");
        }
        addresses.sort_unstable();
        assert!(addresses.into_iter().eq(0..self.address_blocks), "addresses were lost or given twice");
        if let Some(next) = self.next {
            assert_eq!(self.rows[next].used, Use::Idle, "the next row is idle");
        }
    }

    pub(super) fn begin(&self) -> Plan {
        let counters = self.counters;
        let (commands, states, rows, ranges) = (Vec::new(), Vec::new(), BTreeMap::new(), Vec::new());
        Plan { commands, states, rows, ranges, next: None, counters }
    }

    /// Makes `wanted` stripes free, by unmapping kept ones if necessary.
    pub(super) fn ensure_free(&mut self, plan: &mut Plan, wanted: usize) -> Result<(), VmmError> {
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
        let groups = |stripes: u64| stripes * u64::from(self.layout.tensors());
        match self.places.ensure_free(plan, wanted) {
            Ok(reclaimed) => self.counters.reclaimed += u64::from(reclaimed),
            Err(VmmError::OutOfMemory { needed, available }) => {
                return Err(VmmError::OutOfMemory { needed: groups(needed), available: groups(available) });
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
