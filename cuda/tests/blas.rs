//! Linear layers by cuBLASLt, against f64 and where the library is absent, of another version, or refuses: over the fake
//! library and the fake driver (cuda/fake), which check layouts, alignment, workspace and order.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::Fake;
use lagoon_backend::conformance::Data;
use lagoon_backend::{Device, DeviceError, Mode, WeightFormat};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, CudaWeight, LinearLayers};
use lagoon_types::DType;
use libloading::Library;
use std::ffi::CString;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Mirrors `Counts` of cuda/fake/blas.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    handles: u64,
    descriptors: u64,
    matmuls: u64,
    heuristics: u64,
    misuse: u64,
}

/// The fake library, which stays loaded.
fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let open = || {
        // SAFETY: our own library, whose initialisers do nothing.
        unsafe { Library::new(fake::build_blas()?) }.map_err(|error| error.to_string())
    };
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn counts() -> Counts {
    let mut counts = Counts::default();
    // SAFETY: the function has this type and fills the live counts.
    unsafe {
        library().unwrap().get::<unsafe extern "C" fn(*mut Counts)>("lagoon_fake_blas_counts").unwrap()(
            &raw mut counts,
        );
    }
    counts
}

fn version(version: u64) {
    // SAFETY: the function has this type.
    unsafe { library().unwrap().get::<unsafe extern "C" fn(u64)>("lagoon_fake_blas_version").unwrap()(version) }
}

fn fail(function: &str, nth: u64, status: i32) {
    let name = CString::new(function).unwrap();
    type Set = unsafe extern "C" fn(*const std::ffi::c_char, u64, i32);
    // SAFETY: the function has this type and copies the name.
    unsafe { library().unwrap().get::<Set>("lagoon_fake_blas_fail").unwrap()(name.as_ptr(), nth, status) }
}

fn options(file: &Path, precision: Precision) -> CudaOptions {
    let tuning = Some(Tuning { precision, ..Tuning::untuned(8) });
    CudaOptions { tuning, linear: LinearLayers::File(file.to_owned()), ..CudaOptions::default() }
}

/// Runs `test` with the file of the library, over the fake driver; at the end nothing is left and nothing was misused.
fn with_library(name: &str, test: impl FnOnce(&Path, &Fake)) {
    static SEED: AtomicU64 = AtomicU64::new(2);
    let ready = shim::library().and_then(|kernels| {
        let fake = Fake::new(1 << 30, 1 << 16, SEED.fetch_add(1, Ordering::Relaxed))?;
        fake.kernels(&kernels);
        library()?;
        Ok((fake, fake::build_blas()?))
    });
    match ready {
        Ok((fake, file)) => {
            version(130_002);
            fail("", 0, 0);
            let before = counts();
            test(&file, &fake);
            let after = counts();
            assert_eq!((after.handles, after.descriptors), (0, 0), "what was created is destroyed");
            assert_eq!(before.misuse, after.misuse, "nothing that NVIDIA's manual forbids");
            fake.finish();
        }
        Err(reason) => fake::skip(name, &reason),
    }
}

/// A product on the device against f64, within `loss` of the sum of its terms' magnitudes.
fn check(
    device: &mut CudaDevice,
    (rows, n, k): (usize, usize, usize),
    dtype: DType,
    mode: Mode,
    loss: f64,
    scale: f32,
) {
    let mut data = Data::new(5 + rows as u64);
    let x: Vec<f32> = data.values(rows * k).iter().map(|v| v * scale).collect();
    let weight = data.weight(device, dtype, n, k);
    compare(device, &mut data, &x, (rows, n, k), &weight, (mode, loss));
}

/// The product of activations and a weight, whose elements are beside it.
fn compare(
    device: &mut CudaDevice,
    data: &mut Data,
    x: &[f32],
    (rows, n, k): (usize, usize, usize),
    (weight, w): &(CudaWeight, Vec<f32>),
    (mode, loss): (Mode, f64),
) {
    // One row more on both sides stays as it is.
    let mut tensor = device.tensor(rows + 1, k).unwrap();
    device.write(&mut tensor, 0, x).unwrap();
    let before = data.values((rows + 1) * n);
    let mut out = device.tensor(rows + 1, n).unwrap();
    device.write(&mut out, 0, &before).unwrap();
    device.matmul(&tensor, weight, rows, mode, &mut out).unwrap();
    let mut got = Vec::new();
    device.read(&out, 0..rows + 1, 0..n, &mut got).unwrap();
    assert_eq!(got[rows * n..], before[rows * n..], "rows beyond");
    for row in 0..rows {
        for col in 0..n {
            let mut want = if mode == Mode::Add { f64::from(before[row * n + col]) } else { 0.0 };
            let mut sum = want.abs();
            for i in 0..k {
                let product = f64::from(x[row * k + i]) * f64::from(w[col * k + i]);
                want += product;
                sum += product.abs();
            }
            let got = f64::from(got[row * n + col]);
            assert!((got - want).abs() <= loss * sum, "{rows} {n} {k}: {row}, {col} is {got}, not {want}");
        }
    }
}

