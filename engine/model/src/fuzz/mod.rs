//! The entries of the fuzz targets (engine/model/fuzz) and of the bounded test that drives the same functions in CI
//! (tests/fuzz.rs): files of a model, whatever is in them.
//!
//! Each entry reads its input as the loader does, uses what is accepted, and checks what is refused: the error names the file,
//! and the field where there is one, and is short whatever the file holds. Memory is bounded by [`allocation_max`].

pub mod gguf;

use crate::checkpoint::quantised::Quantisation;
use crate::checkpoint::quantised::matrix::Rows;
use crate::checkpoint::{self, Checkpoint, LoadedTensor};
use crate::fields::Fields;
use crate::{GenerationConfig, ModelError, ModelSpec, Rope, families, model_hash};
use bytes::Bytes;
use lagoon_types::DType;
use std::path::Path;

/// Most bytes of an error's text: a few names and values of at most 100 characters, and the names of all families.
const MESSAGE_BYTES_MAX: usize = 4096;
/// Parts of tensors of the largest configuration: experts of all layers, or the pieces of partly rotated heads.
const PARTS_MAX: usize = 4 << 20;
/// Most bytes that [`header`] appends as tensors.
const DATA_BYTES_MAX: usize = 1 << 16;

/// Most bytes that an entry has allocated at once for an input of `bytes`. A configuration of a few bytes may describe a model
/// of [`PARTS_MAX`] tensors.
#[must_use]
pub const fn allocation_max(bytes: usize) -> usize {
    (1 << 30) + 256 * bytes
}

/// Reads `data` as a config.json; whether a family accepts it.
///
/// # Panics
/// If an accepted configuration is not usable, or an error does not name what it is about: a bug of the family.
#[must_use]
pub fn config(data: &[u8]) -> bool {
    let path = Path::new("dir/config.json");
    let mut spec = match Fields::parse(path, data).and_then(|fields| families::read(&fields)) {
        Ok(spec) => spec,
        Err(error) => {
            check_error(&error, "dir/config.json");
            return false;
        }
    };
    assert!(spec.parts().count() <= PARTS_MAX, "{} parts", spec.parts().count());
    assert!(spec.active_parameters() <= spec.parameters() && spec.widest() > 0);
    assert!(spec.kv_shape(DType::F32).token_bytes() > 0);
    if spec.split_kv().is_ok() {
        assert!(spec.windowed_shape(DType::F16).is_some() && spec.ring_slots(1) > 0);
    }
    for limit in [spec.max_positions, 1] {
        spec.limit_context(limit).expect("it is within the model's context");
        let mut table = Vec::new();
        for rope in &spec.ropes {
            Rope::new(rope, spec.rope_dim()).fill(&[0, limit - 1], &mut table);
            assert!(table.iter().all(|x| x.is_finite()), "{rope:?}");
        }
    }
    let generation = Path::new("dir/generation_config.json");
    if let Err(error) = GenerationConfig::parse(generation, &String::from_utf8_lossy(data), &spec) {
        check_error(&error, "dir/generation_config.json");
    }
    true
}

/// Reads `data` as a model.safetensors.index.json; the number of files that it names.
///
/// # Panics
/// If a name could leave the directory, or an error does not name the file and the field.
#[must_use]
pub fn index(data: &[u8]) -> usize {
    let path = Path::new("dir/model.safetensors.index.json");
    match checkpoint::shards(path, data) {
        Ok(shards) => {
            for (file, tensors) in &shards {
                assert_eq!(path.with_file_name(file).parent(), path.parent(), "{file:?} is elsewhere");
                assert!(!tensors.is_empty(), "{file:?} has no tensors");
            }
            shards.len()
        }
        Err(error) => {
            check_error(&error, "dir/model.safetensors.index.json");
            0
        }
    }
}

/// Reads `data` as a safetensors file, and as the header of one with as many bytes of tensors as its largest `data_offsets` say, up
/// to 64 KiB; the number of tensors of both.
///
/// # Panics
/// If a tensor's bytes do not follow from its shape and type, or an error does not name the file.
#[must_use]
pub fn header(data: &[u8]) -> usize {
    let text = String::from_utf8_lossy(data);
    let lists = text.split("data_offsets").skip(1).filter_map(|rest| rest.split(']').next());
    let last = |list: &str| list.rsplit(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse::<usize>().ok());
    let zeros = lists.filter_map(last).filter(|number| *number <= DATA_BYTES_MAX).max().unwrap_or(0);
    let file = [(data.len() as u64).to_le_bytes().as_slice(), data, &vec![0; zeros]].concat();
    safetensors(Bytes::copy_from_slice(data)) + safetensors(file.into())
}

