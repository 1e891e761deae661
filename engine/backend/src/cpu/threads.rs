//! The threads of a device, and disjoint writes from them.

use super::buffer::Buffer;
use rayon::prelude::*;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// A pool of threads that belongs to one device.
pub(crate) struct Threads {
    pool: rayon::ThreadPool,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count()).finish()
    }
}

impl Threads {
    pub(crate) fn new(count: usize) -> Self {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|i| format!("lagoon-cpu-{i}"))
            .build()
            .expect("threads of the host backend start");
        Self { pool }
    }

    pub(crate) fn count(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Calls `work(task)` for every task, in any order and in parallel, and waits for all.
    pub(crate) fn run(&self, tasks: usize, work: impl Fn(usize) + Sync) {
        match tasks {
            0 => {}
            1 => work(0),
            _ => self.pool.install(|| (0..tasks).into_par_iter().for_each(|task| work(task))),
        }
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

/// Lends `len` elements of this thread's scratch, aligned to cache lines, holding whatever was left there. Not for
/// nested use.
pub(crate) fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.as_ref().is_none_or(|s| s.len() < len) {
            *scratch = Some(Buffer::zeroed(len, "scratch").expect("a thread's scratch, of a megabyte or so, fits"));
        }
        work(&mut scratch.as_mut().expect("just made")[..len])
    })
}
