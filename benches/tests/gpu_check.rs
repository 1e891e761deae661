//! The check for GPU machines runs where there is none: over the fake driver and the host shim, with tiny sizes. The
//! golden models' logits then come from the CUDA backend's own kernels.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../cuda/tests/support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "only what builds it is used")]
mod fake;
#[path = "../../cuda/tests/support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "only what builds it is used")]
mod shim;

use serde_json::Value;
use std::path::Path;
use std::process::Command;

fn check(environment: &[(&str, &Path)], only: &str) -> Value {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.arg("--goldens").arg(goldens).args(["--small", "--only", only, "--label", "a test"]);
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["ok"].as_bool(), Some(output.status.success()));
    report
}

#[test]
fn the_check_runs_over_the_fake_driver() {
    let built = fake::build().and_then(|driver| Ok((driver, shim::library()?)));
    let (driver, kernels) = match built {
        Ok(both) => both,
        Err(reason) => return fake::skip("the_check_runs_over_the_fake_driver", &reason),
    };
    let folder = driver.parent().unwrap();
    let report = check(&[("LD_LIBRARY_PATH", folder), ("LAGOON_FAKE_KERNELS", &kernels)], "goldens,vmm,speed");
    assert_eq!(report["ok"], true, "{report:#}");
    assert_eq!(report["release_errors"], 0);
    let models = report["parts"]["goldens"]["found"]["models"].as_object().unwrap();
    assert!(models.len() >= 20, "every model, in its own type and in f32: {models:?}");
    let steps = report["parts"]["vmm"]["found"]["decode_steps_of_figure_12"].as_array().unwrap();
    assert_eq!((steps.len(), &steps[0]["overlapped"], &steps[1]["overlapped"]), (2, &false.into(), &true.into()));
    assert!(steps[1]["stripes_mapped_ahead"].as_u64() > Some(0));
    let text = report.to_string();
    for finding in ["copy_gb_per_s", "of_copy_bandwidth", "tflop_per_s", "cuMemUnmap_us"] {
        assert!(text.contains(finding), "{finding}");
    }
}

#[test]
fn without_a_driver_the_report_says_so() {
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&empty).unwrap();
    let report = check(&[("LD_LIBRARY_PATH", &empty)], "vmm");
    let driver = report["driver"].as_str().unwrap();
    // A machine with a driver has another answer.
    assert!(driver.starts_with("no CUDA: ") || driver.starts_with("CUDA "), "{driver}");
    assert_eq!(report["parts"].is_null(), driver.starts_with("no CUDA: "));
}
