//! Where reasoning begins and ends, in tokens: a grammar holds behind it.

use super::{ReasoningFormat, harmony, reasoning};
use crate::Tokenizer;

/// The tokens around an answer's reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningTokens {
    /// The answer begins within it.
    pub is_open: bool,
    /// The token that opens it at the answer's beginning.
    pub opens: Option<u32>,
    /// Tokens at its end.
    pub ends: Vec<u32>,
    /// The token behind them with which the content begins; behind `ends` if absent.
    pub until: Option<u32>,
}

impl ReasoningFormat {
    /// The tokens around the reasoning of an answer to `prompt`; `None` if the prompt has closed it.
    ///
    /// # Errors
    /// The mark that is no token of its own.
    pub fn tokens(self, tokenizer: &Tokenizer, prompt: &str) -> Result<Option<ReasoningTokens>, &'static str> {
        let token = |mark: &'static str| tokenizer.id(mark).ok_or(mark);
        let prompt = prompt.trim_end();
        match self {
            Self::Think if prompt.ends_with(reasoning::CLOSE) => Ok(None),
            Self::Think => Ok(Some(ReasoningTokens {
                is_open: prompt.ends_with(reasoning::OPEN),
                opens: Some(token(reasoning::OPEN)?),
                ends: vec![token(reasoning::CLOSE)?],
                until: None,
            })),
            Self::Harmony => {
                let mut ends = vec![token(harmony::CHANNEL)?];
                ends.extend(tokenizer.encode("final", false).map_err(|_refused| harmony::CHANNEL)?);
                Ok(Some(ReasoningTokens { is_open: true, opens: None, ends, until: Some(token(harmony::MESSAGE)?) }))
            }
        }
    }
}
