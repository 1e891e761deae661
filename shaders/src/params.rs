//! The uniform blocks of the kernels, field by field as in their WGSL `Params` structs (a test reflects the shaders
//! and compares names, offsets and sizes). Scalars only, whole multiples of 16 bytes.

use bytemuck::{Pod, Zeroable};

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($field:ident: $ty:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
            pub(crate) struct $name {
                $(pub(crate) $field: $ty,)*
            }
            const _: () = assert!(size_of::<$name>() == $size && $size % 16 == 0);

            impl $name {
                /// Fields in order, with their offsets.
                #[cfg(test)]
                pub(crate) fn fields() -> Vec<(&'static str, usize, &'static str)> {
                    vec![$((stringify!($field), std::mem::offset_of!($name, $field), stringify!($ty))),*]
                }
            }
        )*
    };
}

params! {
    /// See `add.wgsl`.
    Add: 16 { quads: u32, factor: f32, pad0: u32, pad1: u32 }
    /// See `add_bias.wgsl`.
    AddBias: 16 { all: u32, quads: u32, pad0: u32, pad1: u32 }
    /// See `embed.wgsl`.
    Embed: 32 {
        ids: u32, rows: u32, shard_row0: u32, shard_rows: u32, quads: u32, add: u32, pad0: u32, pad1: u32,
    }
    /// See `gather_rows.wgsl`.
    GatherRows: 16 { index: u32, rows: u32, quads: u32, pad0: u32 }
    /// See `gated.wgsl`.
    Gated: 16 { rows: u32, n: u32, x_stride: u32, out_stride: u32 }
    /// See `shared/norm.wgsl`.
    Norm: 16 { rows: u32, cols: u32, quads: u32, eps: f32 }
    /// See `head_norm.wgsl`.
    HeadNorm: 32 {
        rows: u32, heads: u32, kv_heads: u32, head_dim: u32, stride: u32, eps: f32, pad0: u32, pad1: u32,
    }
    /// See `gelu.wgsl`.
    Gelu: 16 { quads: u32, pad0: u32, pad1: u32, pad2: u32 }
    /// See `shared/matmul_params.wgsl`.
    Matmul: 32 {
        rows: u32, quads: u32, n: u32, out_stride: u32, out_col0: u32, add: u32, pad0: u32, pad1: u32,
    }
    /// See `matmul/by_head.wgsl`.
    HeadMatmul: 48 {
        rows: u32, n: u32, k: u32, quads: u32, head0: u32, heads: u32, x_stride: u32, x_step: u32, out_stride: u32,
        out_step: u32, shard_row0: u32, shard_rows: u32,
    }
    /// See `experts.wgsl`.
    Experts: 32 {
        choices: u32, top_k: u32, quads: u32, shard_row0: u32, shard_rows: u32, pad0: u32, pad1: u32, pad2: u32,
    }
    /// See `experts/route.wgsl`.
    Route: 48 {
        rows: u32, choices: u32, count: u32, stride: u32, top_k: u32, groups: u32, top_groups: u32, sigmoid: u32,
        normalised: u32, biased: u32, scale: f32, two_best: u32,
    }
    /// See `experts/grouped.wgsl`.
    Grouped: 32 {
        choices: u32, count: u32, quads: u32, n: u32, out_stride: u32, shard_row0: u32, shard_rows: u32,
        shared_by: u32,
    }
    /// See `rope_append.wgsl`.
    RopeAppend: 48 {
        rows: u32, heads: u32, kv_heads: u32, head_dim: u32, head_quads: u32, qkv_stride: u32, rope_stride: u32,
        slots: u32, shard_slot0: u32, shard_slots: u32, rotate: u32, team: u32,
    }
    /// See `latent_append.wgsl`.
    LatentAppend: 64 {
        rows: u32, heads: u32, dim: u32, latent: u32, rotated: u32, query: u32, qkv_stride: u32, input_stride: u32,
        key_stride: u32, rope_stride: u32, slots: u32, shard_slot0: u32, shard_slots: u32, pad0: u32, pad1: u32,
        pad2: u32,
    }
    /// See `merge.wgsl`.
    Merge: 32 {
        rows: u32, heads: u32, head_dim: u32, out_stride: u32, lse_stride: u32, actions: u32, pad0: u32, pad1: u32,
    }
    /// See `sink.wgsl`.
    Sink: 32 {
        rows: u32, heads: u32, head_dim: u32, out_stride: u32, lse_stride: u32, counts: u32, pad0: u32, pad1: u32,
    }
    /// See `attention.wgsl`.
    Attention: 64 {
        kv_heads: u32, group: u32, head_dim: u32, head_quads: u32, q_stride: u32, out_stride: u32, lse_stride: u32,
        window: u32, scale: f32, works: u32, work_count: u32, slopes: u32, softcap: f32, slot_quads: u32,
        values: u32, code_quads: u32,
    }
}
