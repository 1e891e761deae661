//! Every format, whole and split at every character: the same parts, and no text lost.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    ["weather", "time"]
        .map(|name| Tool {
            name: name.to_owned(),
            parameters: parameters.clone(),
            definition: json!(null),
            strict: false,
        })
        .into()
}

fn parse<'a>(formats: Formats, prompt: &str, pieces: impl Iterator<Item = &'a str>) -> Parts {
    let mut parser = AnswerParser::new(formats, &tools(), prompt, usize::MAX);
    let mut all = Parts::default();
    let mut add = |parts: Parts| {
        all.content.push_str(&parts.content);
        all.reasoning.push_str(&parts.reasoning);
        all.calls.extend(parts.calls);
    };
    pieces.for_each(|piece| add(parser.push(piece)));
    add(parser.finish());
    all
}

/// Parses `text` whole, split once at every character, and character by character: all must agree.
fn all_ways(formats: Formats, prompt: &str, text: &str) -> Parts {
    let whole = parse(formats, prompt, [text].into_iter());
    for (at, _) in text.char_indices() {
        let (left, right) = text.split_at(at);
        assert_eq!(parse(formats, prompt, [left, right].into_iter()), whole, "{formats:?}, split at {at} of {text:?}");
    }
    let letters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
    assert_eq!(parse(formats, prompt, letters), whole, "{formats:?}, letters of {text:?}");
    whole
}

fn with(tools: ToolFormat) -> Formats {
    Formats { tools: Some(tools), reasoning: None }
}

fn calls(expected: &[(&str, &str)]) -> Vec<Call> {
    expected
        .iter()
        .map(|(name, arguments)| Call { name: (*name).to_owned(), arguments: (*arguments).to_owned() })
        .collect()
}

const PARIS: (&str, &str) = ("weather", r#"{"city":"Paris"}"#);
const DAYS: (&str, &str) = ("weather", r#"{"city":"5","days":3}"#);

#[test]
fn each_format_gives_its_calls_and_keeps_the_text_before_them() {
    for (format, text, expected, content) in [
        (
            ToolFormat::Hermes,
            "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>{\"name\": \"time\"}</tool_call>\n",
            &[PARIS, ("time", "{}")][..],
            "I look.\n",
        ),
        (
            ToolFormat::Llama3,
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"time\", \"parameters\": {}}",
            &[PARIS, ("time", "{}")],
            "",
        ),
        (
            ToolFormat::Llama3,
            " {\"type\": \"function\", \"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}",
            &[PARIS],
            "",
        ),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"time\", \"arguments\": {}}]",
            &[PARIS, ("time", "{}")],
            "",
        ),
        (
            ToolFormat::Mistral,
            "ok[TOOL_CALLS]weather[ARGS]{\"city\":\"Paris\"}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]time{\"a\":\"[TOOL_CALLS]\"}",
            &[PARIS, ("time", "{}"), ("time", "{\"a\":\"[TOOL_CALLS]\"}")],
            "ok",
        ),
        (
            ToolFormat::QwenCoder,
            "<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            &[DAYS],
            "",
        ),
        (
            ToolFormat::Glm,
            "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            &[DAYS],
            "",
        ),
        (
            ToolFormat::DeepSeek,
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\":\"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &[PARIS, ("time", "{}")],
            "Hm.",
        ),
        (
            ToolFormat::Harmony,
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\":\"Paris\"}<|call|><|start|>assistant to=functions.time<|channel|>commentary<|message|>{}",
            &[PARIS, ("time", "{}")],
            "",
        ),
    ] {
        let parts = all_ways(with(format), "", text);
        assert_eq!(parts.calls, calls(expected), "{text}");
        assert_eq!(parts.content, content, "{text}");
    }
}

#[test]
fn text_that_is_no_call_and_broken_calls_are_content() {
    for (format, text) in [
        (ToolFormat::Hermes, " a < b, <tool_cal and <tool_call>{\"name\": 5}</tool_call> \n"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Par"),
        (ToolFormat::Llama3, "{\"answer\": 42} is it"),
        (ToolFormat::Llama3, "{\"name\": \"Lago\", \"parameters\": {}}"),
        (ToolFormat::Llama3, "text {\"name\": \"weather\", \"parameters\": {}}"),
        (ToolFormat::Llama3, "<|python_tag|>print(1)"),
        (ToolFormat::Mistral, "[TOOL_CALLS] nothing"),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"weather\"}"),
        (ToolFormat::QwenCoder, "<tool_call><function=weather><parameter=city>Par</function></tool_call>"),
        (ToolFormat::Glm, "<tool_call>weather<arg_key>city</arg_key></tool_call>"),
        (ToolFormat::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather"),
    ] {
        let parts = all_ways(with(format), "", text);
        assert_eq!(parts, Parts { content: text.to_owned(), ..Parts::default() });
    }
    let broken = "<|channel|>commentary to=functions.weather<|message|>{\"city\"";
    assert_eq!(all_ways(with(ToolFormat::Harmony), "", broken).content, broken);
}

#[test]
fn a_call_over_the_limit_is_content() {
    let text = format!("<tool_call>{}</tool_call>", "é".repeat(CALL_BYTES_MAX));
    let pieces = text.len() / 1000;
    let split = text.split_inclusive("é").collect::<Vec<_>>();
    let joined = split.chunks(pieces).map(|piece| piece.concat()).collect::<Vec<_>>();
    let parts = parse(with(ToolFormat::Hermes), "", joined.iter().map(String::as_str));
    assert_eq!(parts.content, text);
}

/// Headers that never end are content, and every push ends.
#[test]
fn a_header_over_the_limit_is_content() {
    for start in ["<|start|>", " <|start|>assistant", "<|channel|>", "to=functions.weather "] {
        let text = format!("{start}{}<|end|>x", "é".repeat(1100));
        let content = all_ways(with(ToolFormat::Harmony), "", &text).content;
        assert_eq!(content, text.replace("<|end|>", ""), "{start}");
    }
}

#[test]
fn a_call_of_a_name_that_no_function_has_is_content() {
    let long = "a".repeat(65);
    for name in ["", "two words", &long, "é"] {
        let text = format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>");
        assert_eq!(all_ways(with(ToolFormat::Hermes), "", &text).content, text);
    }
}

#[test]
fn messages_of_a_kind_are_parted_and_a_header_at_the_end_is_dropped() {
    let harmony = Formats { tools: Some(ToolFormat::Harmony), reasoning: Some(ReasoningFormat::Harmony) };
    let text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>\
        <|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d<|end|>\
        <|start|>assistant<|chan";
    let parts = all_ways(harmony, "", text);
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("a\nb", "c\nd"));
}

#[test]
fn reasoning_is_split_from_the_answer() {
    let think = Formats { tools: Some(ToolFormat::Hermes), reasoning: Some(ReasoningFormat::Think) };
    let call = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>";
    for (prompt, text, reasoning, content, found) in [
        ("", "<think>\n a <b \n</think>\n\nc d", "a <b", "c d", 0),
        ("<|im_start|>assistant\n<think>\n", "a b\n</think>\n\nc", "a b", "c", 0),
        ("<think>\n\n</think>\n\n", "c </think>", "", "c </think>", 0),
        ("", "no reasoning", "", "no reasoning", 0),
        ("<think>", "never ends ", "never ends", "", 0),
        ("<think>", &format!("a <tool_call></think>\n{call}"), "a <tool_call>", "", 1),
    ] {
        let parts = all_ways(think, prompt, text);
        assert_eq!(
            (parts.reasoning.as_str(), parts.content.as_str(), parts.calls.len()),
            (reasoning, content, found),
            "{text}"
        );
    }
    let harmony = Formats { tools: None, reasoning: Some(ReasoningFormat::Harmony) };
    let text = "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>c <|d";
    let parts = all_ways(harmony, "", text);
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("a < b", "c <|d"));
    assert_eq!(all_ways(harmony, "", "plain <|message|> text").content, "plain <|message|> text");
}

