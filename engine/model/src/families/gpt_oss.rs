//! gpt-oss (OpenAI 2025): alternating windows, attention sinks, biases, and experts with a clamped gate.

use super::Family;
use super::common::{Base, count, experts, refuse_other_activations, refuse_unless, softmax, windows};
use super::gguf::{self, Config, Gguf, Layout};
use crate::checkpoint::quantised::Quantisation;
use crate::fields::Fields;
use crate::spec::{MixtureSpec, Mlp, Part};
use crate::{ModelError, ModelSpec};
use lagoon_backend::{Activation, SWIGLU_ALPHA, SWIGLU_LIMIT};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    architectures: &["GptOssForCausalLM"],
    models: "gpt-oss",
    goldens: &["gpt_oss"],
    gguf: Some(Gguf {
        refine: refine_gguf,
        part: gguf_part,
        ..Gguf::of(
            "gpt-oss",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::HALVES, gguf::QKV_BIASES, GGUF_TENSORS],
        )
    }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    gguf::WINDOW,
    ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    // An expert's width, which replaces that of dense layers.
    ("expert_feed_forward_length", "intermediate_size"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", Layout::Same),
    ("model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight", Layout::Same),
    ("model.layers.{}.mlp.router.weight", "blk.{}.ffn_gate_inp.weight", Layout::Same),
    ("model.layers.{}.mlp.router.bias", "blk.{}.ffn_gate_inp.bias", Layout::Same),
    ("model.layers.{}.mlp.experts.down_proj_bias", "blk.{}.ffn_down_exps.bias", Layout::Same),
];

/// Bounds of YaRN's blend are not rounded in this family, and no key says so.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    if let Some(scaling) = config.object("rope_scaling") {
        scaling.insert("truncate".to_owned(), false.into());
    }
    Ok(())
}

