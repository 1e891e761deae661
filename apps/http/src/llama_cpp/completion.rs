//! `POST /completion`.

use super::{
    fields::{self, Wanted},
    reply::{Completion, End, Settings, StopType, Timings, probabilities},
};
use crate::{
    constraints,
    error::ApiError,
    fields::{Fields, required, too_many},
    frames::{self, Streamed},
    generations::{Ask, Longest, Prepared, Ready, read, start},
    journal::{Began, Entry, SentTokens},
    keys::Caller,
    params::Params,
    piece::{Finish, Piece, Pieces, Token},
    reply::Endpoint,
    state::{ServerState, unix_seconds},
    text_jobs::Asker,
};
use axum::{
    body::Bytes,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use lagoon_text::Tokenizer;
use lagoon_types::limits::BAD_WORDS_MAX;
use rand::Rng;
use std::{sync::Arc, time::Instant};

/// A request in tokens.
pub(crate) struct Asked {
    ready: Ready,
    prompt_only: bool,
    return_tokens: bool,
    timings: bool,
}

/// `POST /completion`.
pub(crate) async fn completion(
    State(state): State<Arc<ServerState>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = read(&state, caller, request, ask).await?;
    let (output, pieces) = start(&state, &asked.ready)?;
    let stream = asked.ready.params.stream;
    let answer = Answer::new(&state, asked, &output);
    if stream { frames::respond(answer, pieces, &state.limits).await } else { answer.whole(pieces).await }
}

pub(crate) fn ask(
    state: &ServerState,
    body: Bytes,
    journal: bool,
    caller: Caller,
    asker: &Asker<'_>,
) -> Result<Asked, ApiError> {
    let mut of = Fields::parse(&body)?;
    let Wanted { mut params, prompt_only, return_tokens, timings } = fields::take(state, &mut of)?;
    let prompt = required(&mut of, "prompt")?;
    of.finish()?;
    let info = state.check_model(params.model.as_deref())?;
    let constraint = constraints::of_completion(state, params.form.take())?;
    let answer = params.max_tokens.unwrap_or(1).max(1);
    let longest = Longest { prompt: info.max_model_tokens, answer, truncates: params.options.truncates() };
    let mut prompts = fields::prompts(state, prompt, longest, asker)?;
    drop(body);
    for prompt in &mut prompts {
        params.options.truncate(prompt, info.max_model_tokens.saturating_sub(answer))?;
    }
    let words = params.options.encode_bad_words(state, asker)?;
    params.sampling.bad_words = words.into_iter().chain(params.sampling.bad_words.iter().cloned()).collect();
    if params.sampling.bad_words.len() > BAD_WORDS_MAX {
        return Err(too_many("logit_bias", params.sampling.bad_words.len(), BAD_WORDS_MAX));
    }
    let limit = info.context_tokens();
    let prepare = |tokens: Vec<u32>| {
        let room = limit.saturating_sub(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        let max_tokens = params.max_tokens.unwrap_or(room).max(1);
        Prepared { tokens, max_tokens, parser: None, constraint: constraint.clone() }
    };
    let prompts = prompts.into_iter().map(prepare).collect();
    let ask = Ask { endpoint: Endpoint::Completions, prompts, echo: None, journal, caller };
    Ok(Asked { ready: Ready { ask, params, info }, prompt_only, return_tokens, timings })
}

/// One sequence's response so far.
#[derive(Debug, Default)]
struct Sequence {
    predicted: usize,
    cached: usize,
    first: Option<Instant>,
    /// The last token, and whether the text has a line break.
    last: Option<u32>,
    has_new_line: bool,
}

/// The response to one request.
struct Answer {
    id: String,
    tokenizer: Arc<Tokenizer>,
    model: String,
    prompts: Vec<Vec<u32>>,
    params: Params,
    settings: Settings,
    prompt_only: bool,
    return_tokens: bool,
    timings: bool,
    began: Instant,
    sequences: Vec<Sequence>,
    /// Set if the stream's events carry journal lines.
    journal: Option<Began>,
    caller: Caller,
}

impl Answer {
    fn new(state: &ServerState, asked: Asked, output: &[SentTokens]) -> Self {
        let Asked { ready: Ready { ask, params, info }, prompt_only, return_tokens, timings } = asked;
        let sequence = |sent: &SentTokens| Sequence {
            predicted: sent.tokens.len(),
            last: sent.tokens.last().copied(),
            ..Sequence::default()
        };
        let began = || Began {
            id: format!("native-{:032x}", rand::rng().random::<u128>()),
            created: unix_seconds(),
            seed: params.sampling.seed,
        };
        let began = params.resume.as_ref().map_or_else(began, |resume| resume.began.clone());
        Self {
            id: began.id.clone(),
            tokenizer: Arc::clone(&state.tokenizer),
            model: info.model_id,
            prompts: ask.prompts.into_iter().map(|prompt| prompt.tokens).collect(),
            settings: settings(&params),
            params,
            prompt_only,
            return_tokens,
            timings,
            began: Instant::now(),
            sequences: output.iter().map(sequence).collect(),
            journal: ask.journal.then_some(began),
            caller: ask.caller,
        }
    }

    /// Collects all pieces: one object, or a list of several.
    async fn whole(mut self, mut pieces: Pieces) -> Result<Response, ApiError> {
        let mut all: Vec<Piece> = (0..self.sequences.len()).map(|index| Piece { index, ..Piece::default() }).collect();
        while let Some(piece) = pieces.next().await {
            let mut piece = piece?;
            self.note(&piece);
            let into = &mut all[piece.index];
            into.text.push_str(&piece.text);
            into.tokens.append(&mut piece.tokens);
            into.finish = piece.finish;
        }
        let mut replies: Vec<Completion> = all.into_iter().map(|piece| self.reply(piece)).collect();
        let body = match replies.len() {
            1 => replies.pop().map(|reply| to_json(&reply)).unwrap_or_default(),
            _ => serde_json::to_string(&replies).expect("replies serialise: numbers are finite"),
        };
        let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
        frames::report(&self, &mut response);
        Ok(response)
    }

    /// Counts a piece.
    fn note(&mut self, piece: &Piece) {
        let sequence = &mut self.sequences[piece.index];
        sequence.cached += usize::try_from(piece.prompt.cached.total()).unwrap_or(usize::MAX);
        sequence.has_new_line |= piece.text.contains('\n');
        if let Some(token) = piece.tokens.last() {
            sequence.first.get_or_insert_with(Instant::now);
            sequence.last = Some(token.id);
        }
        sequence.predicted += piece.tokens.len();
        self.caller.charge(piece.tokens.len() as u64);
        piece.note_in(self.caller.record(), piece.index.is_multiple_of(self.params.n));
    }

    /// The object of a piece that was counted; a whole response is a last piece.
    fn reply(&self, mut piece: Piece) -> Completion {
        if self.prompt_only {
            (piece.text, piece.tokens) = (String::new(), Vec::new());
        }
        let sequence = &self.sequences[piece.index];
        let prompt = &self.prompts[piece.index / self.params.n];
        let predicted = if self.prompt_only { 0 } else { sequence.predicted };
        let end = piece.finish.map(|finish| self.end(finish, &mut piece, predicted));
        let counts = (sequence.cached, prompt.len().saturating_sub(sequence.cached), predicted);
        let timings = (end.is_some() || self.timings).then(|| Timings::new(counts, self.began, sequence.first));
        let ids = |tokens: &[Token]| tokens.iter().map(|token| token.id).collect();
        Completion {
            index: piece.index,
            content: piece.text,
            tokens: if self.return_tokens || self.params.stream { ids(&piece.tokens) } else { Vec::new() },
            id_slot: -1,
            stop: end.is_some(),
            tokens_predicted: predicted,
            tokens_evaluated: prompt.len(),
            timings,
            completion_probabilities: probabilities(&self.tokenizer, &piece.tokens),
            end,
        }
    }

    /// The fields of a sequence's end. Takes the stop string off the text.
    fn end(&self, finish: Finish, piece: &mut Piece, predicted: usize) -> End {
        let sequence = &self.sequences[piece.index];
        let prompt = &self.prompts[piece.index / self.params.n];
        let by_token = sequence.last.is_some_and(|id| self.params.stop_ids.binary_search(&id).is_ok());
        let stop_type = match finish {
            _ if self.prompt_only => StopType::Limit,
            Finish::Length => StopType::Limit,
            _ if by_token => StopType::Eos,
            _ => StopType::Word,
        };
        let mut stopping_word = String::new();
        if stop_type == StopType::Word {
            let ends = self.params.stop_strings.strings().iter().filter(|stop| piece.text.ends_with(stop.as_str()));
            stopping_word = ends.max_by_key(|stop| stop.len()).cloned().unwrap_or_default();
            piece.text.truncate(piece.text.len() - stopping_word.len());
        }
        End {
            model: self.model.clone(),
            generation_settings: self.settings.clone(),
            prompt: self.tokenizer.decode(prompt, false),
            has_new_line: sequence.has_new_line,
            truncated: false,
            stop_type,
            stopping_word,
            tokens_cached: prompt.len() + predicted,
        }
    }
}

/// What a request samples by.
pub(super) fn settings(params: &Params) -> Settings {
    let max_tokens = params.max_tokens.map_or(-1, i64::from);
    let sampling = &params.sampling;
    Settings {
        n_predict: max_tokens,
        max_tokens,
        seed: sampling.seed,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repeat_penalty: sampling.repetition_penalty,
        repeat_last_n: -1,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        stop: params.stop_strings.strings().to_vec(),
        n_probs: sampling.logprobs.unwrap_or(0),
        stream: params.stream,
    }
}

impl Streamed for Answer {
    /// There is no end mark.
    const LAST: Entry = Entry::Over;

    fn id(&self) -> &str {
        &self.id
    }

    fn caller(&self) -> &Caller {
        &self.caller
    }

    fn journal(&self) -> Option<&Began> {
        self.journal.as_ref()
    }

    fn tokens(&self) -> usize {
        let prompts: usize = self.prompts.iter().map(Vec::len).sum();
        prompts + self.sequences.iter().map(|sequence| sequence.predicted).sum::<usize>()
    }

    fn event(&mut self, piece: Piece) -> String {
        self.note(&piece);
        to_json(&self.reply(piece))
    }

    fn end(&self) -> String {
        String::new()
    }
}

fn to_json(reply: &Completion) -> String {
    serde_json::to_string(reply).expect("replies serialise: numbers are finite")
}
