//! The draft model of `--draft`: opened and checked against the served model, loaded onto a device of its own.

use crate::args::EngineArgs;
use crate::capacity::step_bytes;
use crate::model::{OpenModel, resolve, short_name, text};
use anyhow::{Context, ensure};
use lagoon_backend::Device;
use lagoon_runner::{Drafter, Executor, ExecutorConfig};
use lagoon_text::Tokenizer;
use lagoon_types::{KvDType, KvSpace};
use std::path::Path;

/// A draft model without its weights on a device.
#[derive(Debug)]
pub(crate) struct DraftModel {
    model: OpenModel,
    kv_tokens: u32,
}

impl DraftModel {
    /// Opens the draft model that the flags name; downloads a hub name. `served`: the directory or file of the model that it drafts for.
    ///
    /// # Errors
    /// If it cannot be opened, or its tokens are not those of the served model.
    pub(crate) fn open(args: &EngineArgs, served: &Path) -> anyhow::Result<Option<Self>> {
        let Some(name) = &args.draft else { return Ok(None) };
        ensure!(args.drafts() > 0, "--draft with --draft-tokens=0 drafts nothing\nhint: leave one of them out");
        let path = resolve(name).with_context(|| format!("open the draft model {name}"))?;
        let model = OpenModel::open(&path, short_name(name), args.dtype, None)?;
        let (of_draft, of_served) = (text(&path)?.0, text(served)?.0);
        if let Some(id) = differs(&of_draft, &of_served) {
            anyhow::bail!(
                "{name} cannot draft: token {id} is {:?} there and {:?} in the served model\n\
                 hint: a draft model has the tokenizer of the served one, like a smaller model of the same family",
                of_draft.token(id).unwrap_or_default(),
                of_served.token(id).unwrap_or_default(),
            );
        }
        Ok(Some(Self { kv_tokens: args.draft_kv_tokens, model }))
    }

    /// Blocks of its KV.
    fn blocks(&self, block_tokens: u32) -> u32 {
        self.kv_tokens.div_ceil(block_tokens.max(1))
    }

    fn kv_dtype(&self) -> KvDType {
        self.model.dtype.into()
    }

    /// Bytes of device memory that it takes, about: weights, KV and buffers.
    pub(crate) fn bytes(&self, args: &EngineArgs) -> u64 {
        let spec = &self.model.config;
        let weights = spec.parameters() * self.model.dtype.size() as u64;
        let kv = u64::from(self.kv_tokens) * spec.kv_shape(self.kv_dtype()).token_bytes() as u64;
        weights + kv + step_bytes(spec, u64::from(args.step_tokens), args.max_running as u64)
    }

    /// Loads it onto `device`.
    ///
    /// # Errors
    /// If the device's memory does not hold it.
    pub(crate) fn load<D: Device>(&self, mut device: D, args: &EngineArgs) -> anyhow::Result<Drafter<D>> {
        let (model, spec) = (self.model.load(&mut device, args.dtype)?, &self.model.config);
        let config = ExecutorConfig {
            sampled_rows: args.max_running.min(args.step_tokens as usize),
            ..ExecutorConfig::alone(
                KvSpace::flat(self.blocks(args.block_tokens), args.block_tokens),
                self.kv_dtype(),
                args.step_tokens as usize,
            )
        };
        let executor = Executor::new(device, spec, model, config)
            .context("allocate the draft model's KV and buffers\nhint: choose a smaller --draft-kv-tokens")?;
        Ok(Drafter::new(executor, spec.max_positions, u32::try_from(spec.vocab).unwrap_or(u32::MAX)))
    }
}

/// The first token that is not the same in both.
fn differs(a: &Tokenizer, b: &Tokenizer) -> Option<u32> {
    let ids = 0..u32::try_from(a.vocab_size().max(b.vocab_size())).unwrap_or(u32::MAX);
    ids.into_iter().find(|id| a.token(*id) != b.token(*id))
}
