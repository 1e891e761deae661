//! A model's tensors: one `model.safetensors`, the shards that `model.safetensors.index.json` lists, or a GGUF file.
//!
//! Files are memory-mapped (see `mapped` for the operator's duty) and checked when they are opened: the header
//! parses, tensors tile the data exactly, and their sizes follow from shape and element type. A tensor's bytes are a
//! slice of the map.

pub(crate) mod quantised;
mod tensor;

use crate::ModelError;
use crate::error::shown;
use crate::fields::{Fields, read_bounded};
use crate::gguf::{Gguf, Stored, is_gguf};
use crate::mapped::{self, FILES_MAX, Map};
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use lagoon_types::DType;
use quantised::Quantisation;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub(crate) use tensor::{F16_OVERFLOW, TensorFile};
pub use tensor::{LoadedTensor, Origin, TensorInfo};

/// The tensors of each file, from the text of an index; `path` is only for messages. Files are plain names, at most
/// [`FILES_MAX`].
pub(crate) fn shards(path: &Path, index: &[u8]) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    let map = Fields::parse(path, index)?;
    let weight_map = map.get("weight_map").ok_or_else(|| map.missing("weight_map"))?;
    let weight_map = weight_map.as_object().ok_or_else(|| map.invalid("weight_map", "it must be an object"))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in weight_map {
        let plain = |name: &&str| Path::new(name).file_name().is_some_and(|base| base == *name);
        let name = file.as_str().filter(plain).ok_or_else(|| {
            let (tensor, file) = (shown(tensor), shown(&file.to_string()));
            map.invalid("weight_map", &format!("the file of `{tensor}` must be a plain file name, not {file}"))
        })?;
        shards.entry(name.to_owned()).or_default().push(tensor.clone());
    }
    if shards.len() > FILES_MAX {
        return Err(map.invalid("weight_map", &format!("it names more than {FILES_MAX} files")));
    }
    Ok(shards)
}

/// All tensors of a model, by name.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, TensorInfo>,
    kind: Kind,
}

/// What a checkpoint's matrices may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All of one element type.
    Plain,
    /// Plain ones, and quantised ones of safetensors files.
    Quantised,
    /// Of several formats.
    Gguf,
}

/// Matrices of a quantised checkpoint that are decoded at loading on every device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpackable {
    pub tensors: usize,
    pub elements: u64,
    /// The name of one of them, and why no format holds it.
    pub example: (String, String),
}

/// The element type that a GGUF file's matrices are computed in: the 16-bit type that has all of them exactly, else f16 if one is
/// packed or in f16 (see [`Checkpoint::dtype`]), else f32. `None` if there is no matrix.
pub(crate) fn computed_in(file: &Gguf) -> Option<DType> {
    let matrices = file.tensors.values().filter(|tensor| tensor.shape.len() > 1);
    most_exact(matrices.filter_map(|tensor| Some((tensor.stored.format()?, tensor.range.len()))))
}

/// [`computed_in`] of formats with their bytes.
fn most_exact(matrices: impl Iterator<Item = (WeightFormat, usize)>) -> Option<DType> {
    let mut bytes: BTreeMap<WeightFormat, usize> = BTreeMap::new();
    for (format, len) in matrices {
        let sum = bytes.entry(format).or_default();
        *sum = sum.saturating_add(len);
    }
    // Routers and learned positions are in f32 beside all formats.
    let most = bytes.iter().max_by_key(|(_, len)| **len).map(|(format, _)| *format)?;
    let rounded = bytes.keys().any(|format| format.plain().is_none() && !format.is_exact_in(DType::BF16));
    Some(match most.plain() {
        Some(DType::F32) => DType::F32,
        Some(DType::BF16) if !rounded && bytes.contains_key(&WeightFormat::F16) => DType::F16,
        Some(dtype) if !rounded => dtype,
        None if !rounded && !bytes.contains_key(&WeightFormat::F16) => DType::BF16,
        _ => DType::F16,
    })
}

