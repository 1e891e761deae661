//! The conformance suite of [`Device`](crate::Device): cases that every backend passes, against f64.
//!
//! A backend instantiates the suite with one line in a test file; each case becomes a `#[test]`:
//!
//! ```text
//! fn device() -> Result<MyDevice, String> { MyDevice::open().map_err(|e| format!("no adapter: {e}")) }
//! lagoon_backend::conformance_suite!(device);
//! // or, with the backend's own accuracy stated and reasoned:
//! lagoon_backend::conformance_suite!(device, Tolerance::loosened(8.0)); // exp is up to 17 ulp on this software GPU
//! // separately, for a backend that must shard weights over a binding limit (allocates about 300 MiB):
//! lagoon_backend::conformance_large_weight!(device);
//! ```
//!
//! An `Err(reason)` skips the case: the reason is printed, and appended as `name\treason` (the name with its test
//! file and module) to the file that the environment variable `LAGOON_SKIP_LOG` names; CI fails on skips that are not
//! listed. Inputs are random from fixed seeds and never violate the contract; shapes are odd on purpose.

mod attention;
mod data;
mod experts;
mod latent;
mod matmul;
mod memory;
mod merge;
mod oracle;
mod packed;
mod pointwise;
mod rope;

/// The cases, each of which panics on a violation.
pub mod cases {
    pub use super::attention::{
        attention_alibi, attention_decode_batch, attention_dtypes, attention_geometries, attention_leaves_other_rows,
        attention_long_context, attention_missing_runs, attention_prefill, attention_softcap, attention_steep_scores,
        attention_windows,
    };
    pub use super::experts::experts_match;
    pub use super::latent::{
        attention_latent, attention_latent_wide, head_matmul_matches, latent_append_rotates_and_stores,
    };
    pub use super::matmul::{
        matmul_activated, matmul_add, matmul_bf16, matmul_blocked, matmul_f16, matmul_f32, matmul_large_weight,
        matmul_parts,
    };
    pub use super::memory::{kv_bytes_round_trip, reads_ahead_are_reads, tensors_round_trip};
    pub use super::merge::{
        merge_counts_decide_emptiness, merge_extreme_scores, merge_of_split_alibi, merge_of_split_attention,
        merge_of_split_softcap, sink_joins_the_softmax,
    };
    pub use super::packed::{
        embed_packed, experts_packed, head_matmul_packed, matmul_packed, matmul_packed_extremes, matmul_packed_parts,
        packed_is_taken_or_refused,
    };
    pub use super::pointwise::{
        add_bias_adds, embed_widens_rows, gather_copies_rows, gelu_matches, head_norm_matches, layer_norm_matches,
        other_gates_match, rms_norm_matches, rows_add_and_scale, rows_are_capped, silu_mul_matches,
    };
    pub use super::rope::{
        rope_append_in_chunks_stores_the_same_bytes, rope_append_of_extremes_in_8_bits, rope_append_rotates_and_stores,
        rope_append_then_attention,
    };
}

pub use data::Data;

use lagoon_types::DType;

