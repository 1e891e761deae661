//! `quantization_config` of a config.json: methods and their fields.
//!
//! Tensors decide which modules are quantised; the configuration says how. Quantisation of activations and of KV is not done:
//! Lagoon computes both more exactly, so its fields are ignored. Fields that change weights and are not implemented are refused by
//! name, and so are those that no method reads here ([`Fields::refuse_others`]).

use crate::ModelError;
use crate::fields::Fields;
use lagoon_types::limits::INTERMEDIATE_MAX;
use serde_json::Value;
use std::collections::BTreeSet;

/// What is read, for errors.
pub(super) const SUPPORTED: &str = "supported are the methods \"fp8\", \"fbgemm_fp8\", \"mxfp4\", \"awq\" and \"gptq\" with 4 bits, and \
     \"compressed-tensors\" in the formats \"float-quantized\" and \"pack-quantized\"";
/// Names of the object: today's, and that of older compressed-tensors.
const OBJECTS: [&str; 2] = ["quantization_config", "compression_config"];

/// How the quantised matrices of a checkpoint are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quantisation {
    /// Matrices of E4M3FN codes.
    pub(crate) fp8: Option<Fp8>,
    /// Matrices of 4-bit integers.
    pub(crate) int4: Option<Int4>,
    /// Tensors of MXFP4 blocks.
    pub(crate) mxfp4: bool,
    /// Modules that are named in full among those that are not quantised. Patterns are left to the tensors.
    pub(crate) plain: BTreeSet<String>,
}

/// Scales of FP8 matrices: of blocks of rows and columns, or of a row or all where there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fp8 {
    pub(crate) block: Option<[usize; 2]>,
}

/// Layout of 4-bit matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int4 {
    pub(crate) layout: Layout,
    /// Columns that share a scale; `None` for all of a row.
    pub(crate) group: Option<usize>,
}

/// Which tensors a 4-bit matrix has, and how its codes lie in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// AutoAWQ's version "gemm".
    Awq,
    /// AutoGPTQ's; zero points are stored less `offset`.
    Gptq { offset: u8 },
    /// compressed-tensors' "pack-quantized".
    Packed { symmetric: bool },
}

impl Quantisation {
    /// Reads the object of a configuration; `None` if there is none.
    pub(crate) fn read(fields: &Fields) -> Result<Option<Self>, ModelError> {
        for name in OBJECTS {
            let Some(object) = fields.object(name)? else { continue };
            return match object.text("quant_method")? {
                None => Err(fields.unsupported(name, SUPPORTED)),
                Some("fp8") => fp8(&object),
                Some("fbgemm_fp8") => {
                    object.ignore(&["activation_scale_ub"]);
                    Self { fp8: Some(Fp8 { block: None }), ..Self::default() }.except(&object, "modules_to_not_convert")
                }
                Some("mxfp4") => {
                    object.ignore(&["dequantize"]);
                    Self { mxfp4: true, ..Self::default() }.except(&object, "modules_to_not_convert")
                }
                Some("awq") => awq(&object),
                Some("gptq") => gptq(&object),
                Some("compressed-tensors") => compressed(&object),
                Some(_) => Err(object.unsupported("quant_method", SUPPORTED)),
            }
            .map(Some);
        }
        Ok(None)
    }

