//! Reasoning between `<think>` and `</think>`, before the answer.

use super::held;

pub(super) const OPEN: &str = "<think>";
pub(super) const CLOSE: &str = "</think>";

/// Parser of one answer's reasoning.
#[derive(Clone, Debug)]
pub(super) struct Think {
    state: State,
    /// Text that is not assigned yet.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space was seen.
    Start,
    /// Reasoning; `begun` after its first letter.
    Reasoning {
        begun: bool,
    },
    /// White space after reasoning.
    After,
    Content,
}

impl Think {
    /// A parser of the answer to `prompt`, whose end may have opened the reasoning.
    pub(super) fn after(prompt: &str) -> Self {
        let open = prompt.trim_end().ends_with(OPEN);
        let state = if open { State::Reasoning { begun: false } } else { State::Start };
        Self { state, text: String::new() }
    }

    pub(super) fn push(&mut self, text: &str, reasoning: &mut String, content: &mut String) {
        self.text.push_str(text);
        loop {
            match self.state {
                State::Start => {
                    let text = self.text.trim_start();
                    if let Some(rest) = text.strip_prefix(OPEN) {
                        self.text = rest.to_owned();
                        self.state = State::Reasoning { begun: false };
                    } else if OPEN.starts_with(text) && self.text.len() < super::CALL_BYTES_MAX {
                        return;
                    } else {
                        self.state = State::Content;
                    }
                }
                State::Reasoning { begun } => {
                    let close = self.text.find(CLOSE);
                    let certain = close.unwrap_or_else(|| {
                        let rest = &self.text[..self.text.len() - held(&self.text, &[CLOSE])];
                        // White space may stand before the mark.
                        rest.trim_end().len()
                    });
                    let part = self.text[..certain].trim_end();
                    let part = if begun { part } else { part.trim_start() };
                    reasoning.push_str(part);
                    let begun = begun || !part.is_empty();
                    self.text.drain(..close.map_or(certain, |at| at + CLOSE.len()));
                    self.state = if close.is_some() { State::After } else { State::Reasoning { begun } };
                    if close.is_none() {
                        return;
                    }
                }
                State::After => {
                    let white = self.text.len() - self.text.trim_start().len();
                    self.text.drain(..white);
                    if self.text.is_empty() {
                        return;
                    }
                    self.state = State::Content;
                }
                State::Content => {
                    content.push_str(&self.text);
                    self.text.clear();
                    return;
                }
            }
        }
    }

    pub(super) fn finish(&mut self, reasoning: &mut String, content: &mut String) {
        let rest = std::mem::take(&mut self.text);
        match self.state {
            State::Reasoning { .. } => reasoning.push_str(rest.trim_end()),
            State::Start | State::Content => content.push_str(&rest),
            State::After => {}
        }
    }
}
