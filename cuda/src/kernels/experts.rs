//! A mixture of experts (`lagoon_backend::Device::experts`): parameters, choice of the kernels and geometry.
//!
//! `route` chooses each row's experts, `sort_choices` sorts the choices by expert and divides each expert's into tiles. The
//! up projections read rows of `x` through the sorted order, and write sorted rows; activation and down projections stay
//! in that order, and `combine` adds up each row's results by rank. The host knows none of the choices: a grid has a block for as
//! many tiles as there can be, and blocks without a tile leave at once.
//!
//! Products, by the rows that an expert has on average:
//!
//! * few: `grouped_gemv_*` stream the weights of chosen experts, in plain f32 arithmetic, for four rows at a time, and apply the
//!   activation.
//! * many: `grouped_gemm_*` multiply tiles on tensor cores, with activations as one or two terms, as `gemm_*` do
//!   ([`super::linear`]); f32 weights in plain f32 arithmetic. Packed weights are written as f16 first, some experts at a time
//!   ([`Grouped::batches`]).

use super::attention::Precision;
use super::linear::{LARGE, SMALL, SplitParams, Tile, activation_code, gemm_shared_bytes, terms_bytes};
use super::packed::{Encoding, PackedRows, UnpackParams};
use super::pointwise::{Activate, activate, row_parts};
use super::{Launch, WARP, weight_ld};
use bytemuck::{Pod, Zeroable};
use lagoon_backend::{Activation, Routing, Scoring};
use lagoon_types::DType;
use lagoon_types::limits::{EXPERTS_MAX, EXPERTS_PER_TOKEN_MAX};

/// Most experts of a row: each is a lane's.
pub const TOP_K_MAX: u32 = WARP;
const _: () = assert!(TOP_K_MAX == EXPERTS_PER_TOKEN_MAX, "a lane for each expert of a token");
const _: () = assert!(EXPERTS_MAX == 1024, "EXPERTS_MAX of cuda/kernels/shared/route.cuh");
/// Rows of a tile that streams its expert's weights, weight rows of a block, and its threads.
const FEW_ROWS: u32 = 4;
const FEW_COLS: u32 = 16;
/// Weight rows of a block that streams packed ones.
const PACKED_COLS: u32 = 8;
const FEW_THREADS: u32 = 128;
/// Most threads of a block of `sort_choices`.
const SORT_THREADS_MAX: u32 = 256;
/// Average rows of an expert above which tiles are large.
const LARGE_ROWS_MIN: u32 = 96;

/// Parameters of `route`. One warp a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct RouteParams {
    /// f32 `[rows][count]`.
    pub logits: u64,
    /// `[count]` in `bias_type`, or 0.
    pub bias: u64,
    /// u32 `[rows][top_k]`, by rank.
    pub experts: u64,
    /// f32 `[rows][top_k]`.
    pub weights: u64,
    /// At most [`EXPERTS_MAX`].
    pub count: u32,
    /// At most [`TOP_K_MAX`].
    pub top_k: u32,
    pub groups: u32,
    pub top_groups: u32,
    /// 1 for [`Scoring::Sigmoid`], 0 for [`Scoring::Softmax`].
    pub sigmoid: u32,
    pub normalised: u32,
    pub bias_type: u32,
    pub scale: f32,
    /// 1 where groups are compared by the sums of their two best keys, 0 by their best ones or without groups.
    pub two_best: u32,
    pub pad: u32,
}

/// Parameters of `sort_choices`. One block an expert.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SortParams {
    /// u32 `[choices]`: experts.
    pub experts: u64,
    /// u32 `[choices]`: each choice's place in the sorted order.
    pub places: u64,
    /// u32 `[choices]`: the row of each choice in that order.
    pub sources: u64,
    /// [`ExpertTile`] `[tiles_max]`: those there are, then empty ones.
    pub tiles: u64,
    pub choices: u32,
    pub count: u32,
    pub top_k: u32,
    pub tile_rows: u32,
    pub tiles_max: u32,
    pub pad: u32,
}

/// Consecutive rows of one expert in the sorted order; none if `first` is `end`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertTile {
    pub expert: u32,
    pub first: u32,
    pub end: u32,
    pub pad: u32,
}

