//! Small checkpoints, and a device that records its weights.
#![allow(dead_code, reason = "not every test that includes this module uses all of it")]

use lagoon_backend::{
    Activation, AttnBatch, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece, LatentRow,
    Mode, Partials, WeightFormat, WeightSource, without,
};
use lagoon_model::{Checkpoint, ModelError, ModelSpec};
use lagoon_types::{AttentionGeometry, DType, KvShape};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Shape, bytes and element type by name.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>, Dtype)>;

/// A model of 2 layers, hidden 16, feed-forward 24, 4 heads of 4 and 2 KV heads, 10 tokens.
pub(crate) fn write_config(dir: &Path, tied: bool) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "tie_word_embeddings": tied,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// All tensors of that model, filled with numbers that differ.
pub(crate) fn tensors(dtype: DType, tied: bool) -> Tensors {
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![10, 16])];
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| shapes.push((format!("model.layers.{layer}.{name}"), shape.into()));
        add("input_layernorm.weight", &[16]);
        add("self_attn.q_proj.weight", &[16, 16]);
        add("self_attn.k_proj.weight", &[8, 16]);
        add("self_attn.v_proj.weight", &[8, 16]);
        add("self_attn.o_proj.weight", &[16, 16]);
        add("post_attention_layernorm.weight", &[16]);
        add("mlp.gate_proj.weight", &[24, 16]);
        add("mlp.up_proj.weight", &[24, 16]);
        add("mlp.down_proj.weight", &[16, 24]);
    }
    shapes.push(("model.norm.weight".to_owned(), vec![16]));
    if !tied {
        shapes.push(("lm_head.weight".to_owned(), vec![10, 16]));
    }
    let stored = match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
    };
    let mut next = 0.0f32;
    let fill = |(name, shape): (String, Vec<usize>)| {
        let values: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|_| {
                next += 1.0;
                (next * 0.61).sin()
            })
            .collect();
        let mut bytes = Vec::new();
        dtype.encode(&values, &mut bytes);
        (name, (shape, bytes, stored))
    };
    shapes.into_iter().map(fill).collect()
}

pub(crate) fn write(dir: &Path, file: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (shape, bytes, dtype))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name, view)
    });
    std::fs::write(dir.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(crate) fn write_sharded(dir: &Path, tensors: &Tensors, shards: usize) {
    let mut map = serde_json::Map::new();
    for shard in 0..shards {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let part: Tensors = tensors.clone().into_iter().skip(shard).step_by(shards).collect();
        map.extend(part.keys().map(|name| (name.clone(), file.clone().into())));
        write(dir, &file, &part);
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

pub(crate) fn open(dir: &Path) -> Result<(ModelSpec, Checkpoint), ModelError> {
    Ok((ModelSpec::open(dir)?, Checkpoint::open(dir)?))
}

/// Records weights as given; computes nothing.
pub(crate) struct RecordingDevice;

#[rustfmt::skip]
impl Device for RecordingDevice {
    type Tensor = ();
    type Weight = WeightSource;
    type Kv = ();

    fn takes(&self, _: WeightFormat) -> bool {
        true
    }

    fn weight(&mut self, source: WeightSource) -> Result<WeightSource, DeviceError> {
        Ok(source)
    }

    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn info(&self) -> DeviceInfo { unreachable!() }
    fn tensor(&mut self, _: usize, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn kv(&mut self, _: KvShape, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn kv_shape(&self, (): &()) -> KvShape { unreachable!() }
    fn write(&mut self, (): &mut (), _: usize, _: &[f32]) -> Result<(), DeviceError> { unreachable!() }
    fn read(&mut self, (): &(), _: Range<usize>, _: Range<usize>, _: &mut Vec<f32>) -> Result<(), DeviceError> { unreachable!() }
    fn kv_write(&mut self, (): &mut (), _: usize, _: u32, _: &[u8]) -> Result<(), DeviceError> { unreachable!() }
    fn kv_read(&mut self, (): &(), _: usize, _: u32, _: u32, _: &mut Vec<u8>) -> Result<(), DeviceError> { unreachable!() }
    fn kv_read_pieces(&mut self, (): &(), _: &[KvPiece], _: &mut Vec<u8>) -> Result<(), DeviceError> { unreachable!() }
    fn sync(&mut self) -> Result<(), DeviceError> { unreachable!() }
    fn embed(&mut self, _: &WeightSource, _: &[u32], (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn rms_norm(&mut self, (): &(), _: &WeightSource, _: f32, _: usize, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn layer_norm(&mut self, (): &(), _: &WeightSource, _: f32, _: usize, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn matmul(&mut self, (): &(), _: &WeightSource, _: usize, _: Mode, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn matmul_activated(&mut self, (): &(), _: &WeightSource, _: usize, _: Activation, (): &mut (), (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn rope_append(&mut self, (): &mut (), (): &(), _: AttentionGeometry, _: &[u32], (): &mut (), _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn head_matmul(&mut self, (): &(), _: &WeightSource, _: HeadStrides, _: usize, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn latent_append(&mut self, (): &mut (), _: LatentRow<'_, ()>, _: AttentionGeometry, _: &[u32], (): &mut (), _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn attention(&mut self, (): &(), _: &AttnBatch<'_>, (): &(), _: usize, _: &mut Partials<()>) -> Result<(), DeviceError> { unreachable!() }
    fn merge(&mut self, _: &mut Partials<()>, _: &Partials<()>, _: AttentionGeometry) -> Result<(), DeviceError> { unreachable!() }
    fn embed_add(&mut self, _: &WeightSource, _: &[u32], (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn activate(&mut self, (): &(), _: usize, _: Activation, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn add(&mut self, (): &mut (), (): &(), _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn scale(&mut self, (): &mut (), _: f32, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn softcap(&mut self, (): &mut (), _: f32, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn head_norm(&mut self, (): &mut (), _: (&WeightSource, &WeightSource), _: f32, _: AttentionGeometry, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn experts(&mut self, (): &(), (): &(), _: &Experts<'_, WeightSource>, _: usize, _: &mut ExpertBuffers<()>, (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
    fn sink(&mut self, _: &mut Partials<()>, _: &WeightSource, _: AttentionGeometry) -> Result<(), DeviceError> { unreachable!() }
    fn add_bias(&mut self, (): &mut (), _: &WeightSource, _: usize) -> Result<(), DeviceError> { unreachable!() }
    fn gather_rows(&mut self, (): &(), _: &[u32], (): &mut ()) -> Result<(), DeviceError> { unreachable!() }
}
