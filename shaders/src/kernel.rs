//! The kernels: their sources, entry points, permutations and bindings.
//!
//! Invariants: one WGSL file an op, under the same stem as the CPU's file (further ones of an op lie in a folder); a
//! permutation is a choice of the included element type or packed format, and of constants. [`Kernel::all`] lists every
//! permutation, so that tests and tools cover those that users run.

use lagoon_backend::WeightFormat;
use lagoon_types::{DType, KvDType};

/// How the elements of a weight or of KV are stored and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Encoding {
    F32,
    /// Two to a word, widened by `unpack2x16float`.
    F16,
    /// Two to a word, widened by the adapter's own f16: of KV only, as weights are read in whole words.
    F16Native,
    Bf16,
    /// KV in 8 bits: codes with a scale for each row.
    KvFp8,
    Q8_0,
    Q4_0,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
    Fp8,
    Int4G32,
    Int4G64,
    Int4G128,
}

impl Encoding {
    /// Elements stored one by one: of weights of every kernel, and of KV.
    pub(crate) const PLAIN: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];
    /// Packed formats of matrices.
    pub(crate) const PACKED: [Self; 10] = [
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
        Self::Fp8,
        Self::Int4G32,
        Self::Int4G64,
        Self::Int4G128,
    ];

    /// `None` for formats that no kernel unpacks.
    pub(crate) fn new(format: WeightFormat) -> Option<Self> {
        if let Some(dtype) = format.plain() {
            return Some(Self::plain(dtype, false));
        }
        match format {
            WeightFormat::Q8_0 => Some(Self::Q8_0),
            WeightFormat::Q4_0 => Some(Self::Q4_0),
            WeightFormat::Q4K => Some(Self::Q4K),
            WeightFormat::Q5K => Some(Self::Q5K),
            WeightFormat::Q6K => Some(Self::Q6K),
            WeightFormat::Mxfp4 => Some(Self::Mxfp4),
            WeightFormat::Fp8 => Some(Self::Fp8),
            WeightFormat::Int4G32 => Some(Self::Int4G32),
            WeightFormat::Int4G64 => Some(Self::Int4G64),
            WeightFormat::Int4G128 => Some(Self::Int4G128),
            _ => None,
        }
    }

    /// Of elements stored one by one.
    pub(crate) fn plain(dtype: DType, native_f16: bool) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 if native_f16 => Self::F16Native,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
        }
    }

    /// Of a KV store.
    pub(crate) fn kv(dtype: KvDType, native_f16: bool) -> Self {
        dtype.plain().map_or(Self::KvFp8, |dtype| Self::plain(dtype, native_f16))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::F16Native => "f16_native",
            Self::Bf16 => "bf16",
            Self::KvFp8 => "kv_fp8",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
            Self::Int4G32 => "int4_g32",
            Self::Int4G64 => "int4_g64",
            Self::Int4G128 => "int4_g128",
        }
    }

    /// Runs of 32 elements of an INT4 block.
    fn runs(self) -> u32 {
        match self {
            Self::Int4G64 => 2,
            Self::Int4G128 => 4,
            _ => 1,
        }
    }
}

/// What adds up a product of few rows: a subgroup, or a part of a workgroup through its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Teams {
    Subgroup {
        /// Invocations of the smallest and of the largest subgroup.
        least: u32,
        most: u32,
    },
    Workgroup,
}

/// Outputs of a team, as in `shared/products.wgsl`.
const SPAN: u32 = 4;

impl Teams {
    /// Outputs of a workgroup for one row, at least.
    pub(crate) fn outputs(self) -> u32 {
        let teams = match self {
            Self::Subgroup { most, .. } => 64 / most.clamp(1, 64),
            Self::Workgroup => 2,
        };
        SPAN * teams
    }

    /// Invocations that load for each other in wide kernels, whose workgroups have eight: a subgroup, if all have as many; otherwise
    /// each for itself.
    pub(crate) fn lanes(self) -> u32 {
        match self {
            Self::Subgroup { least: 8, most: 8 } => 8,
            _ => 1,
        }
    }
}

/// Largest head of an attention permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HeadClass {
    D64,
    D128,
    D256,
    /// Latents of 512 elements and 64 that are rotated. Queries do not fit workgroup memory and are read again for each tile of keys.
    D576,
}

