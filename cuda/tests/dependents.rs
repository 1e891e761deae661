//! Programmatic dependent launch over the fake driver: kernels that begin before the one ahead has completed. The fake shows a
//! kernel that does not wait, and one that touches memory before it does; only a kernel directly behind a kernel begins early.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::Fake;
use lagoon_cuda::CudaError;
use lagoon_cuda::driver::{
    Buffer, Context, Event, Launch, Module, Pinned, Priority, Stream, copy_to_device, copy_to_host, copy_within_device,
};
use lagoon_cuda::kernels::pointwise::GatherParams;

/// Words that `faulty_waits` copies (cuda/shim/faulty.cu).
const WORDS: usize = 64;
const HOW: Launch = Launch { grid: [1, 1, 1], block: [64, 1, 1], shared_bytes: 0 };

fn with_fake(name: &str, capability: i32, test: impl FnOnce(&Fake)) {
    let ready = shim::library().and_then(|kernels| {
        let fake = Fake::new(1 << 26, 1 << 16, 5)?;
        fake.kernels(&kernels);
        fake.device(capability, 0, 227 << 10);
        Ok(fake)
    });
    match ready {
        Ok(fake) => {
            test(&fake);
            fake.finish();
        }
        Err(reason) => fake::skip(name, &reason),
    }
}

/// `x` is 1 everywhere and becomes 7 by one launch, and `out` is a copy of it by the next; the last, if there is one, reads
/// nothing that it may not. The mistakes of the launches, as faulty.cu counts them; what is in `out` at the end.
fn copies(mistakes: &[u32]) -> Result<Vec<u32>, CudaError> {
    let context = Context::open(0)?;
    let stream = Stream::new(&context, Priority::Normal)?;
    stream.allow_dependents();
    let kernel = Module::load(&context, b"any image")?.function("faulty_waits", 0)?;
    let [source, x, out] = ["source", "x", "out"].map(|name| Buffer::new(&context, name, WORDS * 4).unwrap());
    let mut pinned = Pinned::new(&context, "a test", WORDS * 4)?;
    for (buffer, value) in [(&source, 7u32), (&x, 1), (&out, 2)] {
        pinned.as_mut_slice().copy_from_slice(bytemuck::cast_slice(&[value; WORDS]));
        copy_to_device(&stream, buffer.address(), &pinned, 0, WORDS * 4)?;
        stream.synchronize()?;
    }
    let copy = |from: &Buffer, to: &Buffer, mistake| {
        let params = GatherParams { x: from.address(), rows: 0, out: to.address(), cols: mistake, pad: 0 };
        // SAFETY: the kernel's own parameter; the buffers outlive the stream's work.
        unsafe { kernel.launch(&stream, HOW, &params) }
    };
    copy(&source, &x, 0)?;
    for mistake in mistakes {
        copy(&x, &out, *mistake)?;
    }
    copy_to_host(&stream, &mut pinned, 0, out.address(), WORDS * 4)?;
    stream.synchronize()?;
    Ok(bytemuck::cast_slice(pinned.as_slice()).to_vec())
}

/// How many of 32 runs gave something else than the copy.
fn wrong(mistakes: &[u32]) -> usize {
    (0..32).filter(|_| copies(mistakes).unwrap() != [7; WORDS]).count()
}

#[test]
fn what_touches_memory_before_it_waits_is_seen() {
    with_fake("what_touches_memory_before_it_waits_is_seen", 9, |fake| {
        let before = fake.counts();
        assert_eq!((wrong(&[0]), wrong(&[0, 0, 0])), (0, 0));
        let after = fake.counts();
        assert_eq!(after.dependents - before.dependents, 4 * 32);
        assert!(after.begun_early - before.begun_early > 16, "{before:?} {after:?}");
        assert!(wrong(&[3]) > 0, "a stale read");
        assert!(wrong(&[0, 4]) > 0, "a write before the last reader has ended");
    });
    // Where no kernel begins early neither is a mistake.
    with_fake("what_touches_memory_before_it_waits_is_seen", 8, |fake| {
        let before = fake.counts();
        assert_eq!((wrong(&[3]), wrong(&[0, 4])), (0, 0));
        assert_eq!(fake.counts().dependents, before.dependents);
    });
}

/// Whatever stands between two kernels is waited for as a whole.
#[test]
fn only_a_kernel_directly_behind_a_kernel_begins_early() {
    with_fake("only_a_kernel_directly_behind_a_kernel_begins_early", 9, |fake| {
        let context = Context::open(0).unwrap();
        let stream = Stream::new(&context, Priority::Normal).unwrap();
        let kernel = Module::load(&context, b"any image").unwrap().function("faulty_waits", 0).unwrap();
        assert!(kernel.waits());
        let buffer = Buffer::new(&context, "x", 2 * WORDS * 4).unwrap();
        let (from, to) = (buffer.address(), buffer.address() + (WORDS * 4) as u64);
        let event = Event::new(&context, false).unwrap();
        let launched = |between: &dyn Fn()| {
            let params = GatherParams { x: from, rows: 0, out: to, cols: 0, pad: 0 };
            let before = fake.counts().dependents;
            // SAFETY: the kernel's own parameter; the buffer outlives the stream's work.
            unsafe { kernel.launch(&stream, HOW, &params) }.unwrap();
            between();
            // SAFETY: as above.
            unsafe { kernel.launch(&stream, HOW, &params) }.unwrap();
            fake.counts().dependents - before
        };
        assert_eq!(launched(&|| ()), 0, "not allowed yet");
        stream.allow_dependents();
        let copy = || copy_within_device(&stream, to, from, WORDS * 4).unwrap();
        copy();
        assert_eq!(launched(&|| ()), 1);
        let between: [&dyn Fn(); 3] = [&copy, &|| event.record(&stream).unwrap(), &|| stream.wait(&event).unwrap()];
        for between in between {
            // The first is a dependent of the last round's second, of which there is none behind a copy.
            copy();
            assert_eq!(launched(between), 0);
        }
        stream.synchronize().unwrap();
    });
}
