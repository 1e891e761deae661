//! Constraints on an answer's text (structured output): a grammar, and where in the answer it begins.

/// A constraint on an answer: its text, or that behind its reasoning, is a sentence of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Constraint {
    pub grammar: Grammar,
    /// What the model may write before; `None`: the grammar begins with the answer.
    pub reasoning: Option<Reasoning>,
}

/// The grammar of a constraint, as its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON value that this JSON schema allows; the schema as text.
    JsonSchema(String),
    /// A text that the whole of this regular expression matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A sentence of this grammar, in llguidance's variant of Lark.
    Lark(String),
}

impl Grammar {
    /// Bytes of its text.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }
}

/// Reasoning before an answer's content, by its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reasoning {
    /// The answer begins within it: the prompt has opened it, or the format always does.
    pub is_open: bool,
    /// The token that opens it at the answer's beginning; without that token the grammar begins at once.
    pub opens: Option<u32>,
    /// Tokens at the end of reasoning; not empty.
    pub ends: Vec<u32>,
    /// The token behind `ends` with which the content begins; `None`: it begins behind `ends`.
    pub until: Option<u32>,
    /// Whether the answer may end within it, as with a call of a tool.
    pub may_end: bool,
}
