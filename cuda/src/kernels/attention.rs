//! Micro attention: parameters, choice of the kernel, and the plan that divides a batch into blocks.
//!
//! A plan is made on the host once a step, uploaded once, and serves every layer: only the layer's planes differ. It
//! cuts each sequence's rows into tiles and each tile's visible keys into pieces; an [`AttnItem`] is one tile over
//! one piece. A tile with one piece writes the result; pieces write partials that `attention_merge` reduces. Runs are
//! clipped here to positions that some row of the item sees, so kernels walk whole runs and mask single keys only.
//!
//! Which kernel serves a sequence:
//!
//! * `attention_decode_*`: few query rows. The rows of one KV head's query heads (the group) are packed into tiles of
//!   [`DECODE_TILE`] and multiplied on tensor cores, with queries and weights split in two terms each, which costs nothing
//!   there. Bound by reading K and V once.
//! * `attention_prefill_*`: many rows, packed likewise into tiles of [`prefill_tile`]; [`Precision`] says whether queries
//!   and weights are split (twice the products) or rounded to the store's type, as other engines do.
//!   `_small` ones are for devices whose blocks get 99 KB of shared memory ([`Tuning::shared_bytes_max`]).
//! * `attention_wgmma_*`: as prefill, rounded, on compute capability 9.0 ([`Tuning::wgmma`]), if TMA can address the
//!   store's planes ([`Store::boxed`]) and scores have no soft cap.
//! * `attention_decode_fp8_*`, `attention_prefill_fp8_*`: the same for KV in 8 bits. Decode multiplies in f16, prefill in bf16,
//!   always [`Precision::Exact`].
//! * `attention_any_*`: all other stores: f32, odd head sizes, unaligned planes. Plain f32 arithmetic.
//! * `attention_latent_*`: latents ([`AttentionGeometry::latent`]) of any size, whose rows have their first half in K and their
//!   second one in V. As `attention_any_*`.

use super::boxes::{AttentionBoxesParams, KvMaps, wgmma_shared_bytes};
use super::pieces::{Part, piece_keys, wave};
use super::shapes::DECODE_KEYS;
pub use super::shapes::{
    DecodeClass, Precision, PrefillShape, SHARED_BYTES_LEAST, SHARED_BYTES_MAX, SHARED_BYTES_RESERVED,
    decode_shared_bytes, prefill_shape,
};
use super::{Launch, WARP};
use bytemuck::{Pod, Zeroable};
use lagoon_backend::{AttnBatch, AttnRows};
use lagoon_types::kv_dtype::SCALE_BYTES;
use lagoon_types::run::visible;
use lagoon_types::{AttentionGeometry, KvDType, KvRun};
use std::ops::Range;

/// Packed query rows of a tile of `attention_decode_*`.
pub const DECODE_TILE: u32 = 8;
/// Most tiles of a sequence of several rows that the decode kernel serves; more rows go to prefill.
const DECODE_TILES_MAX: u32 = 2;
/// Rows of an item of `attention_any_*` and `attention_latent_*`.
const ANY_ROWS: u32 = 4;
/// Threads of `attention_any_*`, of `attention_latent_*` and of `attention_merge`.
const ANY_THREADS: u32 = 128;
/// The value of [`AttentionParams::window`] for no window: more than any distance of positions.
pub const WINDOW_NONE: u32 = 1 << 31;

/// Addresses of a layer's K and V; see the parent module for the addressing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KvView {
    pub k: u64,
    pub v: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

impl KvView {
    /// Whether heads are aligned for the kernels' copies: to 16 bytes, and rows with scales to those.
    #[must_use]
    pub const fn is_aligned(&self, dtype: KvDType) -> bool {
        let strides = (self.token_stride | self.head_stride) * dtype.element_bytes() as u64;
        let unit = if dtype.plain().is_some() { 16 } else { SCALE_BYTES as u64 };
        (self.k | self.v | strides).is_multiple_of(unit)
    }
}

