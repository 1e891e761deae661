//! Keys of a piece of decode attention: arithmetic only.
//!
//! Blocks of the decode kernel run in waves: all that are resident on the multiprocessors at once. A grid of 1.05
//! waves takes the time of two, so the number of blocks is rounded down to whole waves. The plan (`attention.rs`)
//! asks once a step.

use super::WARP;
use super::attention::{DecodeClass, SHARED_BYTES_RESERVED, decode_shared_bytes};
use lagoon_types::KvDType;
use std::ops::RangeInclusive;

/// Registers of a multiprocessor.
const SM_REGISTERS: u32 = 64 << 10;
/// Overhead of a block, in keys: its launch, its queries, the first stage's latency, the merge of its piece.
const PIECE_COST_KEYS: u64 = 64;
/// Numbers of waves compared: the fewest that uncut parts take, and more.
const WAVES_COMPARED: u64 = 4;

/// Rows that the same blocks attend to: `keys` keys in all, and blocks (KV heads times tiles of packed rows) for each
/// piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) keys: u32,
    pub(super) blocks: u32,
}

/// Blocks of the decode kernel that run at once on a device with `sms` multiprocessors of `sm_shared_bytes`: as many
/// as the class wants and shared memory and registers allow, at least one each.
#[must_use]
pub(super) fn wave(class: DecodeClass, head_dim: u32, dtype: KvDType, [sms, sm_shared_bytes]: [u32; 2]) -> u32 {
    let by_memory = sm_shared_bytes / (decode_shared_bytes(head_dim, dtype, class) + SHARED_BYTES_RESERVED);
    let by_registers = SM_REGISTERS / (class.warps * WARP * decode_registers(head_dim, dtype));
    sms * class.blocks_per_sm.min(by_memory).min(by_registers).max(1)
}

/// Registers of a thread of `attention_decode_*` from cuda/kernels/budget.toml, rounded up to the unit of allocation.
const fn decode_registers(head_dim: u32, dtype: KvDType) -> u32 {
    match (head_dim, dtype) {
        (0..=64, KvDType::Fp8) => 112,
        (65..=96, KvDType::Fp8) => 136,
        (97..=128, KvDType::Fp8) => 160,
        (_, KvDType::Fp8) => 248,
        (0..=64, _) => 104,
        (65..=96, _) => 160,
        (97..=128, _) => 168,
        _ => 256,
    }
}

/// Most keys of a piece: a multiple of `unit`, at least `least`. A part is cut into `keys.div_ceil(piece)` pieces.
///
/// The blocks fit a whole number of waves: of [`WAVES_COMPARED`] numbers, the one that ends first if each wave takes
/// the time of its longest piece.
#[must_use]
pub(super) fn piece_keys(parts: &[Part], wave: u32, least: u32, unit: u32) -> u32 {
    let least = least.max(1).next_multiple_of(unit);
    let longest = parts.iter().map(|part| part.keys).max().unwrap_or(0).max(least).next_multiple_of(unit);
    let fewest = blocks(parts, longest).div_ceil(u64::from(wave)).max(1);
    let candidates = (fewest..fewest + WAVES_COMPARED).map(|waves| {
        let piece = shortest(parts, waves * u64::from(wave), least..=longest, unit);
        (waves * (u64::from(piece) + PIECE_COST_KEYS), piece)
    });
    candidates.min().map_or(longest, |(_, piece)| piece)
}

