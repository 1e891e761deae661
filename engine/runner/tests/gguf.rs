//! Models in GGUF files on the host backend, by the plainest forward pass: committed files against logits in float64 on their
//! dequantised weights (tools/gguf), and the goldens of families, written as GGUF files here, against themselves.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests: numbers of small models")]
#![allow(clippy::print_stdout, reason = "measured differences, for --nocapture")]

#[path = "../../model/tests/gguf_writer/mod.rs"]
mod gguf_writer;
mod plain;

use gguf_writer::{File, Item};
use lagoon_backend::{CpuDevice, Device, WeightFormat};
use lagoon_model::{Checkpoint, FAMILIES, ModelSpec};
use lagoon_types::DType;
use plain::{goldens, logits, worst};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Logits have a deviation of 1. With the weights in f32 the only difference is rounding of the arithmetic; packed ones in f16
/// differ by the rounding that the notice at loading states, and as they are by that of activations.
#[test]
fn committed_files_give_the_logits_of_their_weights() {
    let dir = goldens().join("gguf");
    let cases: Value = serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 5);
    for case in cases {
        let path = dir.join(case["file"].as_str().unwrap());
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let mut expected = Vec::new();
        DType::F32.decode(&std::fs::read(path.with_extension("logits")).unwrap(), &mut expected);
        let [exact, half, own] =
            [Some(DType::F32), Some(DType::F16), None].map(|dtype| worst(&logits(&path, &tokens, dtype), &expected));
        println!("{}: {exact} in f32, {half} in f16, {own} as the file has them", path.display());
        let formats = Checkpoint::open(&path).unwrap().formats();
        let packed = formats.iter().any(|(format, _)| format.plain().is_none());
        let taken = formats.iter().all(|(format, _)| CpuDevice::with_threads(1).takes(*format));
        assert!(exact < 1e-4, "{}: {exact}", path.display());
        let own_max = match (packed, taken) {
            (true, false) => 2e-2,
            (true, true) => 1e-3,
            (false, _) => 1e-4,
        };
        assert!(own < own_max, "{}: {own}", path.display());
        assert!(half < 2e-2 && (!packed || half > exact), "{}: {half}, weights in f16 are rounded", path.display());
    }
}

type Tensors = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

/// A model as Hugging Face has it.
struct Source {
    config: Value,
    tensors: Tensors,
}

