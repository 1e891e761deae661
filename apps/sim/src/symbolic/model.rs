//! The symbolic model: a hash where a transformer has arithmetic.
//!
//! A token's hidden value starts as a hash of its id and position. In each layer its KV is a hash of that value;
//! attention is the wrapping sum, over the visible keys, of a hash of each key and its position (so it is exact, and
//! independent of the order and grouping of the keys); and the next layer's value is a hash of the value and that sum.
//! The last layer's value determines the next token. As in a transformer, every token's KV depends on all tokens
//! before it.
//!
//! With rings, each of these layers has one with a window before it, whose KV is not in the pool.

use crate::rng::mix;
use lagoon_types::{AttentionGeometry, KvDType, KvShape, WindowShape};

/// Layers of the symbolic model.
pub const LAYERS: u32 = 2;
/// Numbers of the layers whose KV is in rings: this, and one more for each layer in the pool.
pub(crate) const RING_LAYER: u32 = LAYERS;
/// Token ids are below this.
pub const VOCAB: u32 = 4093;
/// Bytes of a key in one layer: [`Key`]'s four words.
pub const KEY_BYTES: usize = 32;
/// Bytes of a row's query and of its partial's output: two words.
pub const ROW_BYTES: usize = 16;

/// The KV of one token in one layer, in the canonical layout of [`kv_shape`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key {
    /// The symbol.
    pub value: u64,
    /// Position and layer of the key, to recognise a misplaced one: `1 << 63 | layer << 32 | position`; 0 if never
    /// written.
    pub tag: u64,
}

/// Two layers of one head of four f32: [`KEY_BYTES`] a key.
#[must_use]
pub const fn kv_shape() -> KvShape {
    KvShape { layers: LAYERS, kv_heads: 1, head_dim: 4, dtype: KvDType::F32 }
}

/// Its heads: one, of four elements.
#[must_use]
pub const fn geometry() -> AttentionGeometry {
    AttentionGeometry { heads: 1, kv_heads: 1, head_dim: 4, latent: false }
}

const fn tag(layer: u32, pos: u32) -> u64 {
    1 << 63 | (layer as u64) << 32 | pos as u64
}

pub(crate) const fn embed(token: u32, pos: u32) -> u64 {
    mix(((token as u64) << 32 | pos as u64).wrapping_add(0x243f_6a88_85a3_08d3))
}

impl Key {
    pub(crate) const fn of(hidden: u64, layer: u32, pos: u32) -> Self {
        Self { value: mix(hidden ^ (layer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)), tag: tag(layer, pos) }
    }

    /// The key's contribution to a row's attention, at the place of the key of `pos` in `layer`.
    pub(crate) const fn weight(self, layer: u32, pos: u32) -> u64 {
        mix(self.value ^ self.tag.rotate_left(17) ^ tag(layer, pos))
    }

    /// Whether the key is of this position and layer.
    pub(crate) const fn is_of(self, layer: u32, pos: u32) -> bool {
        self.tag == tag(layer, pos)
    }

    pub(crate) fn to_bytes(self, out: &mut Vec<u8>) {
        for word in [self.value, self.tag, mix(self.value ^ self.tag), 0] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// Inverse of [`Key::to_bytes`]; a damaged key reads as never written.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let [value, tag, check] = [0, 8, 16].map(|at| word(bytes, at));
        if check == mix(value ^ tag) { Self { value, tag } } else { Self::default() }
    }
}

/// The little-endian word at a byte offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// The next layer's hidden value.
pub(crate) const fn next_hidden(hidden: u64, attention: u64) -> u64 {
    mix(hidden.wrapping_add(attention.rotate_left(29)))
}

pub(crate) fn token_of(hidden: u64) -> u32 {
    u32::try_from(hidden % u64::from(VOCAB)).unwrap_or(0)
}

/// Sliding windows of the symbolic model's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// The window of layers in the pool.
    pub pooled: Option<u32>,
    /// The window of the layers whose KV is in rings, if there are any.
    pub rings: Option<u32>,
}

impl Windows {
    /// The window of a layer.
    pub(crate) const fn of(self, layer: u32) -> Option<u32> {
        if layer < RING_LAYER { self.pooled } else { self.rings }
    }

