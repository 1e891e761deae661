//! From the tensors of a quantised checkpoint to matrices under the names that families ask for.

use super::config::{Fp8, Int4, Layout, Quantisation};
use super::int4::{self, Int4Codes, Zeros};
use super::matrix::{Codes, Floats, Matrix, Source};
use crate::ModelError;
use crate::checkpoint::{Origin, TensorFile, TensorInfo};
use crate::error::shown;
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use lagoon_types::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Element types of scales, as safetensors names them.
const FLOATS: [&str; 3] = ["F32", "F16", "BF16"];
/// Ends of names of tensors that are about activations and KV, whose quantisation is ignored.
const IGNORED: [&str; 9] = [
    ".activation_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".v_scale",
];

/// Replaces the tensors of quantised matrices by the matrices.
///
/// # Errors
/// A tensor that is missing, or has another shape or type than its method says.
pub(crate) fn assemble(
    tensors: &mut BTreeMap<String, TensorInfo>,
    files: &[TensorFile],
    quantisation: &Quantisation,
) -> Result<(), ModelError> {
    tensors.retain(|name, _| !IGNORED.iter().any(|end| name.ends_with(end)));
    let codes_end = match quantisation.int4.map(|int4| int4.layout) {
        Some(Layout::Packed { .. }) => ".weight_packed",
        _ => ".qweight",
    };
    let names: Vec<String> = tensors.keys().cloned().collect();
    for name in names {
        let stored = tensors.get(&name).map_or("", |info| info.stored.as_str());
        let (module, logical, work) =
            if let (Some(module), "F8_E4M3", Some(of)) = (name.strip_suffix(".weight"), stored, quantisation.fp8) {
                (module, name.clone(), Work::Fp8(of))
            } else if let (Some(module), Some(of)) = (name.strip_suffix(codes_end), quantisation.int4) {
                (module, format!("{module}.weight"), Work::Int4(of))
            } else if let (Some(module), true) = (name.strip_suffix("_blocks"), quantisation.mxfp4) {
                (module, name.clone(), Work::Mxfp4)
            } else {
                continue;
            };
        let mut parts = Module { tensors: &mut *tensors, files, module, name: &name };
        if quantisation.plain.contains(module) {
            return Err(parts.error(&name, "is quantised; quantization_config says that its module is not".to_owned()));
        }
        let info = match work {
            Work::Fp8(of) => parts.fp8(of),
            Work::Int4(of) => parts.int4(of),
            Work::Mxfp4 => parts.mxfp4(),
        }?;
        tensors.insert(logical, info);
    }
    Ok(())
}

enum Work {
    Fp8(Fp8),
    Int4(Int4),
    Mxfp4,
}

/// A tensor that was taken out of the map.
struct Taken {
    info: TensorInfo,
    bytes: Bytes,
    origin: Origin,
}

impl Taken {
    fn source(&self) -> Source {
        Source { origin: self.origin.clone(), bytes: self.bytes.len() }
    }

    fn floats(&self) -> Floats {
        let dtype = match self.info.stored.as_str() {
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            _ => DType::F32,
        };
        Floats { dtype, bytes: self.bytes.clone() }
    }
}

/// A matrix, and how it is stored.
struct Made {
    rows: usize,
    cols: usize,
    /// Of the tensor that takes the place of the stored ones.
    shape: Vec<usize>,
    format: WeightFormat,
    unpackable: Option<String>,
    codes: Codes,
    stored: String,
}

/// The tensors of a quantised module.
struct Module<'a> {
    tensors: &'a mut BTreeMap<String, TensorInfo>,
    files: &'a [TensorFile],
    module: &'a str,
    /// The tensor of codes.
    name: &'a str,
}

