//! A scanner of Rust source that knows comments and literals and counts braces, to measure functions without a
//! parser. `mask` keeps the text's length and lines, so positions in both agree.

/// A function and the lines that it covers, from `fn` to its closing brace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// 1-based line of its `fn`.
    pub(crate) line: usize,
    pub(crate) lines: usize,
}

/// The signature of a function, with or without a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) name: String,
    /// 1-based line of its `fn`.
    pub(crate) line: usize,
    /// The text between its parentheses.
    pub(crate) parameters: String,
    /// The type that it returns; empty if it returns nothing.
    pub(crate) returned: String,
}

/// The text with comments and the contents of literals replaced by spaces.
pub(crate) fn mask(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match literal_or_comment(bytes, at) {
            Some(end) => end,
            None => {
                at += 1;
                continue;
            }
        };
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    out
}

fn at(bytes: &[u8], index: usize) -> u8 {
    bytes.get(index).copied().unwrap_or(0)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// The end of the comment or literal that starts at `start`, if one does.
fn literal_or_comment(bytes: &[u8], start: usize) -> Option<usize> {
    let inside_word = start > 0 && is_word(bytes[start - 1]);
    match bytes[start] {
        b'/' if at(bytes, start + 1) == b'/' => {
            Some(bytes[start..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |n| start + n))
        }
        b'/' if at(bytes, start + 1) == b'*' => Some(block_comment(bytes, start)),
        b'"' => Some(quoted(bytes, start, b'"')),
        b'r' | b'b' | b'c' if !inside_word => prefixed(bytes, start),
        b'\'' => character(bytes, start),
        _ => None,
    }
}

/// Block comments nest.
fn block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut index, mut depth) = (start, 0_usize);
    while index < bytes.len() {
        match (bytes[index], at(bytes, index + 1)) {
            (b'/', b'*') => {
                depth += 1;
                index += 2;
            }
            (b'*', b'/') => {
                depth -= 1;
                index += 2;
                if depth == 0 {
                    return index;
                }
            }
            _ => index += 1,
        }
    }
    bytes.len()
}

/// A literal with escapes, from its opening quote.
fn quoted(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut index = start + 1;
    while index < bytes.len() {
        match bytes[index] {
            b'\\' => index += 2,
            b if b == quote => return index + 1,
            _ => index += 1,
        }
    }
    bytes.len()
}

/// r"…", r#"…"#, b"…", b'…', c"…", br"…", cr"…". Raw identifiers (r#fn) are none of them.
fn prefixed(bytes: &[u8], start: usize) -> Option<usize> {
    let mut index = start;
    if matches!(bytes[index], b'b' | b'c') {
        index += 1;
        match at(bytes, index) {
            b'"' => return Some(quoted(bytes, index, b'"')),
            b'\'' if bytes[start] == b'b' => return Some(quoted(bytes, index, b'\'')),
            b'r' => {}
            _ => return None,
        }
    }
    index += 1;
    let hashes = bytes[index.min(bytes.len())..].iter().take_while(|b| **b == b'#').count();
    if at(bytes, index + hashes) != b'"' {
        return None;
    }
    let mut end = index + hashes + 1;
    while end < bytes.len() {
        if bytes[end] == b'"' && bytes[end + 1..].iter().take(hashes).filter(|b| **b == b'#').count() == hashes {
            return Some(end + 1 + hashes);
        }
        end += 1;
    }
    Some(bytes.len())
}

/// A character literal; none if the quote begins a lifetime.
fn character(bytes: &[u8], start: usize) -> Option<usize> {
    if at(bytes, start + 1) == b'\\' {
        return Some(quoted(bytes, start, b'\''));
    }
    let text = std::str::from_utf8(&bytes[start + 1..]).ok()?;
    let first = text.chars().next()?;
    (at(bytes, start + 1 + first.len_utf8()) == b'\'').then_some(start + 2 + first.len_utf8())
}

