//! The flags `--tool-parser` and `--reasoning-parser`: how the model's answers are read.

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

/// The formats of the answers: as the two flags say, else as the template shows.
///
/// # Errors
/// For gpt-oss's format of one and another model's of the other: its messages are parsed as a whole.
pub(crate) fn formats(
    (tools, reasoning): (Option<ToolParser>, Option<ReasoningParser>),
    template: Option<&ChatTemplate>,
) -> anyhow::Result<Formats> {
    let shown = template.map(ChatTemplate::formats).unwrap_or_default();
    let tools = tools.map_or(shown.tools, |ToolParser(format)| format);
    let reasoning = reasoning.map_or(shown.reasoning, |ReasoningParser(format)| format);
    let is_mixed = |tools: ToolFormat, reasoning: ReasoningFormat| {
        (tools == ToolFormat::Harmony) != (reasoning == ReasoningFormat::Harmony)
    };
    anyhow::ensure!(
        !tools.zip(reasoning).is_some_and(|(tools, reasoning)| is_mixed(tools, reasoning)),
        "a parser of gpt-oss does not go with one of another model\n\
         hint: --tool-parser=openai with --reasoning-parser=openai_gptoss, or none for one of them"
    );
    Ok(Formats { tools, reasoning })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::EngineArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn of(flags: &[&str]) -> anyhow::Result<Formats> {
        let args = Flags::parse_from(["lagoon"].iter().chain(flags)).engine;
        formats((args.tool_parser, args.reasoning_parser), None)
    }

    #[test]
    fn flags_name_the_parsers_and_those_of_gpt_oss_stand_alone() {
        let both = of(&["--tool-call-parser=hermes", "--reasoning-parser=qwen3"]).unwrap();
        assert_eq!(both, Formats { tools: Some(ToolFormat::Hermes), reasoning: Some(ReasoningFormat::Think) });
        assert!(of(&["--tool-parser=openai", "--reasoning-parser=openai_gptoss"]).is_ok());
        assert!(of(&["--tool-parser=openai", "--reasoning-parser=none"]).is_ok());
        assert!(of(&["--tool-parser=openai", "--reasoning-parser=qwen3"]).unwrap_err().to_string().contains("hint: "));
        assert!(tool_parser("qwen").unwrap_err().contains("hermes"));
    }
}