/// How exact a backend must be: the stated bound of each operation times `factor`. The bounds, for `factor == 1`, are
/// those of plain f32 arithmetic in any order of summation:
///
/// * `embed`, `gather_rows`, `kv_*`, `read`, `write`: exact.
/// * `matmul`: `(8 + 2 sqrt(k)) u` of the sum of absolute products (`u = 2^-24`; the sum of `k` rounding errors grows
///   as `sqrt(k)`). Weights are exact in their type, so the bound is the same for all three.
/// * `matmul` of packed weights, exact in their format: as `matmul`, and of each 32 activations, which may be rounded to 16 bits of
///   the largest of them, `2^-16` of the largest times the sum of their absolute weights.
/// * `rms_norm`, `silu_mul` of an exact product: a few `u` relative, from the square root, the division and the exponential.
/// * `layer_norm`: as `rms_norm`, plus the mean's error before the division, some `u` of the row's mean magnitude.
/// * `head_norm`: as `rms_norm`.
/// * `experts`: the bounds of its products and its activation, and `1e-5` for a row's shares.
/// * `add_bias`, `add`, `scale`, `embed_add`: a rounding of the result.
/// * `sink`: a few `u` relative, and the log-sum-exp's rounding in the exponent.
/// * `gelu` of an exact product: a few `u` relative plus `u x²`, from the square in the exponent; also for the tiny
///   results of negative `x`.
/// * `matmul_activated`: the product's bound through the activation, and the activation's own.
/// * `rope_append`: `4 u` of the pair's magnitude; stored elements within half a unit of the store's type, and a whole
///   one where `factor > 1` (a GPU may round its packing either way).
/// * `head_matmul`: as `matmul`. `latent_append`: as `rope_append`; what is not rotated is exact.
/// * `softcap`: some `u` of the cap.
/// * `attention`: relative errors of the weights are those of the scores in absolute terms, which grow with the largest
///   score and the soft cap, plus the exponential's; outputs within that of the largest value.
/// * `merge`: some `u` of the larger magnitude, lse likewise.
///
/// A device that rounds activations to the 16-bit type of the other factor ([`Tolerance::one_term`]) gets in addition,
/// with `v` the unit roundoff of that type (`2^-8` for bf16, `2^-11` for f16, none for f32):
///
/// * `matmul`: `min(1, 4 / sqrt(k)) v` of the sum of absolute products. If all `k` roundings go one way, the error is `v`
///   of that sum. Independent roundings (0.42 `v` RMS over mantissas) give `0.42 v / sqrt(k)` of it for equal products and
///   `0.8 v / sqrt(k)` for unequal ones, so the bound is at least five standard deviations.
/// * `matmul` of packed weights: twice that of f16, because their elements may be rounded to f16, too.
/// * `attention`: scores as products with `k = head_dim`, whose absolute errors are relative errors of the weights; and each
///   weight is rounded: outputs within `v` of the largest value. Log-sum-exps come from weights before rounding.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Multiplies every inexact bound but those of rounded activations; at least 1.
    pub factor: f64,
    /// Whether activations may be rounded to the 16-bit type of the other factor.
    pub rounds_activations: bool,
}

impl Tolerance {
    /// The bounds of plain f32 arithmetic.
    pub const STRICT: Self = Self { factor: 1.0, rounds_activations: false };

    /// The strict bounds times `factor`; callers state the reason.
    #[must_use]
    pub const fn loosened(factor: f64) -> Self {
        assert!(factor >= 1.0, "a tolerance is loosened, not tightened");
        Self { factor, rounds_activations: false }
    }

    /// The same bounds for a device that rounds activations (queries, attention weights, inputs of linear layers) to the 16-bit
    /// type of the KV or weight that they are multiplied with.
    #[must_use]
    pub const fn one_term(self) -> Self {
        Self { rounds_activations: true, ..self }
    }

    /// Unit roundoff of activations that are multiplied with this type; 0 if they are not rounded.
    fn activation_roundoff(self, dtype: DType) -> f64 {
        match dtype {
            _ if !self.rounds_activations => 0.0,
            DType::F32 => 0.0,
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
        }
    }

    /// Additional error of a sum of `k` products with rounded activations, as a share of the sum of absolute products.
    fn rounded_products(self, k: usize, dtype: DType) -> f64 {
        (4.0 / (k as f64).sqrt()).min(1.0) * self.activation_roundoff(dtype)
    }
}

/// Runs a case on a device, or records why it is skipped. Used by the macros.
pub fn run<D>(name: &str, device: Result<D, String>, case: impl FnOnce(&mut D)) {
    match device {
        Ok(mut device) => case(&mut device),
        Err(reason) => skip(name, &reason),
    }
}

#[allow(clippy::print_stderr, reason = "a skipped test says so to people")]
fn skip(name: &str, reason: &str) {
    use std::io::Write;
    eprintln!("skipped {name}: {reason}");
    if let Some(path) = std::env::var_os("LAGOON_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(path).expect("the skip log opens");
        // One write: other tests append at the same time.
        log.write_all(format!("{name}\t{reason}\n").as_bytes()).expect("the skip log takes a line");
    }
}