    /// With the modules that a list names as not quantised.
    fn except(mut self, object: &Fields, list: &str) -> Result<Self, ModelError> {
        let Some(value) = object.get(list) else { return Ok(self) };
        let names = value.as_array().and_then(|names| names.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let names = names.ok_or_else(|| object.invalid(list, "it must be a list of names"))?;
        self.plain.extend(names.into_iter().map(str::to_owned));
        Ok(self)
    }
}

fn fp8(object: &Fields) -> Result<Quantisation, ModelError> {
    // Activations, and what a tool is to do at loading.
    object.ignore(&["activation_scheme", "scale_fmt", "dequantize", "kv_cache_scheme", "kv_cache_quant_method"]);
    one_of(object, "fmt", &["e4m3", "float8_e4m3fn"])?;
    let block = block(object, "weight_block_size")?;
    let read = Quantisation { fp8: Some(Fp8 { block }), ..Quantisation::default() };
    read.except(object, "modules_to_not_convert")?.except(object, "ignored_layers")
}

fn awq(object: &Fields) -> Result<Quantisation, ModelError> {
    // What a tool is to do at loading.
    object.ignore(&["backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"]);
    required(object, "bits", &4.into())?;
    one_of(object, "version", &["gemm", "GEMM"])?;
    only(object, "zero_point", &true.into())?;
    let int4 = Int4 { layout: Layout::Awq, group: group(object)? };
    Quantisation { int4: Some(int4), ..Quantisation::default() }.except(object, "modules_to_not_convert")
}

/// Fields of GPTQ tools that say how a checkpoint was made, or what a tool is to do at loading.
const GPTQ_IGNORED: &[&str] = &[
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "disable_exllama",
    "exllama_config",
    "hessian",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "parallel_packing",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
];

fn gptq(object: &Fields) -> Result<Quantisation, ModelError> {
    object.ignore(GPTQ_IGNORED);
    required(object, "bits", &4.into())?;
    only(object, "is_marlin_format", &false.into())?;
    only(object, "pack_dtype", &"int32".into())?;
    one_of(object, "quant_type", &["int"])?;
    one_of(object, "format", &["gptq", "gptq_v2"])?;
    one_of(object, "checkpoint_format", &["gptq", "gptq_v2"])?;
    let format = match object.text("checkpoint_format")? {
        Some(format) => Some(format),
        None => object.text("format")?,
    };
    let offset = u8::from(format != Some("gptq_v2"));
    let int4 = Int4 { layout: Layout::Gptq { offset }, group: group(object)? };
    Quantisation { int4: Some(int4), ..Quantisation::default() }.except(object, "modules_to_not_convert")
}

fn compressed(object: &Fields) -> Result<Quantisation, ModelError> {
    object.ignore(&["quantization_status", "global_compression_ratio", "kv_cache_scheme", "version"]);
    for changes in ["sparsity_config", "transform_config"] {
        let empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
        if object.get(changes).is_some_and(|value| !empty(value) && value["format"] != "dense") {
            return Err(object.unsupported(changes, "only dense weights without transforms are implemented"));
        }
    }
    let formats = ["float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"];
    one_of(object, "format", &formats)?;
    let groups = object.object("config_groups")?.ok_or_else(|| object.missing("config_groups"))?;
    let mut read = Quantisation::default();
    for name in groups.names() {
        let of = groups.object(name)?.ok_or_else(|| groups.missing(name))?;
        one_of(&of, "format", &formats)?;
        // Tensors show which modules a group is about; activations are not quantised.
        of.ignore(&["targets", "input_activations", "output_activations"]);
        let weights = of.object("weights")?.ok_or_else(|| of.missing("weights"))?;
        let other = || groups.unsupported(name, "groups with weights of one kind must agree in all but their modules");
        if weights.text("type")? == Some("float") {
            let fp8 = compressed_fp8(&weights)?;
            if read.fp8.replace(fp8).is_some_and(|known| known != fp8) {
                return Err(other());
            }
        } else {
            let int4 = compressed_int4(&weights)?;
            if read.int4.replace(int4).is_some_and(|known| known != int4) {
                return Err(other());
            }
        }
    }
    read.except(object, "ignore")
}

/// Fields of how scales were found.
fn compressed_weights(weights: &Fields, strategies: &[&str]) -> Result<(), ModelError> {
    weights.ignore(&["actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mse"]);
    only(weights, "dynamic", &false.into())?;
    one_of(weights, "strategy", strategies)
}

fn compressed_fp8(weights: &Fields) -> Result<Fp8, ModelError> {
    required(weights, "num_bits", &8.into())?;
    only(weights, "symmetric", &true.into())?;
    compressed_weights(weights, &["tensor", "channel", "block"])?;
    weights.ignore(&["group_size"]);
    Ok(Fp8 { block: block(weights, "block_structure")? })
}

fn compressed_int4(weights: &Fields) -> Result<Int4, ModelError> {
    required(weights, "num_bits", &4.into())?;
    one_of(weights, "type", &["int"])?;
    compressed_weights(weights, &["group", "channel"])?;
    weights.ignore(&["block_structure"]);
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    let group = if weights.text("strategy")? == Some("channel") { None } else { group(weights)? };
    Ok(Int4 { layout: Layout::Packed { symmetric }, group })
}

/// Columns that share a scale; `None` for -1, all.
fn group(object: &Fields) -> Result<Option<usize>, ModelError> {
    let value = object.get("group_size").ok_or_else(|| object.missing("group_size"))?;
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(size) if (1..=i64::from(INTERMEDIATE_MAX)).contains(&size) => Ok(usize::try_from(size).ok()),
        _ => Err(object.invalid("group_size", "it must be a number of columns, or -1 for all")),
    }
}

/// Rows and columns of a block.
fn block(object: &Fields, field: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(value) = object.get(field) else { return Ok(None) };
    let size = |value: &Value| value.as_u64().filter(|size| (1..=u64::from(INTERMEDIATE_MAX)).contains(size));
    let sizes = value.as_array().and_then(|sizes| sizes.iter().map(size).collect::<Option<Vec<_>>>());
    match sizes.as_deref() {
        Some([rows, cols]) => Ok(usize::try_from(*rows).ok().zip(usize::try_from(*cols).ok()).map(Into::into)),
        _ => Err(object.invalid(field, "it must be two sizes, of rows and of columns")),
    }
}

/// Refuses texts of `field` other than `names`; it may be absent.
fn one_of(object: &Fields, field: &str, names: &[&str]) -> Result<(), ModelError> {
    match object.text(field)? {
        Some(name) if !names.contains(&name) => {
            Err(object.unsupported(field, &format!("supported are {}", names.join(", "))))
        }
        _ => Ok(()),
    }
}

/// Refuses a `field` that is there and is not `value`.
fn only(object: &Fields, field: &str, value: &Value) -> Result<(), ModelError> {
    match object.get(field) {
        Some(found) if found != value => Err(object.unsupported(field, &format!("only {value} is implemented"))),
        _ => Ok(()),
    }
}

/// As [`only`]; an error if the field is absent.
fn required(object: &Fields, field: &str, value: &Value) -> Result<(), ModelError> {
    if object.get(field).is_none() {
        return Err(object.missing(field));
    }
    only(object, field, value)
}