impl Checkpoint {
    /// Maps and checks the tensors in the directory `dir`, or of the GGUF file that it is.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        if is_gguf(dir) {
            return Ok(Self::of(Gguf::open(dir)?));
        }
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let mut checkpoint = Self { files: Vec::new(), tensors: BTreeMap::new(), kind: Kind::Plain };
        if index.exists() {
            checkpoint.open_shards(dir, &index)?;
        } else if single.exists() {
            let tensors = checkpoint.add_file(single)?;
            checkpoint.tensors.extend(tensors);
        } else {
            return Err(ModelError::NotAModel {
                name: dir.display().to_string(),
                problem: "it has neither model.safetensors nor model.safetensors.index.json".to_owned(),
                hint: "Lagoon reads safetensors here; a GGUF file is named itself, as MODEL".to_owned(),
            });
        }
        if let Some(quantisation) = quantised::of_dir(dir)? {
            checkpoint.assemble(&quantisation)?;
        }
        Ok(checkpoint)
    }

    /// Makes matrices of the tensors of quantised ones.
    pub(crate) fn assemble(&mut self, quantisation: &Quantisation) -> Result<(), ModelError> {
        self.kind = Kind::Quantised;
        quantised::assemble(&mut self.tensors, &self.files, quantisation)
    }

    /// The tensors of a GGUF file.
    pub(crate) fn of(file: Gguf) -> Self {
        let tensors = file.tensors.into_iter().map(|(name, tensor)| {
            let (stored, format) = (tensor.stored.to_string(), tensor.stored.format());
            (
                name,
                TensorInfo {
                    stored,
                    format,
                    shape: tensor.shape,
                    file: tensor.file,
                    range: tensor.range,
                    quantised: None,
                },
            )
        });
        let tensors = tensors.collect();
        let files = file.parts.into_iter().map(|part| TensorFile {
            path: part.path,
            map: part.map,
            data_start: part.data_start,
        });
        Self { files: files.collect(), tensors, kind: Kind::Gguf }
    }

    /// Whether matrices may have several formats, which are converted to [`Checkpoint::dtype`].
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.kind != Kind::Plain
    }

    /// Whether norms are in f32 beside matrices in 16 bits.
    #[must_use]
    pub fn has_wide_norms(&self) -> bool {
        self.kind == Kind::Gguf
    }

    /// Quantised matrices that no format holds; `None` if there are none.
    #[must_use]
    pub fn unpackable(&self) -> Option<Unpackable> {
        let all = self.tensors.iter().filter_map(|(name, info)| Some((name, info.quantised.as_ref()?)));
        let mut all = all.filter_map(|(name, matrix)| Some((name, matrix, matrix.unpackable.as_ref()?)));
        let (name, matrix, why) = all.next()?;
        let first = Unpackable { tensors: 1, elements: matrix.elements() as u64, example: (name.clone(), why.clone()) };
        Some(all.fold(first, |sum, (_, matrix, _)| Unpackable {
            tensors: sum.tensors + 1,
            elements: sum.elements + matrix.elements() as u64,
            ..sum
        }))
    }

    /// Formats of the tensors with the bytes that they have together, but for [`Checkpoint::unpackable`] ones.
    #[must_use]
    pub fn formats(&self) -> Vec<(WeightFormat, u64)> {
        let mut bytes: BTreeMap<WeightFormat, u64> = BTreeMap::new();
        let is_packable = |info: &&TensorInfo| info.quantised.as_ref().is_none_or(|of| of.unpackable.is_none());
        for info in self.tensors.values().filter(is_packable) {
            if let Some(format) = info.format {
                *bytes.entry(format).or_default() += info.len() as u64;
            }
        }
        bytes.into_iter().collect()
    }

    fn open_shards(&mut self, dir: &Path, index: &Path) -> Result<(), ModelError> {
        for (file, names) in shards(index, &read_bounded(index)?)? {
            let path = dir.join(file);
            let mut found = self.add_file(path.clone())?;
            for name in names {
                let info = found.remove(&name).ok_or_else(|| ModelError::Tensor {
                    path: path.clone(),
                    tensor: shown(&name),
                    problem: "is missing, though the index lists it".to_owned(),
                })?;
                self.tensors.insert(name, info);
            }
        }
        Ok(())
    }

    /// Maps one file and returns its tensors.
    fn add_file(&mut self, path: PathBuf) -> Result<BTreeMap<String, TensorInfo>, ModelError> {
        let map = mapped::map(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
        self.add_map(path, map)
    }

    /// A checkpoint of one file with these bytes; `path` is only for messages.
    pub(crate) fn of_bytes(path: &Path, bytes: Bytes) -> Result<Self, ModelError> {
        let mut checkpoint = Self { files: Vec::new(), tensors: BTreeMap::new(), kind: Kind::Plain };
        checkpoint.tensors = checkpoint.add_map(path.to_owned(), Map::of(bytes))?;
        Ok(checkpoint)
    }

    fn add_map(&mut self, path: PathBuf, map: Map) -> Result<BTreeMap<String, TensorInfo>, ModelError> {
        let bytes = map.bytes();
        let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| ModelError::Malformed {
            path: path.clone(),
            problem: format!(
                "{} (the file has {} bytes; it may be truncated or corrupt)",
                shown(&e.to_string()),
                bytes.len()
            ),
        })?;
        // The header's length is 8 bytes of its own; read_metadata checked that all of it lies in the file.
        let data_start = header + 8;
        let file = self.files.len();
        let tensors = metadata.offset_keys().into_iter().filter_map(|name| {
            let info = metadata.info(&name)?;
            let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
            let format = match info.dtype {
                Dtype::F32 => Some(WeightFormat::F32),
                Dtype::F16 => Some(WeightFormat::F16),
                Dtype::BF16 => Some(WeightFormat::BF16),
                _ => None,
            };
            let stored = format!("{:?}", info.dtype);
            Some((name, TensorInfo { stored, format, shape: info.shape.clone(), file, range, quantised: None }))
        });
        let tensors = tensors.collect();
        self.files.push(TensorFile { path, map, data_start });
        Ok(tensors)
    }

    /// All tensors in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// A tensor's type, shape and place; `None` if there is no such tensor.
    #[must_use]
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// A tensor's format and bytes.
    ///
    /// # Errors
    /// If it is absent, has another shape, or a type that Lagoon does not read.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<LoadedTensor, ModelError> {
        let info = self.info(name).ok_or_else(|| self.error(name, "is missing".to_owned()))?;
        if info.shape != shape {
            let stored = shown(&format!("{:?}", info.shape));
            let problem = format!("has the shape {stored}; the configuration says {shape:?}");
            return Err(self.error(name, problem));
        }
        let format = info.format.ok_or_else(|| {
            let gguf = WeightFormat::ALL.iter().filter(|format| Stored::of(**format).is_some());
            let supported = match self.kind {
                Kind::Gguf => gguf.map(|format| format.name()).collect::<Vec<_>>().join(", "),
                Kind::Plain | Kind::Quantised => "F32, F16 and BF16".to_owned(),
            };
            self.error(name, format!("has elements of type {}; supported are {supported}", info.stored))
        })?;
        if let Some(matrix) = &info.quantised {
            let origin = Origin { path: self.files[info.file].path.clone(), ..Origin::default() };
            return Ok(LoadedTensor { format, bytes: Bytes::new(), origin, quantised: Some(Arc::clone(matrix)) });
        }
        let map = &self.files[info.file].map;
        let origin =
            Origin { path: self.files[info.file].path.clone(), map: Some(map.clone()), start: info.range.start };
        Ok(LoadedTensor { format, bytes: map.bytes().slice(info.range.clone()), origin, quantised: None })
    }

    /// The element type of most elements of matrices, among those that Lagoon can compute with (masks have more dimensions);
    /// [`crate::Weights::load`] checks that all matrices have the same. Of a GGUF file, the one that matrices are converted to: the
    /// type of most where all are exact in it; with packed ones f16, whose 11 bits of precision are more than their codes have, or
    /// f32 where most are in f32. Of a quantised checkpoint, that of matrices that are not quantised, or bf16.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        if self.kind == Kind::Gguf {
            let matrices = self.tensors.values().filter(|info| info.shape.len() > 1);
            return most_exact(matrices.filter_map(|info| Some((info.format?, info.len()))));
        }
        let elements = |dtype| {
            let of = |info: &&TensorInfo| info.dtype() == Some(dtype) && (2..4).contains(&info.shape.len());
            self.tensors.values().filter(of).map(TensorInfo::len).sum::<usize>() / dtype.size()
        };
        let counted = [DType::F32, DType::F16, DType::BF16].map(|dtype| (elements(dtype), dtype));
        let most = counted.into_iter().filter(|(count, _)| *count > 0).max_by_key(|(count, _)| *count);
        most.map(|(_, dtype)| dtype).or_else(|| (self.kind == Kind::Quantised).then_some(DType::BF16))
    }

    /// Whether a tensor is the bias of a quantised matrix, and zero.
    pub(crate) fn is_zero_bias(&self, name: &str) -> bool {
        let module = name.strip_suffix(".bias");
        let of =
            module.and_then(|module| self.info(&format!("{module}.weight"))).and_then(|info| info.quantised.as_ref());
        of.is_some()
            && self
                .info(name)
                .is_some_and(|info| self.files[info.file].map.bytes()[info.range.clone()].iter().all(|byte| *byte == 0))
    }

    /// An error that names `tensor` and its file.
    #[must_use]
    pub fn error(&self, tensor: &str, problem: String) -> ModelError {
        let file = self.info(tensor).map_or(0, |info| info.file);
        let path = self.files.get(file).map(|f| f.path.clone()).unwrap_or_default();
        ModelError::Tensor { path, tensor: shown(tensor), problem }
    }

    /// Files in the order of their names.
    pub(crate) fn files(&self) -> &[TensorFile] {
        &self.files
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_that_loses_least_is_computed_in() {
        use WeightFormat::{BF16, F16, F32, Mxfp4, Q4K};
        let of = |formats: &[(WeightFormat, usize)]| most_exact(formats.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(BF16, 9), (F32, 1)]), Some(DType::BF16));
        assert_eq!(of(&[(BF16, 9), (F16, 1)]), Some(DType::F16), "bf16 has three bits less");
        assert_eq!(of(&[(F16, 9), (BF16, 1)]), Some(DType::F16));
        assert_eq!(of(&[(F32, 9), (Q4K, 1)]), Some(DType::F32));
        assert_eq!(of(&[(BF16, 9), (Q4K, 1)]), Some(DType::F16));
        assert_eq!(of(&[(Mxfp4, 9), (BF16, 1)]), Some(DType::BF16));
        assert_eq!(of(&[(Mxfp4, 9), (F16, 1)]), Some(DType::F16));
    }
}
