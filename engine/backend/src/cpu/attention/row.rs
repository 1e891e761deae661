//! One query row over a span: every key and value is read once from memory, for all heads that share it.

use super::super::simd::math::{add_ramp, exp, scale, softcap, widen_padded};
use super::super::simd::{Element, Kernel, Simd};
use super::super::threads::with_scratch;
use super::fp8::{WidenTokens, widened};
use super::{Call, Task};
use half::{bf16, f16};
use lagoon_types::{KvDType, KvShape};

/// Tokens whose scores are kept before their values are weighted; a multiple of every vector length.
const TILE: usize = super::ALIGNED as usize;
/// Query heads whose sums are held in registers together.
const GROUP: usize = 4;
/// The running maximum before any score.
const MAX_START: f32 = -1e30;

/// Attends one row over `task.span`.
pub(super) fn attend(call: &Call<'_>, task: &Task) {
    let g = call.batch.geometry;
    let seq = &call.batch.seqs[task.seq];
    let (heads, dim, q_dim) = (g.heads as usize, g.query_dim(), g.q_dim());
    // Room for whole vectors of any length.
    let padded = dim.next_multiple_of(16);
    let (target, row) = call.target(task);
    // SAFETY: tasks write disjoint rows of their targets.
    let (out, lse) =
        unsafe { (target.out.slice(row * q_dim..(row + 1) * q_dim), target.lse.slice(row * heads..(row + 1) * heads)) };
    let position = seq.pos0 + u32::try_from(task.rows.start).expect("positions are u32");
    let query = &call.q.data[(seq.row0 as usize + task.rows.start) * call.q.cols..][..q_dim];
    let wide = call.widened(TILE);
    with_scratch(wide + 2 * heads * padded + heads * TILE + GROUP * 16 * 16 + 2 * heads, |scratch| {
        let (wide, scratch) = scratch.split_at_mut(wide);
        let (q, rest) = scratch.split_at_mut(heads * padded);
        let (sums, rest) = rest.split_at_mut(heads * padded);
        let (scores, rest) = rest.split_at_mut(heads * TILE);
        let (products, rest) = rest.split_at_mut(GROUP * 16 * 16);
        let (max, total) = rest.split_at_mut(heads);
        sums.fill(0.0);
        max.fill(MAX_START);
        total.fill(0.0);
        let mut state = Row {
            kv_heads: g.kv_heads as usize,
            group: g.group() as usize,
            token: 2 * g.kv_dim(),
            values_at: g.values_at(),
            dim,
            padded,
            q: q.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
            scores: scores.as_mut_ptr(),
            products: products.as_mut_ptr(),
            max: max.as_mut_ptr(),
            total: total.as_mut_ptr(),
            slopes: call.slopes,
            softcap: call.batch.softcap,
        };
        // SAFETY: the device's instruction set is supported; scratch has the sizes that `Row` names.
        unsafe { call.isa.run(Load { row: &mut state, query, scale: call.batch.scale }) };
        for segment in call.segments(seq, &task.span) {
            let (bytes, back) = (call.bytes(&segment), position - segment.first_pos);
            // SAFETY: as above; the segment's tokens are whole.
            unsafe {
                match call.kv.shape.dtype {
                    KvDType::F32 => call.isa.run(Segment::<f32>::new(&mut state, bytes, back)),
                    KvDType::F16 => call.isa.run(Segment::<f16>::new(&mut state, bytes, back)),
                    KvDType::BF16 => call.isa.run(Segment::<bf16>::new(&mut state, bytes, back)),
                    KvDType::Fp8 => {
                        let (row, shape, wide) = (&mut state, call.kv.shape, &mut *wide);
                        call.isa.run(Segment8 { row, shape, tokens: bytes, wide, back });
                    }
                }
            }
        }
        for head in 0..heads {
            let seen = total[head] > 0.0;
            let factor = if seen { 1.0 / total[head] } else { 0.0 };
            for (out, sum) in out[head * dim..][..dim].iter_mut().zip(&sums[head * padded..]) {
                *out = sum * factor;
            }
            lse[head] = if seen { max[head] + total[head].ln() } else { Call::lse_of_none(task) };
        }
    });
}

