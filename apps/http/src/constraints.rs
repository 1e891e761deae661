//! Structured output: the constraint of a request's answers, from the form that they have ([`crate::forms`]) and from calls that
//! must be made.
//!
//! The grammar is compiled before the request is submitted, so that a schema that is not supported is refused with its path.

use crate::{
    error::ApiError,
    forms::{Asked, refusal},
    state::ServerState,
    tools::ToolFields,
};
use lagoon_text::parse::{Formats, ReasoningTokens};
use lagoon_types::{Constraint, Reasoning};
use std::sync::Arc;

/// The constraint of a completion's answers, compiled.
pub(crate) fn of_completion(state: &ServerState, asked: Option<Asked>) -> Result<Option<Arc<Constraint>>, ApiError> {
    asked.map(|asked| compiled(state, asked, None)).transpose()
}

/// The constraint of a chat's answers to `prompt`, compiled: behind the reasoning, if the model's `formats` have any.
pub(crate) fn of_chat(
    state: &ServerState,
    asked: Option<Asked>,
    tools: &ToolFields,
    formats: Formats,
    prompt: &str,
) -> Result<Option<Arc<Constraint>>, ApiError> {
    let constrained = tools.constrained(asked, formats, &state.tokenizer)?;
    let Some((asked, has_reasoning)) = constrained else { return Ok(None) };
    let may_end = !tools.tools.is_empty();
    let reasoning =
        formats.reasoning.filter(|_| !has_reasoning).map(|format| format.tokens(&state.tokenizer, prompt)).transpose();
    let reasoning = reasoning.map_err(|mark| {
        let field = &asked.field;
        let message = format!(
            "the field `{field}` is not supported: the model's reasoning ends with `{mark}`, which is no token of its own\n\
             hint: serve it with --reasoning-parser=none"
        );
        ApiError::field(field.clone(), "unsupported_parameter", message)
    })?;
    let reasoning = reasoning.flatten().map(|ReasoningTokens { is_open, opens, ends, until }| Reasoning {
        is_open,
        opens,
        ends,
        until,
        may_end: may_end && until.is_some(),
    });
    compiled(state, asked, reasoning).map(Some)
}

fn compiled(state: &ServerState, asked: Asked, reasoning: Option<Reasoning>) -> Result<Arc<Constraint>, ApiError> {
    let Asked { grammar, field } = asked;
    match state.grammars.check(&grammar) {
        Ok(()) => Ok(Arc::new(Constraint { grammar, reasoning })),
        Err(error) => Err(refusal(&field, &error)),
    }
}
