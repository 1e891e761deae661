//! The shim sees mistakes: kernels with one each (cuda/shim/faulty.cu).

use crate::support::shim::{ORDERS, SANITIZE, Shim, sanitizer};
use lagoon_cuda::kernels::boxes::{MapShape, TensorMap};
use lagoon_cuda::kernels::pointwise::GatherParams;
use lagoon_types::KvDType;
use std::process::{Command, Stdio};

/// What a kernel wrote in each order of turns, or why it failed.
type Outcomes = Vec<Result<Vec<u32>, String>>;

fn run(mistake: u32, shared_bytes: u32, offset: u32) -> Outcomes {
    let x = vec![7u128; 64];
    let params = GatherParams { x: x.as_ptr() as u64, rows: 0, out: 0, cols: mistake, pad: offset };
    // SAFETY: 64 times 16 bytes of input.
    unsafe { run_kernel("faulty", 64, shared_bytes, params) }
}

/// # Safety
/// `params.x` is the address of the kernel's input.
unsafe fn run_kernel(name: &str, threads: u32, shared_bytes: u32, params: GatherParams) -> Outcomes {
    let shim = Shim::get().expect("the shim");
    (0..ORDERS)
        .map(|order| {
            let mut out = vec![u32::MAX; threads as usize];
            let params = GatherParams { out: out.as_mut_ptr() as u64, ..params };
            shim.set_order(order, 11);
            // SAFETY: a word of output for each thread, and the caller's promise.
            let done = unsafe { shim.launch(name, [1, 1, 1], threads, shared_bytes, bytemuck::bytes_of(&params)) };
            done.map(|()| out)
        })
        .collect()
}

