//! Fields that chat and completions share: sampling, lengths, stop conditions, reported values.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, text, too_many, wrong_type},
    forms::{self, Asked},
    journal::{self, Resume},
    json::{Json, Kind},
    options::{self, Options},
    rules::{GenerationDefaults, Rules},
    token_ids::{check_vocabulary, token_ids},
};
use lagoon_text::{StopError, StopStrings, stop::STOPS_MAX};
use lagoon_types::{Constraint, SamplingParams, limits::LOGIT_BIAS_MAX};
use rand::Rng;
use std::{collections::BTreeMap, sync::Arc};

/// Validated fields that chat and completions share.
#[derive(Clone, Debug)]
pub(crate) struct Params {
    pub(crate) model: Option<String>,
    /// Maximum of tokens of one sequence; `None`: the endpoint's default.
    pub(crate) max_tokens: Option<u32>,
    /// Tokens before which nothing ends a sequence but its length.
    pub(crate) min_tokens: u32,
    pub(crate) sampling: SamplingParams,
    /// Whether the request has a seed: then equal prompts have equal answers.
    seeded: bool,
    /// The form that answers have.
    pub(crate) form: Option<Asked>,
    /// Sequences per prompt.
    pub(crate) n: usize,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_strings: StopStrings,
    pub(crate) skip_special: bool,
    pub(crate) stream: bool,
    pub(crate) usage: UsageWanted,
    pub(crate) options: Options,
    pub(crate) return_token_ids: bool,
    pub(crate) return_logits: bool,
    /// A response that another server began.
    pub(crate) resume: Option<Resume>,
}

/// The events of a stream that have the usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum UsageWanted {
    #[default]
    Never,
    /// A last chunk of its own.
    Last,
    /// Every chunk, and that one.
    Every,
}

/// Fields of both endpoints that Lagoon does not implement, with the values that change nothing.
pub(crate) const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("user", Neutral::Any),
    ("metadata", Neutral::Any),
    ("request_id", Neutral::Any),
    ("safety_identifier", Neutral::Any),
    ("prompt_cache_key", Neutral::Any),
    // Where another server keeps a prompt's KV, and for how long: here it stays cached while its memory lasts.
    ("cache_prompt", Neutral::Any),
    ("id_slot", Neutral::Any),
    ("slot_id", Neutral::Any),
    ("keep_alive", Neutral::Any),
    ("prompt_cache_retention", Neutral::Any),
    ("session_id", Neutral::Any),
    ("rid", Neutral::Any),
    ("length_penalty", Neutral::Number(1.0)),
    ("best_of", Neutral::Number(1.0)),
    ("use_beam_search", Neutral::Bool(false)),
    ("early_stopping", Neutral::Bool(false)),
    ("spaces_between_special_tokens", Neutral::Bool(true)),
    ("return_tokens_as_token_ids", Neutral::Bool(false)),
    ("guided_decoding_backend", Neutral::Null),
    ("guided_whitespace_pattern", Neutral::Null),
    ("structural_tag", Neutral::Null),
    ("logits_processors", Neutral::Empty),
    ("kv_transfer_params", Neutral::Empty),
    ("vllm_xargs", Neutral::Empty),
    ("thinking_token_budget", Neutral::Null),
    ("repetition_detection", Neutral::Null),
];

