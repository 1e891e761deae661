//! Grammars of tool calls: what they allow, the format's parser takes as calls with arguments of the schema.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "each test uses a part")]
mod common;
mod validator;

use common::{Model, constraint, model};
use lagoon_grammar::Next;
use lagoon_text::parse::{AnswerParser, Beside, Calls, Formats, Tool, ToolFormat};
use lagoon_types::Grammar;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::sync::Arc;
use validator::Validator;

/// Marks that are special tokens of the test's tokenizer.
const SPECIAL: &[&str] = &[
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
];

fn tools() -> Arc<[Tool]> {
    let weather = json!({"type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]}, "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2}},
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"], "additionalProperties": false}}});
    let tool = |name: &str, parameters: Value| Tool {
        name: name.to_owned(),
        parameters,
        definition: Value::Null,
        strict: true,
    };
    [tool("weather", weather), tool("now", Value::Null)].into()
}

fn grammar(model: &Model, format: ToolFormat, beside: &Beside, many: bool) -> Result<String, String> {
    format.grammar(Calls { tools: &tools(), many }, beside, &model.tokenizer)
}

#[test]
fn every_call_is_parsed_and_has_arguments_of_its_schema() {
    let tools = tools();
    let validators: Vec<_> = tools
        .iter()
        .map(|tool| Validator::of(if tool.parameters.is_null() { &Value::Bool(true) } else { &tool.parameters }))
        .collect();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for special in [true, false] {
        let mut model = model(if special { SPECIAL } else { &[] });
        for format in [
            ToolFormat::Hermes,
            ToolFormat::Llama3,
            ToolFormat::Mistral,
            ToolFormat::DeepSeek,
            ToolFormat::QwenCoder,
            ToolFormat::Glm,
            ToolFormat::Harmony,
        ] {
            if format == ToolFormat::Harmony && !special {
                continue;
            }
            model.mark = match format {
                ToolFormat::QwenCoder => Some("\n</parameter>\n"),
                ToolFormat::Glm => Some("</arg_value>\n"),
                _ => None,
            };
            for many in [true, false] {
                let lark = grammar(&model, format, &Beside::Nothing, many).unwrap();
                let constraint = constraint(Grammar::Lark(lark.clone()));
                model.grammars.check(&constraint.grammar).unwrap_or_else(|error| panic!("{format:?}: {error}\n{lark}"));
                for _ in 0..6 {
                    let text = model.tokenizer.decode(&model.draw(&constraint, &mut rng), false);
                    let formats = Formats { tools: Some(format), reasoning: None };
                    let mut parser = AnswerParser::new(formats, &tools, "", 200);
                    let mut parts = parser.push(&text);
                    parts.append(parser.finish());
                    let content = if format == ToolFormat::Harmony { "" } else { parts.content.trim() };
                    assert!(content.is_empty() && !parts.calls.is_empty(), "{format:?}: {text:?} gives {parts:?}");
                    assert!(many || parts.calls.len() == 1, "{format:?}: {text}");
                    for call in &parts.calls {
                        let at = tools.iter().position(|tool| tool.name == call.name).unwrap();
                        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                        let valid = validators[at].validate(&arguments);
                        valid.unwrap_or_else(|why| panic!("{format:?}: {arguments} of {text:?}: {why}"));
                    }
                }
            }
        }
    }
}

/// A form or calls; text or calls, where calls begin with a token of their own.
#[test]
fn calls_stand_beside_a_form_or_text() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let special = model(SPECIAL);
    let form = Beside::Instead(r#"%json {"const": 7}"#.to_owned());
    let constraint =
        |beside: &Beside| constraint(Grammar::Lark(grammar(&special, ToolFormat::Mistral, beside, true).unwrap()));
    let (mut forms, mut calls) = (0, 0);
    for _ in 0..40 {
        let text = special.tokenizer.decode(&special.draw(&constraint(&form), &mut rng), false);
        forms += usize::from(text.trim() == "7");
        calls += usize::from(text.starts_with("[TOOL_CALLS]"));
    }
    assert!(forms > 0 && calls > 0 && forms + calls == 40, "{forms} and {calls}");
    let text = constraint(&Beside::Text);
    special.grammars.check(&text.grammar).unwrap();
    let matcher = special.matcher(&text, &special.tokenizer.encode("see ", false).unwrap());
    let allowed = special.allowed(&special.next(&matcher, &[])[0]);
    let begin = special.tokenizer.id("[TOOL_CALLS]").unwrap();
    assert!(allowed.contains(&begin) && allowed.contains(&special.end) && allowed.len() > 100);
    matcher.push(&[begin]);
    assert!(special.allowed(&special.next(&matcher, &[])[0]).len() < 10, "now a name");
}

