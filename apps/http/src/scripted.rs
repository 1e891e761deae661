//! A test double of [`Engine`] that plays a script, with a tokenizer whose tokens are bytes. A module of the tests of this crate and of
//! the binary, which includes the file: as a feature it would be built into what the binary links, and everything built twice.

#![allow(dead_code, reason = "neither crate's tests use all of it")]

use lagoon_grammar::Grammars;
use lagoon_http::{
    Bodies, CancelGuard, EmbeddingRules, Engine, EngineInfo, Generation, GenerationDefaults, Keys, Limits, Port,
    ServerState, TextJobs,
};
use lagoon_text::{ChatTemplate, Tokenizer, TokenizerConfig};
use lagoon_types::{
    CachedTokens, FinishReason, GenerateRequest, Pooling, PromptLogprob, RequestError, TokenEvent, TokenLogprobs,
};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Map, Value, json};
use std::{
    fmt,
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// Begin and end of sequence of [`byte_tokenizer`].
pub(crate) const BOS: u32 = 256;
/// The token that ends an answer.
pub(crate) const EOS: u32 = 257;
const VOCAB: u32 = 258;
/// Events that wait for a slow reader.
const EVENTS_MAX: usize = 4;
/// Longest wait for something to happen to a request.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// One step of a script.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// So many tokens of the prompt were cached; anywhere.
    Cached(CachedTokens),
    Token(u32),
    Embedding(Vec<f32>),
    Wait(Duration),
    Finish(FinishReason),
    Fail(RequestError),
    /// Nothing more happens until the request is cancelled.
    Hang,
}

/// Tokens of `text` (those that were not answered before), then the end of the sequence, or the length limit if that comes first.
#[must_use]
pub(crate) fn say(text: &str, request: &GenerateRequest) -> Vec<Step> {
    let ends = request.stop_ids.contains(&EOS);
    let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
    if ends {
        ids.push(EOS);
    } else {
        ids = ids.into_iter().cycle().take(usize::try_from(request.max_tokens).unwrap_or(usize::MAX)).collect();
    }
    let limit = usize::try_from(request.max_tokens).unwrap_or(usize::MAX);
    let reason = if ends && ids.len() <= limit { FinishReason::Stop } else { FinishReason::Length };
    let answered = usize::try_from(request.answered).unwrap_or(usize::MAX);
    ids.into_iter().take(limit).skip(answered).map(Step::Token).chain([Step::Finish(reason)]).collect()
}

type Script = dyn Fn(&GenerateRequest) -> Result<Vec<Step>, RequestError> + Send + Sync;

/// An engine that answers each request with the steps that a closure gives it.
pub(crate) struct ScriptedEngine {
    script: Box<Script>,
    info: EngineInfo,
    counts: Arc<Counts>,
    requests: Mutex<Vec<GenerateRequest>>,
}

/// Recorded requests and cancellations.
#[derive(Debug, Default)]
struct Counts {
    submitted: AtomicUsize,
    cancelled: AtomicUsize,
    /// Tokens that the server took.
    tokens: AtomicUsize,
}

impl fmt::Debug for ScriptedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedEngine").field("info", &self.info).finish_non_exhaustive()
    }
}

impl ScriptedEngine {
    /// An engine that answers by a script.
    pub(crate) fn new(
        script: impl Fn(&GenerateRequest) -> Result<Vec<Step>, RequestError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let info = EngineInfo {
            model_id: "lagoon/scripted".to_owned(),
            aliases: Arc::default(),
            max_model_tokens: 512,
            capacity_tokens: Some(256),
            vocab_size: VOCAB,
            slots: 3,
            ready: true,
        };
        Arc::new(Self { script: Box::new(script), info, counts: Arc::default(), requests: Mutex::default() })
    }

    /// An engine that generates `text` for every request.
    #[must_use]
    pub(crate) fn saying(text: &'static str) -> Arc<Self> {
        Self::new(move |request| Ok(say(text, request)))
    }

