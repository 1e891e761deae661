//! `POST /v1/completions`, and how requests of every endpoint that generates are submitted and answered.

use crate::{
    answer::{Answer, Echo, Progress},
    constraints,
    engine::{CancelGuard, EngineInfo, Generation},
    error::ApiError,
    fields::{Fields, Neutral, required, text, too_many, wrong_type},
    frames,
    generate::{Sequence, TextRules, pieces},
    journal::{self, Began, SentTokens},
    json::{Json, Kind},
    keys::Caller,
    metrics,
    options::check_max_tokens,
    params::Params,
    piece::Pieces,
    reply::{Endpoint, token_text},
    state::{ServerState, unix_seconds},
    text_jobs::Asker,
    token_ids::{check_vocabulary, last_token_ids, token_ids},
    tools::ChatParser,
};
use axum::{
    body::Bytes,
    extract::{Request, State},
    http::HeaderMap,
    response::Response,
};
use lagoon_text::{IncrementalDetokenizer, parse::ToolFormat};
use lagoon_types::{
    CONTEXT, CachedTokens, Constraint, FinishReason, GenerateRequest, RequestError, RequestOptions, TokenEvent,
};
use rand::Rng;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Default length of a completion, in tokens, as in vLLM and OpenAI's API.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

pub(crate) const UNSUPPORTED: &[(&str, Neutral)] = &[("suffix", Neutral::Empty), ("prompt_embeds", Neutral::Null)];

/// `POST /v1/completions`.
pub(crate) async fn completions(
    State(state): State<Arc<ServerState>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    generate(&state, read(&state, caller, request, prompts).await?).await
}

pub(crate) fn prompts(
    state: &ServerState,
    body: Bytes,
    journal: bool,
    caller: Caller,
    asker: &Asker<'_>,
) -> Result<Ready, ApiError> {
    let mut fields = Fields::parse(&body)?;
    let mut params = Params::take(&mut fields, state.rules())?;
    params.sampling.logprobs = fields.u32("logprobs", (0, state.limits.logprobs_max))?;
    let special = fields.bool("add_special_tokens", true)?;
    let echo = fields.bool("echo", false)?;
    check_max_tokens(params.max_tokens, echo)?;
    let prompt = required(&mut fields, "prompt")?;
    fields.neutral(UNSUPPORTED)?;
    fields.finish()?;
    let info = state.check_model(params.model.as_deref())?;

    let constraint = constraints::of_completion(state, params.form.take())?;
    let prompt_only = params.max_tokens == Some(0);
    let max_tokens = params.max_tokens.unwrap_or(COMPLETION_TOKENS_DEFAULT).max(1);
    let longest = Longest { prompt: info.max_model_tokens, answer: max_tokens, truncates: params.options.truncates() };
    let list = prompt_list("prompt", prompt, state.limits.sequences_max, longest)?;
    drop(body);
    let (mut prompts, mut texts) = (Vec::with_capacity(list.len()), Vec::new());
    for prompt in list {
        let (mut tokens, text) = match prompt {
            Prompt::Text(text) => (state.encode(&text, special, asker)?, Some(text)),
            Prompt::Tokens(ids) => (ids, None),
        };
        let cut = params.options.truncate(&mut tokens, info.max_model_tokens.saturating_sub(max_tokens))?;
        let text = text.filter(|_| !cut);
        texts.extend(echo.then(|| text.unwrap_or_else(|| state.tokenizer.decode(&tokens, params.skip_special))));
        prompts.push(Prepared { tokens, max_tokens, parser: None, constraint: constraint.clone() });
    }
    params.sampling.bad_words = params.options.encode_bad_words(state, asker)?.into();
    if echo {
        let logprobs = params.options.prompt_logprobs.max(params.sampling.logprobs);
        params.options.scored = params.sampling.logprobs.and(logprobs);
    }
    let echo = echo.then_some(Echo { texts, prompt_only });
    let ask = Ask { endpoint: Endpoint::Completions, prompts, echo, journal, caller };
    Ok(Ready { ask, params, info })
}

