//! The fuzz targets' entries on the kept corpus (fuzz/corpus, and configs/ for config.json), and on mutations of it from seeds:
//! no panic, no error without file and field, no more memory than [`fuzz::allocation_max`].
//!
//! A sample runs with the other tests; `LAGOON_MUTATIONS=100000 cargo test -p lagoon-model --test fuzz` runs more.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::fuzz;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// The system's allocator, which counts bytes by thread.
struct Counting;

thread_local! {
    /// Bytes in use, and the most there were since [`peak`] began.
    static IN_USE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

fn count(change: impl FnOnce(usize) -> usize) {
    // A thread that ends has no counts.
    let _ = IN_USE.try_with(|counts| {
        let (now, most) = counts.get();
        let now = change(now);
        counts.set((now, most.max(now)));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; the counts are plain numbers of the thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|now| now + layout.size());
        // SAFETY: the caller's duty is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(|now| now.saturating_sub(layout.size()));
        // SAFETY: `memory` came from the system's allocator with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `work` returns, and the most bytes that it had allocated at once.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = IN_USE.get().0;
    IN_USE.set((before, before));
    let result = work();
    (result, IN_USE.get().1 - before)
}

/// Inputs of a target by name, from the folders of its corpus.
fn corpus(folders: &[&str]) -> Vec<(String, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = |folder: &&str| -> Vec<PathBuf> {
        std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let mut paths: Vec<PathBuf> = folders.iter().flat_map(list).collect();
    paths.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    paths.into_iter().map(|path| (name(&path), std::fs::read(path).unwrap())).collect()
}

/// Tokens that byte changes seldom make.
const WORDS: [&str; 24] = [
    "null",
    "true",
    "0",
    "-1",
    "1e308",
    "1e-320",
    "65536",
    "1048576",
    "4294967295",
    "18446744073709551615",
    "[",
    "]",
    "{",
    "}",
    "\"",
    ",",
    ":",
    "\\u0000",
    "..",
    "/",
    "yarn",
    "longrope",
    "F32",
    "[[[[[[[[",
];

fn mutated(inputs: &[(String, Vec<u8>)], rng: &mut SmallRng) -> Vec<u8> {
    let mut data = inputs.choose(rng).unwrap().1.clone();
    for _ in 0..rng.random_range(1..5) {
        let at = rng.random_range(0..=data.len());
        let end = (at + rng.random_range(0..16)).min(data.len());
        match rng.random_range(0..7) {
            0 if at < data.len() => data[at] ^= 1 << rng.random_range(0..8),
            1 if at < data.len() => data[at] = *b"0123456789\"{}[],:-.eE".choose(rng).unwrap(),
            2 => drop(data.splice(at..at, WORDS.choose(rng).unwrap().bytes())),
            3 => drop(data.splice(at..end, WORDS.choose(rng).unwrap().bytes())),
            4 => drop(data.drain(at..end)),
            5 => {
                let other = &inputs.choose(rng).unwrap().1;
                let from = rng.random_range(0..=other.len());
                let to = (from + rng.random_range(0..200)).min(other.len());
                drop(data.splice(at..end, other[from..to].iter().copied()));
            }
            _ if rng.random_bool(0.2) => data.truncate(at),
            _ => {}
        }
    }
    data
}

/// Replays the corpus, whose names say what is accepted, and `mutations` of it but for the largest models (`ok-most-`), which take
/// seconds in a debug build; returns the accepted mutations.
fn drive(folders: &[&str], mutations: u64, entry: fn(&[u8]) -> bool) -> u64 {
    let inputs = corpus(folders);
    assert!(inputs.len() > 8, "{} inputs", inputs.len());
    let run = |data: &[u8]| {
        let (accepted, bytes) = peak(|| entry(data));
        assert!(bytes <= fuzz::allocation_max(data.len()), "{bytes} bytes for {:?}", String::from_utf8_lossy(data));
        accepted
    };
    for (name, data) in &inputs {
        let accepted = run(data);
        assert!(!name.starts_with("ok-") || accepted, "{name} is refused");
        assert!(!name.starts_with("bad-") || !accepted, "{name} is accepted");
    }
    let inputs: Vec<_> = inputs.into_iter().filter(|(name, _)| !name.starts_with("ok-most-")).collect();
    let mutations = std::env::var("LAGOON_MUTATIONS").ok().map_or(mutations, |text| text.parse().unwrap());
    let each = |seed| u64::from(run(&mutated(&inputs, &mut SmallRng::seed_from_u64(seed))));
    (0..mutations).map(each).sum()
}

#[test]
fn configurations() {
    let accepted = drive(&["fuzz/corpus/config", "tests/configs"], 5_000, fuzz::config);
    assert!(accepted > 100, "{accepted} were accepted");
}

#[test]
fn indexes() {
    let accepted = drive(&["fuzz/corpus/index"], 20_000, |data| fuzz::index(data) > 0);
    assert!(accepted > 50, "{accepted} were accepted");
}

#[test]
fn headers() {
    let accepted = drive(&["fuzz/corpus/header"], 20_000, |data| fuzz::header(data) > 0);
    assert!(accepted > 50, "{accepted} were accepted");
}

/// A file is accepted if it has the configuration of a model.
#[test]
fn gguf_files() {
    let accepted = drive(&["fuzz/corpus/gguf"], 5_000, |data| fuzz::gguf::read(data) == fuzz::gguf::Outcome::Model);
    assert!(accepted > 50, "{accepted} were accepted");
}

/// The bound counts what it should.
#[test]
fn allocations_are_counted() {
    let (kept, bytes) = peak(|| std::hint::black_box(vec![1u8; 1 << 20]).len());
    assert_eq!(kept, 1 << 20);
    assert!((1 << 20..2 << 20).contains(&bytes), "{bytes}");
}
