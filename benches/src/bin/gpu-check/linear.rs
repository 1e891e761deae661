//! Ceilings of the device, measured in the same run: copies for memory-bound work, matrix products for compute-bound
//! work. And linear layers, by own kernels and by cuBLASLt, against both.

use crate::timing::{Time, spread, time, with};
use crate::{Args, Out, inputs, read_json};
use lagoon_backend::{Device, Mode};
use lagoon_cuda::driver::{
    Buffer, Context, Event, Pinned, Priority, Stream, copy_to_device, copy_to_host, copy_within_device,
};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers, kernels};
use lagoon_types::DType;
use serde_json::{Value, json};
use std::sync::Arc;

/// Rounds of copies, each between two events.
const COPIES: usize = 9;

/// Bytes of noise in memory of the device.
fn noisy(context: &Arc<Context>, stream: &Stream, bytes: usize) -> anyhow::Result<Buffer> {
    let buffer = Buffer::new(context, "a copy", bytes)?;
    let piece = bytes.min(64 << 20);
    let mut host = Pinned::new(context, "a copy", piece)?;
    for at in (0..bytes).step_by(piece) {
        let len = piece.min(bytes - at);
        let noise = inputs::stored_noise(DType::BF16, len / 2, 1.0, at as u64);
        host.as_mut_slice()[..noise.len()].copy_from_slice(&noise);
        copy_to_device(stream, buffer.range(at, len), &host, 0, len)?;
        stream.synchronize()?;
    }
    Ok(buffer)
}