/// One prompt of a completion request.
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Maximum tokens of a prompt and of a response.
#[derive(Clone, Copy)]
pub(crate) struct Longest {
    pub(crate) prompt: u32,
    pub(crate) answer: u32,
    /// Only the last tokens of a longer prompt are kept.
    pub(crate) truncates: bool,
}

/// The four shapes of the field `name`: text, token ids, a list of texts, a list of lists of token ids.
pub(crate) fn prompt_list(
    name: &str,
    value: Json<'_>,
    count_max: usize,
    longest: Longest,
) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";
    match (value.kind(), value.items().next().map(Json::kind)) {
        (Kind::Text, _) => Ok(vec![Prompt::Text(text(name, value)?)]),
        (Kind::List, None) => {
            Err(ApiError::field(name, "invalid_value", format!("the field `{name}` must not be empty")))
        }
        (Kind::List, Some(Kind::Number)) => Ok(vec![prompt_tokens(name, value, longest)?]),
        (Kind::List, Some(_)) => {
            let count = value.items().count();
            if count > count_max {
                return Err(too_many(name, count, count_max));
            }
            let prompt = |item: Json<'_>| match item.kind() {
                Kind::Text => Ok(Prompt::Text(text(name, item)?)),
                Kind::List => prompt_tokens(name, item, longest),
                _ => Err(wrong_type(name, EXPECTED, item)),
            };
            value.items().map(prompt).collect()
        }
        _ => Err(wrong_type(name, EXPECTED, value)),
    }
}

/// A prompt of token ids; of one longer than the model's context, the last ones if that is wanted, else none.
fn prompt_tokens(name: &str, value: Json<'_>, longest: Longest) -> Result<Prompt, ApiError> {
    if longest.truncates {
        return Ok(Prompt::Tokens(last_token_ids(name, value, longest.prompt as usize)?));
    }
    let (ids, count) = token_ids(name, value, longest.prompt as usize)?;
    if count <= ids.len() {
        return Ok(Prompt::Tokens(ids));
    }
    let prompt_tokens = u64::try_from(count).unwrap_or(u64::MAX);
    let error = RequestError::TooLong {
        prompt_tokens,
        needed_tokens: prompt_tokens.saturating_add(longest.answer.into()),
        limit_tokens: longest.prompt.into(),
        limit_name: CONTEXT,
    };
    Err(ApiError::from_request_error(&error, 0))
}

/// Reads a request by `of`, which gets its body, whether its response has a journal, and its caller.
pub(crate) async fn read<T: Send + 'static>(
    state: &Arc<ServerState>,
    caller: Caller,
    request: Request,
    of: fn(&ServerState, Bytes, bool, Caller, &Asker<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let journal = wants_journal(request.headers());
    state.with_body(request, move |state, body, asker| of(state, body, journal, caller, asker)).await
}

pub(crate) fn wants_journal(headers: &HeaderMap) -> bool {
    headers.contains_key(journal::HEADER)
}

/// A prompt in tokens, and what its answers are held to.
pub(crate) struct Prepared {
    pub(crate) tokens: Vec<u32>,
    /// Maximum of tokens of one answer.
    pub(crate) max_tokens: u32,
    /// Of an answer's text.
    pub(crate) parser: Option<ChatParser>,
    pub(crate) constraint: Option<Arc<Constraint>>,
}

/// A request's prompts.
pub(crate) struct Ask {
    pub(crate) endpoint: Endpoint,
    pub(crate) prompts: Vec<Prepared>,
    /// The prompts' texts, if they are part of the answer.
    pub(crate) echo: Option<Echo>,
    pub(crate) journal: bool,
    pub(crate) caller: Caller,
}

impl Ask {
    fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }
}

