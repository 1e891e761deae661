//! Quantises a model into a file: tensor by tensor, in stretches of rows that several threads share.
//!
//! The file has a temporary name in its directory until it is complete and on disk. Memory in use is a stretch in f32 and in the
//! target's format, at most [`STRETCH_ELEMENTS`] elements or a row a thread, besides pages of the model's files that the kernel can
//! take back, and the largest vector or router.

use crate::encode::{encode, largest};
use crate::{Importance, QuantizeError, Source, Target};
use lagoon_backend::WeightFormat;
use lagoon_backend::formats::BLOCK_ELEMENTS_MAX;
use lagoon_model::export::{ExportTensor, Kind, Role, Rows};
use lagoon_model::gguf::{Entry, Item, Keys, Writer, is_gguf};
use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Elements that are read and quantised before they are written: 16 MiB in f32.
const STRETCH_ELEMENTS: usize = 4 << 20;
/// Version of the packed formats' layouts.
const QUANTIZATION_VERSION: u32 = 2;

/// How to quantise.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    pub target: Target,
    pub importance: Option<&'a Importance>,
    pub threads: usize,
    /// Whether a file that is there is replaced.
    pub force: bool,
}

/// How far writing is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of tensors.
    pub done: u64,
    pub total: u64,
}

/// Square sums of a tensor's elements.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    elements: f64,
    errors: f64,
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.elements += other.elements;
        self.errors += other.errors;
    }

    fn relative(self) -> f64 {
        if self.elements > 0.0 { (self.errors / self.elements).sqrt() } else { 0.0 }
    }
}

/// All tensors of one kind in one format.
#[derive(Clone, Debug)]
pub struct KindSummary {
    /// The tensors' name without its layer, such as `ffn_down`.
    pub kind: String,
    pub format: WeightFormat,
    pub tensors: usize,
    pub elements: u64,
    pub bytes: u64,
    /// The square root of the errors' square sum over the elements' one.
    pub relative_rms: f64,
    sums: (f64, f64),
    /// Columns, where rows are no whole blocks of the format that the tensors were meant to have.
    pub unfit: Option<(usize, WeightFormat)>,
}

/// What was written.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Bytes of the tensors as they were.
    pub bytes_before: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bits of an element, those of vectors included.
    pub bits: f64,
    /// Relative error of all matrices together.
    pub relative_rms: f64,
    /// In the order of the file.
    pub kinds: Vec<KindSummary>,
}

impl Source {
    /// Writes the model to `out`, a `.gguf` file. `progress` is called after each stretch and returns whether to go on.
    ///
    /// # Errors
    /// A [`QuantizeError`]; `out` is then as it was before.
    pub fn write(
        &self,
        out: &Path,
        options: Options<'_>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Summary, QuantizeError> {
        let io = |source| QuantizeError::Io { path: out.to_owned(), source };
        check_place(out, options.force)?;
        let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = tempfile::Builder::new();
        file.prefix(".lagoon-").suffix(".partial");
        #[cfg(unix)]
        file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = file.tempfile_in(dir).map_err(io)?;
        let kinds = self.fill(file.as_file_mut(), (out, options), progress)?;
        file.as_file().sync_all().map_err(io)?;
        let bytes = file.as_file().metadata().map_err(io)?.len();
        let kept = if options.force { file.persist(out) } else { file.persist_noclobber(out) };
        kept.map_err(|error| match error.error.kind() {
            std::io::ErrorKind::AlreadyExists => QuantizeError::Exists { path: out.to_owned() },
            _ => io(error.error),
        })?;
        Ok(self.summary(bytes, kinds))
    }

