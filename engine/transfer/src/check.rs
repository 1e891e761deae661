//! Check (XXH3-128) of a sealed rBlock's content, which a reader compares with the arrived bytes.
//!
//! `check(block) = X(c_0 ‖ c_1 ‖ …)` over the layers that reader and writer share, with `c_l = X(the block's KV of
//! layer l, [token][K | V][head][element], of the heads that both share, in the writer's element type)` and X = XXH3
//! with 128 bits. It does not depend on the memory layout of either side.
//!
//! BLAKE3, which seals leases, would be slower than the copy (ADR 10). The check detects damage and blocks that were
//! reused too early; it need not resist forgery: a malicious writer could compute checks of forged KV as well, and mutual
//! TLS excludes everyone else.

use lagoon_backend::Xxh3;
use std::fmt;

/// Check: XXH3-128 of KV content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Check(pub [u8; Check::BYTES]);

impl Check {
    /// Bytes of a check.
    pub const BYTES: usize = 16;

    /// The check of contiguous bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut checker = Checker::default();
        checker.update(bytes);
        checker.finish()
    }

    /// The check with this XXH3-128 value.
    #[must_use]
    pub fn from_hash(hash: u128) -> Self {
        Self(hash.to_le_bytes())
    }

    /// The check of a block from the checks of its layers, in order.
    #[must_use]
    pub fn combine(layers: impl IntoIterator<Item = Self, IntoIter: ExactSizeIterator>) -> Self {
        Checker::default().combine(layers.into_iter())
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Incremental [`Check`].
#[derive(Clone, Debug, Default)]
pub struct Checker(pub Xxh3);

impl Checker {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// [`Check::combine`] with this checker, reset: a new one would cost more than the check of a few layers.
    pub(crate) fn combine(&mut self, layers: impl ExactSizeIterator<Item = Check>) -> Check {
        let mut short = [0; Xxh3::SHORT];
        let bytes = layers.len() * Check::BYTES;
        if let Some(all) = short.get_mut(..bytes) {
            all.as_chunks_mut::<{ Check::BYTES }>().0.iter_mut().zip(layers).for_each(|(to, layer)| *to = layer.0);
            return Check::from_hash(Xxh3::short(all));
        }
        self.0.reset();
        layers.for_each(|layer| self.update(&layer.0));
        self.finish()
    }

    /// The check of the bytes so far.
    #[must_use]
    pub fn finish(&self) -> Check {
        Check::from_hash(self.0.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_change_a_check() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
        for size in [1, 7, 240, 241, 1024, 4999] {
            let mut checker = Checker::default();
            bytes.chunks(size).for_each(|part| checker.update(part));
            assert_eq!(checker.finish(), Check::of(&bytes), "{size}");
        }
        let mut other = bytes.clone();
        other[4321] ^= 1;
        assert_ne!(Check::of(&other), Check::of(&bytes));
    }

    /// The reference vectors of XXH3-128 (seed 0) for no bytes, as the algorithm's specification gives them.
    #[test]
    fn it_is_xxh3() {
        assert_eq!(Check::of(b"").0, 0x99aa_06d3_0147_98d8_6001_c324_468d_497f_u128.to_le_bytes());
    }

    #[test]
    fn the_order_of_layers_matters() {
        let (a, b) = (Check::of(b"a"), Check::of(b"b"));
        assert_ne!(Check::combine([a, b]), Check::combine([b, a]));
    }

    #[test]
    fn layers_are_hashed_one_behind_the_other() {
        for layers in [1u8, 2, 15, 16, 32] {
            let checks: Vec<Check> = (0..layers).map(|n| Check([n; Check::BYTES])).collect();
            let bytes: Vec<u8> = checks.iter().flat_map(|check| check.0).collect();
            assert_eq!(Check::combine(checks), Check::of(&bytes), "{layers}");
        }
    }
}
