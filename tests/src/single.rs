//! One model on one executor, without scheduling ([`Session`]): logits of chosen positions for any chunking.

use lagoon_backend::Device;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{
    Command, Executor, ExecutorConfig, Model, RemoteWork, Report, SampleOut, SampleSpec, SeqRows, StepWork,
};
use lagoon_types::{KvDType, KvRun, KvSpace, MicroBatch, SamplingParams, SeqId, StepId};
use std::path::Path;
use std::sync::Arc;

/// Rows of the largest step in tests.
pub const STEP_ROWS: usize = 128;

/// An executor, and the tokens of one sequence fed so far.
#[derive(Debug)]
pub struct Session<D: Device> {
    executor: Executor<D>,
    steps: u64,
    fed: usize,
}

impl<D: Device> Session<D> {
    /// Loads a model directory; KV is stored in `kv_dtype`, or in the model's own type.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn open(device: D, dir: &Path, slots: usize, kv_dtype: Option<KvDType>) -> Self {
        Self::of(device, dir, &ModelSpec::open(dir).unwrap(), slots, kv_dtype)
    }

    /// As [`Session::open`], with another specification of the model.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn of(mut device: D, dir: &Path, config: &ModelSpec, slots: usize, kv_dtype: Option<KvDType>) -> Self {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let kv_dtype = kv_dtype.or(checkpoint.dtype().map(KvDType::from)).unwrap();
        let weights = Weights::load(&mut device, &checkpoint, config, None, &mut |_, _| {}).unwrap();
        let model = Model::new(config, weights);
        let executor_config = ExecutorConfig::alone(KvSpace::flat(slots as u32, 1), kv_dtype, STEP_ROWS);
        let executor = Executor::new(device, config, Some(model), executor_config).unwrap();
        Self { executor, steps: 0, fed: 0 }
    }

    /// Starts another sequence.
    pub fn restart(&mut self) {
        self.fed = 0;
    }

    /// Goes on behind the first `tokens` tokens of those fed.
    ///
    /// # Panics
    /// If fewer were fed.
    pub fn rewind(&mut self, tokens: usize) {
        assert!(tokens <= self.fed, "tokens that were fed");
        self.fed = tokens;
    }

    /// Feeds the next tokens in one step; returns the greedy sample with the logits of the last position.
    ///
    /// # Panics
    /// If the step fails.
    pub fn feed(&mut self, tokens: &[u32]) -> SampleOut {
        let (start, end) = (self.fed, self.fed + tokens.len());
        self.steps += 1;
        self.fed = end;
        let seq = SeqRows {
            seq: SeqId(1),
            row0: 0,
            rows: tokens.len() as u32,
            drafts: 0,
            pos0: start as u32,
            run0: 0,
            runs: 1,
            ring: None,
            window: None,
            sample: Some(greedy()),
        };
        let work = StepWork {
            step: StepId(self.steps),
            micro_batch: MicroBatch::Local,
            tokens: tokens.to_vec(),
            slots: (start as u32..end as u32).collect(),
            seqs: vec![seq],
            runs: vec![KvRun { base: 0, len: end as u32, first_pos: 0 }],
            remote: RemoteWork::default(),
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
            hidden: Vec::new(),
        };
        self.executor.push(Command::Step(Box::new(work)));
        let mut done = None;
        while done.is_none() {
            assert!(self.executor.turn(&mut |report| match report {
                Report::Done { samples, .. } => done = samples.into_iter().next(),
                report => panic!("{report:?}"),
            }));
        }
        done.unwrap()
    }

    /// Feeds a sequence from its start in `chunks`; returns position and logits of each chunk's last token.
    ///
    /// # Panics
    /// If the chunks do not sum to the tokens.
    pub fn logits(&mut self, tokens: &[u32], chunks: &[usize]) -> Vec<(usize, Vec<f32>)> {
        assert_eq!(chunks.iter().sum::<usize>(), tokens.len());
        self.restart();
        let feed = |len: &usize| {
            let sample = self.feed(&tokens[self.fed..self.fed + len]);
            (self.fed - 1, sample.logits.unwrap())
        };
        chunks.iter().map(feed).collect()
    }

    /// The next `n` tokens, sampled greedily.
    pub fn continuation(&mut self, tokens: &[u32], n: usize) -> Vec<u32> {
        self.restart();
        let mut token = tokens.chunks(STEP_ROWS).map(|chunk| self.feed(chunk).token.unwrap()).last().unwrap();
        let mut output = vec![token];
        while output.len() < n {
            token = self.feed(&[token]).token.unwrap();
            output.push(token);
        }
        output
    }
}

/// Greedy sampling with logits.
#[must_use]
pub fn greedy() -> SampleSpec {
    let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    SampleSpec { return_logits: true, ..SampleSpec::new(params, 0) }
}