#[test]
fn an_answer_is_over_after_the_most_calls() {
    let text = "ok<tool_call>{\"name\": \"time\"}</tool_call> tail <tool_call>{\"name\": \"weather\"}</tool_call>";
    for at in 0..text.len() {
        let mut parser = AnswerParser::new(with(ToolFormat::Hermes), &tools(), "", 1);
        let mut parts = parser.push(&text[..at]);
        parts.append(parser.push(&text[at..]));
        assert!(parser.is_over() && parser.calls() == 1);
        parts.append(parser.finish());
        assert_eq!((parts.calls, parts.content.as_str()), (calls(&[("time", "{}")]), "ok"));
    }
}

const FORMATS: [ToolFormat; 7] = [
    ToolFormat::Hermes,
    ToolFormat::Llama3,
    ToolFormat::Mistral,
    ToolFormat::QwenCoder,
    ToolFormat::Harmony,
    ToolFormat::DeepSeek,
    ToolFormat::Glm,
];

/// Pieces from which hostile answers are made.
fn fragments(format: ToolFormat) -> impl Strategy<Value = String> {
    let common = [
        "{",
        "}",
        "[",
        "\"",
        "\\",
        "{\"name\": \"weather\"}",
        "function",
        "<",
        "é",
        " ",
        "\n",
        ";",
        "weather",
        "<think>",
        "</think>",
    ];
    let marks: Vec<&str> = common.into_iter().chain(format.marks().iter().copied()).collect();
    prop::collection::vec(prop::sample::select(marks), 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn hostile_text_parses_the_same_however_it_is_split(
        (format, text) in prop::sample::select(&FORMATS[..]).prop_flat_map(|format| (Just(format), fragments(format))),
        think in any::<bool>(),
    ) {
        let reasoning = think.then_some(ReasoningFormat::Think);
        let parts = all_ways(Formats { tools: Some(format), reasoning }, "", &text);
        if !think && format != ToolFormat::Harmony && parts.calls.is_empty() {
            prop_assert_eq!(parts.content, text);
        }
    }
}