    /// As [`Self::saying`], of a model with another name or more.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub(crate) fn named(text: &'static str, aliases: &[&str]) -> Arc<Self> {
        let mut engine = Self::saying(text);
        let info = &mut Arc::get_mut(&mut engine).expect("a new engine has one owner").info;
        info.aliases = aliases.iter().map(|&name| name.to_owned()).collect();
        engine
    }

    /// The requests that came in, in order.
    pub(crate) fn requests(&self) -> Vec<GenerateRequest> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tokens that the server took from all requests.
    #[must_use]
    pub(crate) fn tokens(&self) -> usize {
        self.counts.tokens.load(Ordering::SeqCst)
    }

    /// Requests that were cancelled.
    #[must_use]
    pub(crate) fn cancelled(&self) -> usize {
        self.counts.cancelled.load(Ordering::SeqCst)
    }

    /// Waits until `count` requests were submitted.
    ///
    /// # Panics
    /// When that takes too long.
    pub(crate) async fn wait_submitted(&self, count: usize) {
        self.wait(|counts| counts.submitted.load(Ordering::SeqCst) >= count).await;
    }

    /// Waits until `count` requests were cancelled.
    ///
    /// # Panics
    /// When that takes too long.
    pub(crate) async fn wait_cancelled(&self, count: usize) {
        self.wait(|counts| counts.cancelled.load(Ordering::SeqCst) >= count).await;
    }

    async fn wait(&self, done: impl Fn(&Counts) -> bool) {
        let deadline = Instant::now() + WAIT_MAX;
        while !done(&self.counts) {
            assert!(Instant::now() < deadline, "waited {WAIT_MAX:?} in vain; so far: {:?}", self.counts);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Engine for ScriptedEngine {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, RequestError> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
        let steps = (self.script)(&request)?;
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let counts = Arc::clone(&self.counts);
        let player = tokio::spawn(play(steps, request, sender, Arc::clone(&counts)));
        counts.submitted.fetch_add(1, Ordering::SeqCst);
        let guard = CancelGuard::new(move || {
            player.abort();
            counts.cancelled.fetch_add(1, Ordering::SeqCst);
        });
        Ok(Generation { events, guard })
    }

    fn info(&self) -> EngineInfo {
        self.info.clone()
    }
}

async fn play(steps: Vec<Step>, request: GenerateRequest, sender: mpsc::Sender<TokenEvent>, counts: Arc<Counts>) {
    let mut completion_tokens = 0;
    let cached = steps.iter().find_map(|step| if let Step::Cached(cached) = step { Some(*cached) } else { None });
    let logprobs: Vec<_> = request.options.prompt_logprobs.map_or_else(Vec::new, |top| scores(&request.prompt, top));
    if cached.is_some() || !logprobs.is_empty() {
        let prompt = TokenEvent::Prompt { cached: cached.unwrap_or_default(), queue_ms: 0, logprobs };
        if sender.send(prompt).await.is_err() {
            return;
        }
    }
    for step in steps {
        let event = match step {
            Step::Wait(duration) => {
                tokio::time::sleep(duration).await;
                continue;
            }
            Step::Cached(_) => continue,
            Step::Hang => std::future::pending().await,
            Step::Token(id) => {
                completion_tokens += 1;
                token(id, &request)
            }
            Step::Embedding(hidden) => TokenEvent::Embedding { hidden },
            Step::Finish(reason) => {
                let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
                TokenEvent::Finished { reason, prompt_tokens, completion_tokens }
            }
            Step::Fail(error) => TokenEvent::Failed(error),
        };
        let is_token = matches!(event, TokenEvent::Token { .. });
        if sender.send(event).await.is_err() {
            return;
        }
        counts.tokens.fetch_add(usize::from(is_token), Ordering::SeqCst);
    }
}

fn scores(prompt: &[u32], top: u32) -> Vec<PromptLogprob> {
    let score = |token: &u32| {
        let likeliest = [(u32::from(b'?'), -0.125), (*token, -2.5)];
        let top = likeliest.into_iter().take(usize::try_from(top).unwrap_or(0)).collect();
        PromptLogprob { token: *token, logprob: -2.5, rank: 2, top }
    };
    prompt.iter().skip(1).map(score).collect()
}

fn token(id: u32, request: &GenerateRequest) -> TokenEvent {
    let logprobs = request.sampling.logprobs.map(|count| {
        let top = [(id, -0.25), (u32::from(b'?'), f32::NEG_INFINITY)];
        TokenLogprobs { chosen: -0.25, top: top.into_iter().take(usize::try_from(count).unwrap_or(0)).collect() }
    });
    TokenEvent::Token { id, logprobs, logits: request.return_logits.then(|| vec![1.0, -2.5]) }
}

const TEMPLATE: &str = "{% for m in messages %}{% if m.content == 'refuse me' %}\
    {{ raise_exception('not this') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

/// A byte-level tokenizer without merges: a token is a byte, and [`BOS`] and [`EOS`] follow.
///
/// # Panics
/// When `lagoon_text` refuses it, which a test would like to know.
#[must_use]
pub(crate) fn byte_tokenizer() -> Tokenizer {
    normalizing_tokenizer(&Value::Null)
}

/// As [`byte_tokenizer`], after a normaliser, as `tokenizer.json` has it.
///
/// # Panics
/// As there.
#[must_use]
pub(crate) fn normalizing_tokenizer(normalizer: &Value) -> Tokenizer {
    let vocabulary: Map<String, Value> =
        (0..=255u8).zip(byte_letters()).map(|(byte, letter)| (letter.to_string(), json!(byte))).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
        "added_tokens": [special(BOS, "<bos>"), special(EOS, "<eos>")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
        },
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
    });
    let config = TokenizerConfig {
        special: vec![("bos_token", "<bos>".to_owned()), ("eos_token", "<eos>".to_owned())],
        ..TokenizerConfig::default()
    };
    Tokenizer::parse(Path::new("scripted"), file.to_string().as_bytes(), &config).expect("the tokenizer is valid")
}

