//! KV memory that is contiguous in addresses and grows by page groups (vAttention): [`lagoon_kv::vmm`] plans,
//! [`VirtualKv`] carries the plans out.
//!
//! Invariants:
//! * A plan is carried out whole or not at all: a failing call is undone, in the driver and in the accounting.
//! * Nothing is unmapped while work announced by [`VirtualKv::used_by`] may still read it: every unmap waits for the
//!   events recorded there.
//! * All physical page groups are made at the beginning and released at the end; in between, only mappings change.
//!
//! A background thread maps one iteration ahead and keeps the next request's row prepared (§6.1). It runs once for
//! each step and never waits for the device.

use crate::driver::{Context, CudaError, Event, Physical, Reservation, Sharing, Stream};
use lagoon_kv::vmm::{Command, Plan, Plane, Vmm, VmmConfig, VmmCounters, VmmError, VmmLayout};
use lagoon_types::KvRun;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Errors of KV memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VirtualKvError {
    /// No page group, row or address is left: preempt a sequence. Nothing has changed.
    #[error(transparent)]
    Accounting(#[from] VmmError),
    /// The driver refused; the call was undone.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// The driver also refused to undo: the mappings are unknown from now on.
    #[error("mappings are lost: {0}, and then {1}")]
    Lost(CudaError, CudaError),
}

/// Addresses of one layer's K and V: element `[token][head][i]` of K is at `k + size * (token * token_stride + head *
/// head_dim + i)`, with `size` the bytes of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlaneView {
    /// Addresses of slot 0, of K and of V.
    pub k: u64,
    pub v: u64,
    /// Slot stride in elements.
    pub token_stride: u64,
}

/// Events behind the last announced use in each stream. A lock of its own, so that announcing never waits for
/// mapping.
#[derive(Debug, Default)]
struct Uses(Mutex<Vec<(usize, Arc<Event>)>>);

impl Uses {
    fn announce(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut events = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let id = stream.id();
        if let Some((_, event)) = events.iter().find(|(of, _)| *of == id) {
            return event.record(stream);
        }
        let event = Event::new(stream.context(), false)?;
        event.record(stream)?;
        events.push((id, Arc::new(event)));
        Ok(())
    }

    /// A copy of the events, so that waiting needs no lock.
    fn events(&self) -> Vec<Arc<Event>> {
        let events = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        events.iter().map(|(_, event)| Arc::clone(event)).collect()
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.events().iter().try_for_each(|event| event.synchronize())
    }

    fn have_ended(&self) -> bool {
        self.events().iter().all(|event| event.happened().unwrap_or(false))
    }
}

/// State under the lock: the accounting, and the mappings that it describes.
#[derive(Debug)]
struct State {
    vmm: Vmm,
    tensors: Vec<Reservation>,
    /// By stripe, then tensor.
    groups: Vec<Vec<Arc<Physical>>>,
    uses: Arc<Uses>,
    /// Set when undoing failed: nothing is mapped or unmapped any more.
    lost: Option<VirtualKvError>,
    /// The background thread's result, reported by the next step.
    background: Result<(), VirtualKvError>,
}

impl State {
    /// Carries a plan out, or undoes it.
    fn carry_out(&mut self, plan: Plan) -> Result<(), VirtualKvError> {
        if let Some(lost) = &self.lost {
            let lost = lost.clone();
            self.vmm.undo(plan);
            return Err(lost);
        }
        let waited = if plan.unmaps() { self.uses.wait() } else { Ok(()) };
        if let Err(error) = waited {
            self.vmm.undo(plan);
            return Err(error.into());
        }
        let all: Vec<(Command, usize)> =
            plan.commands().iter().flat_map(|c| (0..self.tensors.len()).map(|t| (*c, t))).collect();
        for (at, (command, tensor)) in all.iter().enumerate() {
            let Err(error) = self.one(*command, *tensor) else { continue };
            let half =
                matches!(command, Command::Map { place, .. } if self.tensors[*tensor].holds(self.offset(*place)));
            let undone = if half { Err(error.clone()) } else { Ok(()) };
            let undone = undone.and_then(|()| all[..at].iter().rev().try_for_each(|(c, t)| self.one(reverse(*c), *t)));
            self.vmm.undo(plan);
            let Err(second) = undone else { return Err(error.into()) };
            let lost = VirtualKvError::Lost(error, second);
            self.lost = Some(lost.clone());
            return Err(lost);
        }
        Ok(())
    }

