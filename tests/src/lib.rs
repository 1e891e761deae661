//! Support for the system tests: golden models, a model on one executor, a whole pool in one thread, and processes of
//! the real binary.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "support code of tests: a failure here is a failed test")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small sizes of tests")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "tests print what they skip and what they measured")]

pub mod ascii;
pub mod cluster;
pub mod etcd;
pub mod faults;
pub mod golden;
pub mod partition;
pub mod process;
pub mod single;

use std::io::Write as _;
use std::path::PathBuf;

/// The repository's root.
#[must_use]
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Records that a test cannot run here. CI fails unless tests/skips.toml lists it.
pub fn skip(name: &str, reason: &str) {
    eprintln!("SKIPPED {name}: {reason}");
    if let Ok(path) = std::env::var("LAGOON_SKIP_LOG") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        // One write, because other tests append at the same time.
        file.write_all(format!("{name}\t{reason}\n").as_bytes()).unwrap();
    }
}

/// WebGPU on the software adapter.
///
/// It has no wide kernels: each device compiles its own, and they take several times as long as others. The conformance suite and the
/// servers of process tests have them.
///
/// # Errors
/// The backend's message, if there is none.
pub fn wgpu() -> Result<lagoon_shaders::WgpuDevice, String> {
    wgpu_with(lagoon_shaders::Options { wide_kernels: false, ..lagoon_shaders::Options::default() })
}

/// As [`wgpu`], with restrictions of its own.
///
/// # Errors
/// As [`wgpu`].
pub fn wgpu_with(options: lagoon_shaders::Options) -> Result<lagoon_shaders::WgpuDevice, String> {
    let choice = lagoon_shaders::AdapterChoice::Software;
    lagoon_shaders::WgpuDevice::open_with(&choice, options).map_err(|error| error.to_string())
}
