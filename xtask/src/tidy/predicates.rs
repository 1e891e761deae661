//! No predicate acts: a function that is named like a question and answers it with a `bool` takes nothing by `&mut`.
//! One that changes state is named after what it does (`take_stages`, not `has_stages`).

use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::source::{self, Signature};
use crate::workspace;

/// First words of names that read as questions.
const QUESTIONS: [&str; 36] = [
    "accepts", "admits", "allows", "are", "can", "contains", "could", "covers", "did", "does", "fits", "had", "has",
    "have", "holds", "is", "joins", "keeps", "knows", "maps", "may", "might", "must", "needs", "owns", "reads",
    "sheds", "should", "serves", "suits", "takes", "waits", "wants", "was", "were", "will",
];

/// What a question returns.
const ANSWERS: [&str; 3] = ["bool", "Option<bool>", "Result<bool"];

pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for path in workspace::files(root, "rs")? {
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        out.extend(check_file(&workspace::relative(root, &path), &text));
    }
    Ok(out)
}

fn check_file(name: &str, text: &str) -> Vec<Finding> {
    let signatures = source::signatures(&source::mask(text)).into_iter();
    let acting = signatures.filter(|signature| is_question(signature) && takes_mut(&signature.parameters));
    acting
        .map(|Signature { name: function, line, .. }| {
            let message = format!("line {line}: a predicate must not take `&mut`: split it, or name what it does");
            Finding::new("acting-predicate", format!("{name}: {function}"), message)
        })
        .collect()
}

fn is_question(signature: &Signature) -> bool {
    let first = signature.name.split('_').next().unwrap_or_default();
    QUESTIONS.contains(&first) && ANSWERS.iter().any(|answer| signature.returned.starts_with(answer))
}

/// Whether parameters have a `&mut`, with or without a lifetime.
fn takes_mut(parameters: &str) -> bool {
    parameters.split('&').skip(1).any(|after| {
        let after = after.trim_start();
        let of =
            if after.starts_with('\'') { after.split_once(char::is_whitespace).map_or("", |of| of.1) } else { after };
        of.trim_start().strip_prefix("mut").is_some_and(|rest| rest.starts_with(char::is_whitespace))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects(text: &str) -> Vec<String> {
        check_file("a.rs", text).into_iter().map(|finding| finding.subject).collect()
    }

    #[test]
    fn a_question_that_acts_is_found() {
        for bad in [
            "fn has_stages(&mut self) -> bool { self.n += 1; true }",
            "fn is_whole(&'a mut self, n: u64) -> bool { true }",
            "fn should_stop(\n    cx: &mut Cx,\n) -> Result<bool, Error> {\n    Ok(true)\n}",
            "trait T { fn may_go<F: Fn(u8) -> u8>(&mut self, f: F) -> Option<bool>; }",
            "fn waits(n: &mut u32) -> bool\nwhere\n    u32: Copy,\n{\n    true\n}",
        ] {
            assert_eq!(subjects(bad).len(), 1, "{bad}");
        }
        assert_eq!(subjects("fn can_go(&mut self) -> bool { true }"), ["a.rs: can_go"]);
    }

    #[test]
    fn commands_and_questions_that_only_look_are_not() {
        for good in [
            "fn is_whole(&self, mutable: &Mutex) -> bool { true }",
            "fn take_stages(&mut self) -> bool { true }",
            "fn isolate(&mut self) -> bool { true }",
            "fn has_room(&mut self) -> &mut Room { &mut self.room }",
            "// fn is_whole(&mut self) -> bool { true }",
            "fn is_set(mut self) -> bool { true }",
        ] {
            assert!(subjects(good).is_empty(), "{good}");
        }
    }
}
