//! Matrices of every layout against plain loops, and files and configurations that are refused.

use super::Quantisation;
use super::matrix::Rows;
use crate::fields::Fields;
use crate::spec::Part;
use crate::{Checkpoint, ModelError, convert};
use lagoon_backend::WeightFormat;
use lagoon_types::DType;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::path::Path;

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn read(config: &Value) -> Result<Option<Quantisation>, ModelError> {
    let text = json!({ "quantization_config": config }).to_string();
    let fields = Fields::parse(Path::new("dir/config.json"), text.as_bytes())?;
    let read = Quantisation::read(&fields)?;
    fields.refuse_others(&[], "it is not known")?;
    Ok(read)
}

fn open(config: &Value, tensors: &[Tensor]) -> Result<Checkpoint, ModelError> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    let mut checkpoint = Checkpoint::of_bytes(Path::new("dir/model.safetensors"), bytes.into())?;
    checkpoint.assemble(&read(config)?.unwrap())?;
    Ok(checkpoint)
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    (name.to_owned(), dtype, shape.to_vec(), bytes)
}

fn numbers(name: &str, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    let mut bytes = Vec::new();
    dtype.encode(values, &mut bytes);
    let stored = match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
    };
    tensor(name, stored, shape, bytes)
}

/// Words of eight codes each.
fn words(codes: impl Iterator<Item = u8>) -> Vec<u8> {
    let codes: Vec<u8> = codes.collect();
    codes.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4).collect()
}

/// A code, scale or zero point that looks random.
fn mixed(a: usize, b: usize) -> usize {
    (a * 131 + b * 71 + a * b * 17) % 1009
}

/// A 4-bit matrix as loops see it.
struct Plain {
    rows: usize,
    cols: usize,
    group: usize,
}

impl Plain {
    fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    fn code(row: usize, col: usize) -> u8 {
        u8::try_from(mixed(row, col) % 16).unwrap()
    }

    fn zero(row: usize, group: usize) -> u8 {
        u8::try_from(mixed(row + 5, group + 3) % 15 + 1).unwrap()
    }

    fn scale(row: usize, group: usize) -> f32 {
        half::f16::from_f32(0.01 + mixed(row, group) as f32 / 1e5).to_f32()
    }

    fn element(&self, row: usize, col: usize, zero: impl Fn(usize, usize) -> u8) -> f32 {
        let group = col / self.group;
        (f32::from(Self::code(row, col)) - f32::from(zero(row, group))) * Self::scale(row, group)
    }

    /// Tensors of AutoAWQ.
    fn awq(&self) -> Vec<Tensor> {
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let (rows, groups) = (self.rows, self.groups());
        let place = move |i: usize| i / 8 * 8 + order[i % 8];
        let codes = (0..self.cols).flat_map(|col| (0..rows).map(move |i| Self::code(place(i), col)));
        let zeros = (0..groups).flat_map(|group| (0..rows).map(move |i| Self::zero(place(i), group)));
        let scales: Vec<f32> =
            (0..groups).flat_map(|group| (0..rows).map(move |row| Self::scale(row, group))).collect();
        vec![
            tensor("m.qweight", Dtype::I32, &[self.cols, rows / 8], words(codes)),
            tensor("m.qzeros", Dtype::I32, &[groups, rows / 8], words(zeros)),
            numbers("m.scales", DType::F16, &[groups, rows], &scales),
        ]
    }

    /// Tensors of AutoGPTQ, whose zero points are less `offset`.
    fn gptq(&self, offset: u8) -> Vec<Tensor> {
        let (rows, groups) = (self.rows, self.groups());
        let codes = (0..self.cols / 8)
            .flat_map(|word| (0..rows).flat_map(move |row| (0..8).map(move |i| Self::code(row, word * 8 + i))));
        let zeros = (0..groups).flat_map(|group| (0..rows).map(move |row| Self::zero(row, group) - offset));
        let scales: Vec<f32> =
            (0..groups).flat_map(|group| (0..rows).map(move |row| Self::scale(row, group))).collect();
        vec![
            tensor("m.qweight", Dtype::I32, &[self.cols / 8, rows], words(codes)),
            tensor("m.qzeros", Dtype::I32, &[groups, rows / 8], words(zeros)),
            numbers("m.scales", DType::F16, &[groups, rows], &scales),
        ]
    }

