//! Chooses between shipping queries and fetching KV by the smaller delay of a layer of this chunk (Infinite-LLM v1 §4.6,
//! Figure 12).
//!
//! Decoding ships: one row's query and partial are far smaller than the KV that it attends to. A long chunk against
//! little remote KV fetches. In between, the times are compared:
//! * a layer's queries leave when the layer has computed them: shipping costs a round trip and the rows on the wire.
//!   The creditor's compute counts as free (it overlaps with the debtor's);
//! * a layer's KV is requested one layer ahead: fetching costs the part of the copy that outlasts this instance's work
//!   on a layer, then the debtor's own attention to it, and the copies out of one store and into the other, which take
//!   both devices' time in every chunk.
//!
//! The same times decide which rBlocks of a prompt are borrowed ([`CostModel::prefers_local`]).
//!
//! Round trip and bulk rate are measured for this creditor, the other times come from this instance's calibration; configured
//! values replace measurements until there are some.

use crate::cx::Cx;
use lagoon_protocol::Calibration;
use lagoon_types::{AttentionGeometry, DType, InstanceId, KvShape};
use std::cmp::Reverse;

/// Rate and round trip of the link to a creditor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    pub bytes_per_s: f64,
    pub rtt_s: f64,
}

impl LinkCost {
    /// The measured link; `bytes_per_s` 0 (not measured) gives the assumed rate. An unknown round trip counts as none.
    #[must_use]
    pub fn measured(rtt_us: u32, bytes_per_s: u64, assumed_bytes_per_s: f64) -> Self {
        let rate = as_f64(usize::try_from(bytes_per_s).unwrap_or(usize::MAX));
        Self { bytes_per_s: if bytes_per_s > 0 { rate } else { assumed_bytes_per_s }, rtt_s: f64::from(rtt_us) / 1e6 }
    }
}

/// Cost of this instance's own work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnCost {
    /// Attention operations per second over KV that this instance attends to itself. Measured while decoding, which is
    /// bound by memory: a chunk of many rows is faster, so fetching is never overrated.
    pub attention_rate: f64,
    /// Attention operations per second in a chunk of a prompt; not below [`OwnCost::attention_rate`].
    pub prompt_attention_rate: f64,
    /// Seconds of one row of a chunk in one layer, without attention; 0 if not measured.
    pub row_layer_s: f64,
    /// Seconds to copy one byte of KV out of a store or into it; 0 if not measured.
    pub copy_byte_s: f64,
}

impl OwnCost {
    /// The cost from the calibration, if there is a plausible one; else attention at `assumed` operations per second.
    #[must_use]
    pub fn measured(
        calibration: Option<&Calibration>,
        geometry: &AttentionGeometry,
        kv: &KvShape,
        assumed_rate: f64,
    ) -> Self {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let Some(c) = calibration.filter(|c| positive(c.attention_us_per_ktoken)) else {
            return Self {
                attention_rate: assumed_rate,
                prompt_attention_rate: assumed_rate,
                row_layer_s: 0.0,
                copy_byte_s: 0.0,
            };
        };
        let layers = f64::from(kv.layers.max(1));
        let operations = 1_024.0 * layers * row_key_operations(geometry);
        let row_us = if positive(c.prefill_us_per_token) { c.prefill_us_per_token } else { 0.0 };
        let attention_rate = operations * 1e6 / c.attention_us_per_ktoken;
        let prompt_rate = operations * 1e6 / c.prompt_attention_us_per_ktoken;
        Self {
            attention_rate,
            prompt_attention_rate: if positive(prompt_rate) { prompt_rate.max(attention_rate) } else { attention_rate },
            row_layer_s: row_us / layers / 1e6,
            copy_byte_s: if positive(c.copy_bytes_per_s) { 1.0 / c.copy_bytes_per_s } else { 0.0 },
        }
    }
}

impl OwnCost {
    /// Seconds of attention for one row and one key in one layer.
    #[must_use]
    pub fn row_key_s(&self, geometry: &AttentionGeometry) -> f64 {
        row_key_operations(geometry) / self.attention_rate
    }
}