/// Positions of `word` as a whole word in masked text.
pub(crate) fn words(masked: &[u8], word: &str) -> Vec<usize> {
    let length = word.len();
    (0..masked.len().saturating_sub(length - 1))
        .filter(|i| {
            masked[*i..].starts_with(word.as_bytes())
                && (*i == 0 || !is_word(masked[*i - 1]))
                && !is_word(at(masked, *i + length))
        })
        .collect()
}

/// The 1-based line of a position.
pub(crate) fn line_of(bytes: &[u8], position: usize) -> usize {
    1 + bytes[..position].iter().filter(|b| **b == b'\n').count()
}

/// The names of the modules that a file declares.
pub(crate) fn modules(masked: &[u8]) -> Vec<String> {
    let name = |start: usize| -> String {
        let rest = masked[start + 3..].iter().copied();
        rest.skip_while(u8::is_ascii_whitespace).take_while(|b| is_word(*b)).map(char::from).collect()
    };
    words(masked, "mod").into_iter().map(name).filter(|name| !name.is_empty()).collect()
}

/// Every function with a body.
pub(crate) fn functions(masked: &[u8]) -> Vec<Function> {
    words(masked, "fn").into_iter().filter_map(|start| function(masked, start)).collect()
}

/// The name behind a `fn`; none for the type `fn(…)`.
fn name_of(rest: &[u8]) -> Option<String> {
    let name: Vec<u8> =
        rest.iter().copied().skip_while(u8::is_ascii_whitespace).take_while(|b| is_word(*b) || *b == b'#').collect();
    (!name.is_empty()).then(|| String::from_utf8_lossy(&name).into_owned())
}

/// Every function's signature, of declarations in traits as well.
pub(crate) fn signatures(masked: &[u8]) -> Vec<Signature> {
    words(masked, "fn").into_iter().filter_map(|start| signature(masked, start)).collect()
}

fn signature(masked: &[u8], start: usize) -> Option<Signature> {
    let rest = &masked[start + 2..];
    let name = name_of(rest)?;
    // Parentheses in generics (`F: Fn(u8)`) are not the parameters'.
    let (mut angles, mut open) = (0_usize, None);
    for (offset, byte) in rest.iter().enumerate() {
        match byte {
            b'<' => angles += 1,
            b'>' if offset == 0 || rest[offset - 1] != b'-' => angles = angles.saturating_sub(1),
            b'(' if angles == 0 => {
                open = Some(offset);
                break;
            }
            _ => {}
        }
    }
    let open = open?;
    let mut depth = 0_usize;
    let close = open
        + rest[open..].iter().position(|byte| {
            match byte {
                b'(' => depth += 1,
                b')' => depth -= 1,
                _ => {}
            }
            depth == 0
        })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let end = rest[close..].iter().position(|byte| matches!(byte, b'{' | b';'))?;
    let tail = text(&rest[close + 1..close + end]);
    let returned = tail.strip_prefix("->").map(|of| of.split("where").next().unwrap_or(of).trim().to_owned());
    let parameters = text(&rest[open + 1..close]);
    Some(Signature { name, line: line_of(masked, start), parameters, returned: returned.unwrap_or_default() })
}

fn function(masked: &[u8], start: usize) -> Option<Function> {
    let rest = &masked[start + 2..];
    let name = name_of(rest)?;
    let mut depth = 0_usize;
    let mut open = None;
    for (offset, byte) in rest.iter().enumerate() {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            b';' if depth == 0 => return None,
            b'{' if depth == 0 => {
                open = Some(start + 2 + offset);
                break;
            }
            _ => {}
        }
    }
    let open = open?;
    let mut braces = 0_usize;
    for (offset, byte) in masked[open..].iter().enumerate() {
        match byte {
            b'{' => braces += 1,
            b'}' => braces -= 1,
            _ => continue,
        }
        if braces == 0 {
            let line = line_of(masked, start);
            let lines = line_of(masked, open + offset) - line + 1;
            return Some(Function { name, line, lines });
        }
    }
    None
}

