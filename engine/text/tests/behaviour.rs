//! Stop strings, templates and the handling of bad files.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_text::{ChatError, ChatMessage, ChatTemplate, Content, EncodeError, StopError, StopStrings, TextError};
use lagoon_text::{Tokenizer, TokenizerConfig};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

fn stream(stops: &[&str], pieces: &[&str]) -> (String, bool) {
    let mut matcher = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
    let mut out = String::new();
    let stopped = pieces.iter().any(|piece| matcher.push(piece, &mut out));
    matcher.finish(&mut out);
    assert_eq!(stopped, matcher.stopped());
    (out, stopped)
}

#[test]
fn stop_strings_cut_where_the_first_is_complete() {
    assert_eq!(stream(&["END"], &["abc E", "ND", " def"]), ("abc ".to_owned(), true));
    assert_eq!(stream(&["END"], &["abc EN", "X END"]), ("abc ENX ".to_owned(), true));
    assert_eq!(stream(&["END"], &["abc EN"]), ("abc EN".to_owned(), false));
    assert_eq!(stream(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
    // The one that is complete first wins, though the other began before it.
    assert_eq!(stream(&["abcd", "bc"], &["xabcd"]), ("xa".to_owned(), true));
    // Of two that are complete at once, the longer.
    assert_eq!(stream(&["bc", "abc"], &["xabc"]), ("x".to_owned(), true));
    assert_eq!(stream(&[], &["a", "b"]), ("ab".to_owned(), false));
    assert_eq!(stream(&["é"], &["caf", "é!"]), ("caf".to_owned(), true));
}

#[test]
fn text_is_held_back_only_while_undecided() {
    let mut matcher = StopStrings::new(vec!["\n\nUser:".to_owned()]).unwrap();
    let mut out = String::new();
    assert!(!matcher.push("Hello\n", &mut out));
    assert_eq!(out, "Hello");
    assert!(!matcher.push("you\n\nUs", &mut out));
    assert_eq!(out, "Hello\nyou");
    assert!(!matcher.push("ually", &mut out));
    assert_eq!(out, "Hello\nyou\n\nUsually");
}

#[test]
fn stop_strings_are_bounded() {
    let new = |stops: Vec<String>| StopStrings::new(stops).unwrap_err();
    assert_eq!(new(vec![String::new()]), StopError::Empty);
    assert_eq!(new(vec!["x".to_owned(); 17]), StopError::TooMany { count: 17 });
    assert_eq!(new(vec!["x".repeat(1025)]), StopError::TooLong { bytes: 1025 });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5000) })]

    /// The result is that of a search over the whole text, and does not depend on the cuts.
    #[test]
    fn any_chunking_stops_at_the_same_place(
        text in "[abé]{0,24}",
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let end = (0..=text.len()).find(|&end| {
            text.is_char_boundary(end) && stops.iter().any(|stop| text[..end].ends_with(stop.as_str()))
        });
        let expected = match end {
            None => text.clone(),
            Some(end) => {
                let longest = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
                text[..end - longest.unwrap()].to_owned()
            }
        };
        let boundaries: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
        let mut at: Vec<usize> = cuts.iter().map(|cut| *cut.get(&boundaries)).chain([0, text.len()]).collect();
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        prop_assert_eq!(stream(&stops, &pieces), (expected, end.is_some()));
    }
}

fn template(source: &str) -> Result<ChatTemplate, TextError> {
    let config = TokenizerConfig { special: vec![("bos_token", "<s>".to_owned())], ..TokenizerConfig::default() };
    ChatTemplate::new(Path::new("chat_template.jinja"), source, &config)
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content: Content(content.to_owned()), ..ChatMessage::default() }
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<String, ChatError> {
    template(source).unwrap().render(messages, true, UNIX_EPOCH + Duration::from_secs(1_735_689_599))
}

