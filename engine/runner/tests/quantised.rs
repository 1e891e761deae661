//! Quantised safetensors on the host backend, by the plainest forward pass: committed checkpoints against logits in float64 on their
//! dequantised weights (tools/quantised), and families with tensors of other kinds against themselves with those weights in f32.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests: numbers of small models")]
#![allow(clippy::print_stdout, reason = "measured differences, for --nocapture")]

mod plain;

use lagoon_backend::{CpuDevice, Device, WeightFormat};
use lagoon_model::{Checkpoint, ModelSpec};
use lagoon_types::{DType, e4m3};
use plain::{goldens, logits, worst};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Logits have a deviation of 1. With the weights in f32 the only difference is rounding of the arithmetic; packed ones differ by
/// the rounding of activations, and converted ones by that of weights to 16 bits.
#[test]
fn committed_checkpoints_give_the_logits_of_their_weights() {
    let dir = goldens().join("quantised");
    let cases: Value = serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let formats = [
        ("fp8-block", Some(WeightFormat::Fp8)),
        ("fp8-channel", Some(WeightFormat::Fp8)),
        ("fp8-tensor", Some(WeightFormat::Fp8)),
        ("awq", Some(WeightFormat::Int4G64)),
        ("gptq", Some(WeightFormat::Int4G32)),
        ("gptq-order", None),
        ("packed-symmetric", Some(WeightFormat::Int4G32)),
        ("packed-asymmetric", Some(WeightFormat::Int4G128)),
        ("packed-channel", Some(WeightFormat::Int4G128)),
    ];
    assert_eq!(cases.as_array().unwrap().len(), formats.len());
    for (case, (name, format)) in cases.as_array().unwrap().iter().zip(formats) {
        assert_eq!(case["name"], name);
        let path = dir.join(name);
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let mut expected = Vec::new();
        DType::F32.decode(&std::fs::read(path.join("logits")).unwrap(), &mut expected);
        let [exact, half, own] =
            [Some(DType::F32), Some(DType::F16), None].map(|dtype| worst(&logits(&path, &tokens, dtype), &expected));
        println!("{name}: {exact} in f32, {half} in f16, {own} as the files have them");
        assert!(exact < 1e-4, "{name}: {exact}");
        // bf16 scales times symmetric codes are exact in f16.
        assert!(
            half < 2e-2 && (half > exact || name.starts_with("packed")),
            "{name}: {half}, weights in f16 are rounded"
        );
        assert!(own < if format.is_some() { 1e-3 } else { 2e-2 }, "{name}: {own}");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let packed: Vec<WeightFormat> =
            checkpoint.formats().into_iter().map(|(format, _)| format).filter(|of| of.plain().is_none()).collect();
        assert_eq!(packed, format.into_iter().collect::<Vec<_>>(), "{name}");
        assert!(packed.iter().all(|format| CpuDevice::with_threads(1).takes(*format)));
        assert_eq!(
            checkpoint.unpackable().map(|of| of.tensors),
            if format.is_some() { None } else { Some(7) },
            "{name}"
        );
    }
}

/// Shape, type and bytes by name.
type Tensors = BTreeMap<String, (Vec<usize>, Dtype, Vec<u8>)>;

fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, (shape, dtype, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn f32s(shape: &[usize], values: &[f32]) -> (Vec<usize>, Dtype, Vec<u8>) {
    let mut bytes = Vec::new();
    DType::F32.encode(values, &mut bytes);
    (shape.to_vec(), Dtype::F32, bytes)
}

/// Random numbers that depend on nothing else.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Within -1 and 1.
    fn number(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// The tensors of a model: those that `quantise` makes of a name and shape, with their elements in f32; others are random.
fn model(
    spec: &ModelSpec,
    mut quantise: impl FnMut(&mut Random, &str, &[usize]) -> Option<(Tensors, (Vec<usize>, Vec<f32>))>,
) -> (Tensors, Tensors) {
    let (mut random, mut packed, mut plain) = (Random(7), Tensors::new(), Tensors::new());
    let shapes: BTreeMap<&String, &Vec<usize>> = spec.parts().map(|part| (&part.tensor, &part.shape)).collect();
    for (name, shape) in shapes {
        if let Some((tensors, (shape, elements))) = quantise(&mut random, name, shape) {
            packed.extend(tensors);
            plain.insert(name.clone(), f32s(&shape, &elements));
            continue;
        }
        let matrix = shape.len() > 1;
        let factor = if matrix { 1.7 / (*shape.last().unwrap() as f32).sqrt() } else { 0.3 };
        let offset = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values: Vec<f32> =
            (0..shape.iter().product::<usize>()).map(|_| random.number() * factor + offset).collect();
        packed.insert(name.clone(), f32s(shape, &values));
        plain.insert(name.clone(), f32s(shape, &values));
    }
    (packed, plain)
}

/// Compares a quantised checkpoint's logits with those of its weights in f32.
fn compare(name: &str, config: &Value, packed: &Tensors, plain: &Tensors, formats: &[WeightFormat]) {
    let [of_packed, of_plain] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write(of_packed.path(), config, packed);
    let mut without = config.clone();
    without.as_object_mut().unwrap().remove("quantization_config");
    write(of_plain.path(), &without, plain);
    let found: Vec<WeightFormat> =
        Checkpoint::open(of_packed.path()).unwrap().formats().into_iter().map(|(format, _)| format).collect();
    assert_eq!(found, formats, "{name}");
    let tokens: Vec<u32> = (3..60).map(|i| i * 37 % 120).collect();
    let expected = logits(of_plain.path(), &tokens, None);
    let deviation = (expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt();
    let [exact, own] =
        [Some(DType::F32), None].map(|dtype| worst(&logits(of_packed.path(), &tokens, dtype), &expected));
    println!("{name}: {exact} in f32, {own} as the files have them; logits have a deviation of {deviation}");
    assert!(exact < 2e-4 * deviation && own < 2e-3 * deviation, "{name}: {exact} and {own} of {deviation}");
}

fn config(golden: &str, changes: &Value) -> (Value, ModelSpec) {
    let bytes = std::fs::read(goldens().join(golden).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&bytes).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    let mut plain = config.clone();
    plain.as_object_mut().unwrap().remove("quantization_config");
    let spec = ModelSpec::parse(Path::new("config.json"), &plain.to_string()).unwrap();
    (config, spec)
}

/// A matrix of E4M3FN codes with a scale for each block of 128 rows and columns.
fn fp8(random: &mut Random, name: &str, shape: &[usize]) -> (Tensors, (Vec<usize>, Vec<f32>)) {
    let [rows, cols] = [shape[0], shape[1]];
    let across = cols.div_ceil(128);
    let scales: Vec<f32> =
        (0..rows.div_ceil(128) * across).map(|_| (1.2 + random.number()) / 12.0 / (cols as f32).sqrt()).collect();
    // Magnitudes up to 30.
    let codes: Vec<u8> =
        (0..rows * cols).map(|_| (random.bits() % 0x60) as u8 | ((random.bits() % 2) << 7) as u8).collect();
    let element = |(i, code): (usize, &u8)| e4m3::decode(*code) * scales[i / cols / 128 * across + i % cols / 128];
    let elements = codes.iter().enumerate().map(element).collect();
    let scale = f32s(&[rows.div_ceil(128), across], &scales);
    let tensors =
        [(name.to_owned(), (shape.to_vec(), Dtype::F8_E4M3, codes.clone())), (format!("{name}_scale_inv"), scale)];
    (tensors.into(), (shape.to_vec(), elements))
}

/// Latent attention takes columns and pieces of rows of quantised matrices, and experts have one each. Sizes are such that some
/// rows are whole blocks and others are not, as in DeepSeek-V3 (576 rows of latents).
#[test]
fn deepseeks_blocks_of_fp8() {
    let (config, spec) = config(
        "deepseek_v3",
        &json!({
            "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 200, "q_lora_rank": 128,
            "kv_lora_rank": 128, "n_routed_experts": 8,
            "quantization_config": {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            },
        }),
    );
    let (packed, plain) = model(&spec, |random, name, shape| {
        let linear = name.contains("_proj") && name.ends_with(".weight");
        linear.then(|| fp8(random, name, shape))
    });
    compare("deepseek_v3", &config, &packed, &plain, &[WeightFormat::F32, WeightFormat::Fp8]);
}

/// Published gpt-oss: experts of MXFP4 blocks `[expert][out][blocks][16]`, neighbours in a byte, gates and ups in turns.
#[test]
fn gpt_oss_has_experts_in_mxfp4() {
    const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
    let (config, spec) = config(
        "gpt_oss",
        &json!({
            "hidden_size": 96, "intermediate_size": 64,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unquantised},
        }),
    );
    let (packed, plain) = model(&spec, |random, name, shape| {
        let &[count, inputs, outputs] = shape else { return None };
        let (blocks, rows) = (inputs / 32, count * outputs);
        let codes: Vec<u8> = (0..rows * inputs).map(|_| (random.bits() % 16) as u8).collect();
        let exponents: Vec<u8> = (0..rows * blocks).map(|_| 121 + (random.bits() % 4) as u8).collect();
        let bytes = codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect();
        let tensors = [
            (format!("{name}_blocks"), (vec![count, outputs, blocks, 16], Dtype::U8, bytes)),
            (format!("{name}_scales"), (vec![count, outputs, blocks], Dtype::U8, exponents.clone())),
        ];
        // The same `[expert][in][out]`, as transformers has it without quantisation.
        let mut elements = vec![0.0; rows * inputs];
        for (i, code) in codes.iter().enumerate() {
            let (row, col) = (i / inputs, i % inputs);
            let scale = 2f32.powi(i32::from(exponents[i / 32]) - 127);
            elements[(row / outputs * inputs + col) * outputs + row % outputs] = NUMBERS[usize::from(*code)] * scale;
        }
        Some((tensors.into(), (shape.to_vec(), elements)))
    });
    compare("gpt_oss", &config, &packed, &plain, &[WeightFormat::F32, WeightFormat::Mxfp4]);
}
