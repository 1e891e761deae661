//! Pull: the mapping of one export's bytes from the writer's memory to the reader's, piece by piece.
//!
//! A **piece** is one layer of one of the writer's rBlocks, of the shared heads: the unit of reads, checks and
//! conversions. A [`Pull`] only computes; it holds no state of the transfer.

use crate::{
    check::{Check, Checker},
    extent::{Pair, canonical, packed, pairs},
    layout::{DIMS, Dim, Grid, Index, Layout},
    plan::{Conversion, View, Way},
    region::{Region, RegionError},
};
use half::{bf16, f16};
use lagoon_types::{DType, KvDType};
use std::{ops::Range, sync::Arc};

/// Byte range of the writer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    pub region: u32,
    pub offset: u64,
    pub bytes: u64,
}

/// Place in the reader's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    pub region: u32,
    pub offset: u64,
}

/// Error of an impossible pull.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullError {
    #[error(
        "{tokens} tokens from slot {first} on need {needed} rBlocks, {given} are given: a pull allocates all or nothing"
    )]
    Allocation { tokens: u32, first: u32, needed: u64, given: usize },
    #[error("{tokens} tokens fill {needed} of the writer's rBlocks, the export names {given}")]
    Export { tokens: u32, needed: u64, given: usize },
    #[error("{whose} rBlock {block} does not exist: there are {blocks}")]
    Block { whose: &'static str, block: u32, blocks: u32 },
}

/// Consecutive tokens of one plane, in one memory.
#[derive(Clone, Debug)]
struct Cell {
    grid: Grid,
    dtype: KvDType,
    /// Its part of the kv dimension.
    kv: Range<u32>,
    /// Index of its first element in the grid.
    first: Index,
}

impl Cell {
    /// The index of a token (counted from the cell's first) and of K or V.
    fn at(&self, token: u32, kv: u32) -> Index {
        let mut index = self.first;
        index[Dim::Token as usize] += token;
        index[Dim::Kv as usize] += kv - self.kv.start;
        index
    }
}

/// The cells of one layer of a block, from a token on: one with both K and V, or one of each.
fn cells(layout: &Layout, view: &View, layer: u32, block: u32, token: u32) -> Vec<Cell> {
    let planes = layout.planes_of(layer).map(|plane| Cell {
        grid: plane.grid(),
        dtype: plane.dtype,
        kv: plane.part.range(),
        first: [block, layer - plane.first_layer, 0, token, view.heads.start - layout.heads().start, 0],
    });
    let mut cells: Vec<Cell> = planes.collect();
    cells.sort_by_key(|cell| cell.kv.start);
    cells
}

/// Calls `visit` with (region, offset, bytes) of the content of consecutive tokens, in canonical order.
fn content(cells: &[Cell], tokens: u32, heads: u32, dim: u32, visit: &mut dyn FnMut(u32, u64, u64)) {
    if let [cell] = cells {
        let len = [1, 1, cell.kv.end - cell.kv.start, tokens, heads, dim];
        return canonical(&len, &cell.grid, &cell.first, &mut |at, bytes| visit(cell.grid.region, at, bytes));
    }
    for token in 0..tokens {
        for cell in cells {
            let len = [1, 1, cell.kv.end - cell.kv.start, 1, heads, dim];
            let first = cell.at(token, cell.kv.start);
            canonical(&len, &cell.grid, &first, &mut |at, bytes| visit(cell.grid.region, at, bytes));
        }
    }
}

fn heads(view: &View) -> u32 {
    view.heads.end - view.heads.start
}

