//! Packed weights: how their rows lie in device memory, and the kernels that compute with them.
//!
//! * Up to [`PACKED_ROWS_MAX`] rows, `gemv_*` of the format streams the weight and unpacks it in registers for tensor cores;
//!   `split_packed` has written activations to scratch as terms of f16 ([`Streamed`]). `grouped_gemv_*` streams for rows of an expert,
//!   in f32.
//! * For more rows, `unpack_*` writes elements as f16 to scratch, a part of the weight at a time, and the kernels of f16 weights
//!   follow: one term of each element for [`Precision::Fast`], two for [`Precision::Exact`].
//! * `unpack_*` also reads rows of embedding tables, and all rows of products by head, in f32.
//!
//! Invariants: a row has its blocks' pieces in planes ([`Packed::arrange`]), all but the last of multiples of 16 bytes, and begins
//! at a multiple of 16. Nothing is lost or added but up to 15 bytes a row. A format is an entry of [`FORMATS`] and a stem of
//! `cuda/kernels/shared/weight_*.cuh`.

use super::attention::{Precision, SHARED_BYTES_MAX};
use super::linear::{GEMV_ROWS_MAX, GemvParams, Product, blocks};
use super::{Launch, weight_ld};
use bytemuck::{Pod, Zeroable};
use lagoon_backend::{Activation, WeightFormat};
use lagoon_types::DType;

/// Most rows of a product that streams a packed weight: what is unpacked has a factor, which kernels that stream plain weights do not
/// apply.
pub const PACKED_ROWS_MAX: u32 = GEMV_ROWS_MAX;
/// Device memory for elements of weights, in bytes: products of many rows are made for as many weight rows at a time, or for an
/// expert where that is more.
pub const UNPACKED_BYTES: u64 = 64 << 20;
/// Weight rows of which each part of a product has a multiple, if it has as many: whole tiles.
const PART_ROWS: u32 = 128;
/// Rows of a block of `unpack_*`, and its threads.
const UNPACK_ROWS: u32 = 8;
const UNPACK_THREADS: u32 = 256;

/// Start and length of a piece of a block, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece(usize, usize);

/// A packed format that kernels compute with.
#[derive(Debug, PartialEq, Eq)]
pub struct Packed {
    pub format: WeightFormat,
    /// Pieces of a block in the order of a row's planes, codes first.
    planes: &'static [Piece],
    /// As [`FEW_ROWS`] has them.
    gemv: [&'static str; 3],
    /// As in `cuda/kernels/shared/weight_*.cuh`: runs of a unit, units whose second runs follow their first ones, whether elements have
    /// a least value, and pieces of 16 bytes that 128 elements of a row have in its planes.
    runs: u32,
    paired: u32,
    least: bool,
    pieces: u32,
    /// Blocks of the kernel of one row on a multiprocessor of capability 9.0, as its launch bounds have them.
    row_blocks: u32,
    pub(super) grouped: &'static str,
    unpack: &'static str,
}

macro_rules! packed {
    ($format:ident, $name:literal, $runs:literal, $paired:literal, $least:literal, $pieces:literal, $row_blocks:literal, $planes:expr) => {
        Packed {
            format: WeightFormat::$format,
            planes: &$planes,
            gemv: [concat!("gemv_", $name, "_1"), concat!("gemv_", $name, "_8"), concat!("gemv_", $name, "_16")],
            runs: $runs,
            paired: $paired,
            least: $least,
            pieces: $pieces,
            row_blocks: $row_blocks,
            grouped: concat!("grouped_gemv_", $name),
            unpack: concat!("unpack_", $name),
        }
    };
}

/// A kernel that streams weights: tiles of eight columns of terms in shared memory (`cuda/kernels/shared/packed_few.cuh`); 0 for one
/// row of activations, from registers (`packed_row.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewRows {
    tiles: u32,
}

