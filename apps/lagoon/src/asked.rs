//! What a gateway reads of a request to dispatch it: the sizes of prompt and answer, priority, tenant, and hashes of the prompt's
//! prefixes.
//!
//! A gateway has no tokenizer: tokens of a text are estimated from its bytes, by the mean of what instances reported of earlier prompts;
//! prompts of token ids are counted. Prefix hashes are over the text of the body's field, so that equal texts have equal hashes. What
//! cannot be read is estimated from the body's size: the instance checks the request.

use axum::body::Bytes;
use lagoon_cluster::dispatch::{Ask, PrefixHashes};
use lagoon_http::limits::EMBEDDINGS_IN_FLIGHT_MAX;
use lagoon_types::limits::{CACHE_SALT_BYTES_MAX, PREFIX_HASHES_MAX};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

/// Bytes of a prompt's text by which one prefix hash reaches further than the one before.
const HASH_BYTES: usize = 1024;
/// Bytes of text that are taken for a token before instances have reported any prompt.
pub(crate) const BYTES_PER_TOKEN: f64 = 4.0;
/// Bodies above this size, in bytes, are read on another thread.
const INLINE_BYTES_MAX: usize = 64 << 10;
/// Tokens of an answer whose request names no limit: the mean of answers counts.
const ANSWER_TOKENS_MAX: u64 = 1 << 20;

/// See the module's documentation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Asked {
    /// Bytes of text of its prompts.
    text_bytes: usize,
    /// Token ids of its prompts, and bytes of their JSON.
    ids: u64,
    id_bytes: usize,
    answer_tokens: u64,
    sequences: u32,
    pub(crate) priority: i32,
    /// The request's `cache_salt`; empty if it has none.
    pub(crate) cache_salt: Arc<str>,
    hashes: Vec<u64>,
}

/// The fields that are read; of all interfaces that requests come in.
#[derive(Default, Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    max_completion_tokens: Option<u64>,
    /// llama.cpp's; negative without a limit.
    #[serde(default)]
    n_predict: Option<i64>,
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    priority: Option<i32>,
    #[serde(borrow, default)]
    cache_salt: Option<Cow<'a, str>>,
}

impl Asked {
    /// Reads a request's body. `tenant`: the name of its key.
    pub(crate) async fn read(body: &Bytes, tenant: &str) -> Self {
        if body.len() <= INLINE_BYTES_MAX {
            return Self::parse(body, tenant);
        }
        let (shared, owner) = (body.clone(), tenant.to_owned());
        let read = tokio::task::spawn_blocking(move || Self::parse(&shared, &owner)).await;
        read.unwrap_or_else(|_panicked| Self::unread(body.len()))
    }

    /// The same for a request for embeddings: it has no answers, and a few of its inputs at a time in memory.
    pub(crate) fn of_embeddings(self) -> Self {
        let most = u32::try_from(EMBEDDINGS_IN_FLIGHT_MAX).unwrap_or(u32::MAX);
        let at_once = self.sequences.clamp(1, most);
        let share = self.sequences.max(1).div_ceil(at_once);
        Self {
            text_bytes: self.text_bytes / share as usize,
            ids: self.ids / u64::from(share),
            id_bytes: self.id_bytes / share as usize,
            answer_tokens: 0,
            sequences: at_once,
            ..self
        }
    }

    /// A request of which only the size is known.
    fn unread(bytes: usize) -> Self {
        Self { text_bytes: bytes, answer_tokens: ANSWER_TOKENS_MAX, sequences: 1, ..Self::default() }
    }

    fn parse(body: &[u8], tenant: &str) -> Self {
        let Ok(fields) = serde_json::from_slice::<Fields<'_>>(body) else { return Self::unread(body.len()) };
        // Templates put tools ahead of the conversation.
        let texts = [fields.tools, fields.messages, fields.prompt, fields.input].into_iter().flatten();
        let prompts = fields.prompt.or(fields.input).map_or(Prompts::default(), |raw| Prompts::of(raw.get()));
        let chat = [fields.tools, fields.messages].into_iter().flatten().map(|raw| raw.get().len()).sum::<usize>();
        let salt = fields.cache_salt.unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        hasher.write(tenant.as_bytes());
        hasher.write_u8(0);
        hasher.write(salt.as_bytes());
        let mut asked = Self {
            text_bytes: chat + prompts.text_bytes,
            ids: prompts.ids,
            id_bytes: prompts.id_bytes,
            sequences: fields.n.unwrap_or(1).max(1).saturating_mul(prompts.count.max(chats(fields.messages))),
            priority: fields.priority.unwrap_or(0),
            cache_salt: if salt.len() <= CACHE_SALT_BYTES_MAX { salt.into() } else { Arc::default() },
            answer_tokens: 0,
            hashes: hashes(texts.flat_map(|raw| raw.get().as_bytes().chunks(HASH_BYTES)), hasher),
        };
        let predicted = fields.n_predict.and_then(|n| u64::try_from(n).ok());
        let each = fields.max_completion_tokens.or(fields.max_tokens).or(predicted).unwrap_or(ANSWER_TOKENS_MAX);
        asked.answer_tokens = each.saturating_mul(asked.sequences.into());
        asked
    }

