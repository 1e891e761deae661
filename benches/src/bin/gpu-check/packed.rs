//! Linear layers with packed weights, by rows of activations: streamed, and unpacked for tensor cores. Rates count the bytes that
//! are stored, against the copy bandwidth of the same run.

use crate::linear::copy_bandwidth;
use crate::timing::{time, with};
use crate::{Args, Out, inputs};
use lagoon_backend::{Device, Mode, WeightFormat};
use lagoon_cuda::driver::Context;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::kernels::packed::Encoding;
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use serde_json::{Value, json};

/// Formats that are timed: every one with kernels but two of the three sizes of int4 groups.
const FORMATS: [WeightFormat; 8] = [
    WeightFormat::Q8_0,
    WeightFormat::Fp8,
    WeightFormat::Q6K,
    WeightFormat::Q5K,
    WeightFormat::Q4K,
    WeightFormat::Q4_0,
    WeightFormat::Mxfp4,
    WeightFormat::Int4G128,
];

/// Formats that are timed with smaller weights, too.
const SMALL: [WeightFormat; 3] = [WeightFormat::Q8_0, WeightFormat::Fp8, WeightFormat::Q4K];

/// The time of products of `rows` rows with weights of `n` rows and `k` columns.
fn product(format: WeightFormat, rows: usize, n: usize, k: usize, copy: f64) -> anyhow::Result<Value> {
    let sms = Context::open(0)?.attributes().multiprocessors;
    let tuning = Some(Tuning { precision: Precision::Fast, wgmma: false, ..Tuning::untuned(sms) });
    let mut d = CudaDevice::open(kernels::FATBIN, CudaOptions { tuning, ..CudaOptions::default() })?;
    let bytes = format.bytes(n * k).unwrap_or(0);
    let copies = inputs::copies(d.attributes().l2_bytes, bytes + rows * k * 4);
    let seeds = 0..copies as u64;
    let weights: Vec<_> =
        seeds.clone().map(|seed| inputs::packed_weight(&mut d, format, n, k, seed)).collect::<anyhow::Result<_>>()?;
    let x: Vec<_> = seeds.map(|seed| inputs::tensor(&mut d, rows, k, 500 + seed)).collect::<anyhow::Result<_>>()?;
    let mut out = d.tensor(rows, n)?;
    let time = time(&mut d, copies, |d, i| Ok(d.matmul(&x[i], &weights[i], rows, Mode::Set, &mut out)?))?;
    let rate = bytes as f64 / time.seconds();
    let tflop = 2.0 * (rows * n * k) as f64 / time.seconds() / 1e12;
    let Some(Encoding::Packed(packed)) = Encoding::of(format) else { anyhow::bail!("{format} has no kernels") };
    let kernel = packed.kernel(u32::try_from(rows)?, Precision::Fast);
    with(
        time.fields(),
        json!({ "kernel": kernel, "weight_bytes_of_copy_bandwidth": rate / copy, "tflop_per_s": tflop }),
    )
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args, out)?;
    let (n, k) = if args.smoke { (64, 256) } else { (14336, 4096) };
    let rows: &[usize] = if args.smoke { &[1, 8, 16, 20] } else { &[1, 4, 8, 16, 512] };
    for format in FORMATS {
        for &rows in rows {
            let key = json!({ "format": format.to_string(), "rows": rows, "n": n, "k": k });
            out.row("rows", key, || product(format, rows, n, k, copy))?;
        }
    }
    // Products with fewer weight rows, which occupy a device less.
    if !args.smoke {
        for (format, n) in SMALL.iter().flat_map(|format| [4096, 1024].map(|n| (*format, n))) {
            for rows in [1, 16] {
                let key = json!({ "format": format.to_string(), "rows": rows, "n": n, "k": k });
                out.row("rows", key, || product(format, rows, n, k, copy))?;
            }
        }
    }
    Ok(())
}