    /// Offset of a place in its tensor, in bytes.
    fn offset(&self, place: u32) -> usize {
        let page = self.vmm.layout().shape().page_group_bytes;
        usize::try_from(u64::from(place) * page).expect("addresses are 64 bits")
    }

    fn one(&mut self, command: Command, tensor: usize) -> Result<(), CudaError> {
        match command {
            Command::Map { stripe, place } => {
                let offset = self.offset(place);
                self.tensors[tensor].map(offset, &self.groups[stripe.0 as usize][tensor])
            }
            Command::Unmap { place, .. } => {
                let offset = self.offset(place);
                self.tensors[tensor].unmap(offset).map(drop)
            }
        }
    }
}

fn reverse(command: Command) -> Command {
    match command {
        Command::Map { stripe, place } => Command::Unmap { stripe, place },
        Command::Unmap { stripe, place } => Command::Map { stripe, place },
    }
}

/// KV memory of one instance. See the module for invariants.
#[derive(Debug)]
pub struct VirtualKv {
    layout: VmmLayout,
    /// Addresses of the tensors.
    bases: Vec<u64>,
    state: Arc<Mutex<State>>,
    uses: Arc<Uses>,
    /// Wakes the background thread; `None` while it ends.
    wake: Option<SyncSender<()>>,
    /// Whether steps wake the background thread.
    overlapped: bool,
    background: Option<JoinHandle<()>>,
}

impl VirtualKv {
    /// Reserves every address, makes every page group, maps nothing, and starts the background thread (`init` of the
    /// paper's Table 4).
    ///
    /// # Errors
    /// Those of the accounting or the driver; everything made until then is released.
    pub fn new(context: &Arc<Context>, layout: VmmLayout, config: VmmConfig) -> Result<Self, VirtualKvError> {
        let page = layout.shape().page_group_bytes;
        if !page.is_multiple_of(context.granularity() as u64) {
            let text = format!("page groups of {page} bytes: the device maps multiples of {}", context.granularity());
            return Err(CudaError::Unsupported(text).into());
        }
        let vmm = Vmm::new(layout, config)?;
        let bytes = |n: u64| usize::try_from(n).expect("addresses are 64 bits");
        let tensor_bytes = bytes(vmm.tensor_bytes());
        let tensors: Vec<Reservation> =
            (0..layout.tensors()).map(|_| Reservation::new(context, tensor_bytes)).collect::<Result<_, _>>()?;
        let group = || Physical::new(context, bytes(page), Sharing::Private).map(Arc::new);
        let groups: Vec<Vec<Arc<Physical>>> = (0..config.stripes)
            .map(|_| (0..layout.tensors()).map(|_| group()).collect())
            .collect::<Result<_, CudaError>>()?;
        let bases = tensors.iter().map(Reservation::address).collect();
        let uses = Arc::new(Uses::default());
        let state = State { vmm, tensors, groups, uses: Arc::clone(&uses), lost: None, background: Ok(()) };
        let state = Arc::new(Mutex::new(state));
        let (wake, woken) = sync_channel(1);
        let background = std::thread::Builder::new()
            .name("lagoon-map-ahead".to_owned())
            .spawn({
                let state = Arc::clone(&state);
                move || map_ahead(&state, &woken)
            })
            .map_err(|error| CudaError::Unsupported(format!("a thread: {error}")))?;
        Ok(Self { layout, bases, state, uses, wake: Some(wake), overlapped: true, background: Some(background) })
    }

    /// Sizes of tensors and page groups.
    #[must_use]
    pub fn layout(&self) -> &VmmLayout {
        &self.layout
    }