/// The shortest piece, a multiple of `unit` keys within `range`, with which the parts take at most `blocks_max`
/// blocks; the longest piece of `range` does.
fn shortest(parts: &[Part], blocks_max: u64, range: RangeInclusive<u32>, unit: u32) -> u32 {
    let (mut low, mut high) = (range.start() / unit, range.end() / unit);
    // Longer pieces never take more blocks.
    while low < high {
        let middle = low.midpoint(high);
        if blocks(parts, middle * unit) <= blocks_max {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low * unit
}

/// Blocks for pieces of so many keys.
fn blocks(parts: &[Part], piece: u32) -> u64 {
    parts.iter().map(|part| u64::from(part.keys.div_ceil(piece)) * u64::from(part.blocks)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention::Tuning;
    use proptest::prelude::*;

    const UNIT: u32 = 64;

    fn batch(seqs: u32, keys: u32, kv_heads: u32) -> Vec<Part> {
        vec![Part { keys, blocks: kv_heads }; seqs as usize]
    }

    /// Blocks of the grid and keys of its pieces.
    fn cut(parts: &[Part], wave: u32) -> (u64, u32) {
        let piece = piece_keys(parts, wave, 256, UNIT);
        (blocks(parts, piece), piece)
    }

    #[test]
    fn one_wave_is_not_exceeded() {
        // 8 KV heads over 396 blocks: 49 pieces and not 50, which would be 400 blocks.
        let (blocks, piece) = cut(&batch(1, 128 << 10, 8), 396);
        assert!(blocks <= 396 && blocks > 380, "{blocks} of {piece} keys");
        // Sixteen sequences: three pieces each (384 blocks), although a fourth would make pieces shorter.
        assert_eq!(cut(&batch(16, 8192, 8), 396).0, 384);
    }

    #[test]
    fn uncut_parts_beyond_a_wave_are_cut_to_whole_waves() {
        // 512 blocks over 396 would take two waves of 16 Ki keys; cut in three they take four of a third.
        let (blocks, piece) = cut(&batch(64, 16 << 10, 8), 396);
        assert_eq!((blocks, piece), (64 * 8 * 3, (16u32 << 10).div_ceil(3).next_multiple_of(UNIT)));
    }

    #[test]
    fn many_waves_of_uncut_parts_are_enough() {
        assert_eq!(cut(&batch(512, 4096, 8), 396), (4096, 4096));
        // But a long one among many short ones is cut.
        let mut parts = batch(600, 100, 8);
        parts.push(Part { keys: 128 << 10, blocks: 8 });
        let (blocks, piece) = cut(&parts, 396);
        assert!(piece < 1024 && blocks <= 16 * 396, "{blocks} of {piece} keys");
    }

    #[test]
    fn short_contexts_keep_the_least_piece() {
        assert_eq!(cut(&batch(2, 700, 8), 396), (48, 256));
        assert_eq!(piece_keys(&[], 396, 256, UNIT), 256);
        assert_eq!(piece_keys(&batch(1, 0, 8), 396, 250, UNIT), 256);
    }

    #[test]
    fn residency_is_what_fits() {
        let class = Tuning::untuned(132).classes[0];
        // Three blocks of 70 KB and 4 * 32 * 168 registers on 9.0 (228 KB), two on 8.0 (164 KB), one on 8.9 (100 KB).
        let bf16 = KvDType::BF16;
        assert_eq!([228, 164, 100, 50].map(|kb| wave(class, 128, bf16, [132, kb << 10])), [396, 264, 132, 132]);
        assert_eq!(wave(DecodeClass { warps: 8, stages: 2, ..class }, 128, bf16, [132, 1 << 20]), 132);
        assert_eq!(wave(DecodeClass { warps: 2, stages: 2, blocks_per_sm: 2, ..class }, 64, bf16, [10, 228 << 10]), 20);
    }

    proptest! {
        /// Pieces are long enough, and blocks not more than whole waves hold: a piece any shorter would take another wave.
        #[test]
        fn pieces_fill_waves(
            parts in prop::collection::vec((0..200_000u32, 1..40u32), 0..40),
            wave in 1..1000u32,
            least in 1..2000u32,
            unit in prop::sample::select(vec![16u32, 32, 64, 128]),
        ) {
            let parts: Vec<Part> = parts.into_iter().map(|(keys, blocks)| Part { keys, blocks }).collect();
            let piece = piece_keys(&parts, wave, least, unit);
            prop_assert!(piece >= least && piece.is_multiple_of(unit));
            let whole = blocks(&parts, u32::MAX);
            let cut = blocks(&parts, piece);
            let waves = cut.div_ceil(u64::from(wave));
            prop_assert!(cut >= whole && waves < whole.div_ceil(u64::from(wave)).max(1) + WAVES_COMPARED);
            if piece > least.next_multiple_of(unit) && cut > whole {
                prop_assert!(blocks(&parts, piece - unit) > waves * u64::from(wave));
            }
        }
    }
}