/// Properties of a store's layers that the plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    pub dtype: KvDType,
    /// [`KvView::is_aligned`].
    pub aligned: bool,
    /// [`KvView::takes_boxes`].
    pub boxed: bool,
}

impl Store {
    /// The store that has this layer, and others of its shape.
    #[must_use]
    pub const fn of(view: &KvView, dtype: KvDType, head_dim: u32) -> Self {
        let boxed = matches!(dtype, KvDType::F16 | KvDType::BF16) && view.takes_boxes(head_dim);
        Self { dtype, aligned: view.is_aligned(dtype), boxed }
    }
}

/// Consecutive rows of one sequence over some of its runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct AttnItem {
    /// First row of the queries; an item with 0 rows is padding.
    pub row0: u32,
    pub rows: u32,
    /// Position of the first row.
    pub pos0: u32,
    /// Number of runs; one is in `base`, `len` and `first_pos`, several in the table from `run0`.
    pub runs: u32,
    pub run0: u32,
    pub base: u32,
    pub len: u32,
    pub first_pos: u32,
    /// First row of the output.
    pub out_row: u32,
    /// 1: the output is that of the pieces.
    pub piece: u32,
    /// Keys in all runs.
    pub keys: u32,
    pub pad: u32,
}

/// One output row that was cut into pieces: piece `p` of it is piece row `piece_row + p * stride`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct MergeItem {
    pub row: u32,
    pub piece_row: u32,
    /// 0 in padding.
    pub pieces: u32,
    pub stride: u32,
}

/// Parameters of `attention_decode_*`, `attention_prefill_*`, `attention_any_*`, `attention_latent_*`. Grid: KV heads times
/// tiles (heads for the last two), items; blocks that run together read neighbouring memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AttentionParams {
    /// f32 `[rows][q_stride]`.
    pub q: u64,
    pub kv: KvView,
    /// [`AttnItem`] `[grid.y]`.
    pub items: u64,
    /// [`KvRun`]s of items that have several.
    pub runs: u64,
    /// f32 `[heads]`, the ALiBi slopes: `slope * (key position - query position)` is added to scores; 0 for none.
    pub slopes: u64,
    /// f32 `[rows][heads * head_dim]` and `[rows][heads]` (natural log).
    pub out: u64,
    pub lse: u64,
    /// The same for pieces; rows that saw no key have negative infinity as their log-sum-exp.
    pub piece_out: u64,
    pub piece_lse: u64,
    pub q_stride: u32,
    pub heads: u32,
    pub kv_heads: u32,
    /// Elements of a query: [`AttentionGeometry::query_dim`].
    pub head_dim: u32,
    /// Positions that a query sees, its own included; [`WINDOW_NONE`] for all.
    pub window: u32,
    pub scale: f32,
    /// Stages of the decode kernel's pipeline, [`DecodeClass::stages`].
    pub stages: u32,
    /// Soft cap of scaled scores, before biases; 0 for none. `attention_wgmma_*` have none.
    pub softcap: f32,
}

/// Parameters of `attention_merge`. Grid: blocks of heads, merged rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AttentionMergeParams {
    /// [`MergeItem`] `[grid.y]`.
    pub merges: u64,
    pub piece_out: u64,
    pub piece_lse: u64,
    pub out: u64,
    pub lse: u64,
    pub heads: u32,
    pub head_dim: u32,
}

const _: () = assert!(size_of::<AttnItem>() == 48 && size_of::<MergeItem>() == 16 && size_of::<KvRun>() == 12);
const _: () = assert!(size_of::<KvView>() == 32 && size_of::<AttentionParams>() == 128);
const _: () = assert!(size_of::<AttentionMergeParams>() == 48);

