//! Weights in device memory, in the format of their file.
//!
//! Invariants: a weight is a list of shards by rows, each in one format and no larger than a binding. Consecutive parts of one format
//! share shards. Rows of plain elements are padded with zeros to whole quads; packed blocks are arranged in groups of whole 16 bytes
//! ([`Arrangement`]) without loss, so that kernels load 16 bytes at once. Shards of one format start at multiples of 16 rows of it, so
//! that they begin with whole groups.

use crate::gpu::{Buf, Gpu};
use crate::kernel::Encoding;
use crate::memory::{pad_rows, quads};
use lagoon_backend::{DeviceError, WeightFormat, WeightPart, WeightSource};
use std::borrow::Cow;
use std::ops::Range;

/// Bytes of a weight that are arranged and uploaded at once.
const CHUNK_BYTES: usize = 32 << 20;
/// Rows of which each shard and each chunk has a multiple, but for the last.
const ROWS_STEP: usize = 16;

/// Some rows of a weight.
#[derive(Debug)]
pub(crate) struct WeightShard {
    pub(crate) buf: Buf,
    pub(crate) row0: usize,
    pub(crate) rows: usize,
    pub(crate) encoding: Encoding,
}

/// A weight `[rows][cols]` in the formats of its parts.
#[derive(Debug)]
pub struct WgpuWeight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) shards: Vec<WeightShard>,
}

impl WgpuWeight {
    pub(crate) fn new(gpu: &mut Gpu, source: &WeightSource) -> Result<Self, DeviceError> {
        let mut weight = Self { rows: 0, cols: source.cols, shards: Vec::new() };
        let parts: Vec<&WeightPart> = source.parts.iter().filter(|part| part.rows > 0).collect();
        for parts in parts.chunk_by(|a, b| a.format == b.format) {
            weight.push(gpu, parts)?;
        }
        Ok(weight)
    }

    /// The only row of a vector.
    ///
    /// # Panics
    /// If the weight is no vector; they are not packed.
    pub(crate) fn vector(&self) -> &WeightShard {
        let [shard] = &self.shards[..] else { panic!("a vector of {} rows", self.rows) };
        assert!(self.rows == 1 && !Encoding::PACKED.contains(&shard.encoding), "a vector is one plain row");
        shard
    }

    /// Appends rows of one format.
    fn push(&mut self, gpu: &mut Gpu, parts: &[&WeightPart]) -> Result<(), DeviceError> {
        let format = parts[0].format;
        let Some(encoding) = Encoding::new(format) else {
            return Err(DeviceError::Unsupported(format!("a weight in {format}")));
        };
        let rows = parts.iter().map(|part| part.rows).sum();
        let stored = Stored::new(format, self.cols)?;
        let most = usize::try_from(gpu.binding_bytes_max()).unwrap_or(usize::MAX);
        let shard_rows = stored.rows_within(most, rows);
        if shard_rows == 0 {
            let bytes = stored.bytes(1);
            return Err(DeviceError::Unsupported(format!("{ROWS_STEP} rows of a weight take {bytes} bytes each")));
        }
        let row0 = self.rows;
        for first in (0..rows).step_by(shard_rows) {
            let rows = first..rows.min(first + shard_rows);
            let buf = gpu.buffer("a weight", stored.bytes(rows.len()) as u64)?;
            stored.fill(gpu, &buf, parts, rows.clone())?;
            self.shards.push(WeightShard { buf, row0: row0 + first, rows: rows.len(), encoding });
        }
        self.rows += rows;
        Ok(())
    }
}

/// How rows of one format are stored.
#[derive(Clone, Copy, Debug)]
struct Stored {
    cols: usize,
    /// Bytes of a row, as given.
    given: usize,
    format: WeightFormat,
}

impl Stored {
    fn new(format: WeightFormat, cols: usize) -> Result<Self, DeviceError> {
        let given = format.bytes(cols).ok_or_else(|| {
            DeviceError::Unsupported(format!("rows of {cols} elements in {format}: they are no whole blocks"))
        })?;
        Ok(Self { cols, given, format })
    }

    /// Bytes of the first `rows` rows of a shard.
    fn bytes(self, rows: usize) -> usize {
        match Arrangement::of(self.format) {
            Some(arrangement) => arrangement.bytes(rows * self.given),
            None => rows * quads(self.cols) * 4 * self.format.block().bytes,
        }
    }

    /// The most rows of a shard of at most `bytes` bytes: all of `rows`, or a multiple of [`ROWS_STEP`].
    fn rows_within(self, bytes: usize, rows: usize) -> usize {
        if self.bytes(rows) <= bytes {
            return rows;
        }
        // Whole groups of blocks, so that bytes are proportional to rows.
        bytes / self.bytes(ROWS_STEP).max(1) * ROWS_STEP
    }

    /// Uploads rows of the parts to a shard, in chunks of whole rows.
    fn fill(self, gpu: &mut Gpu, buf: &Buf, parts: &[&WeightPart], rows: Range<usize>) -> Result<(), DeviceError> {
        let chunk = self.rows_within(CHUNK_BYTES, rows.len()).max(ROWS_STEP);
        for first in rows.clone().step_by(chunk) {
            let given = gather(parts, first..rows.end.min(first + chunk), self.given);
            let at = self.bytes(first - rows.start) as u64;
            match Arrangement::of(self.format) {
                Some(arrangement) => gpu.write_now(buf, at, &arrangement.arrange(&given))?,
                None if self.bytes(1) == self.given => gpu.write_now(buf, at, &given)?,
                None => gpu.write_now(buf, at, &pad_rows(&given, self.given, self.bytes(1)))?,
            }
        }
        Ok(())
    }
}

