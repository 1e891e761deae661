//! gpu-check without a GPU: over the fake driver and the host shim, with tiny sizes. These tests inject faults;
//! `cargo xtask gpu-rehearse` tests that every section runs.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../cuda/tests/support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "only what builds it is used")]
mod fake;
#[path = "../../cuda/tests/support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "only what builds it is used")]
mod shim;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Replacements for a GPU machine's driver, cuBLASLt and kernel code.
fn fakes() -> Result<[PathBuf; 3], String> {
    Ok([fake::build()?, fake::build_blas()?, shim::library()?])
}

/// An own folder for the test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The check over the fakes, with its reports in a folder.
struct Check {
    folder: PathBuf,
    environment: Vec<(&'static str, PathBuf)>,
}

impl Check {
    fn new(name: &str) -> Result<Self, String> {
        let [driver, blas, kernels] = fakes()?;
        let library = driver.parent().unwrap().to_path_buf();
        let environment =
            vec![("LD_LIBRARY_PATH", library), ("LAGOON_FAKE_KERNELS", kernels), ("LAGOON_CUBLASLT", blas)];
        Ok(Self { folder: folder(name), environment })
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    fn command(&self) -> Command {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
        command.arg("--goldens").arg(goldens).args(["--smoke", "--label", "a test"]).current_dir(&self.folder);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The report after a run.
    fn run(&self, more: &[&str]) -> Value {
        let output = self.command().args(more).output().unwrap();
        let text = std::fs::read(self.folder.join("report.json"));
        let text = text.unwrap_or_else(|_| panic!("no report: {}", String::from_utf8_lossy(&output.stderr)));
        let report: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(report["ok"].as_bool(), Some(output.status.success()), "{report:#}");
        report
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            std::fs::remove_dir_all(&self.folder).unwrap();
        }
    }
}

macro_rules! check_or_skip {
    ($name:literal) => {
        match Check::new($name) {
            Ok(check) => check,
            Err(reason) => return fake::skip($name, &reason),
        }
    };
}

/// The failed rows of all lists of a section, and the number of good ones.
fn failed(report: &Value, section: &str) -> (Vec<Value>, usize) {
    let lists = report["sections"][section]["found"].as_object().into_iter().flatten();
    let rows: Vec<Value> = lists.filter_map(|(_, list)| list.as_array()).flatten().cloned().collect();
    let (bad, good): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row["error"].is_string());
    (bad, good.len())
}

/// Builds the fakes for `cargo xtask gpu-rehearse`, which reads their paths from a file.
#[test]
fn the_fakes_are_built() {
    match fakes() {
        Ok(all) => {
            let lines: Vec<String> = all.iter().map(|path| path.display().to_string() + "\n").collect();
            let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-check-fakes");
            // Whole at any time: a rehearsal may read it.
            let new = list.with_extension(std::process::id().to_string());
            std::fs::write(&new, lines.concat()).unwrap();
            std::fs::rename(new, list).unwrap();
        }
        Err(reason) => fake::skip("the_fakes_are_built", &reason),
    }
}

/// Warpgroup kernels that trap, as on a first GPU: each costs its own row and no other.
#[test]
fn a_kernel_that_traps_costs_its_rows() {
    let check =
        check_or_skip!("traps").with("LAGOON_FAKE_CAPABILITY", "9.0").with("LAGOON_FAKE_TRAP", "attention_wgmma");
    let others = "tune,decode,steps,prefill,paged,linear";
    let report = check.run(&["--only", &format!("{others},warpgroup_trial,warpgroups"), "--limit-s", "1200"]);
    for section in others.split(',') {
        assert_eq!(report["sections"][section]["state"], "ok", "{section}: {report:#}");
        assert!(failed(&report, section).1 > 0, "{section} has no rows");
    }
    for (section, rows) in [("warpgroup_trial", 4), ("warpgroups", 1)] {
        let (bad, good) = failed(&report, section);
        assert_eq!(report["sections"][section]["state"], "failed", "{report:#}");
        assert!(bad.len() >= rows, "{section}: {bad:?}, {good} good");
        assert!(bad.iter().all(|row| row["error"].as_str().unwrap().contains("CUDA_ERROR_LAUNCH_FAILED")), "{bad:?}");
        // A process for each row that broke, and one for the rest.
        assert_eq!(report["sections"][section]["processes"], json!(bad.len() + 1), "{section}");
    }
    assert_eq!(report["ok"], false);
}

/// A kernel that traps costs the cases of the suite that launch it, and no others. Some cases stand for all.
#[test]
fn a_kernel_that_traps_costs_its_cases() {
    let check = check_or_skip!("trapping-cases").with("LAGOON_FAKE_TRAP", "sink");
    let some = "sink,merge_counts,gather,rope_append_then";
    let report = check.run(&["--only", "conformance", "--case", some, "--limit-s", "1200"]);
    let (bad, good) = failed(&report, "conformance");
    let cases: BTreeSet<&str> = bad.iter().filter_map(|row| row["case"].as_str()).collect();
    assert_eq!(cases, BTreeSet::from(["sink_joins_the_softmax"]), "{bad:?}");
    assert_eq!(good, 3 * 5, "each of the others in each kind of tuning");
}

#[test]
fn a_section_that_takes_too_long_is_killed_and_run_again_next_time() {
    let check = check_or_skip!("too-long");
    let report = check.run(&["--only", "llama,vmm", "--limit-s", "0"]);
    assert_eq!(report["sections"]["vmm"]["state"], "timed out");
    let report = check.run(&["--only", "llama,vmm"]);
    assert_eq!(report["sections"]["vmm"]["state"], "ok", "{report:#}");
    assert_eq!(report["sections"]["llama"]["state"], "absent", "no model is named");
    // Kept sections keep their times to the microsecond; only selected ones are measured anew.
    let seconds = |report: &Value| report["sections"]["vmm"]["seconds"].as_f64().unwrap();
    assert_eq!(seconds(&check.run(&["--only", "vmm"])).to_bits(), seconds(&report).to_bits());
    let again = check.run(&["--only", "vmm", "--fresh"]);
    assert_ne!(seconds(&again).to_bits(), seconds(&report).to_bits());
    assert_eq!(again["sections"]["llama"], report["sections"]["llama"]);
    // A section that was cut short continues behind its rows, and repeats failed ones.
    let mut cut = report.clone();
    cut["sections"]["vmm"]["state"] = json!("running");
    cut["sections"]["vmm"]["found"]["allocation"][1] = json!({ "pages": 4, "error": "killed" });
    std::fs::write(check.folder.join("cut.json"), cut.to_string()).unwrap();
    let went_on = check.run(&["--only", "vmm", "--from", "cut.json"]);
    let found = |report: &Value, at: &str| report["sections"]["vmm"]["found"].pointer(at).unwrap().clone();
    assert_eq!(found(&went_on, "/calls"), found(&report, "/calls"));
    assert_eq!(found(&went_on, "/allocation/0"), found(&report, "/allocation/0"));
    let measured_again = found(&went_on, "/allocation/2");
    assert!(measured_again["pages"] == 4 && measured_again["gb_per_s"].as_f64() > Some(0.0), "{measured_again}");
    let output = check.command().args(["--only", "speed"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("no section speed"));
    let output = check.command().args(["--part", "4"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("there are parts 1 to 3"));
}

/// Children of a section are killed with it: here a python that prints its process id and sleeps.
#[test]
fn what_a_section_has_started_ends_with_it() {
    let check = check_or_skip!("children");
    let python = check.folder.join("python3");
    let number = check.folder.join("number");
    std::fs::write(&python, format!("#!/bin/sh\necho $$ > {}\nexec sleep 600\n", number.display())).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", check.folder.display(), std::env::var("PATH").unwrap());
    let check = check.with("PATH", &path);
    let report = check.run(&["--only", "torch", "--limit-s", "4"]);
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
}

/// A driver whose first call ends the process: the report is written all the same, with what an earlier command found.
#[test]
fn a_driver_that_crashes_costs_no_report() {
    let check = Check { folder: folder("crashes"), environment: Vec::new() };
    let (source, library) = (check.folder.join("crash.c"), check.folder.join("libcuda.so.1"));
    std::fs::write(&source, "#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }\n")
        .unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    if !built.is_ok_and(|status| status.success()) {
        return fake::skip("a_driver_that_crashes_costs_no_report", "no C compiler");
    }
    std::fs::copy(&library, check.folder.join("libcuda.so")).unwrap();
    let measured = json!({ "state": "ok", "found": { "rows": [{ "n": 1 }] } });
    let earlier = json!({ "smoke": true, "driver": "CUDA 13.0", "sections": { "linear": measured } });
    std::fs::write(check.folder.join("earlier.json"), earlier.to_string()).unwrap();
    let library = check.folder.to_str().unwrap().to_owned();
    let check = check.with("LD_LIBRARY_PATH", &library);
    let report = check.run(&["--only", "vmm", "--from", "earlier.json"]);
    assert!(report["head_error"].as_str().unwrap().contains("signal"), "{report:#}");
    assert_eq!(report["sections"]["linear"], measured, "{report:#}");
    assert_eq!(report["sections"]["vmm"]["state"], "failed", "{report:#}");
}

#[test]
fn without_a_driver_the_report_says_so() {
    let check = Check { folder: folder("no-driver"), environment: Vec::new() };
    let empty = check.folder.join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let check = check.with("LD_LIBRARY_PATH", empty.to_str().unwrap());
    let report = check.run(&["--only", "vmm"]);
    let driver = report["driver"].as_str().unwrap();
    // A machine with a driver has another message.
    assert!(driver.starts_with("no CUDA: ") || driver.starts_with("CUDA "), "{driver}");
    assert_eq!(report["sections"]["vmm"].is_null(), driver.starts_with("no CUDA: "));
}
