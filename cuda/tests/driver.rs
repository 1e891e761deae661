//! The driver layer against the fake driver: objects are released, failed calls leak nothing, streams and
//! events order work, physical memory keeps its contents at every address where it is mapped.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, reason = "each test binary uses some of it")]
mod fake;

use fake::{OUT_OF_MEMORY, UNKNOWN};
use lagoon_cuda::driver::{
    Buffer, Context, Event, Function, Launch, Module, Physical, Pinned, Priority, Reservation, Sharing, Stream,
    copy_to_device, copy_to_host, copy_within_device, fill_zero,
};
use lagoon_cuda::{Arena, CudaError, CudaProbe, probe};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const PAGE: usize = 1 << 16;

/// The parameter of the fake's own kernel, which fills words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fill {
    address: u64,
    words: u64,
    value: u32,
    unused: u32,
}

// SAFETY: plain numbers without padding.
unsafe impl bytemuck::Zeroable for Fill {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Fill {}

fn fill_kernel(context: &Arc<Context>) -> Function {
    Module::load(context, b"any image").unwrap().function("lagoon_fake_fill", 0).unwrap()
}

fn fill(kernel: &Function, stream: &Stream, address: u64, words: u64, value: u32) {
    let how = Launch { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
    let params = Fill { address, words, value, unused: 0 };
    // SAFETY: the kernel's own parameter; tests keep the memory, or mean not to.
    unsafe { kernel.launch(stream, how, &params) }.unwrap();
}

fn words(stream: &Stream, address: u64, count: usize) -> Result<Vec<u32>, CudaError> {
    let mut pinned = Pinned::new(stream.context(), "a test", count * 4)?;
    copy_to_host(stream, &mut pinned, 0, address, count * 4)?;
    stream.synchronize()?;
    Ok(bytemuck::cast_slice(pinned.as_slice()).to_vec())
}

#[test]
fn the_probe_finds_the_device() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 1);
    let CudaProbe::Present { driver_version, devices } = probe() else { panic!("{}", probe()) };
    assert_eq!((driver_version, devices.len(), devices[0].name.as_str()), (13_000, 1, "Fake device"));
    let context = Context::open(0).unwrap();
    assert_eq!(context.granularity(), PAGE);
    assert!(context.attributes().direct_rdma && context.attributes().shareable);
    assert_eq!(context.attributes().pci.to_string(), "1ffff:3b:1d.0");
    assert!(matches!(Context::open(1), Err(CudaError::Absent(_))));
    drop(context);
    fake.finish();
}

#[test]
fn a_driver_that_fails_to_begin_is_a_reason_and_no_panic() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 1);
    for function in [
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity",
    ] {
        fake.fail(function, 1, UNKNOWN);
        // Another thread, as this one may have the context current already.
        let error = std::thread::spawn(|| Context::open(0).unwrap_err()).join().unwrap();
        assert!(matches!(error, CudaError::Driver { .. } | CudaError::Absent(_)), "{function}: {error}");
    }
    fake.finish();
}

#[test]
fn work_happens_in_the_order_of_streams_and_events() {
    for seed in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
        let fake = fake_or_skip!(1 << 24, PAGE as u64, seed);
        let context = Context::open(0).unwrap();
        let (a, b) = (Stream::new(&context, Priority::Normal).unwrap(), Stream::new(&context, Priority::High).unwrap());
        let kernel = fill_kernel(&context);
        let (x, y) = (Buffer::new(&context, "x", 4096).unwrap(), Buffer::new(&context, "y", 4096).unwrap());
        let filled = Event::new(&context, true).unwrap();
        let copied = Event::new(&context, true).unwrap();
        fill(&kernel, &a, x.address(), 1024, 7);
        filled.record(&a).unwrap();
        b.wait(&filled).unwrap();
        copy_within_device(&b, y.address(), x.address(), 4096).unwrap();
        copied.record(&b).unwrap();
        a.wait(&copied).unwrap();
        fill(&kernel, &a, x.address(), 1024, 8);
        assert_eq!(words(&b, y.address(), 1024).unwrap(), [7; 1024], "seed {seed}");
        assert_eq!(words(&a, x.address(), 1024).unwrap(), [8; 1024], "seed {seed}");
        assert!(copied.happened().unwrap() && copied.since_ms(&filled).unwrap() > 0.0);
        fill_zero(&a, x.address(), 2048).unwrap();
        let mut source = Pinned::new(&context, "a test", 1024).unwrap();
        source.as_mut_slice().fill(1);
        copy_to_device(&a, x.range(3072, 1024), &source, 0, 1024).unwrap();
        let got = words(&a, x.address(), 1024).unwrap();
        assert!(got[..512].iter().all(|w| *w == 0) && got[512..768].iter().all(|w| *w == 8));
        assert!(got[768..].iter().all(|w| *w == 0x0101_0101));
        drop((a, b, x, y, kernel, filled, copied, source, context));
        fake.finish();
    }
}