impl Source {
    fn open(name: &str) -> Self {
        let dir = goldens().join(name);
        let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
            let mut values = Vec::new();
            let dtype = if tensor.dtype() == safetensors::Dtype::F16 { DType::F16 } else { DType::F32 };
            dtype.decode(tensor.data(), &mut values);
            (name, (tensor.shape().iter().map(|size| *size as u64).collect(), values))
        };
        Self { config, tensors: stored.tensors().into_iter().map(tensor).collect() }
    }

    fn number(&self, field: &str) -> Option<u64> {
        self.config[field].as_u64()
    }

    /// Writes the model as Hugging Face has it.
    fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| {
                let mut bytes = Vec::new();
                DType::F32.encode(values, &mut bytes);
                (name.clone(), shape.iter().map(|size| usize::try_from(*size).unwrap()).collect(), bytes)
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
        });
        std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// Rows of `heads` heads in turns: row `2 j + s` is row `j` of half `s`.
    fn turn(&mut self, end: &str, heads: u64) {
        for (_, (shape, values)) in self.tensors.iter_mut().filter(|(name, _)| name.ends_with(end)) {
            let [rows, cols] = [shape[0], shape[1]].map(|size| usize::try_from(size).unwrap());
            let dim = rows / usize::try_from(heads).unwrap();
            let row = |to: usize| (to / dim * dim) + (to % dim) / 2 + (to % 2) * dim / 2;
            *values = (0..rows).flat_map(|to| values[row(to) * cols..][..cols].to_vec()).collect();
        }
    }

    /// Rows as columns.
    fn transpose(&mut self, end: &str) {
        for (_, (shape, values)) in self.tensors.iter_mut().filter(|(name, _)| name.ends_with(end)) {
            let [rows, cols] = [shape[0], shape[1]].map(|size| usize::try_from(size).unwrap());
            *values = (0..cols)
                .flat_map(|col| (0..rows).map(move |row| (row, col)))
                .map(|(r, c)| values[r * cols + c])
                .collect();
            shape.reverse();
        }
    }

    /// All queries, all keys and all values of tensors that have those of each of `heads` heads together.
    fn by_kind(&mut self, end: &str, heads: usize) {
        for (_, (shape, values)) in self.tensors.iter_mut().filter(|(name, _)| name.contains(end)) {
            let of_kind = values.len() / heads / 3;
            assert!(shape[0].is_multiple_of(3));
            let kind = |kind: usize| {
                (0..heads).flat_map(move |head| (3 * head + kind) * of_kind..(3 * head + kind + 1) * of_kind)
            };
            *values = (0..3).flat_map(kind).map(|at| values[at]).collect();
        }
    }

    /// Keys' and values' projections from latents apart, keys turned.
    fn split_keys(&mut self, heads: usize) {
        let size = |field: &str| usize::try_from(self.number(field).unwrap()).unwrap();
        let (key, latent) = (size("qk_nope_head_dim"), size("kv_lora_rank"));
        let names: Vec<String> = self.tensors.keys().filter(|name| name.contains("kv_b_proj")).cloned().collect();
        for name in names {
            let (shape, stored) = self.tensors.remove(&name).unwrap();
            let of_head = usize::try_from(shape[0]).unwrap() / heads * latent;
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for head in stored.chunks(of_head) {
                let (of_keys, of_values) = head.split_at(key * latent);
                keys.extend((0..latent).flat_map(|col| of_keys.iter().skip(col).step_by(latent)));
                values.extend_from_slice(of_values);
            }
            let sizes = |rows: usize, cols: usize| [heads, rows, cols].map(|size| size as u64).to_vec();
            let tensor = |end| name.replace("self_attn.kv_b_proj", end);
            self.tensors.insert(tensor("attn_k_b"), (sizes(latent, key), keys));
            self.tensors.insert(tensor("attn_v_b"), (sizes(of_head / latent - key, latent), values));
        }
    }

    /// One tensor of all experts, whose own have `{}` in place of their index.
    fn stack(&mut self, layer: u64, pattern: &str, name: &str) {
        let (mut shape, mut all) = (Vec::new(), Vec::new());
        for expert in 0.. {
            let of = format!("model.layers.{layer}.{}", pattern.replace("{}", &i32::to_string(&expert)));
            let Some((of_one, values)) = self.tensors.remove(&of) else { break };
            shape = [vec![u64::try_from(expert).unwrap() + 1], of_one].concat();
            all.extend(values);
        }
        assert!(!all.is_empty(), "{pattern}");
        self.tensors.insert(format!("model.layers.{layer}.{name}"), (shape, all));
    }
}

/// Pairs of ends of names in a layer.
const NAMES: &[(&str, &str)] = &[
    ("self_attn.q_proj.", "attn_q."),
    ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."),
    ("self_attn.o_proj.", "attn_output."),
    ("self_attn.qkv_proj.", "attn_qkv."),
    ("self_attn.q_norm.", "attn_q_norm."),
    ("self_attn.k_norm.", "attn_k_norm."),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.q_a_proj.", "attn_q_a."),
    ("self_attn.q_a_layernorm.", "attn_q_a_norm."),
    ("self_attn.q_b_proj.", "attn_q_b."),
    ("self_attn.kv_a_proj_with_mqa.", "attn_kv_a_mqa."),
    ("self_attn.kv_a_layernorm.", "attn_kv_a_norm."),
    ("self_attn.kv_b_proj.", "attn_kv_b."),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.gate_up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
    ("mlp.router.", "ffn_gate_inp."),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.shared_experts.gate_proj.", "ffn_gate_shexp."),
    ("mlp.shared_experts.up_proj.", "ffn_up_shexp."),
    ("mlp.shared_experts.down_proj.", "ffn_down_shexp."),
    ("block_sparse_moe.gate.", "ffn_gate_inp."),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("input_layernorm.", "attn_norm."),
    ("pre_feedforward_layernorm.", "ffn_norm."),
    ("post_feedforward_layernorm.", "post_ffw_norm."),
    ("attn.c_attn.", "attn_qkv."),
    ("attn.c_proj.", "attn_output."),
    ("mlp.c_fc.", "ffn_up."),
    ("mlp.c_proj.", "ffn_down."),
    ("ln_1.", "attn_norm."),
    ("ln_2.", "ffn_norm."),
    ("attention.query_key_value.", "attn_qkv."),
    ("attention.dense.", "attn_output."),
    ("self_attention.query_key_value.", "attn_qkv."),
    ("self_attention.dense.", "attn_output."),
    ("mlp.dense_h_to_4h.", "ffn_up."),
    ("mlp.dense_4h_to_h.", "ffn_down."),
    ("norm_1.", "attn_norm."),
    ("norm_2.", "ffn_norm."),
    ("attn.Wqkv.", "attn_qkv."),
    ("attn.out_proj.", "attn_output."),
    ("ffn.up_proj.", "ffn_up."),
    ("ffn.down_proj.", "ffn_down."),
];