const FEW_ROWS: [FewRows; 3] = [FewRows { tiles: 0 }, FewRows { tiles: 1 }, FewRows { tiles: 2 }];
/// Weight rows of a warp.
const STREAM_ROWS: u32 = 16;
/// For one row: warps of a block.
const STREAM_WARPS: u32 = 8;
/// For more: most warps of a block, which are a multiprocessor's; most groups of them with weight rows of their own; and warps that
/// hide each other's latency.
const FEW_WARPS: u32 = 16;
const GROUPS_MAX: u32 = 8;
const FEW_WARPS_WANTED: u32 = 12;
/// Bytes of a record of 128 columns: of a row's terms, or of a tile's (`cuda/kernels/shared/packed_terms.cuh`).
const ROW_RECORD: u32 = 640;
const TILE_RECORD: u32 = 2208;
/// Columns of a record, and threads of a block of `split_packed`, of which a warp has a record's row.
const CHUNK: u32 = 128;
const SPLIT_THREADS: u32 = 128;

impl FewRows {
    /// Most rows of activations with so many terms.
    const fn rows(self, terms: u32) -> u32 {
        if self.tiles == 0 { 1 } else { 8 * self.tiles / terms }
    }

    /// Shared memory of one turn of a block with so many groups, in bytes, for a format with so many pieces.
    const fn turn_bytes(self, pieces: u32, groups: u32) -> u32 {
        let stages = if pieces > 7 { 2 } else { 3 };
        stages * (self.tiles * TILE_RECORD + groups * STREAM_ROWS * 16 * (pieces | 1))
    }

    /// Groups of warps of a block, and turns that they take along `chunks` chunks. A block has a multiprocessor: what counts is how many
    /// weight rows the one with most of them has. More groups share the copies of activations.
    fn warps(self, pieces: u32, chunks: u32, limits: StreamLimits, blocks: impl Fn(u32) -> u32) -> (u32, u32) {
        let turns = |groups| {
            let fit = limits.shared_bytes_max / self.turn_bytes(pieces, groups);
            fit.min(FEW_WARPS / groups).min(chunks).max(1)
        };
        let cost = |groups: &u32| {
            let rows = blocks(*groups).div_ceil(limits.sms) * groups;
            // Fewer warps take longer for as many rows.
            rows * FEW_WARPS_WANTED * 1000 / FEW_WARPS_WANTED.min(groups * turns(*groups))
        };
        let groups = (1..=GROUPS_MAX).rev().min_by_key(cost).expect("some");
        (groups, turns(groups))
    }
}

/// What a device has for products that stream packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    pub sms: u32,
    /// Shared memory of a block, in bytes.
    pub shared_bytes_max: u32,
}

/// Most dynamic shared memory of a kernel of few rows, in bytes; `None` for other kernels.
pub(super) fn stream_shared_bytes(name: &str) -> Option<u32> {
    FORMATS.iter().find_map(|packed| {
        let which = packed.gemv.iter().position(|other| *other == name)?;
        Some(if FEW_ROWS[which].tiles == 0 { 0 } else { SHARED_BYTES_MAX })
    })
}

/// Every packed format that kernels take.
pub static FORMATS: [Packed; 10] = [
    packed!(Q8_0, "q8_0", 1, 1, false, 9, 3, [Piece(2, 32), Piece(0, 2)]),
    packed!(Q4_0, "q4_0", 2, 1, false, 5, 3, [Piece(2, 16), Piece(0, 2)]),
    packed!(Q4K, "q4_k", 2, 2, true, 5, 3, [Piece(16, 128), Piece(0, 16)]),
    packed!(Q5K, "q5_k", 2, 2, true, 7, 3, [Piece(48, 128), Piece(16, 32), Piece(0, 16)]),
    packed!(Q6K, "q6_k", 2, 4, false, 8, 2, [Piece(0, 128), Piece(128, 64), Piece(192, 16), Piece(208, 2)]),
    packed!(Mxfp4, "mxfp4", 2, 1, false, 5, 3, [Piece(1, 16), Piece(0, 1)]),
    packed!(Fp8, "fp8", 1, 1, false, 9, 3, [Piece(4, 128), Piece(0, 4)]),
    packed!(Int4G32, "int4_g32", 2, 1, false, 5, 3, [Piece(4, 16), Piece(0, 4)]),
    packed!(Int4G64, "int4_g64", 2, 1, false, 5, 3, [Piece(4, 32), Piece(0, 4)]),
    packed!(Int4G128, "int4_g128", 2, 1, false, 5, 3, [Piece(4, 64), Piece(0, 4)]),
];

