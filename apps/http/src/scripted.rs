//! Test doubles of [`Engine`] and [`TextModel`]: an engine that plays a script and a tokenizer whose tokens are
//! bytes. Built only for tests (of this crate, and of the binary through the `scripted` feature).

use crate::{
    CancelGuard, ChatMessage, Engine, EngineInfo, Generation, GenerationDefaults, Limits, ServerState, StreamDecoder,
    TextError, TextModel,
};
use lagoon_types::{FinishReason, GenerateRequest, RequestError, TokenEvent, TokenLogprobs};
use metrics_exporter_prometheus::PrometheusHandle;
use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, mpsc};

/// Begin and end of sequence of [`ByteText`].
pub const BOS: u32 = 256;
pub const EOS: u32 = 257;
const VOCAB: u32 = 258;
/// Events that wait for a slow reader.
const EVENTS_MAX: usize = 4;

/// One step of a script.
#[derive(Clone, Debug)]
pub enum Step {
    Token(u32),
    Wait(Duration),
    Finish(FinishReason),
    Fail(RequestError),
    /// Nothing more happens until the request is cancelled.
    Hang,
}

/// Tokens of `text`, then the end of the sequence, or the length limit if that comes first.
#[must_use]
pub fn say(text: &str, request: &GenerateRequest) -> Vec<Step> {
    let ends = request.stop_ids.contains(&EOS);
    let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
    if ends {
        ids.push(EOS);
    } else {
        ids = ids.into_iter().cycle().take(usize::try_from(request.max_tokens).unwrap_or(usize::MAX)).collect();
    }
    let limit = usize::try_from(request.max_tokens).unwrap_or(usize::MAX);
    let reason = if ends && ids.len() <= limit { FinishReason::Stop } else { FinishReason::Length };
    ids.into_iter().take(limit).map(Step::Token).chain([Step::Finish(reason)]).collect()
}

type Script = dyn Fn(&GenerateRequest) -> Result<Vec<Step>, RequestError> + Send + Sync;

/// An engine that answers each request with the steps that a closure gives it.
pub struct ScriptedEngine {
    script: Box<Script>,
    info: EngineInfo,
    counts: Arc<Counts>,
    requests: Mutex<Vec<GenerateRequest>>,
}

/// What happened to requests.
#[derive(Debug, Default)]
struct Counts {
    submitted: AtomicUsize,
    cancelled: AtomicUsize,
    changed: Notify,
}

impl fmt::Debug for ScriptedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedEngine").field("info", &self.info).finish_non_exhaustive()
    }
}

impl ScriptedEngine {
    pub fn new(
        script: impl Fn(&GenerateRequest) -> Result<Vec<Step>, RequestError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let info = EngineInfo {
            model_id: "lagoon/scripted".to_owned(),
            max_model_tokens: 512,
            capacity_tokens: Some(256),
            vocab_size: VOCAB,
            ready: true,
        };
        Arc::new(Self { script: Box::new(script), info, counts: Arc::default(), requests: Mutex::default() })
    }

    /// An engine that always says `text`.
    #[must_use]
    pub fn saying(text: &'static str) -> Arc<Self> {
        Self::new(move |request| Ok(say(text, request)))
    }

    /// The requests that came in, in order.
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    #[must_use]
    pub fn cancelled(&self) -> usize {
        self.counts.cancelled.load(Ordering::SeqCst)
    }

    /// Waits until `count` requests were submitted.
    pub async fn wait_submitted(&self, count: usize) {
        self.wait(|counts| counts.submitted.load(Ordering::SeqCst) >= count).await;
    }

    /// Waits until `count` requests were cancelled.
    pub async fn wait_cancelled(&self, count: usize) {
        self.wait(|counts| counts.cancelled.load(Ordering::SeqCst) >= count).await;
    }

    async fn wait(&self, done: impl Fn(&Counts) -> bool) {
        loop {
            let changed = self.counts.changed.notified();
            if done(&self.counts) {
                return;
            }
            let waited = tokio::time::timeout(Duration::from_millis(50), changed).await;
            // The timeout only bounds the race between the check and the notification.
            drop(waited);
        }
    }
}