    /// The windowed KV of a sequence: there are as many layers in rings as in the pool.
    #[must_use]
    pub fn shape(self) -> Option<WindowShape> {
        self.rings.map(|window| WindowShape { tokens: window - 1, folds: 1, warm_up: LAYERS * (window - 1) })
    }
}

/// The expected tokens of a sequence: the model over its tokens, without a KV store that could be wrong.
#[derive(Clone, Debug)]
pub struct Oracle {
    windows: Windows,
    pos: u32,
    /// By layer: prefix sums of the weights of all keys.
    sums: [Vec<u64>; 2 * LAYERS as usize],
    hidden: u64,
}

impl Oracle {
    /// The oracle after a prompt.
    #[must_use]
    pub fn new(prompt: &[u32], windows: Windows) -> Self {
        let mut oracle = Self { windows, pos: 0, sums: [const { Vec::new() }; 2 * LAYERS as usize], hidden: 0 };
        oracle.sums.iter_mut().for_each(|s| s.push(0));
        prompt.iter().for_each(|token| oracle.push(*token));
        oracle
    }

    fn push(&mut self, token: u32) {
        let pos = self.pos;
        let mut hidden = embed(token, pos);
        let ring = |layer: u32| self.windows.rings.map(|_| RING_LAYER + layer);
        for layer in (0..LAYERS).flat_map(|layer| ring(layer).into_iter().chain([layer])) {
            let sums = &mut self.sums[layer as usize];
            let weight = Key::of(hidden, layer, pos).weight(layer, pos);
            let sum = sums[pos as usize].wrapping_add(weight);
            sums.push(sum);
            let first = lagoon_types::run::visible(pos, self.windows.of(layer)).start;
            hidden = next_hidden(hidden, sum.wrapping_sub(sums[first as usize]));
        }
        self.hidden = hidden;
        self.pos += 1;
    }

    /// The next token, which becomes part of the sequence.
    pub fn next_token(&mut self) -> u32 {
        let token = token_of(self.hidden);
        self.push(token);
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_token_depends_on_every_visible_token_and_its_place() {
        let next = |prompt: &[u32], window| {
            let mut oracle = Oracle::new(prompt, Windows { pooled: window, rings: None });
            (0..6).map(|_| oracle.next_token()).collect::<Vec<_>>()
        };
        let base = next(&[1, 2, 3, 4, 5, 6, 7, 8], None);
        assert_eq!(base, next(&[1, 2, 3, 4, 5, 6, 7, 8], None));
        assert_ne!(base, next(&[9, 2, 3, 4, 5, 6, 7, 8], None));
        assert_ne!(base, next(&[2, 1, 3, 4, 5, 6, 7, 8], None));
        assert_ne!(base, next(&[1, 2, 3, 4, 5, 6, 7, 8], Some(4)));
        // Two layers with a window of 3 see five tokens back.
        assert_eq!(next(&[1, 2, 3, 4, 5, 6, 7, 8], Some(3)), next(&[9, 9, 3, 4, 5, 6, 7, 8], Some(3)));
        assert_ne!(next(&[1, 2, 3, 4, 5, 6, 7, 8], Some(3)), next(&[1, 2, 3, 9, 5, 6, 7, 8], Some(3)));
    }

    #[test]
    fn layers_in_rings_have_a_window_of_their_own() {
        let next = |rings| Oracle::new(&[1, 2, 3, 4, 5, 6, 7, 8], Windows { pooled: None, rings }).next_token();
        assert_eq!([next(None), next(Some(3))], [next(None), next(Some(3))]);
        assert!(next(None) != next(Some(3)) && next(Some(3)) != next(Some(4)) && next(Some(8)) == next(Some(9)));
        assert_eq!(Windows { pooled: None, rings: Some(3) }.shape().map(|shape| shape.warm_up), Some(4));
    }

    #[test]
    fn keys_survive_their_bytes_and_damage_does_not() {
        let key = Key::of(77, 1, 12);
        let mut bytes = Vec::new();
        key.to_bytes(&mut bytes);
        assert_eq!(bytes.len(), KEY_BYTES);
        assert_eq!(kv_shape().layer_token_bytes(), KEY_BYTES);
        assert_eq!(Key::from_bytes(&bytes), key);
        bytes[3] ^= 1;
        assert_eq!(Key::from_bytes(&bytes), Key::default());
        assert!(key.is_of(1, 12) && !key.is_of(0, 12) && !key.is_of(1, 13));
    }
}
