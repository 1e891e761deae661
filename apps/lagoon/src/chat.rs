//! `lagoon chat`: a conversation in the terminal with any OpenAI-compatible server.
//!
//! The response streams to stdout, on a terminal as Markdown; notes and errors go to stderr. With a PROMPT, or if stdin is no
//! terminal, it asks once and exits.

use crate::api_client::{ApiClient, ClientError};
use crate::chat_input::{Input, Terminal, Typed, history_file};
use crate::chat_screen::{Look, Screen};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::signal;

/// Longest prompt that is read from a pipe, in bytes.
const PIPE_BYTES_MAX: u64 = 32 << 20;

const HELP: &str = "/exit or Ctrl-D leaves, /reset forgets the conversation, /help shows this;\n\
                    Ctrl-C ends an answer; a line goes on after \\ or with Alt-Enter;\n\
                    arrows edit and find earlier prompts";

/// Chat in the terminal with an OpenAI-compatible server.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ChatArgs {
    /// The server's root.
    #[arg(long, env = "LAGOON_URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// The server's key.
    #[arg(long, env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The authority of an https:// server's certificate.
    #[arg(long, value_name = "PEM", env = "LAGOON_CA")]
    ca: Option<PathBuf>,
    /// Which model; by default the first one that the server lists.
    #[arg(long)]
    model: Option<String>,
    /// A system message to begin with.
    #[arg(long)]
    system: Option<String>,
    /// Sampling temperature; 0 is greedy. The server's default if not given.
    #[arg(long)]
    temperature: Option<f32>,
    /// Nucleus sampling. The server's default if not given.
    #[arg(long)]
    top_p: Option<f32>,
    /// Longest answer, in tokens.
    #[arg(long)]
    max_tokens: Option<u32>,
    /// Makes sampling repeatable.
    #[arg(long)]
    seed: Option<u64>,
    /// Show answers as they are, not as Markdown (which needs a terminal).
    #[arg(long)]
    plain: bool,
    /// Neither read nor write the history of prompts ($XDG_STATE_HOME/lagoon/chat_history, or under ~/.local/state).
    #[arg(long)]
    no_history: bool,
    /// Ask this once and leave. Without it, stdin is the prompt if it is no terminal.
    prompt: Option<String>,
}

