//! Attention over mapped memory of another process, over the fake driver: bit for bit the results of the owner's own device; and
//! the seal tags beside rBlocks, by which a reader detects that the memory was reused.
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
    AttnBatch, AttnRows, CpuDevice, Device, DeviceError, Partials, PeerAccess, PeerMemory, Queued, SharedRegion,
};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, LinearLayers};
use lagoon_types::{AttentionGeometry, KvDType, KvRun, KvShape};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};

const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 40, dtype: KvDType::F16 };
const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 40, latent: false };
const BLOCKS: u32 = 9;
const BLOCK: u32 = 8;
const ROWS: usize = 3;

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

/// A layer's KV of an rBlock, the same in every process.
fn tokens(seed: u64, layer: u32) -> Vec<u8> {
    Data::new(seed * 64 + u64::from(layer)).stored_kv(SHAPE, BLOCK as usize).0
}

fn write(device: &mut CudaDevice, kv: &mut CudaKv, block: u32, seed: u64) {
    for layer in 0..SHAPE.layers {
        device.kv_write(kv, layer as usize, block * BLOCK, &tokens(seed, layer)).unwrap();
    }
}

/// Two sequences over rBlocks in another order than they lie in.
fn attend(device: &mut CudaDevice, kv: &CudaKv, layer: usize) -> (Vec<f32>, Vec<f32>, Vec<u32>) {
    let mut data = Data::new(7 + layer as u64);
    let mut q = device.tensor(ROWS, GEOMETRY.q_dim()).unwrap();
    device.write(&mut q, 0, &data.values(ROWS * GEOMETRY.q_dim())).unwrap();
    let mut out = Partials::new(device, ROWS, GEOMETRY).unwrap();
    let run = |base, len, first_pos| KvRun { base, len, first_pos };
    let runs = [run(5 * BLOCK, 2 * BLOCK, 0), run(BLOCK, BLOCK, 2 * BLOCK), run(2 * BLOCK, BLOCK - 3, 0)];
    let rows = |row0, rows, pos0, run0, runs| AttnRows { row0, rows, pos0, run0, runs };
    let seqs = [rows(0, 2, 3 * BLOCK, 0, 2), rows(2, 1, BLOCK - 3, 2, 1)];
    let batch = AttnBatch {
        geometry: GEOMETRY,
        scale: 0.2,
        window: None,
        alibi: None,
        softcap: None,
        seqs: &seqs,
        runs: &runs,
    };
    device.attention(&q, &batch, kv, layer, &mut out).unwrap();
    let (mut values, mut lse) = (Vec::new(), Vec::new());
    device.read(&out.out, 0..ROWS, 0..GEOMETRY.q_dim(), &mut values).unwrap();
    device.read(&out.lse, 0..ROWS, 0..GEOMETRY.heads as usize, &mut lse).unwrap();
    (values, lse, out.count)
}

const USED: [u32; 4] = [1, 2, 5, 6];

/// The seal tag of an rBlock.
fn epoch(block: u32, life: u64) -> u64 {
    0x1122_3344_5566_7700 + u64::from(block) + (life << 8)
}

/// Main function of the lender's process: lends memory, and overwrites or seals an rBlock for each line that it reads.
#[allow(clippy::print_stdout, reason = "the other process reads it")]
fn lend() {
    let _fake = driver("a_creditors_memory_is_attended_to_from_another_process", 5).unwrap();
    let mut device = open();
    device.urgent(true);
    let (mut kv, region) = device.kv_lent(SHAPE, BLOCKS, BLOCK).unwrap();
    for block in USED {
        write(&mut device, &mut kv, block, u64::from(block));
        device.kv_seal(&mut kv, block, epoch(block, 0)).unwrap();
    }
    let descriptor = region.descriptor().unwrap();
    println!("lent {} {}", descriptor.as_raw_fd(), region.bytes());
    for (life, line) in (1..).zip(std::io::stdin().lines()) {
        let (what, block) = line.as_ref().unwrap().split_once(' ').unwrap();
        let block = block.parse().unwrap();
        match what {
            "write" => write(&mut device, &mut kv, block, 99),
            _ => device.kv_seal(&mut kv, block, epoch(block, life)).unwrap(),
        }
        device.sync().unwrap();
        println!("did {line:?}");
    }
}