/// A tensor's name in a GGUF file.
fn renamed(name: &str, has_out_norm: bool) -> String {
    let outer = [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("transformer.wte.", "token_embd."),
        ("transformer.wpe.", "position_embd."),
        ("transformer.ln_f.", "output_norm."),
        ("transformer.word_embeddings.", "token_embd."),
        ("transformer.word_embeddings_layernorm.", "token_embd_norm."),
        ("transformer.norm_f.", "output_norm."),
        ("gpt_neox.embed_in.", "token_embd."),
        ("gpt_neox.final_layer_norm.", "output_norm."),
        ("embed_out.", "output."),
    ];
    if let Some((from, to)) = outer.iter().find(|(from, _)| name.starts_with(from)) {
        return name.replace(from, to);
    }
    let prefixes = ["model.layers.", "transformer.h.", "transformer.blocks.", "gpt_neox.layers."];
    let mut rest = prefixes.iter().filter_map(|prefix| name.strip_prefix(prefix));
    let Some((layer, rest)) = rest.next().and_then(|rest| rest.split_once('.')) else { return name.to_owned() };
    let norm = if has_out_norm { "post_attention_norm." } else { "ffn_norm." };
    let known =
        NAMES.iter().copied().chain([("post_attention_layernorm.", norm)]).find(|(from, _)| rest.starts_with(from));
    let rest = known.map_or_else(|| rest.to_owned(), |(from, to)| rest.replacen(from, to, 1));
    format!("blk.{layer}.{rest}")
}

/// Keys behind the architecture, and the fields that they are.
const KEYS: &[(&str, &[&str])] = &[
    ("context_length", &["max_position_embeddings", "n_positions", "seq_length", "max_seq_len"]),
    ("embedding_length", &["hidden_size", "n_embd", "d_model"]),
    ("block_count", &["num_hidden_layers", "n_layer", "n_layers"]),
    ("feed_forward_length", &["intermediate_size"]),
    ("attention.head_count", &["num_attention_heads", "n_head", "n_heads"]),
    ("attention.head_count_kv", &["num_key_value_heads"]),
    ("attention.key_length", &["head_dim"]),
    ("attention.value_length", &["head_dim"]),
    ("attention.sliding_window", &["sliding_window"]),
    ("attention.q_lora_rank", &["q_lora_rank"]),
    ("attention.kv_lora_rank", &["kv_lora_rank"]),
    ("rope.dimension_count", &["qk_rope_head_dim", "rotary_dim"]),
    ("expert_count", &["num_experts", "num_local_experts", "n_routed_experts"]),
    ("expert_shared_count", &["n_shared_experts"]),
    ("expert_group_count", &["n_group"]),
    ("expert_group_used_count", &["topk_group"]),
    ("leading_dense_block_count", &["first_k_dense_replace"]),
    ("expert_used_count", &["num_experts_per_tok"]),
    ("expert_feed_forward_length", &["moe_intermediate_size"]),
];
const FLOATS: &[(&str, &[&str])] = &[
    ("attention.layer_norm_rms_epsilon", &["rms_norm_eps"]),
    ("attention.layer_norm_epsilon", &["layer_norm_epsilon", "layer_norm_eps"]),
    ("expert_weights_scale", &["routed_scaling_factor"]),
    ("rope.freq_base", &["rope_theta"]),
    ("attn_logit_softcapping", &["attn_logit_softcapping"]),
    ("final_logit_softcapping", &["final_logit_softcapping"]),
];

/// The file of a model whose tensors are laid out as its architecture wants them; `more` are further keys.
fn gguf(source: &Source, architecture: &str, more: &[(&str, Item)]) -> Vec<u8> {
    packed_gguf(source, architecture, more, |_| false)
}