/// Runs `lagoon chat`.
///
/// # Errors
/// When the server cannot be reached, or the only answer failed.
pub(crate) async fn run(args: ChatArgs) -> anyhow::Result<()> {
    let client = ApiClient::new(&args.url, args.api_key.clone(), args.ca.as_deref())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let mut chat = Conversation::new(client, model, &args);
    let prompt = match args.prompt {
        Some(prompt) => Some(prompt),
        None if io::stdin().is_terminal() => None,
        None => Some(piped()?),
    };
    let mut out = io::stdout();
    let look = if args.plain || !out.is_terminal() { Look::Plain } else { Look::Markdown(None) };
    let ended = match prompt {
        Some(prompt) => {
            let notes = io::stderr().is_terminal().then(io::stderr);
            once(&mut chat, prompt, &mut Screen::new(&mut out, look), notes).await
        }
        None => {
            let file = history_file(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
            let mut terminal = Terminal::open(file.filter(|_| !args.no_history))?;
            interactive(&mut chat, &mut terminal, (&mut out, look), &mut io::stderr()).await
        }
    };
    // A closed stdout is no error: its reader has enough.
    ended.or_else(|error| match error.downcast_ref::<io::Error>() {
        Some(cause) if cause.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}

fn piped() -> anyhow::Result<String> {
    let mut text = String::new();
    io::stdin().take(PIPE_BYTES_MAX).read_to_string(&mut text).context("read the prompt from stdin")?;
    if text.trim().is_empty() {
        bail!("the prompt on stdin is empty\nhint: give it as an argument: lagoon chat \"PROMPT\"");
    }
    Ok(text)
}

/// The messages so far, and the parameters of the next request.
struct Conversation {
    client: ApiClient,
    /// The request without its messages.
    request: Value,
    system: Option<String>,
    messages: Vec<Value>,
}

/// How a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Complete,
    /// Cut by the length limit.
    Cut,
    Interrupted,
}

/// Speed of an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    tokens: u64,
    /// When the first came, and the last.
    first: Option<Duration>,
    last: Duration,
}

impl Speed {
    /// Counts a token that arrived; the server's own count, if it sends one, replaces the sum.
    fn count(&mut self, since: Instant) {
        self.tokens += 1;
        self.last = since.elapsed();
        self.first.get_or_insert(self.last);
    }

    /// `(57 tokens, 23.1 tokens/s, the first after 0.31 s)`.
    #[allow(clippy::cast_precision_loss, reason = "token counts")]
    fn in_words(self) -> Option<String> {
        let first = self.first?;
        let decoding = (self.last - first).as_secs_f64();
        let rate = if self.tokens > 1 && decoding > 0.0 {
            format!(", {:.1} tokens/s", (self.tokens - 1) as f64 / decoding)
        } else {
            String::new()
        };
        Some(format!(
            "({} {}{rate}, the first after {:.2} s)",
            self.tokens,
            if self.tokens == 1 { "token" } else { "tokens" },
            first.as_secs_f64()
        ))
    }
}

impl Conversation {
    fn new(client: ApiClient, model: String, args: &ChatArgs) -> Self {
        let mut request = json!({ "model": model, "stream": true, "stream_options": { "include_usage": true } });
        for (field, value) in [
            ("temperature", args.temperature.map(Value::from)),
            ("top_p", args.top_p.map(Value::from)),
            ("max_tokens", args.max_tokens.map(Value::from)),
            ("seed", args.seed.map(Value::from)),
        ] {
            if let Some(value) = value {
                request[field] = value;
            }
        }
        let mut chat = Self { client, request, system: args.system.clone(), messages: Vec::new() };
        chat.reset();
        chat
    }

    fn reset(&mut self) {
        self.messages = self.system.iter().map(|text| json!({ "role": "system", "content": text })).collect();
    }

    /// Sends a prompt and shows the response as it arrives. A failed prompt is dropped; an interrupted response is
    /// kept so far. `interrupt` resolves when the user interrupts the response.
    async fn ask(
        &mut self,
        prompt: &str,
        screen: &mut Screen<'_, impl Write>,
        interrupt: impl Future<Output = ()>,
    ) -> anyhow::Result<(Ending, Speed)> {
        self.messages.push(json!({ "role": "user", "content": prompt }));
        let (mut answer, mut speed) = (String::new(), Speed::default());
        let ending = tokio::select! {
            ending = self.answer(&mut answer, &mut speed, screen) => ending,
            () = interrupt => Ok(Ending::Interrupted),
        };
        screen.end()?;
        if ending.is_err() || answer.is_empty() {
            self.messages.pop();
        } else {
            self.messages.push(json!({ "role": "assistant", "content": answer }));
        }
        Ok((ending?, speed))
    }

    async fn answer(
        &self,
        answer: &mut String,
        speed: &mut Speed,
        screen: &mut Screen<'_, impl Write>,
    ) -> anyhow::Result<Ending> {
        let sent = Instant::now();
        let mut request = self.request.clone();
        request["messages"] = Value::from(self.messages.clone());
        let mut events = self.client.events("/v1/chat/completions", &request).await?;
        let mut ending = Ending::Complete;
        while let Some(event) = events.next().await? {
            let choice = &event["choices"][0];
            // Shown, but no part of the conversation.
            if let Some(text) = choice["delta"]["reasoning_content"].as_str() {
                speed.count(sent);
                screen.reason(text).context("write the reasoning")?;
            }
            if let Some(text) = choice["delta"]["content"].as_str() {
                // Models often begin with a space or line break: trimmed for display.
                let text = if answer.is_empty() { text.trim_start() } else { text };
                speed.count(sent);
                answer.push_str(text);
                screen.say(text).context("write the answer")?;
            }
            if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
                speed.tokens = tokens;
            }
            if choice["finish_reason"] == "length" {
                ending = Ending::Cut;
            }
        }
        Ok(ending)
    }
}

/// Resolves at Ctrl-C.
async fn ctrl_c() {
    if signal::ctrl_c().await.is_err() {
        // Without a handler, Ctrl-C ends the process by default.
        std::future::pending::<()>().await;
    }
}

/// Asks once; the speed goes to `notes`.
async fn once(
    chat: &mut Conversation,
    prompt: String,
    screen: &mut Screen<'_, impl Write>,
    notes: Option<impl Write>,
) -> anyhow::Result<()> {
    let (ending, speed) = chat.ask(&prompt, screen, ctrl_c()).await?;
    if let (Some(mut notes), Some(speed)) = (notes, speed.in_words()) {
        writeln!(notes, "{speed}")?;
    }
    match ending {
        Ending::Complete | Ending::Cut => Ok(()),
        Ending::Interrupted => bail!("interrupted"),
    }
}

