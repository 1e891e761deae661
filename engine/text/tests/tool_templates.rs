//! Templates in each family's format: their text shows the format, and a call that they write is the call that is parsed.

use lagoon_text::parse::{AnswerParser, Call, Formats, Tool, ToolFormat};
use lagoon_text::{ChatMessage, ChatTemplate, Rendering, TokenizerConfig, ToolCall};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

const FAMILIES: &[(ToolFormat, &str)] = &[
    (
        ToolFormat::Hermes,
        r#"{%- for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"#,
    ),
    (
        ToolFormat::Llama3,
        r#"{%- set call = m.tool_calls[0].function %}{% if builtin_tools is defined %}{{ "<|python_tag|>" }}{% endif %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}"#,
    ),
    (
        ToolFormat::Mistral,
        r#"[TOOL_CALLS][{%- for call in m.tool_calls %}{%- set f = call.function %}{{- {"name": f.name, "arguments": f.arguments} | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]"#,
    ),
    (
        ToolFormat::Mistral,
        r#"{%- for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"#,
    ),
    (
        ToolFormat::QwenCoder,
        r#"{%- for call in m.tool_calls %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}"#,
    ),
    (
        ToolFormat::Glm,
        r#"{%- for call in m.tool_calls %}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}"#,
    ),
    (
        ToolFormat::DeepSeek,
        r#"<｜tool▁calls▁begin｜>{%- for call in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}{{ "\n```json\n" }}{{ call.function.arguments | tojson }}{{ "\n```" }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"#,
    ),
    (
        ToolFormat::Harmony,
        r#"{%- for call in m.tool_calls %}{% if not loop.first %}<|start|>assistant{% endif %}<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"#,
    ),
];

#[test]
fn each_family_parses_the_calls_that_its_template_writes() {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let definition = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let tools: Arc<[Tool]> = [Tool { name: "weather".to_owned(), parameters, definition, strict: false }].into();
    let arguments = json!({"city": "Zürich \"7\"", "days": 3});
    let call = ToolCall { id: "abcdefghi".to_owned(), name: "weather".to_owned(), arguments: arguments.clone() };
    for (format, calls) in FAMILIES {
        let source = format!(
            "{{% for tool in tools %}}{{{{ tool.function.name }}}}:{{% endfor %}}{{% for m in messages %}}{{% if m.tool_calls %}}{calls}{{% endif %}}{{% endfor %}}"
        );
        let template = ChatTemplate::new(Path::new("t"), &source, &TokenizerConfig::default()).unwrap();
        // Llama 3's templates name the tag, as this one does in a branch.
        assert_eq!(template.formats().tools, Some(*format), "{source}");
        assert!(template.mentions("tools") && !template.mentions("tool_cal"), "whole words only");
        let count = if *format == ToolFormat::Llama3 { 1 } else { 2 };
        let message = ChatMessage {
            role: "assistant".to_owned(),
            tool_calls: vec![call.clone(); count],
            ..ChatMessage::default()
        };
        let tools_given = tools.iter().map(|tool| tool.definition.clone()).collect();
        let rendering = Rendering { tools: tools_given, ..Rendering::default() };
        let text = template.render_with(&[message], &rendering, UNIX_EPOCH).unwrap();
        let answer = text.strip_prefix("weather:").unwrap();
        let mut parser = AnswerParser::new(Formats { tools: Some(*format), reasoning: None }, &tools, "", usize::MAX);
        let mut parts = parser.push(answer);
        parts.append(parser.finish());
        assert_eq!((parts.content.as_str(), parts.calls.len()), ("", count), "{answer}");
        for Call { name, arguments: found } in &parts.calls {
            assert_eq!((name.as_str(), serde_json::from_str(found).ok()), ("weather", Some(arguments.clone())));
        }
    }
}