impl Params {
    /// Takes the shared fields. `logprobs` differs between the endpoints: the caller takes it.
    pub(crate) fn take(fields: &mut Fields<'_>, rules: Rules<'_>) -> Result<Self, ApiError> {
        fields.neutral(UNSUPPORTED)?;
        fields.neutral(options::LLAMA_CPP_UNSUPPORTED)?;
        fields.rename("repeat_penalty", "repetition_penalty");
        let repeat_last = fields.integer("repeat_last_n", (-1, i64::from(u32::MAX)))?;
        let max_tokens = fields.u32("max_tokens", (0, u32::MAX))?;
        let max_completion = fields.u32("max_completion_tokens", (1, u32::MAX))?;
        let max_tokens = max_completion.or(max_tokens);
        let min_tokens = fields.u32("min_tokens", (0, max_tokens.unwrap_or(u32::MAX)))?.unwrap_or(0);
        let stream = fields.bool("stream", false)?;
        let n = fields.u32("n", (1, u32::try_from(rules.limits.sequences_max).unwrap_or(u32::MAX)))?.unwrap_or(1);
        let mut stop_ids = take_stop_ids(fields, rules)?;
        if !fields.bool("ignore_eos", false)? {
            stop_ids.extend(&rules.defaults.eos_ids);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let resume = take_resume(fields, stream, rules)?;
        let (mut sampling, seeded) = take_sampling(fields, rules.defaults)?;
        sampling.logit_bias = take_logit_bias(fields, rules.vocab_size)?.into();
        options::take_penalties(fields, rules, &mut sampling)?;
        options::check_repeat_last(repeat_last, &sampling, rules.max_model_tokens)?;
        let options = Options::take(fields, rules, stream)?;
        sampling.seed = resume.as_ref().map_or(sampling.seed, |resume| resume.began.seed);
        Ok(Self {
            model: fields.string("model")?,
            max_tokens,
            min_tokens,
            sampling,
            seeded,
            form: forms::take(fields)?,
            n: usize::try_from(n).expect("usize holds u32"),
            stop_ids,
            stop_strings: take_stop_strings(fields)?.including(options.include_stop),
            skip_special: fields.bool("skip_special_tokens", true)?,
            stream,
            usage: take_usage_wanted(fields, stream)?,
            options,
            return_token_ids: fields.bool("return_token_ids", false)?,
            return_logits: take_return_logits(fields, rules.expose_logits)?,
            resume,
        })
    }

    /// Sampling parameters of the request's sequence `index`. Each has its own seed; with a seed in the request, each of its prompt.
    pub(crate) fn sampling_of(&self, index: usize, constraint: Option<Arc<Constraint>>) -> SamplingParams {
        let offset = if self.seeded { index % self.n } else { index };
        let offset = u64::try_from(offset).expect("u64 holds usize");
        SamplingParams { seed: self.sampling.seed.wrapping_add(offset), constraint, ..self.sampling.clone() }
    }
}

/// Sampling parameters, and whether the request has a seed.
fn take_sampling(fields: &mut Fields<'_>, defaults: &GenerationDefaults) -> Result<(SamplingParams, bool), ApiError> {
    let greedy = defaults.do_sample == Some(false);
    let temperature = if greedy { 0.0 } else { defaults.temperature.unwrap_or(1.0) };
    let top_k = fields.integer("top_k", (-1, i64::from(u32::MAX)))?;
    let top_p = fields.number("top_p", (0.0, 1.0))?.or(defaults.top_p).unwrap_or(1.0);
    if top_p <= 0.0 {
        let message = "the field `top_p` must be greater than 0 and at most 1";
        return Err(ApiError::field("top_p", "invalid_value", message));
    }
    let seed = fields
        .take("seed")
        .map(|value| seed_of(value).ok_or_else(|| wrong_type("seed", "an integer of 64 bits", value)));
    let seed = seed.transpose()?;
    let sampling = SamplingParams {
        temperature: fields.number("temperature", (0.0, 100.0))?.unwrap_or(temperature),
        // -1 and 0 both keep all tokens.
        top_k: top_k.map_or(defaults.top_k.unwrap_or(0), |k| u32::try_from(k.max(0)).expect("bounded above")),
        top_p,
        min_p: fields.number("min_p", (0.0, 1.0))?.or(defaults.min_p).unwrap_or(0.0),
        seed: seed.unwrap_or_else(|| rand::rng().random()),
        ..SamplingParams::default()
    };
    Ok((sampling, seed.is_some()))
}

/// Token ids, as strings, with numbers from -100 to 100.
fn take_logit_bias(fields: &mut Fields<'_>, vocab_size: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    const EXPECTED: &str = "an object of token ids (as strings) and numbers from -100 to 100";
    let Some(value) = fields.take(NAME) else { return Ok(Vec::new()) };
    if value.kind() != Kind::Object {
        return Err(wrong_type(NAME, EXPECTED, value));
    }
    let count = value.members().count();
    if count > LOGIT_BIAS_MAX {
        return Err(too_many(NAME, count, LOGIT_BIAS_MAX));
    }
    let mut biases = BTreeMap::new();
    for (name, bias) in value.members() {
        let id = name.read::<String>().ok().and_then(|name| name.parse::<u32>().ok());
        let bias = bias.read::<f32>().ok().filter(|bias| (-100.0..=100.0).contains(bias));
        let (Some(id), Some(bias)) = (id, bias) else { return Err(wrong_type(NAME, EXPECTED, value)) };
        biases.insert(id, bias);
    }
    let biases: Vec<(u32, f32)> = biases.into_iter().collect();
    check_vocabulary(NAME, &biases.iter().map(|(id, _)| *id).collect::<Vec<_>>(), vocab_size)?;
    Ok(biases)
}

/// Any 64-bit integer, signed or not, is a seed.
fn seed_of(value: Json<'_>) -> Option<u64> {
    let signed = || value.read::<i64>().map(i64::cast_unsigned);
    value.read::<u64>().or_else(|_too_small| signed()).ok()
}

fn take_stop_ids(fields: &mut Fields<'_>, rules: Rules<'_>) -> Result<Vec<u32>, ApiError> {
    let Some(value) = fields.take("stop_token_ids") else { return Ok(Vec::new()) };
    let (ids, count) = token_ids("stop_token_ids", value, rules.limits.stop_ids_max)?;
    if count > rules.limits.stop_ids_max {
        return Err(too_many("stop_token_ids", count, rules.limits.stop_ids_max));
    }
    check_vocabulary("stop_token_ids", &ids, rules.vocab_size)?;
    Ok(ids)
}

fn stops(made: Result<StopStrings, StopError>) -> Result<StopStrings, ApiError> {
    made.map_err(|error| ApiError::field("stop", "invalid_value", error.to_string()))
}

fn take_stop_strings(fields: &mut Fields<'_>) -> Result<StopStrings, ApiError> {
    const EXPECTED: &str = "a string or a list of strings";
    let Some(value) = fields.take("stop") else { return stops(StopStrings::new(Vec::new())) };
    let strings = match value.kind() {
        Kind::Text => vec![text("stop", value)?],
        Kind::List => {
            let count = value.items().count();
            if count > STOPS_MAX {
                return stops(Err(StopError::TooMany { count }));
            }
            let string = |item: Json<'_>| match item.kind() {
                Kind::Text => text("stop", item),
                _ => Err(wrong_type("stop", EXPECTED, item)),
            };
            value.items().map(string).collect::<Result<_, _>>()?
        }
        _ => return Err(wrong_type("stop", EXPECTED, value)),
    };
    stops(StopStrings::new(strings))
}