async fn interactive(
    chat: &mut Conversation,
    input: &mut impl Input,
    (out, look): (&mut impl Write, Look),
    notes: &mut impl Write,
) -> anyhow::Result<()> {
    writeln!(notes, "{} at {}\n{HELP}", chat.request["model"].as_str().unwrap_or("?"), chat.client.base())?;
    let mut leaving = false;
    loop {
        writeln!(notes)?;
        let line = match input.next().await? {
            Typed::Text(line) => line,
            Typed::Interrupt if std::mem::replace(&mut leaving, true) => return Ok(()),
            Typed::Interrupt => {
                write!(notes, "(Ctrl-C again leaves)")?;
                continue;
            }
            Typed::End => return Ok(()),
        };
        leaving = false;
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/reset" => {
                chat.reset();
                writeln!(notes, "(a new conversation)")?;
            }
            "/help" => writeln!(notes, "{HELP}")?,
            command if command.starts_with('/') => writeln!(notes, "there is no command {command}\nhint: {HELP}")?,
            prompt => match chat.ask(prompt, &mut Screen::new(&mut *out, look), ctrl_c()).await {
                Ok((ending, speed)) => {
                    let cut = match ending {
                        Ending::Complete => "",
                        Ending::Cut => "(cut at the length limit) ",
                        Ending::Interrupted => "(interrupted) ",
                    };
                    writeln!(notes, "{cut}{}", speed.in_words().unwrap_or_default())?;
                }
                // A server's error ends this response only; others (stdout closed) end the program.
                Err(error) if error.is::<ClientError>() => writeln!(notes, "error: {error}")?,
                Err(error) => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{self, ScriptedEngine, Step, say};
    use clap::Parser;
    use std::sync::Arc;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: ChatArgs,
    }

    /// What is typed in a test.
    struct Script(std::vec::IntoIter<Typed>);

    impl Script {
        fn new(lines: &[&str]) -> Self {
            Self(lines.iter().map(|line| Typed::Text((*line).to_owned())).collect::<Vec<_>>().into_iter())
        }
    }

    impl Input for Script {
        async fn next(&mut self) -> anyhow::Result<Typed> {
            Ok(self.0.next().unwrap_or(Typed::End))
        }
    }

    async fn conversation(engine: Arc<ScriptedEngine>, extra: &[&str]) -> Conversation {
        let url = scripted::spawn(scripted::state(engine)).await;
        let args = Cli::parse_from([&["chat", "--url", &url], extra].concat()).args;
        let client = ApiClient::new(&args.url, args.api_key.clone(), args.ca.as_deref()).unwrap();
        let model = client.first_model().await.unwrap();
        Conversation::new(client, model, &args)
    }

    fn prompt_of(engine: &ScriptedEngine, index: usize) -> String {
        engine.requests()[index].prompt.iter().map(|id| char::from(u8::try_from(*id).unwrap())).collect()
    }

    #[tokio::test]
    async fn one_shot_prints_the_answer_and_sends_what_was_asked_for() {
        let engine = ScriptedEngine::saying(" blue");
        let extra = ["--system", "be brief", "--temperature", "0.5", "--top-p", "0.25", "--seed", "9"];
        let mut chat = conversation(engine.clone(), &extra).await;
        let mut out = Vec::new();
        let mut notes = Vec::new();
        once(&mut chat, "sky?".to_owned(), &mut Screen::new(&mut out, Look::Plain), Some(&mut notes)).await.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "blue\n");
        let notes = String::from_utf8(notes).unwrap();
        assert!(notes.contains(" tokens") && notes.contains("the first after "), "{notes}");
        assert_eq!(prompt_of(&engine, 0), "system: be brief\nuser: sky?\nassistant:");
        let sampling = &engine.requests()[0].sampling;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.seed), (0.5, 0.25, 9));
    }

    #[tokio::test]
    async fn a_conversation_remembers_until_it_is_reset() {
        let engine = ScriptedEngine::saying("ok");
        let mut chat = conversation(engine.clone(), &[]).await;
        let mut input = Script::new(&["a", "b", "/nonsense", "/reset", "c", "/exit", "never"]);
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        interactive(&mut chat, &mut input, (&mut out, Look::Plain), &mut notes).await.unwrap();
        assert_eq!(out, b"ok\nok\nok\n");
        let prompts: Vec<_> = (0..engine.requests().len()).map(|index| prompt_of(&engine, index)).collect();
        let second = "user: a\nassistant: ok\nuser: b\nassistant:";
        assert_eq!(prompts, ["user: a\nassistant:", second, "user: c\nassistant:"]);
        let notes = String::from_utf8(notes).unwrap();
        assert!(notes.contains("there is no command /nonsense\nhint: "), "{notes}");
    }

    #[tokio::test]
    async fn a_failed_question_is_reported_and_forgotten() {
        let engine = ScriptedEngine::new(|request| match request.prompt.len() {
            0..30 => Err(lagoon_types::RequestError::QueueFull { queued: 1, limit: 1 }),
            _ => Ok(say("fine", request)),
        });
        let mut chat = conversation(engine.clone(), &[]).await;
        let mut input = Script::new(&["short", "a question that is long enough"]);
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        interactive(&mut chat, &mut input, (&mut out, Look::Plain), &mut notes).await.unwrap();
        let notes = String::from_utf8(notes).unwrap();
        assert!(
            notes.contains("error: the server answered 429") && notes.contains("hint: the server is full"),
            "{notes}"
        );
        assert_eq!(out, b"fine\n");
        assert!(!prompt_of(&engine, 1).contains("short"));
    }

    #[tokio::test]
    async fn an_interrupted_answer_is_kept_and_cancelled() {
        let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(104), Step::Token(105), Step::Hang]));
        let mut chat = conversation(engine.clone(), &[]).await;
        let mut out = Vec::new();
        let waiting = engine.clone();
        let interrupt = async move {
            waiting.wait_submitted(1).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        let asked = chat.ask("q", &mut Screen::new(&mut out, Look::Plain), interrupt).await.unwrap();
        assert_eq!((asked.0, asked.1.tokens), (Ending::Interrupted, 2));
        assert_eq!(out, b"hi\n");
        assert_eq!(chat.messages.last().unwrap()["content"], "hi");
        engine.wait_cancelled(1).await;
    }

    #[test]
    fn speed_is_of_the_tokens_after_the_first() {
        let speed = Speed { tokens: 11, first: Some(Duration::from_millis(500)), last: Duration::from_millis(2500) };
        assert_eq!(speed.in_words().unwrap(), "(11 tokens, 5.0 tokens/s, the first after 0.50 s)");
        let one = Speed { tokens: 1, first: Some(Duration::from_millis(500)), last: Duration::from_millis(500) };
        assert_eq!(one.in_words().unwrap(), "(1 token, the first after 0.50 s)");
        assert_eq!(Speed::default().in_words(), None);
    }

    #[tokio::test]
    async fn ctrl_c_twice_leaves() {
        let mut chat = conversation(ScriptedEngine::saying("ok"), &[]).await;
        let typed = [
            Typed::Interrupt,
            Typed::Text("a".to_owned()),
            Typed::Interrupt,
            Typed::Interrupt,
            Typed::Text("b".to_owned()),
        ];
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        let mut input = Script(Vec::from(typed).into_iter());
        interactive(&mut chat, &mut input, (&mut out, Look::Plain), &mut notes).await.unwrap();
        assert_eq!(out, b"ok\n");
        assert_eq!(String::from_utf8(notes).unwrap().matches("(Ctrl-C again leaves)").count(), 2);
    }

    #[tokio::test]
    async fn errors_have_hints() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let refused = run(Cli::parse_from(["chat", "--url", &url, "hi"]).args).await.unwrap_err();
        assert!(refused.to_string().contains("hint: is the server running there?"), "{refused}");

        let state = scripted::state(ScriptedEngine::saying("ok"));
        let url = scripted::spawn_keyed(state, lagoon_http::Keys::single("sesame")).await;
        let refused = run(Cli::parse_from(["chat", "--url", &url, "hi"]).args).await.unwrap_err();
        assert!(refused.to_string().contains("hint: give the server's key"), "{refused}");
        run(Cli::parse_from(["chat", "--url", &url, "--api-key", "sesame", "hi"]).args).await.unwrap();
        let args = ["chat", "--url", &url, "--api-key", "sesame", "--model", "other", "hi"];
        let refused = run(Cli::parse_from(args).args).await.unwrap_err();
        assert!(refused.to_string().contains("hint: `--model`"), "{refused}");
    }
}
