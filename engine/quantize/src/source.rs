//! A model to quantise, with its vocabulary.

use crate::QuantizeError;
use lagoon_model::gguf::{self, Gguf, Item, is_gguf};
use lagoon_model::{Export, GenerationConfig};
use lagoon_text::{GgufVocabulary, Tokenizer};
use std::path::{Path, PathBuf};

/// A model in 16 or 32 bits.
#[derive(Debug)]
pub struct Source {
    pub(crate) path: PathBuf,
    pub(crate) export: Export,
    notices: Vec<String>,
}

impl Source {
    /// Opens the model in a directory, or the GGUF file that it is, and reads its vocabulary. `name` is the model's name in the file,
    /// unless it is a file that has one.
    ///
    /// # Errors
    /// If a part of the model cannot be read, or cannot be written as a GGUF file.
    pub fn open(path: &Path, name: &str) -> Result<Self, QuantizeError> {
        let mut export = Export::open(path)?;
        let mut notices = Vec::new();
        if !is_gguf(path) {
            export.keys.set("general.type", Item::Text("model".to_owned()));
            export.keys.set("general.name", Item::Text(name.to_owned()));
            let exported = GgufVocabulary::of_dir(path, export.spec.vocab)?;
            let ends = GenerationConfig::open(path, &export.spec)?.eos_ids;
            let ends = first_of_text(&ends, exported.vocabulary.eos_id);
            let left = gguf::set_vocabulary(&exported.vocabulary, &ends, &mut export.keys);
            if !left.is_empty() {
                notices.push(format!("the file does not name the tokens {left:?}, which end answers, too"));
            }
            if let Some(why) = exported.kept_whole {
                let others =
                    if exported.is_portable { "others may give other tokens" } else { "other programs do not" };
                notices
                    .push(format!("the file keeps tokenizer.json as a whole, which Lagoon reads and {others}: {why}"));
            }
        }
        Ok(Self { path: path.to_owned(), export, notices })
    }

    /// What a user should know about the file.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Parameters of the model.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.export.spec.parameters()
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer, QuantizeError> {
        Ok(if is_gguf(&self.path) {
            Tokenizer::from_gguf(&gguf::vocabulary(Gguf::open(&self.path)?.metadata())?)?
        } else {
            Tokenizer::open(&self.path)?
        })
    }
}

/// Tokens that end an answer, that of a text first.
fn first_of_text(ends: &[u32], text: Option<u32>) -> Vec<u32> {
    let text = text.filter(|id| ends.is_empty() || ends.contains(id));
    text.into_iter().chain(ends.iter().copied().filter(|id| Some(*id) != text)).collect()
}
