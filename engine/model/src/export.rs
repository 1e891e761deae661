//! A model as a GGUF file has it ([`Export`]): keys, and tensors whose rows are read in f32 from where the model has them.
//!
//! The model is a directory or a GGUF file with elements in 16 or 32 bits. Nothing is read but what is asked for, and pages of its
//! files can be given back, so that a model that is larger than memory can be written anew (`lagoon-quantize`).

use crate::families::export::{Content, Piece, translate};
use crate::gguf::{Gguf, Item, Keys, is_gguf};
use crate::spec::{AttentionSpec, Mlp, Part};
use crate::weights::{check_no_others, stored_name};
use crate::{Checkpoint, LoadedTensor, ModelError, ModelSpec, TensorInfo};
use lagoon_types::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

/// Keys of a file that do not hold for one with the same tensors in other formats.
const OF_ONE_FILE: [&str; 3] = ["general.alignment", "general.file_type", "general.quantization_version"];
/// Prefix of the keys of one file of several.
const OF_SPLIT: &str = "split.";

/// What a matrix of a layer multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Queries,
    Keys,
    Values,
    /// Queries, keys and values in one tensor.
    Fused,
    AttentionOut,
    Up,
    Down,
    ExpertsUp,
    ExpertsDown,
}

/// What a tensor is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A vector, or one for each expert, a router, learned positions: what stays in f32.
    Wide,
    /// The embedding table, which may be the head, too.
    Table {
        is_head: bool,
    },
    Head,
    Matrix {
        layer: usize,
        kind: Kind,
    },
}

/// A tensor of the file.
#[derive(Debug)]
pub struct ExportTensor {
    pub name: String,
    /// The slowest dimension first.
    pub shape: Vec<usize>,
    pub role: Role,
    content: Content,
}

/// A model and the file that it becomes.
#[derive(Debug)]
pub struct Export {
    /// All keys but those of the tensors' format; of a directory also without those of the vocabulary.
    pub keys: Keys,
    pub tensors: Vec<ExportTensor>,
    /// The model as it is read now.
    pub spec: ModelSpec,
    pub checkpoint: Checkpoint,
}

