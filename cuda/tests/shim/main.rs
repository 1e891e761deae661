//! Every kernel on the host, against f64: cases beyond the conformance suite of `Device`, and all once more under the address sanitizer,
//! with the suite's: without it tests/device.rs runs these, with the same kernels, launches and orders of turns. The sanitizer leaves the
//! longest cases out; with `LAGOON_SANITIZE_ALL=1` it has them, too.

mod attention;
mod experts;
mod faults;
mod linear;
mod pointwise;
mod sampling;
#[path = "../support/mod.rs"]
mod support;
mod warpgroups;
mod wide;

use lagoon_backend::conformance::{Tolerance, cases};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::device::ShimDevice;
use support::shim;

/// The conformance suite takes some minutes under the sanitizer on two cores, and many times that on busy ones. The limit is
/// for a kernel that is stuck.
const SANITIZED_TIME_MAX: Duration = Duration::from_secs(2400);

// Activations of many rows and attention's queries and weights are two terms of bf16, 16 bits against f32's 24: of all cases one
// product goes beyond the strict bounds, by a few percent.
const TOLERANCE: Tolerance = Tolerance::loosened(2.0);
lagoon_backend::conformance_latent_wide!(ShimDevice::open, TOLERANCE);

type Case = (&'static str, fn(&mut ShimDevice, Tolerance));

macro_rules! suite {
    ($($case:ident),+ $(,)?) => {
        /// The cases of the conformance suite.
        const SUITE: &[Case] = &[$((stringify!($case), cases::$case::<ShimDevice>)),+];
    };
}
lagoon_backend::conformance_names!(suite());

/// Cases that take most of the time under the sanitizer: long contexts, the product of all types, geometries and biases, those of
/// all packed formats and shapes, and those with activations. Every kernel, head size, window, bias, activation and format has
/// shorter ones, and missing keys, chunks, odd stores and odd rows too.
const LONG_CASES: [&str; 11] = [
    "attention_alibi",
    "attention_decode_batch",
    "attention_dtypes",
    "attention_geometries",
    "attention_latent_wide",
    "attention_long_context",
    "attention_softcap",
    "attention::soft_caps",
    "experts_packed",
    "matmul_activated",
    "matmul_packed",
];

fn sanitize_all() -> bool {
    std::env::var_os("LAGOON_SANITIZE_ALL").is_some()
}

/// Runs the suite's cases one after the other (under the sanitizer kernels do so, too), each in a thread of its name.
fn run_suite() {
    let run = |case: fn(&mut ShimDevice, Tolerance)| case(&mut ShimDevice::open().expect("a compiler"), TOLERANCE);
    for (name, case) in SUITE.iter().filter(|(name, _)| sanitize_all() || !LONG_CASES.contains(name)) {
        let named = std::thread::Builder::new().name((*name).to_owned());
        std::thread::scope(|scope| named.spawn_scoped(scope, || run(*case)).map(drop)).expect("a thread");
    }
}

/// In a child process with a time limit.
#[test]
fn under_the_address_sanitizer() {
    if std::env::var_os(shim::SANITIZE).is_some() {
        return run_suite();
    }
    let Some(runtime) = shim::sanitizer() else {
        panic!("the compiler has no address sanitizer (hint: apt-get install g++)")
    };
    let skipped = LONG_CASES.iter().filter(|_| !sanitize_all()).flat_map(|case| ["--skip", case]);
    let mut child = Command::new(std::env::current_exe().expect("this test's file"))
        .args(["--exact", "--nocapture"])
        .args(skipped)
        .env(shim::SANITIZE, "1")
        .env("LD_PRELOAD", runtime)
        // Rust's test harness leaks, on purpose; fibers' stacks are no heap.
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
        .env_remove("LAGOON_SKIP_LOG")
        .stdout(Stdio::null())
        .spawn()
        .expect("this test's file runs");
    let deadline = Instant::now() + SANITIZED_TIME_MAX;
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().expect("kill");
            panic!("kernels did not end within {SANITIZED_TIME_MAX:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(status.success(), "a kernel touched what is not its own: {status}");
}
