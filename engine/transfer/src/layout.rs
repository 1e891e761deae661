//! Memory layout of a worker's KV: tensor metadata as KVDirect exchanges it in CONNECT (§4.1).
//!
//! A [`Layout`] is a list of planes (tensors) in registered regions. A plane's dimensions come in any order, with
//! strides in elements; gaps (padding) are allowed, overlaps are not. Invariants of a [`Layout`], also of a peer's:
//! every element of every plane lies in its region, no two indices of a plane share a byte, and every layer's K and V
//! is in exactly one plane. Arithmetic on it therefore neither overflows nor leaves a region.

use lagoon_protocol::{TransferAxis, TransferDim, TransferLayout, TransferPart, TransferPlane};
use lagoon_types::{KvDType, ModelHash, limits};
use std::{fmt, ops::Range};

/// Number of dimensions of a plane.
pub const DIMS: usize = 6;

/// Dimension of a plane, in the order of an [`Index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dim {
    /// rBlocks ("B" in the paper).
    Block,
    Layer,
    /// K, then V ("KV").
    Kv,
    /// Tokens of an rBlock ("L").
    Token,
    /// KV heads ("H").
    Head,
    /// Elements of a head ("D"), and the bytes of their scale where rows have one.
    Elem,
}

impl Dim {
    /// All dimensions, in the order of an [`Index`].
    pub const ALL: [Self; DIMS] = [Self::Block, Self::Layer, Self::Kv, Self::Token, Self::Head, Self::Elem];

    const fn at(self) -> usize {
        self as usize
    }

    fn from_wire(code: i32) -> Option<Self> {
        Some(match TransferDim::try_from(code).ok()? {
            TransferDim::Unknown => return None,
            TransferDim::Block => Self::Block,
            TransferDim::Layer => Self::Layer,
            TransferDim::Kv => Self::Kv,
            TransferDim::Token => Self::Token,
            TransferDim::Head => Self::Head,
            TransferDim::Elem => Self::Elem,
        })
    }

    fn to_wire(self) -> TransferDim {
        match self {
            Self::Block => TransferDim::Block,
            Self::Layer => TransferDim::Layer,
            Self::Kv => TransferDim::Kv,
            Self::Token => TransferDim::Token,
            Self::Head => TransferDim::Head,
            Self::Elem => TransferDim::Elem,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Block => "block",
            Self::Layer => "layer",
            Self::Kv => "kv",
            Self::Token => "token",
            Self::Head => "head",
            Self::Elem => "element",
        })
    }
}

/// One number for each dimension, in the order of [`Dim::ALL`].
pub type Index = [u32; DIMS];

/// One dimension of a plane. Strides are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    pub dim: Dim,
    pub size: u32,
    pub stride: u64,
}

/// Part of the KV that a plane holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Both,
    Keys,
    Values,
}

impl Part {
    /// Indices of the part in the kv dimension: K is 0, V is 1.
    #[must_use]
    pub const fn range(self) -> Range<u32> {
        match self {
            Self::Both => 0..2,
            Self::Keys => 0..1,
            Self::Values => 1..2,
        }
    }
}

/// Plane: one tensor of KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Index of the region.
    pub region: u32,
    /// Byte offset of element 0 in the region.
    pub base: u64,
    /// In any order; absent dimensions have size 1.
    pub axes: Vec<Axis>,
    pub dtype: KvDType,
    /// Model layer of index 0 of the layer dimension.
    pub first_layer: u32,
    pub part: Part,
}

/// Grid of elements with byte offsets `base + Σ index · stride · elem_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub region: u32,
    /// Byte offset of the element at index 0 in every dimension.
    pub base: u64,
    /// Strides in elements, by dimension.
    pub strides: [u64; DIMS],
    pub elem_bytes: u64,
}

impl Grid {
    /// Byte offset of an element in the region (the paper's dot product of index and stride).
    #[must_use]
    pub fn offset(&self, index: &Index) -> u64 {
        let elements: u64 = index.iter().zip(&self.strides).map(|(i, stride)| u64::from(*i) * stride).sum();
        self.base + elements * self.elem_bytes
    }
}

impl Plane {
    fn axis(&self, dim: Dim) -> Option<&Axis> {
        self.axes.iter().find(|axis| axis.dim == dim)
    }

    /// Size of a dimension; 1 if the plane lacks it.
    #[must_use]
    pub fn size(&self, dim: Dim) -> u32 {
        self.axis(dim).map_or(1, |axis| axis.size)
    }

