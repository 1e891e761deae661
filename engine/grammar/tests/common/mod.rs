//! Tokenizers of the tests, and answers drawn at random from what a matcher allows.

use lagoon_grammar::{AnswerMatcher, Grammars, Next};
use lagoon_text::{Tokenizer, TokenizerConfig};
use lagoon_types::{Constraint, Grammar};
use rand::Rng;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// Tokens of an answer above which a test fails: every grammar of the tests can end long before.
const ANSWER_MAX: usize = 6000;
/// Tokens after which an answer ends as soon as it may.
const HURRY: usize = 40;

/// A model's tokenizer with the grammars of its vocabulary.
pub(crate) struct Model {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) grammars: Grammars,
    pub(crate) vocab: u32,
    pub(crate) end: u32,
    /// What ends a text without quotes: by chance it would take long to come.
    pub(crate) mark: Option<&'static str>,
}

/// A byte-level tokenizer, and a SentencePiece one with byte fallback.
pub(crate) fn models() -> [Model; 2] {
    ["models/passkey", "tests/goldens/tied_sentencepiece"].map(|dir| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
        let tokenizer = Arc::new(Tokenizer::open(&dir).unwrap());
        // As of a model whose embedding table is longer.
        let vocab = u32::try_from(tokenizer.vocab_size()).unwrap() + 5;
        let end = tokenizer.eos_id().unwrap();
        let grammars = Grammars::new(Arc::clone(&tokenizer), vocab, &[end]);
        Model { tokenizer, grammars, vocab, end, mark: None }
    })
}

/// A byte-level tokenizer whose tokens are bytes, these special ones and one at the end.
pub(crate) fn model(special: &[&str]) -> Model {
    let letters = (0..0x144_u32).filter_map(char::from_u32);
    let is_letter = |c: &char| matches!(u32::from(*c), 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff | 0x100..=0x143);
    let vocab: Map<String, Value> =
        letters.filter(is_letter).zip(0u32..).map(|(c, id)| (c.to_string(), json!(id))).collect();
    let first = u32::try_from(vocab.len()).unwrap();
    let added: Vec<Value> = special
        .iter()
        .chain(&["<end>"])
        .zip(first..)
        .map(|(text, id)| json!({"id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}))
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": added,
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let config = TokenizerConfig { special: vec![("eos_token", "<end>".to_owned())], ..TokenizerConfig::default() };
    let tokenizer = Arc::new(Tokenizer::parse(Path::new("bytes"), file.to_string().as_bytes(), &config).unwrap());
    let (vocab, end) = (u32::try_from(tokenizer.vocab_size()).unwrap(), tokenizer.eos_id().unwrap());
    Model { grammars: Grammars::new(Arc::clone(&tokenizer), vocab, &[end]), tokenizer, vocab, end, mark: None }
}

pub(crate) fn constraint(grammar: Grammar) -> Arc<Constraint> {
    Arc::new(Constraint { grammar, reasoning: None })
}

impl Model {
    /// A matcher that can be asked.
    pub(crate) fn matcher(&self, constraint: &Arc<Constraint>, answer: &[u32]) -> AnswerMatcher {
        let matcher = AnswerMatcher::new(Arc::clone(constraint), answer);
        while !matcher.poll(Some(&self.grammars)) {
            std::thread::yield_now();
        }
        matcher
    }

    pub(crate) fn next(&self, matcher: &AnswerMatcher, drafts: &[u32]) -> Vec<Next> {
        let mut out = Vec::new();
        matcher.next(drafts, &mut out);
        out
    }

    /// Tokens that may come next, ascending.
    pub(crate) fn allowed(&self, next: &Next) -> Vec<u32> {
        match next.mask() {
            Some(mask) => (0..self.vocab).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect(),
            None => panic!("{next:?}"),
        }
    }

    /// Draws an answer; ends of texts, objects and lists are likelier than they would be by chance. Returns its tokens
    /// without the one at the end.
    pub(crate) fn draw(&self, constraint: &Arc<Constraint>, rng: &mut impl Rng) -> Vec<u32> {
        let matcher = self.matcher(constraint, &[]);
        let mut answer = Vec::new();
        loop {
            assert!(answer.len() < ANSWER_MAX, "{constraint:?}: {:?}", self.tokenizer.decode(&answer, true));
            let next = self.next(&matcher, &[]).remove(0);
            let token = match next {
                Next::Nothing => return answer,
                next => {
                    let allowed = self.allowed(&next);
                    let mark = self.mark.filter(|_| answer.len() > HURRY && !allowed.contains(&self.end));
                    let closing = mark.and_then(|mark| self.closing(mark, &answer, &allowed));
                    closing.unwrap_or_else(|| self.choose(&allowed, answer.len(), rng))
                }
            };
            let ended = matcher.take(token);
            matcher.push(&[token]);
            if token == self.end {
                return answer;
            }
            answer.push(token);
            if ended {
                return answer;
            }
        }
    }

    /// The token that goes on with the mark, or begins it.
    fn closing(&self, mark: &str, answer: &[u32], allowed: &[u32]) -> Option<u32> {
        let text = self.tokenizer.decode(answer, false);
        let begun = (0..mark.len()).rev().find(|n| text.ends_with(&mark[..*n]))?;
        let is_next = |id: &&u32| self.tokenizer.token_bytes(**id) == mark.as_bytes()[begun..=begun];
        allowed.iter().find(is_next).copied()
    }

    fn choose(&self, allowed: &[u32], at: usize, rng: &mut impl Rng) -> u32 {
        assert!(!allowed.is_empty(), "nothing is allowed");
        let hurries = at > HURRY || rng.random_bool(0.2);
        if hurries && allowed.contains(&self.end) {
            return self.end;
        }
        let closes = |id: &&u32| {
            let bytes = self.tokenizer.token_bytes(**id);
            bytes.len() == 1 && b"\"}]".contains(&bytes[0])
        };
        let closing: Vec<u32> = allowed.iter().filter(closes).copied().collect();
        if hurries && !closing.is_empty() && rng.random_bool(0.7) {
            return closing[rng.random_range(0..closing.len())];
        }
        allowed[rng.random_range(0..allowed.len())]
    }
}