impl HeadClass {
    pub(crate) const ALL: [Self; 4] = [Self::D64, Self::D128, Self::D256, Self::D576];

    /// The smallest class that holds heads of `head_quads` quads, if any does.
    pub(crate) fn new(head_quads: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|class| head_quads <= class.quads())
    }

    /// Quads of the largest head.
    pub(crate) fn quads(self) -> u32 {
        match self {
            Self::D64 => 16,
            Self::D128 => 32,
            Self::D256 => 64,
            Self::D576 => 144,
        }
    }

    /// Quads of a query that are staged at once.
    fn query_quads(self) -> u32 {
        match self {
            Self::D576 => 16,
            _ => self.quads(),
        }
    }
}

/// Items (a query of a head) of a tile of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tile {
    /// Of [`Kernel::Attention`].
    Narrow,
    /// Of [`Kernel::AttentionWide`].
    Wide,
}

impl Tile {
    pub(crate) fn items(self) -> u32 {
        match self {
            Self::Narrow => 16,
            Self::Wide => 64,
        }
    }
}

/// A compute pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Add,
    Scale,
    Softcap,
    AddBias(Encoding),
    Embed(Encoding),
    RmsNorm(Encoding),
    LayerNorm(Encoding),
    HeadNorm(Encoding),
    /// Matrix product for few rows.
    Matvec(Encoding, MatvecRows),
    MatmulTiled(Encoding),
    /// Matrix product for many rows on adapters without a register file.
    MatmulWide(Encoding),
    /// Never native f16: this kernel stores KV.
    RopeAppend(Encoding),
    /// A product a head for few rows.
    HeadMatvec(Encoding, MatvecRows),
    HeadMatmulTiled(Encoding),
    /// Rotates queries for latent attention.
    LatentQueries,
    /// Makes and stores rows of latent attention; never native f16.
    LatentAppend(Encoding),
    Attention(Encoding, HeadClass),
    /// Attention of many queries with heads of [`HeadClass::D64`] on adapters without a register file. Of [`Encoding::PLAIN`] only:
    /// native f16 is loaded element by element.
    AttentionWide(Encoding),
    /// Merges the parts of tiles whose keys were split.
    AttentionReduce(HeadClass, Tile),
    Merge,
    Sink(Encoding),
    Gated(Gated),
    Gelu,
    GatherRows,
    /// Chooses a mixture's experts.
    Route(Encoding),
    /// Sorts choices by expert.
    Sort,
    /// Copies rows to the places of their choices.
    GatherChoices,
    /// A mixture's product for few rows, of one expert each with [`MatvecRows::One`].
    GroupedMatvec(Encoding, MatvecRows),
    GroupedTiled(Encoding),
    AddBiases(Encoding),
    /// Adds up the results of a row's experts.
    Combine,
}

/// Activations of one exponential, by the logistic function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Gated {
    SiluMul,
    GeluTanh,
    GeluTanhMul,
    ClampedSwiglu,
}

impl Gated {
    pub(crate) const ALL: [Self; 4] = [Self::SiluMul, Self::GeluTanh, Self::GeluTanhMul, Self::ClampedSwiglu];

    fn entry(self) -> &'static str {
        match self {
            Self::SiluMul => "silu_mul",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluTanhMul => "gelu_tanh_mul",
            Self::ClampedSwiglu => "clamped_swiglu",
        }
    }
}

/// Rows up to which each output row streams the weight (matvec) rather than tiles of it.
pub(crate) const MATVEC_ROWS_MAX: usize = 8;

/// Rows of x that one matvec workgroup serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MatvecRows {
    One,
    Four,
}

impl MatvecRows {
    pub(crate) fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Four => 4,
        }
    }
}

/// Access of a storage binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

/// Storage buffers that one kernel binds at most.
pub(crate) const BINDINGS_MAX: usize = 6;
/// Workgroup memory that the kernels need, in bytes.
pub(crate) const WORKGROUP_BYTES: u32 = 32 << 10;
/// Invocations of a workgroup that the kernels need.
pub(crate) const WORKGROUP_INVOCATIONS: u32 = 128;