    /// Elements of a row of `head_dim` elements as the plane stores it ([`KvDType::row_elements`]).
    fn row_elements(&self, head_dim: u32) -> u32 {
        u32::try_from(self.dtype.row_elements(head_dim)).unwrap_or(u32::MAX)
    }

    /// Layers that the plane holds.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.first_layer..self.first_layer + self.size(Dim::Layer)
    }

    /// Grid of the plane, for indices that count from the plane's first element in each dimension.
    #[must_use]
    pub fn grid(&self) -> Grid {
        let mut strides = [0; DIMS];
        for axis in &self.axes {
            strides[axis.dim.at()] = axis.stride;
        }
        Grid { region: self.region, base: self.base, strides, elem_bytes: self.dtype.element_bytes() as u64 }
    }

    /// Bytes from element 0 to the end of the last one. `None` when that overflows.
    fn span(&self) -> Option<u64> {
        let mut last = 0u64;
        for axis in &self.axes {
            last = last.checked_add(u64::from(axis.size.checked_sub(1)?).checked_mul(axis.stride)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.element_bytes() as u64)
    }

    /// Whether two indices may share an element: a stride is not larger than the extent of the smaller ones.
    fn overlaps(&self) -> bool {
        let mut axes: Vec<&Axis> = self.axes.iter().filter(|axis| axis.size > 1).collect();
        axes.sort_by_key(|axis| axis.stride);
        let mut span = 0u64;
        for axis in axes {
            if axis.stride <= span {
                return true;
            }
            span = span.saturating_add(u64::from(axis.size - 1).saturating_mul(axis.stride));
        }
        false
    }
}

/// Memory layout of a worker's KV. [`Layout::new`] and [`Layout::from_wire`] check it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    model: ModelHash,
    block_tokens: u32,
    blocks: u32,
    layers: Range<u32>,
    heads: Range<u32>,
    head_dim: u32,
    region_bytes: Vec<u64>,
    planes: Vec<Plane>,
    attention: LayoutAttention,
}

/// Properties of a model's attention that the planes of a [`Layout`] do not show; equal in reader and writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutAttention {
    /// Whether K and V are the halves of one latent row.
    pub latent: bool,
    /// Layers whose KV is kept out of rBlocks; exports may carry their last window.
    pub windowed_layers: u32,
    /// Positions of that last window; 0 without such layers.
    pub window: u32,
}

/// Unchecked parts of a [`Layout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutParts {
    pub model: ModelHash,
    /// Tokens of an rBlock.
    pub block_tokens: u32,
    pub blocks: u32,
    /// Model layers on this worker.
    pub layers: Range<u32>,
    /// KV heads of the model on this worker.
    pub heads: Range<u32>,
    pub head_dim: u32,
    /// Size of each registered region.
    pub region_bytes: Vec<u64>,
    pub planes: Vec<Plane>,
}

