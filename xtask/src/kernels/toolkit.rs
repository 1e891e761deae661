//! The pinned compiler: NVRTC, nvFatbin and nvdisasm, installed with pip into the user's cache folder.
//!
//! NVRTC is of CUDA 12.2: drivers of the R535 branch load its cubins and its PTX (ISA 8.2). nvFatbin is its first
//! release, of CUDA 12.4, which compresses with LZ4; CUDA 13.0 compresses with Zstandard, which older drivers cannot
//! read. nvdisasm does not affect the output.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Packages that pip installs. `lagoon_cuda::kernels` names NVRTC's release.
const PACKAGES: [&str; 3] =
    ["nvidia-cuda-nvrtc-cu12==12.2.140", "nvidia-nvfatbin-cu12==12.4.127", "nvidia-cuda-nvdisasm==13.2.51"];
/// Name of the cache folder for these packages.
const FOLDER: &str = "nvrtc-12.2.140-nvfatbin-12.4.127-nvdisasm-13.2.51";

/// The folder of the packages, installed first if the cache has none.
pub(super) fn install() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor a home directory says where to install the compiler")?;
    let dir = cache.join("lagoon").join(FOLDER);
    if dir.is_dir() {
        return Ok(dir);
    }
    let partial = dir.with_extension(format!("partial-{}", std::process::id()));
    println!("kernels: pip installs {} to {}", PACKAGES.join(" "), dir.display());
    let status = Command::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            "--no-deps",
            "--target",
        ])
        .arg(&partial)
        .args(PACKAGES)
        .stdin(Stdio::null())
        .status()
        .context("run python3 -m pip (hint: apt-get install python3-pip)")?;
    ensure!(status.success(), "pip could not install the compiler (hint: apt-get install python3-pip)");
    // Another process may have installed the same packages first.
    if let Err(error) = std::fs::rename(&partial, &dir)
        && !dir.is_dir()
    {
        bail!("put the compiler in place: {error}");
    }
    let _ = std::fs::remove_dir_all(&partial);
    Ok(dir)
}

pub(super) fn nvdisasm(toolkit: &Path) -> PathBuf {
    toolkit.join("nvidia/cu13/bin/nvdisasm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_names_every_package_and_its_release() {
        let names = PACKAGES.map(|package| {
            let (name, release) = package.split_once("==").unwrap();
            let name = name.trim_end_matches("-cu12").rsplit('-').next().unwrap();
            format!("{name}-{release}")
        });
        assert_eq!(FOLDER, names.join("-"));
    }
}
