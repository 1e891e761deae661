//! The thread pool of a host device, disjoint writes from its tasks, and their scratch.
//!
//! A forward pass is a chain of short parallel steps (some 60 in a decode step of a few milliseconds), so hand-over
//! latency counts: the calling thread takes part, and workers spin for some microseconds before they sleep. (A
//! general pool, whose caller sleeps while others work, took a fifth of a decode step.)
//!
//! Invariants: a job is published, and workers enter it, under the slot's lock; `run` returns, also by unwinding, only
//! after it has closed the job and every worker that entered has left. So no worker touches a job after `run`.

use super::buffer::Buffer;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, yield_now};

/// Spins of an idle worker before it sleeps: about 50 microseconds.
const SPINS_IDLE: u32 = 2_000;
/// Spins of the caller, waiting for the last worker to leave, before it yields.
const SPINS_LEAVING: u32 = 2_000;

/// The threads of one device: the caller and `count - 1` workers.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    slot: Mutex<Slot>,
    wake: Condvar,
    /// The slot's epoch, readable without the lock.
    epoch: AtomicU64,
    /// The job's first task that is not taken.
    next: AtomicUsize,
    /// Workers within the job.
    inside: AtomicUsize,
    /// A task panicked on a worker.
    panicked: AtomicBool,
}

#[derive(Default)]
struct Slot {
    job: Option<Job>,
    /// Number of the last job.
    epoch: u64,
    asleep: usize,
    stop: bool,
}

#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

// SAFETY: the work is Sync, and valid for as long as a worker is within the job, by the module's invariant.
unsafe impl Send for Job {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        // No code that runs under this lock panics.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes tasks until there are none.
    fn take_part(&self, work: &(dyn Fn(usize) + Sync), tasks: usize) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task);
        }
    }

    /// Publishes a job. The slot's lock makes it, and what the caller wrote before, visible to those who enter.
    fn open(&self, job: Job) {
        let mut slot = self.lock();
        assert!(slot.job.is_none(), "one job at a time, not nested");
        self.next.store(0, Ordering::Relaxed);
        self.panicked.store(false, Ordering::Relaxed);
        slot.job = Some(job);
        slot.epoch += 1;
        self.epoch.store(slot.epoch, Ordering::Release);
        if slot.asleep > 0 {
            self.wake.notify_all();
        }
    }

    /// Worker loop.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            while self.epoch.load(Ordering::Acquire) == seen && spins < SPINS_IDLE {
                std::hint::spin_loop();
                spins += 1;
            }
            let mut slot = self.lock();
            while slot.epoch == seen && !slot.stop {
                slot.asleep += 1;
                slot = self.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
                slot.asleep -= 1;
            }
            if slot.stop {
                return;
            }
            seen = slot.epoch;
            // The job may have ended without this worker.
            let Some(job) = slot.job else { continue };
            self.inside.fetch_add(1, Ordering::Relaxed);
            drop(slot);
            // SAFETY: this worker is inside, so `run` has not returned and the work is alive.
            let work = unsafe { &*job.work };
            if catch_unwind(AssertUnwindSafe(|| self.take_part(work, job.tasks))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
                self.next.store(job.tasks, Ordering::Relaxed);
            }
            // Releases this worker's writes to the caller, who acquires.
            self.inside.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Closes the job when the caller is done, or unwinds.
struct Close<'a> {
    shared: &'a Shared,
    tasks: usize,
}

impl Drop for Close<'_> {
    fn drop(&mut self) {
        // After a panic on this thread, workers take no further tasks.
        self.shared.next.fetch_max(self.tasks, Ordering::Relaxed);
        self.shared.lock().job = None;
        let mut spins = 0;
        while self.shared.inside.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins > SPINS_LEAVING {
                yield_now();
            }
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count()).finish()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch their tasks' panics.
            let _ = worker.join();
        }
    }
}

impl Threads {
    /// The caller and `count - 1` more.
    pub(crate) fn new(count: usize) -> Self {
        let shared = Arc::new(Shared {
            slot: Mutex::default(),
            wake: Condvar::new(),
            epoch: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let worker = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("lagoon-cpu-{i}"));
            thread.spawn(move || shared.serve()).expect("a thread of the host backend starts")
        };
        let workers = (1..count).map(worker).collect();
        Self { shared, workers }
    }

    pub(crate) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task)` for every task, in any order and in parallel, and waits for all. Not for use within a task.
    ///
    /// # Panics
    /// If a task does.
    pub(crate) fn run(&self, tasks: usize, work: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(work);
        }
        let work: &(dyn Fn(usize) + Sync) = &work;
        // SAFETY: only the lifetime is forgotten; `Close` holds this frame until no worker is in the job.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(work)
        };
        self.shared.open(Job { work: erased, tasks });
        let close = Close { shared: &self.shared, tasks };
        self.shared.take_part(work, tasks);
        drop(close);
        assert!(!self.shared.panicked.load(Ordering::Relaxed), "a task of the host backend panicked");
    }

    /// Splits `0..len` into ranges of `chunk` and runs them.
    pub(crate) fn run_chunks(&self, len: usize, chunk: usize, work: impl Fn(Range<usize>) + Sync) {
        self.run(len.div_ceil(chunk), |task| work(task * chunk..len.min((task + 1) * chunk)));
    }
}

/// A mutable slice whose disjoint parts are written by several threads.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access is only through `slice`, whose callers promise disjoint ranges.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// `len` elements from `ptr` on.
    ///
    /// # Safety
    /// They are initialised and stay allocated for the lifetime. Elements passed to `slice` are accessed only through
    /// it.
    pub(crate) unsafe fn from_raw(ptr: *mut T, len: usize) -> Self {
        Self { ptr, len, life: PhantomData }
    }

    /// The first element, for kernels.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.ptr
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No other live reference covers any element of `range`.
    #[allow(clippy::mut_from_ref, reason = "the callers promise that ranges are disjoint")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range within the slice");
        // SAFETY: in bounds by the assertion, unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

thread_local! {
    /// Scratch of this thread; grows to the largest use and stays.
    static SCRATCH: RefCell<Option<Buffer<f32>>> = const { RefCell::new(None) };
}

/// Calls `work` with `len` elements of this thread's scratch, aligned to cache lines, contents undefined. Must not be
/// nested.
pub(crate) fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.as_ref().is_none_or(|s| s.len() < len) {
            *scratch = Some(Buffer::zeroed(len, "scratch").expect("a thread's scratch, of a megabyte or so, fits"));
        }
        work(&mut scratch.as_mut().expect("just made")[..len])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_many_short_jobs() {
        for count in [1, 2, 3, 8] {
            let threads = Threads::new(count);
            for job in 0..3000 {
                let tasks = job % 17;
                let mut marks = vec![0u32; tasks];
                let out = Disjoint::new(&mut marks);
                // SAFETY: one element a task.
                threads.run(tasks, |task| unsafe { out.slice(task..task + 1)[0] += 1 });
                assert!(marks.iter().all(|m| *m == 1), "{count} threads, job {job}: {marks:?}");
                if job % 500 == 0 {
                    // Long enough for workers to fall asleep.
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_threads_usable() {
        let threads = Threads::new(3);
        for at in [0, 50, 99] {
            let failed = catch_unwind(AssertUnwindSafe(|| threads.run(100, |task| assert_ne!(task, at))));
            assert!(failed.is_err(), "task {at}");
            let ran = AtomicUsize::new(0);
            threads.run(100, |_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 100);
        }
    }
}