/// Operations of attention for one row and one key in one layer: two products of `q_dim`, each a multiplication and an
/// addition.
fn row_key_operations(geometry: &AttentionGeometry) -> f64 {
    as_f64(4 * geometry.q_dim())
}

/// Inputs of the choice between shipping and fetching.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    pub geometry: AttentionGeometry,
    pub kv: KvShape,
    pub wire: DType,
    pub link: LinkCost,
    pub own: OwnCost,
}

impl CostModel {
    /// Towards a creditor, from measurements; towards an unknown one, by the fastest link to a peer.
    pub(crate) fn towards(cx: &Cx, creditor: Option<InstanceId>) -> Self {
        let config = &cx.config;
        let known = match creditor {
            Some(creditor) => cx.peers.key(creditor).and_then(|peer| cx.peers.known(peer)),
            None => cx.peers.iter().max_by_key(|known| (known.bytes_per_s, Reverse(known.rtt_us))).copied(),
        };
        let (rtt_us, bytes_per_s) = known.map_or((0, 0), |k| (k.rtt_us, k.bytes_per_s));
        Self {
            geometry: config.geometry,
            kv: config.kv,
            wire: config.wire,
            link: LinkCost::measured(rtt_us, bytes_per_s, config.link_bytes_per_s),
            own: OwnCost::measured(config.calibration.as_ref(), &config.geometry, &config.kv, config.attention_flops),
        }
    }

    /// Bytes per layer in both directions to ship `rows` queries: query, output, log-sum-exp and count.
    #[must_use]
    pub fn ship_bytes(&self, rows: u32) -> f64 {
        let row = 2 * self.geometry.q_dim() * self.wire.size() + self.geometry.heads as usize * 4 + 4;
        f64::from(rows) * as_f64(row)
    }

    /// Bytes per layer to fetch `keys` tokens of KV.
    #[must_use]
    pub fn fetch_bytes(&self, keys: u32) -> f64 {
        f64::from(keys) * as_f64(self.kv.layer_token_bytes())
    }

    /// Seconds that a layer waits for shipped queries.
    #[must_use]
    pub fn ship_s(&self, rows: u32) -> f64 {
        self.link.rtt_s + self.ship_bytes(rows) / self.link.bytes_per_s
    }

    /// Seconds that a layer waits for fetched KV and attends to it.
    #[must_use]
    pub fn fetch_s(&self, rows: u32, keys: u32) -> f64 {
        let copy = self.link.rtt_s + self.fetch_bytes(keys) / self.link.bytes_per_s;
        let ahead = f64::from(rows) * self.own.row_layer_s;
        let stores = 2.0 * self.fetch_bytes(keys) * self.own.copy_byte_s;
        (copy - ahead).max(0.0) + stores + self.operations(rows, keys) / self.own.attention_rate
    }

    /// Whether a prompt's chunk of `rows` rows waits longer for an answer about `keys` remote keys than it takes to attend to as many here.
    #[must_use]
    pub fn prefers_local(&self, rows: u32, keys: u32) -> bool {
        self.operations(rows, keys) / self.own.prompt_attention_rate < self.ship_s(rows)
    }

    /// Operations of attention in one layer.
    fn operations(&self, rows: u32, keys: u32) -> f64 {
        f64::from(rows) * f64::from(keys) * row_key_operations(&self.geometry)
    }

    /// Whether fetching `keys` tokens is cheaper than shipping `rows` queries.
    #[must_use]
    pub fn prefers_fetch(&self, rows: u32, keys: u32) -> bool {
        self.fetch_s(rows, keys) < self.ship_s(rows)
    }
}