/// The lender's process, its output lines, and its memory.
struct Lender(Child, Box<dyn Iterator<Item = String>>, PeerMemory);

impl Lender {
    fn start(device: [u8; 16], variable: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_creditors_memory_is_attended_to_from_another_process", "--nocapture"])
            .env(variable, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let output = lines.find(|line| line.contains("lent ")).unwrap();
        let given: Vec<u64> = output.split("lent ").nth(1).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
        // As a socket would give it.
        let path = format!("/proc/{}/fd/{}", child.id(), given[0]);
        let descriptor: OwnedFd = File::options().read(true).write(true).open(path).unwrap().into();
        Self(child, Box::new(lines), PeerMemory { device, bytes: given[1], descriptor })
    }

    fn does(&mut self, what: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{what}").unwrap();
        assert!(self.1.any(|line| line.contains("did")));
    }
}

#[test]
fn a_creditors_memory_is_attended_to_from_another_process() {
    const VARIABLE: &str = "LAGOON_TEST_LENT";
    if std::env::var_os(VARIABLE).is_some() {
        return lend();
    }
    for (seed, killed) in [(2, false), (3, true)] {
        let Some(fake) = driver("a_creditors_memory_is_attended_to_from_another_process", seed) else { return };
        let mut device = open();
        assert!(device.peer_access().is_some());
        let mut own = device.kv_lent(SHAPE, BLOCKS, BLOCK).unwrap().0;
        USED.iter().for_each(|block| write(&mut device, &mut own, *block, u64::from(*block)));
        let uuid = device.attributes().uuid;
        let mut lender = Lender::start(uuid, VARIABLE);
        let memory = PeerMemory { descriptor: lender.2.descriptor.try_clone().unwrap(), ..lender.2 };
        let mut there = device.kv_map(SHAPE, BLOCKS, BLOCK, memory).unwrap();
        let tags = |device: &mut CudaDevice, kv: &CudaKv| {
            let mut tags = Vec::new();
            device.kv_seal_tags(kv, &USED, &mut tags).unwrap();
            tags
        };
        assert_eq!(tags(&mut device, &there), USED.map(|block| epoch(block, 0)));
        assert_eq!(tags(&mut device, &own), [0; 4], "nobody sealed them");
        // Until it is written over, and while it is.
        lender.does("seal 6");
        assert_eq!(tags(&mut device, &there)[3], epoch(6, 1));
        if killed {
            lender.0.kill().unwrap();
            lender.0.wait().unwrap();
        }
        for layer in 0..SHAPE.layers as usize {
            let (ours, theirs) = (attend(&mut device, &own, layer), attend(&mut device, &there, layer));
            assert!(ours == theirs, "layer {layer} in another process's memory");
            assert_eq!(theirs.2, [3 * BLOCK, 3 * BLOCK, BLOCK - 3]);
        }
        if !killed {
            lender.does("write 5");
            assert_eq!(tags(&mut device, &there), [epoch(1, 0), epoch(2, 0), 0, epoch(6, 1)], "it is open");
            assert!(attend(&mut device, &own, 0) != attend(&mut device, &there, 0), "it holds something else");
            lender.does("seal 5");
            assert_eq!(tags(&mut device, &there)[2], epoch(5, 3), "sealed with another tag");
        }
        let written = catch_unwind(AssertUnwindSafe(|| write(&mut device, &mut there, 0, 1)));
        assert!(written.is_err(), "another process's memory is not written");
        device.kv_seal(&mut there, 0, 1).unwrap_err();
        device.sync().unwrap();
        drop(there);
        lender.0.stdin.take();
        assert_eq!(lender.0.wait().unwrap().success(), !killed);
        drop((own, lender, device));
        fake.finish();
    }
}

/// An rBlock is open from the first byte that is written to it, whichever and by whatever piece, and others are not.
#[test]
fn a_write_opens_what_it_touches() {
    let Some(fake) = driver("a_write_opens_what_it_touches", 9) else { return };
    let mut device = open();
    let (mut kv, region) = device.kv_lent(SHAPE, BLOCKS, BLOCK).unwrap();
    let all: Vec<u32> = (0..BLOCKS).collect();
    let token = SHAPE.layer_token_bytes();
    let seal = |device: &mut CudaDevice, kv: &mut CudaKv| {
        (0..BLOCKS).for_each(|block| device.kv_seal(kv, block, epoch(block, 0)).unwrap());
    };
    let cases =
        [(0, 1, 0..1), (BLOCK - 1, 1, 0..1), (BLOCK - 1, 2, 0..2), (2 * BLOCK + 3, 3 * BLOCK, 2..6), (0, 0, 0..0)];
    for (slot0, count, opened) in cases {
        seal(&mut device, &mut kv);
        device.kv_write(&mut kv, 2, slot0, &vec![1; count as usize * token]).unwrap();
        let mut tags = Vec::new();
        device.kv_seal_tags(&kv, &all, &mut tags).unwrap();
        for (block, tag) in (0..).zip(tags) {
            assert_eq!(tag, if opened.contains(&block) { 0 } else { epoch(block, 0) }, "{slot0}+{count}: {block}");
        }
    }
    device.kv_seal(&mut kv, BLOCKS, 1).unwrap_err();
    let mut plain = device.kv(SHAPE, 64).unwrap();
    device.kv_seal(&mut plain, 0, 1).unwrap_err();
    device.kv_seal_tags(&plain, &[0], &mut Vec::new()).unwrap_err();
    drop((kv, plain, region, device));
    fake.finish();
}

#[test]
fn what_is_no_lent_memory_is_refused_and_leaves_nothing() {
    let Some(fake) = driver("what_is_no_lent_memory_is_refused_and_leaves_nothing", 3) else { return };
    let mut device = open();
    let before = fake.counts();
    for function in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        fake.fail(function, 1, OUT_OF_MEMORY);
        assert!(matches!(device.kv_lent(SHAPE, BLOCKS, BLOCK), Err(DeviceError::OutOfMemory { .. })), "{function}");
    }
    fake.fail("cuMemExportToShareableHandle", 1, fake::UNKNOWN);
    device.kv_lent(SHAPE, BLOCKS, BLOCK).unwrap_err();
    assert!(device.kv_lent(SHAPE, u32::MAX, BLOCK).is_err() && device.kv_lent(SHAPE, 0, BLOCK).is_err());
    let after = fake.counts();
    assert_eq!((after.physical, after.mappings, after.bytes_used), (before.physical, 0, before.bytes_used));

