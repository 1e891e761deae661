//! gpt-oss's harmony: an answer is messages, each with a header (channel, recipient) and a body. Channel `analysis` is
//! reasoning; a message to `functions.NAME` is a call; every other body is content.

use super::{CALL_BYTES_MAX, Call, Formats, Parts, ToolFormat, find, held, is_function_name, values};

pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const START: &str = "<|start|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
const ENDS: &[&str] = &[END, "<|call|>", "<|return|>", START];
pub(super) const MARKS: &[&str] = &[CHANNEL, MESSAGE, START, END, "<|call|>", "<|return|>", CONSTRAIN];
/// Longest header, in bytes; a longer one is content.
const HEADER_BYTES_MAX: usize = 1024;

/// Parser of one answer.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    formats: Formats,
    state: State,
    text: String,
    /// Bytes of an open call in which no end was found.
    searched: usize,
    /// Whether a new message began since the last text, and the kinds of text given so far: content, reasoning.
    new_message: bool,
    given: [bool; 2],
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
        let given = [false; 2];
        Self { formats, state: State::Header, text: String::new(), searched: 0, new_message: false, given }
    }

    /// Adds text; stops behind the last of `calls_left` calls.
    pub(super) fn push(&mut self, text: &str, calls_left: usize, out: &mut Parts) {
        self.text.push_str(text);
        while out.calls.len() < calls_left
            && if self.state == State::Header { self.read_header(out) } else { self.read_body(out) }
        {}
    }

    pub(super) fn finish(&mut self, out: &mut Parts) {
        let rest = std::mem::take(&mut self.text);
        match std::mem::replace(&mut self.state, State::Header) {
            State::Call { name, header } => self.call(name, &header, &rest, out),
            State::Reasoning => self.give(true, &rest, out),
            // The answer ended within a header.
            State::Header if rest.trim_start().starts_with(CHANNEL) || rest.trim_start().starts_with(START) => {}
            State::Header | State::Content => self.give(false, &rest, out),
        }
    }

    /// Reads a header if it is complete, or gives it up. Returns whether a body follows.
    fn read_header(&mut self, out: &mut Parts) -> bool {
        let text = self.text.trim_start();
        let begins = |mark: &str| text.starts_with(mark) || mark.starts_with(text);
        let is_header = [CHANNEL, START, "to="].into_iter().any(begins);
        let message = self.text.find(MESSAGE).filter(|end| is_header && *end <= HEADER_BYTES_MAX);
        if let Some(end) = message {
            let header: String = self.text.drain(..end + MESSAGE.len()).collect();
            self.state = self.state_of(header);
            self.new_message = true;
        } else if !is_header || self.text.len() > HEADER_BYTES_MAX + MESSAGE.len() {
            self.state = State::Content;
            // It would end the content at once, and begin the same header again.
            if let Some(at) = self.text.find(START).filter(|at| self.text[..*at].trim_start().is_empty()) {
                let start: String = self.text.drain(..at + START.len()).collect();
                self.give(false, &start, out);
            }
        }
        self.state != State::Header
    }

    fn state_of(&self, header: String) -> State {
        let calls = self.formats.tools == Some(ToolFormat::Harmony);
        let word_end = |c: char| c.is_whitespace() || c == '<';
        let recipient = header.split_once("to=functions.").map(|(_, rest)| rest.split(word_end).next().unwrap_or(rest));
        if let Some(name) = recipient.filter(|name| calls && is_function_name(name)) {
            return State::Call { name: name.to_owned(), header };
        }
        let channel = header.split_once(CHANNEL).map_or("", |(_, rest)| rest);
        let reasoning = self.formats.reasoning.is_some() && channel.trim_start().starts_with("analysis");
        if reasoning { State::Reasoning } else { State::Content }
    }

    /// Reads a body as far as it is certain. Returns whether its end was found.
    fn read_body(&mut self, out: &mut Parts) -> bool {
        let longest = ENDS.iter().map(|mark| mark.len()).max().unwrap_or(1);
        let from = self.text.floor_char_boundary(self.searched.saturating_sub(longest));
        let found = find(&self.text[from..], ENDS).map(|(at, mark)| (from + at, mark));
        let certain = found.map_or_else(|| self.text.len() - held(&self.text, ENDS), |(at, _)| at);
        if let State::Call { header, .. } = &self.state {
            if certain > CALL_BYTES_MAX {
                let header = header.clone();
                (self.state, self.searched) = (State::Content, 0);
                self.give(false, &header, out);
                return true;
            }
            if found.is_none() {
                self.searched = self.text.len();
                return false;
            }
        }
        self.searched = 0;
        let body: String = self.text.drain(..certain).collect();
        let Some((_, mark)) = found else {
            self.give(self.state == State::Reasoning, &body, out);
            return false;
        };
        match std::mem::replace(&mut self.state, State::Header) {
            State::Call { name, header } => self.call(name, &header, &body, out),
            State::Reasoning => self.give(true, &body, out),
            State::Header | State::Content => self.give(false, &body, out),
        }
        if mark != START {
            self.text.drain(..mark.len());
        }
        true
    }

    fn call(&mut self, name: String, header: &str, body: &str, out: &mut Parts) {
        match values::object(body) {
            Some(arguments) => out.calls.push(Call { name, arguments }),
            None => {
                self.give(false, header, out);
                self.give(false, body, out);
            }
        }
    }

    /// Gives text of a message; a line break parts it from an earlier message of its kind.
    fn give(&mut self, is_reasoning: bool, text: &str, out: &mut Parts) {
        if text.is_empty() {
            return;
        }
        let (into, given) = match is_reasoning {
            true => (&mut out.reasoning, &mut self.given[1]),
            false => (&mut out.content, &mut self.given[0]),
        };
        if std::mem::take(&mut self.new_message) && *given {
            into.push('\n');
        }
        *given = true;
        into.push_str(text);
    }
}
