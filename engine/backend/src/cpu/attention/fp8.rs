//! KV in 8 bits, widened to f32 a few tokens at a time; attention then goes on as over KV in f32.

use super::super::simd::{E4M3_DIVISOR, Kernel, Simd};
use lagoon_types::kv_dtype::SCALE_BYTES;
use lagoon_types::{KvShape, e4m3};

/// Elements of a token's key and value of one KV head, widened.
pub(super) const fn widened(shape: &KvShape) -> usize {
    2 * shape.head_dim as usize
}

/// Widens keys and values of one KV head: `to` is `[tokens][k | v][head_dim]`.
pub(super) struct WidenTokens<'a> {
    pub(super) shape: KvShape,
    pub(super) kv_head: usize,
    /// Whole tokens of a layer, `[tokens][k | v][kv_heads]` rows.
    pub(super) tokens: &'a [u8],
    /// Tokens from each one to the one that is prefetched meanwhile.
    pub(super) ahead: usize,
    pub(super) to: &'a mut [f32],
}

impl Kernel for WidenTokens<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (row, dim, token) = (self.shape.row_bytes(), self.shape.head_dim as usize, self.shape.layer_token_bytes());
        let values = self.shape.kv_heads as usize * row;
        for (from, to) in self.tokens.chunks_exact(token).zip(self.to.chunks_exact_mut(2 * dim)) {
            for (at, to) in [self.kv_head * row, values + self.kv_head * row].into_iter().zip(to.chunks_exact_mut(dim))
            {
                let from = &from[at..][..row];
                for line in (0..row).step_by(64) {
                    // SAFETY: any address is valid.
                    unsafe { S::prefetch(from.as_ptr().wrapping_add(self.ahead * token + line)) };
                }
                // SAFETY: passed on.
                unsafe { widen_row::<S>(from, to) };
            }
        }
    }
}

/// Widens a row to as many elements as `to` has.
///
/// # Safety
/// As for [`Simd`]: the features are there.
#[inline(always)]
unsafe fn widen_row<S: Simd>(row: &[u8], to: &mut [f32]) {
    let (codes, scale) = row.split_at(row.len() - SCALE_BYTES);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    let whole = to.len() / S::LANES * S::LANES;
    assert!(codes.len() >= to.len(), "a row's length");
    // SAFETY: whole vectors of codes and of elements.
    unsafe {
        let (unloaded, factor) = (S::splat(E4M3_DIVISOR), S::splat(scale));
        for at in (0..whole).step_by(S::LANES) {
            let values = S::mul(S::load_e4m3(codes.as_ptr().add(at)), unloaded);
            S::store(to.as_mut_ptr().add(at), S::mul(values, factor));
        }
    }
    to[whole..].iter_mut().zip(&codes[whole..]).for_each(|(to, code)| *to = e4m3::decode(*code) * scale);
}