    /// Its sizes in tokens.
    pub(crate) fn ask(&self, bytes_per_token: f64) -> Ask {
        Ask {
            prompt_tokens: self.ids.saturating_add(estimated(self.text_bytes, bytes_per_token)),
            answer_tokens: self.answer_tokens,
            sequences: self.sequences,
        }
    }

    /// The hashes of its prefixes.
    pub(crate) fn prefix(&self, bytes_per_token: f64) -> PrefixHashes {
        let float = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
        let (bytes, ids) = (self.text_bytes + self.id_bytes, u32::try_from(self.ids).unwrap_or(u32::MAX));
        let tokens = float(self.text_bytes) / bytes_per_token + f64::from(ids);
        let tokens_per_hash = float(HASH_BYTES) * tokens / float(bytes.max(1));
        PrefixHashes { hashes: self.hashes.clone(), tokens_per_hash }
    }

    /// Bytes of text, if its prompt is text alone: of others, bytes a token mean nothing.
    pub(crate) fn text_alone(&self) -> Option<usize> {
        (self.ids == 0 && self.text_bytes > 0).then_some(self.text_bytes)
    }
}

/// Tokens of so many bytes.
fn estimated(bytes: usize, bytes_per_token: f64) -> u64 {
    let bytes = f64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
    u64::try_from(lagoon_cluster::perf::whole(bytes / bytes_per_token)).unwrap_or(0)
}

/// Hashes of whole chunks and all before them.
fn hashes<'a>(chunks: impl Iterator<Item = &'a [u8]>, mut hasher: DefaultHasher) -> Vec<u64> {
    let mut hashes = Vec::new();
    for chunk in chunks.filter(|chunk| chunk.len() == HASH_BYTES).take(PREFIX_HASHES_MAX) {
        hasher.write(chunk);
        hashes.push(hasher.finish());
    }
    hashes
}

/// Conversations in a field with messages: one, or those of a batch.
fn chats(messages: Option<&RawValue>) -> u32 {
    let Some(raw) = messages.map(RawValue::get) else { return 1 };
    let is_batch = raw.strip_prefix('[').is_some_and(|inside| inside.trim_start().starts_with('['));
    let count = || serde_json::from_str::<Vec<&RawValue>>(raw).map_or(1, |chats| chats.len());
    if is_batch { u32::try_from(count()).unwrap_or(u32::MAX) } else { 1 }
}

/// Sizes of a field with prompts: a text, token ids, or a list of either.
#[derive(Debug, Default, PartialEq)]
struct Prompts {
    count: u32,
    text_bytes: usize,
    ids: u64,
    id_bytes: usize,
}

impl Prompts {
    fn of(raw: &str) -> Self {
        let count = |text: &str, sign: u8| text.bytes().filter(|byte| *byte == sign).count();
        let many = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let one = Self { count: 1, ..Self::default() };
        let inside = raw.trim_start().strip_prefix('[').map(str::trim_start);
        match inside.and_then(|inside| inside.bytes().next()) {
            Some(b']') => Self::default(),
            Some(b'0'..=b'9') => Self { ids: 1 + count(raw, b',') as u64, id_bytes: raw.len(), ..one },
            Some(b'[') => {
                let lists = many(count(raw, b'[') - 1);
                Self { count: lists, ids: 1 + count(raw, b',') as u64, id_bytes: raw.len(), ..one }
            }
            Some(_) => {
                let texts = serde_json::from_str::<Vec<&RawValue>>(raw).map_or(1, |texts| texts.len());
                Self { count: many(texts), text_bytes: raw.len(), ..one }
            }
            None => Self { text_bytes: raw.len(), ..one },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn asked(body: &serde_json::Value) -> Asked {
        Asked::parse(body.to_string().as_bytes(), "")
    }

    #[test]
    fn sizes_are_read_from_every_interface() {
        let sizes = |body| {
            let Ask { prompt_tokens, answer_tokens, sequences } = asked(&body).ask(4.0);
            (prompt_tokens, answer_tokens, sequences)
        };
        assert_eq!(sizes(json!({"prompt": "a".repeat(398), "max_tokens": 7})), (100, 7, 1));
        assert_eq!(sizes(json!({"prompt": [1, 2, 3], "max_tokens": 7, "n": 2})), (3, 14, 2));
        assert_eq!(sizes(json!({"prompt": [[1, 2], [3, 4, 5]], "max_tokens": 1})), (5, 2, 2));
        assert_eq!(sizes(json!({"input": ["abcdefg", "h, i"], "max_tokens": 1})).2, 2);
        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9});
        assert_eq!(sizes(chat), (8, 9, 1));
        let conversation = json!([{"role": "user", "content": "hi]["}, {"role": "user", "content": [{"text": "a"}]}]);
        let batch = json!({"messages": [conversation, conversation, conversation], "max_tokens": 5});
        assert_eq!((sizes(batch.clone()).1, sizes(batch).2), (15, 3));
        assert_eq!(sizes(json!({"messages": conversation, "max_tokens": 5})).2, 1);
        assert_eq!(sizes(json!({"prompt": "a", "n_predict": 3})), (0, 3, 1));
        assert_eq!(sizes(json!({"prompt": "a", "n_predict": -1})), (0, ANSWER_TOKENS_MAX, 1));
    }

