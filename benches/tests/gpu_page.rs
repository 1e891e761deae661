//! The GPU page from a made-up report: its numbers are no measurements, and it is written to the test's own folder.

#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_benches::gpu_page::{BEGIN, END, PageError, blank, page};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// The page as it is committed.
fn committed() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu.md")).unwrap()
}

fn made_up() -> Value {
    json!({
        "measured_on_gpu": true, "label": "made-up", "driver": "CUDA 0.0", "kernels": "made-up",
        "device": { "name": "Made-up device" },
        "sections": {
            "decode": { "state": "ok", "found": { "copy_gb_per_s": 9.0, "rows": [
                { "batch": 16, "context": 8192, "dtype": "bf16", "layers_per_group": 1, "gb_per_s": 7.0,
                    "of_copy_bandwidth": 0.8 },
                { "batch": 16, "context": 16384, "dtype": "bf16", "layers_per_group": 1, "gb_per_s": 8.0 }] } },
            "vmm": { "state": "ok", "found": {
                "calls": [{ "cuMemUnmap_us": 77.125, "paper_table_3_us": { "map": 2, "set_access": 38, "unmap": 34 } }],
                "decode_steps_of_figure_12": [
                    { "layers_per_group": 1, "overlapped": false, "each_step_us": [1.0, 900.0, 1.0] },
                    { "layers_per_group": 1, "overlapped": true, "each_step_us": [1.0, 1.0, 1.0] }] } },
            "steps": { "state": "ok", "found": { "rows": [
                { "batch": 1, "context": 512, "graphs": true, "no_dependent_launch": false, "step_us": 4000.0,
                    "roofline_us": 2800.0, "of_roofline": 0.7 },
                { "batch": 1, "context": 512, "graphs": true, "no_dependent_launch": true, "step_us": 4400.0,
                    "roofline_us": 2800.0, "of_roofline": 0.636 }] } },
            "torch": { "state": "absent", "found": { "absent": "python3 is not installed" } },
            "warpgroups": { "state": "failed", "found": { "rows": [
                { "tokens": 4096, "kernel": "wgmma", "ms": 1.0, "tflop_per_s": 470.0 },
                { "tokens": 16384, "kernel": "wgmma", "error": "CUDA_ERROR_LAUNCH_FAILED" }] } },
            "demo": { "state": "failed", "found": { "error": "it broke" } },
        },
    })
}

#[test]
fn a_report_fills_the_page() {
    let made = page(&committed(), &made_up()).unwrap();
    for text in [
        "Measured on Made-up device",
        "decode attention, batch 16, 8 Ki keys: share of copy bandwidth | 0.75 to 0.85 | 0.85 | 0.8 | no |",
        "prefill attention, 16 Ki tokens, wgmma: TFLOP/s | 400 to 580 |  |  |  |",
        "- `warpgroups`: failed\n  - `rows`: ",
        "error CUDA_ERROR_LAUNCH_FAILED",
        "the same: without dependent launches over with them, time | 1 to 1.15 |  | 1.1 |  |",
        "| batch | keys | graphs | no dependents | step, us | roofline, us | share |",
        "| 1 | 512 | yes | no | 4000 | 2800 | 0.7 |",
        "| 1 | 512 | yes | yes | 4400 | 2800 | 0.636 |",
        "| unmap | 77.125 | 34 |",
        "| map and set access | not measured | 40 |",
        "`torch`: absent: python3 is not installed",
        "`demo`: failed: it broke",
        "plots/gpu-memory.svg",
    ] {
        assert!(made.text.contains(text), "{text}");
    }
    assert_eq!(made.figures.len(), 3);
    assert!(made.figures.iter().all(|(_, svg)| svg.starts_with("<svg") && svg.contains("</svg>")));
    // Filling again replaces what was filled.
    assert_eq!(page(&made.text, &made_up()).unwrap().text, made.text);
}

#[test]
fn what_measures_nothing_fills_nothing() {
    let mut report = made_up();
    report["measured_on_gpu"] = json!(false);
    assert_eq!(page(&committed(), &report).unwrap_err(), PageError::NotMeasured);
    assert_eq!(page("no place", &made_up()).unwrap_err(), PageError::NoPlace);
    // An empty report gives a page that says so everywhere.
    let empty = page(&committed(), &json!({ "measured_on_gpu": true })).unwrap();
    assert!(empty.text.matches("Not in this report.").count() >= 8);
}

#[test]
fn the_program_writes_page_and_figures() {
    let docs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("made-up-docs");
    std::fs::create_dir_all(docs.join("plots")).unwrap();
    std::fs::write(docs.join("gpu.md"), format!("# Made up\n{BEGIN}\n{END}\nafter\n")).unwrap();
    std::fs::write(docs.join("report.json"), made_up().to_string()).unwrap();
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-page"));
        command.arg(docs.join("report.json")).arg("--docs").arg(&docs).output().unwrap()
    };
    let empty = Command::new(env!("CARGO_BIN_EXE_gpu-page")).arg("--docs").arg(&docs).output().unwrap();
    let text = std::fs::read_to_string(docs.join("gpu.md")).unwrap();
    assert!(
        empty.status.success()
            && text.contains("Nothing was measured")
            && text.contains("| 0.75 to 0.85 | 0.85 |  |  |")
    );
    assert!(run().status.success());
    let text = std::fs::read_to_string(docs.join("gpu.md")).unwrap();
    assert!(text.starts_with("# Made up\n") && text.ends_with("after\n") && text.contains("Made-up device"));
    assert!(std::fs::read_to_string(docs.join("plots/gpu-work.svg")).unwrap().starts_with("<svg"));
    std::fs::write(docs.join("report.json"), "{}").unwrap();
    let refused = run();
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("not measured on a GPU"));
}

/// Until a GPU's report is committed, the page has no number and says why.
#[test]
fn the_committed_page_has_numbers_only_with_a_report() {
    let text = committed();
    let (_, rest) = text.split_once(BEGIN).unwrap();
    let (middle, _) = rest.split_once(END).unwrap();
    let report = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/gpu-check.json");
    if report.exists() {
        let report = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
        assert_eq!(page(&text, &report).unwrap().text, text, "cargo xtask gpu-page");
    } else {
        assert!(middle.contains("Nothing was measured on a GPU yet") && !middle.contains("plots/gpu-"), "{middle}");
        assert_eq!(blank(&text).unwrap(), text, "cargo xtask gpu-page");
    }
}