impl Packed {
    /// Bytes of a row of `cols` elements on the device; `None` if they are no whole blocks.
    #[must_use]
    pub fn row_bytes(&self, cols: usize) -> Option<usize> {
        self.format.bytes(cols).map(|bytes| bytes.next_multiple_of(16))
    }

    /// The kernel that streams the weight for `rows` rows: its shape, name, and terms of each activation. Exact products have two, and
    /// others where that costs no more tiles.
    fn few_rows(&self, rows: u32, precision: Precision) -> (FewRows, &'static str, u32) {
        let (which, terms) = match rows {
            ..=1 => (0, 2),
            2..=4 => (1, 2),
            _ if precision == Precision::Exact => (2, 2),
            _ => (if rows <= 8 { 1 } else { 2 }, 1),
        };
        (FEW_ROWS[which], self.gemv[which], terms)
    }

    /// The kernel of a product of `rows` rows that reads the weight: it streams it, or unpacks it.
    #[must_use]
    pub fn kernel(&self, rows: u32, precision: Precision) -> &'static str {
        if is_streamed(rows) { self.few_rows(rows, precision).1 } else { self.unpack }
    }

    /// Appends rows of `row` given bytes to `out`, arranged in planes.
    ///
    /// # Panics
    /// If `rows` are no whole rows.
    pub fn arrange(&self, rows: &[u8], row: usize, out: &mut Vec<u8>) {
        assert!(rows.len().is_multiple_of(row), "whole rows");
        let block = self.format.block().bytes;
        for row in rows.chunks_exact(row) {
            for Piece(start, len) in self.planes {
                row.chunks_exact(block).for_each(|block| out.extend_from_slice(&block[*start..start + len]));
            }
            out.resize(out.len() + row.len().next_multiple_of(16) - row.len(), 0);
        }
    }
}

/// How rows of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    Plain(DType),
    Packed(&'static Packed),
}

impl Encoding {
    /// `None` for a format without kernels.
    #[must_use]
    pub fn of(format: WeightFormat) -> Option<Self> {
        let packed = || FORMATS.iter().find(|packed| packed.format == format).map(Self::Packed);
        format.plain().map(Self::Plain).or_else(packed)
    }

    /// Bytes of a row of `cols` elements on the device; `None` if they are no whole blocks.
    #[must_use]
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Self::Plain(dtype) => Some(weight_ld(cols, dtype.size()) * dtype.size()),
            Self::Packed(packed) => packed.row_bytes(cols),
        }
    }

    /// The type in which products of many rows have the weight.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::Plain(dtype) => dtype,
            Self::Packed(_) => DType::F16,
        }
    }
}

/// What becomes of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Mode {
    Set = 0,
    Add = 1,
    Terms = 2,
    Largest = 3,
}