#[test]
fn a_parameter_of_another_size_is_refused() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 1);
    let context = Context::open(0).unwrap();
    let (stream, kernel) = (Stream::new(&context, Priority::Normal).unwrap(), fill_kernel(&context));
    let how = Launch { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
    // SAFETY: nothing is launched.
    let error = unsafe { kernel.launch(&stream, how, &[0u64; 4]) }.unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    drop((kernel, stream, context));
    fake.finish();
}

#[test]
fn a_missing_event_is_noticed_in_some_order() {
    let mut wrong = 0;
    for seed in 2..40 {
        let fake = fake_or_skip!(1 << 24, PAGE as u64, seed);
        let context = Context::open(0).unwrap();
        let (a, b) = (Stream::new(&context, Priority::Normal).unwrap(), Stream::new(&context, Priority::High).unwrap());
        let kernel = fill_kernel(&context);
        let x = Buffer::new(&context, "x", 64).unwrap();
        fill(&kernel, &a, x.address(), 1, 7);
        wrong += u32::from(words(&b, x.address(), 1).unwrap() != [7]);
        drop((a, b, x, kernel, context));
        fake.finish();
    }
    assert!((1..38).contains(&wrong), "{wrong} of 38 orders show the race");
}

#[test]
fn one_physical_allocation_lies_at_several_places_and_keeps_its_contents() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 3);
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context, Priority::Normal).unwrap();
    let kernel = fill_kernel(&context);
    let mut range = Reservation::new(&context, 4 * PAGE).unwrap();
    let page = Arc::new(Physical::new(&context, PAGE, Sharing::Private).unwrap());
    range.map(0, &page).unwrap();
    range.map(2 * PAGE, &page).unwrap();
    fill(&kernel, &stream, range.address() + 16, 5, 9);
    assert_eq!(words(&stream, range.address() + 2 * PAGE as u64 + 16, 5).unwrap(), [9; 5]);
    range.unmap(0).unwrap();
    range.unmap(2 * PAGE).unwrap();
    range.map(PAGE, &page).unwrap();
    assert_eq!(words(&stream, range.address() + PAGE as u64 + 16, 5).unwrap(), [9; 5]);
    drop((page, range, stream, kernel, context));
    fake.finish();
}

#[test]
fn a_mapping_without_access_is_undone() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 3);
    let context = Context::open(0).unwrap();
    let mut range = Reservation::new(&context, PAGE).unwrap();
    let page = Arc::new(Physical::new(&context, PAGE, Sharing::Private).unwrap());
    for function in ["cuMemMap", "cuMemSetAccess"] {
        fake.fail(function, 1, OUT_OF_MEMORY);
        assert!(matches!(range.map(0, &page), Err(CudaError::OutOfMemory { .. })), "{function}");
        assert_eq!((range.mappings(), fake.counts().mappings), (0, 0), "{function}");
    }
    range.map(0, &page).unwrap();
    fake.fail("cuMemUnmap", 1, UNKNOWN);
    assert!(range.unmap(0).is_err());
    assert_eq!(range.mappings(), 1, "it is still mapped");
    drop((page, range, context));
    fake.finish();
}

#[test]
#[should_panic(expected = "something is mapped at 0")]
fn a_double_map_is_our_bug() {
    let Ok(_fake) = fake::Fake::new(1 << 24, PAGE as u64, 1) else { panic!("something is mapped at 0 (skipped)") };
    let context = Context::open(0).unwrap();
    let mut range = Reservation::new(&context, PAGE).unwrap();
    let page = Arc::new(Physical::new(&context, PAGE, Sharing::Private).unwrap());
    range.map(0, &page).unwrap();
    let _panics = range.map(0, &page);
}

#[test]
fn a_kernel_that_uses_what_was_unmapped_is_caught() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 0);
    let before = fake.counts().bad_addresses;
    // The context is lost afterwards, for the whole process: in a child.
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lost::child", "--include-ignored", "--nocapture"])
        .env("LAGOON_FAKE_CHILD", "1")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(fake.counts().bad_addresses, before);
    fake.finish();
}