/// Properties of a device that the plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Multiprocessors.
    pub sms: u32,
    /// Shared memory of a block in bytes: between [`SHARED_BYTES_LEAST`] and [`SHARED_BYTES_MAX`].
    pub shared_bytes_max: u32,
    /// Shared memory of a multiprocessor in bytes, for all of its blocks.
    pub sm_shared_bytes: u32,
    /// Classes for mean contexts up to [`Tuning::class_keys`]`[0]`, up to `[1]`, and beyond.
    pub classes: [DecodeClass; 3],
    pub class_keys: [u32; 2],
    pub precision: Precision,
    /// Whether prefill may use warpgroup kernels with [`Precision::Fast`]: the device has compute capability 9.0, and
    /// its results passed the trial.
    pub wgmma: bool,
}

impl Tuning {
    /// Untuned values for `sms` multiprocessors: about 64 KB in flight on each, twice what the latency of an H200's
    /// memory requires (4.8 TB/s times 0.8 µs is 29 KB for each of 132), and pieces long enough that their partials
    /// are under 2 % of the bytes. Short contexts take more, smaller blocks; long ones deeper pipelines.
    #[must_use]
    pub const fn untuned(sms: u32) -> Self {
        Self {
            sms,
            shared_bytes_max: SHARED_BYTES_MAX,
            sm_shared_bytes: SHARED_BYTES_MAX + SHARED_BYTES_RESERVED,
            classes: [
                DecodeClass { warps: 4, stages: 2, blocks_per_sm: 3, piece_keys_min: 256 },
                DecodeClass { warps: 4, stages: 3, blocks_per_sm: 2, piece_keys_min: 512 },
                DecodeClass { warps: 4, stages: 3, blocks_per_sm: 2, piece_keys_min: 1024 },
            ],
            class_keys: [8 << 10, 32 << 10],
            precision: Precision::Fast,
            wgmma: false,
        }
    }
}

/// The kernels that a store's type and head size allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Family {
    decode: &'static str,
    /// For [`Precision::Exact`] and [`Precision::Fast`].
    prefill: [&'static str; 2],
    /// The same in 99 KB of shared memory.
    prefill_small: [&'static str; 2],
    /// The warpgroup kernel, if there is one: fast, on compute capability 9.0 only.
    wgmma: Option<&'static str>,
}

macro_rules! family {
    ($type:literal, $dim:literal, wgmma) => {
        family!($type, $dim, Some(concat!("attention_wgmma_", $type, "_", $dim)))
    };
    ($type:literal, $dim:literal) => {
        family!($type, $dim, None)
    };
    ($type:literal, $dim:literal, $wgmma:expr) => {
        Some(Family {
            wgmma: $wgmma,
            decode: concat!("attention_decode_", $type, "_", $dim),
            prefill: [
                concat!("attention_prefill_", $type, "_", $dim, "_exact"),
                concat!("attention_prefill_", $type, "_", $dim, "_fast"),
            ],
            prefill_small: [
                concat!("attention_prefill_", $type, "_", $dim, "_exact_small"),
                concat!("attention_prefill_", $type, "_", $dim, "_fast_small"),
            ],
        })
    };
}

const fn family(dtype: KvDType, g: AttentionGeometry) -> Option<Family> {
    match (dtype, g.head_dim) {
        _ if g.latent => None,
        (KvDType::F16, 64) => family!("f16", "64", wgmma),
        (KvDType::F16, 96) => family!("f16", "96"),
        (KvDType::F16, 128) => family!("f16", "128", wgmma),
        (KvDType::F16, 256) => family!("f16", "256"),
        (KvDType::BF16, 64) => family!("bf16", "64", wgmma),
        (KvDType::BF16, 96) => family!("bf16", "96"),
        (KvDType::BF16, 128) => family!("bf16", "128", wgmma),
        (KvDType::BF16, 256) => family!("bf16", "256"),
        (KvDType::Fp8, 64) => family!("fp8", "64"),
        (KvDType::Fp8, 96) => family!("fp8", "96"),
        (KvDType::Fp8, 128) => family!("fp8", "128"),
        (KvDType::Fp8, 256) => family!("fp8", "256"),
        _ => None,
    }
}

const fn any_kernel(dtype: KvDType, latent: bool) -> &'static str {
    match (dtype, latent) {
        (KvDType::F32, false) => "attention_any_f32",
        (KvDType::F16, false) => "attention_any_f16",
        (KvDType::BF16, false) => "attention_any_bf16",
        (KvDType::Fp8, false) => "attention_any_fp8",
        (KvDType::F32, true) => "attention_latent_f32",
        (KvDType::F16, true) => "attention_latent_f16",
        (KvDType::BF16, true) => "attention_latent_bf16",
        (KvDType::Fp8, true) => "attention_latent_fp8",
    }
}

