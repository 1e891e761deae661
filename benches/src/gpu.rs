//! The report of `gpu-check`: what the project wants of a GPU, and how far a report shows it.

use serde_json::{Value, json};

/// The best of some numbers, if there are any.
fn least(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.min_by(f64::total_cmp)
}

/// What a section found, in a list.
fn rows<'a>(report: &'a Value, section: &str, list: &str) -> impl Iterator<Item = &'a Value> {
    report["sections"][section]["found"][list].as_array().into_iter().flatten()
}

fn number(row: &Value, key: &str) -> Option<f64> {
    row[key].as_f64()
}

/// The fastest of torch's backends for these sizes, in microseconds.
#[must_use]
pub fn torch_best(report: &Value, kind: &str, batch: u64, keys: u64) -> Option<f64> {
    let of = |row: &&Value| row["kind"] == json!(kind) && row["batch"] == json!(batch) && row["keys"] == json!(keys);
    least(rows(report, "torch", "rows").filter(of).filter_map(|row| number(row, "us")))
}

fn target(name: String, wanted: f64, found: Option<f64>) -> Value {
    // What was not measured is neither met nor missed.
    let met = found.map(|found| found >= wanted);
    json!({ "name": name, "at_least": wanted, "found": found, "met": met })
}

/// The targets of the project for an H200, each with what the report has. A target holds on that device only; the report says
/// which it is of.
#[must_use]
pub fn targets(report: &Value) -> Vec<Value> {
    let mut out = Vec::new();
    let decode = |batch: u64, context: u64, key: &str| {
        let of = |row: &&Value| {
            row["batch"] == json!(batch) && row["context"] == json!(context) && row["dtype"] == json!("bf16")
        };
        let plain = |row: &&Value| row["layers_per_group"] == json!(1);
        rows(report, "decode", "rows").find(|row| of(row) && plain(row)).and_then(|row| number(row, key))
    };
    for (batch, context) in [(16, 8 << 10), (16, 16 << 10), (1, 64 << 10), (1, 128 << 10)] {
        let name = format!("decode attention, batch {batch}, {} Ki keys: share of copy bandwidth", context >> 10);
        out.push(target(name, 0.85, decode(batch, context, "of_copy_bandwidth")));
        let ratio = torch_best(report, "decode", batch, context).zip(decode(batch, context, "us"));
        let name = format!("decode attention, batch {batch}, {} Ki keys: times torch's best", context >> 10);
        out.push(target(name, 1.0, ratio.map(|(torch, own)| torch / own)));
    }
    for tokens in [4u64 << 10, 16 << 10, 64 << 10] {
        let of = |row: &&Value| row["tokens"] == json!(tokens);
        let own = least(rows(report, "prefill", "rows").filter(of).filter_map(|row| number(row, "ms")));
        let ratio = torch_best(report, "prefill", 1, tokens).zip(own);
        let name = format!("prefill attention, {} Ki tokens, bf16, head size 128: times torch's best", tokens >> 10);
        out.push(target(name, 1.0, ratio.map(|(torch, own)| torch / 1e3 / own)));
    }
    let step = rows(report, "steps", "rows").find(|row| row["batch"] == json!(1) && row["graphs"] == json!(true));
    let share = step.and_then(|row| number(row, "of_roofline"));
    out.push(target("decoding at Llama-3.1-8B's shape, batch 1: share of the roofline".to_owned(), 0.75, share));
    let llama = report["sections"]["llama"]["found"]["tokens_per_s"].as_f64();
    let ratio = llama.zip(step.and_then(|row| number(row, "tokens_per_s"))).map(|(llama, own)| own / llama);
    out.push(target("the same: times llama.cpp's CUDA build".to_owned(), 1.2, ratio));
    let spikes = |overlapped: bool| {
        let of = |row: &&Value| row["overlapped"] == json!(overlapped) && row["layers_per_group"] == json!(1);
        rows(report, "vmm", "decode_steps_of_figure_12").find(of).and_then(|row| number(&row["step_us"], "max"))
    };
    let ratio = spikes(false).zip(spikes(true)).map(|(waiting, overlapped)| waiting / overlapped.max(1e-9));
    out.push(target("mapping: longest wait of a step, waiting over overlapped".to_owned(), 2.0, ratio));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_neither_met_nor_missed() {
        let all = targets(&json!({ "sections": {} }));
        assert_eq!(all.len(), 14);
        assert!(all.iter().all(|t| t["met"].is_null() && t["found"].is_null()));
    }

    #[test]
    fn targets_are_read_from_their_sections() {
        let decode = json!({ "batch": 16, "context": 8192, "dtype": "bf16", "layers_per_group": 1, "us": 100.0,
            "of_copy_bandwidth": 0.9 });
        let torch = |us: f64| json!({ "kind": "decode", "batch": 16, "keys": 8192, "us": us });
        let report = json!({ "sections": {
            "decode": { "found": { "rows": [decode] } },
            "torch": { "found": { "rows": [torch(150.0), torch(90.0), { "kind": "decode", "batch": 16, "keys": 8192,
                "error": "none" }] } },
            "steps": { "found": { "rows": [{ "batch": 1, "graphs": true, "of_roofline": 0.7, "tokens_per_s": 130.0 }] } },
            "llama": { "found": { "tokens_per_s": 100.0 } },
        } });
        let all = targets(&report);
        let of = |text: &str| all.iter().find(|t| t["name"].as_str().unwrap().contains(text)).unwrap();
        assert_eq!(of("16, 8 Ki keys: share")["met"], json!(true));
        assert_eq!(
            (&of("16, 8 Ki keys: times")["found"], &of("16, 8 Ki keys: times")["met"]),
            (&json!(0.9), &json!(false))
        );
        assert_eq!(of("roofline")["met"], json!(false));
        assert_eq!(of("llama.cpp")["met"], json!(true));
    }
}