impl Export {
    /// Opens the model in the directory `path`, or the GGUF file that it is.
    ///
    /// # Errors
    /// A [`ModelError`] that names the file and what of it cannot be written: its family, its configuration, a packed tensor.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (spec, checkpoint) = (ModelSpec::open(path)?, Checkpoint::open(path)?);
        check_no_others(&checkpoint, &spec)?;
        if is_gguf(path) { Self::of_file(path, spec, checkpoint) } else { Self::of_dir(path, spec, checkpoint) }
    }

    fn of_dir(path: &Path, spec: ModelSpec, checkpoint: Checkpoint) -> Result<Self, ModelError> {
        let translated = translate(&path.join("config.json"), &spec)?;
        for piece in translated.tensors.iter().filter_map(|(_, _, content)| content.pieces()).flatten() {
            let name = stored_name(&checkpoint, &spec, &piece.from.tensor);
            checkpoint.info(name).map_or(Ok(()), |info| check_plain(&checkpoint, name, info))?;
        }
        let roles = roles(&translated.spec);
        let tensors = translated.tensors.into_iter().map(|(name, shape, content)| {
            let role = roles.get(name.as_str()).copied().unwrap_or(Role::Wide);
            ExportTensor { name, shape, role, content }
        });
        let tensors = tensors.collect();
        Ok(Self { keys: translated.keys, tensors, spec, checkpoint })
    }

    /// Keys as they are, and tensors in the order of their names.
    fn of_file(path: &Path, spec: ModelSpec, checkpoint: Checkpoint) -> Result<Self, ModelError> {
        if let Some(of) = spec.layers.iter().find_map(|layer| layer.attention.latent.as_ref()) {
            let problem = "is of latent attention, which is not written\nhint: families without it are";
            return Err(checkpoint.error(stored_name(&checkpoint, &spec, &of.latent.tensor), problem.to_owned()));
        }
        let file = Gguf::open(path)?;
        let mut keys = Keys::default();
        let kept = |key: &str| !OF_ONE_FILE.contains(&key) && !key.starts_with(OF_SPLIT);
        for (key, stored) in file.metadata().stored().filter(|(key, _)| kept(key)) {
            keys.set(key, Item::Stored(stored.clone()));
        }
        let roles = roles(&spec);
        let used: BTreeSet<&str> = spec.parts().map(|part| part.tensor.as_str()).collect();
        let mut tensors = Vec::new();
        for (name, info) in checkpoint.tensors() {
            check_plain(&checkpoint, name, info)?;
            if info.shape.len() > 1 && !used.contains(name) {
                let problem =
                    "is no part of the model as it is served (a layer for tokens further ahead): it is not written";
                return Err(checkpoint.error(name, problem.to_owned()));
            }
            let cols = info.shape.last().copied().unwrap_or(1);
            let whole = Part {
                shape: info.shape.clone(),
                ..Part::matrix(name, info.shape.iter().product::<usize>() / cols.max(1), cols)
            };
            let piece = Piece { from: whole.clone(), first: 0, to: whole, added: 0.0 };
            let role = roles.get(name).copied().unwrap_or(Role::Wide);
            let (name, shape) = (name.to_owned(), info.shape.clone());
            tensors.push(ExportTensor { name, shape, role, content: Content::Pieces(vec![piece]) });
        }
        Ok(Self { keys, tensors, spec, checkpoint })
    }

    /// The stored tensor that a piece is of.
    fn source(&self, piece: &Piece) -> Result<LoadedTensor, ModelError> {
        let name = stored_name(&self.checkpoint, &self.spec, &piece.from.tensor);
        let tensor = self.checkpoint.tensor(name, &piece.from.shape)?;
        match tensor.format.plain() {
            Some(_) => Ok(tensor),
            None => Err(self.checkpoint.error(name, format!("has elements of type {}", tensor.format))),
        }
    }

    /// All elements of a tensor, in f32: for those that are small.
    ///
    /// # Errors
    /// As [`Checkpoint::tensor`].
    pub fn values(&self, tensor: &ExportTensor) -> Result<Vec<f32>, ModelError> {
        let pieces = match &tensor.content {
            Content::Vector(values) => return Ok(values.clone()),
            Content::Pieces(pieces) => pieces,
        };
        let mut values = vec![0.0; tensor.shape.iter().product()];
        for piece in pieces {
            let (source, mut read) = (self.source(piece)?, Vec::new());
            let (to, cols) = (&piece.to, piece.to.cols.max(1));
            let rows: Vec<usize> = (piece.first..piece.first + to.rows).collect();
            read_rows(&piece.from, &source, &rows, piece.added, &mut read);
            for (row, elements) in read.chunks_exact(cols).enumerate() {
                let start = to.offset + row * to.row_stride;
                elements.iter().enumerate().for_each(|(col, x)| values[start + col * to.col_stride] = *x);
            }
        }
        Ok(values)
    }

    /// The rows of a matrix, to be read one stretch after the other.
    ///
    /// # Errors
    /// As [`Checkpoint::tensor`].
    ///
    /// # Panics
    /// If pieces of the tensor cut rows, which no family's do.
    pub fn rows<'a>(&self, tensor: &'a ExportTensor) -> Result<Rows<'a>, ModelError> {
        let pieces = match &tensor.content {
            Content::Vector(_) => panic!("`{}` is a vector", tensor.name),
            Content::Pieces(pieces) => pieces.as_slice(),
        };
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let count = tensor.shape.iter().product::<usize>() / cols;
        let mut places = vec![None; count];
        for (index, piece) in pieces.iter().enumerate() {
            let to = &piece.to;
            let is_whole = to.cols == cols && to.col_stride == 1 && to.offset.is_multiple_of(cols);
            assert!(
                is_whole && (to.rows < 2 || to.row_stride.is_multiple_of(cols)),
                "rows of `{}` are cut",
                tensor.name
            );
            for row in 0..to.rows {
                let place = &mut places[(to.offset + row * to.row_stride) / cols];
                assert!(place.is_none(), "`{}` has a row twice", tensor.name);
                *place = Some((index, piece.first + row));
            }
        }
        let places = places.into_iter().map(|place| place.unwrap_or_else(|| panic!("`{}` lacks a row", tensor.name)));
        let places = places.collect();
        let sources = pieces.iter().map(|piece| self.source(piece)).collect::<Result<_, _>>()?;
        Ok(Rows { pieces, sources, places, cols })
    }
}

/// The rows of a matrix.
#[derive(Debug)]
pub struct Rows<'a> {
    pieces: &'a [Piece],
    sources: Vec<LoadedTensor>,
    /// Piece and row of its part, by row of the matrix.
    places: Vec<(usize, usize)>,
    cols: usize,
}

