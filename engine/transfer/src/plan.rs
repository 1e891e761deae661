//! Comparison of two layouts at CONNECT: whether a reader can read a writer's KV, and with which conversion.
//!
//! The model and the head dimension must be equal. The reader converts differences of rBlock size, order and strides of
//! dimensions, padding, division into planes (K and V together or apart, layers sliced or not), ranges of layers and
//! heads (the reader gets the intersection), and element type, if rounding is allowed or none happens.

use crate::{
    extent::{packed, pairs},
    layout::{DIMS, Index, Layout, Plane},
};
use lagoon_types::{KvDType, ModelHash};
use std::ops::Range;

/// View: layers and KV heads that reader and writer share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub layers: Range<u32>,
    /// KV heads.
    pub heads: Range<u32>,
}

impl View {
    /// The view of some model layers (`None`: of all); `None` if they are empty or not all in the view.
    #[must_use]
    pub fn within(&self, layers: Option<&Range<u32>>) -> Option<Self> {
        let layers = layers.unwrap_or(&self.layers);
        let inside = !layers.is_empty() && self.layers.start <= layers.start && layers.end <= self.layers.end;
        inside.then(|| Self { layers: layers.clone(), heads: self.heads.clone() })
    }
}

/// Span of an export: tokens and layers of a request's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Position of the first token.
    pub first_token: u32,
    pub tokens: u32,
    /// Model layers; `None`: all that reader and writer share.
    pub layers: Option<Range<u32>>,
}

impl From<(u32, u32)> for Span {
    /// All layers of `tokens` tokens from position `first_token` on.
    fn from((first_token, tokens): (u32, u32)) -> Self {
        Self { first_token, tokens, layers: None }
    }
}

/// Path of bytes from the writer's memory into the reader's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Directly to their places: extents are long in both memories.
    Direct,
    /// Through a buffer, which is then scattered or converted.
    Staged,
}

/// Conversion between two layouts: the result of a CONNECT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    pub view: View,
    pub way: Way,
    /// Whether both layouts of an rBlock are identical: it is copied unchanged.
    pub identical: bool,
    /// Whether the view covers the reader's layers and heads; otherwise it needs further writers.
    pub covers_reader: bool,
    /// Element types (from, to) of a rounding conversion.
    pub loss: Option<(KvDType, KvDType)>,
}

/// Error of incompatible layouts of reader and writer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("the reader runs model {reader}, the writer {writer}")]
    Model { reader: ModelHash, writer: ModelHash },
    #[error("the reader's heads have {reader} elements, the writer's {writer}")]
    HeadDim { reader: u32, writer: u32 },
    #[error(
        "the reader's {field} is {reader}, the writer's {writer}; hint: run both with the same model files and --kv-groups"
    )]
    Attention { field: &'static str, reader: u32, writer: u32 },
    #[error("the reader has layers {reader:?}, the writer {writer:?}: none in common")]
    Layers { reader: Range<u32>, writer: Range<u32> },
    #[error("the reader has KV heads {reader:?}, the writer {writer:?}: none in common")]
    Heads { reader: Range<u32>, writer: Range<u32> },
    #[error(
        "the reader keeps KV in {reader}, the writer in {writer}: {loss}; hint: the reader must allow the conversion's loss"
    )]
    DType { reader: KvDType, writer: KvDType, loss: &'static str },
    #[error("the reader keeps KV in {reader}, the writer in {writer}; hint: run both with the same --kv-dtype")]
    Scales { reader: KvDType, writer: KvDType },
}

/// Extents shorter than this are gathered in a buffer, if that makes them longer.
pub(crate) const DIRECT_BYTES_MIN: u64 = 4096;

fn common(a: &Range<u32>, b: &Range<u32>) -> Option<Range<u32>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

/// Description of the loss of a conversion between plain element types; `None` if it is exact.
#[must_use]
pub fn loss(from: KvDType, to: KvDType) -> Option<&'static str> {
    match (from, to) {
        (KvDType::F16, KvDType::BF16) => Some("3 of 10 mantissa bits are rounded away"),
        (KvDType::BF16, KvDType::F16) => Some("values beyond 65504 cannot be held, those below 6.1e-5 lose precision"),
        (KvDType::F32, KvDType::F16) => {
            Some("13 of 23 mantissa bits are rounded away, values beyond 65504 cannot be held")
        }
        (KvDType::F32, KvDType::BF16) => Some("16 of 23 mantissa bits are rounded away"),
        _ => None,
    }
}

/// Compares the layouts of a reader and a writer.
///
/// # Errors
/// [`Mismatch`] with both values.
pub fn plan(reader: &Layout, writer: &Layout, loss_allowed: bool) -> Result<Conversion, Mismatch> {
    if reader.model() != writer.model() {
        return Err(Mismatch::Model { reader: reader.model(), writer: writer.model() });
    }
    if reader.head_dim() != writer.head_dim() {
        return Err(Mismatch::HeadDim { reader: reader.head_dim(), writer: writer.head_dim() });
    }
    same_attention(reader, writer)?;
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
                if ours.dtype != theirs.dtype && ours.dtype.plain().and(theirs.dtype.plain()).is_none() {
                    return Err(Mismatch::Scales { reader: ours.dtype, writer: theirs.dtype });
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

/// Refuses attention that differs, by the first field that does.
fn same_attention(reader: &Layout, writer: &Layout) -> Result<(), Mismatch> {
    let (ours, theirs) = (reader.attention(), writer.attention());
    let fields = [
        ("latent", ours.latent.into(), theirs.latent.into()),
        ("windowed_layers", ours.windowed_layers, theirs.windowed_layers),
        ("window", ours.window, theirs.window),
    ];
    match fields.into_iter().find(|(_, reader, writer)| reader != writer) {
        Some((field, reader, writer)) => Err(Mismatch::Attention { field, reader, writer }),
        None => Ok(()),
    }
}

/// Whether an rBlock has the same bytes in both layouts.
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

/// Whether extents between two planes are long enough for direct reads to their places.
fn is_direct((reader, ours): (&Layout, &Plane), (writer, theirs): (&Layout, &Plane), view: &View) -> bool {
    if ours.dtype != theirs.dtype {
        return false;
    }
    let Some(kv) = common(&ours.part.range(), &theirs.part.range()) else { return true };
    let tokens = reader.block_tokens().min(writer.block_tokens());
    let heads = view.heads.end - view.heads.start;
    let len: Index = [1, 1, kv.end - kv.start, tokens, heads, writer.row_elements()];
    let first = |layout: &Layout, plane: &Plane| -> Index {
        [0, 0, kv.start - plane.part.range().start, 0, view.heads.start - layout.heads().start, 0]
    };
    let (a, b) = (theirs.grid(), ours.grid());
    let (a_first, b_first) = (first(writer, theirs), first(reader, ours));
    let shortest = |a: (&_, &Index), b: (&_, &Index)| {
        let mut bytes = u64::MAX;
        pairs(&len, a, b, &mut |pair| bytes = bytes.min(pair.elements * theirs.dtype.element_bytes() as u64));
        bytes
    };
    let both = shortest((&a, &a_first), (&b, &b_first));
    let staging = packed(&len, &a);
    let theirs_only = shortest((&a, &a_first), (&staging, &[0; DIMS]));
    both >= theirs_only.min(DIRECT_BYTES_MIN)
}
