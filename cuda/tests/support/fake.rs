//! The fake driver (cuda/fake): built with g++ where tests run, loaded under the name of NVIDIA's; its counters of leaks and
//! misuse are checked after each test.
//!
//! cudarc opens `libcuda.so` by name; the fake is in the process before that, with that name in its dynamic section,
//! so the loader answers with it even where a real driver is installed.

#[path = "compiled.rs"]
#[allow(clippy::duplicate_mod, reason = "fake.rs and shim.rs are used together and apart")]
pub(crate) mod compiled;

use libloading::Library;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Mirrors `FakeCounts` of cuda/fake/fake.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) contexts: u64,
    pub(crate) streams: u64,
    pub(crate) events: u64,
    pub(crate) buffers: u64,
    pub(crate) pinned: u64,
    pub(crate) modules: u64,
    pub(crate) graphs: u64,
    pub(crate) reservations: u64,
    pub(crate) physical: u64,
    pub(crate) mappings: u64,
    pub(crate) bytes_used: u64,
    pub(crate) double_maps: u64,
    pub(crate) unmaps_of_unmapped: u64,
    pub(crate) released_while_mapped: u64,
    pub(crate) bad_handles: u64,
    pub(crate) bad_addresses: u64,
    pub(crate) reservations_busy: u64,
    pub(crate) unmaps_with_work_queued: u64,
    pub(crate) kernels_run: u64,
    pub(crate) copies_run: u64,
    pub(crate) maps: u64,
    pub(crate) unmaps: u64,
    pub(crate) made_for_rdma: u64,
    pub(crate) dependents: u64,
    pub(crate) dependents_misplaced: u64,
    pub(crate) begun_early: u64,
}

impl Counts {
    /// Counters of live objects and of misuse: all zero after a test that cleaned up.
    fn faults(&self) -> [(&'static str, u64); 18] {
        [
            ("contexts", self.contexts),
            ("streams", self.streams),
            ("events", self.events),
            ("buffers", self.buffers),
            ("pinned", self.pinned),
            ("modules", self.modules),
            ("graphs", self.graphs),
            ("reservations", self.reservations),
            ("physical", self.physical),
            ("mappings", self.mappings),
            ("bytes", self.bytes_used),
            ("double maps", self.double_maps),
            ("unmaps of unmapped", self.unmaps_of_unmapped),
            ("released while mapped", self.released_while_mapped),
            ("bad handles", self.bad_handles),
            ("bad addresses", self.bad_addresses),
            ("reservations busy", self.reservations_busy),
            ("dependents misplaced", self.dependents_misplaced),
        ]
    }
}

/// CUDA's error codes, as tests inject them.
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const UNKNOWN: i32 = 999;

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
static ONE_TEST: Mutex<()> = Mutex::new(());

/// The fake driver, for one test at a time: its state is the process's.
pub(crate) struct Fake {
    before: Counts,
    _one: MutexGuard<'static, ()>,
}

impl Fake {
    /// The fake driver with this much memory, pages of this size and this schedule (see cuda/fake/fake.h).
    ///
    /// # Errors
    /// Why there is none, for people: g++ is missing.
    pub(crate) fn new(memory: u64, granularity: u64, schedule: u64) -> Result<Self, String> {
        let one = ONE_TEST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)?;
        let mut fake = Self { before: Counts::default(), _one: one };
        fake.fail("", 0, 0);
        // SAFETY: the function has this type.
        unsafe { symbol::<unsafe extern "C" fn(u64, u64)>("lagoon_fake_memory")(memory, granularity) };
        fake.schedule(schedule);
        fake.turns(false);
        fake.device(8, 0, 163 << 10);
        fake.driver(13_000);
        fake.trap("");
        fake.devices(1, 0, false);
        fake.sharing(true, true);
        fake.before = fake.counts();
        Ok(fake)
    }

    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        // SAFETY: the function has this type and fills the live counts.
        unsafe { symbol::<unsafe extern "C" fn(*mut Counts)>("lagoon_fake_counts")(&raw mut counts) };
        counts
    }

    pub(crate) fn fail(&self, function: &str, nth: u64, code: i32) {
        let name = CString::new(function).expect("a name");
        let set = symbol::<unsafe extern "C" fn(*const i8, u64, i32)>("lagoon_fake_fail");
        // SAFETY: the function has this type and copies the name.
        unsafe { set(name.as_ptr().cast(), nth, code) };
    }

    /// As `fail`, and so does every such call after it.
    pub(crate) fn fail_from(&self, function: &str, nth: u64, code: i32) {
        let name = CString::new(function).expect("a name");
        let set = symbol::<unsafe extern "C" fn(*const i8, u64, i32)>("lagoon_fake_fail_from");
        // SAFETY: the function has this type and copies the name.
        unsafe { set(name.as_ptr().cast(), nth, code) };
    }

    /// Compute capability, and bytes of shared memory that a block may ask for, of contexts opened from now on.
    pub(crate) fn device(&self, major: i32, minor: i32, shared_bytes: i32) {
        // SAFETY: the function has this type.
        unsafe {
            symbol::<unsafe extern "C" fn(i32, i32, i32)>("lagoon_fake_device")(major, minor, shared_bytes);
        }
    }

    /// The version of CUDA that the driver supports, of contexts opened from now on.
    pub(crate) fn driver(&self, version: i32) {
        // SAFETY: the function has this type.
        unsafe { symbol::<unsafe extern "C" fn(i32)>("lagoon_fake_driver")(version) };
    }

    /// Every kernel whose name contains this text traps; none where it is empty.
    pub(crate) fn trap(&self, kernels: &str) {
        let name = CString::new(kernels).expect("a name");
        let set = symbol::<unsafe extern "C" fn(*const i8)>("lagoon_fake_trap");
        // SAFETY: the function has this type and copies the name.
        unsafe { set(name.as_ptr().cast()) };
    }

    /// Devices that are seen, the last byte of the first one's name, and whether they can access each other's memory.
    pub(crate) fn devices(&self, devices: i32, uuid: i32, peers: bool) {
        // SAFETY: the function has this type.
        unsafe {
            symbol::<unsafe extern "C" fn(i32, i32, i32)>("lagoon_fake_devices")(devices, uuid, i32::from(peers));
        }
    }

    /// Whether memory can be shared by descriptor, and registered for remote direct access.
    pub(crate) fn sharing(&self, shareable: bool, rdma: bool) {
        // SAFETY: the function has this type.
        unsafe {
            symbol::<unsafe extern "C" fn(i32, i32)>("lagoon_fake_sharing")(i32::from(shareable), i32::from(rdma));
        }
    }

    pub(crate) fn schedule(&self, seed: u64) {
        // SAFETY: the function has this type.
        unsafe { symbol::<unsafe extern "C" fn(u64)>("lagoon_fake_schedule")(seed) };
    }

    /// Whether kernels' lanes and warps take turns in every order.
    pub(crate) fn turns(&self, all: bool) {
        // SAFETY: the function has this type.
        unsafe { symbol::<unsafe extern "C" fn(i32)>("lagoon_fake_turns")(i32::from(all)) };
    }

    pub(crate) fn kernels(&self, library: &Path) {
        let path = CString::new(library.to_str().expect("a path in UTF-8")).expect("a path");
        // SAFETY: the function has this type and copies the path.
        unsafe { symbol::<unsafe extern "C" fn(*const i8)>("lagoon_fake_kernels")(path.as_ptr().cast()) };
    }

    /// Asserts that nothing is left and nothing was misused since this value was made, which also ends the test's turn.
    #[track_caller]
    pub(crate) fn finish(self) {
        let after = self.counts();
        for ((what, before), (_, after)) in self.before.faults().into_iter().zip(after.faults()) {
            assert_eq!(before, after, "{what}: before the test and after it");
        }
    }
}

