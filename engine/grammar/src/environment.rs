//! A model's tokens as llguidance wants them: the bytes of each.

use crate::error::GrammarError;
use lagoon_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use std::sync::Arc;

/// Longest token, in bytes, that a grammar may have; longer ones are never drawn. The trie takes 1,024.
const TOKEN_BYTES_MAX: usize = 1000;
/// States of one answer's lexer: 1 to 2 KiB each.
const LEXER_STATES_MAX: usize = 16 << 10;
/// The mark of tokens that are no text, as llguidance has it: no UTF-8 begins with it.
const SPECIAL: u8 = 0xff;

/// The compiler's view of a model's vocabulary.
pub(crate) struct Environment {
    pub(crate) factory: ParserFactory,
    /// Tokens whose text at an answer's beginning is the one that they have in its middle.
    pub(crate) first: SimpleVob,
    /// All tokens of the vocabulary, and those of them that do not end the answer.
    pub(crate) all: SimpleVob,
    pub(crate) unending: SimpleVob,
    /// Tokens of the model; the trie has one more.
    pub(crate) vocab: u32,
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Environment").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

impl Environment {
    /// The environment of a model with `vocab` tokens, of which `ends` end an answer.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab: u32, ends: &[u32]) -> Result<Self, GrammarError> {
        let invalid = |problem: String| GrammarError::Tokenizer(problem);
        let size = vocab + 1;
        let mut first = SimpleVob::alloc(size as usize);
        let mut words: Vec<Vec<u8>> = Vec::with_capacity(size as usize);
        let (mut texts, mut vanishing) = (0, 0);
        for id in 0..vocab {
            let word = word(tokenizer, id, ends);
            let is_text = word.first().is_some_and(|byte| *byte != SPECIAL);
            let vanishes = is_text && vanishes(tokenizer, id, &word);
            texts += u32::from(is_text);
            vanishing += u32::from(vanishes);
            if !vanishes {
                first.allow_token(id);
            }
            words.push(word);
        }
        if texts > 0 && vanishing == texts {
            return Err(invalid("it puts a space between any two tokens".to_owned()));
        }
        // Where a model has no token that ends an answer, none of its tokens does.
        words.push([&[SPECIAL][..], b"<lagoon_end>"].concat());
        let ends: Vec<u32> = ends.iter().copied().filter(|id| *id < vocab).collect();
        let end = ends.first().copied().unwrap_or(vocab);
        let mut trie = TokTrie::from(&TokRxInfo::new(size, end), &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(&ends);
        }
        let mut all = SimpleVob::alloc(size as usize);
        (0..vocab).for_each(|id| all.allow_token(id));
        let mut unending = all.clone();
        ends.iter().for_each(|id| unending.disallow_token(*id));
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let caps = InferenceCapabilities { ff_tokens: false, backtrack: false, ..InferenceCapabilities::default() };
        let slices = SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&env, caps, &slices).map_err(|error| invalid(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() =
            ParserLimits { max_lexer_states: LEXER_STATES_MAX, verbose_errors: false, ..ParserLimits::default() };
        Ok(Self { factory, first, all, unending, vocab })
    }
}

/// A token's bytes: with llguidance's mark before them if it is no text, none if it never stands for any.
fn word(tokenizer: &Tokenizer, id: u32, ends: &[u32]) -> Vec<u8> {
    let Some(name) = tokenizer.token(id) else { return Vec::new() };
    if tokenizer.is_special(id) || ends.contains(&id) {
        return [&[SPECIAL][..], format!("<{id}>").as_bytes(), name.as_bytes()].concat();
    }
    let bytes = tokenizer.token_bytes(id);
    // 0xFF is in no UTF-8 text, so that only a token of bytes could have it.
    if bytes.len() > TOKEN_BYTES_MAX || bytes.contains(&SPECIAL) { Vec::new() } else { bytes }
}

/// Whether a token that begins with a space loses it at the beginning of a text.
fn vanishes(tokenizer: &Tokenizer, id: u32, word: &[u8]) -> bool {
    word.first() == Some(&b' ') && !tokenizer.decode(&[id], false).starts_with(' ')
}