impl Kernel {
    /// Every permutation of every kernel.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Add, Self::Scale, Self::Softcap, Self::Merge, Self::Gelu, Self::GatherRows];
        all.extend(Gated::ALL.map(Self::Gated));
        all.extend([Self::Sort, Self::GatherChoices, Self::Combine, Self::LatentQueries]);
        for encoding in Encoding::PLAIN {
            all.extend([
                Self::AddBias(encoding),
                Self::RmsNorm(encoding),
                Self::LayerNorm(encoding),
                Self::HeadNorm(encoding),
                Self::Sink(encoding),
                Self::Route(encoding),
                Self::AddBiases(encoding),
            ]);
        }
        all.extend(HeadClass::ALL.map(|class| Self::Attention(Encoding::F16Native, class)));
        for encoding in Encoding::PLAIN.into_iter().chain(Encoding::PACKED) {
            all.extend([
                Self::Embed(encoding),
                Self::Matvec(encoding, MatvecRows::One),
                Self::Matvec(encoding, MatvecRows::Four),
                Self::MatmulTiled(encoding),
                Self::MatmulWide(encoding),
                Self::HeadMatvec(encoding, MatvecRows::One),
                Self::HeadMatvec(encoding, MatvecRows::Four),
                Self::HeadMatmulTiled(encoding),
                Self::GroupedMatvec(encoding, MatvecRows::One),
                Self::GroupedMatvec(encoding, MatvecRows::Four),
                Self::GroupedTiled(encoding),
            ]);
        }
        let stored = [Encoding::F32, Encoding::F16, Encoding::Bf16, Encoding::KvFp8];
        for encoding in stored {
            all.extend(HeadClass::ALL.map(|class| Self::Attention(encoding, class)));
        }
        all.extend(Encoding::PLAIN.map(Self::AttentionWide));
        all.extend(stored.map(Self::RopeAppend));
        all.extend(stored.map(Self::LatentAppend));
        all.extend(HeadClass::ALL.map(|class| Self::AttentionReduce(class, Tile::Narrow)));
        all.push(Self::AttentionReduce(HeadClass::D64, Tile::Wide));
        all
    }

    /// Stem of the WGSL file; with its folder's name where it lies in one.
    pub(crate) fn stem(self) -> &'static str {
        match self {
            Self::Add | Self::Scale | Self::Softcap => "add",
            Self::AddBias(_) => "add_bias",
            Self::Embed(_) => "embed",
            Self::RmsNorm(_) => "rms_norm",
            Self::LayerNorm(_) => "layer_norm",
            Self::HeadNorm(_) => "head_norm",
            Self::Matvec(..) | Self::MatmulTiled(_) => "matmul",
            Self::MatmulWide(_) => "matmul_wide",
            Self::RopeAppend(_) => "rope_append",
            Self::HeadMatvec(..) | Self::HeadMatmulTiled(_) => "matmul_by_head",
            Self::LatentQueries | Self::LatentAppend(_) => "latent_append",
            Self::Attention(..) => "attention",
            Self::AttentionWide(_) => "attention_wide",
            Self::AttentionReduce(..) => "attention_reduce",
            Self::Merge => "merge",
            Self::Sink(_) => "sink",
            Self::Gated(_) => "gated",
            Self::Gelu => "gelu",
            Self::GatherRows => "gather_rows",
            Self::Route(_) | Self::Sort => "experts_route",
            Self::GroupedMatvec(..) | Self::GroupedTiled(_) => "experts_grouped",
            Self::GatherChoices | Self::AddBiases(_) | Self::Combine => "experts",
        }
    }

    pub(crate) fn entry(self) -> &'static str {
        match self {
            Self::Matvec(..) | Self::GroupedMatvec(..) | Self::HeadMatvec(..) => "matvec",
            Self::MatmulTiled(_) | Self::GroupedTiled(_) | Self::HeadMatmulTiled(_) => "tiled",
            Self::MatmulWide(_) | Self::AttentionWide(_) => "wide",
            Self::LatentQueries => "queries",
            Self::LatentAppend(_) => "append",
            Self::Attention(..) => "partial",
            Self::AttentionReduce(..) => "reduce",
            Self::Add => "add",
            Self::Scale => "scale",
            Self::Softcap => "softcap",
            Self::Gated(activation) => activation.entry(),
            Self::Route(_) => "route",
            Self::Sort => "sort",
            Self::GatherChoices => "gather",
            Self::AddBiases(_) => "add_biases",
            Self::Combine => "combine",
            _ => "main",
        }
    }

    /// Element type or packed format of the permutation; kernels without one include f32's.
    pub(crate) fn encoding(self) -> Encoding {
        match self {
            Self::AddBias(e)
            | Self::Embed(e)
            | Self::RmsNorm(e)
            | Self::LayerNorm(e)
            | Self::HeadNorm(e)
            | Self::Sink(e)
            | Self::Matvec(e, _)
            | Self::MatmulTiled(e)
            | Self::MatmulWide(e)
            | Self::RopeAppend(e)
            | Self::HeadMatvec(e, _)
            | Self::HeadMatmulTiled(e)
            | Self::LatentAppend(e)
            | Self::Attention(e, _)
            | Self::AttentionWide(e)
            | Self::Route(e)
            | Self::GroupedMatvec(e, _)
            | Self::GroupedTiled(e)
            | Self::AddBiases(e) => e,
            _ => Encoding::F32,
        }
    }

    /// Storage bindings from 1 on; binding 0 is the parameters. The entry points of a file share their bindings'
    /// numbers and bind what they use.
    pub(crate) fn bindings(self) -> &'static [(u32, Access)] {
        use Access::{Read, ReadWrite};
        match self {
            Self::Embed(_)
            | Self::RmsNorm(_)
            | Self::LayerNorm(_)
            | Self::HeadNorm(_)
            | Self::Matvec(..)
            | Self::MatmulTiled(_)
            | Self::MatmulWide(_)
            | Self::HeadMatvec(..)
            | Self::HeadMatmulTiled(_)
            | Self::GatherRows
            | Self::Route(_) => &[(1, Read), (2, Read), (3, ReadWrite)],
            Self::RopeAppend(_) => &[(1, Read), (2, Read), (3, ReadWrite), (4, ReadWrite)],
            Self::LatentQueries => &[(2, Read), (4, Read), (5, ReadWrite)],
            Self::LatentAppend(_) => &[(1, Read), (2, Read), (3, Read), (4, Read), (5, ReadWrite), (6, ReadWrite)],
            Self::Attention(..) | Self::AttentionWide(_) => {
                &[(1, Read), (2, Read), (3, Read), (4, ReadWrite), (5, ReadWrite), (6, ReadWrite)]
            }
            Self::AttentionReduce(..) => &[(1, Read), (4, ReadWrite), (5, ReadWrite), (6, ReadWrite)],
            Self::Merge => &[(1, Read), (2, Read), (3, Read), (4, ReadWrite), (5, ReadWrite)],
            Self::Sort => &[(3, ReadWrite)],
            Self::GatherChoices | Self::Combine => &[(1, Read), (2, Read), (4, ReadWrite)],
            Self::AddBiases(_) => &[(1, Read), (3, Read), (4, ReadWrite)],
            Self::Sink(_) | Self::GroupedMatvec(..) | Self::GroupedTiled(_) => {
                &[(1, Read), (2, Read), (3, Read), (4, ReadWrite)]
            }
            Self::Scale | Self::Softcap => &[(2, ReadWrite)],
            Self::Add | Self::AddBias(_) | Self::Gated(_) | Self::Gelu => &[(1, Read), (2, ReadWrite)],
        }
    }

    /// Constants of the source, as `${NAME}`.
    fn constants(self) -> [(&'static str, u32); 5] {
        let rows = match self {
            Self::Matvec(_, rows) | Self::GroupedMatvec(_, rows) | Self::HeadMatvec(_, rows) => rows.count(),
            _ => 1,
        };
        let (class, tile) = match self {
            Self::Attention(_, class) => (class, Tile::Narrow),
            Self::AttentionWide(_) => (HeadClass::D64, Tile::Wide),
            Self::AttentionReduce(class, tile) => (class, tile),
            _ => (HeadClass::D64, Tile::Narrow),
        };
        [
            ("ROWS", rows),
            ("HEAD_QUADS", class.quads()),
            ("QUERY_QUADS", class.query_quads()),
            ("ITEMS", tile.items()),
            ("RUNS", self.encoding().runs()),
        ]
    }

    /// For people and file names: `matmul.tiled.bf16`, `attention.partial.f16.q32`.
    pub(crate) fn name(self) -> String {
        let base = format!("{}.{}.{}", self.stem(), self.entry(), self.encoding().name());
        match self {
            Self::Matvec(_, rows) | Self::GroupedMatvec(_, rows) | Self::HeadMatvec(_, rows) => {
                format!("{base}.r{}", rows.count())
            }
            Self::Attention(_, class) => format!("{base}.q{}", class.quads()),
            Self::AttentionReduce(class, tile) => format!("{base}.q{}.t{}", class.quads(), tile.items()),
            Self::Add
            | Self::Scale
            | Self::Softcap
            | Self::Merge
            | Self::Gated(_)
            | Self::Gelu
            | Self::GatherRows
            | Self::Sort
            | Self::GatherChoices
            | Self::LatentQueries
            | Self::Combine => format!("{}.{}", self.stem(), self.entry()),
            _ => base,
        }
    }

    /// The composed WGSL.
    pub(crate) fn source(self, teams: Teams) -> String {
        let mut out = String::new();
        if self.encoding() == Encoding::F16Native {
            out.push_str("enable f16;\n");
        }
        include(op_source(self.stem()), self.encoding(), teams, &mut out);
        for (name, value) in self.constants() {
            out = out.replace(&format!("${{{name}}}"), &value.to_string());
        }
        let lanes = teams.lanes();
        out = out.replace("${LANES}", &lanes.to_string());
        out = out.replace("${BROADCAST}", if lanes == 1 { "own_value" } else { "subgroupBroadcast" });
        repeat(&out, lanes)
    }
}

