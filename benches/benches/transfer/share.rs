//! The transfer's share of a request's latency, **modelled**: an 8B model's shape over links of 1, 10 and 100 Gbit/s.
//!
//! Measured on this machine: the time of a pull of one small block from EXPORT to DONE over QUIC (fixed overhead),
//! the time that each further block adds without merging (overhead of a transaction), and the best rate of the
//! verified QUIC path (processor limit). Modelled: the link, with QUIC's headers and the network's round trip;
//! prefill and decode, by a roofline of an A100. A pull is not overlapped with prefill.

use super::{
    rig::{Rig, Scheme, Way},
    run::MESSAGE,
};
use anyhow::Result;
use lagoon_benches::measure::median;
use serde_json::{Value, json};

/// Llama-3-8B: 8.0e9 weights in bf16, 32 layers, 8 KV heads of 128, K and V.
const WEIGHTS: f64 = 8.0e9;
const LAYERS: f64 = 32.0;
const TOKEN_BYTES: f64 = LAYERS * 2.0 * 8.0 * 128.0 * 2.0;
/// Tokens of an rBlock.
const BLOCK_TOKENS: f64 = 16.0;
/// An A100: half of 312 TFLOP/s in prefill, 1.5 of 2.0 TB/s in decode steps of 16 sequences.
const PREFILL_FLOPS: f64 = 156e12;
const READ_BYTES_PER_S: f64 = 1.5e12;
const BATCH: f64 = 16.0;
/// Tokens of an answer.
const ANSWER: f64 = 256.0;
/// Of a datagram of 1,500 bytes: IPv4 and UDP 28, QUIC's short header about 12, its tag 16, a STREAM frame's header 8.
const HEADERS: f64 = 64.0;
const DATAGRAM: f64 = 1500.0;
/// EXPORT, the read and its data: one and a half round trips of a data centre's network.
const ROUND_TRIPS_S: f64 = 1.5 * 100e-6;

/// Measured overheads of the protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overheads {
    /// Seconds of a pull of one block of 4 KiB.
    pull_s: f64,
    /// Seconds that a transaction of 4 KiB adds.
    transaction_s: f64,
}

impl Overheads {
    pub(crate) fn measure(rounds: usize) -> Result<Self> {
        const MANY: u32 = 512;
        let scheme = Scheme { verify: true, coalesce: false, one_by_one: false };
        let (mut one, mut many) = (Rig::new(4096, 1)?, Rig::new(4096, MANY)?);
        let (mut pulls, mut transactions) = (Vec::new(), Vec::new());
        for _ in 0..=rounds.max(5) {
            let (short, _) = one.transfer(Way::Quic(1), scheme)?;
            let (long, _) = many.transfer(Way::Quic(1), scheme)?;
            pulls.push(short);
            transactions.push((long - short) / f64::from(MANY - 1));
        }
        Ok(Self { pull_s: median(pulls), transaction_s: median(transactions) })
    }
}

/// The best rate of a QUIC path that verifies and merges.
fn path_bytes_per_s(sizes: &[Value]) -> f64 {
    let parties = sizes.iter().filter_map(|size| size["parties"].as_array()).flatten();
    let ours = parties.filter(|party| {
        let name = party["party"].as_str().unwrap_or_default();
        name.starts_with("quic") && name != MESSAGE && !name.contains("unverified") && !name.contains("not merged")
    });
    ours.filter_map(|party| party["gb_per_s"].as_f64()).fold(0.0, f64::max) * 1e9
}

/// Shares by link and prompt.
pub(crate) fn of(overheads: Overheads, sizes: &[Value]) -> Value {
    let path = path_bytes_per_s(sizes);
    let mut rows = Vec::new();
    for gbit in [1.0, 10.0, 100.0] {
        for prompt in [512.0, 2048.0, 8192.0, 32768.0] {
            let bytes = prompt * TOKEN_BYTES;
            let link_s = bytes / (gbit * 1e9 / 8.0 * (1.0 - HEADERS / DATAGRAM));
            // One block for each layer, unmerged. Link, processors and transactions overlap.
            let transactions_s = prompt / BLOCK_TOKENS * LAYERS * overheads.transaction_s;
            let once_s = overheads.pull_s + ROUND_TRIPS_S;
            let prefill_s = 2.0 * WEIGHTS * prompt / PREFILL_FLOPS;
            let step_s = (2.0 * WEIGHTS + BATCH * (prompt + ANSWER / 2.0) * TOKEN_BYTES) / READ_BYTES_PER_S;
            let share = |transfer_s: f64| transfer_s / (prefill_s + transfer_s + ANSWER * step_s);
            let here_s = once_s + link_s.max(transactions_s).max(bytes / path);
            rows.push(
                json!({ "link_gbit_s": gbit, "prompt_tokens": prompt, "bytes": bytes, "prefill_ms": prefill_s * 1e3,
                "decode_ms": ANSWER * step_s * 1e3, "transfer_ms": here_s * 1e3, "share": share(here_s),
                "link_alone_share": share(once_s + link_s) }),
            );
        }
    }
    json!({ "what": "modelled: link, prefill, decode; measured: pull_us, transaction_us, path_gb_per_s",
        "pull_us": overheads.pull_s * 1e6, "transaction_us": overheads.transaction_s * 1e6, "path_gb_per_s": path / 1e9,
        "answer_tokens": ANSWER, "rows": rows })
}

pub(crate) fn print(share: &Value) {
    let number = |of: &Value, field: &str| of[field].as_f64().unwrap_or(f64::NAN);
    println!(
        "\nmodelled share of latency, 8B: pull {:.0} us, transaction {:.1} us, path {:.2} GB/s measured here",
        number(share, "pull_us"),
        number(share, "transaction_us"),
        number(share, "path_gb_per_s")
    );
    let columns = ["Gbit/s", "prompt", "prefill ms", "transfer ms", "decode ms", "share", "link alone"];
    println!("{}", columns.map(|c| format!("{c:>12}")).concat());
    for row in share["rows"].as_array().into_iter().flatten() {
        let whole = ["link_gbit_s", "prompt_tokens", "prefill_ms", "transfer_ms", "decode_ms"];
        let whole = whole.map(|field| format!("{:>12.0}", number(row, field))).concat();
        println!("{whole}{:>12.3}{:>12.3}", number(row, "share"), number(row, "link_alone_share"));
    }
}
