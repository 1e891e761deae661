//! KV of layers with a window in rings: the same logits as all KV in one store.

use super::*;
use crate::work::{Command, RemoteWork, Report, SampleSpec, StepWork};
use crate::{Executor, ExecutorConfig, Model};
use lagoon_backend::cpu::CpuDevice;
use lagoon_model::{Checkpoint, Weights};
use lagoon_types::{DType, KvDType, KvSpace, MicroBatch, RingRows, SamplingParams, SeqId, StepId, WindowShape};
use std::path::Path;
use std::sync::Arc;

const ROWS: usize = 9;
const TOKENS: u32 = 120;

struct Split {
    executor: Executor<CpuDevice>,
    /// Logits of every position, by [`crate::Decoder::plain_logits`].
    expected: Vec<Vec<f32>>,
    tokens: Vec<u32>,
    warm_up: u32,
    shape: WindowShape,
    /// Of the next step.
    window: Option<SavedWindow>,
    steps: u64,
}

/// A golden model that is split, with a store for one sequence and a ring beside those of others.
fn split(golden: &str) -> Split {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(golden);
    let mut device = CpuDevice::new();
    let mut spec = ModelSpec::open(&dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let weights = Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {}).unwrap();
    let tokens: Vec<u32> = (0..TOKENS).map(|i| 3 + (i * i * 7 + i * 13) % 120).collect();
    let whole = Model::new(&spec, weights);
    let logits = crate::Decoder::new(&whole).plain_logits(&mut device, DType::F32, &tokens).unwrap();
    let expected = logits.chunks_exact(spec.vocab).map(<[f32]>::to_vec).collect();
    spec.split_kv().unwrap();
    let shape = spec.window_shape().unwrap();
    let model = Model::new(&spec, whole.weights);
    let config = ExecutorConfig {
        rings: 3,
        ..ExecutorConfig::alone(KvSpace::flat(TOKENS + shape.slots(TOKENS), 1), KvDType::F32, ROWS)
    };
    let executor = Executor::new(device, &spec, Some(model), config).unwrap();
    Split { executor, expected, tokens, warm_up: shape.warm_up, shape, window: None, steps: 0 }
}

impl Split {
    /// Computes positions; the logits of the last one.
    fn feed(&mut self, start: u32, rows: u32, ring: RingRows) -> Vec<f32> {
        self.steps += 1;
        let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        let sample = SampleSpec { return_logits: true, ..SampleSpec::new(params, 0) };
        let (seq, end) = (SeqId(1), start + rows);
        let (ring, sample, warm_up, window) = (Some(ring), Some(sample), ring.warm_up, self.window.take());
        self.executor.push(Command::Step(Box::new(StepWork {
            step: StepId(self.steps),
            micro_batch: MicroBatch::Local,
            tokens: self.tokens[start as usize..end as usize].to_vec(),
            slots: (start..end).map(|slot| if warm_up { u32::MAX } else { slot }).collect(),
            seqs: vec![SeqRows { seq, row0: 0, rows, drafts: 0, pos0: start, run0: 0, runs: 1, ring, window, sample }],
            runs: vec![KvRun { base: 0, len: end, first_pos: 0 }],
            remote: RemoteWork::default(),
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
            hidden: Vec::new(),
        })));
        let mut logits = None;
        while logits.is_none() {
            assert!(self.executor.turn(&mut |report| match report {
                Report::Done { mut samples, .. } => logits = samples[0].logits.take(),
                report => panic!("{report:?}"),
            }));
        }
        logits.unwrap()
    }

    /// How far the logits of position `at` are off.
    fn off(&self, at: u32, logits: &[f32]) -> f32 {
        let pairs = self.expected[at as usize].iter().zip(logits);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

const CLOSE: f32 = 1e-4;

#[test]
fn rings_hold_what_layers_with_a_window_see() {
    for golden in ["gpt_oss", "gemma3"] {
        let mut split = split(golden);
        let (mut at, ring) = (0, RingRows { ring: 1, from: 0, warm_up: false, load: false });
        for rows in [9, 1, 4, 9, 9, 1, 1, 1, 8, 9, 3, 9, 9, 1, 9, 9, 2, 9, 1] {
            let logits = split.feed(at, rows, ring);
            at += rows;
            let off = split.off(at - 1, &logits);
            assert!(off < CLOSE, "{golden}, position {}: off by {off}", at - 1);
        }
        assert!(at > 100);
    }
}

/// A ring that was lost is filled again from so far back that the next row is right, in whatever chunks, and pooled KV is
/// left as it was. One position less is not enough.
#[test]
fn a_ring_that_was_lost_is_warmed_up() {
    for golden in ["gpt_oss", "gemma3"] {
        let mut split = split(golden);
        let from_start = RingRows { ring: 2, from: 0, warm_up: false, load: false };
        (0..9).for_each(|chunk| _ = split.feed(9 * chunk, 9, from_start));
        let (lost, warm_up) = (81, split.warm_up);
        let mut again = |depth: u32| {
            let from = lost - depth;
            let ring = RingRows { ring: 0, from, warm_up: true, load: false };
            let mut at = from;
            while at < lost {
                let rows = (lost - at).min(4);
                split.feed(at, rows, ring);
                at += rows;
            }
            let logits = split.feed(lost, 1, RingRows { warm_up: false, ..ring });
            split.off(lost, &logits)
        };
        let (whole, short) = (again(warm_up), again(warm_up - 1));
        assert!(whole < CLOSE, "{golden}: off by {whole}");
        assert!(short > CLOSE, "{golden}: one position later is off by {short} only");
    }
}

/// A prompt's last window, saved with its last rows to slots anywhere in the store, is all that another ring needs: whether the
/// prompt is shorter than it or not, and where a ring begins again at its first slot.
#[test]
fn a_saved_window_is_as_good_as_the_ring_that_it_is_of() {
    for golden in ["gpt_oss", "gemma3"] {
        for prompt in [5, 60, 81, 100] {
            let mut split = split(golden);
            let from_start = RingRows { ring: 2, from: 0, warm_up: false, load: false };
            let positions = split.shape.positions(prompt);
            let (mut pieces, mut left) = (Vec::new(), split.shape.slots(prompt));
            while left > 0 {
                let n = left.min(7);
                left -= n;
                pieces.push((TOKENS + left, n));
            }
            let window = SavedWindow { positions: positions.clone(), pieces };
            let mut at = 0;
            while at < prompt {
                let rows = (prompt - at).min(9);
                split.window = (at + rows == prompt).then(|| window.clone());
                split.feed(at, rows, from_start);
                at += rows;
            }
            let behind = RingRows { ring: 0, from: positions.start, warm_up: false, load: true };
            split.window = Some(window);
            let logits = split.feed(prompt, 4, behind);
            let first = split.off(prompt + 3, &logits);
            let logits = split.feed(prompt + 4, 9, RingRows { load: false, ..behind });
            let off = first.max(split.off(prompt + 12, &logits));
            assert!(off < CLOSE, "{golden}, {prompt} tokens: off by {off}");
        }
    }
}