/// Error of an invalid layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error("{what} is {value}, allowed: {allowed}")]
    Value { what: &'static str, value: u64, allowed: String },
    #[error("plane {plane}: {dim} has size {size}, the layout says {expected}")]
    Size { plane: usize, dim: Dim, size: u32, expected: u32 },
    #[error("plane {plane} lists {dim} twice")]
    Twice { plane: usize, dim: Dim },
    #[error("plane {plane}: its strides make indices overlap")]
    Overlap { plane: usize },
    #[error("plane {plane} ends at byte {end} of a region of {region_bytes} bytes")]
    Outside { plane: usize, end: u64, region_bytes: u64 },
    #[error("{part} of layer {layer} is in {planes} planes")]
    Coverage { layer: u32, part: &'static str, planes: usize },
}

fn value(what: &'static str, value: u64, allowed: impl fmt::Display) -> LayoutError {
    LayoutError::Value { what, value, allowed: allowed.to_string() }
}

fn within(what: &'static str, number: u32, max: u32) -> Result<(), LayoutError> {
    if (1..=max).contains(&number) { Ok(()) } else { Err(value(what, number.into(), format_args!("1 to {max}"))) }
}

impl Layout {
    /// Checks the parts (see the module's invariants).
    ///
    /// # Errors
    /// [`LayoutError`] with the invalid value.
    pub fn new(parts: LayoutParts) -> Result<Self, LayoutError> {
        let LayoutParts { model, block_tokens, blocks, layers, heads, head_dim, region_bytes, planes } = parts;
        within("the rBlock size", block_tokens, limits::BLOCK_TOKENS_MAX)?;
        within("the number of rBlocks", blocks, limits::TRANSFER_BLOCKS_MAX)?;
        within("the end of the layer range", layers.end, limits::LAYERS_MAX)?;
        within("the number of layers", layers.end.saturating_sub(layers.start), limits::LAYERS_MAX)?;
        within("the end of the head range", heads.end, limits::HEADS_MAX)?;
        within("the number of KV heads", heads.end.saturating_sub(heads.start), limits::HEADS_MAX)?;
        within("the head dimension", head_dim, limits::HEAD_DIM_MAX)?;
        if planes.len() > limits::TRANSFER_PLANES_MAX || region_bytes.len() > limits::TRANSFER_PLANES_MAX {
            let count = planes.len().max(region_bytes.len()) as u64;
            return Err(value("the number of planes or regions", count, limits::TRANSFER_PLANES_MAX));
        }
        let attention = LayoutAttention::default();
        let layout = Self { model, block_tokens, blocks, layers, heads, head_dim, region_bytes, planes, attention };
        for (number, plane) in layout.planes.iter().enumerate() {
            layout.check_plane(number, plane)?;
        }
        layout.check_coverage()?;
        Ok(layout)
    }

    fn check_plane(&self, number: usize, plane: &Plane) -> Result<(), LayoutError> {
        for (at, axis) in plane.axes.iter().enumerate() {
            if plane.axes[..at].iter().any(|other| other.dim == axis.dim) {
                return Err(LayoutError::Twice { plane: number, dim: axis.dim });
            }
        }
        let part = plane.part.range();
        if plane.row_elements(self.head_dim) != self.row_elements() {
            return Err(value(
                "a plane's element type",
                plane.dtype.code().into(),
                "with a scale in every plane or in none",
            ));
        }
        let expected = [
            (Dim::Block, self.blocks),
            (Dim::Kv, part.end - part.start),
            (Dim::Token, self.block_tokens),
            (Dim::Head, self.heads.end - self.heads.start),
            (Dim::Elem, self.row_elements()),
        ];
        for (dim, expected) in expected {
            let size = plane.size(dim);
            if size != expected {
                return Err(LayoutError::Size { plane: number, dim, size, expected });
            }
        }
        let layers = plane.size(Dim::Layer);
        let inside = plane.first_layer >= self.layers.start
            && plane.first_layer.checked_add(layers).is_some_and(|end| end <= self.layers.end);
        if layers == 0 || !inside {
            let range = format!("layers {:?}", self.layers);
            return Err(value("a plane's first layer", plane.first_layer.into(), range));
        }
        let bytes = self.region_bytes.get(plane.region as usize).copied();
        let Some(region_bytes) = bytes else {
            return Err(value("a plane's region", plane.region.into(), format!("below {}", self.region_bytes.len())));
        };
        if !plane.base.is_multiple_of(plane.dtype.element_bytes() as u64) {
            return Err(value("a plane's base", plane.base, format!("multiples of {}", plane.dtype.element_bytes())));
        }
        if plane.overlaps() {
            return Err(LayoutError::Overlap { plane: number });
        }
        let end = plane.span().and_then(|span| span.checked_add(plane.base)).unwrap_or(u64::MAX);
        if end > region_bytes {
            return Err(LayoutError::Outside { plane: number, end, region_bytes });
        }
        Ok(())
    }

    fn check_coverage(&self) -> Result<(), LayoutError> {
        for layer in self.layers.clone() {
            for (kv, part) in [(0, "K"), (1, "V")] {
                let holds = |plane: &&Plane| plane.layers().contains(&layer) && plane.part.range().contains(&kv);
                let planes = self.planes.iter().filter(holds).count();
                if planes != 1 {
                    return Err(LayoutError::Coverage { layer, part, planes });
                }
            }
        }
        Ok(())
    }

    /// The model whose KV it describes.
    #[must_use]
    pub fn model(&self) -> ModelHash {
        self.model
    }

    /// Tokens of an rBlock.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// rBlocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Model layers on this worker.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// KV heads of the model on this worker.
    #[must_use]
    pub fn heads(&self) -> Range<u32> {
        self.heads.clone()
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Elements of a head's row in every plane: `head_dim`, and the bytes of its scale where rows have one.
    #[must_use]
    pub fn row_elements(&self) -> u32 {
        self.planes.first().map_or(self.head_dim, |plane| plane.row_elements(self.head_dim))
    }

    /// Sizes of the regions in bytes, by region.
    #[must_use]
    pub fn region_bytes(&self) -> &[u64] {
        &self.region_bytes
    }

    /// Its planes, by layer.
    #[must_use]
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// Planes of a layer: one with both K and V, or one of each.
    pub fn planes_of(&self, layer: u32) -> impl Iterator<Item = &Plane> {
        self.planes.iter().filter(move |plane| plane.layers().contains(&layer))
    }

    /// Parses a peer's metadata.
    ///
    /// # Errors
    /// As [`Layout::new`], and for invalid codes and sizes.
    pub fn from_wire(message: &TransferLayout) -> Result<Self, LayoutError> {
        let hash: [u8; 32] =
            message.model_hash.as_slice().try_into().map_err(|_length| {
                value("the length of the model hash", message.model_hash.len() as u64, "32 bytes")
            })?;
        let range = |what, first: u32, count: u32| {
            first.checked_add(count).map(|end| first..end).ok_or(value(what, first.into(), "no overflow"))
        };
        if message.planes.len() > limits::TRANSFER_PLANES_MAX {
            return Err(value("the number of planes", message.planes.len() as u64, limits::TRANSFER_PLANES_MAX));
        }
        within("the windowed layers and one", message.windowed_layers.saturating_add(1), limits::LAYERS_MAX)?;
        let layout = Self::new(LayoutParts {
            model: ModelHash(hash),
            block_tokens: message.block_tokens,
            blocks: message.blocks,
            layers: range("the first layer", message.first_layer, message.layers)?,
            heads: range("the first head", message.first_head, message.heads)?,
            head_dim: message.head_dim,
            region_bytes: message.region_bytes.clone(),
            planes: message.planes.iter().map(plane_from_wire).collect::<Result<_, _>>()?,
        })?;
        let (latent, windowed_layers, window) = (message.latent, message.windowed_layers, message.window);
        Ok(layout.with_attention(LayoutAttention { latent, windowed_layers, window }))
    }

    /// The layout of a model with this attention.
    #[must_use]
    pub fn with_attention(self, attention: LayoutAttention) -> Self {
        Self { attention, ..self }
    }

    /// Properties of the attention that the planes do not show.
    #[must_use]
    pub fn attention(&self) -> LayoutAttention {
        self.attention
    }

    /// The layout as a message of CONNECT.
    #[must_use]
    pub fn to_wire(&self) -> TransferLayout {
        let planes = self.planes.iter().map(|plane| TransferPlane {
            region: plane.region,
            base: plane.base,
            axes: plane
                .axes
                .iter()
                .map(|axis| TransferAxis { dim: axis.dim.to_wire().into(), size: axis.size, stride: axis.stride })
                .collect(),
            dtype: plane.dtype.code().into(),
            first_layer: plane.first_layer,
            part: match plane.part {
                Part::Both => TransferPart::Both,
                Part::Keys => TransferPart::Keys,
                Part::Values => TransferPart::Values,
            }
            .into(),
        });
        TransferLayout {
            model_hash: self.model.0.to_vec(),
            block_tokens: self.block_tokens,
            blocks: self.blocks,
            first_layer: self.layers.start,
            layers: self.layers.end - self.layers.start,
            first_head: self.heads.start,
            heads: self.heads.end - self.heads.start,
            head_dim: self.head_dim,
            region_bytes: self.region_bytes.clone(),
            planes: planes.collect(),
            latent: self.attention.latent,
            windowed_layers: self.attention.windowed_layers,
            window: self.attention.window,
        }
    }
}

fn plane_from_wire(message: &TransferPlane) -> Result<Plane, LayoutError> {
    if message.axes.len() > DIMS {
        return Err(value("the number of a plane's dimensions", message.axes.len() as u64, DIMS));
    }
    let axis = |axis: &TransferAxis| {
        let code = u64::try_from(axis.dim).unwrap_or(u64::MAX);
        let dim = Dim::from_wire(axis.dim).ok_or(value("a dimension", code, "1 to 6"))?;
        Ok(Axis { dim, size: axis.size, stride: axis.stride })
    };
    let dtype = u8::try_from(message.dtype).ok().and_then(KvDType::from_code);
    let part = TransferPart::try_from(message.part).ok();
    Ok(Plane {
        region: message.region,
        base: message.base,
        axes: message.axes.iter().map(axis).collect::<Result<_, _>>()?,
        dtype: dtype.ok_or(value("an element type", message.dtype.into(), "1 to 4"))?,
        first_layer: message.first_layer,
        part: match part.ok_or(value("a part", u64::try_from(message.part).unwrap_or(u64::MAX), "0 to 2"))? {
            TransferPart::Both => Part::Both,
            TransferPart::Keys => Part::Keys,
            TransferPart::Values => Part::Values,
        },
    })
}