impl Engine for ScriptedEngine {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, RequestError> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
        let steps = (self.script)(&request)?;
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let player = tokio::spawn(play(steps, request, sender));
        let counts = Arc::clone(&self.counts);
        counts.submitted.fetch_add(1, Ordering::SeqCst);
        counts.changed.notify_waiters();
        let guard = CancelGuard::new(move || {
            player.abort();
            counts.cancelled.fetch_add(1, Ordering::SeqCst);
            counts.changed.notify_waiters();
        });
        Ok(Generation { events, guard })
    }

    fn info(&self) -> EngineInfo {
        self.info.clone()
    }
}

async fn play(steps: Vec<Step>, request: GenerateRequest, sender: mpsc::Sender<TokenEvent>) {
    let mut completion_tokens = 0;
    for step in steps {
        let event = match step {
            Step::Wait(duration) => {
                tokio::time::sleep(duration).await;
                continue;
            }
            Step::Hang => std::future::pending().await,
            Step::Token(id) => {
                completion_tokens += 1;
                token(id, &request)
            }
            Step::Finish(reason) => {
                let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
                TokenEvent::Finished { reason, prompt_tokens, completion_tokens }
            }
            Step::Fail(error) => TokenEvent::Failed(error),
        };
        if sender.send(event).await.is_err() {
            return;
        }
    }
}

fn token(id: u32, request: &GenerateRequest) -> TokenEvent {
    let logprobs = request.sampling.logprobs.map(|count| {
        let top = [(id, -0.25), (u32::from(b'?'), f32::NEG_INFINITY)];
        TokenLogprobs { chosen: -0.25, top: top.into_iter().take(usize::try_from(count).unwrap_or(0)).collect() }
    });
    TokenEvent::Token { id, logprobs, logits: request.return_logits.then(|| vec![1.0, -2.5]) }
}

/// A tokenizer whose tokens are the bytes of UTF-8, and a plain chat template.
#[derive(Debug)]
pub struct ByteText;

impl TextModel for ByteText {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let begin = special.then_some(BOS);
        Ok(begin.into_iter().chain(text.bytes().map(u32::from)).collect())
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut decoder = self.decoder(skip_special);
        let text: Result<String, _> = ids.iter().map(|id| decoder.push(*id)).collect();
        Ok(text? + &decoder.finish())
    }

    fn render_chat(&self, messages: &[ChatMessage], open_answer: bool) -> Result<String, TextError> {
        if messages.iter().any(|message| message.content == "refuse me") {
            return Err(TextError("the template refuses this".to_owned()));
        }
        let mut prompt: String = messages.iter().map(|m| format!("{}: {}\n", m.role, m.content)).collect();
        if open_answer {
            prompt.push_str("assistant:");
        }
        Ok(prompt)
    }

    fn decoder(&self, skip_special: bool) -> Box<dyn StreamDecoder> {
        Box::new(ByteDecoder { held: Vec::new(), skip_special })
    }
}

struct ByteDecoder {
    held: Vec<u8>,
    skip_special: bool,
}

impl StreamDecoder for ByteDecoder {
    fn push(&mut self, id: u32) -> Result<String, TextError> {
        match (id, u8::try_from(id)) {
            (BOS | EOS, _) if self.skip_special => return Ok(String::new()),
            (BOS, _) => return Ok("<bos>".to_owned()),
            (EOS, _) => return Ok("<eos>".to_owned()),
            (_, Ok(byte)) => self.held.push(byte),
            _ => return Err(TextError(format!("token {id} is not in the vocabulary"))),
        }
        match std::str::from_utf8(&self.held) {
            Ok(text) => {
                let text = text.to_owned();
                self.held.clear();
                Ok(text)
            }
            Err(error) if error.error_len().is_none() => Ok(String::new()),
            Err(_) => Ok(self.finish()),
        }
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// The process's recorder: one for all tests.
pub fn recorder() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| crate::metrics::install().expect("no other recorder is installed")).clone()
}

/// A server's state around `engine`, with logits exposed and no key.
pub fn state(engine: Arc<dyn Engine>) -> ServerState {
    ServerState {
        engine,
        text: Arc::new(ByteText),
        defaults: GenerationDefaults { eos_ids: vec![EOS], ..GenerationDefaults::default() },
        api_key: None,
        limits: Limits::default(),
        expose_logits: true,
        metrics: recorder(),
        created: 1_700_000_000,
    }
}

/// Serves `state` on a free loopback port for as long as the runtime lives; gives the base URL.
///
/// # Panics
/// When no port can be bound.
pub async fn spawn(state: ServerState) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(crate::serve(listener, crate::router(state), std::future::pending()));
    format!("http://{address}")
}