/// Checks of the blocks of an export, which hold `tokens` tokens in order; computed by the writer.
///
/// # Errors
/// If a region cannot be read.
pub fn check_blocks(
    layout: &Layout,
    view: &View,
    blocks: &[u32],
    tokens: u32,
    regions: &[Arc<dyn Region>],
) -> Result<Vec<Check>, RegionError> {
    let size = layout.block_tokens();
    let filled = |n: u32| size.min(tokens.saturating_sub(n.saturating_mul(size)));
    let mut checks: Vec<Vec<Check>> = vec![Vec::new(); blocks.len()];
    for layer in view.layers.clone() {
        let of = |(n, block): (u32, &u32)| (cells(layout, view, layer, *block, 0), filled(n));
        let pieces: Vec<(Vec<Cell>, u32)> = (0..).zip(blocks).map(of).collect();
        let found = check_pieces(&pieces, (heads(view), layout.row_elements()), regions)?;
        checks.iter_mut().zip(found).for_each(|(block, check)| block.push(check));
    }
    Ok(checks.into_iter().map(Check::combine).collect())
}

/// Check of one block that holds `tokens` tokens, as [`check_blocks`].
///
/// # Errors
/// If a region cannot be read.
pub fn check_block(
    layout: &Layout,
    view: &View,
    block: u32,
    tokens: u32,
    regions: &[Arc<dyn Region>],
) -> Result<Check, RegionError> {
    Ok(check_blocks(layout, view, &[block], tokens, regions)?.remove(0))
}

/// Checks of pieces of one layer: computed on the device if each is one range of one device region, else on the host.
fn check_pieces(
    pieces: &[(Vec<Cell>, u32)],
    (heads, dim): (u32, u32),
    regions: &[Arc<dyn Region>],
) -> Result<Vec<Check>, RegionError> {
    #[cfg(target_os = "linux")]
    {
        let (mut ranges, mut of) = (Vec::new(), std::collections::BTreeSet::new());
        for (cells, tokens) in pieces {
            content(cells, *tokens, heads, dim, &mut |region, at, bytes| {
                of.insert(region);
                ranges.push((at, bytes));
            });
        }
        let one = of.first().filter(|_| of.len() == 1 && ranges.len() == pieces.len());
        if let Some(region) = one.and_then(|region| regions[*region as usize].on_device()) {
            return region.checks(&ranges);
        }
    }
    pieces.iter().map(|(cells, tokens)| check_content(cells, *tokens, heads, dim, regions)).collect()
}

fn check_content(
    cells: &[Cell],
    tokens: u32,
    heads: u32,
    dim: u32,
    regions: &[Arc<dyn Region>],
) -> Result<Check, RegionError> {
    let mut checker = Checker::default();
    feed(&mut checker, cells, tokens, (heads, dim), regions)?;
    Ok(checker.finish())
}

fn feed(
    checker: &mut Checker,
    cells: &[Cell],
    tokens: u32,
    (heads, dim): (u32, u32),
    regions: &[Arc<dyn Region>],
) -> Result<(), RegionError> {
    let mut result = Ok(());
    content(cells, tokens, heads, dim, &mut |region, offset, bytes| {
        if result.is_ok() {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            result = regions[region as usize].view(offset, bytes, &mut |part| checker.update(part));
        }
    });
    result
}

/// Pull of one export: source and destination of every piece.
#[derive(Clone, Debug)]
pub struct Pull {
    reader: Arc<Layout>,
    writer: Arc<Layout>,
    conversion: Arc<Conversion>,
    remote: Vec<u32>,
    local: Vec<u32>,
    tokens: u32,
    local_first: u32,
    /// Whether consecutive pieces are blocks of one layer, rather than layers of one block.
    by_layer: bool,
    /// By layer of the view.
    plain: Vec<Option<Plain>>,
}

/// A layer whose blocks are one extent each on both sides, in canonical order. Computed once per pull, not per piece.
#[derive(Clone, Copy, Debug)]
struct Plain {
    remote: Extent,
    local: Extent,
}

/// Offsets of tokens without gaps.
#[derive(Clone, Copy, Debug)]
struct Extent {
    region: u32,
    /// Offset of token 0 of block 0.
    base: u64,
    block_bytes: u64,
    token_bytes: u64,
}

