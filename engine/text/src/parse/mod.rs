//! Parsers of answers: what of a model's text is content, what reasoning, and what are tool calls.
//!
//! A parser is given the text of an answer piece by piece and gives the same [`Parts`] however the text is split. It holds
//! back at most [`CALL_BYTES_MAX`] bytes: a call is given when it is complete. Text that is no call is content, and so is a
//! broken call; only marks, headers of messages and white space around calls and reasoning are dropped.

mod calls;
mod deepseek;
mod glm;
mod harmony;
mod hermes;
mod lark;
mod llama;
mod mistral;
mod qwen_coder;
mod reasoning;
mod reasoning_tokens;
#[cfg(test)]
mod tests;
mod values;

use calls::CallParser;
use harmony::Harmony;
pub use lark::{Beside, Calls};
use reasoning::Think;
pub use reasoning_tokens::ReasoningTokens;
use serde_json::Value;
use std::sync::Arc;

/// Longest tool call, in bytes; a longer one is content.
pub const CALL_BYTES_MAX: usize = 256 << 10;
/// Most tool calls of one answer, which ends with the last of them.
pub const CALLS_MAX: usize = 128;

/// One function that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments; `null` if there is none.
    pub parameters: Value,
    /// The tool for the template: type, name, description and parameters.
    pub definition: Value,
    /// Arguments of its calls must be those of `parameters`.
    pub strict: bool,
}

/// One tool call of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// Parts of an answer's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
}

impl Parts {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// Adds the parts that follow.
    pub fn append(&mut self, after: Self) {
        self.content.push_str(&after.content);
        self.reasoning.push_str(&after.reasoning);
        self.calls.extend(after.calls);
    }
}

/// Whether a function may have this name: 1 to 64 ASCII letters, digits, `_`, `-` and `.` (more than OpenAI's, which has no dot). A
/// call of another name is content.
#[must_use]
pub fn is_function_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    !name.is_empty() && name.len() <= 64 && name.chars().all(letter)
}

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}` at the start of the answer, several with `;` between: Llama 3.
    Llama3,
    /// `[TOOL_CALLS]` before a list of calls, or before each name and its arguments: Mistral.
    Mistral,
    /// `<function=NAME><parameter=KEY>VALUE</parameter></function>` in `<tool_call>`: Qwen3-Coder.
    QwenCoder,
    /// Messages to `functions.NAME` in a channel: gpt-oss.
    Harmony,
    /// `<｜tool▁call▁begin｜>` and its like: DeepSeek V3, R1 and V3.1.
    DeepSeek,
    /// `<arg_key>` and `<arg_value>` in `<tool_call>`: GLM-4.5.
    Glm,
}

/// The formats by vLLM's names, of `--tool-parser`.
pub const TOOL_FORMATS: &[(&str, ToolFormat)] = &[
    ("hermes", ToolFormat::Hermes),
    ("llama3_json", ToolFormat::Llama3),
    ("mistral", ToolFormat::Mistral),
    ("qwen3_coder", ToolFormat::QwenCoder),
    ("openai", ToolFormat::Harmony),
    ("deepseek_v3", ToolFormat::DeepSeek),
    ("deepseek_v31", ToolFormat::DeepSeek),
    ("glm45", ToolFormat::Glm),
];

impl ToolFormat {
    /// The format that a chat template's text shows.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        // Ordered: the earlier marks stand beside later ones in some templates.
        let marks = [
            ("<|channel|>", Self::Harmony),
            ("<arg_key>", Self::Glm),
            ("<function=", Self::QwenCoder),
            (deepseek::BEGIN, Self::DeepSeek),
            ("[TOOL_CALLS]", Self::Mistral),
            ("<tool_call>", Self::Hermes),
            ("<|python_tag|>", Self::Llama3),
        ];
        marks.into_iter().find(|(mark, _)| source.contains(mark)).map(|(_, format)| format)
    }

    /// Whether a call's id has nine letters or digits, which Mistral's templates demand.
    #[must_use]
    pub fn has_short_ids(self) -> bool {
        self == Self::Mistral
    }

    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenCoder | Self::Glm => &["<tool_call>", "</tool_call>"],
            Self::Llama3 => &[llama::TAG],
            Self::Mistral => mistral::MARKS,
            Self::Harmony => harmony::MARKS,
            Self::DeepSeek => deepseek::MARKS,
        }
    }
}

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>` before the answer: DeepSeek-R1, Qwen3, GLM-4.5.
    Think,
    /// The channel `analysis`: gpt-oss.
    Harmony,
}

/// The formats by vLLM's names, of `--reasoning-parser`.
pub const REASONING_FORMATS: &[(&str, ReasoningFormat)] = &[
    ("deepseek_r1", ReasoningFormat::Think),
    ("qwen3", ReasoningFormat::Think),
    ("glm45", ReasoningFormat::Think),
    ("openai_gptoss", ReasoningFormat::Harmony),
];