/// Every composed permutation, by name, as the device compiles it, without subgroups: for validators such as `tint`.
#[must_use]
pub fn sources() -> Vec<(String, String)> {
    Kernel::all().into_iter().map(|kernel| (kernel.name(), kernel.source(Teams::Workgroup))).collect()
}

fn op_source(stem: &str) -> &'static str {
    match stem {
        "add" => include_str!("../wgsl/add.wgsl"),
        "add_bias" => include_str!("../wgsl/add_bias.wgsl"),
        "embed" => include_str!("../wgsl/embed.wgsl"),
        "rms_norm" => include_str!("../wgsl/rms_norm.wgsl"),
        "layer_norm" => include_str!("../wgsl/layer_norm.wgsl"),
        "head_norm" => include_str!("../wgsl/head_norm.wgsl"),
        "matmul" => include_str!("../wgsl/matmul.wgsl"),
        "matmul_wide" => include_str!("../wgsl/matmul/wide.wgsl"),
        "matmul_by_head" => include_str!("../wgsl/matmul/by_head.wgsl"),
        "latent_append" => include_str!("../wgsl/latent_append.wgsl"),
        "rope_append" => include_str!("../wgsl/rope_append.wgsl"),
        "attention" => include_str!("../wgsl/attention.wgsl"),
        "attention_wide" => include_str!("../wgsl/attention/wide.wgsl"),
        "attention_reduce" => include_str!("../wgsl/attention/reduce.wgsl"),
        "merge" => include_str!("../wgsl/merge.wgsl"),
        "sink" => include_str!("../wgsl/sink.wgsl"),
        "gated" => include_str!("../wgsl/gated.wgsl"),
        "gelu" => include_str!("../wgsl/gelu.wgsl"),
        "experts" => include_str!("../wgsl/experts.wgsl"),
        "experts_route" => include_str!("../wgsl/experts/route.wgsl"),
        "experts_grouped" => include_str!("../wgsl/experts/grouped.wgsl"),
        "gather_rows" => include_str!("../wgsl/gather_rows.wgsl"),
        _ => unreachable!("no shader {stem}"),
    }
}