mod lost {
    use super::*;

    #[test]
    fn child() {
        if std::env::var_os("LAGOON_FAKE_CHILD").is_none() {
            return;
        }
        let fake = fake_or_skip!(1 << 24, PAGE as u64, 0);
        let context = Context::open(0).unwrap();
        let stream = Stream::new(&context, Priority::Normal).unwrap();
        let kernel = fill_kernel(&context);
        let mut range = Reservation::new(&context, PAGE).unwrap();
        let page = Arc::new(Physical::new(&context, PAGE, Sharing::Private).unwrap());
        range.map(0, &page).unwrap();
        fill(&kernel, &stream, range.address(), 4, 1);
        // No wait: the kernel runs after this.
        range.unmap(0).unwrap();
        let error = stream.synchronize().unwrap_err();
        assert!(format!("{error}").contains("ILLEGAL_ADDRESS"), "{error}");
        assert_eq!((fake.counts().bad_addresses, fake.counts().unmaps_with_work_queued), (1, 1));
        assert!(Buffer::new(&context, "x", 1).is_err(), "the context is lost");
        drop((page, range, stream, kernel, context));
        let counts = fake.counts();
        assert_eq!((counts.physical, counts.mappings, counts.reservations), (0, 0, 0), "even then all is released");
    }
}

#[test]
fn memory_that_runs_out_says_what_wanted_it() {
    let fake = fake_or_skip!(1 << 20, PAGE as u64, 1);
    let context = Context::open(0).unwrap();
    assert_eq!(context.memory().unwrap(), (1 << 20, 1 << 20));
    let error = Buffer::new(&context, "weights", 2 << 20).unwrap_err();
    assert_eq!(error, CudaError::OutOfMemory { what: "weights", bytes: 2 << 20 });
    let error = Physical::new(&context, 2 << 20, Sharing::Private).unwrap_err();
    assert_eq!(error, CudaError::OutOfMemory { what: "a page group", bytes: 2 << 20 });
    drop(context);
    fake.finish();
}

#[test]
fn an_arena_is_exported_once_and_seen_by_who_imports_it() {
    let fake = fake_or_skip!(1 << 24, PAGE as u64, 2);
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context, Priority::Normal).unwrap();
    let kernel = fill_kernel(&context);
    let arena = Arena::new(&context, 3 * PAGE - 5).unwrap();
    assert_eq!(arena.bytes(), 3 * PAGE);
    let descriptor = arena.descriptor().unwrap();
    fake.fail("cuMemExportToShareableHandle", 1, UNKNOWN);
    let again = arena.descriptor().unwrap();
    assert_eq!(format!("{descriptor:?}"), format!("{again:?}"), "exported once");
    fake.fail("", 0, 0);
    let theirs = Arena::import(&context, descriptor, arena.bytes()).unwrap();
    assert_ne!(theirs.address(), arena.address());
    fill(&kernel, &stream, arena.address() + 2 * PAGE as u64, 4, 77);
    assert_eq!(words(&stream, theirs.address() + 2 * PAGE as u64, 4).unwrap(), [77; 4]);
    assert!(Arena::import(&context, descriptor, PAGE - 1).is_err());
    assert!(Arena::import(&context, descriptor, PAGE).is_err(), "its size is not that");
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    assert!(Arena::import(&context, std::os::fd::AsFd::as_fd(&file), PAGE).is_err(), "a file is no arena");
    drop((theirs, arena, stream, kernel, context));
    fake.finish();
}

/// Threads that want the same library at the same time: one makes it, the others wait, and all see it whole. A compiler that
/// fails leaves nothing in the way.
#[test]
fn what_tests_compile_is_made_once_and_whole() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compiled-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("library.so");
    assert!(fake::compiled::once(&file, |_| Err("no compiler".to_owned())).is_err());
    let made = AtomicU32::new(0);
    let want = || {
        let make = |fresh: &Path| {
            made.fetch_add(1, Ordering::Relaxed);
            std::fs::write(fresh, "half").unwrap();
            std::thread::sleep(Duration::from_millis(30));
            std::fs::write(fresh, "whole").map_err(|error| error.to_string())
        };
        fake::compiled::once(&file, make).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "whole");
    };
    std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(want))));
    assert_eq!(made.into_inner(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}