/// Parameters of `unpack_*`: elements of `rows` rows of a packed weight. A warp a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct UnpackParams {
    pub w: u64,
    /// u32 `[rows]`: rows of the weight; 0 for its first ones.
    pub ids: u64,
    /// f32 or f16 `[rows][cols]`; f32 `[rows]` for the largest magnitude of each.
    pub out: u64,
    /// f16 `[rows][cols]`, what the first term lacks, or 0.
    pub lo: u64,
    /// Groups of `group_rows` rows begin so many bytes apart.
    pub group_bytes: u64,
    pub rows: u32,
    pub cols: u32,
    pub row_bytes: u32,
    pub group_rows: u32,
    /// 0: writes f32; 1: adds f32; 2: writes f16, times `factor`; 3: largest magnitudes.
    pub mode: u32,
    pub factor: f32,
}

const _: () = assert!(size_of::<UnpackParams>() == 64);
const _: () = assert!(size_of::<StreamParams>() == 80 && size_of::<SplitPackedParams>() == 56);

/// Parameters of `gemv_*` of packed formats.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct StreamParams {
    /// `x` has records, and `x_stride` is not read.
    pub gemv: GemvParams,
    /// Warps of a block with the same columns.
    pub groups: u32,
    /// Terms of an activation.
    pub terms: u32,
    /// Tiles of 16 weight rows in which blocks take turns; 0 where each block has its own rows.
    pub tiles: u32,
    pub pad: u32,
}

/// Parameters of `split_packed`: records of activations. A warp a row and 128 columns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SplitPackedParams {
    /// f32 `[rows][x_stride]`, rows at multiples of 16 bytes.
    pub x: u64,
    /// Records: `[chunks][slots]` of rows, or `[slots / rows of a record][chunks]` of tiles.
    pub out: u64,
    pub rows: u32,
    pub x_stride: u32,
    /// Rows that are written: those beyond `rows` are zeros.
    pub slots: u32,
    pub chunks: u32,
    /// Units of a weight row: those beyond the last are zeros.
    pub units: u32,
    /// Runs of a unit, and how many units' first runs lie before their second ones.
    pub runs: u32,
    pub paired: u32,
    /// Tiles of a record; 0 for records of rows.
    pub tiles: u32,
    pub terms: u32,
    /// Sums of activations are multiplied by it: `ONE` of the format.
    pub one: f32,
}

/// A product that streams a packed weight: first activations become terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streamed {
    pub split: Launch<SplitPackedParams>,
    pub product: Launch<StreamParams>,
}

/// Rows of a packed weight in device memory: groups of `group_rows` rows, which begin `group_bytes` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackedRows {
    pub packed: &'static Packed,
    pub address: u64,
    pub cols: u32,
    pub group_rows: u32,
    pub group_bytes: u64,
    /// Elements are divided by it where they become f16: see [`factor_of`].
    pub factor: f32,
}

impl PackedRows {
    /// Rows one behind the other.
    #[must_use]
    pub const fn flat(packed: &'static Packed, address: u64, rows: u32, cols: u32, factor: f32) -> Self {
        Self { packed, address, cols, group_rows: rows, group_bytes: 0, factor }
    }

