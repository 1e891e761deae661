//! What a constraint costs: greedy decoding of one sequence on the host backend, free and held to a JSON schema, and the matcher
//! alone over a vocabulary of the size of today's models.
//!
//! * decode: tokens a second of both, in turn; `ratio` is the median of constrained over free.
//! * matcher: microseconds a token for a mask and taking the token, over a made vocabulary of 131,072 tokens; and, once each, the
//!   milliseconds that its trie and a schema take.
//!
//! Run with `cargo bench -p lagoon-benches --bench constraint -- [--model DIR]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context, Result};
use lagoon_backend::CpuDevice;
use lagoon_grammar::{AnswerMatcher, Grammars, Next};
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{Command, Executor, ExecutorConfig, Model, RemoteWork, Report, SampleSpec, SeqRows, StepWork};
use lagoon_text::{Tokenizer, TokenizerConfig};
use lagoon_types::{Constraint, Grammar, KvDType, KvRun, KvSpace, MicroBatch, SamplingParams, SeqId, StepId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const SCHEMA: &str = r#"{"type": "array", "minItems": 1000, "items": {"type": "object", "additionalProperties": false,
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "kind": {"enum": ["north", "south", "east"]}, "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}},
    "required": ["name", "age", "kind", "tags"]}}"#;
const TOKENS: usize = 400;
const PAIRS: usize = 9;
const VOCAB: u32 = 1 << 17;

fn constraint() -> Arc<Constraint> {
    Arc::new(Constraint { grammar: Grammar::JsonSchema(SCHEMA.to_owned()), reasoning: None })
}

struct Runner {
    executor: Executor<CpuDevice>,
    steps: u64,
}

