//! gpt-oss's harmony: an answer is messages, each with a header (channel, recipient) and a body. Channel `analysis` is
//! reasoning; a message to `functions.NAME` is a call; every other body is content.

use super::{CALL_BYTES_MAX, CALLS_MAX, Call, Formats, Parts, find, held, values};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const ENDS: &[&str] = &["<|end|>", "<|call|>", "<|return|>", START];
pub(super) const MARKS: &[&str] = &[CHANNEL, MESSAGE, START, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"];
/// Longest header, in bytes; a longer one is content.
const HEADER_BYTES_MAX: usize = 1024;

/// Parser of one answer.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    /// Whether calls and whether reasoning are looked for.
    wanted: (bool, bool),
    state: State,
    text: String,
    calls: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Header,
    Reasoning,
    Content,
    /// Arguments for the function; with the header, in case that they are broken.
    Call {
        name: String,
        header: String,
    },
}

impl Harmony {
    pub(super) fn new(formats: Formats) -> Self {
        let wanted = (formats.tools.is_some(), formats.reasoning.is_some());
        Self { wanted, state: State::Header, text: String::new(), calls: 0 }
    }

    pub(super) fn push(&mut self, text: &str, out: &mut Parts) {
        self.text.push_str(text);
        while if self.state == State::Header { self.header() } else { self.body(out) } {}
    }

    pub(super) fn finish(&mut self, out: &mut Parts) {
        let rest = std::mem::take(&mut self.text);
        match std::mem::replace(&mut self.state, State::Header) {
            State::Call { name, header } => self.call(name, &header, &rest, out),
            State::Reasoning => out.reasoning.push_str(&rest),
            State::Header if rest.trim() == "<|start|>assistant" => {}
            State::Header | State::Content => out.content.push_str(&rest),
        }
    }

    /// Reads a header. Returns whether it was complete.
    fn header(&mut self) -> bool {
        let text = self.text.trim_start();
        let begins = |mark: &str| text.starts_with(mark) || mark.starts_with(text);
        if ![CHANNEL, START, "to="].into_iter().any(begins) {
            self.state = State::Content;
            return true;
        }
        let message = self.text.find(MESSAGE).filter(|end| *end <= HEADER_BYTES_MAX);
        if let Some(end) = message {
            let header: String = self.text.drain(..end + MESSAGE.len()).collect();
            self.state = self.state_of(header);
        } else if self.text.len() > HEADER_BYTES_MAX + MESSAGE.len() {
            self.state = State::Content;
        }
        self.state != State::Header
    }

    fn state_of(&self, header: String) -> State {
        let (calls, reasoning) = self.wanted;
        let word_end = |c: char| c.is_whitespace() || c == '<';
        let recipient = header.split_once("to=functions.").map(|(_, rest)| rest.split(word_end).next().unwrap_or(rest));
        if let Some(name) = recipient.filter(|name| calls && !name.is_empty()) {
            return State::Call { name: name.to_owned(), header };
        }
        let channel = header.split_once(CHANNEL).map_or("", |(_, rest)| rest);
        if reasoning && channel.trim_start().starts_with("analysis") { State::Reasoning } else { State::Content }
    }

    /// Reads a body. Returns whether its end was found.
    fn body(&mut self, out: &mut Parts) -> bool {
        let found = find(&self.text, ENDS);
        let is_call = matches!(self.state, State::Call { .. });
        let too_long =
            is_call && found.map_or_else(|| self.text.len() - held(&self.text, ENDS), |(at, _)| at) > CALL_BYTES_MAX;
        if too_long && let State::Call { header, .. } = std::mem::replace(&mut self.state, State::Content) {
            out.content.push_str(&header);
            return true;
        }
        if is_call && found.is_none() {
            return false;
        }
        let certain = found.map_or_else(|| self.text.len() - held(&self.text, ENDS), |(at, _)| at);
        let body: String = self.text.drain(..certain).collect();
        let Some((_, mark)) = found else {
            let into = if self.state == State::Reasoning { &mut out.reasoning } else { &mut out.content };
            into.push_str(&body);
            return false;
        };
        match std::mem::replace(&mut self.state, State::Header) {
            State::Call { name, header } => self.call(name, &header, &body, out),
            State::Reasoning => out.reasoning.push_str(&body),
            State::Header | State::Content => out.content.push_str(&body),
        }
        if mark != START {
            self.text.drain(..mark.len());
        }
        true
    }

    fn call(&mut self, name: String, header: &str, body: &str, out: &mut Parts) {
        match values::object(body).filter(|_| self.calls < CALLS_MAX) {
            Some(arguments) => {
                self.calls += 1;
                out.calls.push(Call { name, arguments });
            }
            None => out.content.extend([header, body]),
        }
    }
}