    let (kv, region) = device.kv_lent(SHAPE, BLOCKS, BLOCK).unwrap();
    let memory =
        |of: &dyn SharedRegion, bytes| PeerMemory { device: of.device(), bytes, descriptor: of.descriptor().unwrap() };
    let whole = region.bytes();
    // More than there is, less than is announced, no whole pages, and another device's.
    for (blocks, bytes) in [(100 * BLOCKS, whole), (BLOCKS, 4096), (BLOCKS, whole + 8), (u32::MAX, whole), (0, whole)] {
        let refused = device.kv_map(SHAPE, blocks, BLOCK, memory(region.as_ref(), bytes));
        assert!(matches!(refused, Err(DeviceError::Unsupported(_))), "{blocks} {bytes}: {refused:?}");
    }
    let mut other = memory(region.as_ref(), whole);
    other.device[15] ^= 1;
    let refused = device.kv_map(SHAPE, BLOCKS, BLOCK, other).unwrap_err();
    assert!(refused.to_string().contains("peer"), "{refused}");
    let file = File::open(std::env::current_exe().unwrap()).unwrap().into();
    let no_memory = PeerMemory { device: region.device(), bytes: whole, descriptor: file };
    device.kv_map(SHAPE, BLOCKS, BLOCK, no_memory).unwrap_err();
    for function in ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        fake.fail(function, 1, OUT_OF_MEMORY);
        device.kv_map(SHAPE, BLOCKS, BLOCK, memory(region.as_ref(), whole)).unwrap_err();
    }
    drop((kv, region, device));
    fake.sharing(false, false);
    let mut alone = open();
    assert!(alone.peer_access().is_none() && alone.kv_lent(SHAPE, BLOCKS, BLOCK).is_err());
    drop(alone);
    fake.finish();
    let mut host = CpuDevice::with_threads(1);
    assert!(host.peer_access().is_none());
}