/// The letter that byte-level BPE writes for each byte: printable ones as they are, the others from U+0100 on.
fn byte_letters() -> impl Iterator<Item = char> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut other = 0x100;
    (0..=255u8).map(move |byte| {
        if printable(&byte) {
            return char::from(byte);
        }
        other += 1;
        char::from_u32(other - 1).expect("these are letters")
    })
}

/// The process's recorder: one for all tests.
pub(crate) fn recorder() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            lagoon_http::metrics::install(&[lagoon_http::metrics::METRICS]).expect("no other recorder is installed")
        })
        .clone()
}

/// A server's state around `engine`, with logits exposed.
///
/// # Panics
/// When `lagoon_text` refuses the template.
pub(crate) fn state(engine: Arc<dyn Engine>) -> ServerState {
    let template = ChatTemplate::new(Path::new("scripted"), TEMPLATE, &TokenizerConfig::default());
    let template = template.expect("the template is valid");
    let tokenizer = Arc::new(byte_tokenizer());
    ServerState {
        grammars: Grammars::new(Arc::clone(&tokenizer), engine.info().vocab_size, &[EOS]),
        engine,
        tokenizer,
        formats: template.formats(),
        template: Some(Arc::new(template)),
        defaults: GenerationDefaults { eos_ids: vec![EOS], ..GenerationDefaults::default() },
        embeddings: EmbeddingRules { pooling: Ok(Pooling::Last), normalised: true, dimensions: 4 },
        limits: Limits::default(),
        bodies: Bodies::default(),
        text_jobs: TextJobs::default(),
        expose_logits: true,
        metrics: recorder(),
        compat: None,
        created: 1_700_000_000,
    }
}

/// Serves `state` on a free loopback port for as long as the runtime lives; gives the base URL.
///
/// # Panics
/// When no port can be bound.
pub(crate) async fn spawn(state: ServerState) -> String {
    spawn_keyed(state, Keys::none()).await
}

/// As [`spawn`], behind `keys`.
///
/// # Panics
/// As there.
pub(crate) async fn spawn_keyed(state: ServerState, keys: Arc<Keys>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(lagoon_http::serve(Port::plain(listener, keys), lagoon_http::router(state), std::future::pending()));
    format!("http://{address}")
}
