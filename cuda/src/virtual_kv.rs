//! KV memory that is contiguous in addresses and grows by page groups (vAttention): [`lagoon_kv::vmm`] decides, this
//! carries it out.
//!
//! Invariants:
//! * A plan is carried out whole or not at all: what a failing call leaves behind is undone, in the driver and in the
//!   accounting.
//! * Nothing is unmapped while work that was announced by [`VirtualKv::used_by`] may still read it: every unmap waits
//!   for the events recorded there.
//! * All physical page groups are made in the beginning and released in the end; between, they only change places.
//!
//! A background thread maps one iteration ahead and keeps the next request's row prepared (§6.1); it begins with each
//! step and never waits for the device.

use crate::driver::{Context, CudaError, Event, Physical, Reservation, Sharing, Stream};
use lagoon_kv::vmm::{Command, Plan, Plane, Vmm, VmmConfig, VmmCounters, VmmError, VmmLayout};
use lagoon_types::KvRun;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Why KV memory cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VirtualKvError {
    /// No page group, row or address is left: preempt somebody. Nothing has changed.
    #[error(transparent)]
    Accounting(#[from] VmmError),
    /// The driver refused; what was begun is undone.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// The driver refused also to undo: what is mapped is not known any more.
    #[error("mappings are lost: {0}, and then {1}")]
    Lost(CudaError, CudaError),
}

/// Where the K and V of one layer lie: element `[token][head][i]` of K is at `k + 2 or 4 bytes * (token *
/// token_stride + head * head_dim + i)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlaneView {
    /// Addresses of slot 0.
    pub k: u64,
    pub v: u64,
    /// Elements from one slot to the next.
    pub token_stride: u64,
}

/// Behind the last announced use in each stream. Has a lock of its own, so that announcing never waits for mapping.
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

    /// The events, to be looked at without the lock.
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

/// What is locked: the accounting and the mappings that it describes.
#[derive(Debug)]
struct State {
    vmm: Vmm,
    tensors: Vec<Reservation>,
    /// By stripe, then tensor.
    groups: Vec<Vec<Arc<Physical>>>,
    uses: Arc<Uses>,
    /// Set when undoing failed: nothing is mapped or unmapped any more.
    lost: Option<VirtualKvError>,
    /// Of the background thread, reported by the next step.
    background: Result<(), VirtualKvError>,
}

impl State {
    /// Carries a plan out, or takes it back.
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

    /// Bytes from a tensor's beginning to a place.
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
    /// Whether steps wake it.
    overlapped: bool,
    background: Option<JoinHandle<()>>,
}

impl VirtualKv {
    /// `init` of the paper's Table 4: reserves every address, makes every page group, maps nothing, and starts the
    /// background thread.
    ///
    /// # Errors
    /// What the accounting or the driver refuses; everything made until then is released.
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

    /// Where a layer's K and V lie. The addresses never change.
    #[must_use]
    pub fn layer(&self, layer: u32) -> KvPlaneView {
        let at = |plane| {
            let (tensor, offset) = self.layout.tensor_of(layer, plane);
            self.bases[tensor as usize] + offset
        };
        let token_stride = self.layout.slot_bytes() / u64::from(self.layout.shape().element_bytes);
        KvPlaneView { k: at(Plane::K), v: at(Plane::V), token_stride }
    }

    /// Where the virtual tensors begin: two for each group of layers, K's and V's.
    #[must_use]
    pub fn tensors(&self) -> &[u64] {
        &self.bases
    }

    /// Makes memory lie behind direct rBlocks. See [`Vmm::hold`]. Returns whether some was there already, from whoever held
    /// them before: what that one has queued may still use it.
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

    /// Nobody uses direct rBlocks any more. See [`Vmm::release`].
    ///
    /// # Errors
    /// What the driver says where something shared is unmapped; they are then held as before.
    pub fn release(&self, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.release(blocks);
        state.carry_out(plan)
    }

