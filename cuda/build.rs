//! Brings the kernels' fatbin to `OUT_DIR/kernels.fatbin`: compiled by nvcc where it is found, else the committed one.
//!
//! nvcc is looked for in `LAGOON_NVCC`, then in `CUDA_HOME/bin`, then in `PATH`; `LAGOON_NVCC=none` takes the committed
//! fatbin. Where a compiler fails, the committed fatbin is taken with a warning. The crate says which it has
//! (`kernels::FATBIN_SOURCE`).
#![allow(clippy::print_stdout, reason = "a build script talks to cargo by printing")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    for name in ["LAGOON_NVCC", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let kernels = Path::new("kernels");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("kernels.fatbin");
    let source = nvcc().and_then(|nvcc| compile(&nvcc, kernels, &out)).unwrap_or_else(|| {
        std::fs::copy(kernels.join("kernels.fatbin"), &out).expect("the committed fatbin can be copied");
        "committed".to_owned()
    });
    println!("cargo:rustc-env=LAGOON_FATBIN_SOURCE={source}");
}

/// The compiler, if there is one.
fn nvcc() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("LAGOON_NVCC") {
        return (path != "none").then(|| PathBuf::from(path));
    }
    let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = home.into_iter().chain(std::env::split_paths(&path)).collect();
    dirs.into_iter().map(|dir| dir.join(format!("nvcc{}", std::env::consts::EXE_SUFFIX))).find(|file| file.is_file())
}

/// Compiles the kernels; what did it. `None`, after a warning, where that fails.
fn compile(nvcc: &Path, kernels: &Path, out: &Path) -> Option<String> {
    let flags = std::fs::read_to_string(kernels.join("nvcc.flags")).expect("nvcc.flags can be read");
    let run = Command::new(nvcc).args(flags.lines()).arg("-o").arg(out).arg("all.cu").current_dir(kernels).output();
    match run {
        Ok(output) if output.status.success() => {
            let version = Command::new(nvcc).arg("--version").output().ok()?;
            let text = String::from_utf8_lossy(&version.stdout).into_owned();
            let release = text.lines().find_map(|line| line.split(", V").nth(1)).unwrap_or("of unknown version");
            Some(format!("nvcc {}", release.trim()))
        }
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
            println!("cargo:warning=nvcc failed, the committed kernels are taken: {reason}");
            None
        }
        Err(error) => {
            println!("cargo:warning=nvcc cannot be run, the committed kernels are taken: {error}");
            None
        }
    }
}
