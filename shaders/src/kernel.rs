//! The kernels: which source and entry point each is, in which permutations, and what it binds.
//!
//! Invariants: one WGSL file an op, under the same stem as the CPU's file; a permutation is a choice of the included
//! element type and of constants, all of them listed in [`Kernel::all`], so that tests and tools see what users run.

use lagoon_types::DType;

/// How a weight or KV element is stored and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Encoding {
    F32,
    /// Two to a word, widened by `unpack2x16float`.
    F16,
    /// Two to a word, widened by the adapter's own f16.
    F16Native,
    Bf16,
}

impl Encoding {
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::F16, Self::F16Native, Self::Bf16];

    pub(crate) fn new(dtype: DType, native_f16: bool) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 if native_f16 => Self::F16Native,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::F16Native => "f16_native",
            Self::Bf16 => "bf16",
        }
    }
}

/// Largest head of an attention permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HeadClass {
    D64,
    D128,
    D256,
}

impl HeadClass {
    pub(crate) const ALL: [Self; 3] = [Self::D64, Self::D128, Self::D256];

    /// The smallest class that holds heads of `head_quads` quads; at most 64.
    pub(crate) fn new(head_quads: u32) -> Self {
        match head_quads {
            0..=16 => Self::D64,
            17..=32 => Self::D128,
            _ => Self::D256,
        }
    }

    /// Quads of the largest head.
    pub(crate) fn quads(self) -> u32 {
        match self {
            Self::D64 => 16,
            Self::D128 => 32,
            Self::D256 => 64,
        }
    }
}

/// A compute pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    AddBias(Encoding),
    Embed(Encoding),
    RmsNorm(Encoding),
    LayerNorm(Encoding),
    /// For few rows.
    Matvec(Encoding, MatvecRows),
    MatmulTiled(Encoding),
    /// Never native f16: it stores.
    RopeAppend(Encoding),
    Attention(Encoding, HeadClass),
    /// Merges the parts of tiles whose keys were split.
    AttentionReduce(HeadClass),
    Merge,
    SiluMul,
    Gelu,
    GatherRows,
}

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

/// What a binding of a storage buffer may do.
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
    /// Every permutation.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Merge, Self::SiluMul, Self::Gelu, Self::GatherRows];
        for encoding in Encoding::ALL {
            all.extend([
                Self::AddBias(encoding),
                Self::Embed(encoding),
                Self::RmsNorm(encoding),
                Self::LayerNorm(encoding),
                Self::Matvec(encoding, MatvecRows::One),
                Self::Matvec(encoding, MatvecRows::Four),
                Self::MatmulTiled(encoding),
            ]);
            all.extend(HeadClass::ALL.map(|class| Self::Attention(encoding, class)));
        }
        all.extend([Encoding::F32, Encoding::F16, Encoding::Bf16].map(Self::RopeAppend));
        all.extend(HeadClass::ALL.map(Self::AttentionReduce));
        all
    }

    /// Stem of the WGSL file.
    pub(crate) fn stem(self) -> &'static str {
        match self {
            Self::AddBias(_) => "add_bias",
            Self::Embed(_) => "embed",
            Self::RmsNorm(_) => "rms_norm",
            Self::LayerNorm(_) => "layer_norm",
            Self::Matvec(..) | Self::MatmulTiled(_) => "matmul",
            Self::RopeAppend(_) => "rope_append",
            Self::Attention(..) | Self::AttentionReduce(_) => "attention",
            Self::Merge => "merge",
            Self::SiluMul => "silu_mul",
            Self::Gelu => "gelu",
            Self::GatherRows => "gather_rows",
        }
    }

    pub(crate) fn entry(self) -> &'static str {
        match self {
            Self::Matvec(..) => "matvec",
            Self::MatmulTiled(_) => "tiled",
            Self::Attention(..) => "partial",
            Self::AttentionReduce(_) => "reduce",
            _ => "main",
        }
    }

    /// Element type of the permutation; kernels without one include f32's.
    pub(crate) fn encoding(self) -> Encoding {
        match self {
            Self::AddBias(e)
            | Self::Embed(e)
            | Self::RmsNorm(e)
            | Self::LayerNorm(e)
            | Self::Matvec(e, _)
            | Self::MatmulTiled(e)
            | Self::RopeAppend(e)
            | Self::Attention(e, _) => e,
            Self::AttentionReduce(_) | Self::Merge | Self::SiluMul | Self::Gelu | Self::GatherRows => Encoding::F32,
        }
    }

    /// Storage bindings from 1 on; binding 0 is the parameters. The entry points of a file share their bindings'
    /// numbers; `reduce` binds what it uses.
    pub(crate) fn bindings(self) -> &'static [(u32, Access)] {
        use Access::{Read, ReadWrite};
        match self {
            Self::Embed(_)
            | Self::RmsNorm(_)
            | Self::LayerNorm(_)
            | Self::Matvec(..)
            | Self::MatmulTiled(_)
            | Self::GatherRows => &[(1, Read), (2, Read), (3, ReadWrite)],
            Self::RopeAppend(_) => &[(1, Read), (2, Read), (3, ReadWrite), (4, ReadWrite)],
            Self::Attention(..) => &[(1, Read), (2, Read), (3, Read), (4, ReadWrite), (5, ReadWrite), (6, ReadWrite)],
            Self::AttentionReduce(_) => &[(1, Read), (4, ReadWrite), (5, ReadWrite), (6, ReadWrite)],
            Self::Merge => &[(1, Read), (2, Read), (3, Read), (4, ReadWrite), (5, ReadWrite)],
            Self::AddBias(_) | Self::SiluMul | Self::Gelu => &[(1, Read), (2, ReadWrite)],
        }
    }

    /// Constants that the source leaves open, as `${NAME}`.
    fn constants(self) -> [(&'static str, u32); 2] {
        let rows = match self {
            Self::Matvec(_, rows) => rows.count(),
            _ => 1,
        };
        let quads = match self {
            Self::Attention(_, class) | Self::AttentionReduce(class) => class.quads(),
            _ => HeadClass::D64.quads(),
        };
        [("ROWS", rows), ("HEAD_QUADS", quads)]
    }

    /// For people and file names: `matmul.tiled.bf16`, `attention.partial.f16.q32`.
    pub(crate) fn name(self) -> String {
        let base = format!("{}.{}.{}", self.stem(), self.entry(), self.encoding().name());
        match self {
            Self::Matvec(_, rows) => format!("{base}.r{}", rows.count()),
            Self::Attention(_, class) | Self::AttentionReduce(class) => format!("{base}.q{}", class.quads()),
            Self::Merge | Self::SiluMul | Self::Gelu | Self::GatherRows => format!("{}.{}", self.stem(), self.entry()),
            _ => base,
        }
    }

    /// The composed WGSL.
    pub(crate) fn source(self) -> String {
        let mut out = String::new();
        if self.encoding() == Encoding::F16Native {
            out.push_str("enable f16;\n");
        }
        include(op_source(self.stem()), self.encoding(), &mut out);
        for (name, value) in self.constants() {
            out = out.replace(&format!("${{{name}}}"), &value.to_string());
        }
        out
    }
}