    /// Tensors of compressed-tensors.
    fn packed(&self) -> Vec<Tensor> {
        let (rows, cols, groups) = (self.rows, self.cols, self.groups());
        let wide = cols.div_ceil(8) * 8;
        let codes =
            (0..rows).flat_map(|row| (0..wide).map(move |col| if col < cols { Self::code(row, col) } else { 0 }));
        let scales: Vec<f32> =
            (0..rows).flat_map(|row| (0..groups).map(move |group| Self::scale(row, group))).collect();
        let shape = [rows as u64, cols as u64].iter().flat_map(|size| size.to_le_bytes()).collect();
        vec![
            tensor("m.weight_packed", Dtype::I32, &[rows, wide / 8], words(codes)),
            numbers("m.weight_scale", DType::F16, &[rows, groups], &scales),
            tensor("m.weight_shape", Dtype::I64, &[2], shape),
        ]
    }

    /// Zero points of eight rows a word.
    fn packed_zeros(&self) -> Tensor {
        let (high, groups, rows) = (self.rows.div_ceil(8), self.groups(), self.rows);
        let zeros = (0..high).flat_map(|word| {
            (0..groups).flat_map(move |group| {
                (0..8).map(move |i| if word * 8 + i < rows { Self::zero(word * 8 + i, group) } else { 0 })
            })
        });
        tensor("m.weight_zero_point", Dtype::I32, &[high, groups], words(zeros))
    }
}

/// Checks rows of a matrix, as blocks and converted, in whole and in parts.
fn check(
    checkpoint: &Checkpoint,
    shape: &[usize],
    format: Option<WeightFormat>,
    element: impl Fn(usize, usize) -> f32,
) {
    let (cols, rows) = (*shape.last().unwrap(), shape.iter().rev().skip(1).product::<usize>());
    let name = checkpoint.tensors().next().unwrap().0.to_owned();
    assert_eq!(checkpoint.tensors().len(), 1, "the other tensors are part of it");
    let tensor = checkpoint.tensor(&name, shape).unwrap();
    let matrix = tensor.quantised.clone().unwrap();
    for part in [Rows { first: 0, step: 1, count: rows }, Rows { first: 1, step: 2, count: rows / 2 }] {
        let expected: Vec<f32> = part
            .iter()
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .map(|(row, col)| element(row, col))
            .collect();
        let mut found = Vec::new();
        DType::F32.decode(&matrix.converted(part, DType::F32).unwrap(), &mut found);
        assert_eq!(found, expected, "{part:?} of {shape:?}");
        let blocks = matrix.packed(part).unwrap();
        assert_eq!(blocks.is_some(), format.is_some(), "{:?}", matrix.unpackable);
        if let (Some(blocks), Some(format)) = (blocks, format) {
            assert_eq!(matrix.format, format);
            found.clear();
            format.decode(&blocks, &mut found);
            assert_eq!(found, expected, "blocks of {part:?} of {shape:?}");
        }
    }
    // Columns of some rows, as latent attention takes them, and a piece of each row.
    let (shape, offset) = (shape.to_vec(), 2 * cols + 1);
    let turned = Part { tensor: name, shape, rows: 5, cols: 3, offset, row_stride: 1, col_stride: cols };
    let pieces = Part { row_stride: cols, col_stride: 1, ..turned.clone() };
    for (part, is_turned) in [(turned, true), (pieces, false)] {
        let at = |i: usize, j: usize| if is_turned { (2 + j, 1 + i) } else { (2 + i, 1 + j) };
        let places = (0..5).flat_map(|i| (0..3).map(move |j| (i, j))).map(|(i, j)| at(i, j));
        let expected: Vec<f32> = places.map(|(row, col)| element(row, col)).collect();
        let mut found = Vec::new();
        DType::F32.decode(&convert::part_in(&part, &tensor, DType::F32).unwrap(), &mut found);
        assert_eq!(found, expected, "a piece of {part:?}");
        assert!(convert::packed_rows(&part, &tensor).unwrap().is_none());
    }
}

