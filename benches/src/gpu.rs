//! Targets of the project for a GPU, held against a report of `gpu-check`.

use serde_json::{Value, json};

/// The smallest number, if there are any.
fn least(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.min_by(f64::total_cmp)
}

/// The rows of a section's list.
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

/// A target: the expected range on an H200, the required value, and the found one.
///
/// `expected` is derived from the device's ceilings before any measurement; `at_least` is required. A target that was
/// not measured is neither met nor missed.
fn target(name: impl Into<String>, expected: [f64; 2], at_least: Option<f64>, found: Option<f64>) -> Value {
    let met = at_least.zip(found).map(|(wanted, found)| found >= wanted);
    json!({ "name": name.into(), "expected": expected, "at_least": at_least, "found": found, "met": met })
}

/// A number of the first row of a list that has all fields of `of`.
fn number_of(report: &Value, section: &str, list: &str, of: &Value, key: &str) -> Option<f64> {
    let fields = of.as_object()?;
    let is = |row: &&Value| fields.iter().all(|(name, value)| row[name] == *value);
    rows(report, section, list).find(is).and_then(|row| number(row, key))
}

fn ceilings(report: &Value, out: &mut Vec<Value>) {
    let found = &report["sections"]["ceilings"]["found"];
    out.push(target("copy within the device, GB/s", [4000.0, 4500.0], None, found["copy_gb_per_s"].as_f64()));
    for (kind, expected) in [("cuBLASLt", [700.0, 800.0]), ("own kernels", [200.0, 350.0])] {
        let tflop = number_of(report, "ceilings", "products", &json!({ "kind": kind }), "tflop_per_s");
        out.push(target(format!("product of 8192, bf16, {kind}: TFLOP/s"), expected, None, tflop));
    }
}

fn attention(report: &Value, out: &mut Vec<Value>) {
    for (batch, context, expected) in [
        (16, 8 << 10, [0.75, 0.85]),
        (16, 16 << 10, [0.75, 0.85]),
        (1, 64 << 10, [0.65, 0.8]),
        (1, 128 << 10, [0.7, 0.85]),
    ] {
        let row = json!({ "batch": batch, "context": context, "dtype": "bf16", "layers_per_group": 1 });
        let of = |key: &str| number_of(report, "decode", "rows", &row, key);
        let name = format!("decode attention, batch {batch}, {} Ki keys", context >> 10);
        out.push(target(format!("{name}: share of copy bandwidth"), expected, Some(0.85), of("of_copy_bandwidth")));
        let ratio = torch_best(report, "decode", batch, context).zip(of("us")).map(|(torch, own)| torch / own);
        out.push(target(format!("{name}: times torch's best"), [1.0, 2.0], Some(1.0), ratio));
    }
    let kernels = [
        ("prefill", "fast", [200.0, 330.0]),
        ("prefill", "exact", [100.0, 170.0]),
        ("warpgroups", "wgmma", [400.0, 580.0]),
    ];
    for (section, kernel, expected) in kernels {
        let row = json!({ "tokens": 16 << 10, "kernel": kernel });
        let tflop = number_of(report, section, "rows", &row, "tflop_per_s");
        out.push(target(format!("prefill attention, 16 Ki tokens, {kernel}: TFLOP/s"), expected, None, tflop));
    }
    for tokens in [4u64 << 10, 16 << 10, 64 << 10] {
        let of = |row: &&Value| row["tokens"] == json!(tokens);
        let all = rows(report, "prefill", "rows").chain(rows(report, "warpgroups", "rows"));
        let own = least(all.filter(of).filter_map(|row| number(row, "ms")));
        let ratio = torch_best(report, "prefill", 1, tokens).zip(own).map(|(torch, own)| torch / 1e3 / own);
        let name = format!("prefill attention, {} Ki tokens, bf16, head size 128: times torch's best", tokens >> 10);
        out.push(target(name, [0.7, 1.0], Some(1.0), ratio));
    }
}