/// Experts' projections, which GGUF files store `[expert][out][in]`, gates and ups apart.
fn gguf_part(part: &Part) -> Option<Part> {
    let (name, layer) = (part.tensor.strip_prefix("model.layers.")?, part.tensor.split('.').nth(2)?);
    let stored = |end: &str| format!("blk.{layer}.{end}");
    let (_, name) = name.split_once(".mlp.experts.")?;
    let &[count, ..] = part.shape.as_slice() else { return None };
    let (rows, cols) = (part.rows, part.cols);
    let matrix = |end: &str, expert: usize| Part {
        tensor: stored(end),
        shape: vec![count, rows, cols],
        offset: expert * rows * cols,
        row_stride: cols,
        col_stride: 1,
        ..part.clone()
    };
    match name {
        // A part is every other column of an expert's, from 0 or 1 on.
        "gate_up_proj" if part.offset.is_multiple_of(2) => {
            Some(matrix("ffn_gate_exps.weight", part.offset / (2 * rows * cols)))
        }
        "gate_up_proj" => Some(matrix("ffn_up_exps.weight", part.offset / (2 * rows * cols))),
        "down_proj" => Some(matrix("ffn_down_exps.weight", part.offset / (rows * cols))),
        "gate_up_proj_bias" => {
            let (expert, end) = (part.offset / (2 * cols), if part.offset.is_multiple_of(2) { "gate" } else { "up" });
            let shape = vec![count, cols];
            let tensor = stored(&format!("ffn_{end}_exps.bias"));
            Some(Part { tensor, shape, offset: expert * cols, row_stride: cols, col_stride: 1, ..part.clone() })
        }
        _ => None,
    }
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_unless(fields, "attention_bias", true, "projections of this family have biases")?;
    refuse_unless(fields, "swiglu_limit", f64::from(SWIGLU_LIMIT), "only 7 is implemented")?;
    let alpha = fields.positive("swiglu_alpha")?;
    if alpha.is_some_and(|alpha| (alpha - f64::from(SWIGLU_ALPHA)).abs() > 1e-6) {
        return Err(fields.unsupported("swiglu_alpha", "only 1.702 is implemented"));
    }
    // The authors' names of fields that are there twice.
    fields.ignore(&["experts_per_token", "initial_context_length"]);
    if fields.get("rope_scaling").is_none() && fields.get("rope_parameters").is_none() {
        return Err(fields.missing("rope_scaling"));
    }
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let base = Base::read(fields, FAMILY.model_type, Some(8), Some(64))?;
    let base = Base { activation: Activation::ClampedSwiglu, ..base };
    let sizes = experts(fields, base.layers, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    let window = count(fields, "sliding_window", u32::MAX)?.unwrap_or(128);
    // Without a list, every other layer has the window, the first one among them.
    let alternating = || (0..base.layers).map(|i| (i % 2 == 0).then_some(window)).collect();
    let windows = windows(fields, base.layers, Some(window))?.unwrap_or_else(alternating);
    let packed = Quantisation::read(fields)?.is_some_and(|quantisation| quantisation.mxfp4);
    let layer = |(i, window): (usize, Option<u32>)| {
        let of = |name: &str| format!("model.layers.{i}.{name}");
        let mut layer = base.layer(i);
        layer.attention.qkv_bias = base.qkv_bias(i);
        layer.attention.out_bias = Some(Part::vector(of("self_attn.o_proj.bias"), base.hidden));
        layer.attention.sinks = Some(Part::vector(of("self_attn.sinks"), base.geometry.heads as usize));
        layer.attention.window = window;
        let mixture = mixture(&base, i, sizes);
        layer.mlp = Mlp::Experts(Box::new(if packed { in_blocks(mixture) } else { mixture }));
        layer
    };
    let rope = base.rope(fields, 1.5e5)?;
    base.model(fields, vec![rope], windows.into_iter().enumerate().map(layer).collect())
}

/// Experts as published files have them: tensors of MXFP4 blocks, `[expert][out][in]`, gates and ups in turns.
fn in_blocks(mixture: MixtureSpec) -> MixtureSpec {
    let turned = |part: Part| {
        let &[count, cols, rows] = part.shape.as_slice() else { unreachable!("it is a tensor of all experts") };
        let expert = part.offset / (cols * rows);
        Part {
            tensor: format!("{}_blocks", part.tensor),
            shape: vec![count, rows, cols],
            // The other offset within an expert is 0, or 1 for ups.
            offset: (expert * rows + part.offset % rows) * cols,
            row_stride: part.row_stride * cols,
            col_stride: 1,
            ..part
        }
    };
    let [up, down] = [mixture.up, mixture.down].map(|parts| parts.into_iter().map(turned).collect());
    MixtureSpec { up, down, ..mixture }
}

/// Experts of one tensor a projection, stored `[expert][in][out]`, with gates and ups in turns.
fn mixture(base: &Base, i: usize, [count, top_k, width]: [usize; 3]) -> MixtureSpec {
    let of = |name: &str| format!("model.layers.{i}.mlp.{name}");
    let hidden = base.hidden;
    let stored = |name: &str, shape: &[usize], (rows, cols): (usize, usize), offset, row_stride, col_stride| Part {
        tensor: of(name),
        shape: shape.to_vec(),
        rows,
        cols,
        offset,
        row_stride,
        col_stride,
    };
    let up = |e: usize, odd: usize| {
        let shape = [count, hidden, 2 * width];
        stored("experts.gate_up_proj", &shape, (width, hidden), e * hidden * 2 * width + odd, 2, 2 * width)
    };
    let up_bias = |e: usize, odd: usize| {
        stored("experts.gate_up_proj_bias", &[count, 2 * width], (1, width), e * 2 * width + odd, 2 * width, 2)
    };
    let down = |e: usize| {
        let shape = [count, width, hidden];
        stored("experts.down_proj", &shape, (hidden, width), e * width * hidden, 1, hidden)
    };
    MixtureSpec {
        count,
        width,
        activation: base.activation,
        routing: softmax(top_k, true),
        router: Part::matrix(of("router.weight"), count, hidden),
        router_bias: Some(Part::vector(of("router.bias"), count)),
        choice_bias: None,
        up: (0..count).flat_map(|e| [up(e, 0), up(e, 1)]).collect(),
        up_bias: (0..count).flat_map(|e| [up_bias(e, 0), up_bias(e, 1)]).collect(),
        down: (0..count).map(down).collect(),
        down_bias: vec![Part::matrix(of("experts.down_proj_bias"), count, hidden)],
        shared: None,
    }
}