/// Kernel of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Decode,
    Prefill,
    Any,
}

/// Device addresses of the plan's arrays and a step's tensors. Strides as in [`AttentionParams`].
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Address of the uploaded [`Plan::bytes`], aligned to 16 bytes.
    pub plan: u64,
    pub q: u64,
    pub q_stride: u32,
    /// f32 `[heads]` or 0.
    pub slopes: u64,
    pub out: u64,
    pub lse: u64,
    /// f32 `[piece_rows][heads * head_dim]` and `[piece_rows][heads]`; unused if [`Plan::piece_rows`] is 0.
    pub piece_out: u64,
    pub piece_lse: u64,
}

/// A batch cut into items. Reused between steps for its memory.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    decode: Vec<AttnItem>,
    prefill: Vec<AttnItem>,
    any: Vec<AttnItem>,
    runs: Vec<KvRun>,
    merges: Vec<MergeItem>,
    /// Rows that the pieces' outputs must hold.
    pub piece_rows: u32,
    /// Tiles of the widest decode item.
    decode_tiles: u32,
    class: Option<DecodeClass>,
    scale: f32,
    softcap: Option<f32>,
    window: Option<u32>,
    geometry: Option<(AttentionGeometry, KvDType)>,
    precision: Option<Precision>,
    prefill_shape: Option<PrefillShape>,
    wgmma: bool,
    clipped: Vec<KvRun>,
    parts: Vec<Part>,
}

impl Plan {
    /// Makes the plan of `batch` over a store.
    pub fn make(&mut self, batch: &AttnBatch<'_>, store: Store, tuning: &Tuning) {
        let (g, dtype) = (batch.geometry, store.dtype);
        for items in [&mut self.decode, &mut self.prefill, &mut self.any] {
            items.clear();
        }
        self.runs.clear();
        self.merges.clear();
        (self.piece_rows, self.decode_tiles) = (0, 1);
        (self.scale, self.softcap) = (batch.scale, batch.softcap);
        (self.window, self.geometry) = (batch.window, Some((g, dtype)));
        // Rounded to bf16, queries of prompts would be less exact than those of decoding, which are two terms.
        let precision = if dtype == KvDType::Fp8 { Precision::Exact } else { tuning.precision };
        self.precision = Some(precision);
        // Warpgroup kernels have no soft cap: its registers and its time would be those of every model.
        self.wgmma = tuning.wgmma && tuning.precision == Precision::Fast && store.boxed && batch.softcap.is_none();
        let tensor = store.aligned && family(dtype, g).is_some();
        self.wgmma &= family(dtype, g).is_some_and(|family| family.wgmma.is_some());
        self.prefill_shape = match self.wgmma {
            true => Some(WGMMA_SHAPE),
            false => prefill_shape(g.head_dim, precision, tuning.shared_bytes_max),
        };
        let prefill_tile = self.prefill_shape.map_or(0, |shape| shape.tile);
        let work = |seq: &AttnRows| match seq.rows * g.group() {
            _ if !tensor => Work::Any,
            packed if packed <= DECODE_TILE * DECODE_TILES_MAX => Work::Decode,
            _ if g.group() <= prefill_tile => Work::Prefill,
            _ => Work::Decode,
        };
        let class = self.choose_class(batch, dtype, tuning, &work);
        let decode_piece = self.decode_piece(batch, tuning, (class, dtype), &work);
        // Blocks of the other kernels are (item, KV head) pairs; sequences are cut until the batch has about the
        // wanted number.
        let keys: u64 =
            batch.seqs.iter().map(|s| u64::from(keys_seen(batch, s)) * u64::from(s.rows.div_ceil(64))).sum();
        let wanted = u64::from(tuning.sms * class.blocks_per_sm).div_ceil(u64::from(g.kv_heads)).max(1);
        let share = u32::try_from(keys.div_ceil(wanted)).unwrap_or(u32::MAX);
        let share = |least: u32| share.max(least).next_multiple_of(DECODE_KEYS * class.warps);
        for seq in batch.seqs.iter().filter(|s| s.rows > 0 && s.runs > 0) {
            let work = work(seq);
            let (tile, piece) = match work {
                Work::Decode => (decode_rows(g), decode_piece),
                Work::Prefill => ((prefill_tile / g.group()).max(1), share(1024)),
                Work::Any => (ANY_ROWS, share(512)),
            };
            if work == Work::Decode {
                self.decode_tiles = self.decode_tiles.max((seq.rows.min(tile) * g.group()).div_ceil(DECODE_TILE));
            }
            for first in (0..seq.rows).step_by(tile as usize) {
                self.tile(batch, seq, work, first..seq.rows.min(first + tile), piece);
            }
        }
        // Longest first, so that no long item starts last.
        for items in [&mut self.decode, &mut self.prefill, &mut self.any] {
            items.sort_by_key(|item| std::cmp::Reverse(item.keys));
        }
    }

