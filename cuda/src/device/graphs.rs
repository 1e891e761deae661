//! CUDA graphs of repeatable steps: a step's calls are recorded in a list first, and a list seen before is replayed
//! as a graph.
//!
//! A list has every kernel, copy and library call with its geometry and the bytes of its parameters. A graph is
//! launched only for a list that equals, byte for byte, the one that it was captured from, so nothing needs
//! invalidation: a moved buffer, another mapping or another shape gives another list. Data that varies from step to
//! step (token ids, slots, the attention plan with its lengths) is read from device memory at addresses that are
//! equal for equal steps ([`super::work_stream::WorkStream`]).
//!
//! A list is captured the second time it occurs, so prompts and other unique steps cost no capture. The number of
//! graphs is bounded; the least recently launched one is evicted.

use crate::blas::Call;
use crate::driver::{CudaError, Function, Graph, Launch as How, Stream, copy_within_device};
use lagoon_backend::LaunchCounters;
use std::collections::VecDeque;

/// Graphs that a stream keeps. A graph of an 8B model's step has about 400 nodes and takes about a megabyte.
const GRAPHS_MAX: usize = 32;
/// Sums of recent lists that are remembered to notice repeats.
const SEEN_MAX: usize = 64;
/// Fewest operations of a graph: launching a graph costs about as much as three kernels.
const OPS_MIN: usize = 4;

/// One operation of a list.
#[derive(Clone, Debug)]
enum Op {
    /// The parameter's bytes are the next `words` words of the list.
    Kernel {
        function: Function,
        how: How,
        words: usize,
        bytes: usize,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Blas(Call),
}

impl PartialEq for Op {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Kernel { function: a, how, bytes, .. }, Self::Kernel { function: b, how: h, bytes: n, .. }) => {
                (a.id(), how, bytes) == (b.id(), h, n)
            }
            (Self::Copy { to, from, bytes }, Self::Copy { to: t, from: f, bytes: n }) => (to, from, bytes) == (t, f, n),
            (Self::Blas(a), Self::Blas(b)) => a == b,
            _ => false,
        }
    }
}

/// Recorded operations that are not launched yet, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct List {
    ops: Vec<Op>,
    /// The parameters of all kernels.
    words: Vec<u64>,
}

impl List {
    pub(super) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
        self.words.clear();
    }

    pub(super) fn kernel(&mut self, function: &Function, how: How, params: &[u8]) {
        let before = self.words.len();
        let words = params.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        self.words.extend(words);
        let words = self.words.len() - before;
        self.ops.push(Op::Kernel { function: function.clone(), how, words, bytes: params.len() });
    }

    pub(super) fn copy(&mut self, to: u64, from: u64, bytes: usize) {
        self.ops.push(Op::Copy { to, from, bytes });
    }

    pub(super) fn blas(&mut self, call: Call) {
        self.ops.push(Op::Blas(call));
    }

    fn is(&self, other: &Self) -> bool {
        self.ops == other.ops && self.words == other.words
    }

    /// A hash of the parameters and the number of operations: lists that differ in kernels only may collide, which
    /// costs a comparison.
    fn sum(&self) -> u64 {
        let mix = |sum: u64, word: u64| (sum.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.words.iter().fold(self.ops.len() as u64, |sum, word| mix(sum, *word))
    }

    /// Launches all operations one by one.
    ///
    /// # Safety
    /// As promised by the callers of [`List::kernel`], [`List::copy`] and [`List::blas`].
    unsafe fn run(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut at = 0;
        for op in &self.ops {
            match op {
                Op::Kernel { function, how, words, bytes } => {
                    let params: &[u8] = &bytemuck::cast_slice(&self.words[at..at + words])[..*bytes];
                    at += words;
                    // SAFETY: the caller's promise.
                    unsafe { function.launch_bytes(stream, *how, params) }?;
                }
                Op::Copy { to, from, bytes } => copy_within_device(stream, *to, *from, *bytes)?,
                // SAFETY: the caller's promise.
                Op::Blas(call) => unsafe { call.run(stream) }?,
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Kept {
    sum: u64,
    list: List,
    graph: Graph,
}

/// The graphs of one stream, least recently launched first.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    kept: Vec<Kept>,
    seen: VecDeque<u64>,
    pub(super) counters: LaunchCounters,
    /// Why capturing has stopped.
    pub(super) off: Option<String>,
}

impl Graphs {
    /// Launches a step's list, as a graph if it has occurred before. A failed capture ends all capturing, and the
    /// list is launched operation by operation.
    ///
    /// # Safety
    /// All memory in the list is valid until the stream has run it.
    pub(super) unsafe fn launch(&mut self, list: &List, stream: &Stream) -> Result<(), CudaError> {
        if list.ops.len() < OPS_MIN || self.off.is_some() {
            self.counters.eager += 1;
            // SAFETY: the caller's promise.
            return unsafe { list.run(stream) };
        }
        let sum = list.sum();
        if let Some(at) = self.kept.iter().position(|kept| kept.sum == sum && kept.list.is(list)) {
            self.counters.replayed += 1;
            self.kept[at..].rotate_left(1);
            // SAFETY: the graph does the same as the list, for which the caller promises.
            return unsafe { self.kept[self.kept.len() - 1].graph.launch(stream) };
        }
        if let Some(at) = self.seen.iter().position(|seen| *seen == sum) {
            self.seen.remove(at);
            // SAFETY: the captured work is launched below only, or after such a promise for an equal list.
            let capture = || Graph::capture(stream, || unsafe { list.run(stream) });
            // A driver may refuse programmatic dependent launches in a graph.
            match capture().or_else(|error| if stream.forbid_captured_dependents() { capture() } else { Err(error) }) {
                Ok(graph) => return self.keep(Kept { sum, list: list.clone(), graph }, stream),
                Err(error) => self.off = Some(error.to_string()),
            }
        } else {
            if self.seen.len() == SEEN_MAX {
                self.seen.pop_front();
            }
            self.seen.push_back(sum);
        }
        self.counters.eager += 1;
        // SAFETY: the caller's promise.
        unsafe { list.run(stream) }
    }

    fn keep(&mut self, kept: Kept, stream: &Stream) -> Result<(), CudaError> {
        self.counters.captured += 1;
        if self.kept.len() == GRAPHS_MAX {
            // The graph may still run.
            stream.synchronize()?;
            self.kept.remove(0);
            self.counters.evicted += 1;
        }
        self.kept.push(kept);
        // SAFETY: of the list that was just captured, for which the caller of `launch` promises.
        unsafe { self.kept[self.kept.len() - 1].graph.launch(stream) }
    }

    /// Number of graphs.
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }
}
