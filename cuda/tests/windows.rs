//! KV that goes from one device to another through a window, over the fake driver: between two processes, each with a store of
//! its own layout, bit by bit and without the host's memory.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::{Fake, OUT_OF_MEMORY};
use lagoon_backend::conformance::Data;
use lagoon_backend::{CpuDevice, Device, DeviceError, KvPiece};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, LinearLayers};
use lagoon_types::{DType, KvShape, KvSpace};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::slice;

const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 40, dtype: DType::F16 };
const LAYERS: u32 = SHAPE.layers;
/// Tokens that are handed over.
const TOKENS: u32 = 20;
/// Where the answer lies in the window.
const ANSWER: usize = 48 << 10;

fn driver(name: &str, seed: u64) -> Option<Fake> {
    let fake = shim::library().and_then(|kernels| {
        let fake = Fake::new(1 << 30, 1 << 12, seed)?;
        fake.kernels(&kernels);
        Ok(fake)
    });
    fake.map_err(|reason| fake::skip(name, &reason)).ok()
}

fn open() -> CudaDevice {
    CudaDevice::open(b"any image", CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() }).unwrap()
}

/// A layer's KV of some tokens, the same in every process.
fn tokens(seed: u64, layer: u32, count: u32) -> Vec<u8> {
    let elements = count as usize * SHAPE.layer_token_bytes() / SHAPE.dtype.size();
    Data::new(seed * 64 + u64::from(layer)).stored(SHAPE.dtype, elements).0
}

fn write(device: &mut CudaDevice, kv: &mut CudaKv, slot0: u32, seed: u64) {
    device.kv_hold(kv, slice::from_ref(&(slot0..slot0 + TOKENS))).unwrap();
    for layer in 0..LAYERS {
        device.kv_write(kv, layer as usize, slot0, &tokens(seed, layer, TOKENS)).unwrap();
    }
}

#[track_caller]
fn assert_holds(device: &mut CudaDevice, kv: &CudaKv, slot0: u32, seed: u64) {
    for layer in 0..LAYERS {
        let mut got = Vec::new();
        device.kv_read(kv, layer as usize, slot0, TOKENS, &mut got).unwrap();
        assert!(got == tokens(seed, layer, TOKENS), "layer {layer}");
    }
}

fn pieces(slot0: u32) -> Vec<KvPiece> {
    (0..LAYERS).map(|layer| KvPiece { layer, slot0, tokens: TOKENS }).collect()
}

/// Rows of blocks that are whole page groups of all layers together.
fn rows(device: &mut CudaDevice) -> CudaKv {
    let space = device.kv_space(SHAPE, KvSpace::flat(12, 128).with_rows(3, 4));
    assert_eq!(space.rows, 3);
    device.kv_in(SHAPE, &space).unwrap()
}

/// What the other process does: it has a flat store, takes what is in the window, and answers.
fn other(pid: u32, descriptor: i32, bytes: usize) {
    let fake = driver("kv_goes_from_process_to_process", 5).unwrap();
    let mut device = open();
    let mut kv = device.kv(SHAPE, 60).unwrap();
    // As a socket would give it.
    let file = File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{descriptor}")).unwrap();
    let window = device.window_of(file.as_fd(), bytes).unwrap();
    drop(file);
    device.kv_from_window(&mut kv, &pieces(7), window, 32).unwrap();
    assert_holds(&mut device, &kv, 7, 1);
    write(&mut device, &mut kv, 35, 2);
    device.kv_to_window(&kv, &pieces(35), window, ANSWER).unwrap();
    device.close_window(window);
    drop((kv, device));
    fake.finish();
}

#[test]
fn kv_goes_from_process_to_process() {
    const VARIABLE: &str = "LAGOON_TEST_WINDOW";
    if let Ok(given) = std::env::var(VARIABLE) {
        let given: Vec<usize> = given.split(':').map(|n| n.parse().unwrap()).collect();
        return other(given[0] as u32, given[1] as i32, given[2]);
    }
    for seed in 2..6 {
        let Some(fake) = driver("kv_goes_from_process_to_process", seed) else { return };
        let made = fake.counts().made_for_rdma;
        let mut device = open();
        let mut kv = rows(&mut device);
        write(&mut device, &mut kv, 3, 1);
        let (window, bytes, descriptor) = device.window(90 << 10).unwrap().unwrap();
        assert_eq!(bytes, 92 << 10, "whole pages");
        assert_eq!(fake.counts().made_for_rdma, made + 1, "the window, and no page group");
        device.urgent(true);
        device.kv_to_window(&kv, &pieces(3), window, 32).unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kv_goes_from_process_to_process", "--nocapture"])
            .env(VARIABLE, format!("{}:{}:{bytes}", std::process::id(), descriptor.as_raw_fd()))
            .status()
            .unwrap();
        assert!(status.success(), "the other process found something else");
        device.kv_hold(&mut kv, slice::from_ref(&(600..600 + TOKENS))).unwrap();
        device.kv_from_window(&mut kv, &pieces(600), window, ANSWER).unwrap();
        device.urgent(false);
        assert_holds(&mut device, &kv, 600, 2);
        assert_holds(&mut device, &kv, 3, 1);
        drop((kv, device, descriptor));
        fake.finish();
    }
}

#[test]
fn what_is_no_window_is_refused_and_leaves_nothing() {
    let Some(fake) = driver("what_is_no_window_is_refused_and_leaves_nothing", 3) else { return };
    let mut device = open();
    let before = fake.counts();
    for (function, nth) in [("cuMemCreate", 1), ("cuMemAddressReserve", 1), ("cuMemMap", 1), ("cuMemSetAccess", 1)] {
        fake.fail(function, nth, OUT_OF_MEMORY);
        assert!(matches!(device.window(5000), Err(DeviceError::OutOfMemory { .. })), "{function}");
    }
    fake.fail("cuMemExportToShareableHandle", 1, fake::UNKNOWN);
    device.window(5000).unwrap_err();
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    device.window_of(file.as_fd(), 4096).unwrap_err();
    let after = fake.counts();
    assert_eq!((after.physical, after.mappings, after.bytes_used), (before.physical, 0, before.bytes_used));

    let (window, bytes, descriptor) = device.window(5000).unwrap().unwrap();
    device.window_of(descriptor.as_fd(), bytes / 2).unwrap_err();
    let mut kv = rows(&mut device);
    write(&mut device, &mut kv, 0, 1);
    let beyond = catch_unwind(AssertUnwindSafe(|| device.kv_to_window(&kv, &pieces(0), window, 16)));
    assert!(beyond.is_err(), "pieces beyond the window");
    device.close_window(window);
    assert!(catch_unwind(AssertUnwindSafe(|| device.kv_to_window(&kv, &[], window, 0))).is_err(), "it is closed");
    drop((kv, device, descriptor));
    fake.finish();
    assert!(CpuDevice::with_threads(1).window(4096).unwrap().is_none(), "the host backend has arenas of its own");
}
