//! Python environments with pinned packages, below the target folder: made once, and anew when the list changes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::Place;

/// The oldest Python that the packages are made for.
const PYTHON_MIN: (u32, u32) = (3, 11);
/// A copy of the list of packages, written when all of them are installed.
const STAMP: &str = "installed.txt";
/// The installer: a quarter of pip's time. pip installs it into each environment.
const UV: &str = "uv==0.13.9";
/// Its cache, below the target folder: environments share files with it.
const CACHE: &str = "clients-uv";

/// Packages of a requirements file of tests/clients, each with its exact version, in a folder below the target folder.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) folder: &'static str,
    pub(super) requirements: &'static str,
}

impl Set {
    /// The Python with these packages, which are installed first if they are not there.
    pub(super) fn install(&self, place: &Place<'_>) -> Result<PathBuf> {
        let list = place.scripts().join(self.requirements);
        let wanted = std::fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
        let dir = place.target.join(self.folder);
        let python = dir.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
        if python.exists() && std::fs::read_to_string(dir.join(STAMP)).is_ok_and(|installed| installed == wanted) {
            return Ok(python);
        }
        check_python()?;
        eprintln!("clients: uv installs {} to {}", self.requirements, dir.display());
        if dir.exists() {
            std::fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
        }
        make(&dir)?;
        fill(&python, &list, &place.target.join(CACHE))?;
        std::fs::write(dir.join(STAMP), wanted).context("write the environment's stamp")?;
        Ok(python)
    }
}

/// Checks that there is a Python that is new enough.
fn check_python() -> Result<()> {
    let script = "import sys; print(*sys.version_info[:2])";
    let output = Command::new("python3").args(["-c", script]).stdin(Stdio::null()).output();
    let output = output.context("run python3\nhint: sudo apt-get install python3 python3-venv")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = version(&text).with_context(|| format!("python3 printed no version: {text:?}"))?;
    let (major, minor) = PYTHON_MIN;
    ensure!(
        found >= PYTHON_MIN,
        "python3 is {}.{}, the clients need {major}.{minor}\nhint: put a newer python3 first in PATH",
        found.0,
        found.1
    );
    Ok(())
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn make(dir: &Path) -> Result<()> {
    let output = Command::new("python3").args(["-m", "venv"]).arg(dir).stdin(Stdio::null()).output();
    let output = output.context("run python3 -m venv")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout);
        bail!("python3 -m venv failed: {}\nhint: sudo apt-get install python3-venv", text.trim());
    }
    Ok(())
}

/// Installs exactly the list: it names the dependencies, too.
fn fill(python: &Path, list: &Path, cache: &Path) -> Result<()> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", UV]);
    let status = pip.stdin(Stdio::null()).status().context("run pip")?;
    ensure!(
        status.success(),
        "pip could not install {UV}\nhint: the packages come from PyPI: check the network, or pip's index-url and proxy"
    );
    let mut uv = Command::new(python);
    uv.args(["-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python"]).arg(python);
    uv.arg("--cache-dir").arg(cache).arg("--requirement").arg(list);
    let status = uv.stdin(Stdio::null()).status().context("run uv")?;
    ensure!(
        status.success(),
        "uv could not install {}\nhint: the packages come from PyPI: check the network, or UV_DEFAULT_INDEX and SSL_CERT_FILE",
        list.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers() {
        assert_eq!(version("3 11\n"), Some((3, 11)));
        assert!(version("3 9\n") < Some(PYTHON_MIN) && version("3 11") == Some(PYTHON_MIN));
        assert_eq!(version("three"), None);
    }

    #[test]
    fn every_package_has_an_exact_version() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients");
        for set in [super::super::LIGHT, super::super::GUIDELLM, super::super::AIPERF] {
            let text = std::fs::read_to_string(dir.join(set.requirements)).unwrap();
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
            assert!(lines.len() > 10, "{}", set.requirements);
            for line in lines {
                let (name, version) = line.split_once("==").unwrap_or_else(|| panic!("{line}"));
                assert!(!name.contains(['<', '>', '~']) && !version.contains('*'), "{line}");
            }
        }
    }
}
