//! GGUF files, versions 2 and 3, little-endian: metadata and tensors of one file or of the parts of a split one.
//!
//! A file is untrusted. Counts, lengths and nesting have limits, every size is checked for overflow and against the file before
//! it is used, and an error names the file and the key or the tensor. Files are memory-mapped (see `mapped` for the operator's
//! duty); [`crate::Checkpoint`], [`crate::ModelSpec`] and [`vocabulary`] are made of what this module reads, and [`Writer`] writes
//! a file. It never knows a family of models.

mod cursor;
mod metadata;
mod types;
mod vocabulary;
mod write;

use crate::ModelError;
use crate::error::shown;
use crate::mapped::{self, FILES_MAX, Map};
use cursor::Cursor;
pub use metadata::{List, Metadata, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
pub(crate) use types::Stored;
pub use types::refused_types;
pub use vocabulary::{EndTokens, set_vocabulary, vocabulary};
pub use write::{Entry, Item, Keys, Writer};

/// What a file begins with.
const MAGIC: [u8; 4] = *b"GGUF";
/// Most tensors of a file.
const TENSORS_MAX: u64 = 1 << 17;
/// Longest name of a tensor, in bytes; llama.cpp writes at most 64.
const NAME_BYTES_MAX: u64 = 1 << 10;
/// Most dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;
/// Distance that tensors' data keeps where a file does not say another one, in bytes.
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 16;
/// Files of a split one at most.
const SPLITS_MAX: u64 = FILES_MAX as u64;
/// Key of the distance that tensors' data keeps.
const ALIGNMENT: &str = "general.alignment";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_NUMBER: &str = "split.no";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// A tensor's type, shape and place.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) stored: Stored,
    /// The slowest dimension first, as in safetensors.
    pub(crate) shape: Vec<usize>,
    /// Index of [`Gguf::parts`].
    pub(crate) file: usize,
    /// Byte range in the file; empty if the type is not supported.
    pub(crate) range: Range<usize>,
}

/// One file.
#[derive(Debug)]
pub(crate) struct PartFile {
    pub(crate) path: PathBuf,
    pub(crate) map: Map,
    /// Start of the tensors' data.
    pub(crate) data_start: usize,
}

/// An open GGUF file with all of its parts.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    pub(crate) parts: Vec<PartFile>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

/// Whether a path is a GGUF file's by its end, and no directory's.
#[must_use]
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

