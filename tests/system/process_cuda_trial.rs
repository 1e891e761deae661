//! Trials of warpgroup kernels by the real binary over the fake driver: a trap costs a child process, is remembered,
//! and the server goes on; `lagoon doctor` reports the trial, and cuBLASLt in a Python wheel.

use crate::cuda::{fake, shim};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Server, lagoon, logits, token_ids};
use lagoon_types::DType;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// An environment with the fake driver, capability 9.0 and a cache of its own, and the arguments of a server.
pub(crate) struct Machine {
    pub(crate) variables: Vec<(&'static str, OsString)>,
    cache: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn new(name: &str) -> Option<Self> {
        let libraries = shim::library().and_then(|kernels| Ok((kernels, fake::build()?)));
        let (kernels, driver) = libraries.map_err(|reason| lagoon_tests::skip(name, &reason)).ok()?;
        let cache = tempfile::tempdir().unwrap();
        let variables = vec![
            ("LD_LIBRARY_PATH", driver.parent().unwrap().into()),
            ("LAGOON_FAKE_KERNELS", kernels.into()),
            ("LAGOON_FAKE_PAGE", "4096".into()),
            ("LAGOON_FAKE_CAPABILITY", "9.0".into()),
            ("LAGOON_CUDA_TRIAL_TOKENS", "64".into()),
            ("LAGOON_LOG", "warn,lagoon::cuda_tuning=info".into()),
            ("XDG_CACHE_HOME", cache.path().into()),
            // Python packages of this machine are ignored.
            ("VIRTUAL_ENV", "".into()),
            ("CONDA_PREFIX", "".into()),
        ];
        Some(Self { variables, cache })
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// Serves two tokens with these flags; returns the log.
    fn serve(&self, flags: &[&str]) -> String {
        // f16 and heads of 64, which warpgroup kernels support.
        let model = lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned();
        let fixed =
            ["--backend=cuda", "--http=127.0.0.1:0", "--block-tokens=32", "--kv-tokens=256", "--step-tokens=32"];
        let variables: Vec<_> = self.variables.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let server = Server::start_with(&[&["serve", &model], &fixed[..], flags].concat(), &variables);
        let answer = server.client().complete(&[7; 20], 2, &json!({ "ignore_eos": true })).json();
        assert_eq!(token_ids(&answer).len(), 2, "{answer}");
        server.stop().stderr
    }

    /// The one cached tuning.
    fn remembered(&self) -> (PathBuf, Value) {
        let files = std::fs::read_dir(self.cache.path().join("lagoon/cuda-tuning")).unwrap();
        let files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        let [file] = &files[..] else { panic!("{files:?}") };
        (file.clone(), serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap())
    }

    /// `lagoon doctor`'s checks of this name.
    fn doctor(&self, name: &str) -> Vec<Value> {
        let mut command = lagoon(&["doctor", "--json"]);
        let output = command.env_remove("LAGOON_CUBLASLT").envs(self.variables.iter().cloned()).output().unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        found["checks"].as_array().unwrap().iter().filter(|check| check["name"] == name).cloned().collect()
    }
}

#[test]
fn a_trap_in_the_trial_costs_a_child_and_is_remembered() {
    let Some(machine) = Machine::new("a_trap_in_the_trial_costs_a_child_and_is_remembered") else { return };
    let machine = machine.with("LAGOON_FAKE_TRAP", "wgmma");
    let log = machine.serve(&[]);
    let (file, kept) = machine.remembered();
    assert_eq!(kept["warpgroups"]["outcome"], "failed", "{kept}");
    assert!(kept["warpgroups"]["finding"].as_str().unwrap().contains("LAUNCH_FAILED"), "{kept}");
    assert!(kept["decode"].is_string(), "decode was tuned before: {kept}");
    assert!(log.contains("failed its trial") && log.contains(file.to_str().unwrap()), "{log}");
    let reported = machine.doctor("cuda-trial");
    assert!(
        reported.len() == 1
            && reported[0]["ok"] == false
            && reported[0]["finding"].to_string().contains("LAUNCH_FAILED"),
        "{reported:?}"
    );

    // No second trial: without the trap its result would differ.
    let mut machine = machine;
    machine.variables.retain(|(name, _)| *name != "LAGOON_FAKE_TRAP");
    let log = machine.serve(&[]);
    assert!(!log.contains("tuned attention") && !log.contains("trial"), "{log}");
    assert_eq!(machine.remembered().1, kept);
    // A damaged file is measured anew, and so is everything on request.
    let again = |machine: &Machine, flags: &[&str]| {
        let log = machine.serve(flags);
        assert!(log.contains("tuned attention"), "{log}");
        // The fake's clock counts launches: neither kernel is faster.
        assert_eq!(machine.remembered().1["warpgroups"]["outcome"], "slower");
    };
    std::fs::write(&file, "{").unwrap();
    again(&machine, &[]);
    std::fs::write(&file, kept.to_string()).unwrap();
    again(&machine, &["--calibrate=always"]);
}

/// A GGUF file's weights stay packed, but for those in formats that no backend computes with, and logits are those of its weights.
#[test]
fn a_packed_file_is_served_as_it_is() {
    let Some(machine) = Machine::new("a_packed_file_is_served_as_it_is") else { return };
    let goldens = lagoon_tests::root().join("tests/goldens/gguf");
    let cases: Value = serde_json::from_slice(&std::fs::read(goldens.join("goldens.json")).unwrap()).unwrap();
    let case = cases.as_array().unwrap().iter().find(|case| case["file"] == "qwen2-q4_k.gguf").unwrap();
    let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
    let mut expected = Vec::new();
    DType::F32.decode(&std::fs::read(goldens.join("qwen2-q4_k.logits")).unwrap(), &mut expected);
    let model = goldens.join("qwen2-q4_k.gguf").to_string_lossy().into_owned();
    let flags = ["--backend=cuda", "--http=127.0.0.1:0", "--block-tokens=32", "--kv-tokens=256", "--kv-dtype=f32"];
    let variables: Vec<_> = machine.variables.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    let server = Server::start_with(
        &[&["serve", &model], &flags[..], &["--calibrate=off", "--expose-logits"]].concat(),
        &variables,
    );
    let answer = server.client().complete(&tokens, 1, &json!({ "return_logits": true })).json();
    let found = &logits(&answer)[0];
    let diff = max_diff(found, &expected[expected.len() - found.len()..]);
    println!("largest difference {diff:e}");
    // Prompts are multiplied in f16: 11 bits of activations and of weights, at a deviation of one.
    assert!(diff < 2e-2, "{diff}");
    // Some of its matrices are in Q5_0, which no backend computes with; the others stay as they are.
    let log = server.stop().stderr;
    assert!(log.contains("weights in Q5_0 are converted") && !log.contains("Q4_K"), "{log}");
}

/// Warpgroup kernels take rounded activations only, so exact precision has no trial.
#[test]
fn exact_precision_makes_no_trial() {
    let Some(machine) = Machine::new("exact_precision_makes_no_trial") else { return };
    let machine = machine.with("LAGOON_FAKE_TRAP", "wgmma");
    let log = machine.serve(&["--cuda-precision=exact"]);
    let (_, kept) = machine.remembered();
    assert!(kept["warpgroups"].is_null() && kept["decode"].is_string(), "{kept}");
    assert!(!log.contains("failed"), "{log}");
}

/// cuBLASLt is found in PyTorch's wheels: in the active environment, or in the folders of `python3`, which may hang.
#[test]
fn cublaslt_is_found_in_wheels() {
    let Some(machine) = Machine::new("cublaslt_is_found_in_wheels") else { return };
    let blas = fake::build_blas().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let site = folder.path().join("lib/python3.12/site-packages");
    let file = site.join("nvidia/cublas/lib/libcublasLt.so.12");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::copy(blas, &file).unwrap();
    let python = |script: String| {
        let path = folder.path().join("python3");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    let linear = |machine: &Machine| machine.doctor("cuda")[0]["finding"].as_str().unwrap().to_owned();
    let found = |finding: String| assert!(finding.contains(file.to_str().unwrap()), "{finding}");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let machine = machine.with("PATH", path);
    python(format!("echo {}", site.display()));
    found(linear(&machine));
    python("exec sleep 100".to_owned());
    assert!(linear(&machine).contains("own kernels (libcublasLt.so (13 or 12) is not installed)"));
    let machine = machine.with("VIRTUAL_ENV", Path::new(folder.path()));
    found(linear(&machine));
    // A file given by the environment takes precedence.
    let machine = machine.with("LAGOON_CUBLASLT", "none");
    assert!(linear(&machine).contains("own kernels (LAGOON_CUBLASLT=none)"));
}
