//! Many query rows of one KV head over a span: tiles of keys and values are widened once and multiplied by all rows
//! with the matrix kernel; tiles that no row sees are skipped, and only tiles on an edge are masked.

use super::super::multiply::Multiply;
use super::super::pack::{Plain, Transpose, Widen};
use super::super::simd::math::{add_ramp, exp, scale, softcap};
use super::super::simd::{Element, Kernel, Simd};
use super::super::threads::with_scratch;
use super::fp8::{WidenTokens, widened};
use super::{Call, Task};
use half::{bf16, f16};
use lagoon_types::run::visible;
use lagoon_types::{KvDType, KvRun};
use std::marker::PhantomData;
use std::ops::Range;

/// Tokens of a tile.
const TOKENS: usize = TILE_TOKENS as usize;
/// The same, as run lengths are counted.
const TILE_TOKENS: u32 = 64;
/// Query rows (of all heads that share the KV head) whose scores are in flight.
const BLOCK: usize = 24;
/// The running maximum before any score.
const MAX_START: f32 = -1e30;

/// Attends `task.rows` of the query heads of `kv_head` over `task.span`.
pub(super) fn attend(call: &Call<'_>, task: &Task, kv_head: usize) {
    let g = call.batch.geometry;
    let (group, dim) = (g.group() as usize, g.query_dim());
    let padded = dim.next_multiple_of(16);
    let m = task.rows.len() * group;
    let wide = call.widened(TOKENS);
    with_scratch(wide + 2 * m * padded + 2 * (padded + 16) * TOKENS + BLOCK * TOKENS + 2 * m, |scratch| {
        let (wide, scratch) = scratch.split_at_mut(wide);
        let (q, rest) = scratch.split_at_mut(m * padded);
        let (sums, rest) = rest.split_at_mut(m * padded);
        let (keys, rest) = rest.split_at_mut((padded + 16) * TOKENS);
        let (values, rest) = rest.split_at_mut((padded + 16) * TOKENS);
        let (scores, rest) = rest.split_at_mut(BLOCK * TOKENS);
        let (max, total) = rest.split_at_mut(m);
        sums.fill(0.0);
        max.fill(MAX_START);
        total.fill(0.0);
        load(call, task, kv_head, padded, q);
        let mut tiles =
            Tiles { call, task, kv_head, group, dim, padded, q, sums, keys, values, scores, max, total, wide };
        for segment in call.segments(&call.batch.seqs[task.seq], &task.span) {
            for skip in (0..segment.len).step_by(TOKENS) {
                let len = TILE_TOKENS.min(segment.len - skip);
                tiles.tile(KvRun { base: segment.base + skip, len, first_pos: segment.first_pos + skip });
            }
        }
        tiles.finish();
    });
}

/// The scaled queries, `[row][group]` by `padded`.
fn load(call: &Call<'_>, task: &Task, kv_head: usize, padded: usize, q: &mut [f32]) {
    let g = call.batch.geometry;
    let (group, dim) = (g.group() as usize, g.query_dim());
    let row0 = call.batch.seqs[task.seq].row0 as usize;
    for (i, row) in task.rows.clone().enumerate() {
        let from = &call.q.data[(row0 + row) * call.q.cols + kv_head * group * dim..][..group * dim];
        for (head, from) in from.chunks_exact(dim).enumerate() {
            let to = &mut q[(i * group + head) * padded..][..dim];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * call.batch.scale);
        }
    }
}

/// The state of a task; rows here are pairs of a query row and one of its heads, `row * group + head`.
struct Tiles<'a> {
    call: &'a Call<'a>,
    task: &'a Task,
    kv_head: usize,
    group: usize,
    dim: usize,
    padded: usize,
    /// `[rows][padded]`.
    q: &'a mut [f32],
    /// `[rows][padded]`: weighted values so far.
    sums: &'a mut [f32],
    /// `[dim][TOKENS]`.
    keys: &'a mut [f32],
    /// `[TOKENS][padded]`.
    values: &'a mut [f32],
    /// `[BLOCK][TOKENS]`.
    scores: &'a mut [f32],
    /// `[rows]`.
    max: &'a mut [f32],
    /// `[rows]`: sum of the weights so far.
    total: &'a mut [f32],
    /// `[TOKENS][k | v][head_dim]` of KV in 8 bits; else empty.
    wide: &'a mut [f32],
}