impl Gguf {
    /// Maps and checks the file at `path`, and its other parts if it is the first of a split one.
    ///
    /// # Errors
    /// A [`ModelError`] that names the file and the key or the tensor.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::of(path, map(path)?)
    }

    /// Checks a mapped file; `path` is for messages, and for the other parts of a split one.
    pub(crate) fn of(path: &Path, map: Map) -> Result<Self, ModelError> {
        let mut tensors = BTreeMap::new();
        let (metadata, first) = read_part(path, map, 0, &mut tensors)?;
        let mut parts = vec![first];
        let count = metadata.unsigned(SPLIT_COUNT)?.unwrap_or(1);
        if count > SPLITS_MAX {
            return Err(metadata.invalid(SPLIT_COUNT, &format!("a model has at most {SPLITS_MAX} files")));
        }
        if count > 1 {
            let paths = siblings(path, count)?;
            check_number(&metadata, 0, count)?;
            for (index, path) in paths.into_iter().enumerate().skip(1) {
                let (other, part) = read_part(&path, self::map(&path)?, index, &mut tensors)?;
                check_number(&other, index as u64, count)?;
                parts.push(part);
            }
            match metadata.unsigned(SPLIT_TENSORS)? {
                Some(all) if all != tensors.len() as u64 => {
                    return Err(metadata.invalid(SPLIT_TENSORS, &format!("the files have {} tensors", tensors.len())));
                }
                _ => {}
            }
        }
        Ok(Self { metadata, parts, tensors })
    }

    /// A file that is not written yet: its keys, shapes of its tensors, and the vectors that are read with the configuration.
    ///
    /// # Errors
    /// If a key is longer than readers take.
    pub(crate) fn planned(
        path: &Path,
        keys: &Keys,
        shapes: &[(String, Vec<usize>)],
        vectors: &[(String, Vec<f32>)],
    ) -> Result<Self, ModelError> {
        let malformed = |problem| ModelError::Malformed { path: path.to_owned(), problem };
        let mut cursor = Cursor::new(keys.bytes().into());
        let metadata = Metadata::read(path, &mut cursor, keys.len()).map_err(malformed)?;
        let stored = Stored::of(lagoon_backend::WeightFormat::F32).expect("GGUF files have F32");
        let planned = |(name, shape): &(String, Vec<usize>)| {
            (name.clone(), Tensor { stored, shape: shape.clone(), file: 0, range: 0..0 })
        };
        let mut tensors: BTreeMap<String, Tensor> = shapes.iter().map(planned).collect();
        let mut data = Vec::new();
        for (name, values) in vectors {
            let start = data.len();
            lagoon_types::DType::F32.encode(values, &mut data);
            let tensor = Tensor { stored, shape: vec![values.len()], file: 0, range: start..data.len() };
            tensors.insert(name.clone(), tensor);
        }
        let part = PartFile { path: path.to_owned(), map: Map::of(data.into()), data_start: 0 };
        Ok(Self { metadata, parts: vec![part], tensors })
    }

    /// The first file's metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A tensor's shape, the slowest dimension first; `None` if there is no such tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// Number of tensors.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The elements of a vector in f32, which rotary factors are stored as; `None` if there is no such tensor.
    ///
    /// # Errors
    /// If it is no vector in F32 of `len` elements.
    pub fn vector(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.tensors.get(name) else { return Ok(None) };
        let part = &self.parts[tensor.file];
        if tensor.stored.format() != Some(lagoon_backend::WeightFormat::F32) || tensor.shape != [len] {
            let problem = format!("must be a vector of {len} elements in F32, and is {:?}", tensor.shape);
            return Err(ModelError::Tensor { path: part.path.clone(), tensor: name.to_owned(), problem });
        }
        let mut values = Vec::new();
        lagoon_types::DType::F32.decode(&part.map.bytes()[tensor.range.clone()], &mut values);
        Ok(Some(values))
    }
}

/// The paths of all files of a split one; `path` is the first.
fn siblings(path: &Path, count: u64) -> Result<Vec<PathBuf>, ModelError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let end = |number: u64| format!("-{number:05}-of-{count:05}.gguf");
    let Some(stem) = name.strip_suffix(&end(1)) else {
        return Err(ModelError::NotAModel {
            name: path.display().to_string(),
            problem: format!("it is one of {count} files, and not named as the first of them"),
            hint: format!("pass the file whose name ends in {}, beside the others", end(1)),
        });
    };
    Ok((1..=count).map(|number| path.with_file_name(format!("{stem}{}", end(number)))).collect())
}

/// Checks that a file is the one of this index.
fn check_number(metadata: &Metadata, index: u64, count: u64) -> Result<(), ModelError> {
    if metadata.unsigned(SPLIT_COUNT)? != Some(count) {
        return Err(metadata.invalid(SPLIT_COUNT, &format!("the first file says {count}")));
    }
    match metadata.unsigned(SPLIT_NUMBER)? {
        Some(number) if number == index => Ok(()),
        _ => Err(metadata.invalid(SPLIT_NUMBER, &format!("by its name the file has the number {index}"))),
    }
}

fn map(path: &Path) -> Result<Map, ModelError> {
    mapped::map(path).map_err(|source| ModelError::Io { path: path.to_owned(), source })
}