/// Whether the file starts with its module doc; only inner attributes and plain comments may come before it.
pub(crate) fn has_module_doc(text: &str) -> bool {
    let Some(position) =
        text.match_indices("//!").map(|(i, _)| i).find(|i| *i == 0 || text.as_bytes()[*i - 1] == b'\n')
    else {
        return false;
    };
    let before = String::from_utf8_lossy(&mask(&text[..position])).into_owned();
    let mut rest = before.trim_start();
    while let Some(attribute) = rest.strip_prefix("#![") {
        let mut depth = 1_usize;
        let end = attribute.bytes().position(|b| {
            match b {
                b'[' => depth += 1,
                b']' => depth -= 1,
                _ => {}
            }
            depth == 0
        });
        let Some(end) = end else { return false };
        rest = attribute[end + 1..].trim_start();
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Vec<(String, usize, usize)> {
        functions(&mask(text)).into_iter().map(|f| (f.name, f.line, f.lines)).collect()
    }

    #[test]
    fn counts_lines_from_fn_to_the_closing_brace() {
        let text = "struct S;\nimpl S {\n    pub fn a(&self) -> [u8; 2] {\n        [1, 2]\n    }\n    fn b() {}\n}\n";
        assert_eq!(sizes(text), [("a".into(), 3, 3), ("b".into(), 6, 1)]);
    }

    #[test]
    fn braces_in_literals_and_comments_do_not_count() {
        let text = concat!(
            "fn a<'a>(x: &'a str) {\n let _ = (\"}\", '}', b'}', r#\"}\"}\"#, '\\'', \"\\\"}\");\n",
            " // }\n /* } /* } */ } */\n let _: &'static str = c\"}\".x();\n}\nfn b() {\n}\n"
        );
        assert_eq!(sizes(text), [("a".into(), 1, 6), ("b".into(), 7, 2)]);
    }

    #[test]
    fn declarations_and_types_are_not_functions() {
        let text = "trait T { fn a(&self) -> u8; fn b(&self) {} }\ntype F = fn(u8) -> u8;\n// fn c() {}\nlet x = \"fn d() {}\";";
        assert_eq!(sizes(text), [("b".into(), 1, 1)]);
    }

    #[test]
    fn signatures_of_declarations_and_generic_functions() {
        let text = "trait T {\n fn a(&mut self) -> bool;\n}\nfn b<F: Fn(u8) -> bool>(f: F, (x, y): (u8, u8))\nwhere\n F: Copy,\n{\n}\n";
        let of = |name: &str, line, parameters: &str, returned: &str| Signature {
            name: name.to_owned(),
            line,
            parameters: parameters.to_owned(),
            returned: returned.to_owned(),
        };
        let expected = [of("a", 2, "&mut self", "bool"), of("b", 4, "f: F, (x, y): (u8, u8)", "")];
        assert_eq!(signatures(&mask(text)), expected);
    }

    #[test]
    fn modules_are_named() {
        assert_eq!(modules(&mask("mod a {\n pub(crate) mod b;\n}\n// mod c;\nfn modest() {}\n")), ["a", "b"]);
    }

    #[test]
    fn nested_functions_count_in_both() {
        let text = "fn a() {\n fn b() {\n }\n}\n";
        assert_eq!(sizes(text), [("a".into(), 1, 4), ("b".into(), 2, 2)]);
    }

    #[test]
    fn masking_keeps_length_and_lines() {
        let text = "let é = \"é\\\n{\"; // é\n'x'";
        let masked = mask(text);
        assert_eq!(masked.len(), text.len());
        assert_eq!(line_of(&masked, masked.len()), 3);
        assert!(!masked.contains(&b'{') && !masked.contains(&b'x'));
    }

    #[test]
    fn whole_words_only() {
        let masked = mask("unsafe { } unsafe_code // unsafe\n\"unsafe\" un_unsafe unsafe");
        assert_eq!(words(&masked, "unsafe").len(), 2);
    }

    #[test]
    fn module_docs() {
        assert!(has_module_doc("//! What it is.\n"));
        assert!(has_module_doc("// Licence\n#![cfg_attr(test, allow(x, reason = \"]\"))]\n\n//! What it is.\nuse a;"));
        assert!(!has_module_doc("use a;\n//! Too late.\n"));
        assert!(!has_module_doc("/// Not a module doc.\nfn a() {}\n"));
        assert!(!has_module_doc(""));
    }
}
