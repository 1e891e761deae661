//! External programs that the machine may have: nvidia-smi, torch, compute-sanitizer, llama.cpp. A missing one is
//! reported, with how to get it.

use crate::{Args, Out};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const TORCH_SDPA: &str = include_str!("../../../gpu/torch_sdpa.py");

/// A program's output, if it runs and succeeds.
fn output(program: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A program in the path, or in the usual folders of CUDA.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let usual = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"].map(PathBuf::from);
    let dirs = std::env::split_paths(&path).chain(home).chain(usual);
    dirs.map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Name, driver, clocks and power of the GPU, from nvidia-smi.
pub(crate) fn nvidia_smi() -> Option<String> {
    let fields =
        "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,ecc.mode.current";
    output(&find("nvidia-smi")?, &[fields, "--format=csv"])
}

/// A python with torch: the machine's, or one for which pip may install it now.
fn python_with_torch(args: &Args) -> anyhow::Result<Result<(PathBuf, Option<PathBuf>), String>> {
    let Some(python) = find("python3") else { return Ok(Err("python3 is not installed".to_owned())) };
    // Not imported: that takes a cold machine as long as all that is measured.
    let look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)";
    if output(&python, &["-c", look]).is_some() {
        return Ok(Ok((python, None)));
    }
    if !args.pip {
        return Ok(Err("python3 has no torch (--pip lets pip install it into a temporary folder)".to_owned()));
    }
    let folder = std::env::temp_dir().join(format!("gpu-check-torch-{}", std::process::id()));
    let status = Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"])
        .arg(&folder)
        .args(["torch", "numpy"])
        .stdin(Stdio::null())
        .status()
        .context("run pip")?;
    Ok(if status.success() {
        Ok((python, Some(folder)))
    } else {
        Err(format!("pip could not install torch: {status}"))
    })
}

pub(crate) fn torch(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let (python, folder) = match python_with_torch(args)? {
        Ok(found) => found,
        Err(reason) => return out.set("absent", reason),
    };
    let sizes = if args.smoke {
        json!({ "decode": [[2, 40]], "prefill": [64], "heads": 4, "kv_heads": 2, "head_dim": 64 })
    } else {
        json!({
            "decode": [[16, 8192], [16, 16384], [1, 65536], [1, 131_072]],
            "prefill": [4096, 16384, 65536],
            "heads": 32, "kv_heads": 8, "head_dim": 128,
        })
    };
    let mut command = Command::new(python);
    command.arg("-c").arg(TORCH_SDPA).arg(sizes.to_string());
    if let Some(folder) = &folder {
        command.env("PYTHONPATH", folder);
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("run python3")?;
    let lines = BufReader::new(child.stdout.take().context("python's output")?).lines();
    let mut done = false;
    for line in lines {
        let row: Value = serde_json::from_str(&line?).context("a line of torch_sdpa.py")?;
        if row["done"] == json!(true) {
            done = true;
        } else if row["torch"].is_string() {
            out.set("torch", row)?;
        } else {
            out.push("rows", row)?;
        }
    }
    let status = child.wait()?;
    if let Some(folder) = folder {
        // Leftovers in the temporary folder are harmless.
        let _gone = std::fs::remove_dir_all(folder);
    }
    ensure!(status.success() && done, "torch_sdpa.py: {status}");
    Ok(())
}

/// `llama-bench` from the path or [`LLAMA_BENCH`], or built from sources in [`LLAMA_CPP`].
fn llama_bench(out: &mut Out) -> anyhow::Result<Result<PathBuf, String>> {
    if let Some(program) = std::env::var_os(LLAMA_BENCH).map(PathBuf::from).or_else(|| find("llama-bench")) {
        return Ok(Ok(program));
    }
    let Some(sources) = std::env::var_os(LLAMA_CPP).map(PathBuf::from) else {
        return Ok(Err(format!("no llama-bench in PATH; {LLAMA_BENCH} names one, {LLAMA_CPP} its sources")));
    };
    if find("cmake").is_none() || find("nvcc").is_none() {
        return Ok(Err(format!("{LLAMA_CPP} is set, but cmake or nvcc is missing")));
    }
    let build = sources.join("build-gpu-check");
    let jobs = std::thread::available_parallelism().map_or(4, usize::from).to_string();
    let steps: [&[&str]; 2] = [
        &["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release"],
        &["--target", "llama-bench", "-j", &jobs],
    ];
    for (i, step) in steps.into_iter().enumerate() {
        let mut command = Command::new("cmake");
        match i {
            0 => command.arg("-S").arg(&sources).arg("-B").arg(&build),
            _ => command.arg("--build").arg(&build),
        };
        let status = command.args(step).stdin(Stdio::null()).stdout(Stdio::null()).status().context("run cmake")?;
        if !status.success() {
            return Ok(Err(format!("llama.cpp does not build here: {status}")));
        }
    }
    out.set("built", build.display().to_string())?;
    Ok(Ok(build.join("bin/llama-bench")))
}

const LLAMA_BENCH: &str = "LAGOON_LLAMA_BENCH";
const LLAMA_CPP: &str = "LAGOON_LLAMA_CPP";
const LLAMA_MODEL: &str = "LAGOON_LLAMA_MODEL";

/// Tokens per second of llama.cpp's decoding at batch 1, from an empty context as `llama-bench` does it.
pub(crate) fn llama(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(model) = std::env::var_os(LLAMA_MODEL).map(PathBuf::from) else {
        return out.set("absent", format!("{LLAMA_MODEL} names no GGUF file of Llama-3.1-8B's shape in bf16 or f16"));
    };
    let program = match llama_bench(out)? {
        Ok(program) => program,
        Err(reason) => return out.set("absent", reason),
    };
    let tokens = if args.smoke { "4" } else { "256" };
    let run = Command::new(program)
        .args(["-o", "json", "-p", "0", "-n", tokens, "-ngl", "99", "-fa", "1", "-r", "3", "-m"])
        .arg(model)
        .stdin(Stdio::null())
        .output()
        .context("run llama-bench")?;
    ensure!(run.status.success(), "llama-bench: {}", String::from_utf8_lossy(&run.stderr));
    let report: Value = serde_json::from_slice(&run.stdout).context("llama-bench's report")?;
    let speed = report[0]["avg_ts"].as_f64().context("llama-bench's avg_ts")?;
    out.set("report", report)?;
    out.set("tokens_per_s", speed)
}