/// Parameters of `grouped_*`: `out[r] = x[sources[r]] · weightᵀ + bias` for sorted rows `r`, with the weight and the bias of
/// their expert. Grid: blocks of weight rows, tiles.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GroupedParams {
    /// f32 `[..][ldx]`; for tiles on tensor cores the first term in the weights' type.
    pub x: u64,
    /// The second term, for `_exact` kernels.
    pub lo: u64,
    /// f32 `[..]`: the terms' scales.
    pub scale: u64,
    /// u32, rows of `x`; 0 where they are sorted.
    pub sources: u64,
    /// `[experts][n][ldw]` in the kernel's type, experts `expert_bytes` apart; packed rows are `ldw` bytes apart.
    pub w: u64,
    /// `[count][ld_bias]` in `bias_type`, or 0.
    pub bias: u64,
    /// f32 `[choices][ldo]`.
    pub out: u64,
    pub tiles: u64,
    pub expert_bytes: u64,
    pub n: u32,
    pub k: u32,
    pub ldx: u32,
    pub ldw: u32,
    pub ldo: u32,
    pub ld_bias: u32,
    pub bias_type: u32,
    /// For `grouped_gemv_*`: 0 for none, else [`Activation`]'s place in its list, from 1; the result has `n / 2` columns
    /// where it is gated.
    pub activation: u32,
    /// The experts whose rows are multiplied; tiles of others are left out.
    pub first_expert: u32,
    pub experts: u32,
    /// 1 for `grouped_gemm_*` to add to `out`.
    pub add: u32,
    pub pad: u32,
}

/// Parameters of `combine`: `out[r] += Σ weights[r][i] * results[places[r][i]]`, in the order of `i`. Grid: rows, blocks
/// of columns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CombineParams {
    /// f32 `[rows * top_k][cols]`.
    pub results: u64,
    /// u32 `[rows][top_k]`.
    pub places: u64,
    /// f32 `[rows][top_k]`.
    pub weights: u64,
    /// f32 `[rows][cols]`.
    pub out: u64,
    pub cols: u32,
    pub top_k: u32,
}

const _: () = assert!(size_of::<RouteParams>() == 72 && size_of::<SortParams>() == 56);
const _: () = assert!(size_of::<ExpertTile>() == 16 && size_of::<GroupedParams>() == 120);
const _: () = assert!(size_of::<CombineParams>() == 40);

/// A bias of all experts; address 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub address: u64,
    pub dtype: DType,
}

/// Rows of each expert's weight that are stored in one way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRows {
    /// Those of the first expert.
    pub address: u64,
    pub encoding: Encoding,
    /// Rows of an expert.
    pub rows: u32,
    /// From an expert's rows to the next one's, in bytes.
    pub expert_bytes: u64,
    /// See [`PackedRows::factor`]; 1 for plain rows.
    pub factor: f32,
}

/// A weight of all experts: gates may be stored in another way than ups.
pub type ExpertWeight = [Option<ExpertRows>; 2];

/// One call of [`lagoon_backend::Device::experts`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    pub rows: u32,
    pub hidden: u32,
    /// Columns of an expert.
    pub n: u32,
    pub count: u32,
    pub routing: Routing,
    pub activation: Activation,
    pub up: ExpertWeight,
    pub up_bias: Stored,
    pub down: ExpertWeight,
    pub down_bias: Stored,
    pub choice_bias: Stored,
    /// f32 `[rows][hidden]` and `[rows][count]`.
    pub x: u64,
    pub logits: u64,
    /// Those of [`lagoon_backend::ExpertBuffers`].
    pub results: u64,
    pub product: u64,
    pub act: u64,
    /// f32 `[rows][hidden]`.
    pub out: u64,
}

/// A grouped product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouped {
    /// Makes terms of the activations, for tiles on tensor cores.
    pub split: Option<Launch<SplitParams>>,
    pub product: Launch<GroupedParams>,
    /// Where the weight is packed and not streamed.
    unpacked: Option<Unpacked>,
}

/// The packed weight of a product of many rows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Unpacked {
    rows: PackedRows,
    precision: Precision,
    tile: Tile,
}

/// The launches of a grouped product for some experts, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    /// Writes the experts' elements.
    pub unpack: Option<Launch<UnpackParams>>,
    /// One for each term of the elements.
    pub products: [Option<Launch<GroupedParams>>; 2],
}

impl Grouped {
    /// Experts of a batch whose elements take at most `room` bytes, one at least.
    fn batch_experts(&self, unpacked: &Unpacked, room: u64) -> u32 {
        let one = unpacked.rows.terms_bytes(unpacked.rows.group_rows, unpacked.precision);
        u32::try_from(room / one).unwrap_or(u32::MAX).clamp(1, self.product.params.experts)
    }

