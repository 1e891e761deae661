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

/// Sections that run in seconds over the fake. Conformance has its own tests over it, the demo one below.
const SECTIONS: &str = "ceilings,goldens,tune,decode,prefill,paged,linear,vmm,steps,torch,wgpu,dist,sanitizer,llama";

fn command(environment: &[(&str, &Path)]) -> Command {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.arg("--goldens").arg(goldens).args(["--smoke", "--label", "a test"]);
    // What a test does not name is not taken: the fake driver does not serve NVIDIA's library.
    command.env("LAGOON_CUBLASLT", "none").envs(environment.iter().copied());
    command
}

fn check(environment: &[(&str, &Path)], more: &[&str]) -> Value {
    let output = command(environment).args(more).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["ok"].as_bool(), Some(output.status.success()));
    report
}

#[test]
fn the_check_runs_over_the_fake_driver() {
    let built = fake::build().and_then(|driver| Ok((driver, fake::build_blas()?, shim::library()?)));
    let (driver, blas, kernels) = match built {
        Ok(all) => all,
        Err(reason) => return fake::skip("the_check_runs_over_the_fake_driver", &reason),
    };
    let environment = [
        ("LD_LIBRARY_PATH", driver.parent().unwrap()),
        ("LAGOON_FAKE_KERNELS", kernels.as_path()),
        ("LAGOON_CUBLASLT", blas.as_path()),
    ];
    let report = check(&environment, &["--only", SECTIONS, "--limit-s", "1200"]);
    assert_eq!((&report["ok"], &report["release_errors"]), (&true.into(), &0.into()), "{report:#}");
    assert_eq!(report["measured_on_gpu"], false, "numbers of the fake are not a GPU's");
    assert!(report["device"]["linear_layers"].as_str().unwrap().starts_with("cuBLASLt"));
    let section = |name: &str| &report["sections"][name];
    for name in SECTIONS.split(',') {
        let state = section(name)["state"].as_str().unwrap();
        let optional = ["torch", "wgpu", "dist", "sanitizer", "llama"].contains(&name);
        assert!(state == "ok" || (optional && state == "absent"), "{name}: {}", section(name));
    }
    let models = section("goldens")["found"]["models"].as_object().unwrap();
    assert!(models.len() >= 20, "every model, in its own type and in f32: {models:?}");
    let steps = section("vmm")["found"]["decode_steps_of_figure_12"].as_array().unwrap();
    assert_eq!((steps.len(), &steps[0]["overlapped"], &steps[1]["overlapped"]), (2, &false.into(), &true.into()));
    assert!(steps[1]["stripes_mapped_ahead"].as_u64() > Some(0));
    assert!(section("vmm")["found"]["prefixes"][0]["mapped_us"].as_f64() > Some(0.0));
    assert!(section("vmm")["found"]["windows"]["rows"][1]["hash_gb_per_s"].as_f64() > Some(0.0));
    let steps = section("steps")["found"]["rows"].as_array().unwrap();
    assert!(steps.iter().all(|row| (row["replayed"].as_u64() > Some(0)) == (row["graphs"] == true)), "{steps:?}");
    assert!(section("steps")["found"]["prompts"][0]["ms"].as_f64() > Some(0.0));
    let text = report.to_string();
    for finding in ["copy_gb_per_s", "of_copy_bandwidth", "tflop_per_s", "cuMemUnmap_us", "of_roofline", "reused_us"] {
        assert!(text.contains(finding), "{finding}");
    }
    assert_eq!(report["targets"].as_array().unwrap().len(), 14);
}

