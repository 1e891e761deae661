//! The host shim as a library: kernels compiled for the CPU, launched by name (cuda/shim).
//!
//! It is compiled once for each state of its sources with `c++`, into this target folder. With the environment variable
//! `LAGOON_SHIM_SANITIZE` it is compiled with the address sanitizer, whose runtime must then be preloaded.

#[path = "compiled.rs"]
#[allow(clippy::duplicate_mod, reason = "fake.rs and shim.rs are used together and apart")]
mod compiled;

use lagoon_cuda::kernels::boxes::{MapShape, TensorMap};
use lagoon_types::KvDType;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// Set for a process that runs under the address sanitizer.
pub(crate) const SANITIZE: &str = "LAGOON_SHIM_SANITIZE";

/// How lanes and warps take turns; see cuda/shim/shim.cpp.
pub(crate) const ORDERS: c_int = 4;

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(dir).expect("the kernels' folder is readable");
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| ["cu", "cuh", "cpp", "h"].iter().any(|x| e == OsStr::new(x))) {
            out.push(path);
        }
    }
}

/// A kernel with one mistake, which a check of results must reject: `from`, which occurs once in the source `file`, is replaced
/// by `to` before the shim is compiled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

/// `attention_wgmma_*` multiply the third tile of each item by a stale stage: its values are those that the stage held a round
/// before (keys 0 to 127 of the item in place of 256 to 383).
pub(crate) const STALE_STAGE: Mutant = Mutant {
    name: "stale-stage",
    file: "shared/attention_wgmma.cuh",
    from: "            if (values) {\n",
    to: "            if (values && tile == 2) {\n                barrier_arrive(shared.values_full(stage));\n            } else if (values) {\n",
};

/// `attention_wgmma_*` skip the third tile of each item: keys 256 to 383 are masked.
pub(crate) const SKIPPED_TILE: Mutant = Mutant {
    name: "skipped-tile",
    file: "shared/attention_wgmma.cuh",
    from: "if (index < item.keys) {",
    to: "if (index < item.keys && index / WGMMA_KEYS != 2) {",
};

/// The compiled shim; an error, for people, where there is no compiler.
pub(crate) fn library() -> Result<PathBuf, String> {
    compiled_shim(None)
}

/// The shim in which one kernel is replaced by its mutant, under the same name: for `Fake::kernels` or `LAGOON_FAKE_KERNELS`.
pub(crate) fn mutant(mutant: &Mutant) -> Result<PathBuf, String> {
    compiled_shim(Some(mutant))
}

fn compiled_shim(mutant: Option<&Mutant>) -> Result<PathBuf, String> {
    let sanitize = std::env::var_os(SANITIZE).is_some();
    // From whichever crate's tests use this file.
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda");
    let mut files = Vec::new();
    sources(&root.join("kernels"), &mut files);
    sources(&root.join("shim"), &mut files);
    files.sort();
    let mut hash = DefaultHasher::new();
    for file in &files {
        std::fs::read(file).expect("a source is readable").hash(&mut hash);
    }
    let flags: &[&str] = if sanitize { &["-O1", "-g1", "-fsanitize=address"] } else { &["-O2", "-pthread"] };
    (FLAGS, flags).hash(&mut hash);
    let kind = if sanitize { "asan" } else { "plain" };
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let named = |kind: &str, hash: &DefaultHasher| tmp.join(format!("shim-{kind}-{:016x}.so", hash.finish()));
    let plain = named(kind, &hash);
    compiled::once(&plain, |fresh| {
        // Objects stay: a mutant is linked with those of the other kernels.
        compile(root, flags, &Part::ALL.map(|part| (part, part.object(&plain))))?;
        link(flags, &Part::ALL.map(|part| part.object(&plain)), fresh)
    })?;
    let Some(mutant) = mutant else { return Ok(plain) };
    assert!(!sanitize, "mutants have no sanitizer");
    (mutant.file, mutant.from, mutant.to, MUTANT_FLAGS).hash(&mut hash);
    let out = named(mutant.name, &hash);
    compiled::once(&out, |fresh| {
        let copy = &out.with_extension("src");
        copy_mutated(root, &files, mutant, copy);
        let done = compile(copy, MUTANT_FLAGS, &[(Part::Attention, Part::Attention.object(&out))]);
        // What is left does no harm.
        let _ = std::fs::remove_dir_all(copy);
        done?;
        let of = |part| if part == Part::Attention { &out } else { &plain };
        link(flags, &Part::ALL.map(|part| part.object(of(part))), fresh)
    })?;
    Ok(out)
}