/// The same with some tensors, by their names in the file, in Q8_0.
fn packed_gguf(
    source: &Source,
    architecture: &str,
    more: &[(&str, Item)],
    is_packed: impl Fn(&str) -> bool,
) -> Vec<u8> {
    let mut file = File::new(architecture);
    for (key, fields) in KEYS {
        if let Some(number) = fields.iter().find_map(|field| source.number(field)) {
            file.item(&format!("{architecture}.{key}"), Item::U32(u32::try_from(number).unwrap()));
        }
    }
    let rope = &source.config["rope_parameters"];
    for (key, fields) in FLOATS {
        let number = |field: &&str| source.config[*field].as_f64().or(rope[*field].as_f64());
        if let Some(number) = fields.iter().find_map(number) {
            let rounded = number.to_string().parse().unwrap();
            file.item(&format!("{architecture}.{key}"), Item::F32(rounded));
        }
    }
    for (key, item) in more {
        file.item(&format!("{architecture}.{key}"), item.clone());
    }
    let has_out_norm = ["gpt-oss", "glm4moe"].contains(&architecture)
        || source.tensors.keys().any(|name| name.contains("post_feedforward"));
    for (name, (shape, values)) in &source.tensors {
        let (name, mut bytes) = (renamed(name, has_out_norm), Vec::new());
        if is_packed(&name) {
            file.tensor(&name, 8, shape, &q8_0(values));
            continue;
        }
        DType::F32.encode(values, &mut bytes);
        file.tensor(&name, 0, shape, &bytes);
    }
    file.bytes()
}

/// Values in Q8_0: blocks of 32 with a scale.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let (blocks, rest) = values.as_chunks::<32>();
    assert!(rest.is_empty(), "{} values", values.len());
    let block = |block: &[f32; 32]| {
        let (mut bytes, mut scale) = (Vec::new(), Vec::new());
        DType::F16.encode(&[block.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0], &mut bytes);
        DType::F16.decode(&bytes, &mut scale);
        bytes.extend(block.iter().map(|x| ((x / scale[0]).round().clamp(-127.0, 127.0) as i8).cast_unsigned()));
        bytes
    };
    blocks.iter().flat_map(block).collect()
}

/// Compares a model's logits with those of its GGUF file, of the same family.
fn compare(name: &str, source: &Source, file: &[u8]) {
    let (of_dir, of_file) = compare_logits(name, source, file, 2e-4);
    assert_eq!((of_file.family, of_file.max_positions), (of_dir.family, of_dir.max_positions), "{name}");
}

/// The specs of both, after comparing logits.
fn compare_logits(name: &str, source: &Source, file: &[u8], bound: f32) -> (ModelSpec, ModelSpec) {
    let dir = tempfile::tempdir().unwrap();
    source.write(dir.path());
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file).unwrap();
    let tokens: Vec<u32> = (3..60).map(|i| i * 37 % 120).collect();
    let (expected, found) = (logits(dir.path(), &tokens, None), logits(&path, &tokens, None));
    let worst = worst(&found, &expected);
    println!("{name}: {worst}");
    assert!(worst < bound, "{name}: {worst}");
    (ModelSpec::open(dir.path()).unwrap(), ModelSpec::open(&path).unwrap())
}

fn layers(source: &Source) -> u64 {
    source.number("num_hidden_layers").unwrap()
}

fn heads(source: &Source) -> (u64, u64) {
    let heads = source.number("num_attention_heads").unwrap();
    (heads, source.number("num_key_value_heads").unwrap_or(heads))
}

/// Queries and keys as llama.cpp's converter stores them for architectures that rotate neighbours.
fn in_turns(name: &str) -> (Source, Source) {
    let (source, mut stored) = (Source::open(name), Source::open(name));
    let (q, k) = heads(&source);
    stored.turn("self_attn.q_proj.weight", q);
    stored.turn("self_attn.k_proj.weight", k);
    (source, stored)
}