fn symbol<F: Copy>(name: &str) -> F {
    let library = LIBRARY.get().and_then(|l| l.as_ref().ok()).expect("loaded by `Fake::new`");
    // SAFETY: callers name the function's type.
    *unsafe { library.get::<F>(name.as_bytes()) }.expect("the fake driver has this function")
}

fn load() -> Result<Library, String> {
    let path = build()?;
    // SAFETY: our own library, whose initialisers do nothing.
    unsafe { Library::new(&path) }.map_err(|error| format!("the fake driver does not load: {error}"))
}

/// Builds the fake driver.
pub(crate) fn build() -> Result<PathBuf, String> {
    let files = ["driver.cpp", "streams.inc", "memory.inc", "launch.inc", "vmm.inc", "fake.h", "../shim/tensor_map.h"];
    compile("fake-driver", &files, "libcuda.so")
}

/// Builds the fake of cuBLASLt, which works beside the fake driver only.
pub(crate) fn build_blas() -> Result<PathBuf, String> {
    compile("fake-blas", &["blas.cpp", "fake.h"], "libcublasLt.so")
}

/// Compiles the first of these sources, unless the same were compiled before. The library's folder holds nothing else that
/// loaders look for.
fn compile(kind: &str, files: &[&str], soname: &str) -> Result<PathBuf, String> {
    // From whichever crate's tests use this file.
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/fake");
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        for byte in std::fs::read(sources.join(file)).map_err(|error| format!("{file}: {error}"))? {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{kind}-{hash:016x}"));
    let library = folder.join(soname);
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    compiled::once(&library, |fresh| {
        let output = Command::new("g++")
            .args(["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"])
            .arg(format!("-Wl,-soname,{soname}"))
            .arg("-o")
            .arg(fresh)
            .arg(sources.join(files[0]))
            .arg("-ldl")
            .output()
            .map_err(|error| format!("g++ does not run: {error}"))?;
        assert!(output.status.success(), "{kind} does not build:\n{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    })?;
    Ok(library)
}

/// Notes a skipped test as the conformance suite does, so that CI fails on skips that are not listed.
#[allow(clippy::print_stderr, reason = "a skipped test says so to people")]
pub(crate) fn skip(name: &str, reason: &str) {
    use std::io::Write;
    eprintln!("skipped {name}: {reason}");
    if let Some(path) = std::env::var_os("LAGOON_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(path).expect("the skip log opens");
        // One write: other tests append at the same time.
        log.write_all(format!("{name}\t{reason}\n").as_bytes()).expect("the skip log takes a line");
    }
}

/// The fake driver, or a return from the test that notes why it is skipped.
macro_rules! fake_or_skip {
    ($memory:expr, $granularity:expr, $schedule:expr) => {
        match $crate::fake::Fake::new($memory, $granularity, $schedule) {
            Ok(fake) => fake,
            Err(reason) => {
                $crate::fake::skip(concat!(module_path!(), " ", file!(), ":", line!()), &reason);
                return;
            }
        }
    };
}