/// Seconds of the device for `f` over some rounds: minimum, median, maximum.
fn rounds(
    context: &Arc<Context>,
    stream: &Stream,
    mut f: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<[f64; 3]> {
    let (begin, end) = (Event::new(context, true)?, Event::new(context, true)?);
    f()?;
    let mut times = Vec::new();
    for _ in 0..COPIES {
        begin.record(stream)?;
        f()?;
        end.record(stream)?;
        stream.synchronize()?;
        times.push(f64::from(end.since_ms(&begin)?) / 1e3);
    }
    Ok(spread(times))
}

/// Bytes per second that a copy within the device reads and writes; from the report, or measured.
pub(crate) fn copy_bandwidth(args: &Args, out: &mut Out) -> anyhow::Result<f64> {
    let report = args.from.as_deref().and_then(read_json).unwrap_or_default();
    let known = report["sections"]["ceilings"]["found"]["copy_gb_per_s"].as_f64();
    let gb = out.number("copy_gb_per_s", || known.map_or_else(|| Ok(measure_copies(args)?[1]), Ok))?;
    Ok(gb * 1e9)
}

/// GB/s of copies of 2 GiB of noise within the device, reads plus writes: minimum, median, maximum.
fn measure_copies(args: &Args) -> anyhow::Result<[f64; 3]> {
    let context = Context::open(0)?;
    let stream = Stream::new(&context, Priority::Normal)?;
    let bytes = if args.smoke { 1 << 20 } else { 2 << 30 };
    let (from, to) = (noisy(&context, &stream, bytes)?, Buffer::new(&context, "a copy", bytes)?);
    let seconds = rounds(&context, &stream, || Ok(copy_within_device(&stream, to.address(), from.address(), bytes)?))?;
    let [most, middle, least] = seconds.map(|s| 2.0 * bytes as f64 / s / 1e9);
    Ok([least, middle, most])
}

/// GB/s over PCIe, to the device or from it.
fn measure_host_copies(args: &Args, up: bool) -> anyhow::Result<f64> {
    let context = Context::open(0)?;
    let stream = Stream::new(&context, Priority::Normal)?;
    let bytes = if args.smoke { 1 << 16 } else { 256 << 20 };
    let (device, mut host) = (noisy(&context, &stream, bytes)?, Pinned::new(&context, "a copy", bytes)?);
    let [_, s, _] = rounds(&context, &stream, || {
        let copied = match up {
            true => copy_to_device(&stream, device.address(), &host, 0, bytes),
            false => copy_to_host(&stream, &mut host, 0, device.address(), bytes),
        };
        Ok(copied?)
    })?;
    Ok(bytes as f64 / s / 1e9)
}

/// A linear layer of `n` outputs and `k` inputs.
#[derive(Clone, Copy)]
struct Layer {
    rows: usize,
    n: usize,
    k: usize,
}

impl Layer {
    /// Time in bf16, and the name of the linear layers.
    fn time(self, by: &LinearLayers, precision: Precision) -> anyhow::Result<(Time, String)> {
        let Self { rows, n, k } = self;
        let sms = Context::open(0)?.attributes().multiprocessors;
        let tuning = Some(Tuning { precision, wgmma: false, ..Tuning::untuned(sms) });
        let options = CudaOptions { linear: by.clone(), tuning, ..CudaOptions::default() };
        let mut d = CudaDevice::open(kernels::FATBIN, options)?;
        let copies = inputs::copies(d.attributes().l2_bytes, n * k * 2 + rows * k * 4);
        let seeds = 0..copies as u64;
        let weights: Vec<_> =
            seeds.clone().map(|i| inputs::weight(&mut d, DType::BF16, n, k, i)).collect::<anyhow::Result<_>>()?;
        let x: Vec<_> = seeds.map(|i| inputs::tensor(&mut d, rows, k, 500 + i)).collect::<anyhow::Result<_>>()?;
        let mut out = d.tensor(rows, n)?;
        let time = time(&mut d, copies, |d, i| Ok(d.matmul(&x[i], &weights[i], rows, Mode::Set, &mut out)?))?;
        Ok((time, d.linear_layers()))
    }

    fn tflop_per_s(self, time: &Time) -> f64 {
        2.0 * (self.rows * self.n * self.k) as f64 / time.seconds() / 1e12
    }
}

/// The linear layers' kernels, by the name in rows.
const BY: [(&str, LinearLayers); 2] = [("own kernels", LinearLayers::Own), ("cuBLASLt", LinearLayers::Auto)];

/// The device's reason if a row asks for cuBLASLt and there is none.
fn absent(kind: &str, by: &str) -> Option<Value> {
    (kind == "cuBLASLt" && by.starts_with("own kernels")).then(|| json!({ "absent": by }))
}

pub(crate) fn ceilings(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    if out.found["copy_gb_per_s"].is_null() {
        let [least, middle, most] = measure_copies(args)?;
        out.set("copy_gb_per_s_least", least)?;
        out.set("copy_gb_per_s_most", most)?;
        out.set("copy_gb_per_s", middle)?;
    }
    out.number("to_device_gb_per_s", || measure_host_copies(args, true))?;
    out.number("to_host_gb_per_s", || measure_host_copies(args, false))?;
    let n = if args.smoke { 64 } else { 8192 };
    for (kind, by) in &BY {
        out.row("products", json!({ "kind": kind, "n": n }), || {
            let layer = Layer { rows: n, n, k: n };
            let (time, by) = layer.time(by, Precision::Fast)?;
            if let Some(absent) = absent(kind, &by) {
                return Ok(absent);
            }
            with(time.fields(), json!({ "by": by, "tflop_per_s": layer.tflop_per_s(&time) }))
        })?;
    }
    Ok(())
}

pub(crate) fn rows(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args, out)?;
    let (n, k) = if args.smoke { (64, 96) } else { (14336, 4096) };
    let rows: &[usize] = if args.smoke { &[1, 20] } else { &[1, 4, 8, 16, 17, 32, 64, 512, 4096] };
    for (kind, by) in &BY {
        for (exact, precision) in [(false, Precision::Fast), (true, Precision::Exact)] {
            for &rows in rows {
                out.row("rows", json!({ "kind": kind, "exact": exact, "rows": rows, "n": n, "k": k }), || {
                    let layer = Layer { rows, n, k };
                    let (time, by) = layer.time(by, precision)?;
                    if let Some(absent) = absent(kind, &by) {
                        return Ok(absent);
                    }
                    let rate = (n * k * DType::BF16.size()) as f64 / time.seconds();
                    let tflop = layer.tflop_per_s(&time);
                    let more = json!({ "by": by, "tflop_per_s": tflop, "weight_bytes_of_copy_bandwidth": rate / copy });
                    with(time.fields(), more)
                })?;
            }
        }
    }
    Ok(())
}
