//! Shapes that instances must agree on before they share KV.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Head counts and sizes of attention. `heads` is a multiple of `kv_heads` (grouped-query attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionGeometry {
    pub heads: u32,
    pub kv_heads: u32,
    /// Elements of a stored key, and of a stored value.
    pub head_dim: u32,
    /// Latent attention, absorbed (DeepSeek-V2 §2.1): a token has one row, which is key and value at once. It is stored
    /// as `[k | v]`, its first and its second half, so `kv_heads` is 1, and queries and outputs have `2 * head_dim` elements a head.
    #[serde(default)]
    pub latent: bool,
}

impl AttentionGeometry {
    /// Query heads that share one KV head.
    #[must_use]
    pub const fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Elements of a head's query, of the key that it is multiplied with, and of the head's output.
    #[must_use]
    pub const fn query_dim(&self) -> usize {
        self.head_dim as usize * if self.latent { 2 } else { 1 }
    }

    /// Elements of one token's queries, `heads * query_dim`.
    #[must_use]
    pub const fn q_dim(&self) -> usize {
        self.heads as usize * self.query_dim()
    }

    /// Elements of one token's stored K (or V), `kv_heads * head_dim`.
    #[must_use]
    pub const fn kv_dim(&self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }

    /// Elements from a token's first key to the first value that attention reads: 0 where they are the same row.
    #[must_use]
    pub const fn values_at(&self) -> usize {
        if self.latent { 0 } else { self.kv_dim() }
    }

    /// Columns of the fused projection, q then k then v.
    #[must_use]
    pub const fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }
}

/// Shape of one token's KV. The canonical layout of `n` consecutive tokens in one layer, on the wire and between
/// backends, is `[n][k | v][kv_heads][head_dim]` in `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub dtype: DType,
}

impl KvShape {
    /// Bytes of one token in one layer (K and V).
    #[must_use]
    pub const fn layer_token_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.head_dim as usize * self.dtype.size()
    }

    /// Bytes of one token in all layers.
    #[must_use]
    pub const fn token_bytes(&self) -> usize {
        self.layers as usize * self.layer_token_bytes()
    }
}

/// Identity of a model's weights and configuration (blake3). Instances with different hashes never share KV.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct ModelHash(pub [u8; 32]);

impl fmt::Display for ModelHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for ModelHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelHash({self})")
    }
}
