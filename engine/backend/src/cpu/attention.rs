//! Micro attention: queries against runs, giving partials (online softmax, Milakov and Gimelshein 2018; tiles as in
//! FlashAttention, Dao et al. 2022; the context split over threads as in Flash-Decoding, Dao et al. 2023).
//!
//! A call becomes tasks, each for some rows and heads of one sequence over one span of positions. A sequence with too
//! few tasks is split over its context; its pieces are merged at the end. In this module, rows of pieces that saw no
//! key have negative infinity as their log-sum-exp; outside, the count shows it.

mod fp8;
mod plan;
mod row;
mod tile;

use super::buffer::Buffer;
use super::kv::Reading;
use super::simd::Isa;
use super::threads::{Disjoint, Threads};
use super::{CpuKv, CpuTensor};
use crate::{AttnBatch, AttnRows, DeviceError, Partials};
use lagoon_types::{KvDType, KvRun};
use plan::{Plan, Task, Work};
use std::ops::Range;

/// Positions at multiples of which tiles of keys begin, for results that do not depend on where runs end.
pub(super) const ALIGNED: u32 = 16;

/// Memory that attention keeps between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    plan: Plan,
    /// Pieces' outputs `[piece rows][heads * head_dim]`, then their log-sum-exps `[piece rows][heads]`.
    pieces: Option<Buffer<f32>>,
    slopes: Vec<f32>,
}

/// State shared by all tasks of a call.
struct Call<'a> {
    isa: Isa,
    invariant: bool,
    batch: &'a AttnBatch<'a>,
    q: &'a CpuTensor,
    kv: &'a CpuKv,
    store: Reading<'a>,
    /// Of each head's bias; none where the model has no ALiBi.
    slopes: &'a [f32],
    /// Target of tasks without pieces: the partials' rows.
    whole: Target<'a>,
    /// Target of pieces.
    pieces: Target<'a>,
}

/// Outputs `[rows][heads * head_dim]` and log-sum-exps `[rows][heads]`.
struct Target<'a> {
    out: Disjoint<'a, f32>,
    lse: Disjoint<'a, f32>,
}

impl Call<'_> {
    /// The runs' parts within `span`: first slot, first position and length.
    fn segments(&self, seq: &AttnRows, span: &Range<u32>) -> impl Iterator<Item = KvRun> {
        let span = span.clone();
        let invariant = self.invariant;
        self.batch.runs[seq.run0 as usize..][..seq.runs as usize].iter().flat_map(move |run| {
            let own = run.positions();
            let (from, to) = (own.start.max(span.start), own.end.min(span.end));
            // Tiles of keys begin at the same positions, wherever the run or the span does.
            let cut = if invariant { from.next_multiple_of(ALIGNED).min(to) } else { from };
            let part = move |from: u32, to: u32| {
                (from < to).then(|| KvRun { base: run.base + (from - own.start), len: to - from, first_pos: from })
            };
            part(from, cut).into_iter().chain(part(cut, to))
        })
    }

    /// A segment's K and V, checked to lie within the store.
    fn bytes(&self, segment: &KvRun) -> &[u8] {
        // SAFETY: segments are parts of the batch's runs, for which the store was locked.
        unsafe { self.store.slots(segment.base, segment.len as usize) }
    }

    /// Elements that a task widens `tokens` tokens of one KV head to, if the store is in 8 bits.
    fn widened(&self, tokens: usize) -> usize {
        if self.kv.shape.dtype == KvDType::Fp8 { tokens * fp8::widened(&self.kv.shape) } else { 0 }
    }

    /// Where a task writes, and its first row there.
    fn target(&self, task: &Task) -> (&Target<'_>, usize) {
        match task.piece_row {
            Some(row) => (&self.pieces, row),
            None => (&self.whole, self.batch.seqs[task.seq].row0 as usize + task.rows.start),
        }
    }

    /// The log-sum-exp of a row that saw no key: negative infinity in pieces, 0 outside.
    fn lse_of_none(task: &Task) -> f32 {
        if task.piece_row.is_some() { f32::NEG_INFINITY } else { 0.0 }
    }

    fn work(&self, task: &Task) {
        match task.work {
            Work::Row => row::attend(self, task),
            Work::Tile { kv_head } => tile::attend(self, task, kv_head),
        }
    }
}