#[test]
fn llamas_files_have_rows_in_turns() {
    let (source, stored) = in_turns("llama2_mha");
    compare("llama2_mha", &source, &gguf(&stored, "llama", &[]));
    // Divisors of frequencies in place of the scaling that they come from.
    let (source, mut stored) = in_turns("llama3_new");
    let scaling = &source.config["rope_parameters"];
    let of = |field: &str| scaling[field].as_f64().unwrap();
    let dim = source.number("hidden_size").unwrap() / heads(&source).0;
    let divisor = |i: u64| {
        let frequency = of("rope_theta").powf(-(2.0 * i as f64) / dim as f64);
        let turns = of("original_max_position_embeddings") * frequency / std::f64::consts::TAU;
        let smooth = (turns - of("low_freq_factor")) / (of("high_freq_factor") - of("low_freq_factor"));
        let smooth = smooth.clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / of("factor") + smooth)) as f32
    };
    let divisors = (0..dim / 2).map(divisor).collect();
    stored.tensors.insert("rope_freqs.weight".to_owned(), (vec![dim / 2], divisors));
    compare("llama3_new", &source, &gguf(&stored, "llama", &[]));
    let (mut source, stored) = in_turns("smollm3");
    source.config.as_object_mut().unwrap().remove("no_rope_layers");
    compare("smollm3", &source, &gguf(&stored, "smollm3", &[]));
    let (source, stored) = in_turns("mistral_window");
    compare("mistral_window", &source, &gguf(&stored, "mistral3", &[]));
}

#[test]
fn mixtures_are_one_tensor_of_all_experts() {
    let (source, mut stored) = in_turns("mixtral");
    for layer in 0..layers(&source) {
        for (from, to) in [("w1", "ffn_gate"), ("w3", "ffn_up"), ("w2", "ffn_down")] {
            let pattern = format!("block_sparse_moe.experts.{{}}.{from}.weight");
            stored.stack(layer, &pattern, &format!("{to}_exps.weight"));
        }
    }
    compare("mixtral", &source, &gguf(&stored, "llama", &[]));
    let experts_everywhere = || {
        let mut source = Source::open("qwen3_moe");
        source.config["mlp_only_layers"] = json!([]);
        // Layer 1 is dense in the golden; it gets the experts of layer 0.
        source.tensors.retain(|name, _| !name.starts_with("model.layers.1.mlp."));
        let of_first = source.tensors.iter().filter_map(|(name, tensor)| {
            Some((format!("model.layers.1.mlp.{}", name.strip_prefix("model.layers.0.mlp.")?), tensor.clone()))
        });
        let of_first: Tensors = of_first.collect();
        source.tensors.extend(of_first);
        source
    };
    let (source, mut stored) = (experts_everywhere(), experts_everywhere());
    for layer in 0..layers(&source) {
        for part in ["gate", "up", "down"] {
            let pattern = format!("mlp.experts.{{}}.{part}_proj.weight");
            stored.stack(layer, &pattern, &format!("ffn_{part}_exps.weight"));
        }
    }
    compare("qwen3_moe", &source, &gguf(&stored, "qwen3moe", &[]));
}

#[test]
fn other_families_have_halves() {
    for (name, architecture) in [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("olmo2", "olmo2")] {
        let mut source = Source::open(name);
        // A window that the configuration does not use, which files do not have.
        source.config.as_object_mut().unwrap().remove("sliding_window");
        compare(name, &source, &gguf(&source, architecture, &[]));
    }
}

#[test]
fn gemmas_norms_have_their_one_added() {
    for (name, architecture) in [("gemma2", "gemma2"), ("gemma3", "gemma3")] {
        let (mut source, mut stored) = (Source::open(name), Source::open(name));
        // No key has it.
        source.config["query_pre_attn_scalar"] = source.config["head_dim"].clone();
        let norms = stored.tensors.iter_mut().filter(|(name, _)| name.ends_with("norm.weight"));
        norms.for_each(|(_, (_, values))| values.iter_mut().for_each(|x| *x += 1.0));
        let pattern = Item::Bools(vec![true, false, true]);
        let more = [("attention.sliding_window_pattern", pattern)];
        compare(name, &source, &gguf(&stored, architecture, if name == "gemma3" { &more } else { &[] }));
    }
}