#[test]
fn templates_have_what_models_use() {
    let messages = [message("user", " <b>Hi</b> "), message("assistant", "Yo"), message("user", "é'\"")];
    // Python's methods, slices, namespaces, loop variables, loop controls, white space control.
    let source = "{{ bos_token }}{%- set ns = namespace(n=0) -%}
{% for m in messages[::-1] %}
    {% if m.role == 'assistant' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
[{{ loop.index0 }}|{{ m['content'].strip().upper() }}|{{ m.role.startswith('us') }}]
{% endfor %}
{{ ns.n }}{% if add_generation_prompt %} A:{% endif %}";
    assert_eq!(render(source, &messages).unwrap(), "<s>[0|É'\"|True]\n[2|<B>HI</B>|True]\n2 A:");
    assert_eq!(
        render("{{ messages[0] | tojson }}", &messages).unwrap(),
        r#"{"role": "user", "content": " <b>Hi</b> "}"#
    );
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &[]).unwrap(), "31 Dec 2024");
    assert_eq!(render("{% if tools is not none %}x{% endif %}{{ eos_token is defined }}", &[]).unwrap(), "False");
    let generation = "{% for m in messages %}{%- generation -%} {{ m.content }} {% endgeneration %}{% endfor %}";
    assert_eq!(render(generation, &messages[1..2]).unwrap(), "Yo ");
}

#[test]
fn templates_fail_clearly() {
    let refused = render("{{ raise_exception('roles must alternate') }}", &[]).unwrap_err();
    assert_eq!(refused, ChatError::Refused("roles must alternate".to_owned()));
    let inside = render("{% macro f() %}{{ raise_exception('deep') }}{% endmacro %}{{ f() }}", &[]).unwrap_err();
    assert_eq!(inside, ChatError::Refused("deep".to_owned()));
    let failed = render("\n{{ messages.nothing.more }}", &[]).unwrap_err();
    assert!(matches!(&failed, ChatError::Failed(text) if text.contains("line 2")), "{failed}");
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    let endless = render(endless, &[]).unwrap_err();
    assert!(matches!(&endless, ChatError::Failed(text) if text.contains("fuel")), "{endless}");
    let wrong = template("{% if %}").unwrap_err().to_string();
    assert!(wrong.starts_with("chat_template.jinja: the chat template cannot be parsed: "), "{wrong}");
}

