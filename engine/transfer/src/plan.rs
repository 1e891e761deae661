//! CONNECT's comparison of two layouts: whether a reader can read a writer's KV, and how.
//!
//! What must be equal: the model and the head dimension. What may differ, because the reader converts: the rBlock size,
//! the order and strides of dimensions and their padding, how planes are cut (K and V together or apart, layers sliced
//! or not), the ranges of layers and heads (the reader gets what both have), and the element type, where rounding is
//! allowed or none happens.

use crate::{
    extent::{packed, pairs},
    layout::{DIMS, Index, Layout, Plane},
};
use lagoon_types::{DType, ModelHash};
use std::ops::Range;

/// What reader and writer both have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub layers: Range<u32>,
    /// KV heads.
    pub heads: Range<u32>,
}

impl View {
    /// The part of it in some layers of the model, or all of it. `None` if they are none, or not all in it.
    #[must_use]
    pub fn within(&self, layers: Option<&Range<u32>>) -> Option<Self> {
        let layers = layers.unwrap_or(&self.layers);
        let inside = !layers.is_empty() && self.layers.start <= layers.start && layers.end <= self.layers.end;
        inside.then(|| Self { layers: layers.clone(), heads: self.heads.clone() })
    }
}

/// What of a request's KV an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Position of its first token.
    pub first_token: u32,
    pub tokens: u32,
    /// Layers of the model; without, all that reader and writer share.
    pub layers: Option<Range<u32>>,
}

impl From<(u32, u32)> for Span {
    /// All layers of so many tokens (the second number) from a position on.
    fn from((first_token, tokens): (u32, u32)) -> Self {
        Self { first_token, tokens, layers: None }
    }
}

/// How bytes get from the writer's memory into the reader's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To where they belong: extents are long in both memories.
    Direct,
    /// To a buffer first, from where they are scattered or converted.
    Staged,
}

/// The result of a CONNECT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    pub view: View,
    pub way: Way,
    /// Both lay their rBlocks out alike: an rBlock is copied as it is.
    pub identical: bool,
    /// The view is all that the reader has; otherwise it needs other writers too.
    pub covers_reader: bool,
    /// Values are rounded, from and to these types.
    pub loss: Option<(DType, DType)>,
}

/// Why a reader cannot read a writer's KV.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("the reader runs model {reader}, the writer {writer}")]
    Model { reader: ModelHash, writer: ModelHash },
    #[error("the reader's heads have {reader} elements, the writer's {writer}")]
    HeadDim { reader: u32, writer: u32 },
    #[error("the reader has layers {reader:?}, the writer {writer:?}: none in common")]
    Layers { reader: Range<u32>, writer: Range<u32> },
    #[error("the reader has KV heads {reader:?}, the writer {writer:?}: none in common")]
    Heads { reader: Range<u32>, writer: Range<u32> },
    #[error(
        "the reader keeps KV in {reader}, the writer in {writer}: {loss}; hint: the reader must allow the conversion's loss"
    )]
    DType { reader: DType, writer: DType, loss: &'static str },
}

/// Extents that are shorter than this are gathered in a buffer, if that makes them longer.
pub(crate) const DIRECT_BYTES_MIN: u64 = 4096;

fn common(a: &Range<u32>, b: &Range<u32>) -> Option<Range<u32>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

/// What a conversion of element types may change, if anything.
#[must_use]
pub fn loss(from: DType, to: DType) -> Option<&'static str> {
    match (from, to) {
        (DType::BF16, DType::BF16) | (DType::F16, DType::F16) | (_, DType::F32) => None,
        (DType::F16, DType::BF16) => Some("3 of 10 mantissa bits are rounded away"),
        (DType::BF16, DType::F16) => Some("values beyond 65504 cannot be held, those below 6.1e-5 lose precision"),
        (DType::F32, DType::F16) => Some("13 of 23 mantissa bits are rounded away, values beyond 65504 cannot be held"),
        (DType::F32, DType::BF16) => Some("16 of 23 mantissa bits are rounded away"),
    }
}

