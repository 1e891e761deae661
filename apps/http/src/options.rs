//! Fields of chat and completions beside the common ones: penalties and excluded tokens, what is reported of the prompt, and
//! how a request is served.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, out_of_range, text, too_many, wrong_type},
    json::{Json, Kind},
    rules::Rules,
    state::ServerState,
    text_jobs::Asker,
    token_ids::{check_vocabulary, token_ids},
};
use lagoon_types::{
    SamplingParams,
    limits::{
        ALLOWED_TOKENS_MAX, BAD_WORD_TOKENS_MAX, BAD_WORDS_MAX, CACHE_SALT_BYTES_MAX, PENALTY_MAX,
        REPETITION_PENALTY_RANGE,
    },
};

/// Fields of llama.cpp that Lagoon does not implement, with the values that change nothing. Its clients send them to chat and
/// completions, too.
pub(crate) const LLAMA_CPP_UNSUPPORTED: &[(&str, Neutral)] = &[
    ("dynatemp_range", Neutral::Number(0.0)),
    ("typical_p", Neutral::Number(1.0)),
    ("typ_p", Neutral::Number(1.0)),
    ("tfs_z", Neutral::Number(1.0)),
    ("top_n_sigma", Neutral::Number(-1.0)),
    ("min_keep", Neutral::Number(0.0)),
    ("dry_multiplier", Neutral::Number(0.0)),
    ("xtc_probability", Neutral::Number(0.0)),
    ("mirostat", Neutral::Number(0.0)),
    ("n_indent", Neutral::Number(0.0)),
    ("t_max_predict_ms", Neutral::Number(0.0)),
    ("samplers", Neutral::Empty),
    ("lora", Neutral::Empty),
    ("image_data", Neutral::Empty),
    ("response_fields", Neutral::Empty),
    ("post_sampling_probs", Neutral::Bool(false)),
    ("penalize_nl", Neutral::Bool(false)),
    ("reasoning_format", Neutral::Text(&["auto", "deepseek"])),
    // Parameters of rules that are off, memory that is managed otherwise, and progress that is not reported.
    ("n_keep", Neutral::Any),
    ("n_discard", Neutral::Any),
    ("dynatemp_exponent", Neutral::Any),
    ("dry_base", Neutral::Any),
    ("dry_allowed_length", Neutral::Any),
    ("dry_penalty_last_n", Neutral::Any),
    ("dry_sequence_breakers", Neutral::Any),
    ("xtc_threshold", Neutral::Any),
    ("mirostat_tau", Neutral::Any),
    ("mirostat_eta", Neutral::Any),
    ("return_progress", Neutral::Any),
];

/// Validated fields that change what is reported or how a request is served, and words that need the tokenizer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Texts that the answer does not contain.
    bad_words: Vec<String>,
    /// Whether what ends an answer is part of it.
    pub(crate) include_stop: bool,
    truncation: Truncation,
    pub(crate) priority: i32,
    cache_salt: String,
    /// Alternatives to report per token of the prompt.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Alternatives to compute per token of an echoed prompt, for its `logprobs`.
    pub(crate) scored: Option<u32>,
}

impl Options {
    pub(crate) fn take(fields: &mut Fields<'_>, rules: Rules<'_>, stream: bool) -> Result<Self, ApiError> {
        let truncation = Truncation::take(fields)?;
        let prompt_logprobs = fields.u32("prompt_logprobs", (0, rules.limits.logprobs_max))?;
        if stream && prompt_logprobs.is_some() {
            let message = "the field `prompt_logprobs` is not available when `stream` is true";
            return Err(ApiError::field("prompt_logprobs", "invalid_value", message));
        }
        Ok(Self {
            bad_words: take_bad_words(fields)?,
            include_stop: fields.bool("include_stop_str_in_output", false)?,
            truncation,
            priority: take_priority(fields)?,
            cache_salt: take_cache_salt(fields)?,
            prompt_logprobs,
            scored: None,
        })
    }