/// Asserts that every element of `got` is within its bound of `want`: `bound(i)` for element `i`.
#[track_caller]
fn assert_close(what: &str, got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(*got) - want).abs(), bound(i));
        assert!(error <= bound, "{what}: element {i} is {got}, expected {want}, off by {error:e} (bound {bound:e})");
    }
}

/// Instantiates the suite as `#[test]`s for `$make: Fn() -> Result<impl Device, String>`; see the module's doc.
#[macro_export]
macro_rules! conformance_suite {
    ($make:expr) => {
        $crate::conformance_suite!($make, $crate::conformance::Tolerance::STRICT);
    };
    ($make:expr, $tolerance:expr) => {
        $crate::conformance_names!($crate::conformance_cases($make, $tolerance,));
    };
}

/// Calls a macro with the names of the suite's cases behind its other arguments: for a backend that needs something around
/// each case. `conformance_names!(mine(a, b,))` is `mine!(a, b, tensors_round_trip, …)`.
#[macro_export]
macro_rules! conformance_names {
    ($($callback:tt)::+ ($($args:tt)*)) => {
        $($callback)::+! {
            $($args)*
            tensors_round_trip,
            kv_bytes_round_trip,
            reads_ahead_are_reads,
            embed_widens_rows,
            gather_copies_rows,
            rms_norm_matches,
            silu_mul_matches,
            layer_norm_matches,
            gelu_matches,
            add_bias_adds,
            other_gates_match,
            rows_add_and_scale,
            rows_are_capped,
            head_norm_matches,
            experts_match,
            matmul_f32,
            matmul_f16,
            matmul_bf16,
            matmul_add,
            matmul_activated,
            matmul_parts,
            matmul_blocked,
            packed_is_taken_or_refused,
            matmul_packed,
            matmul_packed_extremes,
            matmul_packed_parts,
            head_matmul_packed,
            embed_packed,
            experts_packed,
            rope_append_in_chunks_stores_the_same_bytes,
            rope_append_of_extremes_in_8_bits,
            rope_append_rotates_and_stores,
            rope_append_then_attention,
            attention_dtypes,
            attention_geometries,
            attention_windows,
            attention_alibi,
            attention_missing_runs,
            attention_decode_batch,
            attention_prefill,
            attention_long_context,
            attention_steep_scores,
            attention_softcap,
            attention_leaves_other_rows,
            head_matmul_matches,
            latent_append_rotates_and_stores,
            attention_latent,
            merge_counts_decide_emptiness,
            merge_extreme_scores,
            merge_of_split_attention,
            merge_of_split_alibi,
            merge_of_split_softcap,
            sink_joins_the_softmax,
        }
    };
}

/// Instantiates the case of latents of 576 elements, for backends that attend to them.
#[macro_export]
macro_rules! conformance_latent_wide {
    ($make:expr) => {
        $crate::conformance_latent_wide!($make, $crate::conformance::Tolerance::STRICT);
    };
    ($make:expr, $tolerance:expr) => {
        $crate::conformance_cases!($make, $tolerance, attention_latent_wide);
    };
}

/// Instantiates the case of a weight larger than 128 MiB: a backend with a binding limit proves its sharding.
#[macro_export]
macro_rules! conformance_large_weight {
    ($make:expr) => {
        $crate::conformance_large_weight!($make, $crate::conformance::Tolerance::STRICT);
    };
    ($make:expr, $tolerance:expr) => {
        $crate::conformance_cases!($make, $tolerance, matmul_large_weight);
    };
}

/// One `#[test]` for each named case; used by the other macros, and by hand to leave cases out visibly.
#[macro_export]
macro_rules! conformance_cases {
    ($make:expr, $tolerance:expr, $($case:ident),+ $(,)?) => {
        $(
            #[test]
            fn $case() {
                let tolerance: $crate::conformance::Tolerance = $tolerance;
                $crate::conformance::run(concat!(module_path!(), "::", stringify!($case)), ($make)(), |device| {
                    $crate::conformance::cases::$case(device, tolerance);
                });
            }
        )+
    };
}