/// A request ready to be submitted.
pub(crate) struct Ready {
    pub(crate) ask: Ask,
    pub(crate) params: Params,
    pub(crate) info: EngineInfo,
}

/// Submits all sequences and builds the response.
pub(crate) async fn generate(state: &ServerState, ready: Ready) -> Result<Response, ApiError> {
    let (output, running) = start(state, &ready)?;
    let Ready { ask, params, info } = ready;
    let stream = params.stream;
    let answer = answer(state, ask, params, &output, info.model_id);
    if stream { frames::respond(answer, running, &state.limits).await } else { answer.whole(running).await }
}

/// Checks a request and submits all of its sequences. Returns their tokens that another server has sent, and the rest.
pub(crate) fn start(state: &ServerState, ready: &Ready) -> Result<(Vec<SentTokens>, Pieces), ApiError> {
    let Ready { ask, params, info } = ready;
    let name = if ask.endpoint == Endpoint::Completions { "prompt" } else { "messages" };
    let sequences = ask.prompts.len() * params.n;
    if sequences > state.limits.sequences_max {
        return Err(too_many_sequences(sequences, state.limits.sequences_max));
    }
    for Prepared { tokens, .. } in &ask.prompts {
        if tokens.is_empty() {
            return Err(ApiError::field(name, "invalid_value", format!("the field `{name}` has no tokens")));
        }
        check_vocabulary(name, tokens, info.vocab_size)?;
    }
    let mut output = params.resume.as_ref().map(|resume| resume.sequences.clone()).unwrap_or_default();
    if output.len() > sequences {
        return Err(too_many(journal::FIELD, output.len(), sequences));
    }
    output.resize(sequences, SentTokens::default());
    let running = submit(state, params, ask, &output, info.max_model_tokens)?;
    ask.caller.record().begins(&info.model_id, ask.prompt_tokens());
    Ok((output, running))
}

fn too_many_sequences(sequences: usize, limit: usize) -> ApiError {
    let message = format!("the field `n` asks for {sequences} sequences over all prompts, but the limit is {limit}");
    ApiError::field("n", "invalid_value", message)
}

/// Submits all sequences or none: if one is refused, dropping the earlier ones cancels them. `output`: the tokens of each
/// sequence that another server has sent.
fn submit(
    state: &ServerState,
    params: &Params,
    ask: &Ask,
    output: &[SentTokens],
    max_model_tokens: u32,
) -> Result<Pieces, ApiError> {
    let mut sequences = Vec::with_capacity(output.len());
    for (index, output) in output.iter().enumerate().filter(|(_, output)| !output.finished) {
        let prompt = &ask.prompts[index / params.n];
        let parser = prompt.parser.as_ref();
        let mut rules = TextRules {
            decoder: IncrementalDetokenizer::new(Arc::clone(&state.tokenizer), params.skip_special)
                .showing(parser.map_or_else(Vec::new, |parser| parser.marks(&state.tokenizer))),
            parser: parser.map(|parser| parser.answer.clone()),
            stop_strings: params.stop_strings.clone(),
            stop_ids: params.stop_ids.clone(),
            min_tokens: params.min_tokens,
            every_token: params.return_token_ids,
            include_stop: params.options.include_stop,
        };
        rules.catch_up(&output.tokens);
        let room = (max_model_tokens as usize).saturating_sub(prompt.tokens.len()).min(prompt.max_tokens as usize);
        let generation = match rules.is_over(&output.tokens, room).filter(|_| !output.tokens.is_empty()) {
            Some(reason) => ended(reason),
            None => {
                let request = GenerateRequest {
                    prompt: [&prompt.tokens[..], &output.tokens[..]].concat(),
                    answered: u32::try_from(output.tokens.len()).unwrap_or(u32::MAX),
                    max_tokens: prompt.max_tokens,
                    sampling: params.sampling_of(index, prompt.constraint.clone()),
                    min_tokens: params.min_tokens.min(prompt.max_tokens),
                    stop_ids: params.stop_ids.clone(),
                    return_logits: params.return_logits,
                    options: request_options(params, ask, index, output),
                };
                let submitted = state.engine.submit(request);
                submitted.map_err(|error| ApiError::from_request_error(&error, state.limits.retry_after_s))?
            }
        };
        sequences.push(Sequence::new(index, generation, rules, &state.limits));
    }
    let prompt_tokens = ask.prompt_tokens();
    metrics::prompt_tokens(prompt_tokens);
    ask.caller.charge(prompt_tokens as u64);
    Ok(pieces(sequences))
}

