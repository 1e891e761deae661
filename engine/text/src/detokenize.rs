//! Incremental detokenizer: tokens to text, one token at a time.
//!
//! Every token has fixed bytes (see `pieces`), so the text so far is the bytes so far read as UTF-8. At most three bytes
//! are held back: the beginning of an incomplete character. Invalid bytes become U+FFFD exactly as in
//! `String::from_utf8_lossy` of the whole.

use crate::Tokenizer;
use std::sync::Arc;

/// The state of one text under assembly.
#[derive(Clone, Debug)]
pub(crate) struct Assembly {
    /// No token was pushed yet.
    first: bool,
    /// A byte to strip from the beginning of the text, and how often at most from now on.
    strip: Option<(u8, usize)>,
    /// Bytes not released as text; between calls, an incomplete character.
    pending: Vec<u8>,
}

impl Assembly {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        Self { first: true, strip: tokenizer.scheme().strip(), pending: Vec::new() }
    }

    /// Appends the text that `id` completes.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: u32, skip_special: bool, out: &mut String) {
        if skip_special && tokenizer.is_special(id) {
            return;
        }
        let Some(token) = tokenizer.token(id) else { return };
        let held = self.pending.len();
        tokenizer.scheme().append(&token, self.first, &mut self.pending);
        self.first = false;
        while let Some((byte, times)) = self.strip {
            // While the beginning of the text is stripped, no earlier byte is pending.
            match self.pending.get(held) {
                Some(found) if *found == byte && times > 0 => {
                    self.pending.remove(held);
                    self.strip = Some((byte, times - 1));
                }
                Some(_) => self.strip = None,
                None => break,
            }
        }
        self.release(out);
    }

    /// Moves all complete characters from `pending` to `out`.
    fn release(&mut self, out: &mut String) {
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.extend(valid.utf8_chunks().map(|chunk| chunk.valid()));
                    match error.error_len() {
                        Some(invalid) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[invalid..];
                        }
                        None => {
                            rest = after;
                            break;
                        }
                    }
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
    }

    /// Appends a pending incomplete character as one U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Streaming detokenizer of one sequence: the appended texts together are [`Tokenizer::decode`] of all its tokens.
#[derive(Clone, Debug)]
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens that give text even so, ascending.
    shown: Arc<[u32]>,
    assembly: Assembly,
}

impl IncrementalDetokenizer {
    /// A detokenizer of a new text. With `skip_special`, special tokens give no text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let assembly = Assembly::new(&tokenizer);
        Self { tokenizer, skip_special, shown: Arc::default(), assembly }
    }

    /// Gives the text of these special tokens even where special tokens are skipped.
    #[must_use]
    pub fn showing(mut self, mut special: Vec<u32>) -> Self {
        special.sort_unstable();
        self.shown = special.into();
        self
    }

    /// Appends the text that the token completes, possibly empty.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let skip = self.skip_special && self.shown.binary_search(&id).is_err();
        self.assembly.push(&self.tokenizer, id, skip, out);
    }

    /// Appends the text held back. Call it once, after the last token.
    pub fn finish(&mut self, out: &mut String) {
        self.assembly.finish(out);
    }
}