impl ReasoningFormat {
    /// The format that a chat template's text shows.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("<|channel|>") {
            return Some(Self::Harmony);
        }
        source.contains(reasoning::CLOSE).then_some(Self::Think)
    }

    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Think => &[reasoning::OPEN, reasoning::CLOSE],
            Self::Harmony => harmony::MARKS,
        }
    }
}

/// Formats of a model's answers; `None` where they are not looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats {
    pub tools: Option<ToolFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

impl Formats {
    /// Texts of special tokens that a parser must see although special tokens are no content.
    pub fn marks(self) -> impl Iterator<Item = &'static str> {
        let tools = self.tools.map_or(&[][..], ToolFormat::marks);
        let reasoning = self.reasoning.map_or(&[][..], ReasoningFormat::marks);
        tools.iter().chain(reasoning).copied()
    }
}

/// Parser of one answer.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    stage: Stage,
    /// Calls found so far.
    calls: usize,
    calls_max: usize,
}

#[derive(Clone, Debug)]
enum Stage {
    Plain { reasoning: Option<Think>, calls: Option<CallParser> },
    Harmony(Harmony),
}

impl AnswerParser {
    /// A parser of the answer to `prompt`, the rendered text, of which only the end matters. At most `calls_max` calls are
    /// given; then the answer is over (see [`AnswerParser::is_over`]), and what follows is dropped. Either both formats are
    /// [`ToolFormat::Harmony`] and [`ReasoningFormat::Harmony`], or none is, or one is not looked for.
    #[must_use]
    pub fn new(formats: Formats, tools: &Arc<[Tool]>, prompt: &str, calls_max: usize) -> Self {
        let harmony = formats.tools == Some(ToolFormat::Harmony) || formats.reasoning == Some(ReasoningFormat::Harmony);
        let stage = if harmony {
            Stage::Harmony(Harmony::new(formats))
        } else {
            Stage::Plain {
                reasoning: formats.reasoning.map(|_| Think::after(prompt)),
                calls: formats.tools.map(|format| CallParser::new(format, Arc::clone(tools))),
            }
        };
        Self { stage, calls: 0, calls_max: calls_max.min(CALLS_MAX) }
    }

    /// Adds text; returns the parts that are certain now.
    pub fn push(&mut self, text: &str) -> Parts {
        let (mut out, calls_left) = (Parts::default(), self.calls_max - self.calls);
        match &mut self.stage {
            _ if calls_left == 0 => {}
            Stage::Harmony(harmony) => harmony.push(text, calls_left, &mut out),
            Stage::Plain { reasoning, calls } => {
                let mut rest = String::new();
                match reasoning {
                    Some(think) => think.push(text, &mut out.reasoning, &mut rest),
                    None => rest.push_str(text),
                }
                match calls {
                    Some(calls) => calls.push(&rest, calls_left, &mut out),
                    None => out.content.push_str(&rest),
                }
            }
        }
        self.limit(out)
    }

    /// The parts held back. Call it once, after the last text.
    pub fn finish(&mut self) -> Parts {
        let (mut out, calls_left) = (Parts::default(), self.calls_max - self.calls);
        match &mut self.stage {
            _ if calls_left == 0 => {}
            Stage::Harmony(harmony) => harmony.finish(&mut out),
            Stage::Plain { reasoning, calls } => {
                let mut rest = String::new();
                if let Some(think) = reasoning {
                    think.finish(&mut out.reasoning, &mut rest);
                }
                match calls {
                    Some(calls) => {
                        calls.push(&rest, calls_left, &mut out);
                        if out.calls.len() < calls_left {
                            calls.finish(&mut out);
                        }
                    }
                    None => out.content.push_str(&rest),
                }
            }
        }
        self.limit(out)
    }

    /// Calls given so far.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the most calls were given: what follows is not wanted.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.calls >= self.calls_max
    }

    fn limit(&mut self, mut out: Parts) -> Parts {
        out.calls.truncate(self.calls_max - self.calls);
        self.calls += out.calls.len();
        out
    }
}

/// Length of the longest end of `text` that may be the beginning of one of `marks`.
fn held(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(1) - 1;
    let from = text.floor_char_boundary(text.len().saturating_sub(longest));
    let begins = |at: &usize| marks.iter().any(|mark| mark.len() > text.len() - at && mark.starts_with(&text[*at..]));
    text[from..].char_indices().map(|(at, _)| from + at).find(begins).map_or(0, |at| text.len() - at)
}

/// The first of `marks` in `text`, and its place.
fn find<'a>(text: &str, marks: &[&'a str]) -> Option<(usize, &'a str)> {
    marks.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min_by_key(|(at, _)| *at)
}
