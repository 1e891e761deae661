//! Shared device regions of two workers: the copy rate between them, the rate of hashing on the device, and whether
//! its hashes equal the host's. Both regions belong to this process, imported as another process would.

use crate::Args;
use anyhow::{Context as _, ensure};
use lagoon_backend::{RegionCopy, SharedRegions, Xxh3};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use serde_json::{Value, json};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

/// A block's KV of one layer: 32 tokens of eight heads of 128 elements of two bytes; and one that ends within a stripe.
const PIECES: [u64; 2] = [128 << 10, (128 << 10) - 48];
const ROUNDS: usize = 5;

/// The shortest time of `f`, in seconds.
fn best<T>(mut f: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<(f64, T)> {
    let (mut least, mut made) = (f64::INFINITY, None);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        made = Some(f()?);
        least = least.min(started.elapsed().as_secs_f64());
    }
    Ok((least, made.context("it ran")?))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<Value> {
    let bytes: u64 = if args.smoke { 1 << 20 } else { 256 << 20 };
    let open = || CudaDevice::open(kernels::FATBIN, CudaOptions::default());
    let (mut theirs, mut ours) = (open()?, open()?);
    let size = usize::try_from(bytes)?;
    let (_, source) = theirs.region(size)?;
    let (_, target) = ours.region(size)?;
    let content: Vec<u8> = (0..bytes / 8).flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    source.write(0, &content)?;
    let started = Instant::now();
    let peer = Arc::clone(&target).import(&source.device(), source.descriptor()?.as_fd(), source.bytes())?;
    let map_us = started.elapsed().as_secs_f64() * 1e6;
    let (mut rows, gb) = (Vec::new(), bytes as f64 / 1e9);
    for piece in PIECES {
        let places: Vec<(u64, u64)> = (0..bytes / PIECES[0]).map(|n| (n * PIECES[0], piece)).collect();
        let moves: Vec<_> = places.iter().map(|&(at, bytes)| RegionCopy { from: at, to: at, bytes }).collect();
        let (copy_s, ()) = best(|| Ok(peer.copy(&moves)?))?;
        let (hash_s, found) = best(|| Ok(target.hashes(&places)?))?;
        for (&(at, bytes), found) in places.iter().zip(&found) {
            let (at, bytes) = (usize::try_from(at)?, usize::try_from(bytes)?);
            let mut hash = Xxh3::default();
            hash.update(&content[at..at + bytes]);
            ensure!(hash.finish() == *found, "the hash of {bytes} bytes at {at} is not the host's");
        }
        let (few_s, _) = best(|| Ok(target.hashes(&places[..1])?))?;
        rows.push(json!({
            "piece_bytes": piece,
            "pieces": places.len(),
            "copy_gb_per_s": gb / copy_s,
            "hash_gb_per_s": gb / hash_s,
            "hash_of_one_us": few_s * 1e6,
        }));
    }
    let (from_peer, own) = peer.rates()?;
    Ok(
        json!({ "bytes": bytes, "map_us": map_us, "rows": rows, "peer_gb_per_s": from_peer / 1e9, "own_gb_per_s": own / 1e9 }),
    )
}
