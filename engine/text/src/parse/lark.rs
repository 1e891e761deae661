//! Grammars of the formats' calls, in llguidance's variant of Lark: what they allow, the format's parser takes as calls.

use super::{Tool, ToolFormat, deepseek, harmony, llama, mistral};
use crate::Tokenizer;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// What an answer with calls has beside them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Nothing: the answer is calls.
    Nothing,
    /// Text before calls, or no call.
    Text,
    /// Either calls, or what this expression describes.
    Instead(String),
}

/// The calls that an answer may have.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'a> {
    pub tools: &'a [Tool],
    /// Whether there may be several.
    pub many: bool,
}

/// Keywords of a schema that say nothing about a text, or that arguments one by one express.
const EXPRESSED: &[&str] = &[
    "type",
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "additionalProperties",
    "properties",
    "required",
];

/// Keywords of a tool's schema that hold for the schema of each argument: what it refers to, and the compiler's options.
const SHARED: &[&str] = &["$defs", "definitions", "x-guidance"];

impl ToolFormat {
    /// The grammar of answers with `calls`.
    ///
    /// # Errors
    /// What of it no grammar stands for.
    pub fn grammar(self, calls: Calls<'_>, beside: &Beside, tokenizer: &Tokenizer) -> Result<String, String> {
        let mut rules = Rules { format: self, tokenizer, text: String::new() };
        let (begin, separator, end) = rules.around();
        let more = if calls.many && self != Self::Harmony { format!(" ({separator} one)*") } else { String::new() };
        let mark = self.starts().first().map_or(String::new(), |mark| rules.mark(mark));
        let (mut one, mut rest) = (Vec::new(), Vec::new());
        for (at, tool) in calls.tools.iter().enumerate() {
            let call = rules.call(at, tool)?;
            rest.extend(call.strip_prefix(&mark).map(|rest| format!("({rest})")));
            rules.rule(&format!("call_{at}"), &call);
            one.push(format!("call_{at}"));
        }
        rules.rule("one", &one.join(" | "));
        rules.rule("calls", &format!("{begin} one{more} {end}"));
        let start = match beside {
            _ if self == Self::Harmony => rules.messages(beside)?,
            Beside::Nothing => "calls".to_owned(),
            Beside::Instead(form) => {
                rules.rule("form", form);
                "form | calls".to_owned()
            }
            Beside::Text if self == Self::Llama3 => {
                // A brace at the beginning is that of a call.
                rules.free_text("\\s*[^\\s{].*", llama::TAG);
                "calls | TEXT".to_owned()
            }
            Beside::Text if rules.free_text(".+", self.starts()[0]) => "TEXT? calls | TEXT".to_owned(),
            Beside::Text => {
                // The first mark ends the text before it, as it does for the parser.
                let after = match begin.strip_prefix(&mark) {
                    Some(begin) => format!("{begin} one{more} {end}"),
                    None => format!("({}){more} {end}", rest.join(" | ")),
                };
                rules.rule("after", &after);
                rules.rule(&format!("before[suffix={mark}]"), "/(?s:.*)/");
                "before after | TEXT".to_owned()
            }
        };
        Ok(format!("start: {start}\n{}", rules.text))
    }
}