    /// Whether only the last tokens of prompts are used.
    pub(crate) fn truncates(&self) -> bool {
        self.truncation.truncates()
    }

    /// Cuts a prompt to its last tokens; `room`: as many as the model takes beside the answer. Returns whether tokens were removed.
    pub(crate) fn truncate(&self, prompt: &mut Vec<u32>, room: u32) -> Result<bool, ApiError> {
        self.truncation.apply(prompt, room)
    }

    /// The salt of the prefix cache: no other tenant (by its key) has it, whatever `cache_salt` it sends.
    pub(crate) fn salt(&self, tenant: &str) -> String {
        salt(tenant, &self.cache_salt)
    }

    /// The token sequences of `bad_words`, by vLLM's rule: each word's tokens, and those behind a space where they differ in
    /// the first token only.
    pub(crate) fn encode_bad_words(&self, state: &ServerState, asker: &Asker<'_>) -> Result<Vec<Box<[u32]>>, ApiError> {
        let mut sequences = Vec::with_capacity(2 * self.bad_words.len());
        for word in &self.bad_words {
            let word = word.trim_start();
            let alone = state.encode(word, false, asker)?;
            let spaced = state.encode(&format!(" {word}"), false, asker)?;
            if alone.len().max(spaced.len()) > BAD_WORD_TOKENS_MAX {
                let message = format!("a text of the field `bad_words` has more than {BAD_WORD_TOKENS_MAX} tokens");
                return Err(ApiError::field("bad_words", "invalid_value", message));
            }
            let differs = spaced.len() == alone.len() && spaced.first() != alone.first();
            sequences.extend([Some(alone), differs.then_some(spaced)].into_iter().flatten().map(Vec::into_boxed_slice));
        }
        sequences.retain(|sequence| !sequence.is_empty());
        Ok(sequences)
    }
}

/// Only the last so many tokens of a prompt are used; -1: as many as the model takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Truncation(Option<i64>);

impl Truncation {
    pub(crate) fn take(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let kept = fields.integer("truncate_prompt_tokens", (-1, i64::from(u32::MAX)))?;
        if kept == Some(0) {
            let message = "the field `truncate_prompt_tokens` must be -1 or at least 1";
            return Err(ApiError::field("truncate_prompt_tokens", "invalid_value", message));
        }
        Ok(Self(kept))
    }

    pub(crate) fn truncates(self) -> bool {
        self.0.is_some()
    }

    /// See [`Options::truncate`].
    pub(crate) fn apply(self, prompt: &mut Vec<u32>, room: u32) -> Result<bool, ApiError> {
        let Some(kept) = self.0 else { return Ok(false) };
        let kept = if kept < 0 { room as usize } else { usize::try_from(kept).unwrap_or(usize::MAX) };
        if kept == 0 {
            let message = "the field `max_tokens` leaves no room for a prompt\nhint: lower it";
            return Err(ApiError::field("max_tokens", "context_length_exceeded", message));
        }
        let removed = prompt.len().saturating_sub(kept);
        prompt.drain(..removed);
        Ok(removed > 0)
    }
}

pub(crate) fn take_priority(fields: &mut Fields<'_>) -> Result<i32, ApiError> {
    let priority = fields.integer("priority", (i64::from(i32::MIN), i64::from(i32::MAX)))?.unwrap_or(0);
    Ok(i32::try_from(priority).expect("bounded above"))
}

/// The salt of the prefix cache: see [`Options::salt`].
pub(crate) fn salt(tenant: &str, cache_salt: &str) -> String {
    if tenant.is_empty() && cache_salt.is_empty() {
        String::new()
    } else {
        // A key's name has no control characters.
        format!("{tenant}\0{cache_salt}")
    }
}