/// Three instances over the fake: a prompt that none of them holds, answered as by one.
#[test]
fn the_demo_runs_over_the_fake_driver() {
    let built = fake::build().and_then(|driver| Ok((driver, shim::library()?)));
    let (driver, kernels) = match built {
        Ok(both) => both,
        Err(reason) => return fake::skip("the_demo_runs_over_the_fake_driver", &reason),
    };
    let environment = [("LD_LIBRARY_PATH", driver.parent().unwrap()), ("LAGOON_FAKE_KERNELS", kernels.as_path())];
    let lagoon = Path::new(env!("CARGO_BIN_EXE_gpu-check")).with_file_name("lagoon");
    assert!(lagoon.exists(), "the whole workspace's tests build {}", lagoon.display());
    let report = check(&environment, &["--only", "demo", "--lagoon", lagoon.to_str().unwrap()]);
    let demo = &report["sections"]["demo"];
    let found = &demo["found"]["report"];
    assert_eq!((&demo["state"], &found["ok"]), (&"ok".into(), &true.into()), "{report:#}");
    assert_eq!((&found["backend"], &found["tokens_equal"]), (&"cuda".into(), &true.into()), "{found}");
    assert!(found["remote_rblocks"].as_u64() > Some(0), "{found}");
}

#[test]
fn a_section_that_takes_too_long_is_killed_and_run_again_next_time() {
    let built = fake::build().and_then(|driver| Ok((driver, shim::library()?)));
    let (driver, kernels) = match built {
        Ok(both) => both,
        Err(reason) => return fake::skip("a_section_that_takes_too_long", &reason),
    };
    let environment = [("LD_LIBRARY_PATH", driver.parent().unwrap()), ("LAGOON_FAKE_KERNELS", kernels.as_path())];
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-{}.json", std::process::id()));
    let run = |more: &[&str]| {
        let output = command(&environment).arg("--out").arg(&out).args(more).output().unwrap();
        let report: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
        assert_eq!(report["ok"].as_bool(), Some(output.status.success()), "{report:#}");
        report
    };
    let report = run(&["--only", "llama,vmm", "--limit-s", "0"]);
    assert_eq!(report["sections"]["vmm"]["state"], "timed out");
    let report = run(&["--only", "llama,vmm"]);
    assert_eq!(report["sections"]["vmm"]["state"], "ok");
    assert_eq!(report["sections"]["llama"]["state"], "absent", "no model is named");
    // What is there stays, to the microsecond; what is asked for anew is made anew.
    let seconds = |report: &Value| report["sections"]["vmm"]["seconds"].as_f64().unwrap();
    assert_eq!(seconds(&run(&["--only", "vmm"])).to_bits(), seconds(&report).to_bits());
    assert_ne!(seconds(&run(&["--only", "vmm", "--fresh"])).to_bits(), seconds(&report).to_bits());
    std::fs::remove_file(&out).unwrap();
    // What a section has started is killed with it: here a python that says its number and sleeps.
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-tools-{}", std::process::id()));
    std::fs::create_dir_all(&tools).unwrap();
    let (python, number) = (tools.join("python3"), tools.join("number"));
    std::fs::write(&python, format!("#!/bin/sh\necho $$ > {}\nexec sleep 600\n", number.display())).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let environment = [environment[0], environment[1], ("PATH", Path::new(&path))];
    let report = check(&environment, &["--only", "torch", "--limit-s", "4"]);
    assert_eq!(report["sections"]["torch"]["state"], "timed out");
    let sleeper = std::fs::read_to_string(&number).unwrap();
    let gone = || !Path::new("/proc").join(sleeper.trim()).join("exe").exists();
    for _ in 0..500 {
        if gone() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(gone(), "{sleeper} runs on");
    std::fs::remove_dir_all(tools).unwrap();
    let output = command(&environment).args(["--only", "speed"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("no section speed"));
}

#[test]
fn without_a_driver_the_report_says_so() {
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&empty).unwrap();
    let report = check(&[("LD_LIBRARY_PATH", &empty)], &["--only", "vmm"]);
    let driver = report["driver"].as_str().unwrap();
    // A machine with a driver has another answer.
    assert!(driver.starts_with("no CUDA: ") || driver.starts_with("CUDA "), "{driver}");
    assert_eq!(report["sections"]["vmm"].is_null(), driver.starts_with("no CUDA: "));
}