    /// The rows from `first` on, which must be one behind the other.
    #[must_use]
    pub fn from_row(&self, first: u32) -> Self {
        Self { address: self.address + u64::from(first) * u64::from(self.row_bytes()), ..*self }
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> u32 {
        let bytes = self.packed.row_bytes(self.cols as usize).expect("rows have whole blocks");
        u32::try_from(bytes).expect("a row's bytes fit u32")
    }

    fn unpack(&self, mode: Mode, rows: u32, ids: u64, [out, lo]: [u64; 2]) -> Launch<UnpackParams> {
        let params = UnpackParams {
            w: self.address,
            ids,
            out,
            lo,
            group_bytes: self.group_bytes,
            rows,
            cols: self.cols,
            row_bytes: self.row_bytes(),
            group_rows: self.group_rows,
            mode: mode as u32,
            factor: 1.0 / self.factor,
        };
        Launch::flat(self.packed.unpack, rows.div_ceil(UNPACK_ROWS), UNPACK_THREADS, params)
    }

    /// Writes the largest magnitude of each of the first `rows` rows to f32 `[rows]` at `out`.
    #[must_use]
    pub fn largest(&self, rows: u32, out: u64) -> Launch<UnpackParams> {
        self.unpack(Mode::Largest, rows, 0, [out, 0])
    }

    /// `out[i] (=|+=) row[ids[i]]` in f32, for `rows` ids; the first rows where `ids` is 0.
    #[must_use]
    pub fn rows(&self, ids: u64, rows: u32, add: bool, out: u64) -> Launch<UnpackParams> {
        self.unpack(if add { Mode::Add } else { Mode::Set }, rows, ids, [out, 0])
    }

    /// Writes the first `rows` rows as one or two f16 terms.
    pub(super) fn terms(&self, rows: u32, terms: [u64; 2]) -> Launch<UnpackParams> {
        self.unpack(Mode::Terms, rows, 0, terms)
    }

    /// Bytes of `rows` rows as terms.
    pub(super) fn terms_bytes(&self, rows: u32, precision: Precision) -> u64 {
        let terms = if precision == Precision::Exact { 2 } else { 1 };
        terms * u64::from(rows) * u64::from(self.cols) * 2
    }

    /// Addresses of the terms of `rows` rows at `to`; 0 for a second term that is not made.
    pub(super) fn terms_at(&self, rows: u32, to: u64, precision: Precision) -> [u64; 2] {
        let second = to + self.terms_bytes(rows, Precision::Fast);
        [to, if precision == Precision::Exact { second } else { 0 }]
    }
}

/// The power of two by which elements are divided before they become f16, where their largest magnitude is this: the quotient is
/// between 2^13 and 2^14, far from both ends of the type's range.
#[must_use]
pub fn factor_of(largest: f32) -> f32 {
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    (largest.log2().floor() - 13.0).clamp(-100.0, 100.0).exp2()
}

/// A product with a packed weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackedProduct {
    /// `w`, `dtype` and `factor` are those of the elements in f16, and not read.
    pub product: Product,
    pub rows: PackedRows,
}

/// A part of a product with a packed weight, of some weight rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackedPart {
    /// Writes the weight rows' elements.
    pub unpack: Launch<UnpackParams>,
    /// One product for each term of the elements, in order, and their precision.
    pub products: [Option<(Product, Precision)>; 2],
}

/// Whether a product of `rows` rows streams a packed weight.
#[must_use]
pub const fn is_streamed(rows: u32) -> bool {
    rows <= PACKED_ROWS_MAX
}

/// Whether a product of `rows` rows with a packed weight applies this activation as it writes.
#[must_use]
pub const fn is_fused(rows: u32, activation: Activation) -> bool {
    is_streamed(rows) && matches!(activation, Activation::SiluMul | Activation::Gelu)
}

impl PackedProduct {
    /// Parameters of `split_packed` for records at `to`.
    fn split(&self, precision: Precision, to: u64) -> SplitPackedParams {
        let Product { x, x_stride, rows, k, .. } = self.product;
        let packed = self.rows.packed;
        let (few, _, terms) = packed.few_rows(rows, precision);
        let units = k / (16 * packed.runs);
        // Records of a row are read in steps of eight units; those of tiles have whole columns.
        let (chunks, slots) = match few.tiles {
            0 => (units.div_ceil(8) * packed.runs, 1),
            _ => (k.div_ceil(CHUNK), rows.next_multiple_of(few.rows(terms))),
        };
        let one = if packed.least { 2f32.powi(-24) } else { 1.0 };
        let (runs, paired, tiles) = (packed.runs, packed.paired, few.tiles);
        SplitPackedParams { x, out: to, rows, x_stride, slots, chunks, units, runs, paired, tiles, terms, one }
    }

