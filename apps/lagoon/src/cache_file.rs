//! Files of the prefix cache's disk tier: one for each rBlock.
//!
//! | bytes | hold |
//! |---|---|
//! | 0..8 | `lagoonkv` |
//! | 8..24 | version, layers, tokens of the rBlock, bytes of a token in a layer: `u32`, little-endian |
//! | 24..56 | block hash |
//! | 56..72 | XXH3-128 of bytes 0..56 and of all behind this header |
//! | 72.. | KV of each layer, canonical layout |
//!
//! A file is complete or is not answered from: its length, header and check are compared when it is read. The check guards
//! against damage, not against someone who writes into the directory.

use bytes::Bytes;
use lagoon_instance::BlockKv;
use lagoon_kv::BlockHash;
use lagoon_transfer::{Check, Checker};
use std::fs::File;
use std::io::{self, Read as _, Write as _};

const MAGIC: &[u8; 8] = b"lagoonkv";
const VERSION: u32 = 1;
/// Bytes of a header before its check.
const CHECKED_BYTES: usize = 56;
/// Bytes of a header.
const HEADER_BYTES: usize = CHECKED_BYTES + Check::BYTES;

/// Sizes of the rBlocks that an instance keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockShape {
    pub(crate) layers: u32,
    pub(crate) block_tokens: u32,
    pub(crate) layer_token_bytes: u32,
}

impl BlockShape {
    fn layer_bytes(self) -> usize {
        self.block_tokens as usize * self.layer_token_bytes as usize
    }

    /// Bytes of a file.
    pub(crate) fn file_bytes(self) -> u64 {
        (HEADER_BYTES + self.layers as usize * self.layer_bytes()) as u64
    }

    fn header(self, hash: &BlockHash) -> [u8; CHECKED_BYTES] {
        let mut header = [0; CHECKED_BYTES];
        header[..8].copy_from_slice(MAGIC);
        let numbers = [VERSION, self.layers, self.block_tokens, self.layer_token_bytes];
        let places = header[8..24].as_chunks_mut::<4>().0;
        places.iter_mut().zip(numbers).for_each(|(to, n)| *to = n.to_le_bytes());
        header[24..].copy_from_slice(&hash.0);
        header
    }
}

fn check<'a>(header: &[u8], layers: impl Iterator<Item = &'a [u8]>) -> Check {
    let mut checker = Checker::default();
    checker.update(header);
    layers.for_each(|layer| checker.update(layer));
    checker.finish()
}

/// Writes a block's file.
///
/// # Panics
/// If the KV is not of this shape.
pub(crate) fn write(mut file: &File, shape: BlockShape, hash: &BlockHash, kv: &BlockKv) -> io::Result<()> {
    let whole = kv.iter().all(|layer| layer.len() == shape.layer_bytes());
    assert!(whole && kv.len() == shape.layers as usize, "a block of another shape");
    let header = shape.header(hash);
    file.write_all(&header)?;
    file.write_all(&check(&header, kv.iter().map(|layer| &layer[..])).0)?;
    kv.iter().try_for_each(|layer| file.write_all(layer))
}

/// Reads a block's file; `None` if it is damaged, of another block or another shape.
pub(crate) fn read(file: &File, shape: BlockShape, hash: &BlockHash) -> io::Result<Option<BlockKv>> {
    let bytes = shape.file_bytes();
    if file.metadata()?.len() != bytes {
        return Ok(None);
    }
    let mut all = Vec::with_capacity(usize::try_from(bytes).map_err(io::Error::other)?);
    file.take(bytes).read_to_end(&mut all)?;
    let all = Bytes::from(all);
    let header = shape.header(hash);
    if all.len() as u64 != bytes || all[..CHECKED_BYTES] != header {
        return Ok(None);
    }
    let layers = (0..shape.layers as usize).map(|at| HEADER_BYTES + at * shape.layer_bytes());
    let layers: BlockKv = layers.map(|from| all.slice(from..from + shape.layer_bytes())).collect();
    let is_right = check(&header, layers.iter().map(|layer| &layer[..])).0 == all[CHECKED_BYTES..HEADER_BYTES];
    Ok(is_right.then_some(layers))
}
