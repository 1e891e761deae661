//! Tensors of files: their types, shapes and places, and their bytes.

use super::quantised::matrix::Matrix;
use crate::mapped::Map;
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use lagoon_types::DType;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The least f32 that rounds to infinity in f16.
pub(crate) const F16_OVERFLOW: f32 = 65_520.0;

/// One file of tensors.
#[derive(Debug)]
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) map: Map,
    /// Start of the tensors' data, behind the header.
    pub(crate) data_start: usize,
}

/// A tensor's type, shape and place, from the header.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Type as the file's format names it, for example `BF16` or `Q4_K`.
    pub stored: String,
    /// The format, if Lagoon reads it.
    pub format: Option<WeightFormat>,
    pub shape: Vec<usize>,
    pub(crate) file: usize,
    /// Byte range in the file, header included.
    pub(crate) range: Range<usize>,
    /// The matrix that several tensors of a quantised checkpoint are, in place of a range.
    pub(crate) quantised: Option<Arc<Matrix>>,
}

impl TensorInfo {
    /// The element type, if Lagoon computes with it.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        self.format.and_then(WeightFormat::plain)
    }

    /// Bytes of the tensor in its file; of a quantised one, of its blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.quantised.as_ref().map_or(self.range.len(), |matrix| matrix.block_bytes())
    }

    /// Whether the tensor has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A stored tensor's format and little-endian bytes.
#[derive(Clone, Debug)]
pub struct LoadedTensor {
    pub format: WeightFormat,
    /// None of a quantised matrix.
    pub bytes: Bytes,
    pub origin: Origin,
    pub(crate) quantised: Option<Arc<Matrix>>,
}

impl LoadedTensor {
    /// A tensor that is in no file.
    #[must_use]
    pub fn plain(dtype: DType, bytes: Bytes) -> Self {
        Self { format: dtype.into(), bytes, origin: Origin::default(), quantised: None }
    }
}

/// Bytes around a page that Linux maps with it, pages that were given back among them (`fault_around_bytes`).
const FAULT_AROUND_BYTES: usize = 64 << 10;

/// Where a stored tensor lies, if it is in a file.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    pub(crate) path: PathBuf,
    pub(crate) map: Option<Map>,
    pub(crate) start: usize,
}

impl Origin {
    /// Gives back the pages of bytes `range` of the tensor, which stay valid, and those that the kernel mapped around them.
    pub(crate) fn release(&self, range: Range<usize>) {
        if let Some(map) = &self.map {
            let start = (self.start + range.start).saturating_sub(FAULT_AROUND_BYTES);
            map.release(start..self.start + range.end);
        }
    }
}
