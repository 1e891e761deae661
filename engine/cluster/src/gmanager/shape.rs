//! Pool shape: checks, and sizes derived from it.

use super::reject;
use crate::perf::ModelShape;
use lagoon_protocol::{PoolShape, Rejected};
use lagoon_types::{DType, KvDType, KvShape, ModelHash, limits};

/// Refuses invalid shapes.
pub(super) fn check_shape(shape: &PoolShape) -> Result<(), Rejected> {
    if shape.model_hash.len() != 32 {
        return reject(format!("a model hash has 32 bytes, not {}", shape.model_hash.len()));
    }
    let sizes = [shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens];
    if sizes.contains(&0) || !shape.heads.is_multiple_of(shape.kv_heads) {
        return reject(format!(
            "layers {}, heads {}, kv_heads {}, head_dim {}, block_tokens {}: expected none to be 0, and heads to be a \
             multiple of kv_heads",
            shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens
        ));
    }
    let most = [
        ("layers", shape.layers, limits::LAYERS_MAX),
        ("heads", shape.heads, limits::HEADS_MAX),
        ("head_dim", shape.head_dim, limits::HEAD_DIM_MAX),
    ];
    if let Some((name, value, max)) = most.into_iter().find(|(_, value, max)| value > max) {
        return reject(format!("{name} is {value}: at most {max}"));
    }
    if shape.block_tokens > limits::BLOCK_TOKENS_MAX {
        return reject(format!("block_tokens is {}: at most {}", shape.block_tokens, limits::BLOCK_TOKENS_MAX));
    }
    check_windows(shape)?;
    if shape.latent && shape.kv_heads != 1 {
        return reject(format!("kv_heads is {}: latent attention has 1", shape.kv_heads));
    }
    for (name, value) in [("alibi_bias_max", bias_max(shape)), ("attention_softcap", softcap(shape))] {
        if !(value.is_finite() && value >= 0.0) {
            return reject(format!("{name} is {value}: expected 0 or more"));
        }
    }
    if !(scale(shape).is_finite() && scale(shape) > 0.0) {
        return reject(format!("attention_scale is {}: expected more than 0", scale(shape)));
    }
    match kv_dtype(shape) {
        Some(_) => Ok(()),
        None => reject(format!("{} is no element type", shape.kv_dtype)),
    }
}

/// Refuses lists of windows that do not fit the layers.
fn check_windows(shape: &PoolShape) -> Result<(), Rejected> {
    if !shape.windows.is_empty() && shape.windows.len() != shape.layers as usize {
        return reject(format!("windows has {} entries, the pool {} layers", shape.windows.len(), shape.layers));
    }
    let unpooled = shape.unpooled_windows.len();
    if shape.layers as usize + unpooled > limits::LAYERS_MAX as usize {
        return reject(format!(
            "unpooled_windows has {unpooled} entries beside {} layers: at most {} in all",
            shape.layers,
            limits::LAYERS_MAX
        ));
    }
    if shape.unpooled_windows.contains(&0) {
        return reject("unpooled_windows has a 0: every such layer has a window".to_owned());
    }
    Ok(())
}

fn scale(shape: &PoolShape) -> f32 {
    f32::from_bits(shape.attention_scale)
}

fn bias_max(shape: &PoolShape) -> f32 {
    f32::from_bits(shape.alibi_bias_max)
}

fn softcap(shape: &PoolShape) -> f32 {
    f32::from_bits(shape.attention_softcap)
}

/// Refuses an instance that differs from the pool, naming both values of the first field that does.
pub(super) fn same_shape(pool: &PoolShape, instance: &PoolShape) -> Result<(), Rejected> {
    let hash = |s: &PoolShape| <[u8; 32]>::try_from(&s.model_hash[..]).map(ModelHash).unwrap_or_default().to_string();
    let dtype = |s: &PoolShape| kv_dtype(s).map_or_else(|| s.kv_dtype.to_string(), |d| d.to_string());
    let number = |of: fn(&PoolShape) -> u32| (of(pool).to_string(), of(instance).to_string());
    let list = |of: fn(&PoolShape) -> &[u32]| (format!("{:?}", of(pool)), format!("{:?}", of(instance)));
    let fields = [
        (
            "model hash",
            if pool.model_hash == instance.model_hash { Default::default() } else { (hash(pool), hash(instance)) },
        ),
        ("layers", number(|s| s.layers)),
        ("heads", number(|s| s.heads)),
        ("kv_heads", number(|s| s.kv_heads)),
        ("head_dim", number(|s| s.head_dim)),
        ("KV element type", (dtype(pool), dtype(instance))),
        ("block_tokens", number(|s| s.block_tokens)),
        ("window", number(|s| s.window)),
        ("latent", (pool.latent.to_string(), instance.latent.to_string())),
        ("alibi_bias_max", (bias_max(pool).to_string(), bias_max(instance).to_string())),
        ("attention_softcap", (softcap(pool).to_string(), softcap(instance).to_string())),
        ("attention_scale", (scale(pool).to_string(), scale(instance).to_string())),
        ("windows", list(|s| &s.windows)),
        ("unpooled_windows", list(|s| &s.unpooled_windows)),
    ];
    for (name, (ours, theirs)) in fields {
        if ours != theirs {
            return reject(format!("the instance's {name} is {theirs}, the pool's is {ours}"));
        }
    }
    if pool == instance {
        Ok(())
    } else {
        reject(format!("the instance's shape is {instance:?}, the pool's is {pool:?}"))
    }
}

/// Bytes of one rBlock's KV, all layers; 0 for an invalid shape.
pub(super) fn block_bytes(shape: &PoolShape) -> u64 {
    u64::from(shape.block_tokens) * token_bytes(shape)
}

fn token_bytes(shape: &PoolShape) -> u64 {
    let PoolShape { layers, kv_heads, head_dim, .. } = *shape;
    kv_dtype(shape).map_or(0, |dtype| KvShape { layers, kv_heads, head_dim, dtype }.token_bytes() as u64)
}

fn kv_dtype(shape: &PoolShape) -> Option<KvDType> {
    u8::try_from(shape.kv_dtype).ok().and_then(KvDType::from_code)
}

/// Model shape for the performance model. Shipped queries and outputs count in the KV's element type, or in f32 where KV has scales.
#[must_use]
pub fn model_shape(shape: &PoolShape) -> ModelShape {
    let halves = if shape.latent { 2 } else { 1 };
    let element_bytes = kv_dtype(shape).map_or(0, |dtype| dtype.plain().unwrap_or(DType::F32).size() as u64);
    let q_dim = u64::from(shape.heads) * u64::from(shape.head_dim) * halves;
    ModelShape {
        layers: shape.layers,
        block_tokens: shape.block_tokens,
        token_bytes: token_bytes(shape),
        row_bytes: 2 * q_dim * element_bytes + u64::from(shape.heads) * 4 + 4,
    }
}
