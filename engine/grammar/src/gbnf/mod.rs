//! GBNF, the grammars of llama.cpp, in llguidance's variant of Lark.
//!
//! Syntax: <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>. Errors name their line; tokens (`<…>`) are
//! refused. Sentences stay the same ones ([`lexemes`]).

mod chars;
mod lexemes;
mod parse;
mod positions;

use crate::error::GrammarError;
use lexemes::{Lexed, Node};
use parse::{Expr, Wrong};
use std::fmt::Write;

pub(crate) use parse::begins_as_gbnf;

/// The grammar in Lark.
///
/// # Errors
/// If it is no GBNF, or too large.
pub(crate) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let rules = parse::parse(text).map_err(|Wrong { line, what }| {
        GrammarError::Invalid(format!("the grammar is not valid GBNF: line {line}: {what}"))
    })?;
    let rules = rules
        .finite()
        .ok_or_else(|| GrammarError::Invalid("the grammar has no sentence: `root` never ends".to_owned()))?;
    let lexed =
        lexemes::lexed(&rules).map_err(|what| GrammarError::Invalid(format!("the grammar is too large: {what}")))?;
    Ok(written(&lexed))
}

fn written(lexed: &Lexed) -> String {
    let mut out = String::from("start: ");
    node(&lexed.start, &mut out);
    for (rule, body) in &lexed.rules {
        write!(out, "\nr{rule}: ").expect("a string takes all");
        node(body, &mut out);
    }
    for (number, expr) in lexed.lexemes.iter().enumerate() {
        write!(out, "\nT{number}: /").expect("a string takes all");
        regex(expr, &mut out);
        // No lexeme is the empty text.
        out.push_str(if lexemes::is_nullable(expr) { "/ & /(?s:.+)/" } else { "/" });
    }
    out.push('\n');
    out
}

fn node(node: &Node, out: &mut String) {
    match node {
        Node::Lexeme(number) => write!(out, "T{number}").expect("a string takes all"),
        Node::Rule(rule) => write!(out, "r{rule}").expect("a string takes all"),
        Node::Seq(items) | Node::Any(items) => {
            let separator = if matches!(node, Node::Any(_)) { " | " } else { " " };
            out.push('(');
            for (at, item) in items.iter().enumerate() {
                out.push_str(if at > 0 { separator } else { "" });
                self::node(item, out);
            }
            out.push(')');
        }
        Node::Repeat(item, min, max) => {
            out.push('(');
            self::node(item, out);
            out.push(')');
            times(*min, *max, out);
        }
    }
}

fn regex(expr: &Expr, out: &mut String) {
    match expr {
        Expr::Chars(chars) => chars.write(out),
        Expr::Seq(items) | Expr::Any(items) => {
            let separator = if matches!(expr, Expr::Any(_)) { "|" } else { "" };
            out.push_str("(?:");
            for (at, item) in items.iter().enumerate() {
                out.push_str(if at > 0 { separator } else { "" });
                regex(item, out);
            }
            out.push(')');
        }
        Expr::Repeat(item, min, max) => {
            out.push_str("(?:");
            regex(item, out);
            out.push(')');
            times(*min, *max, out);
        }
        Expr::Rule(_) => unreachable!("a lexeme refers to no rule"),
    }
}

fn times(min: u32, max: Option<u32>, out: &mut String) {
    match (min, max) {
        (0, None) => out.push('*'),
        (1, None) => out.push('+'),
        (0, Some(1)) => out.push('?'),
        (1, Some(1)) => {}
        (min, None) => write!(out, "{{{min},}}").expect("a string takes all"),
        (min, Some(max)) => write!(out, "{{{min},{max}}}").expect("a string takes all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_their_line() {
        for (text, message) in [
            ("root ::= \"a\"\nb ::= [a-", "line 2: a `]` is missing"),
            ("root ::= \"a\n", "line 1: a `\"` is missing"),
            ("root ::= (\"a\"\n\n", "line 3: a `)` is missing"),
            ("root ::= a\n# a\n", "line 1: there is no rule `a`"),
            ("a ::= \"a\"\n", "line 1: there is no rule `root`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: there are two rules `root`"),
            ("root ::= \"a\"{3,2}", "line 1: `{3,2}`"),
            ("root ::= \"a\"{99999}", "more than 10000"),
            ("root ::= \"\\q\"", "`\\q` is no escape"),
            ("root ::= \"\\ud800\"", "4 hexadecimal digits"),
            ("root ::= [z-a]", "has no character"),
            ("root ::= [^\\x00-\\U0010FFFF]", "the class has no character"),
            ("root ::= <think> \"a\"", "tokens"),
            ("root ::= \"a\" }", "`}` was not expected"),
            ("root = \"a\"", "`::=` must follow `root`"),
            ("root ::= \"a\"\n::= b", "line 2: a rule must begin here"),
        ] {
            let error = to_lark(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn parts_that_never_end_are_left_out() {
        let error = to_lark("root ::= \"a\" root").unwrap_err().to_string();
        assert!(error.contains("`root` never ends"), "{error}");
        let lark = to_lark("root ::= \"a\" | \"b\" b+ | b*\nb ::= b").unwrap();
        assert!(lark.contains("61") && !lark.contains("62") && !lark.contains("r1"), "{lark}");
    }

    #[test]
    fn grammars_are_recognised_by_their_first_statement() {
        assert!(begins_as_gbnf("# a\n\n  root ::= \"a\"") && begins_as_gbnf("ws-1 ::="));
        assert!(!begins_as_gbnf("start: \"::=\"") && !begins_as_gbnf("") && !begins_as_gbnf("%llguidance {}"));
    }

    #[test]
    fn a_grammar_without_recursion_is_one_lexeme() {
        let lark = to_lark("root ::= (\"a\" | b){2} # x\nb ::=\n  [b-c]* |\n  \"\"").unwrap();
        assert_eq!(
            lark,
            "start: (T0)?\nT0: /(?:(?:[\\x{61}-\\x{61}]|(?:(?:[\\x{62}-\\x{63}])*|(?:)))){2,2}/ & /(?s:.+)/\n"
        );
    }

    #[test]
    fn what_grows_beyond_the_bounds_is_refused() {
        let chain: String = (0..40).map(|n| format!("r{n} ::= r{} r{}\n", n + 1, n + 1)).collect();
        let error = to_lark(&format!("root ::= r0\n{chain}r40 ::= \"a\"")).unwrap_err().to_string();
        assert!(error.contains("too large"), "{error}");
        // A ring of rules in which each pass learns of one rule more.
        let ring: String = (1..1900).map(|n| format!("r{n} ::= [a-b] r{} | \"x\" [c-d]*\n", n - 1)).collect();
        let ring = to_lark(&format!("root ::= r1899\nr0 ::= root | \"y\"\n{ring}"));
        assert!(ring.is_ok_and(|lark| lark.contains("r1899")));
    }
}