    /// Maps the memory of direct rBlocks at others, too. See [`Vmm::share_direct`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn share_direct(&self, from: Range<u32>, to: u32) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.share_direct(from, to);
        state.carry_out(plan)
    }

    /// Has the background thread map direct rBlocks that the next iteration and the next request will want. See
    /// [`Vmm::expect`]. If it still maps what was said before, that is all it does.
    pub fn expect(&self, ahead: impl Iterator<Item = u32>, next: impl Iterator<Item = u32>) {
        if !self.overlapped {
            return;
        }
        if let Ok(mut state) = self.state.try_lock() {
            state.vmm.expect(ahead, next);
        }
        self.wake();
    }

    /// A row for a request. See [`Vmm::alloc_reqid`].
    ///
    /// # Errors
    /// [`VmmError::NoRow`].
    pub fn alloc_reqid(&self) -> Result<usize, VirtualKvError> {
        Ok(self.lock().vmm.alloc_reqid()?)
    }

    /// Takes a request's row back; its memory stays mapped for the next. See [`Vmm::free_reqid`].
    ///
    /// # Errors
    /// What the driver says where a shared prefix is unmapped; the row is then still the request's.
    pub fn free_reqid(&self, row: usize) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.free_reqid(row);
        state.carry_out(plan)
    }

    /// Makes memory lie behind every request's tokens, and has the background thread prepare the next iteration. See
    /// [`Vmm::step`].
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`]: preempt a request and call it again. What the background thread failed with comes
    /// here, too, unless this call mended it.
    pub fn step(&self, lengths: &[u32]) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        // What it could not map is mapped now, or fails again and says so.
        let _tried_again = std::mem::replace(&mut state.background, Ok(()));
        let plan = state.vmm.step(lengths)?;
        state.carry_out(plan)?;
        drop(state);
        if self.overlapped {
            self.wake();
        }
        Ok(())
    }

    /// Has the background thread look.
    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // A full channel means that it is about to look anyway.
            let _woken_already = wake.try_send(());
        }
    }

    /// Maps the front of `from` in `to`, too. Returns the tokens that `to` then has. See [`Vmm::share`].
    ///
    /// # Errors
    /// As [`VirtualKv::step`].
    pub fn share(&self, from: usize, to: usize, tokens: u32) -> Result<u32, VirtualKvError> {
        let mut state = self.lock();
        let (plan, shared) = state.vmm.share(from, to, tokens)?;
        state.carry_out(plan)?;
        Ok(shared)
    }

    /// Unmaps full rBlocks of a request that are elsewhere now. See [`Vmm::vacate`].
    ///
    /// # Errors
    /// What the driver says.
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

    /// A row for a lent row.
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

    /// Takes rBlocks of a lent row back, from anywhere in its runs. See [`Vmm::recall`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn recall(&self, row: usize, blocks: Range<u32>) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.recall(row, blocks);
        state.carry_out(plan)
    }

    /// Moves a lent row's rBlocks together, by mapping. See [`Vmm::compact`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn compact(&self, row: usize) -> Result<(), VirtualKvError> {
        let mut state = self.lock();
        let plan = state.vmm.compact(row);
        state.carry_out(plan)
    }

    /// Ends a lent row.
    ///
    /// # Errors
    /// What the driver says.
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

    /// The slot of a row's first token. It changes where a row grows out of its range, in [`VirtualKv::step`].
    #[must_use]
    pub fn slot0(&self, row: usize) -> u32 {
        self.lock().vmm.slot0(row)
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> VmmCounters {
        self.lock().vmm.counters()
    }

    /// Page groups that are mapped nowhere, and those that are nobody's.
    #[must_use]
    pub fn free_and_kept_groups(&self) -> (u64, u64) {
        let state = self.lock();
        let tensors = u64::from(self.layout.tensors());
        (u64::from(state.vmm.free_stripes()) * tensors, u64::from(state.vmm.kept_stripes()) * tensors)
    }

    /// Says that `stream`, as it is now, has work that uses this memory: nothing is unmapped before that has ended.
    ///
    /// # Errors
    /// What the driver says.
    pub fn used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        self.uses.announce(stream)
    }

    /// Whether steps have the background thread map ahead, as they do at first: without it, for comparison, each step maps
    /// what it needs itself.
    pub fn overlap(&mut self, overlapped: bool) {
        self.overlapped = overlapped;
    }

    /// Waits until the background thread has nothing to do: for measurements and tests.
    pub fn settle(&self) {
        if let Some(wake) = &self.wake {
            // Two messages: when the second is taken, what the first asked for is done.
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
            // It panics for bugs of ours only, which its own message tells.
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