/// Old files have the factor of a linear scaling and no type.
#[test]
fn a_factor_alone_is_a_linear_scaling() {
    let mut source = Source::open("qwen3");
    source.config.as_object_mut().unwrap().remove("sliding_window");
    let theta = source.config["rope_parameters"]["rope_theta"].clone();
    source.config["rope_parameters"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": theta});
    compare("qwen3", &source, &gguf(&source, "qwen3", &[("rope.scaling.factor", Item::F32(4.0))]));
}

#[test]
fn phis_projections_are_fused() {
    let source = Source::open("phi3");
    let more = [("rope.dimension_count", Item::U32(12)), ("attention.sliding_window", Item::U32(0))];
    compare("phi3", &source, &gguf(&source, "phi3", &more));
    let (source, mut stored) = (Source::open("phi3_longrope"), Source::open("phi3_longrope"));
    for kind in ["short", "long"] {
        let list = source.config["rope_scaling"][format!("{kind}_factor")].clone();
        let values: Vec<f32> = serde_json::from_value(list).unwrap();
        stored.tensors.insert(format!("rope_factors_{kind}.weight"), (vec![values.len() as u64], values));
    }
    // What transformers computes from the two contexts.
    let attention = (1.0 + 8_f32.ln() / 32_f32.ln()).sqrt();
    let more = [
        ("rope.dimension_count", Item::U32(12)),
        ("rope.scaling.original_context_length", Item::U32(32)),
        ("rope.scaling.attn_factor", Item::F32(attention)),
    ];
    compare("phi3_longrope", &source, &gguf(&stored, "phi3", &more));
    stored.tensors.remove("rope_factors_long.weight");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, gguf(&stored, "phi3", &more)).unwrap();
    let refused = ModelSpec::open(&path).unwrap_err().to_string();
    assert!(refused.contains("are used together"), "{refused}");
}

#[test]
fn gpt_oss_has_gates_and_ups_apart() {
    let (source, mut stored) = (Source::open("gpt_oss"), Source::open("gpt_oss"));
    let width = usize::try_from(source.number("intermediate_size").unwrap()).unwrap();
    for layer in 0..layers(&source) {
        let of = |name: &str| format!("model.layers.{layer}.mlp.experts.{name}");
        let to = |name: &str| format!("model.layers.{layer}.{name}");
        // [expert][in][out] to [expert][out][in].
        let turned = |(shape, values): &(Vec<u64>, Vec<f32>)| {
            let [_, rows, cols] = [0, 1, 2].map(|i| usize::try_from(shape[i]).unwrap());
            let one = |expert: &[f32]| {
                (0..cols)
                    .flat_map(|col| (0..rows).map(move |row| row * cols + col))
                    .map(|at| expert[at])
                    .collect::<Vec<_>>()
            };
            (vec![shape[0], shape[2], shape[1]], values.chunks(rows * cols).flat_map(one).collect::<Vec<f32>>())
        };
        let fused = turned(&stored.tensors.remove(&of("gate_up_proj")).unwrap());
        let down = turned(&stored.tensors.remove(&of("down_proj")).unwrap());
        let (_, biases) = stored.tensors.remove(&of("gate_up_proj_bias")).unwrap();
        let down_bias = stored.tensors.remove(&of("down_proj_bias")).unwrap();
        let cols = usize::try_from(fused.0[2]).unwrap();
        for (odd, name) in ["gate", "up"].iter().enumerate() {
            let rows: Vec<f32> = fused.1.chunks(cols).skip(odd).step_by(2).flatten().copied().collect();
            let bias: Vec<f32> = biases.iter().skip(odd).step_by(2).copied().collect();
            let (experts, width) = (fused.0[0], width as u64);
            stored.tensors.insert(to(&format!("ffn_{name}_exps.weight")), (vec![experts, width, fused.0[2]], rows));
            stored.tensors.insert(to(&format!("ffn_{name}_exps.bias")), (vec![experts, width], bias));
        }
        stored.tensors.insert(to("ffn_down_exps.weight"), down);
        stored.tensors.insert(to("ffn_down_exps.bias"), down_bias);
    }
    let more = [
        ("expert_feed_forward_length", Item::U32(u32::try_from(width).unwrap())),
        ("rope.scaling.type", Item::Text("yarn")),
        ("rope.scaling.factor", Item::F32(4.0)),
        ("rope.scaling.original_context_length", Item::U32(32)),
        ("rope.scaling.yarn_beta_fast", Item::F32(8.0)),
        ("rope.scaling.yarn_beta_slow", Item::F32(1.0)),
    ];
    compare("gpt_oss", &source, &gguf(&stored, "gpt-oss", &more));
}

#[test]
fn gpt2s_projections_are_turned() {
    let (source, mut stored) = (Source::open("gpt2"), Source::open("gpt2"));
    for end in ["c_attn.weight", "c_proj.weight", "c_fc.weight"] {
        stored.transpose(end);
    }
    let width = Item::U32(4 * 48);
    compare("gpt2", &source, &gguf(&stored, "gpt2", &[("feed_forward_length", width)]));
}

