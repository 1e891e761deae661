//! Attention kernels at Llama-3-8B's shape: decoding against copy bandwidth, prompts, and contiguous KV against blocks.
//!
//! KV and queries are noise. Calls rotate through the layers of a store, enough of them that each call reads memory
//! and not the L2 cache ([`inputs::copies`]).

use crate::linear::copy_bandwidth;
use crate::timing::{Time, time, with};
use crate::tune::tuning;
use crate::{Args, Out, inputs};
use lagoon_backend::{AttnBatch, AttnRows, Device, Partials};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, CudaTensor, kernels};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};
use serde_json::{Value, json};

/// Llama-3-8B's attention.
pub(crate) const G: AttentionGeometry = AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128, latent: false };
pub(crate) const SCALE: f32 = 0.088;

/// A device with this tuning and `group` layers in a page group.
pub(crate) fn device(tuning: Tuning, group: u32) -> anyhow::Result<CudaDevice> {
    let options = CudaOptions { layers_per_group: Some(group), tuning: Some(tuning), ..CudaOptions::default() };
    Ok(CudaDevice::open(kernels::FATBIN, options)?)
}

/// A sequence's runs: one, or blocks of `block` tokens in a permuted order in the store.
fn runs_of(base: u32, context: u32, block: Option<u32>, out: &mut Vec<KvRun>) -> u32 {
    let before = out.len();
    match block {
        None => out.push(KvRun { base, len: context, first_pos: 0 }),
        Some(block) => {
            let blocks = context / block;
            // Odd, and prime to the number of blocks, a power of two: every place once.
            out.extend((0..blocks).map(|i| KvRun {
                base: base + (i * 7919 + 1) % blocks * block,
                len: block,
                first_pos: i * block,
            }));
        }
    }
    u32::try_from(out.len() - before).unwrap_or(u32::MAX)
}

/// Bytes of one layer's KV.
fn kv_bytes(tokens: u32, dtype: KvDType) -> usize {
    tokens as usize * KvShape { layers: 1, kv_heads: G.kv_heads, head_dim: G.head_dim, dtype }.layer_token_bytes()
}

/// Some tensors of queries.
fn queries(d: &mut CudaDevice, rows: u32, copies: usize) -> anyhow::Result<Vec<CudaTensor>> {
    (0..copies as u64).map(|copy| inputs::tensor(d, rows as usize, G.q_dim(), 1000 + copy)).collect()
}

/// Decoding: `batch` sequences of one row each over one layer of a store whose layers share page groups by `group`.
#[derive(Clone, Copy)]
struct Decode {
    batch: u32,
    context: u32,
    dtype: KvDType,
    group: u32,
    block: Option<u32>,
}

