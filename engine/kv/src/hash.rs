//! Content hash of a sealed remote block, computed by debtor and creditor while its KV is written.
//!
//! The hash of a block is `blake3(h_0 ‖ h_1 ‖ … ‖ h_{L-1})` with `h_l = blake3(the block's KV of layer l in the
//! canonical layout, tokens in order)`. The layers are independent, because a chunk is written layer by layer, tokens
//! in order within each. A layer's streaming state (about 2 KB) lives only from its first to its last token in the
//! block; a finished layer costs 32 bytes until the block is whole.

use std::collections::BTreeMap;

/// Content hash of an rBlock (blake3).
pub type ContentHash = [u8; 32];

#[derive(Clone, Debug, Default)]
enum Layer {
    #[default]
    Empty,
    Streaming(Box<blake3::Hasher>, usize),
    Done(ContentHash),
}

/// Incremental content hash of one block.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    layers: Vec<Layer>,
    /// Bytes of the whole block in one layer.
    layer_bytes: usize,
    done: usize,
}

impl BlockHasher {
    /// A hasher for a block with `layer_bytes` (not 0) bytes of KV in each of `layers` layers.
    #[must_use]
    pub fn new(layers: usize, layer_bytes: usize) -> Self {
        assert!(layer_bytes > 0, "a block without bytes has no content");
        Self { layers: vec![Layer::Empty; layers], layer_bytes, done: 0 }
    }

    /// Adds the next bytes of `layer`. Returns the block's hash when they complete its last layer.
    ///
    /// # Panics
    /// If the layer would exceed `layer_bytes`.
    pub fn update(&mut self, layer: usize, bytes: &[u8]) -> Option<ContentHash> {
        if bytes.is_empty() {
            return None;
        }
        let slot = &mut self.layers[layer];
        let (mut hasher, had) = match std::mem::take(slot) {
            Layer::Empty => (Box::new(blake3::Hasher::new()), 0),
            Layer::Streaming(hasher, had) => (hasher, had),
            Layer::Done(_) => panic!("layer {layer} of the block is complete"),
        };
        let have = had + bytes.len();
        assert!(have <= self.layer_bytes, "layer {layer} of the block overflows");
        hasher.update(bytes);
        if have < self.layer_bytes {
            *slot = Layer::Streaming(hasher, have);
            return None;
        }
        *slot = Layer::Done(*hasher.finalize().as_bytes());
        self.done += 1;
        (self.done == self.layers.len()).then(|| self.combine())
    }

    fn combine(&self) -> ContentHash {
        let mut all = blake3::Hasher::new();
        for layer in &self.layers {
            let Layer::Done(hash) = layer else { panic!("a layer of the block is not complete") };
            all.update(hash);
        }
        *all.finalize().as_bytes()
    }

    fn metadata_bytes(&self) -> usize {
        let streaming = self.layers.iter().filter(|l| matches!(l, Layer::Streaming(..))).count();
        self.layers.capacity() * size_of::<Layer>() + streaming * size_of::<blake3::Hasher>()
    }
}

/// Content hashes of a lease's blocks, and its written length per layer. Debtor and creditor each run one over the same
/// writes.
///
/// Invariant: a layer is written in ascending offset without gaps, so that one length describes its content.
#[derive(Clone, Debug)]
pub struct LeaseHasher {
    block_tokens: u32,
    layer_token_bytes: usize,
    /// Tokens written, per layer.
    written: Vec<u32>,
    filling: BTreeMap<u32, BlockHasher>,
}

impl LeaseHasher {
    /// A hasher for a lease with `layer_token_bytes` bytes per token in each of `layers` layers.
    #[must_use]
    pub fn new(layers: usize, block_tokens: u32, layer_token_bytes: usize) -> Self {
        assert!(block_tokens > 0 && layer_token_bytes > 0 && layers > 0, "an rBlock holds something");
        Self { block_tokens, layer_token_bytes, written: vec![0; layers], filling: BTreeMap::new() }
    }

    /// Starts after `tokens` tokens that another instance wrote in every layer: they get no hashes here.
    ///
    /// # Panics
    /// If a token was written already.
    pub fn skip(&mut self, tokens: u32) {
        assert!(self.written.iter().all(|written| *written == 0), "what is written is written");
        self.written.fill(tokens);
    }