/// What is compiled by itself: the machine's two sources, the kernels with mistakes, those of attention, and all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Scheduler,
    Asynchronous,
    Faulty,
    Attention,
    OtherKernels,
}

impl Part {
    const ALL: [Self; 5] = [Self::Attention, Self::OtherKernels, Self::Scheduler, Self::Asynchronous, Self::Faulty];

    /// Its object file beside a library's file.
    fn object(self, library: &Path) -> PathBuf {
        library.with_extension(format!("{self:?}.o"))
    }

    fn source(self, root: &Path, object: &Path) -> PathBuf {
        match self {
            Self::Scheduler => root.join("shim/shim.cpp"),
            Self::Asynchronous => root.join("shim/async.cpp"),
            Self::Faulty => root.join("shim/faulty.cu"),
            Self::Attention => root.join("kernels").join(ATTENTION),
            Self::OtherKernels => {
                let all = std::fs::read_to_string(root.join("kernels/all.cu")).expect("a source is readable");
                let include = format!("#include \"{ATTENTION}\"\n");
                assert_eq!(all.matches(&include).count(), 1, "{ATTENTION} in all.cu");
                let source = object.with_extension("cu");
                std::fs::write(&source, all.replacen(&include, "", 1)).expect("a source is written");
                source
            }
        }
    }
}

/// Of a mutant's kernels, which run a few cases: what counts is how soon they are there.
const MUTANT_FLAGS: &[&str] = &["-O1", "-pthread"];

/// The source of the kernels that mutants are of; they change headers that no other one includes.
const ATTENTION: &str = "attention.cu";

/// The sources at another place, with the mutant's mistake.
fn copy_mutated(root: &Path, files: &[PathBuf], mutant: &Mutant, to: &Path) {
    let wrong = root.join("kernels").join(mutant.file);
    assert!(files.contains(&wrong), "{} is a kernel's source", wrong.display());
    for file in files {
        let to = to.join(file.strip_prefix(root).expect("a source below the root"));
        std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder for the sources");
        let mut text = std::fs::read_to_string(file).expect("a source is readable");
        if *file == wrong {
            let places = text.matches(mutant.from).count();
            assert_eq!(places, 1, "{}: places of {:?} in {}", mutant.name, mutant.from, mutant.file);
            text = text.replacen(mutant.from, mutant.to, 1);
        }
        std::fs::write(&to, text).expect("a source is written");
    }
}

/// Flags of every shim.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-fPIC",
    "-DLAGOON_SHIM",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    // TLS descriptors instead of a call of `__tls_get_addr`: shared memory is thread-local. The first read of a thread,
    // in which an older C library may change vector registers, is the launch's.
    #[cfg(target_arch = "x86_64")]
    "-mtls-dialect=gnu2",
];

