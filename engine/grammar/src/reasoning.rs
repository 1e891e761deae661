//! Where an answer is: within its reasoning, or in the text that the grammar describes.

use lagoon_types::Reasoning;

/// The place behind some tokens of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nothing is there yet: reasoning or the content begins.
    Begin,
    Reasoning,
    /// Behind the reasoning's end, before the token with which the content begins.
    Header,
    Content,
}

impl Place {
    /// The place at an answer's beginning.
    pub(crate) fn first(reasoning: Option<&Reasoning>) -> Self {
        match reasoning {
            Some(of) if of.is_open => Self::Reasoning,
            Some(of) if of.opens.is_some() => Self::Begin,
            _ => Self::Content,
        }
    }

    /// The place behind `taken`, whose last token was drawn here. Not for the content's tokens.
    pub(crate) fn behind(self, of: &Reasoning, taken: &[u32]) -> Self {
        let last = taken.last().copied();
        match self {
            Self::Begin if last == of.opens => Self::Reasoning,
            Self::Reasoning if taken.ends_with(&of.ends) => {
                if of.until.is_some() {
                    Self::Header
                } else {
                    Self::Content
                }
            }
            Self::Header if last == of.until => Self::Content,
            Self::Begin | Self::Content => Self::Content,
            Self::Reasoning | Self::Header => self,
        }
    }
}