#[test]
fn contents_are_strings_or_text_parts() {
    let parse = |json: &str| serde_json::from_str::<ChatMessage>(json);
    let parts = r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#;
    assert_eq!(parse(parts).unwrap().content.0, "a\nb");
    let error = |json: &str| parse(json).unwrap_err().to_string();
    for kind in ["image_url", "input_audio", "video_url", "file"] {
        let refused = error(&format!(r#"{{"role":"user","content":[{{"type":"{kind}","{kind}":{{}}}}]}}"#));
        assert!(refused.contains(&format!("the type {kind:?}, which is not supported")), "{refused}");
    }
    assert!(error(r#"{"role":"user","content":[{"type":"text"}]}"#).contains("no string in `text`"));
    assert!(error(r#"{"role":"user","content":3}"#).contains("must be a string or a list"));
    assert!(error(r#"{"role":"user","content":"a","tool_calls":[]}"#).contains("`tool_calls`"));
}

#[test]
fn the_template_file_comes_before_the_configuration_and_default_before_others() {
    let dir = tempfile::tempdir().unwrap();
    let open = || ChatTemplate::open(dir.path()).unwrap().map(|t| t.render(&[], true, UNIX_EPOCH).unwrap());
    assert_eq!(open(), None);
    let list = r#"{"chat_template":[{"name":"tool_use","template":"tools"},{"name":"default","template":"plain"}]}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), list).unwrap();
    assert_eq!(open().as_deref(), Some("plain"));
    std::fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(open().as_deref(), Some("file"));
}

fn passkey() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/passkey")
}

#[test]
fn special_tokens_follow_the_configuration() {
    let json = std::fs::read(passkey().join("tokenizer.json")).unwrap();
    let config = |add_bos_token| TokenizerConfig { add_bos_token, ..TokenizerConfig::open(&passkey()).unwrap() };
    let parse = |json: &[u8], add| Tokenizer::parse(Path::new("tokenizer.json"), json, &config(add)).unwrap();
    let plain = parse(&json, None);
    assert_eq!((plain.bos_id(), plain.eos_id(), plain.vocab_size()), (Some(1022), Some(1023), 1024));
    assert_eq!(plain.special_ids(), [1022, 1023]);
    assert!(plain.is_special(1022) && !plain.is_special(0));
    let body = plain.encode("a", false).unwrap();
    assert_eq!(plain.encode("a", true).unwrap(), [&[1022], body.as_slice()].concat());
    assert_eq!(parse(&json, Some(true)).encode("a", true).unwrap(), [&[1022], body.as_slice()].concat());
    assert_eq!(parse(&json, Some(false)).encode("a", true).unwrap(), body);
    // The same tokenizer without a post-processor adds nothing by itself.
    let mut bare: serde_json::Value = serde_json::from_slice(&json).unwrap();
    bare["post_processor"] = serde_json::Value::Null;
    bare["truncation"] = serde_json::json!({"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0});
    let bare = serde_json::to_vec(&bare).unwrap();
    assert_eq!(parse(&bare, None).encode("a", true).unwrap(), body);
    assert_eq!(parse(&bare, Some(true)).encode("a", true).unwrap(), [&[1022], body.as_slice()].concat());
    // And the truncation that the file asks for is not applied.
    assert_eq!(parse(&bare, None).encode("1234567", false).unwrap().len(), 7);
    assert_eq!(plain.token_bytes(plain.encode(" the", false).unwrap()[0]), b" the");
    assert!(plain.token_bytes(5000).is_empty());
}

#[test]
fn bad_files_and_texts_are_errors() {
    let none = TokenizerConfig::default();
    let parse = |json: &str| Tokenizer::parse(Path::new("tokenizer.json"), json.as_bytes(), &none).unwrap_err();
    assert!(matches!(parse("{"), TextError::Malformed { .. }));
    assert!(matches!(parse("{}"), TextError::Malformed { .. }));
    let mut other: serde_json::Value =
        serde_json::from_slice(&std::fs::read(passkey().join("tokenizer.json")).unwrap()).unwrap();
    other["decoder"] = serde_json::json!({"type":"WordPiece","prefix":"##","cleanup":true});
    let error = parse(&other.to_string()).to_string();
    assert!(error.contains("WordPiece is not supported\nhint: "), "{error}");
    let config = |json: &str| TokenizerConfig::parse(Path::new("tokenizer_config.json"), json.as_bytes()).unwrap_err();
    assert!(config(r#"{"bos_token": 3}"#).to_string().contains("`bos_token` is 3"));
    assert!(config(r#"{"chat_template": 3}"#).to_string().contains("chat_template"));
    let missing = Tokenizer::open(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent has no tokenizer: none of tokenizer.json, "), "{missing}");
    let tokenizer = Tokenizer::open(&passkey()).unwrap();
    let long = "a".repeat((32 << 20) + 1);
    assert_eq!(tokenizer.encode(&long, false), Err(EncodeError::TooLong { bytes: (32 << 20) + 1, max: 32 << 20 }));
}

/// Byte-level BPE, and SentencePiece with byte fallback.
static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    ["models/passkey", "tests/goldens/tied_sentencepiece"].map(|dir| Tokenizer::open(&root.join(dir)).unwrap()).into()
});

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    /// Long runs of one character make the longest tokens.
    #[test]
    fn no_text_has_fewer_tokens_than_its_length_tells(
        parts in prop::collection::vec(("[a-z \n▁é☃<|bos>\u{301}]{1,4}", 1..40_usize), 1..8),
    ) {
        let text: String = parts.iter().map(|(part, times)| part.repeat(*times)).collect();
        for tokenizer in &*TOKENIZERS {
            let (least, tokens) = (tokenizer.tokens_min(text.len()), tokenizer.encode(&text, false).unwrap().len());
            prop_assert!((1..=tokens).contains(&least), "{least} of {tokens} tokens: {text:?}");
        }
    }
}