    /// Keys of a piece of the decode kernel's: see [`piece_keys`].
    fn decode_piece(
        &mut self,
        batch: &AttnBatch<'_>,
        tuning: &Tuning,
        (class, dtype): (DecodeClass, KvDType),
        work: &impl Fn(&AttnRows) -> Work,
    ) -> u32 {
        let g = batch.geometry;
        self.parts.clear();
        for seq in batch.seqs.iter().filter(|s| s.rows > 0 && s.runs > 0 && work(s) == Work::Decode) {
            let tile = decode_rows(g);
            for first in (0..seq.rows).step_by(tile as usize) {
                let rows = tile.min(seq.rows - first);
                let blocks = g.kv_heads * (rows * g.group()).div_ceil(DECODE_TILE);
                self.parts.push(Part { keys: keys_seen_by(batch, seq, &(first..first + rows)), blocks });
            }
        }
        let wave = wave(class, g.head_dim, dtype, [tuning.sms, tuning.sm_shared_bytes]);
        piece_keys(&self.parts, wave, class.piece_keys_min, DECODE_KEYS * class.warps)
    }

    fn choose_class(
        &mut self,
        batch: &AttnBatch<'_>,
        dtype: KvDType,
        tuning: &Tuning,
        work: &impl Fn(&AttnRows) -> Work,
    ) -> DecodeClass {
        let (mut count, mut sum) = (0u64, 0u64);
        for seq in batch.seqs.iter().filter(|s| work(s) == Work::Decode) {
            count += 1;
            sum += u64::from(keys_seen(batch, seq));
        }
        let mean = sum.div_ceil(count.max(1));
        let index = tuning.class_keys.iter().filter(|bound| mean > u64::from(**bound)).count();
        let class = tuning.classes[index].for_store(dtype);
        *self.class.insert(class.fitted(batch.geometry.head_dim, dtype, tuning.shared_bytes_max))
    }

