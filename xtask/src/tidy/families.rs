//! Rule about model families: only `engine/model/src/families` names them. Elsewhere a family is its `ModelSpec`.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Finding;
use crate::{source, workspace};

/// Where families are named.
const FAMILIES: &str = "engine/model/src/families/";
/// Parsers of answers have the names that clients' flags have in vLLM, which are those of families.
const PARSERS: &str = "engine/text/src/parse/";
/// What the rule holds for: the three floors of the program.
const FLOORS: [&str; 5] = ["apps/", "cuda/", "engine/", "net/", "shaders/"];

/// Checks that no other source file has the `model_type` of a family as a literal.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut files = Vec::new();
    for path in workspace::files(root, "rs")? {
        let name = workspace::relative(root, &path);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        files.push((name, text));
    }
    let families: Vec<String> =
        files.iter().filter(|(name, _)| name.starts_with(FAMILIES)).flat_map(|(_, text)| model_types(text)).collect();
    ensure!(!families.is_empty(), "no file of {FAMILIES} has a `model_type`");
    Ok(files.iter().flat_map(|(name, text)| check_file(name, text, &families)).collect())
}

/// The families that a file of [`FAMILIES`] declares.
fn model_types(text: &str) -> Vec<String> {
    let declared = text.match_indices("model_type: \"").map(|(at, found)| &text[at + found.len()..]);
    declared.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
}

/// Whether a file is a test as a whole.
fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.ends_with("_tests.rs") || name.ends_with("/tests.rs")
}

/// A file's text before its module of tests.
fn without_tests(text: &str) -> &str {
    text.find("#[cfg(test)]\nmod tests {").map_or(text, |at| &text[..at])
}

fn check_file(name: &str, text: &str, families: &[String]) -> Vec<Finding> {
    if name.starts_with(FAMILIES)
        || name.starts_with(PARSERS)
        || is_test(name)
        || !FLOORS.iter().any(|floor| name.starts_with(floor))
    {
        return Vec::new();
    }
    let text = without_tests(text);
    let mut out = Vec::new();
    for family in families {
        for (at, _) in text.match_indices(&format!("\"{family}\"")) {
            let line = source::line_of(text.as_bytes(), at);
            if text.lines().nth(line - 1).is_some_and(|line| line.trim_start().starts_with("//")) {
                continue;
            }
            let message = format!("line {line}: \"{family}\" is a model family, which only {FAMILIES} names");
            out.push(Finding::new("family-name", name, message));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(name: &str, text: &str) -> Vec<&'static str> {
        let families = model_types("Family {\n    model_type: \"kimi_k2\",\n} Family { model_type: \"llama\", read }");
        assert_eq!(families, ["kimi_k2", "llama"]);
        check_file(name, text, &families).into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn a_family_is_named_in_its_file_and_in_tests_only() {
        let text = "//! Doc.\nmatch kind {\n    Some(\"llama\") => 1,\n    Some(\"kimi_k2\" | \"llama3\") => 2,\n}\n";
        for name in ["engine/text/src/convert/tiktoken.rs", "apps/lagoon/src/model.rs", "cuda/src/lib.rs"] {
            assert_eq!(rules(name, text), ["family-name", "family-name"], "{name}");
        }
        for name in [
            "engine/model/src/families/llama.rs",
            "engine/model/tests/config.rs",
            "engine/runner/src/ring_tests.rs",
            "tests/system/pooled.rs",
            "benches/src/model.rs",
            "xtask/src/tidy/families.rs",
        ] {
            assert!(rules(name, text).is_empty(), "{name}");
        }
    }

    #[test]
    fn comments_and_the_module_of_tests_may_name_one() {
        assert!(rules("engine/text/src/lib.rs", "// As \"llama\" has it.\nlet llama = 1;\n").is_empty());
        let text = "//! Doc.\n#[cfg(test)]\nmod tests {\n    const A: &str = \"llama\";\n}\n";
        assert!(rules("engine/text/src/lib.rs", text).is_empty());
    }
}
