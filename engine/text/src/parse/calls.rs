//! Finds tool calls in content: all formats but gpt-oss's.

use super::{
    CALL_BYTES_MAX, Call, Parts, Tool, ToolFormat, deepseek, find, glm, held, hermes, is_function_name, llama, mistral,
    qwen_coder,
};
use std::sync::Arc;

/// Parser of one answer's calls.
#[derive(Clone, Debug)]
pub(super) struct CallParser {
    format: ToolFormat,
    tools: Arc<[Tool]>,
    /// Text that is neither content nor a call yet; inside a call, from its first mark on.
    text: String,
    /// Where the end of a call is looked for, while one is open.
    open: Option<Scan>,
    /// White space since the start or the last call, which is content only before other content; `None` once there is some.
    gap: Option<String>,
    called: bool,
}

impl CallParser {
    pub(super) fn new(format: ToolFormat, tools: Arc<[Tool]>) -> Self {
        Self { format, tools, text: String::new(), open: None, gap: Some(String::new()), called: false }
    }

    /// Adds text; stops behind the last of `calls_left` calls.
    pub(super) fn push(&mut self, text: &str, calls_left: usize, out: &mut Parts) {
        self.text.push_str(text);
        while out.calls.len() < calls_left
            && if self.open.is_some() { self.close_call(out) } else { self.open_call(out) }
        {}
    }

    pub(super) fn finish(&mut self, out: &mut Parts) {
        let rest = std::mem::take(&mut self.text);
        if self.open.take().is_some() {
            self.call(rest, out);
        } else {
            self.content(&rest, out);
        }
        if !self.called
            && let Some(gap) = self.gap.take()
        {
            out.content.push_str(&gap);
        }
    }

    /// Reads up to the start of a call. Returns whether there is one.
    fn open_call(&mut self, out: &mut Parts) -> bool {
        if self.format == ToolFormat::Llama3 && self.gap.is_some() {
            let separator = |c: char| c.is_whitespace() || (c == ';' && self.called);
            let white = self.text.len() - self.text.trim_start_matches(separator).len();
            let white: String = self.text.drain(..white).collect();
            self.gap.get_or_insert_default().push_str(&white);
            if self.text.starts_with('{') {
                self.open = Some(Scan::default());
                return true;
            }
        }
        let starts = self.format.starts();
        let found = find(&self.text, starts);
        let certain = found.map_or_else(|| self.text.len() - held(&self.text, starts), |(at, _)| at);
        let content: String = self.text.drain(..certain).collect();
        self.content(&content, out);
        self.open = found.map(|(_, mark)| Scan { at: mark.len(), ..Scan::default() });
        self.open.is_some()
    }

    /// Reads up to the end of the open call. Returns whether it is there.
    fn close_call(&mut self, out: &mut Parts) -> bool {
        let Some(scan) = &mut self.open else { return false };
        let end = match self.format.end() {
            Some(mark) => scan.mark(&self.text, mark),
            None => scan.json(&self.text),
        };
        let block = match end {
            Some(end) if end <= CALL_BYTES_MAX => end,
            _ if self.text.len() > CALL_BYTES_MAX => {
                self.open = None;
                let end = self.text.floor_char_boundary(CALL_BYTES_MAX);
                let broken: String = self.text.drain(..end).collect();
                self.content(&broken, out);
                return true;
            }
            _ => return false,
        };
        self.open = None;
        let block = self.text.drain(..block).collect();
        self.call(block, out);
        true
    }

    /// Takes a complete block as calls, or as content if it is broken.
    fn call(&mut self, block: String, out: &mut Parts) {
        match self
            .format
            .parse(&block, &self.tools)
            .filter(|calls| !calls.is_empty() && calls.iter().all(|call| is_function_name(&call.name)))
        {
            Some(calls) => {
                self.called = true;
                self.gap = Some(String::new());
                out.calls.extend(calls);
            }
            None => self.content(&block, out),
        }
    }

    fn content(&mut self, text: &str, out: &mut Parts) {
        match &mut self.gap {
            Some(gap) if text.trim().is_empty() && gap.len() < CALL_BYTES_MAX => gap.push_str(text),
            gap => {
                out.content.push_str(&gap.take().unwrap_or_default());
                out.content.push_str(text);
            }
        }
    }
}

impl ToolFormat {
    pub(super) fn starts(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenCoder | Self::Glm => &["<tool_call>"],
            Self::Llama3 => &[llama::TAG],
            Self::Mistral => &[mistral::CALLS],
            Self::DeepSeek => &[deepseek::BEGIN],
            Self::Harmony => &[],
        }
    }

    /// The mark at a call's end; `None` where the end of its JSON is.
    fn end(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::QwenCoder | Self::Glm => Some("</tool_call>"),
            Self::DeepSeek => Some(deepseek::END),
            Self::Llama3 | Self::Mistral | Self::Harmony => None,
        }
    }

    fn parse(self, block: &str, tools: &[Tool]) -> Option<Vec<Call>> {
        match self {
            Self::Hermes => hermes::parse(block),
            Self::QwenCoder => qwen_coder::parse(block, tools),
            Self::Glm => glm::parse(block, tools),
            Self::Llama3 => llama::parse(block, tools),
            Self::Mistral => mistral::parse(block),
            Self::DeepSeek => deepseek::parse(block),
            Self::Harmony => None,
        }
    }
}

/// Search for the end of a call that goes on where it stopped.
#[derive(Clone, Debug, Default)]
struct Scan {
    /// Next byte to look at.
    at: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Whether something but white space was seen.
    begun: bool,
}

impl Scan {
    /// The end of the first `mark`.
    fn mark(&mut self, text: &str, mark: &str) -> Option<usize> {
        let from = text.floor_char_boundary(self.at);
        if let Some(found) = text[from..].find(mark) {
            return Some(from + found + mark.len());
        }
        self.at = self.at.max(text.len().saturating_sub(mark.len() - 1));
        None
    }

    /// The end of the first object, or of a list that stands first.
    fn json(&mut self, text: &str) -> Option<usize> {
        while let Some(byte) = text.as_bytes().get(self.at) {
            self.at += 1;
            let first = !self.begun;
            self.begun |= !byte.is_ascii_whitespace();
            match byte {
                _ if self.in_string => {
                    self.in_string = self.escaped || *byte != b'"';
                    self.escaped = *byte == b'\\' && !self.escaped;
                }
                b'"' if self.depth > 0 => self.in_string = true,
                b'{' => self.depth += 1,
                b'[' if self.depth > 0 || first => self.depth += 1,
                b'}' | b']' if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(self.at);
                    }
                }
                _ => {}
            }
        }
        None
    }
}
