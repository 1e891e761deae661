//! cuBLASLt in Python's packages: PyTorch's wheels contain it, and no loader searches there.
//!
//! Package folders are those of the active environment (`VIRTUAL_ENV`, `CONDA_PREFIX`), read from the file system. If
//! they have no library, `python3` is asked for its folders, for at most [`PYTHON_TIME_MAX`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Timeout of `python3`.
const PYTHON_TIME_MAX: Duration = Duration::from_secs(3);
/// Prints a folder a line; `-I` keeps Python from running files in the current folder.
const PYTHON: [&str; 3] = ["-I", "-c", "import site, sys; print(*sys.path, site.getusersitepackages(), sep='\\n')"];
/// Variables with the prefix of the active environment.
const PREFIXES: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];
/// The library's path in a package folder, in this order, with its major version: wheels of CUDA 13, of CUDA 12, and
/// PyTorch builds that bundle it.
const FILES: [(&str, usize); 5] = [
    ("nvidia/cu13/lib/libcublasLt.so.13", 13),
    ("nvidia/cublas/lib/libcublasLt.so.13", 13),
    ("nvidia/cublas/lib/libcublasLt.so.12", 12),
    ("torch/lib/libcublasLt.so.13", 13),
    ("torch/lib/libcublasLt.so.12", 12),
];

/// The library's files in Python's packages that suit a driver of this CUDA version, in the order of attempts.
pub(super) fn files(driver_major: usize) -> Vec<PathBuf> {
    // Asked once: devices may be opened often.
    static PYTHONS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let prefixes =
        PREFIXES.iter().filter_map(std::env::var_os).map(PathBuf::from).filter(|prefix| prefix.is_absolute());
    let known = among(&prefixes.flat_map(|prefix| packages(&prefix)).collect::<Vec<_>>(), driver_major);
    if !known.is_empty() {
        return known;
    }
    among(PYTHONS.get_or_init(|| ask(Command::new("python3"), PYTHON_TIME_MAX)), driver_major)
}

/// The library's files that exist in these folders.
fn among(folders: &[PathBuf], driver_major: usize) -> Vec<PathBuf> {
    let fitting = FILES.iter().filter(|(_, major)| *major <= driver_major);
    let all = fitting.flat_map(|(file, _)| folders.iter().map(move |folder| folder.join(file)));
    all.filter(|file| file.exists()).collect()
}

/// Folders of packages below an environment's prefix, the newest Python's first.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let pythons = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    let mut pythons: Vec<PathBuf> = pythons.map(|entry| entry.path()).filter(is_python).collect();
    pythons.sort();
    pythons.into_iter().rev().map(|python| python.join("site-packages")).collect()
}

/// The folders that a Python prints within its time; empty if it fails or takes longer.
fn ask(mut python: Command, time_max: Duration) -> Vec<PathBuf> {
    let child = python.args(PYTHON).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = child else { return Vec::new() };
    let until = Instant::now() + time_max;
    while !matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
        if Instant::now() > until {
            // The process may have ended meanwhile.
            let _ = child.kill();
            let _ = child.wait();
            return Vec::new();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // A few hundred bytes, fewer than the pipe's buffer.
    let mut text = String::new();
    let read = child.stdout.take().map(|mut out| out.read_to_string(&mut text));
    if !matches!(read, Some(Ok(_))) {
        return Vec::new();
    }
    text.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(file: &Path) {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }

    #[test]
    fn wheels_are_found_where_they_lie_in_order() {
        let prefix = std::env::temp_dir().join(format!("lagoon-wheels-{}", std::process::id()));
        let site = prefix.join("lib/python3.12/site-packages");
        for file in
            ["torch/lib/libcublasLt.so.12", "nvidia/cublas/lib/libcublasLt.so.12", "nvidia/cu13/lib/libcublasLt.so.13"]
        {
            touch(&site.join(file));
        }
        touch(&prefix.join("lib/other/site-packages/torch/lib/libcublasLt.so.12"));
        let folders = packages(&prefix);
        assert_eq!(folders, std::slice::from_ref(&site));
        let (newest, older) = (site.join(FILES[0].0), [site.join(FILES[2].0), site.join(FILES[4].0)]);
        assert_eq!(among(&folders, 13), [vec![newest], older.to_vec()].concat());
        assert_eq!(among(&folders, 12), older, "a driver of CUDA 12 cannot take a library of 13");
        std::fs::remove_dir_all(prefix).unwrap();
    }

    #[test]
    fn a_python_that_hangs_or_fails_names_nothing() {
        let script = |text: &str| {
            let mut shell = Command::new("sh");
            // What follows are Python's arguments.
            shell.args(["-c", text, "python3"]);
            shell
        };
        let second = Duration::from_secs(20);
        assert_eq!(ask(script("echo /a; echo; echo /b"), second), [PathBuf::from("/a"), PathBuf::from("/b")]);
        let started = Instant::now();
        assert!(ask(script("echo /a; exec sleep 60"), Duration::from_millis(100)).is_empty());
        assert!(started.elapsed() < second);
        assert!(ask(Command::new("/there/is/no/python3"), second).is_empty());
    }
}