/// Reads one file and adds its tensors.
fn read_part(
    path: &Path,
    map: Map,
    file: usize,
    tensors: &mut BTreeMap<String, Tensor>,
) -> Result<(Metadata, PartFile), ModelError> {
    let malformed = |problem| ModelError::Malformed { path: path.to_owned(), problem };
    let mut cursor = Cursor::new(map.bytes().clone());
    let (tensor_count, key_count) = preamble(&mut cursor).map_err(malformed)?;
    let metadata = Metadata::read(path, &mut cursor, key_count).map_err(malformed)?;
    let alignment = metadata.unsigned(ALIGNMENT)?.unwrap_or(ALIGNMENT_DEFAULT);
    if !(8..=ALIGNMENT_MAX).contains(&alignment) || !alignment.is_multiple_of(8) {
        return Err(metadata.invalid(ALIGNMENT, &format!("it must be a multiple of 8, at most {ALIGNMENT_MAX}")));
    }
    let infos = (0..tensor_count).map(|index| {
        Info::read(&mut cursor).map_err(|problem| malformed(format!("the tensor {index} of its list: {problem}")))
    });
    let infos = infos.collect::<Result<Vec<Info>, _>>()?;
    let data_start = (cursor.position() as u64).next_multiple_of(alignment);
    let mut ends = Vec::with_capacity(infos.len());
    for info in infos {
        let name = info.name.clone();
        let refuse = |problem| ModelError::Tensor { path: path.to_owned(), tensor: shown(&name), problem };
        let range = info.range(data_start, alignment, map.bytes().len()).map_err(refuse)?;
        ends.push((range.start, range.end, name.clone()));
        let tensor = Tensor { stored: info.stored, shape: info.shape, file, range };
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(refuse("is there twice".to_owned()));
        }
    }
    ends.sort_unstable();
    if let Some([before, after]) = ends.array_windows().find(|[before, after]| before.1 > after.0) {
        let problem = format!("overlaps `{}`", shown(&before.2));
        return Err(ModelError::Tensor { path: path.to_owned(), tensor: shown(&after.2), problem });
    }
    let data_start = usize::try_from(data_start).unwrap_or(usize::MAX).min(map.bytes().len());
    Ok((metadata, PartFile { path: path.to_owned(), map, data_start }))
}

/// Reads what is before the metadata: the numbers of tensors and keys.
fn preamble(cursor: &mut Cursor) -> Result<(u64, u64), String> {
    if cursor.array().ok() != Some(MAGIC) {
        return Err("it does not begin with GGUF".to_owned());
    }
    match cursor.u32()? {
        2 | 3 => {}
        version if version.trailing_zeros() >= 16 && version != 0 => {
            return Err("it is big-endian; supported are little-endian files".to_owned());
        }
        version => return Err(format!("it has the version {version}; supported are 2 and 3")),
    }
    Ok((cursor.count("tensors", TENSORS_MAX)?, cursor.u64()?))
}

/// An entry of a file's list of tensors.
struct Info {
    name: String,
    stored: Stored,
    /// The slowest dimension first.
    shape: Vec<usize>,
    offset: u64,
}

impl Info {
    fn read(cursor: &mut Cursor) -> Result<Self, String> {
        let name = cursor.text(NAME_BYTES_MAX)?;
        let dimensions = cursor.u32()?;
        if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
            let name = shown(&name);
            return Err(format!("`{name}` has {dimensions} dimensions, not 1 to {DIMENSIONS_MAX}"));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = cursor.u64()?;
            let valid = usize::try_from(size).ok().filter(|size| *size > 0);
            shape.push(valid.ok_or_else(|| format!("`{}` has a dimension of {size}", shown(&name)))?);
        }
        shape.reverse();
        Ok(Self { name, stored: Stored(cursor.u32()?), shape, offset: cursor.u64()? })
    }

    /// Bytes of the data in the file; empty if the type is not supported.
    fn range(&self, data_start: u64, alignment: u64, file_len: usize) -> Result<Range<usize>, String> {
        let Some(format) = self.stored.format() else { return Ok(0..0) };
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!("has the offset {}, which is no multiple of {alignment}", self.offset));
        }
        let cols = self.shape.last().copied().unwrap_or(1);
        if format.bytes(cols).is_none() {
            let elements = format.block().elements;
            return Err(format!("has rows of {cols} elements, which are no whole blocks of {elements} ({format})"));
        }
        let elements = self.shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
        let len = elements.and_then(|elements| format.bytes(elements));
        let start = usize::try_from(data_start).ok().zip(usize::try_from(self.offset).ok());
        let start = start.and_then(|(data, offset)| data.checked_add(offset));
        match start.zip(len).and_then(|(start, len)| Some(start..start.checked_add(len)?)) {
            Some(range) if range.end <= file_len => Ok(range),
            _ => Err(format!(
                "has the shape {:?} in {format} at {}, which ends behind the file's {file_len} bytes (it may be truncated)",
                self.shape, self.offset
            )),
        }
    }
}