impl Extent {
    /// The offsets if the first `tokens` tokens of a block are one extent.
    fn of(cells: &[Cell], tokens: u32, (heads, dim): (u32, u32)) -> Option<Self> {
        let [cell] = cells else { return None };
        let (mut extents, mut len) = (0, 0);
        content(cells, tokens, heads, dim, &mut |_, _, bytes| (extents, len) = (extents + 1, bytes));
        (extents == 1).then(|| Self {
            region: cell.grid.region,
            base: cell.grid.offset(&cell.first),
            block_bytes: cell.grid.strides[Dim::Block as usize] * cell.grid.elem_bytes,
            token_bytes: len / u64::from(tokens),
        })
    }

    fn offset(&self, block: u32, token: u32) -> u64 {
        self.base + u64::from(block) * self.block_bytes + u64::from(token) * self.token_bytes
    }
}

impl Plain {
    fn of(reader: &Layout, writer: &Layout, conversion: &Conversion, layer: u32) -> Option<Self> {
        let view = &conversion.view;
        let shape = (heads(view), writer.row_elements());
        let cells_of = |layout: &Layout| cells(layout, view, layer, 0, 0);
        let (theirs, ours) = (cells_of(writer), cells_of(reader));
        let same = theirs.first()?.dtype == ours.first()?.dtype && conversion.way == Way::Direct;
        let remote = Extent::of(&theirs, writer.block_tokens(), shape).filter(|_| same)?;
        Some(Self { remote, local: Extent::of(&ours, reader.block_tokens(), shape)? })
    }
}

impl Pull {
    /// A pull of `tokens` tokens from the writer's blocks `remote` into the reader's blocks `local`, from token
    /// `local_first` of the first one on.
    ///
    /// # Errors
    /// If either side's blocks do not hold the tokens, or do not exist.
    pub fn new(
        (reader, writer): (Arc<Layout>, Arc<Layout>),
        conversion: Arc<Conversion>,
        tokens: u32,
        remote: Vec<u32>,
        local: Vec<u32>,
        local_first: u32,
    ) -> Result<Self, PullError> {
        let needed = u64::from(tokens).div_ceil(writer.block_tokens().into());
        if needed != remote.len() as u64 || tokens == 0 {
            return Err(PullError::Export { tokens, needed, given: remote.len() });
        }
        let needed = (u64::from(tokens) + u64::from(local_first)).div_ceil(reader.block_tokens().into());
        if needed > local.len() as u64 {
            return Err(PullError::Allocation { tokens, first: local_first, needed, given: local.len() });
        }
        for (whose, list, blocks) in
            [("the writer's", &remote, writer.blocks()), ("the reader's", &local, reader.blocks())]
        {
            if let Some(block) = list.iter().find(|block| **block >= blocks) {
                return Err(PullError::Block { whose, block: *block, blocks });
            }
        }
        // The dimension with the larger stride is the outer one, so that reads are in the order of memory.
        let strides = writer.planes()[0].grid().strides;
        let layer = strides[Dim::Layer as usize];
        let by_layer = layer == 0 || layer > strides[Dim::Block as usize];
        let plain = |layer| Plain::of(&reader, &writer, &conversion, layer);
        let plain = conversion.view.layers.clone().map(plain).collect();
        Ok(Self { reader, writer, conversion, remote, local, tokens, local_first, by_layer, plain })
    }

    /// How the source's KV becomes the target's.
    #[must_use]
    pub fn conversion(&self) -> &Conversion {
        &self.conversion
    }

