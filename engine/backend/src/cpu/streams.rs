//! Whether weights are prefetched in software while they are streamed: on some machines the processor's own prefetching is
//! faster alone, on others it is slower by a tenth.
//!
//! Both forms give the same bits. The first large products of one row take turns with them, and the faster one is kept.

use crate::formats::WeightFormat;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Products that are measured for a format, half of them in each form.
const MEASURED: u32 = 16;
/// Smaller weights may be in a cache.
const BYTES_MIN: usize = 4 << 20;

/// How far ahead weights are prefetched, across the ends of rows.
pub(super) const AHEAD_BYTES: usize = 2048;

/// The form of a turn: half of the turns have each, in the order of Thue and Morse, so that a layer's products, which follow each
/// other in a fixed order, are measured in both.
const fn has_prefetch(turn: u32) -> bool {
    turn.count_ones().is_multiple_of(2)
}

/// The forms for all formats, of one device.
#[derive(Debug, Default)]
pub(super) struct Streams([Stream; WeightFormat::ALL.len()]);

/// The form for one format.
#[derive(Debug)]
struct Stream {
    /// Products measured so far.
    measured: AtomicU32,
    /// Least picoseconds per byte, without and with prefetches.
    best: [AtomicU64; 2],
}

impl Default for Stream {
    fn default() -> Self {
        Self { measured: AtomicU32::new(0), best: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)] }
    }
}

impl Streams {
    fn of(&self, format: WeightFormat) -> &Stream {
        &self.0[format as usize]
    }

    /// Whether weights in `format` are prefetched.
    pub(super) fn prefetch(&self, format: WeightFormat) -> bool {
        let [without, with] = &self.of(format).best;
        with.load(Ordering::Relaxed) <= without.load(Ordering::Relaxed)
    }

    /// Does `work`, a product of one row that reads `bytes` of weights in `format`, in the form that it is given.
    pub(super) fn measure(&self, format: WeightFormat, bytes: usize, work: impl FnOnce(bool)) {
        let stream = self.of(format);
        let turn = stream.measured.load(Ordering::Relaxed);
        if turn >= MEASURED || bytes < BYTES_MIN {
            return work(self.prefetch(format));
        }
        let prefetch = has_prefetch(turn);
        let start = Instant::now();
        work(prefetch);
        let cost = start.elapsed().as_nanos() * 1000 / bytes as u128;
        stream.best[usize::from(prefetch)].fetch_min(u64::try_from(cost).unwrap_or(u64::MAX), Ordering::Relaxed);
        if stream.measured.fetch_add(1, Ordering::Relaxed) + 1 == MEASURED {
            let [without, with] = stream.best.each_ref().map(|best| best.load(Ordering::Relaxed));
            tracing::debug!(%format, without, with, prefetch = with <= without, "picoseconds per byte of weights");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_take_turns_on_large_products_alone_and_then_stay() {
        let (streams, format) = (Streams::default(), WeightFormat::Q4K);
        let mut forms = Vec::new();
        let mut form = |bytes| streams.measure(format, bytes, |prefetch| forms.push(prefetch));
        form(BYTES_MIN - 1);
        form(BYTES_MIN - 1);
        (0..MEASURED).for_each(|_| form(BYTES_MIN));
        (0..3).for_each(|_| form(BYTES_MIN));
        let (small, rest) = forms.split_at(2);
        let (turns, kept) = rest.split_at(MEASURED as usize);
        assert_eq!(small, [true, true]);
        assert!(turns.chunks(2).all(|turn| turn[0] != turn[1]), "half of them with prefetches: {turns:?}");
        for product in 0..4 {
            let of_product: Vec<bool> = turns.iter().skip(product).step_by(4).copied().collect();
            assert!(
                of_product.contains(&true) && of_product.contains(&false),
                "product {product} of a layer: {turns:?}"
            );
        }
        assert!(kept.iter().all(|form| *form == streams.prefetch(format)), "{kept:?}");
        assert!(streams.prefetch(WeightFormat::F16), "other formats are not measured");
    }
}