impl Rows<'_> {
    /// Number of rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Columns of the matrix.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Appends rows in f32.
    pub fn read(&self, rows: Range<usize>, out: &mut Vec<f32>) {
        for run in self.places[rows].chunk_by(|a, b| a.0 == b.0) {
            let (piece, rows) = (&self.pieces[run[0].0], run.iter().map(|(_, row)| *row).collect::<Vec<_>>());
            read_rows(&piece.from, &self.sources[run[0].0], &rows, piece.added, out);
        }
    }

    /// Gives back the pages of files that rows were read from.
    pub fn release(&self, rows: Range<usize>) {
        for run in self.places[rows].chunk_by(|a, b| a.0 == b.0) {
            let (part, source) = (&self.pieces[run[0].0].from, &self.sources[run[0].0]);
            let size = source.format.block().bytes;
            let first = run.iter().map(|(_, row)| *row).min().unwrap_or(0);
            let last = run.iter().map(|(_, row)| *row).max().unwrap_or(0);
            let end = part.offset + last * part.row_stride + (part.cols - 1) * part.col_stride + 1;
            source.origin.release((part.offset + first * part.row_stride) * size..end * size);
        }
    }
}

/// Appends rows of a part in f32, with `added` added.
fn read_rows(part: &Part, source: &LoadedTensor, rows: &[usize], added: f32, out: &mut Vec<f32>) {
    let dtype = source.format.plain().expect("sources are plain");
    let (start, size) = (out.len(), dtype.size());
    let place = |row: usize, col: usize| (part.offset + row * part.row_stride + col * part.col_stride) * size;
    if part.col_stride == 1 {
        for row in rows {
            dtype.decode(&source.bytes[place(*row, 0)..][..part.cols * size], out);
        }
    } else {
        gather(part, dtype, rows, |row, col| &source.bytes[place(row, col)..][..size], out);
    }
    if added != 0.0 {
        out[start..].iter_mut().for_each(|x| *x += added);
    }
}

/// Rows whose columns are not neighbours: column by column, because those of one column are.
fn gather<'b>(
    part: &Part,
    dtype: DType,
    rows: &[usize],
    element: impl Fn(usize, usize) -> &'b [u8],
    out: &mut Vec<f32>,
) {
    let size = dtype.size();
    let mut bytes = vec![0; rows.len() * part.cols * size];
    for col in 0..part.cols {
        for (index, row) in rows.iter().enumerate() {
            bytes[(index * part.cols + col) * size..][..size].copy_from_slice(element(*row, col));
        }
    }
    dtype.decode(&bytes, out);
}

/// A tensor that is to be packed has plain elements.
fn check_plain(checkpoint: &Checkpoint, name: &str, info: &TensorInfo) -> Result<(), ModelError> {
    match info.dtype() {
        Some(_) => Ok(()),
        None => {
            let problem = format!("has elements of type {}\nhint: pass a model in F32, F16 or BF16", info.stored);
            Err(checkpoint.error(name, problem))
        }
    }
}

/// What tensors are to a model, by name; those that are left out are [`Role::Wide`].
fn roles(spec: &ModelSpec) -> BTreeMap<String, Role> {
    let mut roles = BTreeMap::new();
    let is_head = spec.head.is_none();
    roles.insert(spec.embedding.table.tensor.clone(), Role::Table { is_head });
    roles.extend(spec.head.iter().map(|part| (part.tensor.clone(), Role::Head)));
    for (layer, of) in spec.layers.iter().enumerate() {
        let AttentionSpec { qkv, out, .. } = &of.attention;
        let mut set = |part: &Part, kind| {
            let kind = match roles.get(&part.tensor) {
                Some(Role::Matrix { kind: other, .. }) if *other != kind => Kind::Fused,
                _ => kind,
            };
            roles.insert(part.tensor.clone(), Role::Matrix { layer, kind });
        };
        let (mut row, q_dim, kv_dim) = (0, spec.geometry.q_dim(), spec.geometry.kv_dim());
        for part in qkv {
            let kind = match row {
                _ if part.rows > q_dim.max(kv_dim) => Kind::Fused,
                row if row < q_dim => Kind::Queries,
                row if row < q_dim + kv_dim => Kind::Keys,
                _ => Kind::Values,
            };
            set(part, kind);
            row += part.rows;
        }
        set(out, Kind::AttentionOut);
        match &of.mlp {
            Mlp::Dense(dense) => {
                dense.up.iter().for_each(|part| set(part, Kind::Up));
                set(&dense.down, Kind::Down);
            }
            Mlp::Experts(experts) => {
                experts.up.iter().for_each(|part| set(part, Kind::ExpertsUp));
                experts.down.iter().for_each(|part| set(part, Kind::ExpertsDown));
                if let Some(dense) = &experts.shared {
                    dense.up.iter().for_each(|part| set(part, Kind::Up));
                    set(&dense.down, Kind::Down);
                }
            }
        }
    }
    roles
}