    #[test]
    fn embeddings_have_no_answers_and_are_computed_a_few_at_a_time() {
        let sizes = |inputs: Vec<[u32; 4]>| {
            let Ask { prompt_tokens, answer_tokens, sequences } =
                asked(&json!({"input": inputs})).of_embeddings().ask(4.0);
            (prompt_tokens, answer_tokens, sequences)
        };
        assert_eq!(sizes(vec![[1; 4]; 2]), (8, 0, 2));
        assert_eq!(sizes(vec![[1; 4]; 160]), (64, 0, 16));
    }

    #[test]
    fn what_cannot_be_read_is_estimated_from_its_size() {
        for body in ["", "{", r#"{"prompt": "a", "prompt": "b"}"#, r#"{"max_tokens": "many"}"#] {
            let asked = Asked::parse(body.as_bytes(), "");
            assert_eq!(asked, Asked::unread(body.len()), "{body}");
            assert_eq!(asked.ask(4.0).sequences, 1);
        }
        let empty = asked(&json!({"prompt": [], "n": 0}));
        assert_eq!(empty.ask(4.0).sequences, 1);
    }

    /// The next turn of a chat begins with the messages before it, but for the bracket behind them.
    #[test]
    fn a_turn_of_a_chat_begins_with_the_one_before() {
        let tools = json!([{"type": "function", "function": {"name": "f".repeat(1_500)}}]);
        let turn = |role: &str, n: usize| json!({"role": role, "content": role.repeat(n)});
        let turns =
            [turn("user", 300), turn("assistant", 200), turn("user", 90), turn("assistant", 400), turn("user", 100)];
        let chat = |n: usize| asked(&json!({"messages": turns[..n], "max_tokens": n, "tools": tools}));
        let (first, second, third) = (chat(1), chat(3), chat(5));
        // One piece of the tools, and all whole ones of the messages.
        assert_eq!([&first, &second, &third].map(|asked| asked.hashes.len()), [2, 4, 8]);
        assert!(second.hashes.starts_with(&first.hashes) && third.hashes.starts_with(&second.hashes));
        let other = json!({"messages": [turn("user", 301), turn("assistant", 200)], "tools": tools});
        assert_eq!(asked(&other).hashes[..2], first.hashes[..2], "1,024 bytes of the message are equal");
    }

    #[test]
    fn prefixes_of_texts_and_of_ids_are_counted_in_tokens() {
        let per_hash = |body| asked(&body).prefix(4.0).tokens_per_hash;
        assert_eq!(per_hash(json!({"prompt": "a".repeat(3_000)})), 256.0);
        // `[10,10,...,10]`: three bytes an id, and one more.
        let ids = per_hash(json!({"prompt": vec![10; 1_000]}));
        assert!((ids - 1_024.0 * 1_000.0 / 3_001.0).abs() < 1e-9, "{ids}");
        assert_eq!(asked(&json!({})).prefix(4.0).tokens_per_hash, 0.0);
    }

    #[test]
    fn equal_beginnings_have_equal_hashes_of_one_tenant() {
        let text = |end: &str| json!({"max_tokens": 1, "prompt": "a".repeat(3000) + end});
        let (one, two) = (asked(&text("x")), asked(&json!({"stream": true, "prompt": "a".repeat(2500) + "y"})));
        assert_eq!((one.hashes.len(), two.hashes.len()), (2, 2));
        assert_eq!(one.hashes, two.hashes);
        assert_ne!(Asked::parse(text("x").to_string().as_bytes(), "b").hashes, one.hashes);
        let salted = json!({"prompt": "a".repeat(3000), "cache_salt": "mine"});
        assert_ne!(asked(&salted).hashes, one.hashes);
        assert_eq!(&*asked(&salted).cache_salt, "mine");
        let long = asked(&json!({"prompt": "a".repeat(2 * HASH_BYTES * PREFIX_HASHES_MAX)}));
        assert_eq!(long.hashes.len(), PREFIX_HASHES_MAX);
    }
}