/// The bytes of some rows of `parts`, of `row_bytes` each; copied only where they are in several parts.
fn gather<'a>(parts: &[&'a WeightPart], rows: Range<usize>, row_bytes: usize) -> Cow<'a, [u8]> {
    let mut gathered: Cow<'a, [u8]> = Cow::Borrowed(&[]);
    let mut row0 = 0;
    for part in parts {
        assert_eq!(part.bytes.len(), part.rows * row_bytes, "a part's bytes match its shape");
        let first = rows.start.max(row0) - row0;
        let end = rows.end.min(row0 + part.rows).saturating_sub(row0);
        row0 += part.rows;
        if first < end {
            let bytes = &part.bytes[first * row_bytes..end * row_bytes];
            if gathered.is_empty() {
                gathered = Cow::Borrowed(bytes);
            } else {
                gathered.to_mut().extend_from_slice(bytes);
            }
        }
    }
    gathered
}

/// How packed blocks lie in groups of whole 16 bytes: first the heads of a group's blocks, then the rest of each block. See
/// `shared/weight_*.wgsl`.
#[derive(Clone, Copy, Debug)]
struct Arrangement {
    /// Blocks of a group: the heads of so many, and the rest of each, are whole 16 bytes.
    blocks: usize,
    /// Where a block has its head: a scale, unless that lies in 16 bytes of its own.
    head: Head,
    block_bytes: usize,
}

/// Bytes of a block.
#[derive(Clone, Copy, Debug)]
struct Head {
    at: usize,
    len: usize,
}

impl Arrangement {
    /// `None` for plain elements.
    fn of(format: WeightFormat) -> Option<Self> {
        let block_bytes = format.block().bytes;
        let (at, len) = match format {
            WeightFormat::Q8_0 | WeightFormat::Q4_0 => (0, 2),
            WeightFormat::Mxfp4 => (0, 1),
            WeightFormat::Q6K => (block_bytes - 2, 2),
            WeightFormat::Fp8 | WeightFormat::Int4G32 | WeightFormat::Int4G64 | WeightFormat::Int4G128 => (0, 4),
            _ if format.plain().is_some() => return None,
            _ => (0, 0),
        };
        let blocks = 16usize.checked_div(len).unwrap_or(1);
        Some(Self { blocks, head: Head { at, len }, block_bytes })
    }

    fn group_bytes(self) -> usize {
        self.blocks * self.block_bytes
    }

    /// Bytes that so many given bytes take.
    fn bytes(self, given: usize) -> usize {
        given.next_multiple_of(self.group_bytes())
    }

    fn arrange(self, given: &[u8]) -> Cow<'_, [u8]> {
        let Self { blocks, head, block_bytes } = self;
        if blocks == 1 {
            return Cow::Borrowed(given);
        }
        let mut out = vec![0; self.bytes(given.len())];
        for (to, from) in out.chunks_exact_mut(self.group_bytes()).zip(given.chunks(self.group_bytes())) {
            let (heads, rest) = to.split_at_mut(blocks * head.len);
            for (index, block) in from.chunks_exact(block_bytes).enumerate() {
                heads[index * head.len..][..head.len].copy_from_slice(&block[head.at..][..head.len]);
                let (before, behind) = (&block[..head.at], &block[head.at + head.len..]);
                let rest = &mut rest[index * (block_bytes - head.len)..];
                rest[..before.len()].copy_from_slice(before);
                rest[before.len()..][..behind.len()].copy_from_slice(behind);
            }
        }
        Cow::Owned(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arranged_blocks_keep_every_byte_in_whole_groups_of_16_bytes() {
        for format in WeightFormat::ALL.into_iter().filter(|format| Encoding::new(*format).is_some()) {
            let Some(arrangement) = Arrangement::of(format) else { continue };
            let Arrangement { blocks, head, block_bytes: size } = arrangement;
            let group = arrangement.group_bytes();
            assert!(group.is_multiple_of(16) && ROWS_STEP.is_multiple_of(blocks), "{format}");
            assert!((size - head.len).is_multiple_of(16) && (blocks * head.len).is_multiple_of(16), "{format}");
            // Whole groups, and one that is not.
            for given in [3 * blocks, 3 * blocks + 1] {
                let given: Vec<u8> = (0..given * size).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
                let arranged = arrangement.arrange(&given);
                assert_eq!(arranged.len(), arrangement.bytes(given.len()), "{format}");
                assert!(arranged.len() < given.len() + group, "{format}: {} bytes", arranged.len());
                for (index, block) in given.chunks_exact(size).enumerate() {
                    let (at, within) = (index / blocks * group, index % blocks);
                    let rest = &arranged[at + blocks * head.len + within * (size - head.len)..][..size - head.len];
                    let end = head.at + head.len;
                    assert_eq!(&arranged[at + within * head.len..][..head.len], &block[head.at..end], "{format}");
                    assert_eq!(rest, [&block[..head.at], &block[end..]].concat(), "{format}");
                }
            }
        }
    }

    #[test]
    fn rows_are_gathered_over_parts() {
        let bytes: Vec<u8> = (0..60).collect();
        let part = |rows: Range<usize>| WeightPart {
            rows: rows.len(),
            format: WeightFormat::F16,
            bytes: bytes[rows.start * 4..rows.end * 4].to_vec().into(),
        };
        let parts = [part(0..5), part(5..6), part(6..15)];
        let parts: Vec<&WeightPart> = parts.iter().collect();
        for start in 0..15 {
            for end in start..=15 {
                assert_eq!(*gather(&parts, start..end, 4), bytes[start * 4..end * 4], "{start}..{end}");
            }
        }
    }
}