struct Rules<'a> {
    format: ToolFormat,
    tokenizer: &'a Tokenizer,
    text: String,
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl Rules<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.text, "{name}: {body}").expect("a string takes all");
    }

    /// A mark of the format: a special token by its id, or its text.
    fn mark(&self, mark: &str) -> String {
        match self.tokenizer.id(mark).filter(|id| self.tokenizer.is_special(*id)) {
            Some(id) => format!("<[{id}]>"),
            None => literal(mark),
        }
    }

    /// What stands before the first call, between two, and behind the last.
    fn around(&self) -> (String, String, String) {
        let nothing = String::new;
        match self.format {
            ToolFormat::Mistral if !self.has_arguments_mark() => {
                (format!("{} \"[\"", self.mark(mistral::CALLS)), literal(", "), literal("]"))
            }
            ToolFormat::Llama3 => (nothing(), literal("; "), nothing()),
            ToolFormat::DeepSeek => (self.mark(deepseek::BEGIN), literal("\n"), self.mark(deepseek::END)),
            ToolFormat::Hermes | ToolFormat::QwenCoder | ToolFormat::Glm => (nothing(), literal("\n"), nothing()),
            ToolFormat::Mistral | ToolFormat::Harmony => (nothing(), nothing(), nothing()),
        }
    }

    /// Whether the model writes `[TOOL_CALLS]NAME[ARGS]{…}` for each call, and not a list.
    fn has_arguments_mark(&self) -> bool {
        self.tokenizer.id(mistral::ARGS).is_some()
    }

    /// Answers of harmony: thoughts, then calls, or a final message.
    fn messages(&mut self, beside: &Beside) -> Result<String, String> {
        let [channel, message, end, start] =
            [harmony::CHANNEL, harmony::MESSAGE, harmony::END, harmony::START].map(|mark| self.mark(mark));
        // No special token is in a text.
        self.rule("BODY", "/(?s:.*)/");
        self.rule("analysis", &format!("{channel} \"analysis\" {message} BODY {end} {start} \"assistant\""));
        let body = match beside {
            Beside::Nothing => return Ok("analysis? calls".to_owned()),
            _ if channel.starts_with('"') => {
                return Err(format!("`{}` is no special token of this model", harmony::CHANNEL));
            }
            Beside::Text => "BODY",
            Beside::Instead(form) => {
                self.rule("form", form);
                "form"
            }
        };
        self.rule("preamble", &format!("{channel} \"commentary\" {message} BODY {end} {start} \"assistant\""));
        self.rule("final", &format!("{channel} \"final\" {message} {body}"));
        Ok("analysis? (preamble? calls | final)".to_owned())
    }

    /// Adds the rule of a free text, an expression, in which `mark` is not. Returns whether the mark is a special token: no text has those.
    fn free_text(&mut self, expression: &str, mark: &str) -> bool {
        let is_special = !self.mark(mark).starts_with('"');
        let letters = mark.chars().map(|c| format!("\\x{{{:X}}}", u32::from(c)));
        let without =
            if is_special { String::new() } else { format!(" & ~/(?s:.*{}.*)/", letters.collect::<String>()) };
        self.rule("TEXT", &format!("/(?s:{expression})/{without}"));
        is_special
    }

    /// One call of the `at`-th tool.
    fn call(&mut self, at: usize, tool: &Tool) -> Result<String, String> {
        let name = &tool.name;
        if matches!(self.format, ToolFormat::QwenCoder | ToolFormat::Glm) {
            return self.pairs(at, tool);
        }
        let arguments = format!("arguments_{at}");
        self.rule(&arguments, &format!("%json {}", object_schema(tool)?));
        let object = |key: &str| {
            let head = literal(&format!("{{\"name\": {}, \"{key}\": ", literal(name)));
            format!("{head} {arguments} \"}}\"")
        };
        Ok(match self.format {
            ToolFormat::Llama3 => object("parameters"),
            ToolFormat::Mistral if self.has_arguments_mark() => {
                format!("{} {} {} {arguments}", self.mark(mistral::CALLS), literal(name), self.mark(mistral::ARGS))
            }
            ToolFormat::Mistral => object("arguments"),
            ToolFormat::DeepSeek => {
                let [begin, end, separator] =
                    [deepseek::CALL_BEGIN, deepseek::CALL_END, deepseek::SEPARATOR].map(|mark| self.mark(mark));
                let name = literal(name);
                // The form of V3 and R1, and that of V3.1: the model knows its own.
                let fenced = format!("\"function\" {separator} {name} \"\\n```json\\n\" {arguments} \"\\n```\"");
                format!("{begin} ({fenced} | {name} {separator} {arguments}) {end}")
            }
            ToolFormat::Harmony => {
                let [channel, message, constrain] =
                    [harmony::CHANNEL, harmony::MESSAGE, harmony::CONSTRAIN].map(|mark| self.mark(mark));
                let after = literal(&format!("commentary to=functions.{name} "));
                let before = literal(&format!(" to=functions.{name}"));
                let header = format!("({channel} {after} | {before} {channel} \"commentary \")");
                format!("{header} {constrain} \"json\" {message} {arguments}")
            }
            ToolFormat::Hermes | ToolFormat::QwenCoder | ToolFormat::Glm => {
                let (open, close) = (self.mark("<tool_call>"), self.mark("</tool_call>"));
                format!("{open} \"\\n\" {} \"\\n\" {close}", object("arguments"))
            }
        })
    }

    /// A call whose arguments stand one by one, texts without quotes.
    fn pairs(&mut self, at: usize, tool: &Tool) -> Result<String, String> {
        let is_glm = self.format == ToolFormat::Glm;
        let (open, close) = (self.mark("<tool_call>"), self.mark("</tool_call>"));
        let empty = Map::new();
        let schema = tool.parameters.as_object().unwrap_or(&empty);
        let is_expressed = |key: &str| EXPRESSED.contains(&key) || SHARED.contains(&key);
        if let Some(key) = schema.keys().find(|key| !is_expressed(key)) {
            return Err(format!("`{key}` in the parameters of `{}`, whose arguments stand one by one", tool.name));
        }
        let required = tool.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let required: Vec<&str> = required.collect();
        let properties = tool.parameters["properties"].as_object().unwrap_or(&empty);
        if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
            return Err(format!("`required` of `{}` names `{name}`, which is none of its properties", tool.name));
        }
        let head = if is_glm { format!("{}\n", tool.name) } else { format!("\n<function={}>\n", tool.name) };
        let mut body = format!("{open} {}", literal(&head));
        for (number, (name, property)) in properties.iter().enumerate() {
            let rule = format!("argument_{at}_{number}");
            let value = self.value(&rule, tool, name, property)?;
            let key = if is_glm {
                format!("<arg_key>{name}</arg_key>\n<arg_value>")
            } else {
                format!("<parameter={name}>\n")
            };
            self.rule(&rule, &format!("{} {value}", literal(&key)));
            let optional = if required.contains(&name.as_str()) { "" } else { "?" };
            write!(body, " {rule}{optional}").expect("a string takes all");
        }
        let foot = if is_glm { String::new() } else { literal("</function>\n") };
        Ok(format!("{body} {foot} {close}"))
    }

    /// The value of an argument, with the mark behind it.
    fn value(&mut self, rule: &str, tool: &Tool, name: &str, property: &Value) -> Result<String, String> {
        let is_glm = self.format == ToolFormat::Glm;
        let end = literal(if is_glm { "</arg_value>\n" } else { "\n</parameter>\n" });
        if property["type"] != "string" {
            let mut schema = property.clone();
            for key in SHARED {
                if let (Some(map), Some(of)) = (schema.as_object_mut(), tool.parameters.get(*key)) {
                    map.entry(*key).or_insert_with(|| of.clone());
                }
            }
            self.rule(&format!("{rule}_value"), &format!("%json {schema}"));
            return Ok(format!("{rule}_value {end}"));
        }
        let mut keys = property.as_object().into_iter().flat_map(Map::keys);
        if let Some(key) = keys.find(|key| !EXPRESSED.contains(&key.as_str()) && *key != "enum") {
            return Err(format!("`{key}` of the text `{name}` of `{}`, which is written without quotes", tool.name));
        }
        match property["enum"].as_array() {
            Some(texts) => {
                let texts: Option<Vec<String>> = texts.iter().map(|text| text.as_str().map(literal)).collect();
                let texts = texts.ok_or_else(|| format!("`enum` of the text `{name}` has other values"))?;
                Ok(format!("({}) {end}", texts.join(" | ")))
            }
            None => {
                // The first mark ends the text, as it does for the parser.
                let mark = literal(if is_glm { "</arg_value>" } else { "</parameter>" });
                self.rule(&format!("{rule}_text[suffix={mark}]"), "/(?s:.*)/");
                Ok(format!("{rule}_text {}", literal("\n")))
            }
        }
    }
}

/// The schema of a tool's arguments, which are an object.
fn object_schema(tool: &Tool) -> Result<Value, String> {
    let mut schema = if tool.parameters.is_null() { json!({}) } else { tool.parameters.clone() };
    let is_object = schema["type"].is_null() || schema["type"] == "object";
    match schema.as_object_mut().filter(|_| is_object) {
        Some(map) => {
            map.insert("type".to_owned(), Value::from("object"));
            Ok(schema)
        }
        None => Err(format!("the parameters of `{}` are not an object", tool.name)),
    }
}