/// Every composed permutation, by name, as the device compiles it: for validators such as `tint`.
#[must_use]
pub fn sources() -> Vec<(String, String)> {
    Kernel::all().into_iter().map(|kernel| (kernel.name(), kernel.source())).collect()
}

fn op_source(stem: &str) -> &'static str {
    match stem {
        "add_bias" => include_str!("../wgsl/add_bias.wgsl"),
        "embed" => include_str!("../wgsl/embed.wgsl"),
        "rms_norm" => include_str!("../wgsl/rms_norm.wgsl"),
        "layer_norm" => include_str!("../wgsl/layer_norm.wgsl"),
        "matmul" => include_str!("../wgsl/matmul.wgsl"),
        "rope_append" => include_str!("../wgsl/rope_append.wgsl"),
        "attention" => include_str!("../wgsl/attention.wgsl"),
        "merge" => include_str!("../wgsl/merge.wgsl"),
        "silu_mul" => include_str!("../wgsl/silu_mul.wgsl"),
        "gelu" => include_str!("../wgsl/gelu.wgsl"),
        "gather_rows" => include_str!("../wgsl/gather_rows.wgsl"),
        _ => unreachable!("no shader {stem}"),
    }
}

fn shared_source(name: &str, encoding: Encoding) -> &'static str {
    match (name, encoding) {
        ("grid", _) => include_str!("../wgsl/shared/grid.wgsl"),
        ("norm", _) => include_str!("../wgsl/shared/norm.wgsl"),
        ("round_f16", _) => include_str!("../wgsl/shared/round_f16.wgsl"),
        ("dtype", Encoding::F32) => include_str!("../wgsl/shared/dtype_f32.wgsl"),
        ("dtype", Encoding::F16) => include_str!("../wgsl/shared/dtype_f16.wgsl"),
        ("dtype", Encoding::F16Native) => include_str!("../wgsl/shared/dtype_f16_native.wgsl"),
        ("dtype", Encoding::Bf16) => include_str!("../wgsl/shared/dtype_bf16.wgsl"),
        _ => unreachable!("no shared shader source {name}"),
    }
}

/// Appends `source` with its `//#include NAME` lines replaced by the shared file's text.
fn include(source: &str, encoding: Encoding, out: &mut String) {
    for line in source.lines() {
        match line.strip_prefix("//#include ") {
            Some(name) => include(shared_source(name.trim(), encoding), encoding, out),
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
}
