//! Virtual memory: times of the driver's calls (vAttention's Tables 3 and 9), the wait of a decode step for mapping
//! with and without the background thread (its Figure 12), a prompt with and without deferred reclamation (Figure
//! 13), and a shared prefix.

use crate::{Args, Out};
use anyhow::{Context as _, ensure};
use lagoon_backend::{Device, VirtualMemory};
use lagoon_cuda::driver::{Context, Physical, Reservation, Sharing};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_cuda::{CudaDevice, CudaKv, VirtualKv};
use lagoon_kv::vmm::{VmmConfig, VmmLayout, VmmShape};
use lagoon_types::{KvDType, KvShape, KvSpace};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Median of durations, in microseconds.
fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// Times each call of `f`.
fn timed<T>(count: usize, mut f: impl FnMut(usize) -> anyhow::Result<T>) -> anyhow::Result<(f64, Vec<T>)> {
    let (mut times, mut made) = (Vec::new(), Vec::new());
    for i in 0..count {
        let started = Instant::now();
        made.push(f(i)?);
        times.push(started.elapsed());
    }
    Ok((median_us(times), made))
}

fn calls(small: bool) -> anyhow::Result<Value> {
    let context = Context::open(0)?;
    let page = context.granularity();
    let count = if small { 8 } else { 512 };
    let (reserve_us, ranges) = timed(count, |_| Ok(Reservation::new(&context, page * count)?))?;
    let (free_us, _) = timed_drops(ranges);
    let mut range = Reservation::new(&context, page * count)?;
    let (create_us, groups) = timed(count, |_| Ok(Arc::new(Physical::new(&context, page, Sharing::Private)?)))?;
    let started = Instant::now();
    let (map_us, _) = timed(count, |i| Ok(range.map(i * page, &groups[i])?))?;
    let mapped = started.elapsed().as_secs_f64();
    let (unmap_us, _) = timed(count, |i| Ok(range.unmap(i * page)?))?;
    let (release_us, _) = timed_drops(groups);
    Ok(json!({
        "page_group_bytes": page,
        "cuMemAddressReserve_us": reserve_us,
        "cuMemAddressFree_us": free_us,
        "cuMemCreate_us": create_us,
        "cuMemMap_and_cuMemSetAccess_us": map_us,
        "cuMemUnmap_us": unmap_us,
        "cuMemRelease_us": release_us,
        "mapping_gb_per_s": (page * count) as f64 / mapped / 1e9,
        "paper_table_3_us": { "reserve": 2, "free": 1, "create": 29, "map": 2, "set_access": 38, "unmap": 34, "release": 23 },
        "paper_table_9_gb_per_s": 35.17,
    }))
}

fn timed_drops<T>(values: Vec<T>) -> (f64, ()) {
    let times = values.into_iter().map(|value| {
        let started = Instant::now();
        drop(value);
        started.elapsed()
    });
    (median_us(times.collect()), ())
}

/// Decode steps of 32 requests of different lengths: the time that each waits in `step`.
fn steps(small: bool, overlap: bool, layers_per_group: u32) -> anyhow::Result<Value> {
    let context = Context::open(0)?;
    let shape = VmmShape {
        layers: 32,
        kv_heads: 8,
        head_dim: 128,
        element_bytes: 2,
        page_group_bytes: context.granularity() as u64,
        layers_per_group,
    };
    let layout = VmmLayout::new(shape)?;
    let (batch, first, count) = if small { (4, 10, 40) } else { (32, 2048, 500) };
    let lengths = |at: u32| -> Vec<u32> { (0..batch).map(|row| first + row * 37 + at).collect() };
    let last = first + batch * 37 + count;
    let config = VmmConfig {
        direct_blocks: 0,
        batch_max: batch,
        context_max: 2 * last,
        lent_rows_max: 0,
        lent_row_blocks_max: 0,
        stripes: batch * (layout.stripes_for(last) + 1),
        address_bytes_max: 1 << 46,
        grow: false,
        eager_stripes: 0,
        reclaim_below: 0,
    };
    let mut kv = VirtualKv::new(&context, layout, config)?;
    kv.overlap(overlap);
    for _ in 0..batch {
        kv.alloc_reqid()?;
    }
    kv.step(&lengths(0))?;
    let mut times = Vec::new();
    for at in 1..count {
        // The iteration that hides the mapping.
        std::thread::sleep(Duration::from_millis(if small { 1 } else { 8 }));
        let started = Instant::now();
        kv.step(&lengths(at))?;
        times.push(started.elapsed());
    }
    let series: Vec<f64> = times.iter().map(|time| (time.as_secs_f64() * 1e7).round() / 10.0).collect();
    times.sort();
    let us = |at: usize| times[at.min(times.len() - 1)].as_secs_f64() * 1e6;
    let counters = kv.counters();
    Ok(json!({
        "layers_per_group": layers_per_group,
        "overlapped": overlap,
        "step_us": { "median": us(times.len() / 2), "p99": us(times.len() * 99 / 100), "max": us(times.len()) },
        "each_step_us": series,
        "stripes_mapped_in_steps": counters.in_step,
        "stripes_mapped_ahead": counters.ahead,
    }))
}