/// What terms of a type lose; f32 sums besides.
fn loss(dtype: DType, precision: Precision) -> f64 {
    match (dtype, precision) {
        (DType::F32, _) => 2f64.powi(-22),
        (DType::F16, Precision::Exact) => 2f64.powi(-21),
        (DType::BF16, Precision::Exact) => 2f64.powi(-16),
        (DType::F16, Precision::Fast) => 2f64.powi(-11),
        (DType::BF16, Precision::Fast) => 2f64.powi(-8),
    }
}

#[test]
fn odd_shapes_against_f64() {
    with_library("odd_shapes_against_f64", |file, _| {
        for precision in [Precision::Exact, Precision::Fast] {
            let mut device = CudaDevice::open(b"any image", options(file, precision)).unwrap();
            let by = device.linear_layers();
            assert!(
                by.starts_with("cuBLASLt 13.0.2 (") && by.ends_with("), TF32 off; own kernels for few rows"),
                "{by}"
            );
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for shape in [(17, 4, 8), (33, 68, 72), (40, 100, 13), (65, 32, 129), (18, 64, 200)] {
                    for mode in [Mode::Set, Mode::Add] {
                        let before = counts().matmuls;
                        check(&mut device, shape, dtype, mode, loss(dtype, precision), 1.0);
                        let terms = if dtype == DType::BF16 && precision == Precision::Exact { 2 } else { 1 };
                        // f32 rows of 13 or 129 elements do not begin at multiples of 16 bytes: own kernels.
                        let unaligned = dtype == DType::F32 && shape.2 % 4 != 0;
                        assert_eq!(counts().matmuls - before, if unaligned { 0 } else { terms }, "{dtype} {shape:?}");
                    }
                }
            }
        }
    });
}

/// Elements of packed weights are multiplied as f16: one product by the library for each of their terms.
#[test]
fn packed_weights_are_multiplied_in_f16() {
    with_library("packed_weights_are_multiplied_in_f16", |file, _| {
        for (precision, terms, loss) in [(Precision::Exact, 2, 2f64.powi(-20)), (Precision::Fast, 1, 2f64.powi(-10))] {
            let mut device = CudaDevice::open(b"any image", options(file, precision)).unwrap();
            for format in [WeightFormat::Q8_0, WeightFormat::Q4K, WeightFormat::Mxfp4] {
                let (rows, n, k) = (33, 68, 512);
                let mut data = Data::new(9);
                let (weight, x) = (data.packed_weight(&mut device, format, (n, k)), data.values(rows * k));
                let before = counts().matmuls;
                compare(&mut device, &mut data, &x, (rows, n, k), &weight, (Mode::Add, loss));
                assert_eq!(counts().matmuls - before, terms, "{format}");
            }
        }
    });
}

#[test]
fn activations_beyond_f16_keep_their_scale() {
    with_library("activations_beyond_f16_keep_their_scale", |file, _| {
        let mut device = CudaDevice::open(b"any image", options(file, Precision::Exact)).unwrap();
        for scale in [1e6, 1e-4] {
            check(&mut device, (20, 40, 96), DType::F16, Mode::Add, loss(DType::F16, Precision::Exact), scale);
        }
    });
}

/// A shape is asked for once; few rows and odd columns are own kernels'.
#[test]
fn what_was_chosen_is_kept() {
    with_library("what_was_chosen_is_kept", |file, _| {
        let mut device = CudaDevice::open(b"any image", options(file, Precision::Exact)).unwrap();
        let before = counts();
        for _ in 0..3 {
            check(&mut device, (20, 40, 96), DType::BF16, Mode::Set, loss(DType::BF16, Precision::Exact), 1.0);
        }
        assert_eq!((counts().heuristics - before.heuristics, counts().matmuls - before.matmuls), (1, 6));
        let before = counts();
        for shape in [(1, 40, 96), (16, 40, 96), (20, 41, 96)] {
            check(&mut device, shape, DType::F16, Mode::Set, loss(DType::F16, Precision::Exact), 1.0);
        }
        assert_eq!(counts().matmuls, before.matmuls);
    });
}