    /// Writes keys and tensors to `file`, which will be `out`.
    fn fill(
        &self,
        file: &mut File,
        (out, options): (&Path, Options<'_>),
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Vec<KindSummary>, QuantizeError> {
        let io = |source| QuantizeError::Io { path: out.to_owned(), source };
        let entries: Vec<Entry> = self.export.tensors.iter().map(|tensor| self.entry(tensor, options.target)).collect();
        let writer = Writer::begin(BufWriter::with_capacity(1 << 20, file), &self.keys(options), &entries);
        let total = entries.iter().map(|entry| entry.bytes() as u64).sum();
        let mut run = Run { source: self, options, out, writer: writer.map_err(io)?, done: 0, total, progress };
        let mut kinds = Vec::new();
        for (tensor, entry) in self.export.tensors.iter().zip(&entries) {
            let sums = run.tensor(tensor, entry)?;
            self.count(tensor, entry, options.target, sums, &mut kinds);
        }
        run.writer.finish().map_err(io)?;
        Ok(kinds)
    }

    fn has_experts(&self) -> bool {
        let is_expert = |tensor: &ExportTensor| matches!(tensor.role, Role::Matrix { kind: Kind::ExpertsUp, .. });
        self.export.tensors.iter().any(is_expert)
    }

    fn format_of(&self, role: Role, cols: usize, target: Target) -> WeightFormat {
        target.format_of(role, cols, self.export.spec.layers.len(), self.has_experts())
    }

    fn entry(&self, tensor: &ExportTensor, target: Target) -> Entry {
        let format = self.format_of(tensor.role, tensor.shape.last().copied().unwrap_or(1), target);
        Entry { name: tensor.name.clone(), shape: tensor.shape.clone(), format }
    }

    fn keys(&self, options: Options<'_>) -> Keys {
        let mut keys = self.export.keys.clone();
        keys.set("general.file_type", Item::U32(options.target.file_type()));
        keys.set("general.quantization_version", Item::U32(QUANTIZATION_VERSION));
        keys
    }

    /// Adds a tensor to its kind.
    fn count(&self, tensor: &ExportTensor, entry: &Entry, target: Target, sums: Sums, kinds: &mut Vec<KindSummary>) {
        let kind = kind(&entry.name, tensor.role);
        let elements = entry.shape.iter().product::<usize>() as u64;
        let cols = entry.shape.last().copied().unwrap_or(1);
        let wanted = self.format_of(tensor.role, BLOCK_ELEMENTS_MAX, target);
        let unfit = (wanted != entry.format).then_some((cols, wanted));
        let index = kinds.iter().position(|of| of.kind == kind && of.format == entry.format).unwrap_or_else(|| {
            let format = entry.format;
            kinds.push(KindSummary {
                kind,
                format,
                tensors: 0,
                elements: 0,
                bytes: 0,
                relative_rms: 0.0,
                sums: (0.0, 0.0),
                unfit,
            });
            kinds.len() - 1
        });
        let of = &mut kinds[index];
        of.tensors += 1;
        of.elements += elements;
        of.bytes += entry.bytes() as u64;
        of.sums = (of.sums.0 + sums.elements, of.sums.1 + sums.errors);
        of.relative_rms = Sums { elements: of.sums.0, errors: of.sums.1 }.relative();
    }

    fn summary(&self, bytes: u64, kinds: Vec<KindSummary>) -> Summary {
        let mut sums = Sums::default();
        let (mut stored, mut elements) = (0, 0);
        for of in &kinds {
            stored += of.bytes;
            elements += of.elements;
            if of.format != WeightFormat::F32 {
                sums.add(Sums { elements: of.sums.0, errors: of.sums.1 });
            }
        }
        Summary {
            bytes_before: self.export.checkpoint.formats().iter().map(|(_, bytes)| bytes).sum(),
            bytes,
            bits: stored as f64 * 8.0 / (elements as f64).max(1.0),
            relative_rms: sums.relative(),
            kinds,
        }
    }
}

/// Refuses a place that is taken, before anything is computed, and a name that readers do not take.
///
/// # Errors
/// [`QuantizeError::Exists`] or [`QuantizeError::NotGguf`].
pub fn check_place(out: &Path, force: bool) -> Result<(), QuantizeError> {
    let path = PathBuf::from(out);
    if !is_gguf(out) {
        return Err(QuantizeError::NotGguf { path });
    }
    if !force && out.exists() { Err(QuantizeError::Exists { path }) } else { Ok(()) }
}

/// A tensor's name without its layer and its end.
fn kind(name: &str, role: Role) -> String {
    if role == Role::Wide {
        return "vectors and routers".to_owned();
    }
    let name = name.strip_suffix(".weight").unwrap_or(name);
    let mut parts = name.splitn(3, '.');
    match (parts.next(), parts.next().map(str::parse::<usize>), parts.next()) {
        (Some("blk"), Some(Ok(_)), Some(rest)) => rest.to_owned(),
        _ => name.to_owned(),
    }
}

/// A file in progress.
struct Run<'a, W: std::io::Write> {
    source: &'a Source,
    options: Options<'a>,
    out: &'a Path,
    writer: Writer<W>,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress) -> bool,
}