/// The state of one row: pointers into scratch.
struct Row<'a> {
    kv_heads: usize,
    group: usize,
    /// Elements of a token in the store, or of its widened key and value.
    token: usize,
    /// Elements from a key to its value.
    values_at: usize,
    dim: usize,
    /// Distance of heads in `q` and `sums`: `dim` with room for whole vectors.
    padded: usize,
    /// `[heads][padded]`, scaled.
    q: *mut f32,
    /// `[heads][padded]`: weighted values so far.
    sums: *mut f32,
    /// `[heads][TILE]`.
    scores: *mut f32,
    /// `[GROUP][LANES][LANES]`: products of a head and as many keys, not yet summed across lanes.
    products: *mut f32,
    /// `[heads]`.
    max: *mut f32,
    /// `[heads]`: sum of the weights so far.
    total: *mut f32,
    /// `[heads]`, or none.
    slopes: &'a [f32],
    softcap: Option<f32>,
}

/// Brings the scaled queries into the state.
struct Load<'a, 'r> {
    row: &'a mut Row<'r>,
    query: &'a [f32],
    scale: f32,
}

impl Kernel for Load<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for head in 0..self.row.kv_heads * self.row.group {
            // SAFETY: heads of `dim` go to heads of `padded`.
            unsafe {
                let to = self.row.q.add(head * self.row.padded);
                widen_padded::<S, f32>(self.query.as_ptr().add(head * self.row.dim), self.row.dim, to);
                scale::<S>(to, self.row.dim.next_multiple_of(S::LANES), self.scale);
            }
        }
    }
}

/// Consecutive tokens, all of which the row sees.
struct Segment<'a, 'r, E> {
    row: &'a mut Row<'r>,
    /// `[tokens][k | v][kv_heads][dim]`.
    tokens: &'a [E],
    /// Positions from the first token to the row.
    back: u32,
}

impl<'a, 'r, E: Element> Segment<'a, 'r, E> {
    fn new(row: &'a mut Row<'r>, bytes: &'a [u8], back: u32) -> Self {
        Self { row, tokens: bytemuck::cast_slice(bytes), back }
    }
}

impl<E: Element> Kernel for Segment<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let row = self.row;
        let token = row.token;
        for (index, tile) in self.tokens.chunks(TILE * token).enumerate() {
            let n = tile.len() / token;
            let distance = (index * TILE) as f32 - self.back as f32;
            for kv_head in 0..row.kv_heads {
                // SAFETY: the tile has n tokens with this KV head.
                unsafe { row.heads::<S, E>(tile.as_ptr().add(kv_head * row.dim), n, kv_head, distance) };
            }
        }
    }
}

/// [`Segment`] of KV in 8 bits.
struct Segment8<'a, 'r> {
    row: &'a mut Row<'r>,
    shape: KvShape,
    /// `[tokens][k | v][kv_heads]` rows.
    tokens: &'a [u8],
    /// Room for `TILE` tokens of one KV head.
    wide: &'a mut [f32],
    /// Positions from the first token to the row.
    back: u32,
}

impl Kernel for Segment8<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { row, shape, wide, .. } = self;
        let token_bytes = shape.layer_token_bytes();
        row.token = widened(&shape);
        row.values_at = row.values_at.min(shape.head_dim as usize);
        for (index, tokens) in self.tokens.chunks(TILE * token_bytes).enumerate() {
            let n = tokens.len() / token_bytes;
            let distance = (index * TILE) as f32 - self.back as f32;
            for kv_head in 0..row.kv_heads {
                // SAFETY: `wide` then has n tokens of this KV head.
                unsafe {
                    WidenTokens { shape, kv_head, tokens, ahead: TILE, to: &mut *wide }.run::<S>();
                    row.heads::<S, f32>(wide.as_ptr(), n, kv_head, distance);
                }
            }
        }
    }
}