#[test]
fn tf32_is_off_unless_asked_for() {
    with_library("tf32_is_off_unless_asked_for", |file, _| {
        let options = CudaOptions { tf32: true, ..options(file, Precision::Exact) };
        let mut device = CudaDevice::open(b"any image", options).unwrap();
        assert!(device.linear_layers().contains("TF32 on"));
        check(&mut device, (20, 40, 96), DType::F32, Mode::Set, 2f64.powi(-10), 1.0);
        let within_f32 = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            check(&mut device, (20, 40, 96), DType::F32, Mode::Set, loss(DType::F32, Precision::Exact), 1.0);
        }));
        assert!(within_f32.is_err(), "the fake rounds as TF32 does");
    });
}

/// Own kernels compute products for which the library has no algorithm.
#[test]
fn shapes_without_a_choice_are_own_kernels() {
    with_library("shapes_without_a_choice_are_own_kernels", |file, _| {
        let mut device = CudaDevice::open(b"any image", options(file, Precision::Exact)).unwrap();
        fail("cublasLtMatmulAlgoGetHeuristic", 1, 15);
        let before = counts().matmuls;
        for _ in 0..2 {
            check(&mut device, (20, 40, 96), DType::BF16, Mode::Set, loss(DType::BF16, Precision::Exact), 1.0);
        }
        assert_eq!(counts().matmuls, before, "remembered");
    });
}

#[test]
fn refusals_are_errors_and_leave_nothing() {
    with_library("refusals_are_errors_and_leave_nothing", |file, _| {
        let mut device = CudaDevice::open(b"any image", options(file, Precision::Exact)).unwrap();
        let mut data = Data::new(1);
        for (function, nth) in [
            ("cublasLtMatrixLayoutCreate", 1),
            ("cublasLtMatrixLayoutCreate", 3),
            ("cublasLtMatmulDescCreate", 1),
            ("cublasLtMatmulDescSetAttribute", 1),
            ("cublasLtMatmulPreferenceCreate", 1),
            ("cublasLtMatmulPreferenceSetAttribute", 2),
            ("cublasLtMatmulAlgoGetHeuristic", 1),
            ("cublasLtMatmul", 1),
        ] {
            let (weight, _) = data.weight(&mut device, DType::F16, 40, 64);
            let (x, mut out) = (device.tensor(30, 64).unwrap(), device.tensor(30, 40).unwrap());
            let descriptors = counts().descriptors;
            fail(function, nth, 14);
            let error = device.matmul(&x, &weight, 30, Mode::Set, &mut out).unwrap_err();
            assert!(matches!(&error, DeviceError::Failed(text) if text.contains(function)), "{function}: {error}");
            if function != "cublasLtMatmul" {
                assert_eq!(counts().descriptors, descriptors, "{function}");
            }
            device.sync().unwrap();
        }
    });
}

/// Without the library the device opens, multiplies with own kernels, and says why.
#[test]
fn absent_old_and_new_libraries() {
    with_library("absent_old_and_new_libraries", |file, _| {
        let opened = |file: &Path| CudaDevice::open(b"any image", options(file, Precision::Exact)).unwrap();
        let absent = opened(Path::new("/there/is/no/libcublasLt.so"));
        assert!(absent.linear_layers().starts_with("own kernels (/there/is/no/libcublasLt.so: "));
        drop(absent);
        let own = CudaOptions { linear: LinearLayers::Own, ..options(file, Precision::Exact) };
        assert_eq!(CudaDevice::open(b"any image", own).unwrap().linear_layers(), "own kernels (asked for)");
        for (number, reason) in [(110_803, "cuBLASLt 11.8.3 is not of version 12 to 13"), (140_000, "cuBLASLt 14.0.0")]
        {
            version(number);
            let mut device = opened(file);
            assert!(device.linear_layers().contains(reason), "{}", device.linear_layers());
            let before = counts().matmuls;
            check(&mut device, (20, 40, 96), DType::BF16, Mode::Set, loss(DType::BF16, Precision::Exact), 1.0);
            assert_eq!(counts().matmuls, before);
        }
        version(120_405);
        assert!(opened(file).linear_layers().starts_with("cuBLASLt 12.4.5"));
        fail("cublasLtCreate", 1, 1);
        assert!(opened(file).linear_layers().contains("cublasLtCreate failed with status 1"));
    });
}

/// NVIDIA's library registers destructors that are called after the last handle is gone, so its code stays mapped.
#[test]
fn the_library_is_never_unloaded() {
    with_library("the_library_is_never_unloaded", |file, _| {
        // A file of its own: the test itself holds the other one.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kept-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let kept = folder.join("libcublasLt-kept.so");
        std::fs::copy(file, &kept).unwrap();
        let device = CudaDevice::open(b"any image", options(&kept, Precision::Exact)).unwrap();
        assert!(device.linear_layers().starts_with("cuBLASLt 13.0.2"), "{}", device.linear_layers());
        drop(device);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.contains(kept.to_str().unwrap()), "{maps}");
        std::fs::remove_dir_all(&folder).unwrap();
    });
}