/// Whether a text is a whole answer of a grammar.
fn is_answer(model: &Model, lark: &str, text: &str) -> bool {
    let matcher = model.matcher(&constraint(Grammar::Lark(lark.to_owned())), &[]);
    for token in model.tokenizer.encode(text, false).unwrap() {
        match model.next(&matcher, &[]).remove(0) {
            next @ Next::Of(_) if model.allowed(&next).contains(&token) => {}
            Next::Nothing | Next::Of(_) => return false,
            other => panic!("{other:?}"),
        }
        matcher.take(token);
        matcher.push(&[token]);
    }
    match model.next(&matcher, &[]).remove(0) {
        Next::Nothing => true,
        next => model.allowed(&next).contains(&model.end),
    }
}

/// Text, calls, or both: whether marks are tokens of their own or not, no call has other arguments than its schema's.
#[test]
fn text_and_strict_calls() {
    let (plain, special) = (model(&[]), model(SPECIAL));
    let hermes = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
    let harmony = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
    let deepseek =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    for (model, format, text, is) in [
        (&plain, ToolFormat::Hermes, hermes("now"), true),
        (&plain, ToolFormat::Hermes, format!("I look.\n{}\n{}", hermes("now"), hermes("now")), true),
        (&plain, ToolFormat::Hermes, "No < tool_call>, <tool_cal>.".to_owned(), true),
        (&plain, ToolFormat::Hermes, hermes("never"), false),
        (&plain, ToolFormat::Hermes, "The mark <tool_call> stands here.".to_owned(), false),
        (&plain, ToolFormat::QwenCoder, "See:<tool_call>\n<function=now>\n</function>\n</tool_call>".to_owned(), true),
        (
            &plain,
            ToolFormat::QwenCoder,
            "See:<tool_call>\n<function=never>\n</function>\n</tool_call>".to_owned(),
            false,
        ),
        (&plain, ToolFormat::Glm, "See:<tool_call>now\n</tool_call>".to_owned(), true),
        (&plain, ToolFormat::Mistral, "See:[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}]".to_owned(), true),
        (&plain, ToolFormat::Mistral, "See:[TOOL_CALLS][1]".to_owned(), false),
        (&special, ToolFormat::Mistral, "See:[TOOL_CALLS]now[ARGS]{}".to_owned(), true),
        (&plain, ToolFormat::DeepSeek, format!("See:{deepseek}"), true),
        (&special, ToolFormat::DeepSeek, format!("See:{deepseek}"), true),
        (&plain, ToolFormat::Llama3, "{\"name\": \"now\", \"parameters\": {}}".to_owned(), true),
        (&plain, ToolFormat::Llama3, "It is {\"a\": 1}.".to_owned(), true),
        (&plain, ToolFormat::Llama3, " {\"a\": 1}".to_owned(), false),
        (&plain, ToolFormat::Llama3, "<|python_tag|>{\"name\": \"now\", \"parameters\": 1}".to_owned(), false),
        (&special, ToolFormat::Harmony, harmony.to_owned(), true),
        (
            &special,
            ToolFormat::Harmony,
            format!("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{harmony}"),
            true,
        ),
        (
            &special,
            ToolFormat::Harmony,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Noon.".to_owned(),
            true,
        ),
        (&special, ToolFormat::Harmony, harmony.replace("now", "never"), false),
        (&special, ToolFormat::Harmony, "Noon.".to_owned(), false),
    ] {
        let lark = grammar(model, format, &Beside::Text, true).unwrap();
        assert_eq!(is_answer(model, &lark, &text), is, "{format:?}: {text}\n{lark}");
        if !is {
            continue;
        }
        let mut parser = AnswerParser::new(Formats { tools: Some(format), reasoning: None }, &tools(), "", 200);
        let mut parts = parser.push(&text);
        parts.append(parser.finish());
        assert_eq!(parts.calls.len(), text.matches("now").count(), "{format:?}: {text} gives {parts:?}");
    }
    let form = grammar(&special, ToolFormat::Harmony, &Beside::Instead("\"7\"".to_owned()), true).unwrap();
    for (text, is) in
        [("<|channel|>final<|message|>7", true), ("<|channel|>final<|message|>8", false), (harmony, true), ("7", false)]
    {
        assert_eq!(is_answer(&special, &form, text), is, "{text}");
    }
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    let plain = model(&[]);
    let error = grammar(&plain, ToolFormat::Harmony, &Beside::Text, true).unwrap_err();
    assert!(error.contains("`<|channel|>` is no special token"), "{error}");
    let of = |parameters: Value| Tool { name: "f".to_owned(), parameters, definition: Value::Null, strict: false };
    for (format, parameters, why) in [
        (ToolFormat::Hermes, json!({"type": "array"}), "not an object"),
        (ToolFormat::Glm, json!({"anyOf": []}), "`anyOf`"),
        (
            ToolFormat::QwenCoder,
            json!({"properties": {"a": {"type": "string", "pattern": "b"}}}),
            "`pattern` of the text `a`",
        ),
        (ToolFormat::QwenCoder, json!({"required": ["b"]}), "`b`, which is none"),
    ] {
        let calls = Calls { tools: &[of(parameters)], many: false };
        let error = format.grammar(calls, &Beside::Nothing, &plain.tokenizer).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}