    /// Adds the items of the rows `rows` of a sequence, cut into pieces of about `piece` keys.
    fn tile(&mut self, batch: &AttnBatch<'_>, seq: &AttnRows, work: Work, rows: Range<u32>, piece: u32) {
        let mut clipped = std::mem::take(&mut self.clipped);
        clip(batch, seq, &rows, &mut clipped);
        let keys: u32 = clipped.iter().map(|run| run.len).sum();
        let count = rows.end - rows.start;
        let pieces = keys.div_ceil(piece);
        let row0 = seq.row0 + rows.start;
        let first = self.piece_rows;
        if pieces > 1 {
            self.piece_rows += pieces * count;
            self.merges.extend((0..count).map(|i| MergeItem {
                row: row0 + i,
                piece_row: first + i,
                pieces,
                stride: count,
            }));
        }
        let mut cursor = Cursor { runs: &clipped, at: 0, taken: 0 };
        for p in 0..pieces {
            let end = |p: u32| u64::from(keys) * u64::from(p) / u64::from(pieces);
            let wanted = u32::try_from(end(p + 1) - end(p)).expect("no more than all keys");
            let mut item = AttnItem {
                row0,
                rows: count,
                pos0: seq.pos0 + rows.start,
                run0: u32::try_from(self.runs.len()).expect("runs fit"),
                out_row: if pieces > 1 { first + p * count } else { row0 },
                piece: u32::from(pieces > 1),
                keys: wanted,
                ..AttnItem::default()
            };
            cursor.take(wanted, &mut self.runs);
            item.runs = u32::try_from(self.runs.len()).expect("runs fit") - item.run0;
            if item.runs == 1 {
                let run = self.runs.pop().expect("one run");
                (item.base, item.len, item.first_pos) = (run.base, run.len, run.first_pos);
            }
            match work {
                Work::Decode => self.decode.push(item),
                Work::Prefill => self.prefill.push(item),
                Work::Any => self.any.push(item),
            }
        }
        self.clipped = clipped;
    }

    /// Pads the decode items and the merges with empty ones, for graphs with fixed grids.
    ///
    /// # Panics
    /// If there are already more.
    pub fn pad(&mut self, decode_items: usize, merges: usize) {
        assert!(self.decode.len() <= decode_items && self.merges.len() <= merges, "a plan within the graph's grids");
        self.decode.resize(decode_items, AttnItem::default());
        self.merges.resize(merges, MergeItem::default());
    }

    /// Decode items, prefill items, other items and merges.
    #[must_use]
    pub fn counts(&self) -> [usize; 4] {
        [self.decode.len(), self.prefill.len(), self.any.len(), self.merges.len()]
    }

    /// Appends the plan's arrays in the order of their upload: decode, prefill and other items, merges, runs.
    pub fn bytes(&self, out: &mut Vec<u8>) {
        for items in [&self.decode, &self.prefill, &self.any] {
            out.extend_from_slice(bytemuck::cast_slice(items));
        }
        out.extend_from_slice(bytemuck::cast_slice(&self.merges));
        out.extend_from_slice(bytemuck::cast_slice(&self.runs));
    }

    /// Addresses of the decode, prefill and other items, the merges and the runs.
    fn places(&self, plan: u64) -> [u64; 5] {
        let sizes = [self.decode.len(), self.prefill.len(), self.any.len()].map(|n| n * size_of::<AttnItem>());
        let mut at = plan;
        let mut places = [plan; 5];
        for (place, bytes) in places[1..].iter_mut().zip(sizes.into_iter().chain([size_of_val(&*self.merges)])) {
            at += bytes as u64;
            *place = at;
        }
        places
    }

    /// Parameters that all launches of one layer share.
    fn params(&self, at: &Buffers, kv: KvView) -> AttentionParams {
        let (g, _) = self.geometry.expect("a plan was made");
        let [items, .., runs] = self.places(at.plan);
        AttentionParams {
            q: at.q,
            kv,
            items,
            runs,
            slopes: at.slopes,
            out: at.out,
            lse: at.lse,
            piece_out: at.piece_out,
            piece_lse: at.piece_lse,
            q_stride: at.q_stride,
            heads: g.heads,
            kv_heads: g.kv_heads,
            head_dim: query_dim(g),
            window: self.window.map_or(WINDOW_NONE, |w| w.min(WINDOW_NONE)),
            scale: self.scale,
            stages: self.class.expect("a plan was made").stages,
            softcap: self.softcap.unwrap_or(0.0),
        }
    }