/// Compares the layouts of a reader and a writer.
///
/// # Errors
/// Names both values.
pub fn plan(reader: &Layout, writer: &Layout, loss_allowed: bool) -> Result<Conversion, Mismatch> {
    if reader.model() != writer.model() {
        return Err(Mismatch::Model { reader: reader.model(), writer: writer.model() });
    }
    if reader.head_dim() != writer.head_dim() {
        return Err(Mismatch::HeadDim { reader: reader.head_dim(), writer: writer.head_dim() });
    }
    let layers = common(&reader.layers(), &writer.layers())
        .ok_or_else(|| Mismatch::Layers { reader: reader.layers(), writer: writer.layers() })?;
    let heads = common(&reader.heads(), &writer.heads())
        .ok_or_else(|| Mismatch::Heads { reader: reader.heads(), writer: writer.heads() })?;
    let view = View { layers, heads };
    let mut conversion = Conversion {
        way: Way::Direct,
        identical: alike(reader, writer),
        covers_reader: view.layers == reader.layers() && view.heads == reader.heads(),
        loss: None,
        view,
    };
    for layer in conversion.view.layers.clone() {
        for ours in reader.planes_of(layer) {
            for theirs in writer.planes_of(layer) {
                if common(&ours.part.range(), &theirs.part.range()).is_none() {
                    continue;
                }
                if let Some(loss) = loss(theirs.dtype, ours.dtype) {
                    if !loss_allowed {
                        return Err(Mismatch::DType { reader: ours.dtype, writer: theirs.dtype, loss });
                    }
                    conversion.loss = Some((theirs.dtype, ours.dtype));
                }
                if !is_direct((reader, ours), (writer, theirs), &conversion.view) {
                    conversion.way = Way::Staged;
                }
            }
        }
    }
    Ok(conversion)
}

/// Whether an rBlock of one is an rBlock of the other, byte for byte.
fn alike(a: &Layout, b: &Layout) -> bool {
    let same = |a: &Plane, b: &Plane| {
        let key = |plane: &Plane| (plane.grid().strides, plane.dtype, plane.layers(), plane.part.range());
        key(a) == key(b)
    };
    let ranges = |layout: &Layout| (layout.block_tokens(), layout.layers(), layout.heads());
    ranges(a) == ranges(b)
        && a.planes().len() == b.planes().len()
        && a.planes().iter().zip(b.planes()).all(|(a, b)| same(a, b))
}

/// Whether extents between two planes are long enough to be read to where they belong.
fn is_direct((reader, ours): (&Layout, &Plane), (writer, theirs): (&Layout, &Plane), view: &View) -> bool {
    if ours.dtype != theirs.dtype {
        return false;
    }
    let Some(kv) = common(&ours.part.range(), &theirs.part.range()) else { return true };
    let tokens = reader.block_tokens().min(writer.block_tokens());
    let heads = view.heads.end - view.heads.start;
    let len: Index = [1, 1, kv.end - kv.start, tokens, heads, reader.head_dim()];
    let first = |layout: &Layout, plane: &Plane| -> Index {
        [0, 0, kv.start - plane.part.range().start, 0, view.heads.start - layout.heads().start, 0]
    };
    let (a, b) = (theirs.grid(), ours.grid());
    let (a_first, b_first) = (first(writer, theirs), first(reader, ours));
    let shortest = |a: (&_, &Index), b: (&_, &Index)| {
        let mut bytes = u64::MAX;
        pairs(&len, a, b, &mut |pair| bytes = bytes.min(pair.elements * theirs.dtype.size() as u64));
        bytes
    };
    let both = shortest((&a, &a_first), (&b, &b_first));
    let staging = packed(&len, &a);
    let theirs_only = shortest((&a, &a_first), (&staging, &[0; DIMS]));
    both >= theirs_only.min(DIRECT_BYTES_MIN)
}