impl Tiles<'_> {
    /// The position of a row of the task.
    fn position(&self, row: usize) -> u32 {
        let first = self.call.batch.seqs[self.task.seq].pos0;
        first + u32::try_from(self.task.rows.start + row).expect("positions are u32")
    }

    /// The tokens of a tile that a row of the task sees.
    fn seen(&self, row: usize, tile: &KvRun) -> Range<usize> {
        let seen = visible(self.position(row), self.call.batch.window);
        let clip = |pos: u32| pos.saturating_sub(tile.first_pos).min(tile.len) as usize;
        clip(seen.start)..clip(seen.end)
    }

    /// Adds up to `TOKENS` tokens to every row that sees some of them.
    fn tile(&mut self, tile: KvRun) {
        let rows = self.task.rows.len();
        // The positions that a row sees move forward with its own, so the rows that see any of the tile are
        // consecutive.
        let first = (0..rows).find(|row| !self.seen(*row, &tile).is_empty());
        let Some(first) = first else { return };
        let last = (first..rows).rfind(|row| !self.seen(*row, &tile).is_empty()).unwrap_or(first);
        self.pack(&tile);
        let (start, end) = (first * self.group, (last + 1) * self.group);
        for row in (start..end).step_by(BLOCK) {
            self.block(row..end.min(row + BLOCK), &tile);
        }
    }

    /// Widens a tile's keys, transposed, and values.
    fn pack(&mut self, tile: &KvRun) {
        let Call { kv, batch, isa, .. } = self.call;
        let (n, g, shape) = (tile.len as usize, batch.geometry, kv.shape);
        let tokens = self.call.bytes(tile);
        assert!(tokens.len() == n * shape.layer_token_bytes() && n <= TOKENS, "whole tokens of a tile");
        let (key, value) = (self.kv_head * self.dim, g.values_at());
        // SAFETY: the device's instruction set is supported; keys and values are those of n whole tokens.
        unsafe {
            match shape.dtype {
                KvDType::F32 => self.pack_plain::<f32>(&bytemuck::cast_slice(tokens)[key..], n, 2 * g.kv_dim(), value),
                KvDType::F16 => self.pack_plain::<f16>(&bytemuck::cast_slice(tokens)[key..], n, 2 * g.kv_dim(), value),
                KvDType::BF16 => {
                    self.pack_plain::<bf16>(&bytemuck::cast_slice(tokens)[key..], n, 2 * g.kv_dim(), value)
                }
                KvDType::Fp8 => {
                    let wide = std::mem::take(&mut self.wide);
                    isa.run(WidenTokens { shape, kv_head: self.kv_head, tokens, ahead: TOKENS, to: &mut *wide });
                    self.pack_plain::<f32>(wide, n, widened(&shape), value.min(shape.head_dim as usize));
                    self.wide = wide;
                }
            }
        }
    }

    /// Of `n` tokens, `stride` elements apart: keys begin at `from`, values `values_at` elements further.
    ///
    /// # Safety
    /// The device's instruction set is supported, and there are as many tokens.
    unsafe fn pack_plain<E: Element + 'static>(&mut self, from: &[E], n: usize, stride: usize, values_at: usize) {
        let from_stride = stride * size_of::<E>();
        // SAFETY: both targets have room for a vector beyond `dim`; the rest is passed on.
        unsafe {
            self.call.isa.run(Transpose::<Plain<E>> {
                rows: n,
                first: 0,
                cols: self.dim,
                from: from.as_ptr().cast(),
                from_stride,
                to: self.keys.as_mut_ptr(),
                to_stride: TOKENS,
                stored: PhantomData,
            });
            self.call.isa.run(Widen::<Plain<E>> {
                rows: n,
                cols: self.dim,
                from: from[values_at..].as_ptr().cast(),
                from_stride,
                to: self.values.as_mut_ptr(),
                to_stride: self.padded,
                stored: PhantomData,
            });
        }
    }

    /// Scores, weights and weighted values of some rows with the packed tile.
    fn block(&mut self, rows: Range<usize>, tile: &KvRun) {
        let n = tile.len as usize;
        let (m, at) = (rows.len(), rows.start * self.padded);
        // SAFETY: the operands are as large as their documentation says, and distinct.
        unsafe {
            Multiply {
                m,
                n: TOKENS,
                k: self.dim,
                a: self.q[at..].as_ptr(),
                a_stride: self.padded,
                b: self.keys.as_ptr(),
                b_stride: TOKENS,
                c: self.scores.as_mut_ptr(),
                c_stride: TOKENS,
                add: false,
            }
            .run_on(self.call.isa);
        }
        if let Some(cap) = self.call.batch.softcap {
            // SAFETY: the device's instruction set is supported.
            unsafe { self.call.isa.run(Cap { scores: &mut self.scores[..m * TOKENS], cap }) };
        }
        self.bias(&rows, tile);
        self.mask(&rows, tile);
        // SAFETY: as above; a score row is whole vectors, and so is a row of sums.
        unsafe {
            self.call.isa.run(Softmax {
                padded: self.padded,
                scores: &mut self.scores[..m * TOKENS],
                sums: &mut self.sums[at..at + m * self.padded],
                max: &mut self.max[rows.clone()],
                total: &mut self.total[rows],
            });
            Multiply {
                m,
                n: self.padded,
                k: n,
                a: self.scores.as_ptr(),
                a_stride: TOKENS,
                b: self.values.as_ptr(),
                b_stride: self.padded,
                c: self.sums[at..].as_mut_ptr(),
                c_stride: self.padded,
                add: true,
            }
            .run_on(self.call.isa);
        }
    }

    /// Adds each row's biases by distance, if the model has them.
    fn bias(&mut self, rows: &Range<usize>, tile: &KvRun) {
        if self.call.slopes.is_empty() {
            return;
        }
        for (i, row) in rows.clone().enumerate() {
            let distance = tile.first_pos as f32 - self.position(row / self.group) as f32;
            let slope = self.call.slopes[self.kv_head * self.group + row % self.group];
            let scores = &mut self.scores[i * TOKENS..][..TOKENS];
            // SAFETY: the device's instruction set is supported.
            unsafe { self.call.isa.run(Bias { scores, distance, slope }) };
        }
    }

    /// Masks scores of tokens that a row does not see, and those beyond the tile's last token.
    fn mask(&mut self, rows: &Range<usize>, tile: &KvRun) {
        for (i, row) in rows.clone().enumerate() {
            let seen = self.seen(row / self.group, tile);
            if seen != (0..TOKENS) {
                let scores = &mut self.scores[i * TOKENS..][..TOKENS];
                scores[..seen.start].fill(f32::NEG_INFINITY);
                scores[seen.end.max(seen.start)..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Writes outputs and log-sum-exps to the task's target.
    fn finish(&self) {
        let g = self.call.batch.geometry;
        let (heads, q_dim) = (g.heads as usize, g.q_dim());
        let (target, row0) = self.call.target(self.task);
        for row in 0..self.total.len() {
            let (to, head) = (row0 + row / self.group, self.kv_head * self.group + row % self.group);
            let at = to * q_dim + head * self.dim;
            // SAFETY: tasks write disjoint rows and heads of their targets.
            let (out, lse) = unsafe {
                (target.out.slice(at..at + self.dim), target.lse.slice(to * heads + head..to * heads + head + 1))
            };
            let seen = self.total[row] > 0.0;
            let factor = if seen { 1.0 / self.total[row] } else { 0.0 };
            for (out, sum) in out.iter_mut().zip(&self.sums[row * self.padded..]) {
                *out = sum * factor;
            }
            lse[0] = if seen { self.max[row] + self.total[row].ln() } else { Call::lse_of_none(self.task) };
        }
    }
}

/// Caps whole vectors of scores.
struct Cap<'a> {
    scores: &'a mut [f32],
    cap: f32,
}

impl Kernel for Cap<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whole vectors.
        unsafe { softcap::<S>(self.scores.as_mut_ptr(), self.scores.len(), self.cap) };
    }
}