fn decode(what: Decode, tuning: Tuning) -> anyhow::Result<Time> {
    let Decode { batch, context, dtype, group, block } = what;
    let mut device = device(tuning, group)?;
    let copies = inputs::copies(device.attributes().l2_bytes, kv_bytes(batch * context, dtype));
    let layers = u32::try_from(copies)?.max(2).next_multiple_of(group);
    let kv = inputs::store(&mut device, layers, (batch * context) as usize, dtype)?;
    let q = queries(&mut device, batch, layers as usize)?;
    let mut out = Partials::new(&mut device, batch as usize, G)?;
    let (mut seqs, mut runs) = (Vec::new(), Vec::new());
    for row in 0..batch {
        let run0 = u32::try_from(runs.len())?;
        let count = runs_of(row * context, context, block, &mut runs);
        seqs.push(AttnRows { row0: row, rows: 1, pos0: context - 1, run0, runs: count });
    }
    let batch_of =
        AttnBatch { geometry: G, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    time(&mut device, layers as usize, |device, i| Ok(device.attention(&q[i], &batch_of, &kv, i, &mut out)?))
}

/// A prompt's attention, causal, in one call.
pub(crate) fn prefill(tokens: u32, dtype: KvDType, block: Option<u32>, tuning: Tuning) -> anyhow::Result<Time> {
    let mut device = device(tuning, 1)?;
    let copies =
        inputs::copies(device.attributes().l2_bytes, kv_bytes(tokens, dtype) + tokens as usize * G.q_dim() * 4);
    let kv = inputs::store(&mut device, u32::try_from(copies)?, tokens as usize, dtype)?;
    let q = queries(&mut device, tokens, copies)?;
    let mut out = Partials::new(&mut device, tokens as usize, G)?;
    let mut runs = Vec::new();
    let count = runs_of(0, tokens, block, &mut runs);
    let seqs = [AttnRows { row0: 0, rows: tokens, pos0: 0, run0: 0, runs: count }];
    let batch =
        AttnBatch { geometry: G, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    time(&mut device, copies, |device, i| Ok(device.attention(&q[i], &batch, &kv, i, &mut out)?))
}

/// A prompt's row: causal attention has half the pairs, 4 operations an element of the heads.
pub(crate) fn prefill_row(tokens: u32, time: &Time) -> anyhow::Result<Value> {
    let ms = time.us[1] / 1e3;
    let tflop = 2.0 * f64::from(tokens) * f64::from(tokens) * G.q_dim() as f64 / ms / 1e9;
    with(time.fields(), json!({ "ms": ms, "tflop_per_s": tflop }))
}

/// Prompts whose attention is timed.
pub(crate) fn prompts(args: &Args) -> &'static [u32] {
    if args.smoke { &[64] } else { &[4 << 10, 16 << 10, 64 << 10] }
}

pub(crate) fn decode_all(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args, out)?;
    let sizes: &[(u32, u32)] = if args.smoke {
        &[(2, 40)]
    } else {
        &[(16, 8 << 10), (1, 64 << 10), (16, 16 << 10), (1, 128 << 10), (32, 8 << 10), (1, 8 << 10)]
    };
    let sliced = if args.smoke { [2, 2] } else { [8, 32] };
    // Page-group slicing is measured last, in one type and for two sizes: 32 layers' KV takes long to write.
    let types = [KvDType::BF16, KvDType::F16, KvDType::Fp8];
    let plain = types.into_iter().flat_map(|dtype| sizes.iter().map(move |size| (dtype, size, 1)));
    let groups = sliced
        .into_iter()
        .flat_map(|group| sizes[..sizes.len().min(2)].iter().map(move |size| (KvDType::BF16, size, group)));
    for (dtype, &(batch, context), group) in plain.chain(groups) {
        let key = json!({ "batch": batch, "context": context, "dtype": dtype.to_string(), "layers_per_group": group });
        out.row("rows", key, || {
            let what = Decode { batch, context, dtype, group, block: None };
            // 8 bits take the launch shapes of 16.
            let tuned = dtype.plain().unwrap_or(DType::F16);
            let time = decode(what, tuning(args, tuned, Precision::Fast)?)?;
            let rate = kv_bytes(batch * context, dtype) as f64 / time.seconds();
            with(time.fields(), json!({ "gb_per_s": rate / 1e9, "of_copy_bandwidth": rate / copy }))
        })?;
    }
    Ok(())
}

pub(crate) fn prefill_all(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    for &tokens in prompts(args) {
        let kernels = [
            ("fast", KvDType::BF16, Precision::Fast),
            ("exact", KvDType::BF16, Precision::Exact),
            ("fp8", KvDType::Fp8, Precision::Exact),
        ];
        for (kernel, dtype, precision) in kernels {
            out.row("rows", json!({ "tokens": tokens, "kernel": kernel }), || {
                prefill_row(tokens, &prefill(tokens, dtype, None, tuning(args, DType::BF16, precision)?)?)
            })?;
        }
    }
    Ok(())
}

pub(crate) fn paged(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let blocks: &[Option<u32>] = if args.smoke { &[None, Some(16)] } else { &[None, Some(16), Some(64), Some(256)] };
    let decodes: &[(u32, u32)] = if args.smoke { &[(1, 128)] } else { &[(16, 16 << 10), (32, 16 << 10)] };
    let prompts: &[u32] = if args.smoke { &[64] } else { &[16 << 10, 64 << 10] };
    for &(batch, context) in decodes {
        for &block in blocks {
            let key = json!({ "batch": batch, "context": context, "block": block });
            out.row("decode_of_table_7", key, || {
                let what = Decode { batch, context, dtype: KvDType::BF16, group: 1, block };
                let time = decode(what, tuning(args, DType::BF16, Precision::Fast)?)?;
                // The paper's Table 7 adds up 32 layers.
                with(time.fields(), json!({ "layers_32_ms": time.us[1] * 32e-3 }))
            })?;
        }
    }
    for &tokens in prompts {
        for &block in blocks {
            out.row("prefill_of_table_6", json!({ "tokens": tokens, "block": block }), || {
                let time = prefill(tokens, KvDType::BF16, block, tuning(args, DType::BF16, Precision::Fast)?)?;
                with(time.fields(), json!({ "ms": time.us[1] / 1e3, "layers_32_s": time.us[1] * 32e-6 }))
            })?;
        }
    }
    Ok(())
}