fn shared_source(name: &str, encoding: Encoding, teams: Teams) -> &'static str {
    match name {
        "grid" => include_str!("../wgsl/shared/grid.wgsl"),
        "choices" => include_str!("../wgsl/shared/choices.wgsl"),
        "team" => match teams {
            Teams::Subgroup { .. } => include_str!("../wgsl/shared/team_subgroup.wgsl"),
            Teams::Workgroup => include_str!("../wgsl/shared/team.wgsl"),
        },
        "lanes" => match teams.lanes() {
            1 => include_str!("../wgsl/shared/lanes.wgsl"),
            _ => include_str!("../wgsl/shared/lanes_subgroup.wgsl"),
        },
        "products" => include_str!("../wgsl/shared/products.wgsl"),
        "tile" => include_str!("../wgsl/shared/tile.wgsl"),
        "matmul_params" => include_str!("../wgsl/shared/matmul_params.wgsl"),
        "total" => include_str!("../wgsl/shared/total.wgsl"),
        "attention_works" => include_str!("../wgsl/shared/attention_works.wgsl"),
        "softcap" => include_str!("../wgsl/shared/softcap.wgsl"),
        "norm" => include_str!("../wgsl/shared/norm.wgsl"),
        "round_f16" => include_str!("../wgsl/shared/round_f16.wgsl"),
        "e4m3" => include_str!("../wgsl/shared/e4m3.wgsl"),
        "bytes" => include_str!("../wgsl/shared/bytes.wgsl"),
        "runs" => include_str!("../wgsl/shared/runs.wgsl"),
        "six_bits" => include_str!("../wgsl/shared/six_bits.wgsl"),
        "dtype" => dtype_source(encoding),
        "weight" => weight_source(encoding),
        "rows" => match encoding {
            Encoding::KvFp8 => include_str!("../wgsl/shared/rows_fp8.wgsl"),
            _ => include_str!("../wgsl/shared/rows_plain.wgsl"),
        },
        "append" => match encoding {
            Encoding::KvFp8 => include_str!("../wgsl/shared/append_fp8.wgsl"),
            _ => include_str!("../wgsl/shared/append_plain.wgsl"),
        },
        _ => unreachable!("no shared shader source {name}"),
    }
}

