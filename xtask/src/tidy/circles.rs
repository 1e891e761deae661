//! Rule about imports: the modules of a crate that stand beside each other in its root do not import each other in a circle.
//!
//! A module is a file or a folder in the crate's `src`. It imports another one with `use crate::…`, `super::…` from the top, or a
//! path within an expression. What it takes from the crate's root (`use crate::Name`) is not followed; tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::source;
use crate::workspace::{self, Member};

/// Modules, and those that each imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

pub(super) fn check(root: &Path, members: &[Member]) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for member in members {
        let src = root.join(&member.dir).join("src");
        if !src.is_dir() {
            continue;
        }
        let mut files = Vec::new();
        for path in workspace::files(&src, "rs")? {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            files.push((workspace::relative(&src, &path), text));
        }
        out.extend(check_crate(&member.dir, &files));
    }
    Ok(out)
}

/// One finding a circle: its modules, in order.
fn check_crate(dir: &str, files: &[(String, String)]) -> Vec<Finding> {
    let message = "these modules import each other in a circle: move what they share into a module of its own";
    let circles = circles(&imports(files)).into_iter();
    circles.map(|names| Finding::new("import-circle", format!("{dir}: {}", names.join(", ")), message)).collect()
}

/// Whether a file is a test as a whole.
fn is_test(name: &str) -> bool {
    name.ends_with("tests.rs") || name.contains("tests/")
}

/// The module in the root that a file belongs to, and how deep in it the file's own module is; `None` for the root and binaries.
fn module_of(name: &str) -> Option<(&str, usize)> {
    let path = name.strip_suffix(".rs")?;
    let path = path.strip_suffix("/mod").unwrap_or(path);
    let (top, rest) = path.split_once('/').map_or((path, None), |(top, rest)| (top, Some(rest)));
    let depth = rest.map_or(0, |rest| rest.split('/').count());
    (!["lib", "main", "bin"].contains(&top)).then_some((top, depth))
}

fn imports(files: &[(String, String)]) -> Imports {
    let modules =
        files.iter().filter(|(name, _)| !is_test(name)).filter_map(|(name, _)| Some(module_of(name)?.0.to_owned()));
    let mut out: Imports = modules.map(|module| (module, BTreeSet::new())).collect();
    let modules: BTreeSet<String> = out.keys().cloned().collect();
    for (name, text) in files.iter().filter(|(name, _)| !is_test(name)) {
        let Some((module, depth)) = module_of(name) else { continue };
        let masked = source::mask(without_tests(text));
        let code = String::from_utf8_lossy(&masked);
        let named = firsts(&code, depth).into_iter().filter(|first| first != module && modules.contains(first));
        out.entry(module.to_owned()).or_default().extend(named);
    }
    out
}

/// A file's text before its module of tests.
fn without_tests(text: &str) -> &str {
    text.find("#[cfg(test)]\nmod tests {").map_or(text, |at| &text[..at])
}

/// First names of all paths that start in the crate's root, of code in a module `depth` below one in the root.
fn firsts(code: &str, depth: usize) -> BTreeSet<String> {
    let up = "super::".repeat(depth + 1);
    let mut out = BTreeSet::new();
    for start in ["crate::", &up] {
        for (at, _) in code.match_indices(start) {
            let inside = code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':');
            if !inside {
                heads(&code[at + start.len()..], &mut out);
            }
        }
    }
    out
}

/// The first name of a path, or of each path of a list in braces.
fn heads(path: &str, out: &mut BTreeSet<String>) {
    let Some(list) = path.strip_prefix('{') else {
        let name: String = path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        out.insert(name);
        return;
    };
    let mut level = 1_usize;
    let mut fresh = true;
    for (at, c) in list.char_indices() {
        match c {
            '{' => level += 1,
            '}' => level -= 1,
            ',' if level == 1 => fresh = true,
            c if fresh && level == 1 && !c.is_whitespace() => {
                fresh = false;
                heads(list[at..].trim_start_matches('{'), out);
            }
            _ => {}
        }
        if level == 0 {
            return;
        }
    }
}

/// All modules that a module imports, or that these import.
fn reached(imports: &Imports, from: &str) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(module) = open.pop() {
        let next = imports.get(&module).into_iter().flatten();
        open.extend(next.filter(|name| out.insert((*name).clone())).cloned());
    }
    out
}

/// Groups of modules of which each reaches all others.
fn circles(imports: &Imports) -> Vec<Vec<String>> {
    let reached_by: BTreeMap<&String, BTreeSet<String>> =
        imports.keys().map(|name| (name, reached(imports, name))).collect();
    let mut out: Vec<Vec<String>> = Vec::new();
    for (name, all) in &reached_by {
        if !all.contains(*name) || out.iter().any(|circle| circle.contains(name)) {
            continue;
        }
        out.push(all.iter().filter(|other| reached_by[other].contains(*name)).cloned().collect());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        check_crate("x", &files).into_iter().map(|finding| finding.subject).collect()
    }

    #[test]
    fn circles_are_found_however_a_path_is_written() {
        for (a, b) in [
            ("use crate::b::B;", "use crate::a;"),
            ("use crate::{E, b::{B, C}};", "fn f() { crate::a::g() }"),
            ("use super::b;", "use super::{c, a::A};"),
            ("use crate::{\n    c,\n    b,\n};", "type T = super::a::A;"),
        ] {
            assert_eq!(found(&[("lib.rs", "mod a;"), ("a.rs", a), ("b.rs", b), ("c.rs", "")]), ["x: a, b"], "{a} {b}");
        }
        let three =
            [("a/mod.rs", "use crate::b;"), ("b.rs", "use crate::c;"), ("c/d/e.rs", "use super::super::super::a;")];
        assert_eq!(found(&three), ["x: a, b, c"]);
        let two = [
            ("a.rs", "use crate::b;"),
            ("b.rs", "use crate::a;"),
            ("c.rs", "use crate::{a, d};"),
            ("d.rs", "use crate::c;"),
        ];
        assert_eq!(found(&two), ["x: a, b", "x: c, d"]);
    }

    #[test]
    fn roads_one_way_names_of_the_root_and_tests_are_not() {
        for (a, b) in [
            ("use crate::b;", "use crate::A;"),
            ("use crate::b;", "// use crate::a;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}"),
            ("use crate::b;", "use crate::c::{a, d};"),
            ("use crate::b;", "use other_crate::a;"),
            ("use crate::{c, b};", "use self::a::A;"),
        ] {
            let files =
                [("lib.rs", "use crate::a;"), ("a.rs", a), ("b.rs", b), ("c.rs", ""), ("b/tests.rs", "use crate::a;")];
            assert_eq!(found(&files), Vec::<String>::new(), "{a} {b}");
        }
    }
}
