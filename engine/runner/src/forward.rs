//! What forward passes of one executor share: weights, activations, and the device and stores that they borrow for a turn.

use crate::config::ExecutorConfig;
use crate::micro_batch::{MicroBatchBuffers, RemoteBuffers};
use crate::remote_query::AttentionShape;
use crate::sampling::Sampler;
use crate::work::MapId;
use lagoon_backend::{Device, SampleRow, SampledRow};
use lagoon_model::{LlamaWeights, ModelConfig, Rope};
use lagoon_types::KvShape;
use std::collections::BTreeMap;

/// A model on a device.
#[derive(Debug)]
pub struct Model<D: Device> {
    pub weights: LlamaWeights<D>,
    pub rope: Rope,
}

/// Weights and what a forward pass works in.
#[derive(Debug)]
pub(crate) struct Forward<D: Device> {
    pub(crate) config: ModelConfig,
    pub(crate) model: Model<D>,
    pub(crate) micro_batches: [MicroBatchBuffers<D>; 2],
    pub(crate) remote: RemoteBuffers<D>,
    pub(crate) sampler: Sampler,
    /// What a device that samples is asked for, and says.
    pub(crate) draws: (Vec<SampleRow>, Vec<SampledRow>),
    /// Host staging, kept between calls.
    pub(crate) host: Vec<f32>,
}

/// Everything that passes share, borrowed by [`crate::pass::Pass::advance`].
#[derive(Debug)]
pub(crate) struct Shared<'a, D: Device> {
    pub(crate) device: &'a mut D,
    pub(crate) forward: &'a mut Forward<D>,
    pub(crate) kv: &'a mut D::Kv,
    pub(crate) reached: &'a BTreeMap<MapId, D::Kv>,
    pub(crate) kv_shape: KvShape,
    pub(crate) attention: AttentionShape,
    pub(crate) config: ExecutorConfig,
    /// The other micro-batch has no pass.
    pub(crate) alone: bool,
}