fn dtype_source(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::F32 => include_str!("../wgsl/shared/dtype_f32.wgsl"),
        Encoding::F16 => include_str!("../wgsl/shared/dtype_f16.wgsl"),
        Encoding::F16Native => include_str!("../wgsl/shared/dtype_f16_native.wgsl"),
        Encoding::Bf16 => include_str!("../wgsl/shared/dtype_bf16.wgsl"),
        Encoding::KvFp8 => include_str!("../wgsl/shared/dtype_fp8.wgsl"),
        _ => unreachable!("no element type {}", encoding.name()),
    }
}

fn weight_source(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Q8_0 => include_str!("../wgsl/shared/weight_q8_0.wgsl"),
        Encoding::Q4_0 => include_str!("../wgsl/shared/weight_q4_0.wgsl"),
        Encoding::Q4K => include_str!("../wgsl/shared/weight_q4_k.wgsl"),
        Encoding::Q5K => include_str!("../wgsl/shared/weight_q5_k.wgsl"),
        Encoding::Q6K => include_str!("../wgsl/shared/weight_q6_k.wgsl"),
        Encoding::Mxfp4 => include_str!("../wgsl/shared/weight_mxfp4.wgsl"),
        Encoding::Fp8 => include_str!("../wgsl/shared/weight_fp8.wgsl"),
        Encoding::Int4G32 | Encoding::Int4G64 | Encoding::Int4G128 => include_str!("../wgsl/shared/weight_int4.wgsl"),
        Encoding::F32 | Encoding::F16 | Encoding::F16Native | Encoding::Bf16 => {
            include_str!("../wgsl/shared/weight.wgsl")
        }
        Encoding::KvFp8 => unreachable!("weights are not in KV's encoding"),
    }
}

/// Appends `source` with its `//#include NAME` lines replaced by the shared file's text.
fn include(source: &str, encoding: Encoding, teams: Teams, out: &mut String) {
    for line in source.lines() {
        match line.strip_prefix("//#include ") {
            Some(name) => include(shared_source(name.trim(), encoding, teams), encoding, teams, out),
            None => out.extend([line, "\n"]),
        }
    }
}

/// `source` with its lines `//#each N TEXT` replaced by N lines of TEXT, in which `${i}` counts from 0, and `${i/LANES}` and
/// `${i%LANES}` are its quotient and remainder. N may be a quotient `A/B`.
fn repeat(source: &str, lanes: u32) -> String {
    let mut out = String::new();
    for line in source.lines() {
        let Some((count, text)) = line.trim_start().strip_prefix("//#each ").and_then(|rest| rest.split_once(' '))
        else {
            out.extend([line, "\n"]);
            continue;
        };
        let (all, by) = count.split_once('/').unwrap_or((count, "1"));
        let number = |text: &str| text.parse::<u32>().expect("a count");
        for i in 0..number(all) / number(by) {
            let line = text.replace("${i}", &i.to_string());
            let line = line.replace("${i/LANES}", &(i / lanes).to_string());
            out.extend([line.replace("${i%LANES}", &(i % lanes).to_string()).as_str(), "\n"]);
        }
    }
    out
}