    /// Bytes for the elements of a batch: `room`, or less, or what an expert needs; 0 if there is nothing to unpack.
    #[must_use]
    pub fn batch_bytes(&self, room: u64) -> u64 {
        self.unpacked.as_ref().map_or(0, |unpacked| {
            let rows = self.batch_experts(unpacked, room) * unpacked.rows.group_rows;
            unpacked.rows.terms_bytes(rows, unpacked.precision)
        })
    }

    /// The product in batches of experts, with [`Grouped::batch_bytes`] of memory for elements at `to`.
    pub fn batches(&self, to: u64, room: u64) -> impl Iterator<Item = Batch> {
        let this = *self;
        let count = this.product.params.experts;
        let step = this.unpacked.as_ref().map_or(count, |unpacked| this.batch_experts(unpacked, room));
        (0..count).step_by(step as usize).map(move |first| match &this.unpacked {
            None => Batch { unpack: None, products: [Some(this.product), None] },
            Some(unpacked) => this.batch(unpacked, to, first, step.min(count - first)),
        })
    }

    /// The launches for the experts `first..first + experts`.
    fn batch(&self, unpacked: &Unpacked, to: u64, first: u32, experts: u32) -> Batch {
        let Unpacked { rows, precision, tile } = *unpacked;
        let address = rows.address + u64::from(first) * rows.group_bytes;
        let all = experts * rows.group_rows;
        let [hi, lo] = rows.terms_at(all, to, precision);
        let mut product = self.product;
        product.params = GroupedParams { w: hi, first_expert: first, experts, ..product.params };
        let second = GroupedParams { w: lo, lo: 0, bias: 0, add: 1, ..product.params };
        let name = gemm_name(DType::F16, false, tile.m == LARGE.m);
        let shared_bytes = gemm_shared_bytes(tile, false);
        let second = Launch { name, shared_bytes, params: second, ..product };
        let unpack = Some(PackedRows { address, ..rows }.terms(all, [hi, lo]));
        Batch { unpack, products: [Some(product), (lo != 0).then_some(second)] }
    }
}

/// The launches of a mixture, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launches {
    pub route: Launch<RouteParams>,
    pub sort: Launch<SortParams>,
    pub up: [Option<Grouped>; 2],
    /// None where the up projections apply the activation as they write.
    pub activate: Option<Activate>,
    pub down: [Option<Grouped>; 2],
    pub combine: Launch<CombineParams>,
}

/// Addresses in a mixture's scratch.
#[derive(Clone, Copy, Debug, Default)]
struct Scratch {
    experts: u64,
    weights: u64,
    places: u64,
    sources: u64,
    tiles: u64,
    /// Of either product's terms.
    scales: u64,
    /// Terms of `x` and of the activations: in buffers that hold nothing at that time, if they are large enough.
    x_terms: u64,
    act_terms: u64,
    end: u64,
}

/// Rows of a tile, and the tile itself if weights are not streamed.
#[derive(Clone, Copy, Debug)]
struct Cut {
    rows: u32,
    tile: Option<Tile>,
}

/// One of a mixture's two products, but for its kernel.
#[derive(Clone, Copy, Debug)]
struct Factors {
    /// Activations, how many rows of them, and the sorted rows' among them.
    x: u64,
    x_rows: u32,
    sources: u64,
    weight: ExpertWeight,
    bias: Stored,
    out: u64,
    n: u32,
    k: u32,
    terms: u64,
    activation: Option<Activation>,
}

impl Mixture {
    const fn choices(&self) -> u32 {
        self.rows * top_k(&self.routing)
    }

    fn cut(&self) -> Cut {
        let choices = self.choices();
        let tensor_cores = self.up.iter().chain(&self.down).flatten().all(|rows| rows.encoding.dtype() != DType::F32);
        if choices <= FEW_ROWS * self.count {
            Cut { rows: FEW_ROWS, tile: None }
        } else if choices >= LARGE_ROWS_MIN * self.count && tensor_cores {
            Cut { rows: LARGE.m, tile: Some(LARGE) }
        } else {
            Cut { rows: SMALL.m, tile: Some(SMALL) }
        }
    }

    /// As many tiles as there can be, by the number of choices and experts.
    fn tiles_max(&self) -> u32 {
        let (choices, rows) = (u64::from(self.choices()), u64::from(self.cut().rows));
        let chosen = choices.min(u64::from(self.count));
        // An expert's last tile has one row at least.
        u32::try_from((choices + chosen * (rows - 1)) / rows).expect("fewer tiles than choices")
    }

