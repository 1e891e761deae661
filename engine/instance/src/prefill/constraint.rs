//! The constraint of a request for a prompt, as messages have it.

use lagoon_protocol::{PrefillConstraint, PrefillReasoning};
use lagoon_types::limits::{CHOICES_MAX, GRAMMAR_BYTES_MAX, REASONING_END_MAX};
use lagoon_types::{Constraint, Grammar, Reasoning};

const SCHEMA: u32 = 1;
const REGEX: u32 = 2;
const CHOICE: u32 = 3;
const LARK: u32 = 4;

/// The message of a constraint.
pub(super) fn write(constraint: &Constraint) -> PrefillConstraint {
    let (kind, texts) = match &constraint.grammar {
        Grammar::JsonSchema(text) => (SCHEMA, vec![text.clone()]),
        Grammar::Regex(text) => (REGEX, vec![text.clone()]),
        Grammar::Choice(texts) => (CHOICE, texts.clone()),
        Grammar::Lark(text) => (LARK, vec![text.clone()]),
    };
    let reasoning = |of: &Reasoning| PrefillReasoning {
        is_open: of.is_open,
        opens: of.opens,
        ends: of.ends.clone(),
        until: of.until,
        may_end: of.may_end,
    };
    PrefillConstraint { kind, texts, reasoning: constraint.reasoning.as_ref().map(reasoning) }
}

/// Checks a peer's message: its sizes, and that it is a constraint. The runner compiles the grammar.
pub(super) fn check(m: &PrefillConstraint) -> Result<(), String> {
    let constraint = read(m).ok_or_else(|| format!("{} is no kind of grammar", m.kind))?;
    let (bytes, texts) = (constraint.grammar.bytes(), m.texts.len());
    if bytes > GRAMMAR_BYTES_MAX || texts > CHOICES_MAX {
        return Err(format!("a grammar of {bytes} bytes in {texts} texts is too large"));
    }
    match m.reasoning.as_ref().map_or(1, |of| of.ends.len()) {
        1..=REASONING_END_MAX => Ok(()),
        tokens => Err(format!("reasoning ends with {tokens} tokens, but must with 1 to {REASONING_END_MAX}")),
    }
}

/// The constraint of a message; `None` if it is none.
pub(super) fn read(m: &PrefillConstraint) -> Option<Constraint> {
    let grammar = match (m.kind, &m.texts[..]) {
        (SCHEMA, [text]) => Grammar::JsonSchema(text.clone()),
        (REGEX, [text]) => Grammar::Regex(text.clone()),
        (CHOICE, texts) => Grammar::Choice(texts.to_vec()),
        (LARK, [text]) => Grammar::Lark(text.clone()),
        _ => return None,
    };
    let reasoning = m.reasoning.as_ref().map(|of| Reasoning {
        is_open: of.is_open,
        opens: of.opens,
        ends: of.ends.clone(),
        until: of.until,
        may_end: of.may_end,
    });
    Some(Constraint { grammar, reasoning })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constraint_arrives_as_it_was_sent() {
        let reasoning = Reasoning { is_open: true, opens: Some(3), ends: vec![4, 5], until: Some(6), may_end: true };
        for grammar in [
            Grammar::JsonSchema("{}".to_owned()),
            Grammar::Regex("a+".to_owned()),
            Grammar::Choice(vec!["a".to_owned(), "b".to_owned()]),
            Grammar::Lark("start: \"a\"".to_owned()),
        ] {
            for reasoning in [None, Some(reasoning.clone())] {
                let constraint = Constraint { grammar: grammar.clone(), reasoning };
                let message = write(&constraint);
                assert_eq!(check(&message), Ok(()));
                assert_eq!(read(&message), Some(constraint));
            }
        }
    }

    #[test]
    fn messages_that_are_no_constraint_are_refused() {
        let text = |kind, texts: &[&str]| PrefillConstraint {
            kind,
            texts: texts.iter().map(|text| (*text).to_owned()).collect(),
            reasoning: None,
        };
        let endless = PrefillReasoning { ends: vec![], ..PrefillReasoning::default() };
        let long = PrefillReasoning { ends: vec![1; REASONING_END_MAX + 1], ..PrefillReasoning::default() };
        for message in [
            text(0, &["a"]),
            text(5, &["a"]),
            text(SCHEMA, &[]),
            text(REGEX, &["a", "b"]),
            text(LARK, &[&"a".repeat(GRAMMAR_BYTES_MAX + 1)]),
            text(CHOICE, &vec!["a"; CHOICES_MAX + 1]),
            PrefillConstraint { reasoning: Some(endless), ..text(SCHEMA, &["{}"]) },
            PrefillConstraint { reasoning: Some(long), ..text(SCHEMA, &["{}"]) },
        ] {
            assert!(check(&message).is_err(), "{}", message.kind);
        }
    }
}
