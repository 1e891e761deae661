//! Shapes that instances must agree on before they share KV.

use crate::kv_dtype::{self, KvDType};
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
/// backends, is `[n][k | v][kv_heads]` rows of `head_dim` elements in `dtype` (see [`kv_dtype`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub dtype: KvDType,
}

impl KvShape {
    /// Bytes of a token's key, or value, of one head in one layer.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.head_dim)
    }

    /// Bytes of one token in one layer (K and V).
    #[must_use]
    pub const fn layer_token_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.row_bytes()
    }

    /// Appends tokens of one layer in the canonical layout. `values` is `[tokens][k | v][kv_heads][head_dim]`.
    pub fn encode(&self, values: &[f32], out: &mut Vec<u8>) {
        if let Some(dtype) = self.dtype.plain() {
            return dtype.encode(values, out);
        }
        let (start, dim) = (out.len(), self.head_dim as usize);
        out.resize(start + values.len() / dim * self.row_bytes(), 0);
        let rows = out[start..].chunks_exact_mut(self.row_bytes());
        rows.zip(values.chunks_exact(dim)).for_each(|(row, values)| kv_dtype::encode_row(values, row));
    }

    /// Appends the values of tokens of one layer: the inverse of [`KvShape::encode`] up to rounding.
    pub fn decode(&self, bytes: &[u8], out: &mut Vec<f32>) {
        if let Some(dtype) = self.dtype.plain() {
            return dtype.decode(bytes, out);
        }
        let (start, dim) = (out.len(), self.head_dim as usize);
        out.resize(start + bytes.len() / self.row_bytes() * dim, 0.0);
        let rows = bytes.chunks_exact(self.row_bytes());
        rows.zip(out[start..].chunks_exact_mut(dim)).for_each(|(row, values)| kv_dtype::decode_row(row, values));
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