/// Biases one row's scores, whole vectors of them.
struct Bias<'a> {
    scores: &'a mut [f32],
    /// Of the first score's key.
    distance: f32,
    slope: f32,
}

impl Kernel for Bias<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whole vectors.
        unsafe { add_ramp::<S>(self.scores.as_mut_ptr(), self.scores.len(), self.distance, self.slope) };
    }
}

/// Turns scores into weights, row by row, with new maxima where there are some.
struct Softmax<'a> {
    padded: usize,
    scores: &'a mut [f32],
    sums: &'a mut [f32],
    max: &'a mut [f32],
    total: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.max.len() {
            // SAFETY: rows of scores and sums are whole vectors.
            unsafe {
                let scores = self.scores.as_mut_ptr().add(row * TOKENS);
                let mut largest = S::load(scores);
                for i in (S::LANES..TOKENS).step_by(S::LANES) {
                    largest = S::max(largest, S::load(scores.add(i)));
                }
                let largest = S::largest(largest);
                if largest > self.max[row] {
                    let keep = (self.max[row] - largest).exp();
                    self.max[row] = largest;
                    self.total[row] *= keep;
                    scale::<S>(self.sums.as_mut_ptr().add(row * self.padded), self.padded, keep);
                }
                let (max, mut sum) = (S::splat(self.max[row]), S::splat(0.0));
                for i in (0..TOKENS).step_by(S::LANES) {
                    let weight = exp::<S>(S::sub(S::load(scores.add(i)), max));
                    S::store(scores.add(i), weight);
                    sum = S::add(sum, weight);
                }
                self.total[row] += S::sum(sum);
            }
        }
    }
}