    /// Number of the writer's blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.remote.len()
    }

    /// Number of shared layers.
    pub(crate) fn layers(&self) -> usize {
        (self.conversion.view.layers.end - self.conversion.view.layers.start) as usize
    }

    /// Number of pieces.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.remote.len() * self.layers()
    }

    /// Piece number `n` in read order: index of its block in the export, and index of its layer in the view.
    #[must_use]
    pub fn piece(&self, n: usize) -> (usize, usize) {
        if self.plain.len() == 1 {
            (n, 0)
        } else if self.by_layer {
            (n % self.remote.len(), n / self.remote.len())
        } else {
            (n / self.layers(), n % self.layers())
        }
    }

    /// Inverse of [`Pull::piece`].
    #[must_use]
    pub fn piece_at(&self, block: usize, layer: usize) -> usize {
        if self.by_layer { layer * self.remote.len() + block } else { block * self.layers() + layer }
    }

    /// Tokens of a block of the export: the last may be partly filled.
    #[must_use]
    pub fn block_tokens(&self, block: usize) -> u32 {
        let before = u32::try_from(block).unwrap_or(u32::MAX).saturating_mul(self.writer.block_tokens());
        self.tokens.saturating_sub(before).min(self.writer.block_tokens())
    }

    fn box_of(&self, tokens: u32, kv: &Range<u32>) -> Index {
        [1, 1, kv.end - kv.start, tokens, heads(&self.conversion.view), self.writer.row_elements()]
    }

    fn remote_cells(&self, n: usize) -> Vec<Cell> {
        let (block, layer) = self.piece(n);
        let layer = self.conversion.view.layers.start + u32::try_from(layer).unwrap_or(u32::MAX);
        cells(&self.writer, &self.conversion.view, layer, self.remote[block], 0)
    }

    /// The cells of a piece in a buffer of its concatenated planes, and the buffer's size.
    fn staging_cells(&self, n: usize) -> (Vec<Cell>, u64) {
        let (block, _) = self.piece(n);
        let mut base = 0;
        let mut cells = self.remote_cells(n);
        for cell in &mut cells {
            let len = self.box_of(self.block_tokens(block), &cell.kv);
            cell.grid = Grid { base, ..packed(&len, &cell.grid) };
            cell.first = [0; DIMS];
            base += len.iter().map(|size| u64::from(*size)).product::<u64>() * cell.grid.elem_bytes;
        }
        (cells, base)
    }

    /// Calls `visit` for every part of a piece within one block of the reader, with its tokens in the piece and its cells.
    fn local_chunks(&self, n: usize, visit: &mut dyn FnMut(Range<u32>, &[Cell])) {
        let (block, layer) = self.piece(n);
        let layer = self.conversion.view.layers.start + u32::try_from(layer).unwrap_or(u32::MAX);
        let tokens = self.block_tokens(block);
        let start = u32::try_from(block).unwrap_or(u32::MAX) * self.writer.block_tokens() + self.local_first;
        let size = self.reader.block_tokens();
        let mut token = 0;
        while token < tokens {
            let slot = start + token;
            let len = (size - slot % size).min(tokens - token);
            let block = self.local[(slot / size) as usize];
            visit(token..token + len, &cells(&self.reader, &self.conversion.view, layer, block, slot % size));
            token += len;
        }
    }

    /// The single read of a piece of a plain layer; `None` if it spans two of the reader's blocks.
    pub(crate) fn plain_read(&self, n: usize) -> Option<(Remote, Local)> {
        let (block, layer) = self.piece(n);
        let plain = self.plain[layer].as_ref()?;
        let tokens = self.block_tokens(block);
        let slot = u32::try_from(block).unwrap_or(u32::MAX) * self.writer.block_tokens() + self.local_first;
        let size = self.reader.block_tokens();
        let (into, token) = (self.local[(slot / size) as usize], slot % size);
        let Plain { remote, local } = plain;
        (token + tokens <= size).then(|| {
            let bytes = u64::from(tokens) * remote.token_bytes;
            let from = Remote { region: remote.region, offset: remote.offset(self.remote[block], 0), bytes };
            (from, Local { region: local.region, offset: local.offset(into, token) })
        })
    }

    /// The single read, of up to `bytes` bytes, of two or more full blocks of a plain layer from piece `n` on that are
    /// contiguous on both sides; and their number.
    pub(crate) fn plain_run(&self, n: usize, bytes: u64) -> Option<(Remote, Local, usize)> {
        let (block, layer) = self.piece(n);
        let Plain { remote, local } = self.plain[layer].as_ref()?;
        let size = self.writer.block_tokens();
        let each = u64::from(size) * remote.token_bytes;
        let alike = self.reader.block_tokens() == size && self.local_first == 0;
        if !self.by_layer || !alike || remote.block_bytes != each || local.block_bytes != each {
            return None;
        }
        let full = (self.tokens / size) as usize;
        let most = usize::try_from(bytes / each).unwrap_or(usize::MAX).min(full.saturating_sub(block));
        let pairs = self.remote[block..].iter().zip(&self.local[block..]).take(most);
        let (from, into) = (self.remote[block], self.local[block]);
        let pieces = (0..)
            .zip(pairs)
            .take_while(|(k, (r, l))| from.checked_add(*k) == Some(**r) && into.checked_add(*k) == Some(**l))
            .count();
        (pieces > 1).then(|| {
            let from = Remote { region: remote.region, offset: remote.offset(from, 0), bytes: each * pieces as u64 };
            (from, Local { region: local.region, offset: local.offset(into, 0) }, pieces)
        })
    }

    /// Bytes of a piece in the writer's memory.
    #[must_use]
    pub fn piece_bytes(&self, n: usize) -> u64 {
        let (block, layer) = self.piece(n);
        let tokens = self.block_tokens(block);
        if let Some(plain) = &self.plain[layer] {
            return u64::from(tokens) * plain.remote.token_bytes;
        }
        let bytes = |cell: &Cell| {
            self.box_of(tokens, &cell.kv).iter().map(|size| u64::from(*size)).product::<u64>() * cell.grid.elem_bytes
        };
        self.remote_cells(n).iter().map(bytes).sum()
    }

    /// Calls `visit` for every read of a piece: to its place, or (staged) concatenated into a buffer.
    pub fn reads(&self, n: usize, visit: &mut dyn FnMut(Remote, Option<Local>)) {
        if let Some((remote, local)) = self.plain_read(n) {
            return visit(remote, Some(local));
        }
        let remote = self.remote_cells(n);
        if self.conversion.way == Way::Staged {
            let (staging, _) = self.staging_cells(n);
            let tokens = self.block_tokens(self.piece(n).0);
            for (theirs, stage) in remote.iter().zip(&staging) {
                let len = self.box_of(tokens, &theirs.kv);
                pairs(&len, (&theirs.grid, &theirs.first), (&stage.grid, &stage.first), &mut |pair: Pair| {
                    let bytes = pair.elements * theirs.grid.elem_bytes;
                    visit(Remote { region: theirs.grid.region, offset: pair.a, bytes }, None);
                });
            }
            return;
        }
        self.local_chunks(n, &mut |tokens, local| {
            self.scatter(&remote, local, &tokens, &mut |theirs, ours, pair| {
                let bytes = pair.elements * theirs.grid.elem_bytes;
                let place = Local { region: ours.grid.region, offset: pair.b };
                visit(Remote { region: theirs.grid.region, offset: pair.a, bytes }, Some(place));
            });
        });
    }

    /// Extents between the cells of a whole piece and those of some of its tokens.
    fn scatter(&self, from: &[Cell], to: &[Cell], tokens: &Range<u32>, visit: &mut dyn FnMut(&Cell, &Cell, Pair)) {
        for source in from {
            for target in to {
                let kv = source.kv.start.max(target.kv.start)..source.kv.end.min(target.kv.end);
                if kv.is_empty() {
                    continue;
                }
                let len = self.box_of(tokens.end - tokens.start, &kv);
                let a = (&source.grid, &source.at(tokens.start, kv.start));
                let b = (&target.grid, &target.at(0, kv.start));
                pairs(&len, a, b, &mut |pair| visit(source, target, pair));
            }
        }
    }

    /// Check of a piece that was read to its place.
    ///
    /// # Errors
    /// If a region cannot be read.
    pub fn check_landed(&self, n: usize, regions: &[Arc<dyn Region>]) -> Result<Check, RegionError> {
        let mut checker = Checker::default();
        let mut result = Ok(());
        self.local_chunks(n, &mut |tokens, local| {
            let shape = (heads(&self.conversion.view), self.reader.row_elements());
            if result.is_ok() {
                result = feed(&mut checker, local, tokens.end - tokens.start, shape, regions);
            }
        });
        result.map(|()| checker.finish())
    }

    /// Check of a piece in a buffer.
    #[must_use]
    pub fn check_staged(&self, n: usize, buffer: &[u8]) -> Check {
        let (staging, _) = self.staging_cells(n);
        let tokens = self.block_tokens(self.piece(n).0);
        let mut checker = Checker::default();
        content(&staging, tokens, heads(&self.conversion.view), self.writer.row_elements(), &mut |_, at, bytes| {
            checker.update(&buffer[span(at, bytes)]);
        });
        checker.finish()
    }

    /// Whether a piece's read is one extent in canonical order, so that it can be checked while it is copied.
    #[must_use]
    pub fn is_plain(&self, n: usize) -> bool {
        if self.plain_read(n).is_some() {
            return true;
        }
        if self.conversion.way == Way::Staged {
            return false;
        }
        let mut reads = 0;
        self.reads(n, &mut |_, _| reads += 1);
        let mut extents = 0;
        let tokens = self.block_tokens(self.piece(n).0);
        let cells = self.remote_cells(n);
        content(&cells, tokens, heads(&self.conversion.view), self.writer.row_elements(), &mut |_, _, _| extents += 1);
        reads == 1 && extents == 1
    }

    /// Copies a piece from a buffer to its place and converts elements if the types differ. Returns the number of finite
    /// values beyond the range of the reader's type.
    ///
    /// # Errors
    /// If a region cannot be written.
    pub fn convert(&self, n: usize, buffer: &[u8], regions: &[Arc<dyn Region>]) -> Result<u64, RegionError> {
        let (staging, _) = self.staging_cells(n);
        let mut result = Ok(0);
        self.local_chunks(n, &mut |tokens, local| {
            self.scatter(&staging, local, &tokens, &mut |source, target, pair| {
                let Ok(overflows) = result else { return };
                let from = &buffer[span(pair.a, pair.elements * source.grid.elem_bytes)];
                let region = &regions[target.grid.region as usize];
                let written = copy(from, source.dtype, region.as_ref(), pair.b, target.dtype);
                result = written.map(|more| overflows + more);
            });
        });
        result
    }
}

fn span(at: u64, bytes: u64) -> Range<usize> {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    at..at.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Writes elements to a region, converted.
fn copy(from: &[u8], source: KvDType, region: &dyn Region, offset: u64, target: KvDType) -> Result<u64, RegionError> {
    if source == target {
        crate::region::write(region, offset, from)?;
        return Ok(0);
    }
    let (mut values, mut out) = (Vec::new(), Vec::new());
    let [source, target] = [source, target].map(|dtype| dtype.plain().expect("types with scales are not converted"));
    source.decode(from, &mut values);
    let largest = match target {
        DType::F32 => f32::MAX,
        DType::F16 => f16::MAX.to_f32(),
        DType::BF16 => bf16::MAX.to_f32(),
    };
    let overflows = values.iter().filter(|value| value.is_finite() && value.abs() > largest).count();
    target.encode(&values, &mut out);
    crate::region::write(region, offset, &out)?;
    Ok(overflows as u64)
}