/// A prompt's wait for memory: with page groups that must be mapped, and with those that the earlier request left
/// mapped (deferred reclamation). The wait is the cost of mapping; the prompt's own time is in `prefill` and
/// `linear`.
fn prompts(small: bool, layers_per_group: u32) -> anyhow::Result<Value> {
    let context = Context::open(0)?;
    let shape = VmmShape {
        layers: 32,
        kv_heads: 8,
        head_dim: 128,
        element_bytes: 2,
        page_group_bytes: context.granularity() as u64,
        layers_per_group,
    };
    let layout = VmmLayout::new(shape)?;
    let tokens: u32 = if small { 64 } else { 16 << 10 };
    let config = VmmConfig {
        direct_blocks: 0,
        batch_max: 1,
        context_max: tokens,
        lent_rows_max: 0,
        lent_row_blocks_max: 0,
        stripes: layout.stripes_for(tokens) + 1,
        address_bytes_max: 1 << 46,
        grow: false,
        eager_stripes: 0,
        reclaim_below: 0,
    };
    let mut wait = [Vec::new(), Vec::new()];
    for _ in 0..if small { 1 } else { 5 } {
        let mut kv = VirtualKv::new(&context, layout, config)?;
        kv.overlap(false);
        for times in &mut wait {
            let row = kv.alloc_reqid()?;
            let started = Instant::now();
            kv.step(&[tokens])?;
            times.push(started.elapsed());
            kv.free_reqid(row)?;
        }
    }
    let [mapped, reused] = wait.map(median_us);
    Ok(json!({
        "tokens": tokens,
        "layers_per_group": layers_per_group,
        "mapped_us": mapped,
        "reused_us": reused,
    }))
}

/// Cost of an rBlock of a shared prefix: mapped at a second address, and copied through the host.
fn prefixes(small: bool) -> anyhow::Result<Value> {
    let mut device = crate::open(Precision::Fast)?;
    let layers = if small { 2 } else { 32 };
    // A page group of one layer's K: 2 MiB.
    let (shape, tokens) = (KvShape { layers, kv_heads: 8, head_dim: 128, dtype: KvDType::F16 }, 1024);
    let blocks: u32 = if small { 2 } else { 6 };
    let layers = layers as usize;
    let to = |block: usize| (blocks + u32::try_from(block).unwrap_or(0)) * tokens;
    let from = |block: usize| to(block) - blocks * tokens;
    let count = blocks as usize;
    let last = vec![0; shape.layer_token_bytes()];

    let space = device.kv_space(shape, KvSpace::flat(2 * blocks, tokens).with_rows(2, blocks));
    ensure!(space.rows == 2, "blocks of {tokens} tokens are whole page groups");
    let mut rows = device.kv_in(shape, &space)?;
    device.kv_hold(&mut rows, std::slice::from_ref(&(0..blocks * tokens)))?;
    let share = |device: &mut CudaDevice, kv: &mut CudaKv, block: usize| {
        device.kv_share(kv, from(block), to(block), tokens)?;
        anyhow::Ok(device.sync()?)
    };
    let (mapped_us, _) = timed(count, |block| share(&mut device, &mut rows, block))?;
    let counters = device.kv_counters(&rows).context("what mapping has come to")?;
    ensure!(counters.shared == u64::from(blocks) * counters.groups_per_block, "{counters:?}");
    drop(rows);
    let mut flat = device.kv(shape, (2 * blocks * tokens) as usize)?;
    device.kv_write(&mut flat, 0, 2 * blocks * tokens - 1, &last)?;
    device.sync()?;
    let (host_us, _) = timed(count, |block| {
        let mut bytes = Vec::new();
        for layer in 0..layers {
            bytes.clear();
            device.kv_read(&flat, layer, from(block), tokens, &mut bytes)?;
            device.kv_write(&mut flat, layer, to(block), &bytes)?;
        }
        anyhow::Ok(device.sync()?)
    })?;
    Ok(json!({
        "tokens": tokens,
        "groups": counters.groups_per_block,
        "mapped_us": mapped_us,
        "through_host_us": host_us,
    }))
}

/// Bytes per second of making and mapping memory, by the size of one allocation.
fn allocation(small: bool, pages: usize) -> anyhow::Result<Value> {
    let context = Context::open(0)?;
    let bytes = pages * context.granularity();
    let count = if small { 2 } else { (1 << 30) / bytes };
    let mut range = Reservation::new(&context, bytes * count)?;
    let started = Instant::now();
    for i in 0..count {
        let group = Arc::new(Physical::new(&context, bytes, Sharing::Private)?);
        range.map(i * bytes, &group)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({ "group_bytes": bytes, "gb_per_s": (bytes * count) as f64 / seconds / 1e9 }))
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let small = args.smoke;
    out.row("calls", json!({}), || calls(small))?;
    for pages in [1, 4, 16] {
        out.row("allocation", json!({ "pages": pages }), || allocation(small, pages))?;
    }
    out.row("prefixes", json!({}), || prefixes(small))?;
    out.row("windows", json!({}), || crate::windows::run(args))?;
    // Without slicing, a page group holds 1024 tokens, and 32 with full slicing.
    let groups: &[u32] = if small { &[32] } else { &[1, 32] };
    for &group in groups {
        out.row("prompts_of_figure_13", json!({ "layers_per_group": group }), || prompts(small, group))?;
        for overlap in [false, true] {
            let key = json!({ "layers_per_group": group, "overlapped": overlap });
            out.row("decode_steps_of_figure_12", key, || steps(small, overlap, group))?;
        }
    }
    Ok(())
}
