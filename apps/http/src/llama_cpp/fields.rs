//! Fields of `/completion`: their names in [`Params`], and reports that it has no place for.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, text, too_many, wrong_type},
    generations::{Longest, Prompt, prompt_list},
    json::{Json, Kind},
    params::Params,
    state::ServerState,
    text_jobs::Asker,
    token_ids::check_vocabulary,
};
use lagoon_types::limits::{BAD_WORDS_MAX, LOGIT_BIAS_MAX};

/// Reports that `/completion` has no place for.
pub(crate) const UNREPORTED: &[(&str, Neutral)] = &[
    ("stream_options", Neutral::Null),
    ("include_stop_str_in_output", Neutral::Bool(false)),
    ("prompt_logprobs", Neutral::Null),
    ("return_logits", Neutral::Bool(false)),
];

/// What a request wants beside [`Params`].
pub(crate) struct Wanted {
    pub(crate) params: Params,
    /// Only the prompt is computed (`n_predict` 0).
    pub(crate) prompt_only: bool,
    pub(crate) return_tokens: bool,
    pub(crate) timings: bool,
}

/// Takes all fields but the prompt.
pub(crate) fn take(state: &ServerState, fields: &mut Fields<'_>) -> Result<Wanted, ApiError> {
    fields.neutral(UNREPORTED)?;
    let most = i64::from(u32::MAX);
    // Negative: until the model ends the answer.
    let max_tokens = fields.integer("max_tokens", (-2, most))?;
    let n_predict = fields.integer("n_predict", (-2, most))?.or(max_tokens);
    fields.rename("n_cmpl", "n");
    fields.drop_number("seed", -1);
    let logprobs = fields.u32("n_probs", (0, state.limits.logprobs_max))?.filter(|n| *n > 0);
    let (return_tokens, timings) = (fields.bool("return_tokens", false)?, fields.bool("timings_per_token", false)?);
    let biases = fields.take("logit_bias");
    if let Some(object) = biases.filter(|biases| biases.kind() == Kind::Object) {
        fields.put("logit_bias", object);
    }
    let rules = state.rules();
    let mut params = Params::take(fields, rules)?;
    params.max_tokens = n_predict.and_then(|n| u32::try_from(n).ok());
    params.sampling.logprobs = logprobs;
    if let Some(list) = biases.filter(|biases| biases.kind() != Kind::Object) {
        take_pairs(list, &mut params, rules.vocab_size)?;
    }
    // The stop string is removed from the text again: the response names it.
    params.stop_strings = params.stop_strings.including(true);
    let return_tokens = return_tokens || params.return_token_ids;
    Ok(Wanted { prompt_only: params.max_tokens == Some(0), params, return_tokens, timings })
}

/// `logit_bias` as a list of pairs: a token id, and a number or `false` (never this token).
fn take_pairs(list: Json<'_>, params: &mut Params, vocab_size: u32) -> Result<(), ApiError> {
    const NAME: &str = "logit_bias";
    const EXPECTED: &str = "a list of pairs of a token id and a number from -100 to 100 or false";
    if list.kind() != Kind::List {
        return Err(wrong_type(NAME, EXPECTED, list));
    }
    let count = list.items().count();
    if count > LOGIT_BIAS_MAX.min(BAD_WORDS_MAX) {
        return Err(too_many(NAME, count, LOGIT_BIAS_MAX.min(BAD_WORDS_MAX)));
    }
    let (mut biases, mut never) = (std::collections::BTreeMap::new(), Vec::new());
    for pair in list.items() {
        let (id, bias): (u32, serde_json::Value) = pair.read().map_err(|_wrong| wrong_type(NAME, EXPECTED, pair))?;
        #[allow(clippy::cast_possible_truncation, reason = "rounding a bias to f32 is intended")]
        match bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)) {
            Some(bias) => drop(biases.insert(id, bias as f32)),
            None if bias == false => never.push(id),
            None => return Err(wrong_type(NAME, EXPECTED, pair)),
        }
    }
    check_vocabulary(NAME, &never, vocab_size)?;
    check_vocabulary(NAME, &biases.keys().copied().collect::<Vec<_>>(), vocab_size)?;
    params.sampling.logit_bias = biases.into_iter().collect();
    params.sampling.bad_words = never.into_iter().map(|id| Box::from([id])).collect();
    Ok(())
}

/// The prompts: one, of a text, or of texts and token ids mixed; or several, each a text or a list of token ids.
pub(crate) fn prompts(
    state: &ServerState,
    prompt: Json<'_>,
    longest: Longest,
    asker: &Asker<'_>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    const NAME: &str = "prompt";
    let has = |kind| prompt.items().any(|item| item.kind() == kind);
    if has(Kind::Number) && has(Kind::Text) {
        return Ok(vec![mixed(state, prompt, longest, asker)?]);
    }
    let list = prompt_list(NAME, prompt, state.limits.sequences_max, longest)?;
    let tokens = |prompt| match prompt {
        Prompt::Text(text) => state.encode(&text, true, asker),
        Prompt::Tokens(ids) => Ok(ids),
    };
    list.into_iter().map(tokens).collect()
}

/// A prompt of texts and token ids, in their order; only a text at its beginning has the special tokens of a beginning.
fn mixed(state: &ServerState, prompt: Json<'_>, longest: Longest, asker: &Asker<'_>) -> Result<Vec<u32>, ApiError> {
    let mut tokens = Vec::new();
    for (index, item) in prompt.items().enumerate() {
        match item.kind() {
            Kind::Text => tokens.extend(state.encode(&text("prompt", item)?, index == 0, asker)?),
            _ => tokens.push(item.read::<u32>().map_err(|_wrong| wrong_type("prompt", "texts and token ids", item))?),
        }
        if tokens.len() > longest.prompt as usize {
            let message = format!("the prompt has more than {} tokens", longest.prompt);
            return Err(ApiError::field("prompt", "context_length_exceeded", message));
        }
    }
    Ok(tokens)
}