fn take_usage_wanted(fields: &mut Fields<'_>, stream: bool) -> Result<UsageWanted, ApiError> {
    let Some(value) = fields.take("stream_options") else { return Ok(UsageWanted::Never) };
    if !stream {
        let message = "the field `stream_options` is only allowed when `stream` is true";
        return Err(ApiError::field("stream_options", "invalid_value", message));
    }
    let mut options = Fields::nested("stream_options", value)?;
    let include = options.bool("include_usage", false)?;
    let every = options.bool("continuous_usage_stats", false)?;
    options.neutral(&[("include_obfuscation", Neutral::Bool(false))])?;
    options.finish()?;
    // As in vLLM, which reads it with `include_usage` only.
    Ok(match (include, every) {
        (false, _) => UsageWanted::Never,
        (true, false) => UsageWanted::Last,
        (true, true) => UsageWanted::Every,
    })
}

/// Takes the gateway's field with a response that another server began.
fn take_resume(fields: &mut Fields<'_>, stream: bool, rules: Rules<'_>) -> Result<Option<Resume>, ApiError> {
    let Some(value) = fields.take(journal::FIELD) else { return Ok(None) };
    let wrong = |message: String| ApiError::field(journal::FIELD, "invalid_value", message);
    if !stream {
        return Err(wrong(format!("the field `{}` is only allowed when `stream` is true", journal::FIELD)));
    }
    let resume: Resume = value
        .read()
        .map_err(|error| wrong(format!("the field `{}` has no partial response: {error}", journal::FIELD)))?;
    for output in &resume.sequences {
        check_vocabulary(journal::FIELD, &output.tokens, rules.vocab_size)?;
    }
    Ok(Some(resume))
}

fn take_return_logits(fields: &mut Fields<'_>, exposed: bool) -> Result<bool, ApiError> {
    let wanted = fields.bool("return_logits", false)?;
    if wanted && !exposed {
        let message = "the field `return_logits` is not supported: this server was started without --expose-logits";
        return Err(ApiError::field("return_logits", "unsupported_parameter", message));
    }
    Ok(wanted)
}
