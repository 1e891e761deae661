//! Hit rates of prefix caches in simulation: a trace of conversations with its `hash_ids`, on four instances of LLaMA2-7B on an A100
//! each, beside those of one least-recently-used cache as large as the pool, which serves one request after the other.

use super::cluster::Cluster;
use super::conversation::{Entry, HASHED_TOKENS, Scale, requests};
use super::device::Prefill;
use super::dispatch::Dispatch;
use super::hardware::LLAMA2_7B;
use super::measure::each;
use super::run::{Run, Setting};
use super::traces::Request;
use anyhow::ensure;
use lagoon_cluster::dispatch::PrefixHashes;
use lagoon_kv::{BlockHash, Tier};
use lagoon_types::limits::PREFIX_HASHES_MAX;
use std::fmt::Write as _;

const INSTANCES: u32 = 4;
const BLOCK_TOKENS: u32 = 64;
const CHUNK: u32 = 2_048;
/// Chunks of prompts are sized for it, as with `--target-tbt-ms`.
const TARGET_MS: u32 = 90;
/// Tokens behind one of the gateway's hashes: 1,024 bytes of text with four a token.
const GATEWAY_TOKENS: u32 = 256;

/// A prompt, by the trace's ids: one for each [`HASHED_TOKENS`] tokens, equal where all tokens up to there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt(pub Vec<u32>);

impl Prompt {
    /// Its tokens: an id stands for itself, as often as it has tokens.
    #[must_use]
    pub(super) fn tokens(&self, length: usize) -> Vec<u32> {
        self.0.iter().flat_map(|id| std::iter::repeat_n(*id, HASHED_TOKENS as usize)).take(length).collect()
    }

    /// Block hashes of its rBlocks, the last ones beyond its tokens.
    fn blocks(&self) -> Vec<BlockHash> {
        let each = HASHED_TOKENS / BLOCK_TOKENS;
        self.0.iter().flat_map(|id| (0..each).map(move |part| named(u64::from(*id), part, false))).collect()
    }

    /// What the gateway hashes of it.
    #[must_use]
    pub(super) fn prefix(&self) -> PrefixHashes {
        let each = u64::from(HASHED_TOKENS / GATEWAY_TOKENS);
        let hashes = self.0.iter().flat_map(|id| (0..each).map(move |part| u64::from(*id) * each + part));
        PrefixHashes { hashes: hashes.take(PREFIX_HASHES_MAX).collect(), tokens_per_hash: f64::from(GATEWAY_TOKENS) }
    }
}

/// One system's hits.
#[derive(Clone, Debug)]
pub struct Row {
    pub system: &'static str,
    /// Tokens of all prompts, and those of them that were cached.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Of these, tokens that were leased from another instance.
    pub leased_tokens: u64,
    /// Tokens that another instance cached, and not the one that a prompt was sent to.
    pub elsewhere_tokens: u64,
    pub evicted_blocks: u64,
    pub first_token_s: f64,
    /// Requests that did not finish.
    pub failed: usize,
}