    fn scratch(&self, start: u64) -> Scratch {
        let choices = u64::from(self.choices().next_multiple_of(4)) * 4;
        let tiles = start + 4 * choices;
        let scales = tiles + u64::from(self.tiles_max()) * size_of::<ExpertTile>() as u64;
        let terms = scales + choices;
        let mut end = terms;
        // Two terms of a row, of 16 bits, are as large as a row of f32 but for their padding.
        let mut place = |buffer: u64, cols: u32, rows: u32, k: u32| {
            let (bytes, room) = (2 * terms_bytes(rows, k).0, u64::from(self.choices()) * u64::from(cols) * 4);
            if buffer.is_multiple_of(16) && bytes <= room {
                return buffer;
            }
            end = end.max(terms + bytes);
            terms
        };
        let x_terms = place(self.results, self.hidden, self.rows, self.hidden);
        let act_terms = place(self.product, self.columns(), self.choices(), self.n);
        Scratch {
            experts: start,
            weights: start + choices,
            places: start + 2 * choices,
            sources: start + 3 * choices,
            tiles,
            scales,
            x_terms,
            act_terms,
            end,
        }
    }

    /// Columns of the up projections' products.
    fn columns(&self) -> u32 {
        self.n * number(self.activation.inputs())
    }

    /// Scratch in bytes, to be aligned to 16: choices, tiles, and terms of activations.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch(0).end
    }

    /// The launches, with [`Mixture::scratch_bytes`] of scratch at `scratch`. `rows` is not 0.
    #[must_use]
    pub fn launches(&self, scratch: u64, precision: Precision) -> Launches {
        assert!(self.count <= EXPERTS_MAX && top_k(&self.routing) <= TOP_K_MAX, "experts of a layer and of a row");
        let s = self.scratch(scratch);
        let fused = (self.cut().tile.is_none() && self.up[1].is_none()).then_some(self.activation);
        let up = Factors {
            x: self.x,
            x_rows: self.rows,
            sources: s.sources,
            weight: self.up,
            bias: self.up_bias,
            out: if fused.is_some() { self.act } else { self.product },
            n: self.columns(),
            k: self.hidden,
            terms: s.x_terms,
            activation: fused,
        };
        let down = Factors {
            x: self.act,
            x_rows: self.choices(),
            sources: 0,
            weight: self.down,
            bias: self.down_bias,
            out: self.results,
            n: self.hidden,
            k: self.n,
            terms: s.act_terms,
            activation: None,
        };
        let combine = CombineParams {
            results: self.results,
            places: s.places,
            weights: s.weights,
            out: self.out,
            cols: self.hidden,
            top_k: top_k(&self.routing),
        };
        Launches {
            route: self.route(&s),
            sort: self.sort(&s),
            up: self.grouped(&up, &s, precision),
            activate: fused
                .is_none()
                .then(|| activate(self.activation, self.choices(), self.n, self.product, self.act)),
            down: self.grouped(&down, &s, precision),
            combine: Launch {
                name: "combine",
                grid: row_parts(self.rows, self.hidden),
                block: 256,
                shared_bytes: 0,
                params: combine,
            },
        }
    }

    fn route(&self, s: &Scratch) -> Launch<RouteParams> {
        let Routing { scoring, normalised, scale, groups, top_groups, .. } = self.routing;
        let params = RouteParams {
            logits: self.logits,
            bias: self.choice_bias.address,
            experts: s.experts,
            weights: s.weights,
            count: self.count,
            top_k: top_k(&self.routing),
            groups: number(groups),
            top_groups: number(top_groups),
            sigmoid: u32::from(scoring == Scoring::Sigmoid),
            normalised: u32::from(normalised),
            bias_type: u32::from(self.choice_bias.dtype.code()),
            scale,
            two_best: u32::from(self.routing.adds_scores()),
            pad: 0,
        };
        Launch::flat("route", self.rows, WARP, params)
    }

    fn sort(&self, s: &Scratch) -> Launch<SortParams> {
        let params = SortParams {
            experts: s.experts,
            places: s.places,
            sources: s.sources,
            tiles: s.tiles,
            choices: self.choices(),
            count: self.count,
            top_k: top_k(&self.routing),
            tile_rows: self.cut().rows,
            tiles_max: self.tiles_max(),
            pad: 0,
        };
        let threads = params.choices.next_multiple_of(WARP).min(SORT_THREADS_MAX);
        Launch::flat("sort_choices", self.count, threads, params)
    }

    fn grouped(&self, f: &Factors, s: &Scratch, precision: Precision) -> [Option<Grouped>; 2] {
        let mut first = 0;
        f.weight.map(|rows| {
            let rows = rows?;
            first += rows.rows;
            Some(self.grouped_rows(f, &rows, first - rows.rows, s, precision))
        })
    }

    /// The product with some rows of each expert's weight, which give the columns from `first` on.
    fn grouped_rows(&self, f: &Factors, rows: &ExpertRows, first: u32, s: &Scratch, precision: Precision) -> Grouped {
        let dtype = rows.encoding.dtype();
        let ld = number(weight_ld(f.k as usize, dtype.size()));
        let tile = self.cut().tile;
        let exact = precision == Precision::Exact;
        let mut params = GroupedParams {
            x: f.x,
            lo: 0,
            scale: 0,
            sources: f.sources,
            w: rows.address,
            bias: if f.bias.address == 0 { 0 } else { f.bias.address + u64::from(first) * f.bias.dtype.size() as u64 },
            out: f.out + u64::from(first) * 4,
            tiles: s.tiles,
            expert_bytes: rows.expert_bytes,
            n: rows.rows,
            k: f.k,
            ldx: f.k,
            ldw: ld,
            ldo: f.activation.map_or(f.n, |_| self.n),
            ld_bias: number(weight_ld(f.n as usize, f.bias.dtype.size())),
            bias_type: u32::from(f.bias.dtype.code()),
            activation: f.activation.map_or(0, activation_code),
            first_expert: 0,
            experts: self.count,
            add: 0,
            pad: 0,
        };
        let mut split = None;
        if tile.is_some() && dtype != DType::F32 {
            let (terms, _) = terms_bytes(f.x_rows, f.k);
            (params.x, params.scale, params.ldx) = (f.terms, s.scales, ld);
            params.lo = if exact { f.terms + terms } else { 0 };
            let name = if dtype == DType::F16 { "split_f16" } else { "split_bf16" };
            let (hi, lo, scale, factor) = (params.x, params.lo, params.scale, rows.factor);
            let terms = SplitParams { x: f.x, hi, lo, scale, k: f.k, x_stride: f.k, ld, factor };
            split = Some(Launch::flat(name, f.x_rows, 256, terms));
        }
        let mut unpacked = None;
        if let Encoding::Packed(packed) = rows.encoding {
            let (address, cols, group_bytes) = (rows.address, f.k, rows.expert_bytes);
            let stored = PackedRows { packed, address, cols, group_rows: rows.rows, group_bytes, factor: rows.factor };
            match tile {
                None => params.ldw = stored.row_bytes(),
                Some(tile) => {
                    params.expert_bytes = u64::from(rows.rows) * u64::from(ld) * 2;
                    unpacked = Some(Unpacked { rows: stored, precision, tile });
                }
            }
        }
        let large = tile.is_some_and(|tile| tile.m == LARGE.m);
        let streamed = if matches!(rows.encoding, Encoding::Packed(_)) { PACKED_COLS } else { FEW_COLS };
        let (block, columns, shared_bytes) = match tile {
            None => (FEW_THREADS, streamed, 0),
            Some(tile) if dtype == DType::F32 => (256, tile.n, 0),
            Some(tile) => (tile.threads, tile.n, gemm_shared_bytes(tile, exact)),
        };
        let name = if tile.is_none() { gemv_name(rows.encoding) } else { gemm_name(dtype, exact, large) };
        let grid = [rows.rows.div_ceil(columns), self.tiles_max(), 1];
        Grouped { split, product: Launch { name, grid, block, shared_bytes, params }, unpacked }
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("shapes fit u32")
}