fn compressed(weights: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

fn int4(group: Option<usize>, symmetric: bool) -> Value {
    let strategy = if group.is_some() { "group" } else { "channel" };
    compressed(json!({"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}))
}

/// Groups of 24, 32, 64, 128 and all columns; rows beyond a tile.
#[test]
fn four_bit_layouts_are_unpacked() {
    use WeightFormat::{Int4G32, Int4G64, Int4G128};
    for (rows, cols, group, format) in [
        (8, 96, 32, Some(Int4G32)),
        (72, 192, 64, Some(Int4G64)),
        (40, 256, 128, Some(Int4G128)),
        (8, 512, 256, Some(Int4G128)),
        (8, 160, 160, Some(Int4G32)),
        (8, 72, 24, None),
        (16, 48, 48, None),
    ] {
        let plain = Plain { rows, cols, group };
        let size = if group == cols { json!(-1) } else { json!(group) };
        let shape = [rows, cols];
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": true});
        check(&open(&awq, &plain.awq()).unwrap(), &shape, format, |row, col| plain.element(row, col, Plain::zero));
        for (name, offset) in [("gptq", 1), ("gptq_v2", 0)] {
            let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": size, "checkpoint_format": name});
            let opened = open(&gptq, &plain.gptq(offset)).unwrap();
            check(&opened, &shape, format, |row, col| plain.element(row, col, Plain::zero));
        }
    }
}

#[test]
fn pack_quantized_is_unpacked() {
    use WeightFormat::{Int4G32, Int4G64};
    // Rows and columns that no word divides, too.
    for (rows, cols, group, format) in [(11, 64, 32, Some(Int4G32)), (37, 64, 64, Some(Int4G64)), (9, 52, 26, None)] {
        let plain = Plain { rows, cols, group };
        let (shape, size) = ([rows, cols], (group < cols).then_some(group));
        check(&open(&int4(size, true), &plain.packed()).unwrap(), &shape, format, |row, col| {
            plain.element(row, col, |_, _| 8)
        });
        let mut tensors = plain.packed();
        tensors.push(plain.packed_zeros());
        check(&open(&int4(size, false), &tensors).unwrap(), &shape, format, |row, col| {
            plain.element(row, col, Plain::zero)
        });
        // Zero points that are not packed, as older files have them.
        let groups = plain.groups();
        let signed = (0..rows).flat_map(|row| (0..groups).map(move |group| Plain::zero(row, group).wrapping_sub(8)));
        *tensors.last_mut().unwrap() = tensor("m.weight_zero_point", Dtype::I8, &[rows, groups], signed.collect());
        check(&open(&int4(size, false), &tensors).unwrap(), &shape, format, |row, col| {
            plain.element(row, col, Plain::zero)
        });
    }
}

#[test]
fn groups_in_the_order_of_activations_are_decoded() {
    let plain = Plain { rows: 8, cols: 64, group: 32 };
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true});
    let in_turns: Vec<usize> = (0..64).map(|col| col % 2).collect();
    let order = |groups: &[usize]| {
        let bytes = groups.iter().flat_map(|group| u32::try_from(*group).unwrap().to_le_bytes()).collect();
        [plain.gptq(1), vec![tensor("m.g_idx", Dtype::I32, &[64], bytes)]].concat()
    };
    let opened = open(&gptq, &order(&in_turns)).unwrap();
    check(&opened, &[8, 64], None, |row, col| {
        let group = col % 2;
        (f32::from(Plain::code(row, col)) - f32::from(Plain::zero(row, group))) * Plain::scale(row, group)
    });
    assert!(opened.unpackable().unwrap().example.1.contains("order of activation"));
    let neighbours: Vec<usize> = (0..64).map(|col| col / 32).collect();
    let opened = open(&gptq, &order(&neighbours)).unwrap();
    check(&opened, &[8, 64], Some(WeightFormat::Int4G32), |row, col| plain.element(row, col, Plain::zero));
    let error = open(&gptq, &order(&[2; 64])).unwrap_err().to_string();
    assert!(error.contains("the tensor `m.g_idx` names the group 2 of 2"), "{error}");
}

fn fp8_codes(rows: usize, cols: usize) -> Vec<u8> {
    let code = |i: usize| u8::try_from(mixed(i / cols, i % cols) % 256).unwrap();
    (0..rows * cols).map(code).map(|code| if code & 0x7f == 0x7f { 0x31 } else { code }).collect()
}

#[test]
fn fp8_scales_are_those_of_blocks_rows_or_the_matrix() {
    let of_blocks = |block: [usize; 2]| json!({"quant_method": "fp8", "weight_block_size": block});
    let of_rows = compressed(json!({"num_bits": 8, "type": "float", "strategy": "channel"}));
    let of_all = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let packed = Some(WeightFormat::Fp8);
    for (config, end, per, (rows, cols), format) in [
        (of_blocks([128, 128]), "_scale_inv", [128, 128], (130, 256), packed),
        (of_blocks([4, 128]), "_scale_inv", [4, 128], (11, 384), packed),
        (of_blocks([128, 128]), "_scale_inv", [128, 128], (130, 200), None),
        (of_blocks([16, 64]), "_scale_inv", [16, 64], (20, 128), None),
        (of_rows.clone(), "_scale", [1, 128], (9, 128), packed),
        (of_rows, "_scale", [1, 100], (9, 100), None),
        (of_all, "_scale", [9, 128], (9, 128), packed),
    ] {
        let shape: [usize; 2] = [usize::div_ceil(rows, per[0]), usize::div_ceil(cols, per[1])];
        let stored = if shape == [1, 1] { vec![1] } else { shape.to_vec() };
        let scales: Vec<f32> = (0..shape[0] * shape[1]).map(|i| 0.001 + i as f32 / 512.0).collect();
        let codes = fp8_codes(rows, cols);
        let tensors = [
            tensor("m.weight", Dtype::F8_E4M3, &[rows, cols], codes.clone()),
            numbers(&format!("m.weight{end}"), DType::F32, &stored, &scales),
            numbers("m.input_scale", DType::F32, &[1], &[0.5]),
        ];
        check(&open(&config, &tensors).unwrap(), &[rows, cols], format, |row, col| {
            let scale = scales[row / per[0] * shape[1] + col / per[1]];
            lagoon_types::e4m3::decode(codes[row * cols + col]) * scale
        });
    }
}

#[test]
fn mxfp4_blocks_of_several_dimensions_are_one_matrix() {
    let (experts, rows, blocks) = (2, 5, 3);
    let codes: Vec<u8> = (0..experts * rows * blocks * 16).map(|i| u8::try_from(mixed(i, 1) % 256).unwrap()).collect();
    let exponents: Vec<u8> = (0..experts * rows * blocks).map(|i| u8::try_from(120 + i % 7).unwrap()).collect();
    let tensors = [
        tensor("m_blocks", Dtype::U8, &[experts, rows, blocks, 16], codes.clone()),
        tensor("m_scales", Dtype::U8, &[experts, rows, blocks], exponents.clone()),
    ];
    let opened = open(&json!({"quant_method": "mxfp4"}), &tensors).unwrap();
    check(&opened, &[experts, rows, blocks * 32], Some(WeightFormat::Mxfp4), |row, col| {
        let i = row * blocks * 32 + col;
        let code = codes[i / 2] >> (4 * (i % 2)) & 15;
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
        let value = if code < 8 { magnitude } else { -magnitude };
        value * 2f32.powi(i32::from(exponents[i / 32]) - 127)
    });
}

#[test]
fn broken_matrices_are_refused_by_name() {
    let plain = Plain { rows: 8, cols: 64, group: 32 };
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 32});
    let fp8 =
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["other", "no"]});
    let codes = |name: &str| tensor(name, Dtype::F8_E4M3, &[2, 128], fp8_codes(2, 128));
    let without = |name: &str| plain.gptq(1).into_iter().filter(|of| of.0 != name).collect::<Vec<_>>();
    let group_16 = json!({"quant_method": "gptq", "bits": 4, "group_size": 16});
    let mut integers = plain.gptq(1);
    integers[2] = tensor("m.scales", Dtype::I32, &[2, 8], vec![0; 64]);
    let cases = [
        (&gptq, without("m.qzeros"), "the tensor `m.qzeros` is missing; it belongs to `m.qweight`"),
        (&gptq, without("m.scales"), "the tensor `m.scales` is missing"),
        (&gptq, integers, "the tensor `m.scales` has elements of type I32; supported are F32, F16, BF16"),
        (&group_16, plain.gptq(1), "the tensor `m.scales` has the shape [2, 8]; `m.qweight` goes with [4, 8]"),
        (&fp8, vec![codes("m.weight")], "the tensor `m.weight_scale_inv` is missing; it belongs to `m.weight`"),
        (
            &fp8,
            vec![codes("m.weight"), numbers("m.weight_scale_inv", DType::F32, &[2, 1], &[1.0; 2])],
            "the tensor `m.weight_scale_inv` has the shape [2, 1]; `m.weight` goes with [1, 1]",
        ),
        (&fp8, vec![codes("no.weight")], "the tensor `no.weight` is quantised; quantization_config says"),
    ];
    for (config, tensors, expected) in cases {
        let error = open(config, &tensors).unwrap_err().to_string();
        assert!(error.starts_with("dir/model.safetensors: ") && error.contains(expected), "{error}");
    }
    // NaN, in codes and scales.
    let scale = |value| numbers("m.weight_scale_inv", DType::F32, &[1, 1], &[value]);
    let mut nan = codes("m.weight");
    nan.3[130] = 0xff;
    for (tensors, expected) in [
        ([nan, scale(1.0)], "has a NaN in row 1"),
        ([codes("m.weight"), scale(f32::NAN)], "has the scale NaN for row 0"),
    ] {
        let matrix = open(&fp8, &tensors).unwrap().tensor("m.weight", &[2, 128]).unwrap().quantised.unwrap();
        let rows = Rows { first: 0, step: 1, count: 2 };
        for error in [matrix.packed(rows).unwrap_err(), matrix.converted(rows, DType::F32).unwrap_err()] {
            assert!(error.to_string().contains(&format!("the tensor `m.weight` {expected}")), "{error}");
        }
    }
}