    /// Bytes of scratch of [`PackedProduct::stream`].
    #[must_use]
    pub fn stream_bytes(&self, precision: Precision) -> u64 {
        let SplitPackedParams { slots, chunks, tiles, terms, .. } = self.split(precision, 0);
        let records = if tiles == 0 { ROW_RECORD } else { slots * terms / 8 * TILE_RECORD };
        u64::from(chunks) * u64::from(records)
    }

    /// The launches of a product that streams the weight, with [`PackedProduct::stream_bytes`] of scratch at `to`; see
    /// [`is_streamed`].
    #[must_use]
    pub fn stream(&self, precision: Precision, limits: StreamLimits, to: u64) -> Streamed {
        let Product { rows, n, activation, .. } = self.product;
        let fused = activation.is_none_or(|activation| is_fused(rows, activation));
        assert!(is_streamed(rows) && fused && self.product.bias == 0, "a product of few rows");
        let split = self.split(precision, to);
        let Packed { pieces, row_blocks, .. } = *self.rows.packed;
        let (few, name, terms) = self.rows.packed.few_rows(rows, precision);
        let gemv = GemvParams { x: to, w: self.rows.address, ..self.product.gemv(self.rows.row_bytes()) };
        let blocks = |groups| blocks(n, activation, groups * STREAM_ROWS);
        let product = if few.tiles == 0 {
            let tiles = blocks(1);
            let params = StreamParams { gemv, groups: 1, terms, tiles, pad: 0 };
            Launch::flat(name, tiles.min(limits.sms * row_blocks), 32 * STREAM_WARPS, params)
        } else {
            let (groups, turns) = few.warps(pieces, split.chunks, limits, blocks);
            let params = StreamParams { gemv, groups, terms, tiles: 0, pad: 0 };
            let grid = [blocks(groups), split.slots / few.rows(terms), 1];
            let shared_bytes = turns * few.turn_bytes(pieces, groups);
            Launch { name, grid, block: 32 * groups * turns, shared_bytes, params }
        };
        let warps = split.slots * split.chunks;
        Streamed {
            split: Launch::flat("split_packed", warps.div_ceil(SPLIT_THREADS / 32), SPLIT_THREADS, split),
            product,
        }
    }

    /// Weight rows of a part whose elements take at most `room` bytes, one at least.
    fn part_rows(&self, room: u64, precision: Precision) -> u32 {
        let most = u32::try_from(room / self.rows.terms_bytes(1, precision)).unwrap_or(u32::MAX).max(1);
        let whole = if most >= PART_ROWS { most / PART_ROWS * PART_ROWS } else { most };
        whole.min(self.product.n)
    }

    /// Bytes for the elements of a part: `room`, or less, or what a weight row needs.
    #[must_use]
    pub fn part_bytes(&self, room: u64, precision: Precision) -> u64 {
        self.rows.terms_bytes(self.part_rows(room, precision), precision)
    }