fn work(report: &Value, out: &mut Vec<Value>) {
    for (rows, expected) in [(1, [0.7, 0.9]), (16, [0.65, 0.85])] {
        let row = json!({ "kind": "own kernels", "exact": false, "rows": rows });
        let share = number_of(report, "linear", "rows", &row, "weight_bytes_of_copy_bandwidth");
        out.push(target(
            format!("linear layer 4096 to 14336, batch {rows}: share of copy bandwidth"),
            expected,
            None,
            share,
        ));
    }
    let step_of = |no_dependent_launch: bool, graphs: bool, key: &str| {
        let row = json!({ "batch": 1, "context": 512, "graphs": graphs, "no_dependent_launch": no_dependent_launch });
        number_of(report, "steps", "rows", &row, key)
    };
    let step = |graphs: bool, key: &str| step_of(false, graphs, key);
    let share = step(true, "of_roofline");
    out.push(target("decoding at Llama-3.1-8B's shape, batch 1: share of the roofline", [0.6, 0.7], Some(0.75), share));
    let ratio = step(false, "step_us").zip(step(true, "step_us")).map(|(single, graph)| single / graph);
    out.push(target("the same: single launches over graphs, time", [1.0, 1.3], None, ratio));
    let ratio = step_of(true, true, "step_us").zip(step(true, "step_us")).map(|(without, with)| without / with);
    out.push(target("the same: without dependent launches over with them, time", [1.0, 1.15], None, ratio));
    let llama = report["sections"]["llama"]["found"]["tokens_per_s"].as_f64();
    let ratio = llama.zip(step(true, "tokens_per_s")).map(|(llama, own)| own / llama);
    out.push(target("the same: times llama.cpp's CUDA build", [0.9, 1.2], Some(1.2), ratio));
    let spikes = |overlapped: bool| {
        let row = json!({ "overlapped": overlapped, "layers_per_group": 1 });
        let of = |r: &&Value| ["overlapped", "layers_per_group"].iter().all(|key| r[*key] == row[*key]);
        rows(report, "vmm", "decode_steps_of_figure_12").find(of).and_then(|row| number(&row["step_us"], "max"))
    };
    let ratio = spikes(false).zip(spikes(true)).map(|(waiting, overlapped)| waiting / overlapped.max(1e-9));
    out.push(target("mapping: longest wait of a step, waiting over overlapped", [2.0, 20.0], Some(2.0), ratio));
}

/// The targets of the project for an H200, each with the report's value. A target holds on that device only; the
/// report names its device.
#[must_use]
pub fn targets(report: &Value) -> Vec<Value> {
    let mut out = Vec::new();
    ceilings(report, &mut out);
    attention(report, &mut out);
    work(report, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_neither_met_nor_missed() {
        let all = targets(&json!({ "sections": {} }));
        assert_eq!(all.len(), 24);
        assert!(all.iter().all(|t| t["met"].is_null() && t["found"].is_null()));
        let ranges = all.iter().map(|t| [&t["expected"][0], &t["expected"][1]].map(|x| x.as_f64().unwrap()));
        assert!(ranges.into_iter().all(|[from, to]| 0.0 < from && from < to));
    }

    #[test]
    fn targets_are_read_from_their_sections() {
        let decode = json!({ "batch": 16, "context": 8192, "dtype": "bf16", "layers_per_group": 1, "us": 100.0,
            "of_copy_bandwidth": 0.9 });
        let torch = |us: f64| json!({ "kind": "decode", "batch": 16, "keys": 8192, "us": us });
        let step = |no_dependent_launch: bool, us: f64| {
            json!({ "batch": 1, "context": 512, "graphs": true, "no_dependent_launch": no_dependent_launch,
                "step_us": us, "of_roofline": 2800.0 / us, "tokens_per_s": 5.2e5 / us })
        };
        let report = json!({ "sections": {
            "decode": { "found": { "rows": [decode] } },
            "torch": { "found": { "rows": [torch(150.0), torch(90.0), { "kind": "decode", "batch": 16, "keys": 8192,
                "unsupported": "none" }] } },
            "steps": { "found": { "rows": [step(true, 4400.0), step(false, 4000.0)] } },
            "prefill": { "found": { "rows": [{ "tokens": 16384, "kernel": "fast", "error": "it trapped" }] } },
            "warpgroups": { "found": { "rows": [{ "tokens": 16384, "kernel": "wgmma", "tflop_per_s": 450.0 }] } },
            "llama": { "found": { "tokens_per_s": 100.0 } },
        } });
        let all = targets(&report);
        let of = |text: &str| all.iter().find(|t| t["name"].as_str().unwrap().contains(text)).unwrap();
        assert_eq!(of("16, 8 Ki keys: share")["met"], json!(true));
        assert_eq!(
            (&of("16, 8 Ki keys: times")["found"], &of("16, 8 Ki keys: times")["met"]),
            (&json!(0.9), &json!(false))
        );
        assert_eq!(of("16 Ki tokens, fast")["found"], Value::Null);
        assert_eq!(of("16 Ki tokens, wgmma")["found"], json!(450.0));
        assert_eq!((&of("roofline")["found"], &of("roofline")["met"]), (&json!(0.7), &json!(false)));
        assert_eq!(of("without dependent")["found"], json!(1.1));
        assert_eq!(of("llama.cpp")["met"], json!(true));
    }
}