impl Runner {
    fn open(dir: &Path, grammars: Grammars) -> Result<Self> {
        let (spec, checkpoint, mut device) = (ModelSpec::open(dir)?, Checkpoint::open(dir)?, CpuDevice::new());
        let weights = Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {})?;
        let config = ExecutorConfig::alone(KvSpace::flat(u32::try_from(TOKENS)? + 64, 1), KvDType::F32, 32);
        let executor = Executor::new(device, &spec, Some(Model::new(&spec, weights)), config)?;
        Ok(Self { executor: executor.with_grammars(grammars), steps: 0 })
    }

    /// Tokens a second of one answer.
    fn decode(&mut self, params: &Arc<SamplingParams>, matcher: Option<&Arc<AnswerMatcher>>) -> Result<f64> {
        let mut token = self.step(0, &(40..56).collect::<Vec<_>>(), params, matcher)?;
        let begun = Instant::now();
        for at in 16..16 + u32::try_from(TOKENS)? {
            token = self.step(at, &[token], params, matcher)?;
        }
        Ok(TOKENS as f64 / begun.elapsed().as_secs_f64())
    }

    fn step(
        &mut self,
        pos0: u32,
        tokens: &[u32],
        params: &Arc<SamplingParams>,
        matcher: Option<&Arc<AnswerMatcher>>,
    ) -> Result<u32> {
        let rows = u32::try_from(tokens.len())?;
        let sample = SampleSpec { matcher: matcher.cloned(), ..SampleSpec::new(Arc::clone(params), u64::from(pos0)) };
        let seq = SeqId(1);
        let (row0, drafts, run0, runs) = (0, 0, 0, 1);
        self.steps += 1;
        let work = StepWork {
            step: StepId(self.steps),
            micro_batch: MicroBatch::Local,
            tokens: tokens.to_vec(),
            slots: (pos0..pos0 + rows).collect(),
            seqs: vec![SeqRows {
                seq,
                row0,
                rows,
                drafts,
                pos0,
                run0,
                runs,
                ring: None,
                window: None,
                sample: Some(sample),
            }],
            runs: vec![KvRun { base: 0, len: pos0 + rows, first_pos: 0 }],
            remote: RemoteWork::default(),
            hidden: Vec::new(),
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
        };
        self.executor.push(Command::Step(Box::new(work)));
        let mut out = None;
        while out.is_none() {
            self.executor.turn(&mut |report| {
                if let Report::Done { samples, .. } = report {
                    out = samples.into_iter().next();
                }
            });
        }
        let token = out.and_then(|out| out.token).context("no token")?;
        matcher.iter().for_each(|matcher| matcher.push(&[token]));
        Ok(token)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A byte-level tokenizer with a made vocabulary: every printable character, and pieces of letters as of words.
fn wide() -> Result<Tokenizer> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut vocab: Map<String, Value> =
        (0x21u8..0x7f).zip(0u32..).map(|(byte, id)| (char::from(byte).to_string(), json!(id))).collect();
    while vocab.len() + 1 < VOCAB as usize {
        let mut text = String::from(if rng.random_bool(0.5) { "Ġ" } else { "" });
        (0..rng.random_range(1..9)).for_each(|_| text.push(char::from(rng.random_range(b'a'..=b'z'))));
        let id = u32::try_from(vocab.len())?;
        vocab.entry(text).or_insert_with(|| json!(id));
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let end = json!({"id": VOCAB - 1, "content": "<end>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [end],
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Ok(Tokenizer::parse(Path::new("wide"), file.to_string().as_bytes(), &TokenizerConfig::default())?)
}

fn matcher_alone() -> Result<Value> {
    let grammars = Grammars::new(Arc::new(wide()?), VOCAB, &[VOCAB - 1]);
    let timed = |grammar: &Grammar| {
        let begun = Instant::now();
        grammars.check(grammar).map(|()| begun.elapsed().as_secs_f64() * 1e3)
    };
    let trie_ms = timed(&Grammar::Choice(vec!["a".to_owned()]))?;
    let schema_ms = timed(&constraint().grammar)?;
    let matcher = AnswerMatcher::new(constraint(), &[]);
    while !matcher.poll(Some(&grammars)) {}
    let (mut rng, mut rows, mut times) = (ChaCha8Rng::seed_from_u64(2), Vec::new(), Vec::new());
    for _ in 0..4000 {
        let begun = Instant::now();
        rows.clear();
        matcher.next(&[], &mut rows);
        let mut spent = begun.elapsed();
        let Some(mask) = rows.first().and_then(Next::mask) else { break };
        // The first allowed token from a random place on.
        let from = rng.random_range(0..VOCAB);
        let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let token = (from..VOCAB).chain(0..from).find(is_allowed).context("a token")?;
        let begun = Instant::now();
        matcher.take(token);
        matcher.push(&[token]);
        spent += begun.elapsed();
        times.push(spent.as_secs_f64() * 1e6);
    }
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times[times.len() * share / 100];
    Ok(
        json!({"tokens": times.len(), "mean_us": mean, "median_us": at(50), "p99_us": at(99), "trie_ms": trie_ms, "schema_ms": schema_ms}),
    )
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let named = args.iter().position(|arg| arg == "--model").and_then(|at| args.get(at + 1));
    let dir = named.map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/passkey"), PathBuf::from);
    let tokenizer = Arc::new(Tokenizer::open(&dir)?);
    let vocab = u32::try_from(ModelSpec::open(&dir)?.vocab)?;
    let grammars = Grammars::new(tokenizer, vocab, &[]);
    grammars.check(&constraint().grammar)?;
    let mut runner = Runner::open(&dir, grammars)?;
    let free = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    let held = Arc::new(SamplingParams { constraint: Some(constraint()), ..(*free).clone() });
    let (mut free_rates, mut held_rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let without = runner.decode(&free, None)?;
        let with = runner.decode(&held, Some(&Arc::new(AnswerMatcher::new(constraint(), &[]))))?;
        free_rates.push(without);
        held_rates.push(with);
        ratios.push(with / without);
    }
    let decode = json!({"free_tokens_per_s": median(free_rates), "constrained_tokens_per_s": median(held_rates), "ratio": median(ratios)});
    println!("{}", json!({"decode": decode, "matcher": matcher_alone()?}));
    Ok(())
}