    /// The product in parts, with [`PackedProduct::part_bytes`] of memory for elements at `to`.
    pub fn parts(&self, to: u64, room: u64, precision: Precision) -> impl Iterator<Item = PackedPart> {
        let (this, step) = (*self, self.part_rows(room, precision));
        (0..self.product.n).step_by(step as usize).map(move |first| {
            let n = step.min(this.product.n - first);
            let rows = PackedRows { group_rows: n, ..this.rows.from_row(first) };
            let [hi, lo] = rows.terms_at(n, to, precision);
            let out = this.product.out + u64::from(first) * 4;
            let product = Product { w: hi, n, out, dtype: DType::F16, factor: rows.factor, ..this.product };
            let second = (lo != 0).then_some((Product { w: lo, add: true, ..product }, Precision::Fast));
            PackedPart { unpack: rows.terms(n, [hi, lo]), products: [Some((product, precision)), second] }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::attention::SHARED_BYTES_LEAST;
    use super::*;

    #[test]
    fn planes_cover_each_block_and_begin_at_multiples_of_16_bytes() {
        for packed in &FORMATS {
            let block = packed.format.block();
            let (row, blocks) = (3 * block.bytes, 3);
            let given: Vec<u8> = (0..2 * row).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
            let mut arranged = Vec::new();
            packed.arrange(&given, row, &mut arranged);
            let stored = packed.row_bytes(blocks * block.elements).unwrap();
            assert_eq!(arranged.len(), 2 * stored, "{}", packed.format);
            assert!(stored.is_multiple_of(16) && stored - row < 16);
            let mut seen = vec![false; block.bytes];
            for (index, given) in given.chunks_exact(row).enumerate() {
                let mut at = index * stored;
                for Piece(start, len) in packed.planes {
                    assert!(at.is_multiple_of(16), "{}: a plane begins at {at}", packed.format);
                    for block in given.chunks_exact(block.bytes) {
                        assert_eq!(arranged[at..at + len], block[*start..start + len], "{}", packed.format);
                        at += len;
                    }
                    seen[*start..start + len].fill(true);
                }
            }
            assert!(seen.iter().all(|seen| *seen), "{}: every byte of a block has a plane", packed.format);
        }
    }

    #[test]
    fn blocks_of_few_rows_fit_every_device_and_occupy_it() {
        for packed in &FORMATS {
            for (rows, fast, exact) in [
                (1, "_1", "_1"),
                (2, "_8", "_8"),
                (4, "_8", "_8"),
                (5, "_8", "_16"),
                (8, "_8", "_16"),
                (9, "_16", "_16"),
            ] {
                for (precision, name) in [(Precision::Fast, fast), (Precision::Exact, exact)] {
                    let (_, kernel, _) = packed.few_rows(rows, precision);
                    assert!(
                        kernel.ends_with(name) && kernel == packed.kernel(rows, precision),
                        "{kernel} for {rows} rows"
                    );
                }
            }
            assert_eq!(packed.kernel(17, Precision::Fast), packed.unpack);
            for few in &FEW_ROWS[1..] {
                for shared_bytes_max in [SHARED_BYTES_LEAST, SHARED_BYTES_MAX] {
                    let limits = StreamLimits { sms: 132, shared_bytes_max };
                    for (n, groups_wanted) in [(14336u32, 7), (4096, 2), (6144, 3), (1024, 1), (16, 1)] {
                        let (groups, turns) =
                            few.warps(packed.pieces, 32, limits, |groups| n.div_ceil(groups * STREAM_ROWS));
                        assert!(
                            groups * turns <= FEW_WARPS
                                && turns * few.turn_bytes(packed.pieces, groups) <= shared_bytes_max
                        );
                        if shared_bytes_max == SHARED_BYTES_MAX {
                            assert_eq!(groups, groups_wanted, "{} with {n} rows", packed.format);
                            assert!(groups * turns >= if n > 1024 { FEW_WARPS_WANTED } else { 8 });
                        }
                    }
                }
            }
        }
        assert_eq!(stream_shared_bytes("gemv_f16_1"), None);
    }

    /// `Pieces` and `FewWarp` of packed_few.cuh, records of packed_terms.cuh and columns of each format, against what is written here.
    #[test]
    fn kernels_have_the_same_constants() {
        let source = |name: &str| {
            let path = format!("{}/kernels/shared/{name}.cuh", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
        };
        let number = |text: &str, name: &str| -> u32 {
            let rest = text.split_once(&format!(" {name} = ")).unwrap_or_else(|| panic!("no {name}")).1;
            rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap()].parse().unwrap()
        };
        let kernels = include_str!("../../kernels/packed.cu");
        assert!(kernels.contains("#if __CUDA_ARCH__ >= 900\n#define Q4_K_ROW_BLOCKS 3\n"));
        let terms = source("packed_terms");
        assert_eq!(number(&terms, "ROW_RECORD"), ROW_RECORD);
        let tile = ["TILE_TERMS", "TILE_FACTORS", "TILE_SUMS"].map(|name| number(&terms, name));
        assert_eq!(tile.iter().sum::<u32>(), TILE_RECORD);
        assert_eq!(
            (number(&source("packed_row"), "STREAM_WARPS"), number(&source("packed_few"), "FEW_WARPS")),
            (STREAM_WARPS, FEW_WARPS)
        );
        for packed in &FORMATS {
            let name = packed.unpack.strip_prefix("unpack_").unwrap();
            let text = source(&format!("weight_{}", if name.starts_with("int4") { "int4" } else { name }));
            let is = |what: &str| text.contains(what);
            assert_eq!(number(&text, "RUNS"), packed.runs, "{name}");
            assert_eq!(is("LEAST = true"), packed.least, "{name}");
            assert!(!packed.least || is("ONE = TINY"), "{name}: sums are multiplied by 2^-24");
            let upper = if is("UPPER = true") { 2 } else { 0 };
            assert_eq!(8 / packed.runs + upper + number(&text, "HEADS"), packed.pieces, "{name}");
            let column = match (packed.runs, packed.paired) {
                (1, 1) => "return RUN * unit;",
                (2, 1) if name.starts_with("int4") => "return 32 * unit + RUN * run;",
                (2, 1) => "return BLOCK * unit + RUN * run;",
                (2, 2) => "return unit / 2 * 64 + unit % 2 * RUN + 32 * run;",
                (2, 4) => "return unit / 4 * 128 + unit % 4 * RUN + 64 * run;",
                other => panic!("{name}: {other:?}"),
            };
            assert!(is(column), "{name}");
            let launch = kernels.split_once(&format!("PACKED({name}, ")).unwrap().1.split(", ").nth(1).unwrap();
            let launch = if launch == "Q4_K_ROW_BLOCKS" { "3" } else { launch };
            assert_eq!(launch, packed.row_blocks.to_string(), "{name}");
        }
    }

    #[test]
    fn factors_bring_the_largest_element_near_the_upper_end_of_f16() {
        for largest in [1e-20f32, 0.02, 1.0, 3.0, 65504.0, 1e30] {
            let quotient = largest / factor_of(largest);
            assert!((8192.0..16384.0).contains(&quotient), "{largest}: {quotient}");
            assert_eq!(factor_of(largest).log2().fract(), 0.0);
        }
        for none in [0.0, f32::INFINITY, f32::NAN] {
            assert_eq!(factor_of(none), 1.0);
        }
    }

    #[test]
    fn parts_cover_a_product_within_their_room() {
        let packed = &FORMATS[1];
        for (n, room, precision) in
            [(300, 1 << 20, Precision::Fast), (300, 40_000, Precision::Exact), (5, 1, Precision::Fast)]
        {
            let rows = PackedRows::flat(packed, 1 << 20, n, 64, 2.0);
            let product = Product {
                x: 0,
                x_stride: 64,
                w: 0,
                dtype: DType::F16,
                factor: 1.0,
                bias: 0,
                out: 4096,
                out_stride: n,
                rows: 40,
                n,
                k: 64,
                add: false,
                activation: None,
            };
            let all = PackedProduct { product, rows };
            let bytes = all.part_bytes(room, precision);
            assert!(bytes <= room.max(rows.terms_bytes(1, precision)));
            let mut next = 0;
            for part in all.parts(64, room, precision) {
                let (first, second) = (part.products[0].unwrap().0, part.products[1]);
                assert_eq!((first.out, first.w, first.factor), (4096 + u64::from(next) * 4, 64, 2.0));
                assert_eq!(second.is_some(), precision == Precision::Exact);
                assert_eq!(part.unpack.params.w, (1 << 20) + u64::from(next) * u64::from(rows.row_bytes()));
                assert_eq!((part.unpack.params.rows, part.unpack.params.factor), (first.n, 0.5));
                next += first.n;
            }
            assert_eq!(next, n);
        }
    }
}
