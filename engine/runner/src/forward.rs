//! State that an executor's forward passes share: weights, activations, and the device and stores, borrowed for a
//! turn.

use crate::config::ExecutorConfig;
use crate::decoder::{Activations, Model};
use crate::micro_batch::RemoteBuffers;
use crate::remote_query::AttentionShape;
use crate::ring::Rings;
use crate::sampling::Sampler;
use crate::work::MapId;
use lagoon_backend::{Device, SampleRow, SampledRow};
use lagoon_grammar::Grammars;
use lagoon_types::KvShape;
use std::collections::BTreeMap;

/// Weights and working memory of forward passes.
#[derive(Debug)]
pub(crate) struct Forward<D: Device> {
    pub(crate) model: Model<D>,
    pub(crate) micro_batches: [Activations<D>; 2],
    pub(crate) remote: RemoteBuffers<D>,
    pub(crate) sampler: Sampler,
    pub(crate) draws: Draws,
    /// Host staging buffer, kept between calls.
    pub(crate) host: Vec<f32>,
    /// Grammars of constrained sequences; `None` without a tokenizer.
    pub(crate) grammars: Option<Grammars>,
}

/// Buffers of sampling on the device, kept between steps.
#[derive(Debug, Default)]
pub(crate) struct Draws {
    pub(crate) rows: Vec<SampleRow>,
    pub(crate) masks: Vec<u32>,
    pub(crate) drawn: Vec<SampledRow>,
}

/// All that passes share, borrowed by [`crate::pass::Pass::advance`].
#[derive(Debug)]
pub(crate) struct Shared<'a, D: Device> {
    pub(crate) device: &'a mut D,
    pub(crate) forward: &'a mut Forward<D>,
    pub(crate) kv: &'a mut D::Kv,
    /// Rings of windowed KV, if it is kept apart.
    pub(crate) rings: Option<&'a mut Rings<D>>,
    pub(crate) mapped: &'a BTreeMap<MapId, D::Kv>,
    pub(crate) kv_shape: KvShape,
    pub(crate) attention: &'a AttentionShape,
    pub(crate) config: ExecutorConfig,
    /// The other micro-batch has no pass.
    pub(crate) alone: bool,
}