fn safetensors(bytes: Bytes) -> usize {
    let path = Path::new("dir/model.safetensors");
    let checkpoint = match Checkpoint::of_bytes(path, bytes.clone()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            check_error(&error, "dir/model.safetensors");
            return 0;
        }
    };
    for config in QUANTISED {
        let quantised = format!("{{\"quantization_config\":{config}}}");
        let fields = Fields::parse(path, quantised.as_bytes()).expect("an object");
        let quantisation = Quantisation::read(&fields).expect("a method").expect("it is there");
        let mut checkpoint = Checkpoint::of_bytes(path, bytes.clone()).expect("it was read above");
        match checkpoint.assemble(&quantisation) {
            Ok(()) => check_tensors(&checkpoint),
            Err(error) => check_error(&error, "dir/model.safetensors"),
        }
    }
    check_tensors(&checkpoint);
    checkpoint.tensors().len()
}

/// Methods that [`header`] reads files with.
const QUANTISED: [&str; 5] = [
    r#"{"quant_method":"fp8","weight_block_size":[128,128]}"#,
    r#"{"quant_method":"gptq","bits":4,"group_size":32}"#,
    r#"{"quant_method":"awq","bits":4,"group_size":-1}"#,
    r#"{"quant_method":"mxfp4"}"#,
    r#"{"quant_method":"compressed-tensors","config_groups":{
        "a":{"weights":{"num_bits":4,"type":"int","symmetric":false,"strategy":"group","group_size":16}},
        "b":{"weights":{"num_bits":8,"type":"float","strategy":"channel"}}}}"#,
];

/// Reads all tensors of a checkpoint, and the first rows of quantised ones.
fn check_tensors(checkpoint: &Checkpoint) {
    for (name, info) in checkpoint.tensors() {
        match checkpoint.tensor(name, &info.shape) {
            Ok(LoadedTensor { quantised: Some(matrix), .. }) => {
                assert_eq!(matrix.elements(), info.shape.iter().product::<usize>(), "{name:?} of {info:?}");
                let rows = Rows { first: 0, step: 1, count: matrix.rows.min(4) };
                for error in [matrix.packed(rows).err(), matrix.converted(rows, DType::F16).err()].into_iter().flatten()
                {
                    check_error(&error, "dir/model.safetensors");
                }
            }
            Ok(LoadedTensor { format, bytes, .. }) => {
                assert_eq!(Some(bytes.len()), format.bytes(info.shape.iter().product()), "{name:?} of {info:?}");
            }
            Err(error) => check_error(&error, "dir/model.safetensors"),
        }
        let other = [info.shape.as_slice(), &[1]].concat();
        check_error(&checkpoint.tensor(name, &other).expect_err("it has another shape"), "dir/model.safetensors");
    }
    let has = |dtype| checkpoint.tensors().any(|(_, info)| info.dtype() == Some(dtype));
    assert!(checkpoint.is_mixed() || checkpoint.dtype().is_none_or(has));
    let json = include_str!("../../tests/configs/SmolLM2-135M.json");
    let spec = ModelSpec::parse(Path::new("config.json"), json).expect("a configuration");
    let _ = model_hash(&spec, checkpoint, None);
}

/// Checks that an error's text is short and names the file, and the field or tensor where the error has one.
fn check_error(error: &ModelError, file: &str) {
    let text = error.to_string();
    assert!(text.starts_with(file), "{file} is not named: {text}");
    assert!(text.len() <= MESSAGE_BYTES_MAX, "{} bytes: {text}", text.len());
    let named = match error {
        ModelError::Malformed { .. } => return,
        ModelError::MissingField { field, .. }
        | ModelError::InvalidField { field, .. }
        | ModelError::Unsupported { field, .. } => format!("the field `{field}` is"),
        ModelError::Tensor { tensor, .. } => format!("the tensor `{tensor}`"),
        other => panic!("{other} is no error of a file"),
    };
    assert!(text.contains(&named), "{named:?} is not in {text}");
}