/// How sequence `index` is served, of which another server has sent `output`. Its prompt's log-probabilities are computed once
/// a prompt, unless each sequence sends them itself: in the first chunk of a stream.
fn request_options(params: &Params, ask: &Ask, index: usize, output: &SentTokens) -> RequestOptions {
    let once = params.stream || index.is_multiple_of(params.n);
    let scored = params.options.scored.or(params.options.prompt_logprobs);
    RequestOptions {
        priority: params.options.priority,
        cache_salt: params.options.salt(ask.caller.tenant()).into(),
        prompt_logprobs: scored.filter(|_| once && output.tokens.is_empty()),
        embedding: None,
        may_hand_back: ask.caller.takes_back() && ask.prompts.len() * params.n == 1 && output.tokens.is_empty(),
    }
}

/// A generation that only reports its end.
fn ended(reason: FinishReason) -> Generation {
    let (sender, events) = mpsc::channel(1);
    let finished = TokenEvent::Finished { reason, prompt_tokens: 0, completion_tokens: 0 };
    sender.try_send(finished).expect("an empty channel has room");
    Generation { events, guard: CancelGuard::new(|| {}) }
}

fn answer(state: &ServerState, ask: Ask, params: Params, output: &[SentTokens], model: String) -> Answer {
    let prefix = if ask.endpoint == Endpoint::Completions { "cmpl" } else { "chatcmpl" };
    let began = params.resume.map_or_else(
        || Began {
            id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
            created: unix_seconds(),
            seed: params.sampling.seed,
        },
        |resume| resume.began,
    );
    let logprobs = params.sampling.logprobs.is_some();
    let characters = |id: &u32| token_text(&state.tokenizer, *id).chars().count();
    let count = |tokens: &[u32]| tokens.iter().map(characters).sum::<usize>();
    let before = |index: usize| if ask.echo.is_some() { count(&ask.prompts[index / params.n].tokens) } else { 0 };
    let offset = |index: usize, output: &SentTokens| {
        // The prompt's characters are counted when it is sent.
        if logprobs && !output.tokens.is_empty() { before(index) + count(&output.tokens) } else { 0 }
    };
    let progress = output.iter().enumerate().map(|(index, output)| Progress::after(output, offset(index, output)));
    let progress = progress.collect();
    let prompts = ask.prompts.len();
    let parser = ask.prompts.first().and_then(|prompt| prompt.parser.as_ref());
    Answer {
        endpoint: ask.endpoint,
        journal: ask.journal.then(|| began.clone()),
        id: began.id,
        model,
        created: began.created,
        tokenizer: Arc::clone(&state.tokenizer),
        progress,
        short_call_ids: parser.is_some_and(|parser| parser.formats.tools.is_some_and(ToolFormat::has_short_ids)),
        prompts: ask.prompts.into_iter().map(|prompt| prompt.tokens).collect(),
        n: params.n,
        usage: params.usage,
        cached: vec![CachedTokens::default(); prompts],
        scores: vec![Vec::new(); prompts],
        prompt_logprobs: params.options.prompt_logprobs,
        logprobs_top: params.sampling.logprobs.unwrap_or(0) as usize,
        echo: ask.echo,
        return_token_ids: params.return_token_ids,
        logprobs,
        logits: params.return_logits,
        caller: ask.caller,
    }
}
