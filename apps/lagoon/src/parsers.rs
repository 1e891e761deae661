//! The flags `--tool-parser` and `--reasoning-parser`: how the model's answers are read.

use crate::args::EngineArgs;
use lagoon_text::ChatTemplate;
use lagoon_text::parse::{Formats, REASONING_FORMATS, ReasoningFormat, TOOL_FORMATS, ToolFormat};

/// A flag's value: a format, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ToolParser(Option<ToolFormat>);

/// As [`ToolParser`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningParser(Option<ReasoningFormat>);

pub(crate) fn tool_parser(name: &str) -> Result<ToolParser, String> {
    format_named(name, TOOL_FORMATS).map(ToolParser)
}

pub(crate) fn reasoning_parser(name: &str) -> Result<ReasoningParser, String> {
    format_named(name, REASONING_FORMATS).map(ReasoningParser)
}

fn format_named<F: Copy>(name: &str, formats: &[(&str, F)]) -> Result<Option<F>, String> {
    if name == "none" {
        return Ok(None);
    }
    let found = formats.iter().find(|(known, _)| *known == name);
    found.map(|(_, format)| Some(*format)).ok_or_else(|| {
        let names = formats.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        format!("no parser has this name\nhint: {names} or none")
    })
}

/// The formats of the answers: as the flags say, else as the template shows.
pub(crate) fn formats(args: &EngineArgs, template: Option<&ChatTemplate>) -> Formats {
    let shown = template.map(ChatTemplate::formats).unwrap_or_default();
    Formats {
        tools: args.tool_parser.map_or(shown.tools, |ToolParser(format)| format),
        reasoning: args.reasoning_parser.map_or(shown.reasoning, |ReasoningParser(format)| format),
    }
}
