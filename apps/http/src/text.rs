//! What the server asks of a tokenizer and chat template.
//!
//! A trait rather than a type, because one is loaded from a model directory and the other is scripted in tests.

use serde::Serialize;
use std::fmt;

/// One message of a chat, its content flattened to text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
}

/// The text could not be turned into tokens or back, or the template refused the messages. The message is for the
/// client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TextError(pub String);

/// A model's tokenizer and chat template.
pub trait TextModel: Send + Sync + fmt::Debug + 'static {
    /// Tokens of `text`; `special` adds the model's begin (and end) tokens. Special tokens written out in the text
    /// are recognised.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError>;

    /// Text of `ids`; `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError>;

    /// The prompt for `messages`, ending where the assistant's answer begins if `open_answer`.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the messages.
    fn render_chat(&self, messages: &[ChatMessage], open_answer: bool) -> Result<String, TextError>;

    /// A decoder for one sequence's tokens as they come.
    fn decoder(&self, skip_special: bool) -> Box<dyn StreamDecoder>;
}

/// Turns tokens into text one by one. All pieces together are the decoded sequence.
pub trait StreamDecoder: Send {
    /// The text that is certain after `id`: empty while a character is incomplete.
    ///
    /// # Errors
    /// When the id is not in the vocabulary.
    fn push(&mut self, id: u32) -> Result<String, TextError>;

    /// What was held back, at the end of the sequence.
    fn finish(&mut self) -> String;
}
