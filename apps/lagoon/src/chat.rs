//! `lagoon chat`: a conversation in the terminal with any OpenAI-compatible server.
//!
//! The response streams to stdout; prompts, notes and errors go to stderr. With a PROMPT, or if stdin is no terminal,
//! it asks once and exits.

use crate::api_client::{ApiClient, ClientError};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;
use tokio::{signal, sync::mpsc};

/// Longest prompt that is read from a pipe, in bytes.
const PIPE_BYTES_MAX: u64 = 32 << 20;
/// Maximum of lines typed ahead.
const LINES_MAX: usize = 64;

const HELP: &str = "/exit or Ctrl-D leaves, /reset forgets the conversation, /help shows this; Ctrl-C ends an answer";

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
    let ended = match prompt {
        Some(prompt) => once(&mut chat, prompt, &mut out).await,
        None => interactive(&mut chat, typed_lines(), &mut out, &mut io::stderr()).await,
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

/// Lines typed at the terminal. Their thread ends with the process: a read from a terminal cannot be cancelled.
fn typed_lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(LINES_MAX);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
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

impl Conversation {
    fn new(client: ApiClient, model: String, args: &ChatArgs) -> Self {
        let mut request = json!({ "model": model, "stream": true });
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

    /// Sends a prompt and writes the response as it arrives. A failed prompt is dropped; an interrupted response is
    /// kept so far. `interrupt` resolves when the user interrupts the response.
    async fn ask(
        &mut self,
        prompt: &str,
        out: &mut impl Write,
        interrupt: impl Future<Output = ()>,
    ) -> anyhow::Result<Ending> {
        self.messages.push(json!({ "role": "user", "content": prompt }));
        let mut answer = String::new();
        let ending = tokio::select! {
            ending = self.answer(&mut answer, out) => ending,
            () = interrupt => Ok(Ending::Interrupted),
        };
        if !answer.ends_with('\n') && !answer.is_empty() {
            writeln!(out)?;
        }
        if ending.is_err() || answer.is_empty() {
            self.messages.pop();
        } else {
            self.messages.push(json!({ "role": "assistant", "content": answer }));
        }
        ending
    }

    async fn answer(&self, answer: &mut String, out: &mut impl Write) -> anyhow::Result<Ending> {
        let mut request = self.request.clone();
        request["messages"] = Value::from(self.messages.clone());
        let mut events = self.client.events("/v1/chat/completions", &request).await?;
        let (mut ending, mut reasoned) = (Ending::Complete, false);
        while let Some(event) = events.next().await? {
            let choice = &event["choices"][0];
            // Shown, but no part of the conversation.
            if let Some(text) = choice["delta"]["reasoning_content"].as_str() {
                reasoned = true;
                out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("write the reasoning")?;
            }
            if let Some(text) = choice["delta"]["content"].as_str() {
                if std::mem::take(&mut reasoned) {
                    out.write_all(b"\n\n").context("write the answer")?;
                }
                // Models often begin with a space or line break: trimmed for display.
                let text = if answer.is_empty() { text.trim_start() } else { text };
                answer.push_str(text);
                out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("write the answer")?;
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

async fn once(chat: &mut Conversation, prompt: String, out: &mut impl Write) -> anyhow::Result<()> {
    match chat.ask(&prompt, out, ctrl_c()).await? {
        Ending::Complete | Ending::Cut => Ok(()),
        Ending::Interrupted => bail!("interrupted"),
    }
}

async fn interactive(
    chat: &mut Conversation,
    mut lines: mpsc::Receiver<String>,
    out: &mut impl Write,
    notes: &mut impl Write,
) -> anyhow::Result<()> {
    writeln!(notes, "{} at {}\n{HELP}", chat.request["model"].as_str().unwrap_or("?"), chat.client.base())?;
    let mut leaving = false;
    loop {
        write!(notes, "\n> ")?;
        notes.flush()?;
        let line = tokio::select! {
            line = lines.recv() => line,
            () = ctrl_c() => {
                if std::mem::replace(&mut leaving, true) {
                    return Ok(());
                }
                write!(notes, "\n(Ctrl-C again leaves)")?;
                continue;
            }
        };
        leaving = false;
        let Some(line) = line else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/reset" => {
                chat.reset();
                writeln!(notes, "(a new conversation)")?;
            }
            "/help" => writeln!(notes, "{HELP}")?,
            command if command.starts_with('/') => writeln!(notes, "there is no command {command}\nhint: {HELP}")?,
            prompt => match chat.ask(prompt, out, ctrl_c()).await {
                Ok(Ending::Complete) => {}
                Ok(Ending::Cut) => writeln!(notes, "(cut at the length limit)")?,
                Ok(Ending::Interrupted) => writeln!(notes, "(interrupted)")?,
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
    use clap::Parser;
    use lagoon_http::scripted::{self, ScriptedEngine, Step, say};
    use std::sync::Arc;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: ChatArgs,
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
        once(&mut chat, "sky?".to_owned(), &mut out).await.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "blue\n");
        assert_eq!(prompt_of(&engine, 0), "system: be brief\nuser: sky?\nassistant:");
        let sampling = &engine.requests()[0].sampling;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.seed), (0.5, 0.25, 9));
    }

    #[tokio::test]
    async fn a_conversation_remembers_until_it_is_reset() {
        let engine = ScriptedEngine::saying("ok");
        let mut chat = conversation(engine.clone(), &[]).await;
        let (sender, lines) = mpsc::channel(8);
        for line in ["a", "b", "/nonsense", "/reset", "c", "/exit", "never"] {
            sender.send(line.to_owned()).await.unwrap();
        }
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        interactive(&mut chat, lines, &mut out, &mut notes).await.unwrap();
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
        let (sender, lines) = mpsc::channel(8);
        for line in ["short", "a question that is long enough"] {
            sender.send(line.to_owned()).await.unwrap();
        }
        drop(sender);
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        interactive(&mut chat, lines, &mut out, &mut notes).await.unwrap();
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
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        };
        assert_eq!(chat.ask("q", &mut out, interrupt).await.unwrap(), Ending::Interrupted);
        assert_eq!(out, b"hi\n");
        assert_eq!(chat.messages.last().unwrap()["content"], "hi");
        engine.wait_cancelled(1).await;
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