/// Experts of `pattern` in one tensor a projection, in all layers that have them.
fn stack_experts(stored: &mut Source, first: u64, pattern: &str, parts: [&str; 3]) {
    for layer in first..layers(stored) {
        for (from, to) in parts.iter().zip(["gate", "up", "down"]) {
            stored.stack(layer, &pattern.replace("{name}", from), &format!("ffn_{to}_exps.weight"));
        }
    }
}

const EXPERTS: &str = "mlp.experts.{}.{name}.weight";
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

#[test]
fn sigmoid_experts_have_a_bias_of_the_choice() {
    let (source, mut stored) = (Source::open("glm4_moe"), Source::open("glm4_moe"));
    stack_experts(&mut stored, 1, EXPERTS, PROJECTIONS);
    // A layer behind the last one, which predicts further tokens, is counted and left out.
    stored.config["num_hidden_layers"] = json!(4);
    stored.tensors.insert("blk.3.nextn.enorm.weight".to_owned(), (vec![2], vec![0.0; 2]));
    let more = [
        ("rope.dimension_count", Item::U32(8)),
        ("expert_gating_func", Item::U32(2)),
        ("expert_weights_norm", Item::Bool(true)),
        ("nextn_predict_layers", Item::U32(1)),
    ];
    compare("glm4_moe", &source, &gguf(&stored, "glm4moe", &more));
    let (source, mut stored) = (Source::open("minimax_m2"), Source::open("minimax_m2"));
    stack_experts(&mut stored, 0, "block_sparse_moe.experts.{}.{name}.weight", ["w1", "w3", "w2"]);
    let more = [("expert_gating_func", Item::U32(2)), ("expert_feed_forward_length", Item::U32(40))];
    compare("minimax_m2", &source, &gguf(&stored, "minimax-m2", &more));
}

/// A model with latent attention and its tensors as files have them, without biases, which no file has.
fn latent(name: &str) -> (Source, Source) {
    let open = || {
        let mut source = Source::open(name);
        let fields = source.config.as_object_mut().unwrap();
        fields.insert("attention_bias".to_owned(), false.into());
        fields.entry("first_k_dense_replace").or_insert(1.into());
        // llama.cpp rotates neighbours.
        fields.remove("rope_interleave");
        source.tensors.retain(|name, _| !name.ends_with(".bias"));
        source
    };
    let mut stored = open();
    stack_experts(&mut stored, 1, EXPERTS, PROJECTIONS);
    (open(), stored)
}

/// Keys of a latent model's file; `is_split` as files have them that store keys' and values' projections apart.
fn latent_keys(source: &Source, is_split: bool) -> Vec<(&'static str, Item)> {
    let number = |field: &str| source.number(field).unwrap_or(0);
    let key = |of: u64| Item::U32(u32::try_from(of).unwrap());
    let (whole, value) = (number("qk_nope_head_dim") + number("qk_rope_head_dim"), number("v_head_dim"));
    let latent = number("kv_lora_rank");
    let sizes = [("attention.key_length", whole), ("attention.value_length", value)];
    let split = [
        ("attention.key_length_mla", whole),
        ("attention.value_length_mla", value),
        ("attention.key_length", latent + number("qk_rope_head_dim")),
        ("attention.value_length", latent),
    ];
    let mut more: Vec<_> = if is_split { split.to_vec() } else { sizes.to_vec() }
        .into_iter()
        .map(|(name, size)| (name, key(size)))
        .collect();
    more.push(("expert_gating_func", key(if source.config["scoring_func"] == "softmax" { 1 } else { 2 })));
    more.push(("expert_weights_norm", Item::Bool(source.config["norm_topk_prob"] == true)));
    let yarn = &source.config["rope_scaling"];
    let float = |field: &str| yarn[field].as_f64().unwrap() as f32;
    if yarn.is_object() {
        more.extend([
            ("rope.scaling.type", Item::Text("yarn")),
            ("rope.scaling.factor", Item::F32(float("factor"))),
            ("rope.scaling.original_context_length", Item::U32(32)),
            ("rope.scaling.yarn_beta_fast", Item::F32(float("beta_fast"))),
            ("rope.scaling.yarn_beta_slow", Item::F32(float("beta_slow"))),
            ("rope.scaling.yarn_log_multiplier", Item::F32(0.1 * float("mscale_all_dim"))),
        ]);
    }
    more
}

