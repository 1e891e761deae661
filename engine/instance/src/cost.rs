//! Ship queries or fetch KV: whichever moves fewer bytes for this chunk (Infinite-LLM v1 §4.6, Figure 12).
//!
//! Decoding ships: one row's query and partial are far smaller than the KV that it attends to. A long chunk against
//! little remote KV fetches. In between the bytes decide, with the creditor's compute taken as free (it overlaps
//! with the debtor's) and the debtor's compute on fetched KV charged at its own rate.

use lagoon_types::{AttentionGeometry, DType, KvShape};

/// How remote KV is attended to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemotePolicy {
    /// By cost, per sequence and creditor, for each chunk.
    #[default]
    Auto,
    /// Queries always travel.
    Ship,
    /// KV always travels.
    Fetch,
}

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    pub geometry: AttentionGeometry,
    pub kv: KvShape,
    pub wire: DType,
    /// Bytes per second between the two.
    pub bandwidth: f64,
    /// Attention operations per second of this instance, for KV that it must attend to itself.
    pub attention_rate: f64,
}

impl CostModel {
    /// Bytes in both directions, per layer, when `rows` queries travel: query, output, log-sum-exp and count.
    #[must_use]
    pub fn ship_bytes(&self, rows: u32) -> f64 {
        let row = 2 * self.geometry.q_dim() * self.wire.size() + self.geometry.heads as usize * 4 + 4;
        f64::from(rows) * as_f64(row)
    }

    /// Bytes per layer when `keys` tokens of KV travel.
    #[must_use]
    pub fn fetch_bytes(&self, keys: u32) -> f64 {
        f64::from(keys) * as_f64(self.kv.layer_token_bytes())
    }

    /// Whether fetching `keys` tokens is cheaper than shipping `rows` queries.
    #[must_use]
    pub fn prefers_fetch(&self, rows: u32, keys: u32) -> bool {
        let compute = f64::from(rows) * f64::from(keys) * as_f64(4 * self.geometry.q_dim()) / self.attention_rate;
        self.fetch_bytes(keys) / self.bandwidth + compute < self.ship_bytes(rows) / self.bandwidth
    }
}

fn as_f64(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> CostModel {
        CostModel {
            geometry: AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128 },
            kv: KvShape { layers: 32, kv_heads: 8, head_dim: 128, dtype: DType::BF16 },
            wire: DType::BF16,
            bandwidth: 1e9,
            attention_rate: 1e14,
        }
    }

    #[test]
    fn decoding_ships_and_long_chunks_over_short_remote_kv_fetch() {
        let m = model();
        assert!(!m.prefers_fetch(1, 32));
        assert!(m.prefers_fetch(512, 64));
        assert!(!m.prefers_fetch(512, 100_000));
    }

    #[test]
    fn the_crossover_is_where_the_bytes_are_equal() {
        let m = CostModel { attention_rate: f64::INFINITY, ..model() };
        // A row costs 2 * 32 * 128 * 2 + 32 * 4 + 4 bytes, a key 2 * 8 * 128 * 2: about four keys a row.
        let row = 2.0 * 4096.0 * 2.0 + 132.0;
        assert_eq!(m.ship_bytes(10), 10.0 * row);
        assert!(m.prefers_fetch(100, 403));
        assert!(!m.prefers_fetch(100, 404));
    }
}