    /// Counts the first `tokens` tokens of `layer` as written by others: they get no hashes here. A length never goes back.
    pub fn follow(&mut self, layer: usize, tokens: u32) {
        self.written[layer] = self.written[layer].max(tokens);
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.written.len()
    }

    /// Tokens written in `layer`, from the lease's first entry on.
    #[must_use]
    pub fn written(&self, layer: usize) -> u32 {
        self.written[layer]
    }

    /// Adds `bytes`, the KV of the next tokens of `layer` in the canonical layout. Appends the entries that it completes in
    /// every layer to `complete`, ascending, with their hashes.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of tokens.
    pub fn write(&mut self, layer: usize, mut bytes: &[u8], complete: &mut Vec<(u32, ContentHash)>) {
        assert_eq!(bytes.len() % self.layer_token_bytes, 0, "KV bytes are whole tokens");
        while !bytes.is_empty() {
            let at = self.written[layer];
            let entry = at / self.block_tokens;
            let room = (self.block_tokens - at % self.block_tokens) as usize;
            let tokens = room.min(bytes.len() / self.layer_token_bytes);
            let (now, rest) = bytes.split_at(tokens * self.layer_token_bytes);
            let block = self.filling.entry(entry).or_insert_with(|| {
                BlockHasher::new(self.written.len(), self.block_tokens as usize * self.layer_token_bytes)
            });
            if let Some(hash) = block.update(layer, now) {
                self.filling.remove(&entry);
                complete.push((entry, hash));
            }
            self.written[layer] += u32::try_from(tokens).expect("at most a block");
            bytes = rest;
        }
    }

    /// Drops the hashing state of entries for which `keep` is false (freed ones). Written lengths stay.
    pub fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.filling.retain(|entry, _| keep(*entry));
    }

    /// Memory of the hasher's state, in bytes.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        self.written.capacity() * size_of::<u32>()
            + self.filling.values().map(|b| size_of::<BlockHasher>() + b.metadata_bytes()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn byte(layer: usize, i: usize) -> u8 {
        u8::try_from((layer * 131 + i * 7) % 251).unwrap()
    }

    /// The definition, written out.
    fn expected(layers: usize, bytes: std::ops::Range<usize>) -> ContentHash {
        let mut cat = Vec::new();
        for layer in 0..layers {
            let content: Vec<u8> = bytes.clone().map(|i| byte(layer, i)).collect();
            cat.extend_from_slice(blake3::hash(&content).as_bytes());
        }
        *blake3::hash(&cat).as_bytes()
    }

    #[test]
    fn any_split_of_the_writes_gives_the_defined_hash() {
        // 2 layers, 4 tokens a block, 3 bytes a token, 10 tokens.
        for split in [1, 2, 3, 5, 10] {
            let mut hasher = LeaseHasher::new(2, 4, 3);
            let mut complete = Vec::new();
            for start in (0..10).step_by(split) {
                for layer in 0..2 {
                    let part: Vec<u8> = (start * 3..(start + split).min(10) * 3).map(|i| byte(layer, i)).collect();
                    hasher.write(layer, &part, &mut complete);
                }
            }
            assert_eq!(complete, [(0, expected(2, 0..12)), (1, expected(2, 12..24))], "split {split}");
            assert_eq!((hasher.written(0), hasher.written(1)), (10, 10));
        }
    }

    #[test]
    fn an_entry_is_whole_only_with_its_last_layer() {
        let mut hasher = LeaseHasher::new(2, 2, 1);
        let mut complete = Vec::new();
        hasher.write(0, &[1, 2, 3, 4], &mut complete);
        assert!(complete.is_empty());
        assert_eq!((hasher.written(0), hasher.written(1)), (4, 0));
        hasher.write(1, &[1, 2, 3], &mut complete);
        assert_eq!(complete.len(), 1);
        assert_eq!(complete[0].0, 0);
    }

    #[test]
    fn a_changed_byte_or_swapped_layers_change_the_hash() {
        let run = |a: &[u8], b: &[u8]| {
            let mut block = BlockHasher::new(2, 2);
            assert_eq!(block.update(0, a), None);
            block.update(1, b).unwrap()
        };
        let base = run(&[1, 2], &[3, 4]);
        assert_ne!(base, run(&[1, 2], &[3, 5]));
        assert_ne!(base, run(&[3, 4], &[1, 2]));
    }

    #[test]
    #[should_panic(expected = "overflows")]
    fn too_many_bytes_panic() {
        BlockHasher::new(1, 2).update(0, &[0; 3]);
    }
}