#[test]
fn latent_attention_has_keys_and_values_in_one_tensor_or_two() {
    for name in ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "kimi_k2", "glm4_moe_lite"] {
        let (source, mut stored) = latent(name);
        let in_one = gguf(&stored, "deepseek2", &latent_keys(&source, false));
        stored.split_keys(usize::try_from(heads(&source).0).unwrap());
        stored.config["num_key_value_heads"] = json!(1);
        let in_two = gguf(&stored, "deepseek2", &latent_keys(&source, true));
        for (what, file) in [("one", in_one), ("two", in_two)] {
            let (of_dir, of_file) = compare_logits(&format!("{name} in {what}"), &source, &file, 2e-4);
            // Files tell V2 from V3 by their scores, and name no other model of the line.
            let family = if name.starts_with("deepseek_v2") { "deepseek_v2" } else { "deepseek_v3" };
            assert_eq!((of_file.family, of_file.max_positions), (family, of_dir.max_positions), "{name}");
            assert_eq!(of_file.geometry, of_dir.geometry, "{name}");
        }
    }
}

/// Rows of keys' projections are turned in older files, so that packed blocks are taken apart.
#[test]
fn latent_projections_may_be_packed() {
    let (mut source, stored) = latent("deepseek_v2");
    let is_packed = |name: &str| name.ends_with("attn_kv_b.weight");
    let file = packed_gguf(&stored, "deepseek2", &latent_keys(&source, false), is_packed);
    for (_, (_, values)) in source.tensors.iter_mut().filter(|(name, _)| name.contains("kv_b_proj")) {
        let bytes = q8_0(values);
        values.clear();
        WeightFormat::Q8_0.decode(&bytes, values);
    }
    compare_logits("deepseek_v2 in Q8_0", &source, &file, 1e-3);
}

#[test]
fn projections_of_heads_are_sorted_by_kind() {
    let (mut source, mut stored) = (Source::open("gpt_neox"), Source::open("gpt_neox"));
    // Its tensors are read in f32.
    source.config["torch_dtype"] = json!("float32");
    stored.by_kind("query_key_value", 4);
    let more = [("rope.dimension_count", Item::U32(4)), ("use_parallel_residual", Item::Bool(true))];
    compare("gpt_neox", &source, &gguf(&stored, "gptneox", &more));
    let (source, mut stored) = (Source::open("bloom"), Source::open("bloom"));
    stored.by_kind("query_key_value", 6);
    let more = [("feed_forward_length", Item::U32(240)), ("attention.head_count_kv", Item::U32(6))];
    compare("bloom", &source, &gguf(&stored, "bloom", &more));
}

#[test]
fn mpts_keys_of_attention_have_their_own_object() {
    let (mut source, mut stored) = (Source::open("mpt"), Source::open("mpt"));
    source.config["attn_config"]["alibi_bias_max"] = json!(4.0);
    // Files have the tied table twice.
    let table = stored.tensors["transformer.wte.weight"].clone();
    stored.tensors.insert("lm_head.weight".to_owned(), table);
    let file = |bias: f32, width: u32| {
        let more = [("feed_forward_length", Item::U32(width)), ("attention.max_alibi_bias", Item::F32(bias))];
        gguf(&stored, "mpt", &more)
    };
    compare("mpt", &source, &file(4.0, 192));
    for (file, key) in [(file(0.0, 192), "mpt.attention.max_alibi_bias"), (file(8.0, 100), "mpt.feed_forward_length")] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, file).unwrap();
        let refused = ModelSpec::open(&path).unwrap_err().to_string();
        assert!(refused.contains(key), "{refused}");
    }
}

/// Every family that reads GGUF files is compared above.
#[test]
fn every_architecture_is_tested() {
    let mut known: Vec<&str> = FAMILIES.iter().filter_map(lagoon_model::Family::gguf_architecture).collect();
    known.sort_unstable();
    let tested = [
        "bloom",
        "deepseek2",
        "deepseek2",
        "gemma2",
        "gemma3",
        "glm4moe",
        "gpt-oss",
        "gpt2",
        "gptneox",
        "llama",
        "llama",
        "minimax-m2",
        "mistral3",
        "mpt",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "smollm3",
    ];
    assert_eq!(known, tested);
}