impl Row {
    /// Share of the prompts' tokens that were cached.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

/// The compared systems; [`one_cache`] is the first row.
fn systems(kv_tokens: Option<u64>) -> Vec<(&'static str, Setting)> {
    let cluster = Cluster::multi(LLAMA2_7B, INSTANCES, 1);
    let setting = |pooled, dispatch| {
        let new = Setting::new(cluster, pooled, BLOCK_TOKENS);
        Setting {
            dispatch,
            prefill: Prefill::Computed,
            step_rows: CHUNK,
            target_step_ms: Some(TARGET_MS),
            prefix_cache: true,
            kv_tokens: kv_tokens.unwrap_or(new.kv_tokens),
            ..new
        }
    };
    vec![
        ("pool, bound late by the gateway", setting(true, Dispatch::Late)),
        ("pool, least predicted work without prefixes", setting(true, Dispatch::LeastWork)),
        ("alone, bound late by the gateway", setting(false, Dispatch::Late)),
    ]
}

/// Cached tokens of requests, each with the block hashes of its prompt, that one least-recently-used cache of `blocks` rBlocks serves in
/// turn. Prompts and answers go there, and the last token of a prompt is always computed.
#[must_use]
pub fn one_cache<'a>(
    requests: impl Iterator<Item = (&'a Request, Vec<BlockHash>)>,
    block_tokens: u32,
    blocks: u64,
) -> Vec<u32> {
    let mut cache: Tier<()> = Tier::new(blocks);
    let mut answers = 0_u64;
    let serve = |(request, mut all): (&Request, Vec<BlockHash>)| {
        let whole = |tokens: u32| (tokens / block_tokens) as usize;
        all.truncate(whole(request.prompt_tokens));
        let found = &all[..whole(request.prompt_tokens - 1).min(all.len())];
        let cached = found.iter().take_while(|hash| cache.contains(hash)).count();
        answers += 1;
        let length = whole(request.context_tokens()) - all.len();
        all.extend((0..).take(length).map(|part| named(answers, part, true)));
        // The deepest blocks are evicted first.
        all.into_iter().rev().for_each(|hash| drop(cache.insert(hash, 1, ())));
        u32::try_from(cached).unwrap_or(u32::MAX) * block_tokens
    };
    requests.map(serve).collect()
}

/// A block hash of its own for each part of an id, or of an answer.
fn named(of: u64, part: u32, answer: bool) -> BlockHash {
    let mut hash = [u8::from(answer); 32];
    hash[..8].copy_from_slice(&of.to_le_bytes());
    hash[8..12].copy_from_slice(&part.to_le_bytes());
    BlockHash(hash)
}

/// Measures all systems on a trace, at `rate` requests per second.
///
/// # Errors
/// If a prompt has not one id for each [`HASHED_TOKENS`] tokens.
pub fn run(
    entries: &[Entry],
    rate: f64,
    kv_tokens: Option<u64>,
    done: &(dyn Fn(usize, usize) + Sync),
) -> anyhow::Result<Vec<Row>> {
    let prompts = entries.iter().map(prompt).collect::<anyhow::Result<Vec<Prompt>>>()?;
    let requests = requests(entries, Scale { prompts: 1.0, outputs: 1.0, rate });
    let prompt_tokens: u64 = requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
    let systems = systems(kv_tokens);
    let blocks = systems.first().map_or(0, |(_, setting)| u64::from(setting.blocks()) * u64::from(INSTANCES));
    let cached = one_cache(requests.iter().zip(prompts.iter().map(Prompt::blocks)), BLOCK_TOKENS, blocks);
    let one = Row {
        system: "one cache as large as the pool",
        prompt_tokens,
        cached_tokens: cached.iter().map(|tokens| u64::from(*tokens)).sum(),
        leased_tokens: 0,
        elsewhere_tokens: 0,
        evicted_blocks: 0,
        first_token_s: 0.0,
        failed: 0,
    };
    let row = |at: usize, (system, setting): &(&'static str, Setting)| {
        let mut run = Run::of_prompts(*setting, requests.clone(), prompts.clone());
        run.run();
        let outcomes = &run.seen.outcomes;
        let begun = |(outcome, request): (&super::run::Outcome, &Request)| {
            Some(outcome.first_us?.saturating_sub(super::run::WARM_UP_US + request.arrival_us) as f64 / 1e6)
        };
        let first: Vec<f64> = outcomes.iter().zip(&requests).filter_map(begun).collect();
        done(at, systems.len());
        Row {
            system,
            prompt_tokens,
            cached_tokens: outcomes.iter().map(|outcome| u64::from(outcome.cached)).sum(),
            leased_tokens: run.seen.leased_tokens,
            elsewhere_tokens: outcomes.iter().map(|outcome| u64::from(outcome.elsewhere)).sum(),
            evicted_blocks: run.seen.evicted_blocks,
            first_token_s: first.iter().sum::<f64>() / first.len().max(1) as f64,
            failed: outcomes.iter().filter(|outcome| outcome.end_us.is_none()).count(),
        }
    };
    Ok([one].into_iter().chain(each(&systems, &row)).collect())
}

fn prompt(entry: &Entry) -> anyhow::Result<Prompt> {
    let ids = entry.hash_ids.iter().map(|id| u32::try_from(*id));
    let ids = ids.collect::<Result<Vec<u32>, _>>()?;
    ensure!(
        ids.len() == entry.input_length.div_ceil(HASHED_TOKENS) as usize,
        "a prompt of {} tokens has {} hash_ids, not one for each {HASHED_TOKENS}",
        entry.input_length,
        ids.len()
    );
    Ok(Prompt(ids))
}

/// The rows as a Markdown table.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| system | hits | of the first | leased, of the hits | cached elsewhere | evicted blocks | mean first token, s | failed |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let base = rows.first().map_or(f64::NAN, Row::hit_rate);
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {:.2} % | {:.3} | {:.1} % | {:.2} % | {} | {:.2} | {} |",
            row.system,
            100.0 * row.hit_rate(),
            row.hit_rate() / base,
            100.0 * row.leased_tokens as f64 / row.cached_tokens.max(1) as f64,
            100.0 * row.elsewhere_tokens as f64 / row.prompt_tokens.max(1) as f64,
            row.evicted_blocks,
            row.first_token_s,
            row.failed
        );
    }
    text
}