/// Takes penalties and `allowed_token_ids`.
pub(crate) fn take_penalties(
    fields: &mut Fields<'_>,
    rules: Rules<'_>,
    sampling: &mut SamplingParams,
) -> Result<(), ApiError> {
    let range = (f64::from(-PENALTY_MAX), f64::from(PENALTY_MAX));
    sampling.presence_penalty = fields.number("presence_penalty", range)?.unwrap_or(0.0);
    sampling.frequency_penalty = fields.number("frequency_penalty", range)?.unwrap_or(0.0);
    let (least, largest) = REPETITION_PENALTY_RANGE;
    // The least is no f64: a literal 0.01 is within the range.
    let range = (f64::from(least).min(0.01), f64::from(largest));
    let repetition = fields.number("repetition_penalty", range)?;
    sampling.repetition_penalty = repetition.map_or(1.0, |penalty| penalty.max(least));
    let Some(value) = fields.take("allowed_token_ids") else { return Ok(()) };
    let (mut ids, count) = token_ids("allowed_token_ids", value, ALLOWED_TOKENS_MAX)?;
    if count > ALLOWED_TOKENS_MAX {
        return Err(too_many("allowed_token_ids", count, ALLOWED_TOKENS_MAX));
    }
    if ids.is_empty() {
        let message = "the field `allowed_token_ids` must not be empty";
        return Err(ApiError::field("allowed_token_ids", "invalid_value", message));
    }
    check_vocabulary("allowed_token_ids", &ids, rules.vocab_size)?;
    ids.sort_unstable();
    ids.dedup();
    sampling.allowed_token_ids = ids.into();
    Ok(())
}

fn take_bad_words(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    const NAME: &str = "bad_words";
    const EXPECTED: &str = "a list of strings";
    let Some(value) = fields.take(NAME) else { return Ok(Vec::new()) };
    if value.kind() != Kind::List {
        return Err(wrong_type(NAME, EXPECTED, value));
    }
    let count = value.items().count();
    if count > BAD_WORDS_MAX / 2 {
        return Err(too_many(NAME, count, BAD_WORDS_MAX / 2));
    }
    let word = |item: Json<'_>| {
        let word =
            if item.kind() == Kind::Text { text(NAME, item)? } else { return Err(wrong_type(NAME, EXPECTED, item)) };
        if word.trim_start().is_empty() {
            return Err(ApiError::field(NAME, "invalid_value", "the field `bad_words` has an empty text"));
        }
        Ok(word)
    };
    value.items().map(word).collect()
}

pub(crate) fn take_cache_salt(fields: &mut Fields<'_>) -> Result<String, ApiError> {
    const NAME: &str = "cache_salt";
    let salt = fields.string(NAME)?.unwrap_or_default();
    if salt.len() > CACHE_SALT_BYTES_MAX / 2 {
        let message =
            format!("the field `{NAME}` has {} bytes, at most {} are allowed", salt.len(), CACHE_SALT_BYTES_MAX / 2);
        return Err(ApiError::field(NAME, "invalid_value", message));
    }
    Ok(salt)
}

/// Refuses `max_tokens` 0 where nothing but an answer would be returned.
pub(crate) fn check_max_tokens(max_tokens: Option<u32>, echo: bool) -> Result<(), ApiError> {
    if max_tokens == Some(0) && !echo {
        return Err(out_of_range("max_tokens", &0, &1, &u32::MAX));
    }
    Ok(())
}

/// Refuses `repeat_last_n` where penalties would count fewer than all tokens, of which there are at most `tokens_max`.
pub(crate) fn check_repeat_last(last: Option<i64>, sampling: &SamplingParams, tokens_max: u32) -> Result<(), ApiError> {
    if last.is_some_and(|n| (0..i64::from(tokens_max)).contains(&n)) && sampling.has_penalties() {
        let message = "the field `repeat_last_n` is not supported: penalties count all tokens\nhint: -1 says so";
        return Err(ApiError::field("repeat_last_n", "unsupported_parameter", message));
    }
    Ok(())
}