    /// Slots that have addresses, in all rows.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let bytes = self.lock().vmm.tensor_bytes();
        u32::try_from(bytes / self.layout.slot_bytes()).expect("slots are numbered by u32")
    }

    /// Addresses of a layer's K and V. They never change.
    #[must_use]
    pub fn layer(&self, layer: u32) -> KvPlaneView {
        let at = |plane| {
            let (tensor, offset) = self.layout.tensor_of(layer, plane);
            self.bases[tensor as usize] + offset
        };
        let token_stride = self.layout.slot_bytes() / u64::from(self.layout.shape().element_bytes);
        KvPlaneView { k: at(Plane::K), v: at(Plane::V), token_stride }
    }

    /// Addresses of the virtual tensors: two for each group of layers, K's and V's.
    #[must_use]
    pub fn tensors(&self) -> &[u64] {
        &self.bases
    }

    /// Maps memory behind direct rBlocks. See [`Vmm::hold`]. Returns whether some was still mapped from an earlier
    /// owner, whose queued work may still use it.
    ///
    /// # Errors
    /// As [`VirtualKv::step`].
    pub fn hold(&self, blocks: impl Iterator<Item = u32>) -> Result<bool, VirtualKvError> {
        let mut state = self.lock();
        let before = state.vmm.counters().reused;
        let plan = state.vmm.hold(blocks)?;
        state.carry_out(plan)?;
        Ok(state.vmm.counters().reused > before)
    }

    /// Releases direct rBlocks. See [`Vmm::release`].
    ///
    /// # Errors
    /// Those of the driver when shared memory is unmapped; the rBlocks are then still held.
    pub fn release(&self, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.release(blocks);
        state.carry_out(plan)
    }

    /// Maps the memory of direct rBlocks `from` at `to..` as well. See [`Vmm::share_direct`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn share_direct(&self, from: Range<u32>, to: u32) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.share_direct(from, to);
        state.carry_out(plan)
    }

    /// Asks the background thread to map direct rBlocks of the next iteration and the next request. See
    /// [`Vmm::expect`]. Dropped if the thread is still mapping.
    pub fn expect(&self, ahead: impl Iterator<Item = u32>, next: impl Iterator<Item = u32>) {
        if !self.overlapped {
            return;
        }
        if let Ok(mut state) = self.state.try_lock() {
            state.vmm.expect(ahead, next);
        }
        self.wake();
    }

    /// Allocates a row for a request. See [`Vmm::alloc_reqid`].
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn alloc_reqid(&self) -> Result<usize, VirtualKvError> {
        Ok(self.lock().vmm.alloc_reqid()?)
    }

    /// Frees a request's row; its memory stays mapped for the next one. See [`Vmm::free_reqid`].
    ///
    /// # Errors
    /// Those of the driver when a shared prefix is unmapped; the row is then still the request's.
    pub fn free_reqid(&self, row: usize) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.free_reqid(row);
        state.carry_out(plan)
    }

    /// Maps memory behind every request's tokens, and wakes the background thread for the next iteration. See
    /// [`Vmm::step`].
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`]: preempt a request and call again. A failure of the background thread, unless this
    /// call mended it.
    pub fn step(&self, lengths: &[u32]) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        // Its failed mappings are tried again now.
        let _tried_again = std::mem::replace(&mut state.background, Ok(()));
        let plan = state.vmm.step(lengths)?;
        state.carry_out(plan)?;
        drop(state);
        if self.overlapped {
            self.wake();
        }
        Ok(())
    }

    /// Wakes the background thread.
    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // The channel is full: the thread is about to look anyway.
            let _woken_already = wake.try_send(());
        }
    }

    /// Maps the first tokens of `from` in `to` as well. Returns the tokens that `to` then has. See [`Vmm::share`].
    ///
    /// # Errors
    /// As [`VirtualKv::step`].
    pub fn share(&self, from: usize, to: usize, tokens: u32) -> Result<u32, VirtualKvError> {
        let mut state = self.lock();
        let (plan, shared) = state.vmm.share(from, to, tokens)?;
        state.carry_out(plan)?;
        Ok(shared)
    }

    /// Unmaps full rBlocks of a request that were moved elsewhere. See [`Vmm::vacate`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn vacate(&self, row: usize, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.vacate(row, blocks);
        state.carry_out(plan)
    }

    /// Maps memory behind vacated rBlocks again. See [`Vmm::restore`].
    ///
    /// # Errors
    /// As [`VirtualKv::step`].
    pub fn restore(&self, row: usize, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.restore(row, blocks)?;
        state.carry_out(plan)
    }

    /// Allocates a lent row.
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn open_lent_row(&self) -> Result<usize, VirtualKvError> {
        Ok(self.lock().vmm.open_lent_row()?)
    }

    /// Lends rBlocks to a lent row. See [`Vmm::lend`].
    ///
    /// # Errors
    /// As [`VirtualKv::step`].
    pub fn lend(&self, row: usize, blocks: u32, first_pos: u32) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.lend(row, blocks, first_pos)?;
        state.carry_out(plan)
    }

    /// Recalls rBlocks of a lent row, from anywhere in its runs. See [`Vmm::recall`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn recall(&self, row: usize, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.recall(row, blocks);
        state.carry_out(plan)
    }

    /// Compacts a lent row's rBlocks by remapping. See [`Vmm::compact`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn compact(&self, row: usize) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.compact(row);
        state.carry_out(plan)
    }

    /// Closes a lent row.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn close_lent_row(&self, row: usize) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.close_lent_row(row);
        state.carry_out(plan)
    }

    /// The runs of a request's first `tokens` tokens.
    #[must_use]
    pub fn runs(&self, row: usize, tokens: u32) -> Vec<KvRun> {
        self.lock().vmm.runs(row, tokens)
    }

    /// The runs of a lent row.
    #[must_use]
    pub fn lent_row_runs(&self, row: usize) -> Vec<KvRun> {
        self.lock().vmm.lent_row_runs(row)
    }

    /// The slot of a row's first token. It changes when a row outgrows its range, in [`VirtualKv::step`].
    #[must_use]
    pub fn slot0(&self, row: usize) -> u32 {
        self.lock().vmm.slot0(row)
    }

    /// Counters of mapping since the start.
    #[must_use]
    pub fn counters(&self) -> VmmCounters {
        self.lock().vmm.counters()
    }

    /// Numbers of free page groups (unmapped) and kept ones (mapped, without an owner).
    #[must_use]
    pub fn free_and_kept_groups(&self) -> (u64, u64) {
        let state = self.lock();
        let tensors = u64::from(self.layout.tensors());
        (u64::from(state.vmm.free_stripes()) * tensors, u64::from(state.vmm.kept_stripes()) * tensors)
    }

    /// Announces that `stream` has work, as of now, that uses this memory: unmapping waits for it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        self.uses.announce(stream)
    }

    /// Sets whether steps wake the background thread (initially true). Without it, for comparison, each step maps its
    /// own memory.
    pub fn overlap(&mut self, overlapped: bool) {
        self.overlapped = overlapped;
    }

    /// Waits until the background thread is idle, for measurements and tests.
    pub fn settle(&self) {
        if let Some(wake) = &self.wake {
            // A message is taken only after the one before is done.
            let _ended = wake.send(()).and_then(|()| wake.send(())).and_then(|()| wake.send(()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for VirtualKv {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(background) = self.background.take() {
            // It panics only for bugs of ours, and prints its own message.
            let _ended = background.join();
        }
        // Kernels may still read what the drop of the reservations unmaps.
        let _the_context_is_lost = self.uses.wait();
    }
}

/// The background thread: one look for each message, until the other end is dropped.
fn map_ahead(state: &Mutex<State>, woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        let mut state = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.lost.is_some() {
            continue;
        }
        // Unmapping would wait for kernels in flight while a step may be waiting for the lock.
        let reclaim = state.uses.have_ended();
        let plan = state.vmm.ahead(reclaim);
        state.background = state.carry_out(plan);
    }
}