    /// The launches for one layer, in order; at most three. Without prefill if [`Plan::boxes`] has it.
    ///
    /// # Panics
    /// If no plan was made.
    pub fn launches(&self, at: &Buffers, kv: KvView) -> impl Iterator<Item = Launch<AttentionParams>> {
        let (g, dtype) = self.geometry.expect("a plan was made");
        let class = self.class.expect("a plan was made");
        let [decode_at, prefill_at, any_at, ..] = self.places(at.plan);
        let params = self.params(at, kv);
        let (any, any_bytes) = (any_kernel(dtype, g.latent), any_shared_bytes(params.head_dim));
        let names = family(dtype, g);
        let launch = |items: &[AttnItem], name: Option<&'static str>, x: u32, block, shared_bytes, at: u64| {
            let y = grid_y(items.len());
            let params = AttentionParams { items: at, ..params };
            name.filter(|_| y > 0).map(|name| Launch { name, grid: [x, y, 1], block, shared_bytes, params })
        };
        let fast = self.precision == Some(Precision::Fast);
        let small = self.prefill_shape.is_some_and(|shape| shape.small);
        let names_of = |f: Family| if small { f.prefill_small } else { f.prefill };
        let prefill = names.map(|f| names_of(f)[usize::from(fast)]).filter(|_| !self.wgmma);
        let prefill_bytes = self.prefill_shape.map_or(0, |shape| shape.shared_bytes);
        [
            launch(
                &self.decode,
                names.map(|f| f.decode),
                g.kv_heads * self.decode_tiles,
                class.warps * WARP,
                decode_shared_bytes(g.head_dim, dtype, class),
                decode_at,
            ),
            launch(&self.prefill, prefill, g.kv_heads, PREFILL_THREADS, prefill_bytes, prefill_at),
            launch(&self.any, Some(any), g.heads, ANY_THREADS, any_bytes, any_at),
        ]
        .into_iter()
        .flatten()
    }

    /// Whether prefill uses warpgroup kernels: [`Plan::boxes`].
    #[must_use]
    pub fn has_boxes(&self) -> bool {
        self.wgmma && !self.prefill.is_empty()
    }

    /// The warpgroup prefill launch for one layer with these tensor maps, beside those of [`Plan::launches`]; `None`
    /// if prefill is among those.
    ///
    /// # Panics
    /// If no plan was made.
    #[must_use]
    pub fn boxes(&self, at: &Buffers, kv: KvView, maps: &KvMaps) -> Option<Launch<AttentionBoxesParams>> {
        let (g, dtype) = self.geometry.expect("a plan was made");
        let name = family(dtype, g)?.wgmma.filter(|_| self.has_boxes())?;
        let [_, items, ..] = self.places(at.plan);
        let attention = AttentionParams { items, ..self.params(at, kv) };
        Some(Launch {
            name,
            grid: [g.kv_heads, grid_y(self.prefill.len()), 1],
            block: WGMMA_THREADS,
            shared_bytes: wgmma_shared_bytes(g.head_dim),
            params: AttentionBoxesParams { attention, maps: *maps },
        })
    }

    /// The reduction of pieces, after all of [`Plan::launches`] and [`Plan::boxes`]; `None` without pieces.
    ///
    /// # Panics
    /// If no plan was made.
    #[must_use]
    pub fn merge(&self, at: &Buffers) -> Option<Launch<AttentionMergeParams>> {
        let (g, _) = self.geometry.expect("a plan was made");
        let [.., merges, _] = self.places(at.plan);
        let params = AttentionMergeParams {
            merges,
            piece_out: at.piece_out,
            piece_lse: at.piece_lse,
            out: at.out,
            lse: at.lse,
            heads: g.heads,
            head_dim: query_dim(g),
        };
        let y = grid_y(self.merges.len());
        let grid = [g.heads.div_ceil(ANY_THREADS / WARP), y, 1];
        (y > 0).then_some(Launch { name: "attention_merge", grid, block: ANY_THREADS, shared_bytes: 0, params })
    }
}