#[allow(clippy::cast_possible_truncation, reason = "at most the number of experts")]
const fn top_k(routing: &Routing) -> u32 {
    routing.top_k as u32
}

const fn gemv_name(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Plain(DType::F32) => "grouped_gemv_f32",
        Encoding::Plain(DType::F16) => "grouped_gemv_f16",
        Encoding::Plain(DType::BF16) => "grouped_gemv_bf16",
        Encoding::Packed(packed) => packed.grouped,
    }
}

const fn gemm_name(dtype: DType, exact: bool, large: bool) -> &'static str {
    match (dtype, exact, large) {
        (DType::F32, _, _) => "grouped_gemm_f32",
        (DType::F16, true, true) => "grouped_gemm_f16_exact_128",
        (DType::F16, true, false) => "grouped_gemm_f16_exact_64",
        (DType::F16, false, true) => "grouped_gemm_f16_fast_128",
        (DType::F16, false, false) => "grouped_gemm_f16_fast_64",
        (DType::BF16, true, true) => "grouped_gemm_bf16_exact_128",
        (DType::BF16, true, false) => "grouped_gemm_bf16_exact_64",
        (DType::BF16, false, true) => "grouped_gemm_bf16_fast_128",
        (DType::BF16, false, false) => "grouped_gemm_bf16_fast_64",
    }
}