#[test]
fn what_is_not_read_is_refused_by_the_fields_name() {
    let float = |of: Value| {
        let mut weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        weights.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
        compressed(weights)
    };
    let with = |mut config: Value, field: &str, value: Value| {
        config[field] = value;
        config
    };
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128});
    let cases = [
        (json!({"quant_method": "bitsandbytes"}), "`quantization_config.quant_method` is \"bitsandbytes\""),
        (json!({"bits": 4}), "`quantization_config` is {\"bits\":4}"),
        (with(gptq.clone(), "bits", json!(8)), "`quantization_config.bits` is 8"),
        (
            with(gptq.clone(), "checkpoint_format", json!("marlin")),
            "`quantization_config.checkpoint_format` is \"marlin\"",
        ),
        (with(gptq.clone(), "dynamic", json!({"-:x": {}})), "`quantization_config.dynamic` is"),
        (with(gptq, "group_size", json!(0)), "`quantization_config.group_size` is 0"),
        (with(awq.clone(), "version", json!("gemv")), "`quantization_config.version` is \"gemv\""),
        (with(awq, "zero_point", json!(false)), "`quantization_config.zero_point` is false"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "`quantization_config.fmt` is \"e5m2\""),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            "`quantization_config.weight_block_size` is [128]",
        ),
        (
            json!({"quant_method": "fp8", "modules_to_not_convert": 3}),
            "`quantization_config.modules_to_not_convert` is 3",
        ),
        (json!({"quant_method": "fp8", "other": 3}), "`quantization_config.other` is 3"),
        (float(json!({"num_bits": 4})), "`quantization_config.config_groups.group_0.weights.num_bits` is 4"),
        (float(json!({"strategy": "tensor_group"})), "`quantization_config.config_groups.group_0.weights.strategy` is"),
        (with(float(json!({})), "format", json!("nvfp4-pack-quantized")), "`quantization_config.format` is \"nvfp4"),
        (with(float(json!({})), "transform_config", json!({"a": 1})), "`quantization_config.transform_config` is"),
    ];
    for (config, expected) in cases {
        let error = read(&config).unwrap_err().to_string();
        assert!(error.starts_with("dir/config.json: the field ") && error.contains(expected), "{error}");
    }
    let two = json!({"quant_method": "compressed-tensors", "config_groups": {
        "a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}},
        "b": {"weights": {"num_bits": 8, "type": "float"}},
        "c": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}},
    }});
    let error = read(&two).unwrap_err().to_string();
    assert!(error.contains("`quantization_config.config_groups.c` is") && error.contains("must agree"), "{error}");
}