impl<W: std::io::Write> Run<'_, W> {
    fn tensor(&mut self, tensor: &ExportTensor, entry: &Entry) -> Result<Sums, QuantizeError> {
        let export = &self.source.export;
        if tensor.role == Role::Wide {
            let values = export.values(tensor)?;
            let mut bytes = vec![0; entry.bytes()];
            let place = Place { tensor: &tensor.name, format: entry.format, importance: None };
            let sums = place.rows(&values, values.len().max(1), 0, &mut bytes)?;
            self.put(&bytes)?;
            return Ok(sums);
        }
        let rows = export.rows(tensor)?;
        let importance = self.options.importance.and_then(|importance| importance.of(tensor.role, rows.cols()));
        let place = Place { tensor: &tensor.name, format: entry.format, importance };
        let stretch = (STRETCH_ELEMENTS / rows.cols()).max(self.options.threads).max(1);
        let mut sums = Sums::default();
        let mut bytes = Vec::new();
        for first in (0..rows.count()).step_by(stretch) {
            let range = first..(first + stretch).min(rows.count());
            sums.add(place.stretch(&rows, range.clone(), self.options.threads, &mut bytes)?);
            rows.release(range);
            self.put(&bytes)?;
        }
        Ok(sums)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), QuantizeError> {
        self.writer.data(bytes).map_err(|source| QuantizeError::Io { path: self.out.to_owned(), source })?;
        self.done += bytes.len() as u64;
        if (self.progress)(Progress { done: self.done, total: self.total }) {
            Ok(())
        } else {
            Err(QuantizeError::Stopped)
        }
    }
}

/// Where rows go.
#[derive(Clone, Copy)]
struct Place<'a> {
    tensor: &'a str,
    format: WeightFormat,
    importance: Option<&'a [f32]>,
}

impl Place<'_> {
    /// Quantises rows by several threads into `bytes`, in place of what is there.
    fn stretch(
        self,
        rows: &Rows<'_>,
        range: Range<usize>,
        threads: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<Sums, QuantizeError> {
        let cols = rows.cols();
        let row_bytes = self.format.bytes(cols).expect("rows are whole blocks");
        bytes.clear();
        bytes.resize(range.len() * row_bytes, 0);
        let each = range.len().div_ceil(threads.max(1)).max(1);
        let results: Vec<Result<Sums, QuantizeError>> = std::thread::scope(|scope| {
            let chunks = bytes.chunks_mut(each * row_bytes).enumerate();
            let running: Vec<_> = chunks
                .map(|(index, out)| {
                    let first = range.start + index * each;
                    scope.spawn(move || {
                        let mut values = Vec::with_capacity(each * cols);
                        rows.read(first..first + out.len() / row_bytes, &mut values);
                        self.rows(&values, cols, first, out)
                    })
                })
                .collect();
            running.into_iter().map(|thread| thread.join().expect("quantising does not panic")).collect()
        });
        let mut sums = Sums::default();
        for result in results {
            sums.add(result?);
        }
        Ok(sums)
    }

    /// Quantises whole rows, the first of which has the number `first`, and compares them with what a reader gets.
    fn rows(self, values: &[f32], cols: usize, first: usize, out: &mut [u8]) -> Result<Sums, QuantizeError> {
        let row_bytes = self.format.bytes(cols).expect("rows are whole blocks");
        let (most, mut sums, mut read) = (largest(self.format), Sums::default(), Vec::with_capacity(cols));
        for (index, (row, out)) in values.chunks_exact(cols).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
            let (tensor, number) = (|| self.tensor.to_owned(), first + index);
            if let Some(value) = row.iter().find(|x| !x.is_finite()) {
                return Err(QuantizeError::NotFinite { tensor: tensor(), row: number, value: *value });
            }
            if let Some(value) = row.iter().find(|x| x.abs() > most) {
                let format = self.format;
                return Err(QuantizeError::TooLarge { tensor: tensor(), row: number, value: *value, format });
            }
            encode(self.format, row, self.importance, out);
            read.clear();
            self.format.decode(out, &mut read);
            for (x, read) in row.iter().zip(&read) {
                let rest = f64::from(x - read);
                sums.elements += f64::from(*x) * f64::from(*x);
                sums.errors += rest * rest;
            }
        }
        Ok(sums)
    }
}