fn as_f64(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_types::KvDType;

    const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128, latent: false };
    const KV: KvShape = KvShape { layers: 32, kv_heads: 8, head_dim: 128, dtype: KvDType::BF16 };

    fn model() -> CostModel {
        CostModel {
            geometry: GEOMETRY,
            kv: KV,
            wire: DType::BF16,
            link: LinkCost::measured(0, 0, 1e9),
            own: OwnCost::measured(None, &GEOMETRY, &KV, 1e14),
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
        let own = OwnCost { attention_rate: f64::INFINITY, ..model().own };
        // A round trip that nothing hides is paid either way.
        for rtt_us in [0, 300] {
            let m = CostModel { own, link: LinkCost::measured(rtt_us, 0, 1e9), ..model() };
            // A row costs 2 * 32 * 128 * 2 + 32 * 4 + 4 bytes, a key 2 * 8 * 128 * 2: about four keys a row.
            let row = 2.0 * 4096.0 * 2.0 + 132.0;
            assert_eq!(m.ship_bytes(10), 10.0 * row);
            assert!(m.prefers_fetch(100, 403));
            assert!(!m.prefers_fetch(100, 404));
        }
    }

    #[test]
    fn the_measured_link_and_calibration_replace_what_is_configured() {
        let link = LinkCost::measured(250, 40_000_000, 1e9);
        assert_eq!(link, LinkCost { bytes_per_s: 4e7, rtt_s: 250e-6 });
        let calibration = Calibration {
            batches: Vec::new(),
            attention_us_per_ktoken: 1_000.0,
            prefill_us_per_token: 64.0,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: 10.0,
        };
        let own = OwnCost::measured(Some(&calibration), &GEOMETRY, &KV, 1.0);
        // 1,024 keys, 32 layers, 4 * 4,096 operations each, in a millisecond.
        assert_eq!(own.attention_rate, 1_024.0 * 32.0 * 16_384.0 * 1e3);
        assert_eq!(own.prompt_attention_rate, 1_024.0 * 32.0 * 16_384.0 * 1e5);
        assert!((own.row_layer_s - 2e-6).abs() < 1e-18);
        let unmeasured = Calibration { prompt_attention_us_per_ktoken: 0.0, ..calibration.clone() };
        assert_eq!(OwnCost::measured(Some(&unmeasured), &GEOMETRY, &KV, 1.0).prompt_attention_rate, own.attention_rate);
        let broken = Calibration { attention_us_per_ktoken: f64::NAN, ..calibration };
        assert_eq!(OwnCost::measured(Some(&broken), &GEOMETRY, &KV, 7.0).attention_rate, 7.0);
    }

    #[test]
    fn keys_are_better_local_where_a_chunk_attends_sooner_than_its_queries_travel() {
        // 512 rows: 8.5 MB at 1 GB/s, in which 100 TFLOP/s attend to 101,000 keys.
        let m = model();
        assert!(m.prefers_local(512, 100_000) && !m.prefers_local(512, 103_000));
        let slow = CostModel { own: OwnCost { prompt_attention_rate: 1e11, ..m.own }, ..m };
        assert!(!slow.prefers_local(512, 200));
        assert_eq!(slow.fetch_s(512, 200), m.fetch_s(512, 200), "fetching counts decode attention");
    }

    #[test]
    fn a_long_round_trip_is_hidden_by_fetching_a_layer_ahead() {
        // 512 rows work for 1 ms on a layer; 30 ms there and back cannot be hidden, 0.9 ms can.
        let own = OwnCost { row_layer_s: 2e-6, ..model().own };
        let near = CostModel { own, link: LinkCost { bytes_per_s: 1e9, rtt_s: 0.0009 }, ..model() };
        assert!(near.fetch_s(512, 16) < 1e-4 && near.ship_s(512) > 0.009);
        let far = CostModel { link: LinkCost { rtt_s: 0.03, ..near.link }, ..near };
        assert!(far.fetch_s(512, 16) > 0.029);
        // Devices that copy at 1 GB/s: 16 keys of 4 KiB, twice, in a layer.
        let copies = CostModel { own: OwnCost { copy_byte_s: 1e-9, ..own }, ..near };
        assert!((copies.fetch_s(512, 16) - near.fetch_s(512, 16) - 2.0 * 65_536e-9).abs() < 1e-9);
        // A single row hides next to nothing, and a slow link makes its KV dearer still.
        let slow = CostModel { link: LinkCost { bytes_per_s: 1e7, rtt_s: 0.0009 }, ..near };
        assert!(!slow.prefers_fetch(1, 32));
    }
}
