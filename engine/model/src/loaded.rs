//! What becomes of a checkpoint's matrices when they are loaded, by format: for notices, and for sizes before anything is loaded.
//! It follows [`crate::Weights::load`].

use crate::convert::has_whole_rows;
use crate::weights::stored_name;
use crate::{Checkpoint, ModelSpec};
use lagoon_backend::WeightFormat;
use lagoon_types::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Matrices of one format that become another, or stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    pub stored: WeightFormat,
    pub becomes: WeightFormat,
    /// Whether these are the matrices of [`Checkpoint::unpackable`], which no device takes as they are stored.
    pub unpackable: bool,
    pub stored_bytes: u64,
    pub loaded_bytes: u64,
}

/// The matrices of `checkpoint` that `spec` uses, by format, loaded as `dtype` except for the packed formats that `keeps` names.
/// Tensors that are missing or of unknown types are left out.
pub fn loaded(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    dtype: DType,
    keeps: impl Fn(WeightFormat) -> bool,
) -> Vec<Loaded> {
    let routers: BTreeSet<&str> = spec.routers().map(|part| part.tensor.as_str()).collect();
    let mut bytes: BTreeMap<(WeightFormat, WeightFormat, bool), (u64, u64)> = BTreeMap::new();
    for part in spec.parts().filter(|part| part.shape.len() > 1) {
        let Some(info) = checkpoint.info(stored_name(checkpoint, spec, &part.tensor)) else { continue };
        let Some(stored) = info.format else { continue };
        let unpackable = info.quantised.as_ref().is_some_and(|matrix| matrix.unpackable.is_some());
        let stays = match stored.plain() {
            None => !unpackable && keeps(stored) && has_whole_rows(part, stored),
            Some(plain) => plain == DType::F32 && routers.contains(part.tensor.as_str()),
        };
        let becomes = if stays { stored } else { dtype.into() };
        let of = |format: WeightFormat| {
            let block = format.block();
            (part.rows * part.cols) as u64 * block.bytes as u64 / block.elements as u64
        };
        let sum = bytes.entry((stored, becomes, unpackable)).or_default();
        *sum = (sum.0 + of(stored), sum.1 + of(becomes));
    }
    let one = |((stored, becomes, unpackable), (stored_bytes, loaded_bytes))| Loaded {
        stored,
        becomes,
        unpackable,
        stored_bytes,
        loaded_bytes,
    };
    bytes.into_iter().map(one).collect()
}
