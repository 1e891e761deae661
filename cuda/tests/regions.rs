//! KV that goes from one device to another through regions, over the fake driver: between two processes, each with a store of
//! its own layout, bit by bit and without the host's memory; also when the one that has packed it is killed meanwhile.
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
use lagoon_backend::{
    CpuDevice, Device, DeviceError, DeviceUuid, KvPiece, Queued, RegionCopy, SharedRegion, SharedRegions,
    VirtualMemory, Xxh3,
};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, LinearLayers};
use lagoon_types::{KvDType, KvShape, KvSpace};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::slice;
use std::sync::Arc;

const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 40, dtype: KvDType::F16 };
const LAYERS: u32 = SHAPE.layers;
/// Tokens that are handed over.
const TOKENS: u32 = 20;
/// Bytes of all of them, in all layers.
const BYTES: u64 = TOKENS as u64 * LAYERS as u64 * SHAPE.layer_token_bytes() as u64;
/// Offsets of the pieces in the writer's region, and in the reader's.
const THERE: u64 = 32;
const HERE: u64 = 48 << 10;

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
    Data::new(seed * 64 + u64::from(layer)).stored_kv(SHAPE, count as usize).0
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

/// Main function of the writer's process: packs KV into its region, prints the descriptor, and waits for its end.
#[allow(clippy::print_stdout, reason = "the other process reads it")]
fn write_and_wait() {
    let _fake = driver("kv_goes_from_process_to_process", 5).unwrap();
    let mut device = open();
    let mut kv = device.kv(SHAPE, 60).unwrap();
    write(&mut device, &mut kv, 7, 1);
    let (region, shared) = device.region(90 << 10).unwrap();
    device.urgent(true);
    device.kv_to_region(&kv, &pieces(7), region, THERE as usize).unwrap();
    let descriptor = shared.descriptor().unwrap();
    println!("region {} {}", descriptor.as_raw_fd(), shared.bytes());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn kv_goes_from_process_to_process() {
    const VARIABLE: &str = "LAGOON_TEST_REGION";
    if std::env::var_os(VARIABLE).is_some() {
        return write_and_wait();
    }
    for (seed, killed) in [(2, false), (3, true), (4, false), (5, true)] {
        let Some(fake) = driver("kv_goes_from_process_to_process", seed) else { return };
        let made = fake.counts().made_for_rdma;
        let mut device = open();
        let mut kv = rows(&mut device);
        let (region, own) = device.region(90 << 10).unwrap();
        assert_eq!(own.bytes(), 92 << 10, "whole pages");
        assert_eq!(fake.counts().made_for_rdma, made + 1, "the region, and no page group");
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kv_goes_from_process_to_process", "--nocapture"])
            .env(VARIABLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines().map(Result::unwrap);
        let output = lines.find(|line| line.contains("region ")).unwrap();
        let given: Vec<u64> = output.split("region ").nth(1).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
        // As a socket would give it.
        let path = format!("/proc/{}/fd/{}", writer.id(), given[0]);
        let file = File::options().read(true).write(true).open(path).unwrap();
        let peer = Arc::clone(&own).import(&own.device(), file.as_fd(), given[1]).unwrap();
        drop(file);
        assert_eq!((own.mapped(), peer.bytes()), (1, given[1]));
        if killed {
            writer.kill().unwrap();
            writer.wait().unwrap();
        }
        let half = BYTES / 2 / 16 * 16;
        let moves = [(0, half), (half, BYTES - half)];
        peer.copy(&moves.map(|(at, bytes)| RegionCopy { from: THERE + at, to: HERE + at, bytes })).unwrap();
        let packed: Vec<u8> = (0..LAYERS).flat_map(|layer| tokens(1, layer, TOKENS)).collect();
        assert_hashes(own.as_ref(), &packed);
        let mut there = vec![0; packed.len()];
        peer.read(THERE, &mut there).unwrap();
        assert!(there == packed, "what the writer has");
        assert!(peer.rates().unwrap().0 > 0.0);
        peer.copy(&[RegionCopy { from: given[1] - 16, to: 0, bytes: 32 }]).unwrap_err();
        peer.copy(&[RegionCopy { from: 0, to: own.bytes() - 16, bytes: 32 }]).unwrap_err();
        drop(peer);
        assert_eq!(own.mapped(), 0);
        device.kv_hold(&mut kv, slice::from_ref(&(600..600 + TOKENS))).unwrap();
        device.kv_from_region(&mut kv, &pieces(600), region, HERE as usize).unwrap();
        assert_holds(&mut device, &kv, 600, 1);
        writer.stdin.take();
        assert_eq!(writer.wait().unwrap().success(), !killed);
        drop((kv, device, own));
        fake.finish();
    }
}

/// Hashes of ranges of the region equal the host's: by the kernel where it can, for short and odd ranges too.
#[track_caller]
fn assert_hashes(own: &dyn SharedRegion, packed: &[u8]) {
    let all = packed.len() as u64;
    let mut ranges = vec![(0, all), (0, 16), (0, 240), (0, 256), (16, 1024), (16, 1040), (32, 1088), (48, 2048 + 16)];
    ranges.extend([(8, 512), (0, 300), (1, 3000), (0, 0), (64, 241)]);
    ranges.extend((0..40).map(|n| (n * 64, 256 + n * 80)));
    let expected = |&(at, bytes): &(u64, u64)| {
        let mut hash = Xxh3::default();
        hash.update(&packed[at as usize..(at + bytes) as usize]);
        hash.finish()
    };
    let there: Vec<(u64, u64)> = ranges.iter().map(|(at, bytes)| (HERE + at, *bytes)).collect();
    let found = own.hashes(&there).unwrap();
    assert_eq!(found, ranges.iter().map(expected).collect::<Vec<_>>());
    let mut read = vec![0; packed.len()];
    own.read(HERE, &mut read).unwrap();
    assert!(read == packed);
    own.hashes(&[(own.bytes() - 256, 512)]).unwrap_err();
}

/// Memory of another device is mapped where that is a peer, and else refused.
#[test]
fn regions_of_other_devices_are_for_peers() {
    let Some(fake) = driver("regions_of_other_devices_are_for_peers", 3) else { return };
    for (devices, peers, can) in [(1, false, false), (1, true, false), (2, false, false), (2, true, true)] {
        fake.devices(devices, 7, peers);
        let mut device = open();
        let (_, own) = device.region(5000).unwrap();
        let descriptor = own.descriptor().unwrap();
        let mut other = own.device();
        other[15] += 1;
        own.write(16, b"written").unwrap();
        let import = |of: &DeviceUuid| Arc::clone(&own).import(of, descriptor.as_fd(), own.bytes());
        let mut out = [0; 7];
        import(&own.device()).unwrap().read(16, &mut out).unwrap();
        assert_eq!(&out, b"written");
        match import(&other) {
            Ok(peer) => peer.read(16, &mut out).unwrap(),
            Err(error) => assert!(!can && error.to_string().contains("peer"), "{devices} {peers}: {error}"),
        }
        assert_eq!(import(&other).is_ok(), can, "{devices} {peers}");
        assert_eq!(own.mapped(), 0);
    }
    fake.finish();
}

/// Memory is allocated as the device can share it, and is exported once for all askers.
#[test]
fn memory_is_shared_as_the_device_can() {
    let Some(fake) = driver("memory_is_shared_as_the_device_can", 3) else { return };
    for (shareable, rdma) in [(true, true), (true, false), (false, true), (false, false)] {
        fake.sharing(shareable, rdma);
        let made = fake.counts().made_for_rdma;
        let mut device = open();
        let region = device.shared_regions().map(|regions| regions.region(5000).unwrap());
        assert_eq!((region.is_some(), device.region(5000).is_ok()), (shareable, shareable));
        assert_eq!(fake.counts().made_for_rdma - made, 2 * u64::from(shareable && rdma));
        // Page groups of stores ask for neither.
        let kv = rows(&mut device);
        assert_eq!(fake.counts().made_for_rdma - made, 2 * u64::from(shareable && rdma));
        if let Some((_, own)) = region {
            fake.fail_from("cuMemExportToShareableHandle", 1, fake::UNKNOWN);
            let descriptors = [own.descriptor().unwrap(), own.descriptor().unwrap()];
            assert_ne!(descriptors[0].as_raw_fd(), descriptors[1].as_raw_fd());
            fake.fail("", 0, 0);
        }
        drop((kv, device));
    }
    fake.finish();
}

#[test]
fn a_descriptor_of_no_region_is_refused_and_leaves_nothing() {
    let Some(fake) = driver("a_descriptor_of_no_region_is_refused_and_leaves_nothing", 3) else { return };
    let mut device = open();
    let before = fake.counts();
    for function in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemHostAlloc", "cuMemAlloc"]
    {
        fake.fail(function, 1, OUT_OF_MEMORY);
        assert!(matches!(device.region(5000), Err(DeviceError::OutOfMemory { .. })), "{function}");
    }
    fake.fail("cuMemExportToShareableHandle", 1, fake::UNKNOWN);
    device.region(5000).unwrap_err();
    let after = fake.counts();
    assert_eq!((after.physical, after.mappings, after.bytes_used), (before.physical, 0, before.bytes_used));

    let (region, own) = device.region(5000).unwrap();
    let import = |file: BorrowedFd<'_>, bytes| Arc::clone(&own).import(&own.device(), file, bytes);
    import(File::open(std::env::current_exe().unwrap()).unwrap().as_fd(), 4096).unwrap_err();
    let descriptor = own.descriptor().unwrap();
    import(descriptor.as_fd(), own.bytes() / 2).unwrap_err();
    import(descriptor.as_fd(), 100).unwrap_err();
    for function in ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        fake.fail(function, 1, OUT_OF_MEMORY);
        import(descriptor.as_fd(), own.bytes()).unwrap_err();
    }
    assert_eq!(own.mapped(), 0);
    let mut kv = rows(&mut device);
    write(&mut device, &mut kv, 0, 1);
    let beyond = catch_unwind(AssertUnwindSafe(|| device.kv_to_region(&kv, &pieces(0), region, 16)));
    assert!(beyond.is_err(), "pieces beyond the region");
    drop((kv, device, own, descriptor));
    fake.finish();
    assert!(CpuDevice::with_threads(1).shared_regions().is_none(), "the host backend has arenas of its own");
}