/// Compiles sources side by side.
fn compile(root: &Path, flags: &[&str], parts: &[(Part, PathBuf)]) -> Result<(), String> {
    let running: Vec<Child> = parts
        .iter()
        .map(|(part, object)| {
            let mut command = Command::new("c++");
            command.args(FLAGS).args(flags).arg("-c").arg("-I").arg(root.join("kernels")).arg("-o").arg(object);
            command.args(["-x", "c++"]).arg(part.source(root, object));
            // A preloaded sanitizer is for the tests, not for the compiler.
            command.env_remove("LD_PRELOAD").stderr(Stdio::piped()).spawn()
        })
        .collect::<Result<_, _>>()
        .map_err(|e| format!("no C++ compiler: {e}"))?;
    // All of them, before one that failed ends this: others may start anew then.
    let ended: Vec<_> = running.into_iter().map(Child::wait_with_output).collect();
    for (output, (part, _)) in ended.into_iter().zip(parts) {
        let output = output.map_err(|e| format!("the C++ compiler: {e}"))?;
        assert!(output.status.success(), "{part:?} does not compile:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn link(flags: &[&str], objects: &[PathBuf], out: &Path) -> Result<(), String> {
    let mut command = Command::new("c++");
    command.args(flags).arg("-shared").arg("-o").arg(out).args(objects);
    let output = command.env_remove("LD_PRELOAD").output().map_err(|e| format!("no C++ compiler: {e}"))?;
    assert!(output.status.success(), "the shim does not link:\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The sanitizer's runtime, to be preloaded.
pub(crate) fn sanitizer() -> Option<PathBuf> {
    let output = Command::new("c++").arg("-print-file-name=libasan.so").output().ok()?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    path.is_absolute().then_some(path)
}

type LaunchFn = unsafe extern "C" fn(*const c_char, *const c_uint, *const c_uint, c_uint, *mut *mut c_void) -> c_int;

type EncodeFn = unsafe extern "C" fn(
    *mut TensorMap,
    c_int,
    c_uint,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The loaded shim.
#[derive(Debug)]
pub(crate) struct Shim {
    launch: LaunchFn,
    encode: EncodeFn,
    order: unsafe extern "C" fn(c_int, u64),
    error: unsafe extern "C" fn() -> *const c_char,
    params_bytes: unsafe extern "C" fn(*const c_char) -> usize,
}

impl Shim {
    /// The shim of this process.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static SHIM: OnceLock<Result<Shim, String>> = OnceLock::new();
        SHIM.get_or_init(|| Self::open(&library()?)).as_ref().map_err(Clone::clone)
    }

    /// A compiled shim, which stays loaded.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: the library is ours; its initialisers register kernels. It is never unloaded.
        let library = Box::leak(Box::new(unsafe { libloading::Library::new(path) }.map_err(|e| e.to_string())?));
        // SAFETY: the types are those of cuda/shim/shim.cpp.
        unsafe {
            Ok(Self {
                launch: *library.get(b"lagoon_shim_launch").map_err(|e| e.to_string())?,
                encode: *library.get(b"lagoon_shim_encode_tiled").map_err(|e| e.to_string())?,
                order: *library.get(b"lagoon_shim_order").map_err(|e| e.to_string())?,
                error: *library.get(b"lagoon_shim_error").map_err(|e| e.to_string())?,
                params_bytes: *library.get(b"lagoon_shim_params_bytes").map_err(|e| e.to_string())?,
            })
        }
    }

    /// Bytes of a kernel's parameter; 0 where there is none of this name.
    pub(crate) fn params_bytes(&self, name: &str) -> usize {
        let name = CString::new(name).expect("no NUL in a name");
        // SAFETY: a string that outlives the call.
        unsafe { (self.params_bytes)(name.as_ptr()) }
    }

    /// A tensor map as the driver would make it; `None` for parameters that the driver would refuse.
    pub(crate) fn encode(&self, shape: &MapShape) -> Option<TensorMap> {
        let mut map = TensorMap::default();
        let dtype = if shape.dtype == KvDType::F16 { 6 } else { 9 };
        let (address, steps) = (shape.address as *mut c_void, [1u32; 2]);
        // SAFETY: arrays of as many elements as the rank says, and a live map.
        let code = unsafe {
            (self.encode)(
                &raw mut map,
                dtype,
                2,
                address,
                shape.dims.as_ptr(),
                &raw const shape.stride,
                shape.boxed.as_ptr(),
                steps.as_ptr(),
                0,
                3,
                2,
                0,
            )
        };
        (code == 0).then_some(map)
    }

    /// How this thread's next launches take turns.
    pub(crate) fn set_order(&self, order: c_int, seed: u64) {
        // SAFETY: sets two numbers.
        unsafe { (self.order)(order, seed) }
    }

    /// Launches a kernel and waits for it.
    ///
    /// # Safety
    /// The addresses in `params` must be those of memory that the kernel may access as it documents.
    pub(crate) unsafe fn launch(
        &self,
        name: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<(), String> {
        assert_eq!(self.params_bytes(name), params.len(), "the parameter of {name}");
        let name = CString::new(name).expect("no NUL in a name");
        let block = [block, 1, 1];
        let mut args = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: arrays of the lengths that the shim reads; it only reads the parameter.
        let code =
            unsafe { (self.launch)(name.as_ptr(), grid.as_ptr(), block.as_ptr(), shared_bytes, args.as_mut_ptr()) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a string that the shim keeps until this thread's next launch.
        let error = unsafe { CStr::from_ptr((self.error)()) };
        Err(format!("{}: {} ({code})", name.to_string_lossy(), error.to_string_lossy()))
    }
}