/// Whether the kernel failed with this text in its error: in all orders, or in those that delay asynchronous work.
fn all_fail(outcomes: &Outcomes, late: bool, why: &str) -> bool {
    let orders = if late { 1..3 } else { 0..outcomes.len() };
    outcomes[orders].iter().all(|out| out.as_ref().is_err_and(|error| error.contains(why)))
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
fn a_thread_that_does_not_wait_for_earlier_grids_is_seen() {
    let x = [7u32; 64];
    let run = |mistake| {
        let params = GatherParams { x: x.as_ptr() as u64, rows: 0, out: 0, cols: mistake, pad: 0 };
        // SAFETY: 64 words of input.
        unsafe { run_kernel("faulty_waits", 64, 0, params) }
    };
    assert!(run(0).iter().all(|out| out.as_deref() == Ok(&[7; 64])));
    for mistake in [1, 2] {
        assert!(all_fail(&run(mistake), false, "has not waited for the grids before"), "mistake {mistake}");
    }
}

#[test]
fn a_barrier_that_some_threads_skip_is_a_deadlock() {
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
    assert!(lazy.into_iter().all(|out| out.is_err_and(|e| e.contains("in flight"))));
}

/// A matrix of 8 rows of 128 bytes, whose 16-byte chunks are numbered from 1, in boxes of all of it.
#[repr(C, align(128))]
struct Numbered([[u32; 4]; 64]);

fn boxes(mistake: u32, row: i64) -> Outcomes {
    let mut matrix = Numbered([[0; 4]; 64]);
    matrix.0.iter_mut().zip(1..).for_each(|(chunk, number)| chunk[0] = number);
    let address = (&raw const matrix) as u64;
    let shape = MapShape { dtype: KvDType::F16, address, dims: [64, 8], stride: 128, boxed: [64, 8] };
    // The second is no map.
    let maps = [Shim::get().expect("the shim").encode(&shape).expect("encoded"), TensorMap::default()];
    let (x, rows) = (maps.as_ptr() as u64, row.cast_unsigned());
    // SAFETY: a map of a live matrix.
    unsafe { run_kernel("faulty_boxes", 64, 1040, GatherParams { x, rows, out: 0, cols: mistake, pad: 0 }) }
}

/// Also beside the tensor, where there are zeros.
#[test]
fn boxes_are_swizzled() {
    for row in [0, -3, 5, -8, 100] {
        let number = |thread: i64| {
            let (down, chunk) = (thread / 8, (thread % 8) ^ (thread / 8));
            if (0..8).contains(&(row + down)) { (row + down) * 8 + chunk + 1 } else { 0 }
        };
        let want: Vec<u32> = (0..64).map(|thread| u32::try_from(number(thread)).expect("small")).collect();
        assert!(boxes(0, row).iter().all(|out| out.as_ref() == Ok(&want)), "row {row}");
    }
}

#[test]
fn mistakes_with_barriers_and_boxes_are_seen() {
    for (mistake, late, why) in [
        (1, false, "not initialized"),
        (2, false, "initialized again"),
        (3, false, "aligned to 8"),
        (4, false, "overwritten"),
        (5, false, "more bytes"),
        (6, false, "deadlock"),
        (7, false, "aligned to 128"),
        (8, false, "beyond shared memory"),
        (9, false, "nobody encoded"),
        (10, false, "deadlock"),
        (11, false, ""),
        // Nobody waits, or for the phase before.
        (12, true, "in flight"),
        (13, true, "in flight"),
    ] {
        let outcomes = boxes(mistake, 0);
        assert!(all_fail(&outcomes, late, why), "mistake {mistake}: {outcomes:?}");
    }
}

fn products(mistake: u32) -> Outcomes {
    // SAFETY: the kernel reads no input.
    unsafe {
        run_kernel("faulty_products", 128, 24 << 10, GatherParams { x: 0, rows: 0, out: 0, cols: mistake, pad: 0 })
    }
}

#[test]
fn mistakes_with_products_are_seen() {
    let right = vec![17f32.to_bits(); 128];
    assert!(products(0).iter().all(|out| out.as_ref() == Ok(&right)));
    // Operands that were not fenced are not seen; products that are not waited for are not complete.
    assert!(products(1).iter().all(|out| out.as_ref().is_ok_and(|out| *out != right)));
    assert!(products(5).iter().any(|out| out.as_ref().is_ok_and(|out| *out != right)));
    for (mistake, why) in [
        (2, "without a fence"),
        (3, "disagree"),
        (4, "in flight"),
        (6, "more registers"),
        (7, "deadlock"),
        (8, "beyond shared memory"),
    ] {
        let outcomes = products(mistake);
        assert!(all_fail(&outcomes, false, why), "mistake {mistake}: {outcomes:?}");
    }
}

#[test]
fn maps_that_the_driver_refuses() {
    let shim = Shim::get().expect("the shim");
    let good = MapShape { dtype: KvDType::BF16, address: 1 << 20, dims: [128, 100], stride: 256, boxed: [64, 16] };
    assert!(shim.encode(&good).is_some());
    for bad in [
        MapShape { address: (1 << 20) + 16, ..good },
        MapShape { dims: [128, 0], ..good },
        MapShape { dims: [128, (1 << 32) + 1], ..good },
        MapShape { stride: 264, ..good },
        MapShape { stride: 128, ..good },
        MapShape { stride: 1 << 40, ..good },
        MapShape { boxed: [128, 16], ..good },
        MapShape { boxed: [60, 16], ..good },
        MapShape { boxed: [64, 257], ..good },
        MapShape { boxed: [64, 0], ..good },
    ] {
        assert!(shim.encode(&bad).is_none(), "{bad:?}");
    }
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

/// Copies nothing, from an address with memory or without, in a process of its own.
#[test]
fn masked_copies_name_accessible_memory() {
    const MEMORY: &str = "LAGOON_SHIM_MEMORY";
    if let Ok(memory) = std::env::var(MEMORY) {
        assert!(run(9, 1024, u32::from(memory == "some")).iter().all(Result::is_ok));
        return;
    }
    let survives = |memory: &str| {
        let status = Command::new(std::env::current_exe().expect("this test's file"))
            .args(["--exact", "faults::masked_copies_name_accessible_memory"])
            .env(MEMORY, memory)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.expect("this test's file runs").success()
    };
    assert!(survives("some"));
    assert!(!survives("none"));
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