/// `sums[g] += k * q[g]`, for queries that lie `padded` elements apart.
#[inline(always)]
unsafe fn multiply<S: Simd, const G: usize>(k: S::V, q: *const f32, padded: usize, sums: &mut [S::V; G]) {
    for (g, sum) in sums.iter_mut().enumerate() {
        // SAFETY: each query has a vector there.
        *sum = unsafe { S::fma(k, S::load(q.add(g * padded)), *sum) };
    }
}

impl Row<'_> {
    /// `n` tokens for all heads of a KV head, whose keys begin at `keys`, `token` elements apart.
    #[inline(always)]
    unsafe fn heads<S: Simd, E: Element>(&mut self, keys: *const E, n: usize, kv_head: usize, distance: f32) {
        let (mut head, token) = (kv_head * self.group, self.token);
        let end = head + self.group;
        while head < end {
            let heads = GROUP.min(end - head);
            // SAFETY: the state has these heads; the tokens are passed on.
            unsafe {
                match heads {
                    4 => self.tile::<S, E, 4>(keys, token, n, head, distance),
                    3 => self.tile::<S, E, 3>(keys, token, n, head, distance),
                    2 => self.tile::<S, E, 2>(keys, token, n, head, distance),
                    _ => self.tile::<S, E, 1>(keys, token, n, head, distance),
                }
            }
            head += heads;
        }
    }

    /// `n` tokens for `G` heads from `head`, whose keys begin at `keys`, `stride` elements apart; the first lies at
    /// `distance` from the row's position.
    #[inline(always)]
    unsafe fn tile<S: Simd, E: Element, const G: usize>(
        &mut self,
        keys: *const E,
        stride: usize,
        n: usize,
        head: usize,
        distance: f32,
    ) {
        // SAFETY: passed on.
        unsafe {
            for first in (0..n).step_by(S::LANES) {
                self.products::<S, E, G>(keys, stride, first..n.min(first + S::LANES), head);
                for g in 0..G {
                    let scores = self.scores.add((head + g) * TILE + first);
                    S::store(scores, S::sums(self.products.add(g * S::LANES * S::LANES)));
                }
            }
            if let Some(cap) = self.softcap {
                // Scores beyond the last token are stale and stay so.
                softcap::<S>(self.scores.add(head * TILE), G * TILE, cap);
            }
            if let Some(slopes) = self.slopes.get(head..head + G) {
                for (g, slope) in slopes.iter().enumerate() {
                    add_ramp::<S>(self.scores.add((head + g) * TILE), TILE, distance, *slope);
                }
            }
            for g in 0..G {
                self.weights::<S>(head + g, n);
            }
            let values = keys.add(self.values_at);
            let mut at = 0;
            while at + 4 * S::LANES <= self.dim {
                self.values::<S, E, G, 4>(values.add(at), stride, n, head, at);
                at += 4 * S::LANES;
            }
            while at < self.dim {
                self.values::<S, E, G, 1>(values.add(at), stride, n, head, at);
                at += S::LANES;
            }
        }
    }

    /// Lane-wise products of `G` queries with the keys of `tokens`, at most a vector of them.
    #[inline(always)]
    unsafe fn products<S: Simd, E: Element, const G: usize>(
        &mut self,
        keys: *const E,
        stride: usize,
        tokens: std::ops::Range<usize>,
        head: usize,
    ) {
        let (dim, padded, products, values) = (self.dim, self.padded, self.products, self.values_at);
        // SAFETY: keys and queries have `dim` elements; products has room for GROUP squares.
        unsafe {
            let q = self.q.add(head * padded);
            for (slot, token) in tokens.enumerate() {
                let key = keys.add(token * stride);
                let ahead = key.wrapping_add(TILE * stride);
                let mut sums = [S::splat(0.0); G];
                let mut i = 0;
                while i + 4 * S::LANES <= dim {
                    for line in (0..4 * S::LANES).step_by(64 / size_of::<E>()) {
                        S::prefetch(ahead.wrapping_add(i + line).cast());
                        S::prefetch(ahead.wrapping_add(values + i + line).cast());
                    }
                    for v in 0..4 {
                        let at = i + v * S::LANES;
                        multiply::<S, G>(E::load::<S>(key.add(at)), q.add(at), padded, &mut sums);
                    }
                    i += 4 * S::LANES;
                }
                while i + S::LANES <= dim {
                    S::prefetch(ahead.wrapping_add(i).cast());
                    S::prefetch(ahead.wrapping_add(values + i).cast());
                    multiply::<S, G>(E::load::<S>(key.add(i)), q.add(i), padded, &mut sums);
                    i += S::LANES;
                }
                if i < dim {
                    multiply::<S, G>(E::load_part::<S>(key.add(i), dim - i), q.add(i), padded, &mut sums);
                }
                for (g, sum) in sums.iter().enumerate() {
                    S::store(products.add((g * S::LANES + slot) * S::LANES), *sum);
                }
            }
        }
    }

    /// Turns `n` scores of a head into weights, with a new maximum where there is one.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&mut self, head: usize, n: usize) {
        // SAFETY: scores has TILE elements a head, a whole number of vectors.
        unsafe {
            let scores = self.scores.add(head * TILE);
            let end = n.next_multiple_of(S::LANES);
            // Scores beyond the last token are of stale products.
            for i in n..end {
                *scores.add(i) = f32::NEG_INFINITY;
            }
            let mut largest = S::load(scores);
            for i in (S::LANES..end).step_by(S::LANES) {
                largest = S::max(largest, S::load(scores.add(i)));
            }
            let (largest, max) = (S::largest(largest), &mut *self.max.add(head));
            let total = &mut *self.total.add(head);
            if largest > *max {
                let keep = (*max - largest).exp();
                *max = largest;
                *total *= keep;
                scale::<S>(self.sums.add(head * self.padded), self.dim.next_multiple_of(S::LANES), keep);
            }
            let (max, mut sum) = (S::splat(*max), S::splat(0.0));
            for i in (0..end).step_by(S::LANES) {
                let weight = exp::<S>(S::sub(S::load(scores.add(i)), max));
                S::store(scores.add(i), weight);
                sum = S::add(sum, weight);
            }
            *total += S::sum(sum);
        }
    }

    /// Adds `NV` vectors of the weighted values, from element `at`, to `G` heads.
    #[inline(always)]
    unsafe fn values<S: Simd, E: Element, const G: usize, const NV: usize>(
        &mut self,
        values: *const E,
        stride: usize,
        n: usize,
        head: usize,
        at: usize,
    ) {
        // SAFETY: each token's values have `dim - at` elements from `values`; sums are padded to whole vectors.
        unsafe {
            let to = self.sums.add(head * self.padded + at);
            let weights = self.scores.add(head * TILE);
            let mut sums = [[S::splat(0.0); NV]; G];
            for (g, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(to.add(g * self.padded + v * S::LANES));
                }
            }
            let left = self.dim - at;
            for token in 0..n {
                let from = values.add(token * stride);
                let mut row = [S::splat(0.0); NV];
                for (v, row) in row.iter_mut().enumerate() {
                    *row = if NV == 1 && left < S::LANES {
                        E::load_part::<S>(from, left)
                    } else {
                        E::load::<S>(from.add(v * S::LANES))
                    };
                }
                for (g, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*weights.add(g * TILE + token));
                    for (sum, row) in sums.iter_mut().zip(row) {
                        *sum = S::fma(weight, row, *sum);
                    }
                }
            }
            for (g, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    S::store(to.add(g * self.padded + v * S::LANES), *sum);
                }
            }
        }
    }
}
