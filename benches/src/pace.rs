//! The profile of a modelled device for the bundled model: LLaMA2-7B on an A100 in small.

use anyhow::Result;
use lagoon_pace::PaceProfile;
use std::path::Path;

/// The bundled model: 4 layers, 2 KV heads of 64, f16.
const LAYERS: f64 = 4.0;
const TOKEN_BYTES: f64 = LAYERS * 2.0 * 2.0 * 64.0 * 2.0;
/// Weights of one of its layers: q and o, k and v, and the feed-forward.
const LAYER_ELEMENTS: f64 = 2.0 * 256.0 * 256.0 + 2.0 * 256.0 * 128.0 + 3.0 * 256.0 * 512.0;

/// Times of a modelled device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// A step's weights.
    pub weights_s: f64,
    /// Attention of one row over a full KV cache.
    pub cache_s: f64,
    pub kv_tokens: u32,
    /// Rows that compute for as long as the weights are read.
    pub rows_balance: f64,
    /// Rows of the modelled prompt that one row of a prompt stands for.
    pub prompt_scale: f64,
    /// Instances' worth of memory and rates that it has, and their share that its parallelism leaves: see [`Pace::of`].
    pub instances: f64,
    pub efficiency: f64,
}

impl Pace {
    /// The profile for the bundled model in `model`.
    ///
    /// # Errors
    /// If the model's file cannot be read.
    pub fn profile(&self, model: &Path) -> Result<PaceProfile> {
        let bytes = std::fs::metadata(model.join("model.safetensors"))?.len() as f64;
        let faster = self.instances * self.efficiency;
        let weight_scale = self.weights_s * 1e12 / bytes;
        let flops = self.rows_balance * bytes * weight_scale / self.weights_s;
        let row_us = 2.0 * LAYER_ELEMENTS * weight_scale / flops * 1e6;
        Ok(PaceProfile {
            bytes_per_s: 1e12 * faster,
            flops: flops * faster,
            copy_bytes_per_s: 1e11 * faster,
            launch_us: 3.0,
            weight_scale,
            kv_scale: self.cache_s * 1e12 / (TOKEN_BYTES * f64::from(self.kv_tokens)),
            prompt_scale: self.prompt_scale,
            prompt_row_us: (self.prompt_scale - 1.0).max(0.0) * row_us / faster,
        })
    }

    /// This device's share of a device that holds `instances` times as much (a pair, a pipeline) and does
    /// `instances * efficiency` times the work.
    #[must_use]
    pub fn of(self, instances: u32, efficiency: f64) -> Self {
        Self { instances: f64::from(instances), efficiency, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace {
        weights_s: 10e-3,
        cache_s: 30e-3,
        kv_tokens: 2048,
        rows_balance: 150.0,
        prompt_scale: 1.0,
        instances: 1.0,
        efficiency: 1.0,
    };

    #[test]
    fn a_step_a_cache_and_a_prompt_take_the_times_they_should() {
        let dir = tempfile::tempdir().unwrap();
        let elements = 2_621_440_usize;
        std::fs::write(dir.path().join("model.safetensors"), vec![0; 2 * elements]).unwrap();
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{a}, not {b}");
        let p = PACE.profile(dir.path()).unwrap();
        near(p.matmul_s(1, elements, 2 * elements), 10e-3);
        near(p.matmul_s(300, elements, 2 * elements), 20e-3);
        near(4.0 * p.attention_s(1, 256, 2048, 512), 30e-3);
        near(p.prompt_row_us + 1.0, 1.0);
        // With a scale, a chunk of 64 rows takes as long as one of 640: the rest of its products is in `prompt_row_us`.
        let ten = Pace { prompt_scale: 10.0, ..PACE }.profile(dir.path()).unwrap();
        let layers = 4 * 589_824;
        let scaled = 64.0 * (ten.matmul_s(1000, layers, 0) / 1000.0 + 4.0 * ten.prompt_row_us * 1e-6);
        near(scaled, p.matmul_s(640, layers, 0));
        near(ten.attention_s(64, 256, 100, 512), p.attention_s(640, 256, 100, 512));
        // A pair has twice the rates, less what its parallelism takes.
        let pair = PACE.of(2, 0.85).profile(dir.path()).unwrap();
        near(pair.matmul_s(1, elements, 2 * elements), 10e-3 / 1.7);
        near(pair.attention_s(64, 256, 100, 512), p.attention_s(64, 256, 100, 512) / 1.7);
    }
}
