//! One model on one executor, without scheduling: logits of chosen positions for any chunking.

use lagoon_backend::Device;
use lagoon_model::{Checkpoint, LlamaWeights, ModelConfig, Rope};
use lagoon_runner::{Command, Executor, ExecutorConfig, Model, RemoteWork, Report, SampleSpec, SeqRows, StepWork};
use lagoon_types::{DType, KvRun, Lane, SamplingParams, SeqId, StepId};
use std::path::Path;
use std::sync::Arc;

/// Rows of the largest step in tests.
pub const STEP_ROWS: usize = 64;

/// Loads a model directory; KV is stored in `kv_dtype`.
pub fn executor<D: Device>(mut device: D, dir: &Path, slots: usize, kv_dtype: DType) -> (ModelConfig, Executor<D>) {
    let config = ModelConfig::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = LlamaWeights::load(&mut device, &checkpoint, &config, None, &mut |_, _| {}).unwrap();
    let model = Model { weights, rope: Rope::new(&config) };
    let executor_config =
        ExecutorConfig { slots, kv_dtype, step_rows: STEP_ROWS, step_seqs: STEP_ROWS, fetch_tokens: 48 };
    let executor = Executor::new(device, &config, Some(model), executor_config).unwrap();
    (config, executor)
}

/// Greedy sampling with logits.
#[must_use]
pub fn greedy() -> SampleSpec {
    SampleSpec {
        params: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        index: 0,
        return_logits: true,
    }
}

/// Feeds `tokens` in chunks and returns the logits of each chunk's last position.
pub fn logits<D: Device>(executor: &mut Executor<D>, tokens: &[u32], chunks: &[usize]) -> Vec<(usize, Vec<f32>)> {
    assert_eq!(chunks.iter().sum::<usize>(), tokens.len());
    let mut result = Vec::new();
    let mut start = 0;
    for (step, len) in chunks.iter().enumerate() {
        let end = start + len;
        let work = StepWork {
            step: StepId(step as u64),
            lane: Lane::Local,
            tokens: tokens[start..end].to_vec(),
            slots: (start as u32..end as u32).collect(),
            seqs: vec![SeqRows {
                seq: SeqId(1),
                row0: 0,
                rows: *len as u32,
                pos0: start as u32,
                run0: 0,
                runs: 1,
                sample: Some(greedy()),
            }],
            runs: vec![KvRun { base: 0, len: end as u32, first_pos: 0 }],
            remote: RemoteWork::default(),
        };
        executor.push(Command::Step(Box::new(work)));
        let mut done = None;
        while done.is_none() {
            assert!(executor.turn(&mut |report| match report {
                Report::Done { samples, .. } => done = samples.into_iter().next().unwrap().logits,
                report => panic!("{report:?}"),
            }));
        }
        result.push((end - 1, done.unwrap()));
        start = end;
    }
    result
}