/// Second dimension of a grid, which CUDA bounds: a step has at most `STEP_ROWS_MAX` rows, cut into a few pieces
/// each.
fn grid_y(items: usize) -> u32 {
    let y = u32::try_from(items).expect("items fit");
    assert!(y <= 65_535, "items within a grid");
    y
}

/// Threads of `attention_prefill_*` and of `attention_wgmma_*`.
const PREFILL_THREADS: u32 = 128;
const WGMMA_THREADS: u32 = 384;
/// The tile of `attention_wgmma_*`; its shared memory is [`wgmma_shared_bytes`].
const WGMMA_SHAPE: PrefillShape = PrefillShape { small: false, tile: 128, keys: 128, shared_bytes: 0 };

/// As kernels see it; within the limits of shapes.
fn query_dim(g: AttentionGeometry) -> u32 {
    u32::try_from(g.query_dim()).expect("a head's elements fit")
}

/// Dynamic shared memory of `attention_any_*` and `attention_latent_*`: the query and the accumulator, the keys' weights, addresses and a reduction.
const fn any_shared_bytes(head_dim: u32) -> u32 {
    4 * (2 * head_dim + 2 * ANY_THREADS + 16)
}

/// Positions that some of the rows see.
fn seen(batch: &AttnBatch<'_>, seq: &AttnRows, rows: &Range<u32>) -> Range<u32> {
    visible(seq.pos0 + rows.start, batch.window).start..visible(seq.pos0 + rows.end - 1, batch.window).end
}

/// Most rows of a decode item: a token of many heads has several tiles of packed rows.
fn decode_rows(g: AttentionGeometry) -> u32 {
    (DECODE_TILE * DECODE_TILES_MAX / g.group().min(DECODE_TILE)).max(1)
}

/// Keys that some row of the sequence sees.
fn keys_seen(batch: &AttnBatch<'_>, seq: &AttnRows) -> u32 {
    keys_seen_by(batch, seq, &(0..seq.rows.max(1)))
}

/// Keys that some of the sequence's rows see.
fn keys_seen_by(batch: &AttnBatch<'_>, seq: &AttnRows, rows: &Range<u32>) -> u32 {
    let span = seen(batch, seq, rows);
    let runs = &batch.runs[seq.run0 as usize..][..seq.runs as usize];
    runs.iter().map(|r| r.positions().end.min(span.end).saturating_sub(r.first_pos.max(span.start))).sum()
}

/// The parts of a sequence's runs that some of the rows see; neighbours in slots and positions become one.
fn clip(batch: &AttnBatch<'_>, seq: &AttnRows, rows: &Range<u32>, out: &mut Vec<KvRun>) {
    let span = seen(batch, seq, rows);
    out.clear();
    for run in &batch.runs[seq.run0 as usize..][..seq.runs as usize] {
        let (from, to) = (run.first_pos.max(span.start), run.positions().end.min(span.end));
        if from >= to {
            continue;
        }
        let part = KvRun { base: run.base + (from - run.first_pos), len: to - from, first_pos: from };
        match out.last_mut() {
            Some(last) if last.base + last.len == part.base && last.first_pos + last.len == part.first_pos => {
                last.len += part.len;
            }
            _ => out.push(part),
        }
    }
}

/// A position in a list of runs.
struct Cursor<'a> {
    runs: &'a [KvRun],
    at: usize,
    /// Keys taken from the run `at`.
    taken: u32,
}

impl Cursor<'_> {
    /// Appends the next `keys` keys.
    fn take(&mut self, mut keys: u32, out: &mut Vec<KvRun>) {
        while keys > 0 {
            let run = self.runs[self.at];
            let len = keys.min(run.len - self.taken);
            out.push(KvRun { base: run.base + self.taken, len, first_pos: run.first_pos + self.taken });
            keys -= len;
            self.taken += len;
            if self.taken == run.len {
                (self.at, self.taken) = (self.at + 1, 0);
            }
        }
    }
}