impl Module<'_> {
    fn error(&self, name: &str, problem: String) -> ModelError {
        // The codes' file where the tensor is missing.
        let info = self.tensors.get(name).or_else(|| self.tensors.get(self.name));
        let path = info.and_then(|info| self.files.get(info.file)).map(|file| file.path.clone());
        ModelError::Tensor { path: path.unwrap_or_default(), tensor: shown(name), problem }
    }

    /// The tensor `name`, which stays in the map, of one of `types`; `None` if there is none.
    fn get(&self, name: &str, types: &[&str]) -> Result<Option<Taken>, ModelError> {
        let Some(info) = self.tensors.get(name) else { return Ok(None) };
        if !types.contains(&info.stored.as_str()) {
            let problem = format!("has elements of type {}; supported are {}", info.stored, types.join(", "));
            return Err(self.error(name, problem));
        }
        let file = &self.files[info.file];
        let origin = Origin { path: file.path.clone(), map: Some(file.map.clone()), start: info.range.start };
        Ok(Some(Taken { info: info.clone(), bytes: file.map.bytes().slice(info.range.clone()), origin }))
    }

    /// The codes.
    fn codes(&self, types: &[&str], ranks: std::ops::RangeInclusive<usize>) -> Result<Taken, ModelError> {
        let codes = self.get(self.name, types)?.ok_or_else(|| self.error(self.name, "is missing".to_owned()))?;
        if !ranks.contains(&codes.info.shape.len()) || codes.info.shape.contains(&0) {
            let shape = shown(&format!("{:?}", codes.info.shape));
            return Err(self.error(self.name, format!("has the shape {shape}, which is not that of a matrix")));
        }
        Ok(codes)
    }

    /// The module's tensor `end`, of one of `types` and `shapes`; `None` if there is none.
    fn optional(&self, end: &str, types: &[&str], shapes: &[&[usize]]) -> Result<Option<Taken>, ModelError> {
        let name = format!("{}{end}", self.module);
        let found = self.get(&name, types)?;
        if let Some(found) = &found
            && !shapes.contains(&found.info.shape.as_slice())
        {
            let stored = shown(&format!("{:?}", found.info.shape));
            let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            let problem = format!("has the shape {stored}; `{}` goes with {}", shown(self.name), shapes.join(" or "));
            return Err(self.error(&name, problem));
        }
        Ok(found)
    }

    fn required(&self, end: &str, types: &[&str], shapes: &[&[usize]]) -> Result<Taken, ModelError> {
        let missing = || {
            let problem = format!("is missing; it belongs to `{}`", shown(self.name));
            self.error(&format!("{}{end}", self.module), problem)
        };
        self.optional(end, types, shapes)?.ok_or_else(missing)
    }

    /// Takes the module's tensors out of the map, and gives the matrix of their place.
    fn finish(&mut self, made: Made, taken: &[&Taken], ends: &[&str]) -> TensorInfo {
        let Made { rows, cols, shape, format, unpackable, codes, stored } = made;
        let sources = taken.iter().map(|taken| taken.source()).collect();
        let (file, path) = (taken[0].info.file, taken[0].origin.path.clone());
        let name = shown(self.name);
        let matrix = Matrix { rows, cols, format, unpackable, codes, sources, name, path };
        self.tensors.remove(self.name);
        for end in ends {
            self.tensors.remove(&format!("{}{end}", self.module));
        }
        TensorInfo { stored, format: Some(format), shape, file, range: 0..0, quantised: Some(Arc::new(matrix)) }
    }

    fn fp8(&mut self, Fp8 { block }: Fp8) -> Result<TensorInfo, ModelError> {
        let codes = self.codes(&["F8_E4M3"], 2..=2)?;
        let (rows, cols) = (codes.info.shape[0], codes.info.shape[1]);
        let of_blocks = block.map(|[high, wide]| [rows.div_ceil(high), cols.div_ceil(wide)]);
        let mut shapes: Vec<&[usize]> = of_blocks.iter().map(<[usize; 2]>::as_slice).collect();
        let (by_row, by_row_2) = ([rows], [rows, 1]);
        // A configuration with blocks has scales of blocks everywhere.
        if block.is_none() {
            shapes.extend([&by_row[..], &by_row_2, &[1], &[], &[1, 1]]);
        }
        let end = match self.tensors.contains_key(&format!("{}.weight_scale", self.module)) {
            true => ".weight_scale",
            false => ".weight_scale_inv",
        };
        let scales = self.required(end, &FLOATS, &shapes)?;
        let shape = scales.info.shape.as_slice();
        let per = match (block, of_blocks) {
            (Some(block), Some(_)) => block,
            _ if shape == by_row || shape == by_row_2 => [1, cols],
            _ => [rows, cols],
        };
        let across = cols.div_ceil(per[1]);
        let format = WeightFormat::Fp8;
        let elements = format.block().elements;
        let unpackable = if !cols.is_multiple_of(elements) {
            Some(format!("its {cols} columns are no multiple of {elements}"))
        } else if per[1] < cols && !per[1].is_multiple_of(elements) {
            Some(format!("its scales are those of {} columns, which is no multiple of {elements}", per[1]))
        } else {
            None
        };
        let stored = format!("F8_E4M3 with {} scales of {}x{}", scales.info.stored, per[0], per[1]);
        let kinds = Codes::Fp8 { codes: codes.bytes.clone(), scales: scales.floats(), per, across };
        let made = Made { rows, cols, shape: vec![rows, cols], format, unpackable, codes: kinds, stored };
        // A zero point of codes that have none.
        Ok(self.finish(made, &[&codes, &scales], &[end, ".weight_zero_point"]))
    }

    fn mxfp4(&mut self) -> Result<TensorInfo, ModelError> {
        let codes = self.codes(&["U8"], 3..=8)?;
        let format = WeightFormat::Mxfp4;
        let elements = format.block().elements;
        let Some((&bytes, outer)) = codes.info.shape.split_last().filter(|(bytes, _)| **bytes == elements / 2) else {
            let shape = shown(&format!("{:?}", codes.info.shape));
            return Err(self.error(self.name, format!("has the shape {shape}; blocks have {} bytes", elements / 2)));
        };
        let exponents = self.required("_scales", &["U8"], &[outer])?;
        let (&blocks, high) = outer.split_last().expect("it has three dimensions or more");
        let (rows, cols) = (codes.bytes.len() / bytes / blocks, blocks * elements);
        let shape = [high, &[cols]].concat();
        let kinds = Codes::Mxfp4 { codes: codes.bytes.clone(), exponents: exponents.bytes.clone() };
        let stored = "MXFP4".to_owned();
        let made = Made { rows, cols, shape, format, unpackable: None, codes: kinds, stored };
        Ok(self.finish(made, &[&codes, &exponents], &["_scales"]))
    }

    fn int4(&mut self, of: Int4) -> Result<TensorInfo, ModelError> {
        let codes = self.codes(&["I32"], 2..=2)?;
        let [high, wide] = [codes.info.shape[0], codes.info.shape[1]];
        let (rows, cols) = match of.layout {
            Layout::Awq => (wide * 8, high),
            Layout::Gptq { .. } => (wide, high * 8),
            Layout::Packed { .. } => (high, self.packed_cols(high, wide)?),
        };
        let group = of.group.unwrap_or(cols);
        let groups = cols.div_ceil(group);
        let by_row = matches!(of.layout, Layout::Packed { .. });
        let scales = match by_row {
            true if groups == 1 => self.required(".weight_scale", &FLOATS, &[&[rows, 1], &[rows]])?,
            true => self.required(".weight_scale", &FLOATS, &[&[rows, groups]])?,
            false => self.required(".scales", &FLOATS, &[&[groups, rows]])?,
        };
        let (zeros, zeros_from) = self.zeros(of.layout, rows, groups)?;
        let order = self.order(if by_row { ".weight_g_idx" } else { ".g_idx" }, cols, group, groups)?;
        let format = int4::format(cols, group);
        let unpackable = if order.is_some() {
            Some("its columns are in groups by their order of activation (desc_act, actorder)".to_owned())
        } else if scales.info.stored == "F32" {
            Some("its scales are F32".to_owned())
        } else if format.is_none() {
            Some(format!("blocks of 32 columns do not divide groups of {group} of {cols} columns"))
        } else {
            None
        };
        let how = match (of.layout, &zeros) {
            (Layout::Awq, _) => "AWQ",
            (Layout::Gptq { offset: 0 }, _) => "GPTQ v2",
            (Layout::Gptq { .. }, _) => "GPTQ",
            (Layout::Packed { .. }, Zeros::Middle) => "symmetric",
            (Layout::Packed { .. }, _) => "asymmetric",
        };
        let stored = format!("I4 ({how}) in groups of {group} with {} scales", scales.info.stored);
        let kinds = Int4Codes {
            layout: of.layout,
            rows,
            cols,
            codes: codes.bytes.clone(),
            scales: scales.floats(),
            zeros,
            groups,
            group,
            order,
        };
        let mut taken = vec![&codes, &scales];
        taken.extend(&zeros_from);
        let ends = match by_row {
            true => [".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"],
            false => [".scales", ".qzeros", ".g_idx", ".qweight"],
        };
        let format = format.unwrap_or(WeightFormat::Int4G32);
        let shape = vec![rows, cols];
        let made = Made { rows, cols, shape, format, unpackable, codes: Codes::Int4(kinds), stored };
        Ok(self.finish(made, &taken, &ends))
    }

    /// Columns of a pack-quantized matrix of `wide` words a row, by its `weight_shape`.
    fn packed_cols(&self, rows: usize, wide: usize) -> Result<usize, ModelError> {
        let end = ".weight_shape";
        let shape = self.required(end, &["I64", "I32"], &[&[2]])?;
        let size = shape.bytes.len() / 2;
        let number = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => 0,
        };
        let [high, cols] = [&shape.bytes[..size], &shape.bytes[size..]].map(number);
        match usize::try_from(cols).ok().filter(|cols| high == rows as u64 && *cols > 0 && cols.div_ceil(8) == wide) {
            Some(cols) => Ok(cols),
            None => {
                let problem = format!("is {high} x {cols}; `{}` has {rows} rows of {wide} words", shown(self.name));
                Err(self.error(&format!("{}{end}", self.module), problem))
            }
        }
    }

    /// Zero points, and the tensor that they are in.
    fn zeros(&self, layout: Layout, rows: usize, groups: usize) -> Result<(Zeros, Option<Taken>), ModelError> {
        let found = match layout {
            Layout::Packed { symmetric: true } => return Ok((Zeros::Middle, None)),
            Layout::Packed { symmetric: false } => {
                let shapes: [&[usize]; 3] = [&[rows.div_ceil(8), groups], &[rows, groups], &[rows]];
                let found = self.required(".weight_zero_point", &["I32", "I8"], &shapes)?;
                let elements = if found.info.stored == "I32" { rows.div_ceil(8) * groups * 4 } else { rows * groups };
                if found.bytes.len() != elements {
                    let problem = format!("has the type {} and {} bytes", found.info.stored, found.bytes.len());
                    return Err(self.error(&format!("{}.weight_zero_point", self.module), problem));
                }
                found
            }
            Layout::Awq | Layout::Gptq { .. } => {
                if !rows.is_multiple_of(8) {
                    return Err(self.error(self.name, format!("has {rows} rows, which are no multiple of 8")));
                }
                self.required(".qzeros", &["I32"], &[&[groups, rows / 8]])?
            }
        };
        let bytes = found.bytes.clone();
        let zeros = if found.info.stored == "I8" { Zeros::Signed(bytes) } else { Zeros::Words(bytes) };
        Ok((zeros, Some(found)))
    }

    /// The group of each column, if they are not one behind the other.
    fn order(&self, end: &str, cols: usize, group: usize, groups: usize) -> Result<Option<Vec<u32>>, ModelError> {
        let Some(found) = self.optional(end, &["I32"], &[&[cols]])? else { return Ok(None) };
        let order: Vec<u32> =
            found.bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if let Some(beyond) = order.iter().find(|of| **of as usize >= groups) {
            let problem = format!("names the group {beyond} of {groups}");
            return Err(self.error(&format!("{}{end}", self.module), problem));
        }
        let plain = order.iter().enumerate().all(|(col, of)| *of as usize == col / group);
        Ok((!plain).then_some(order))
    }
}