/// See [`crate::Device::attention`]; counts are filled by the caller.
pub(super) fn attention(
    (threads, isa, invariant): (&Threads, Isa, bool),
    scratch: &mut Scratch,
    q: &CpuTensor,
    batch: &AttnBatch<'_>,
    (kv, layer): (&CpuKv, usize),
    partials: &mut Partials<CpuTensor>,
) -> Result<(), DeviceError> {
    let g = batch.geometry;
    let (heads, q_dim, rows) = (g.heads as usize, g.q_dim(), batch.rows());
    assert!(q.cols >= q_dim && partials.out.cols == q_dim && partials.lse.cols == heads, "columns of attention");
    assert_eq!((kv.shape.kv_heads, kv.shape.head_dim), (g.kv_heads, g.head_dim), "shape of the store");
    assert!(!g.latent || g.kv_heads == 1, "all heads read a latent row");
    assert!(rows <= q.rows, "rows within the queries");
    if invariant {
        scratch.plan.make_by_row(batch);
    } else {
        scratch.plan.make(batch, threads.count());
    }
    let piece_rows = scratch.plan.piece_rows;
    let wanted = piece_rows * (q_dim + heads);
    if scratch.pieces.as_ref().is_none_or(|p| p.len() < wanted) {
        scratch.pieces = Some(Buffer::zeroed(wanted, "attention scratch")?);
    }
    scratch.slopes.clear();
    scratch.slopes.extend(batch.alibi.iter().flat_map(|alibi| alibi.slopes(g.heads)));
    let pieces = &mut scratch.pieces.as_mut().expect("just made")[..wanted];
    let (piece_out, piece_lse) = pieces.split_at_mut(piece_rows * q_dim);
    let call = Call {
        isa,
        invariant,
        batch,
        q,
        kv,
        store: kv.reading(layer, batch.runs.iter().map(|run| (run.base, run.len as usize)))?,
        slopes: &scratch.slopes,
        whole: Target {
            out: Disjoint::new(partials.out.head_mut(rows)),
            lse: Disjoint::new(partials.lse.head_mut(rows)),
        },
        pieces: Target { out: Disjoint::new(piece_out), lse: Disjoint::new(piece_lse) },
    };
    let plan = &scratch.plan;
    threads.run(plan.tasks.len(), |task| call.work(&plan.tasks[task]));
    threads.run(plan.merges.len(), |merge| call.merge(&plan.merges[merge]));
    Ok(())
}

impl Call<'_> {
    /// Merges the pieces of a sequence's rows, by the formulas of `lagoon_types::partial` for many parts at once.
    fn merge(&self, merge: &plan::Merge) {
        let g = self.batch.geometry;
        let (heads, dim, q_dim) = (g.heads as usize, g.query_dim(), g.q_dim());
        let seq = &self.batch.seqs[merge.seq];
        for i in 0..seq.rows as usize {
            let row = seq.row0 as usize + i;
            // SAFETY: a merge has its sequence's rows for itself; tasks have ended.
            let (out, lse) = unsafe {
                (
                    self.whole.out.slice(row * q_dim..(row + 1) * q_dim),
                    self.whole.lse.slice(row * heads..(row + 1) * heads),
                )
            };
            let piece = |p: usize| merge.piece_row + p * seq.rows as usize + i;
            for head in 0..heads {
                // SAFETY: pieces are only read now.
                let part = |p: usize| unsafe {
                    let at = piece(p) * q_dim + head * dim;
                    (
                        &*self.pieces.out.slice(at..at + dim),
                        self.pieces.lse.slice(piece(p) * heads + head..piece(p) * heads + head + 1)[0],
                    )
                };
                let max = (0..merge.pieces).map(|p| part(p).1).fold(f32::NEG_INFINITY, f32::max);
                let out = &mut out[head * dim..][..dim];
                out.fill(0.0);
                lse[head] = 0.0;
                if max == f32::NEG_INFINITY {
                    continue;
                }
                let sum: f32 = (0..merge.pieces).map(|p| (part(p).1 - max).exp()).sum();
                for p in 0..merge.pieces {
                    let (values, lse) = part(p);
                    let weight = (lse - max).exp() / sum;
                    out.iter_mut().zip(values).for_each(|(o, v)| *o += weight * v);
                }
                lse[head] = max + sum.ln();
            }
        }
    }
}
