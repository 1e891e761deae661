//! The shim sees mistakes: kernels with one each (cuda/shim/faulty.cu).

use crate::support::shim::{ORDERS, SANITIZE, Shim, sanitizer};
use lagoon_cuda::kernels::pointwise::GatherParams;
use std::process::{Command, Stdio};

/// What the kernel wrote in each order of turns, or why it failed.
fn run(mistake: u32, shared_bytes: u32, offset: u32) -> Vec<Result<Vec<u32>, String>> {
    let shim = Shim::get().expect("the shim");
    let x = vec![7u128; 64];
    (0..ORDERS)
        .map(|order| {
            let mut out = vec![u32::MAX; 64];
            let params = GatherParams {
                x: x.as_ptr() as u64,
                rows: 0,
                out: out.as_mut_ptr() as u64,
                cols: mistake,
                pad: offset,
            };
            shim.set_order(order, 11);
            // SAFETY: 64 words of output and 64 times 16 bytes of input, as the kernel takes.
            let done = unsafe { shim.launch("faulty", [1, 1, 1], 64, shared_bytes, bytemuck::bytes_of(&params)) };
            done.map(|()| out)
        })
        .collect()
}

fn neighbours() -> Vec<u32> {
    (0..64).map(|thread| (thread + 33) % 64).collect()
}

#[test]
fn without_a_mistake_every_order_gives_the_same() {
    assert!(run(0, 256, 0).iter().all(|out| out.as_ref() == Ok(&neighbours())));
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    for mistake in [1, 2] {
        assert!(run(mistake, 256, 0).iter().any(|out| out.as_ref() != Ok(&neighbours())), "mistake {mistake}");
    }
}

#[test]
fn a_barrier_that_not_all_reach_is_a_deadlock() {
    assert!(run(3, 256, 0).iter().all(|out| out.as_ref().is_err_and(|e| e.contains("deadlock"))));
}

#[test]
fn lanes_that_diverge_are_seen() {
    assert!(run(4, 256, 0).iter().all(|out| out.as_ref().is_err_and(|e| e.contains("different instructions"))));
}

#[test]
fn a_copy_that_is_not_waited_for_is_not_there() {
    assert!(run(5, 1024, 0).iter().any(|out| out.as_ref().is_ok_and(|out| out.contains(&u32::MAX))));
}

#[test]
fn copies_are_aligned_and_end_before_their_thread() {
    assert!(run(7, 1024, 0).iter().all(|out| out.as_ref().is_err_and(|e| e.contains("aligned"))));
    // Copies that happen at once are no mistake to see.
    let lazy = run(8, 1024, 0).into_iter().skip(1);
    assert!(lazy.into_iter().all(|out| out.is_err_and(|e| e.contains("under way"))));
}

/// Reads the last byte of shared memory, or the one after, in a process under the sanitizer.
#[test]
fn the_sanitizer_sees_one_byte_too_many() {
    const OFFSET: &str = "LAGOON_SHIM_OFFSET";
    if let Ok(offset) = std::env::var(OFFSET) {
        run(6, 256, offset.parse().expect("a number"));
        return;
    }
    let survives = |offset: &str| {
        let status = Command::new(std::env::current_exe().expect("this test's file"))
            .args(["--exact", "faults::the_sanitizer_sees_one_byte_too_many"])
            .env(OFFSET, offset)
            .env(SANITIZE, "1")
            .env("LD_PRELOAD", sanitizer().expect("an address sanitizer"))
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.expect("this test's file runs").success()
    };
    assert!(survives("255"));
    assert!(!survives("256"));
}

#[test]
fn what_a_device_would_refuse_is_refused() {
    let shim = Shim::get().expect("the shim");
    let params = GatherParams { x: 0, rows: 0, out: 0, cols: 99, pad: 0 };
    for (grid, block, shared) in [([0, 1, 1], 64, 0), ([1, 1, 1], 65, 0), ([1, 1, 1], 128, 0), ([1, 1, 1], 64, 1 << 20)]
    {
        // SAFETY: this kernel does nothing for an unknown mistake, and is not run at all.
        let refused = unsafe { shim.launch("faulty", grid, block, shared, bytemuck::bytes_of(&params)) };
        assert!(refused.is_err_and(|e| e.contains("refuse")), "{grid:?} {block} {shared}");
    }
}

#[test]
fn every_kernel_of_the_fatbin_is_in_the_shim() {
    let shim = Shim::get().expect("the shim");
    for name in lagoon_cuda::kernels::ALL.iter().chain(lagoon_cuda::kernels::SM90) {
        assert!(shim.params_bytes(name) > 0, "{name}");
    }
}
