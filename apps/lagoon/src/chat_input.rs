//! What is typed into `lagoon chat`: lines with editing and a history.
//!
//! The editor runs on a thread of its own, and only while a line is wanted: meanwhile Ctrl-C is a signal again, which ends an answer.

use anyhow::Context;
use rustyline::completion::Completer;
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Cmd, Config, Editor, EventHandler, Helper, KeyCode, KeyEvent, Modifiers};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;

/// Lines that the history keeps.
const HISTORY_MAX: usize = 1000;
const PROMPT: &str = "> ";

/// Something typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    /// A prompt or command, of one or more lines.
    Text(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D, or the terminal has gone.
    End,
}

/// Where prompts come from.
pub(crate) trait Input {
    async fn next(&mut self) -> anyhow::Result<Typed>;
}

/// The file of the history, in the user's state directory.
pub(crate) fn history_file(var: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let state = || Some(PathBuf::from(var("HOME").or_else(|| var("USERPROFILE"))?).join(".local/state"));
    Some(var("XDG_STATE_HOME").map(PathBuf::from).or_else(state)?.join("lagoon/chat_history"))
}

/// A line that ends with a backslash goes on in the next one.
struct Lines;

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = context.input().ends_with('\\');
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Lines {
    type Candidate = String;
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

impl Helper for Lines {}

/// A text as it is meant: without the backslashes that continue lines.
fn joined(text: &str) -> String {
    text.replace("\\\n", "\n")
}

/// The terminal, with an editor on a thread that ends with the process.
#[derive(Debug)]
pub(crate) struct Terminal {
    wanted: mpsc::Sender<()>,
    typed: mpsc::Receiver<Typed>,
}

impl Terminal {
    /// A terminal with the history in `file`, if there is one.
    pub(crate) fn open(file: Option<PathBuf>) -> anyhow::Result<Self> {
        let config = Config::builder()
            .max_history_size(HISTORY_MAX)
            .and_then(|config| config.history_ignore_dups(true))
            .context("configure the line editor")?
            // Also when standard output is a file.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut editor = Editor::<Lines, FileHistory>::with_config(config).context("open the terminal")?;
        editor.set_helper(Some(Lines));
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), EventHandler::Simple(Cmd::Newline));
        if let Some(file) = &file {
            open_history(&mut editor, file);
        }
        let (wanted, mut want) = mpsc::channel(1);
        let (send, typed) = mpsc::channel(1);
        let read = move || {
            while want.blocking_recv().is_some() {
                if send.blocking_send(read(&mut editor, file.as_deref())).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("typing".to_owned()).spawn(read).context("start the line editor")?;
        Ok(Self { wanted, typed })
    }
}

impl Input for Terminal {
    async fn next(&mut self) -> anyhow::Result<Typed> {
        // The thread is there while this value is.
        let asked = self.wanted.send(()).await;
        Ok(match asked {
            Ok(()) => self.typed.recv().await.unwrap_or(Typed::End),
            Err(_gone) => Typed::End,
        })
    }
}

/// Loads the history. Without its file there is none yet, and an unreadable one costs only the history.
fn open_history(editor: &mut Editor<Lines, FileHistory>, file: &Path) {
    let made = file.parent().map_or(Ok(()), std::fs::create_dir_all);
    if let Err(error) = made {
        tracing::warn!(%error, file = %file.display(), "no history");
    } else if file.exists()
        && let Err(error) = editor.load_history(file)
    {
        tracing::warn!(%error, file = %file.display(), "the history was not read");
    }
}

fn read(editor: &mut Editor<Lines, FileHistory>, file: Option<&Path>) -> Typed {
    match editor.readline(PROMPT) {
        Ok(text) => {
            if !text.trim().is_empty() {
                // Both fail only if the history cannot be kept, which is no reason to lose the prompt.
                let added = editor.add_history_entry(&text).map(drop);
                let kept = added.and_then(|()| file.map_or(Ok(()), |file| editor.append_history(file)));
                if let Err(error) = kept {
                    tracing::warn!(%error, "the history was not written");
                }
            }
            Typed::Text(joined(&text))
        }
        Err(ReadlineError::Interrupted) => Typed::Interrupt,
        Err(_end) => Typed::End,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_in_the_users_state() {
        let at = |vars: &'static [(&str, &str)]| {
            history_file(&|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(at(&[("HOME", "/h")]), Some(PathBuf::from("/h/.local/state/lagoon/chat_history")));
        assert_eq!(at(&[("HOME", "/h"), ("XDG_STATE_HOME", "/s")]), Some(PathBuf::from("/s/lagoon/chat_history")));
        assert_eq!(at(&[]), None);
    }

    #[test]
    fn a_backslash_continues_a_line() {
        assert_eq!(joined("one\\\ntwo\\\nthree"), "one\ntwo\nthree");
        assert_eq!(joined("a\\b\nc"), "a\\b\nc");
    }
}
