//! The hash lock between WIRE.md and the code that it specifies: a change of the protocol cannot go unnoticed.
//!
//! The page ends in `<!-- wire-hash: … -->`, a BLAKE3 hash over every source file of engine/protocol and net/wire.
//! When those change, tidy fails until the page is reviewed and locked again with `cargo xtask wire-lock`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Finding;
use crate::workspace;

const SOURCES: [&str; 2] = ["engine/protocol/src", "net/wire/src"];
const PAGES: [&str; 2] = ["WIRE.md", "net/wire/WIRE.md"];
const MARK: &str = "<!-- wire-hash: ";
const MARK_END: &str = " -->";

/// A shorter crate root holds no codec yet, so no page is due.
const SKELETON_LINES_MAX: usize = 30;

/// The hash of the named files: paths and contents, each with its length before it.
fn hash(files: &[(String, Vec<u8>)]) -> String {
    let mut hasher = blake3::Hasher::new();
    for (path, content) in files {
        for part in [path.as_bytes(), content.as_slice()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.finalize().to_hex().to_string()
}

fn current(root: &Path) -> Result<String> {
    let mut files = Vec::new();
    for dir in SOURCES {
        for path in workspace::files(&root.join(dir), "rs")? {
            let content = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            files.push((workspace::relative(root, &path), content));
        }
    }
    files.sort();
    Ok(hash(&files))
}

fn page(root: &Path) -> Option<PathBuf> {
    PAGES.iter().map(|page| root.join(page)).find(|path| path.exists())
}

/// The hash in the page's last line.
fn locked(text: &str) -> Option<&str> {
    text.trim_end().lines().last()?.strip_prefix(MARK)?.strip_suffix(MARK_END)
}

/// Checks that the page's hash is that of the present sources.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let Some(path) = page(root) else {
        let codec = std::fs::read_to_string(root.join("net/wire/src/lib.rs")).context("read net/wire/src/lib.rs")?;
        let due = codec.lines().count() > SKELETON_LINES_MAX;
        let missing = Finding::new("wire", PAGES[0], "net/wire has code but no page specifies it");
        return Ok(if due { vec![missing] } else { vec![] });
    };
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let message = match locked(&text) {
        Some(found) if found == current(root)? => return Ok(vec![]),
        Some(_) => "engine/protocol or net/wire changed: correct the page, then run `cargo xtask wire-lock`",
        None => "its last line must be the hash of the sources: run `cargo xtask wire-lock`",
    };
    Ok(vec![Finding::new("wire", workspace::relative(root, &path), message)])
}

/// `cargo xtask wire-lock`: writes the present hash as the page's last line.
pub(crate) fn lock(root: &Path) -> Result<bool> {
    let Some(path) = page(root) else { bail!("there is no {}", PAGES[0]) };
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let now = current(root)?;
    std::fs::write(&path, with_lock(&text, &now)).with_context(|| format!("write {}", path.display()))?;
    println!("{} is locked on {now}", workspace::relative(root, &path));
    Ok(true)
}

fn with_lock(text: &str, hash: &str) -> String {
    let mut body = text.trim_end();
    if locked(body).is_some() {
        body = body.rsplit_once('\n').map_or("", |(before, _)| before).trim_end();
    }
    format!("{body}\n\n{MARK}{hash}{MARK_END}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locking_replaces_only_the_last_line() {
        let once = with_lock("# Wire\n\ntext\n", "aa");
        assert_eq!(once, "# Wire\n\ntext\n\n<!-- wire-hash: aa -->\n");
        assert_eq!(locked(&once), Some("aa"));
        assert_eq!(with_lock(&once, "bb"), once.replace("aa", "bb"));
        assert_eq!(locked("# Wire\n"), None);
        assert_eq!(locked(&format!("{once}more\n")), None);
    }

    #[test]
    fn the_hash_sees_contents_names_and_boundaries() {
        let of = |files: &[(&str, &str)]| {
            hash(&files.iter().map(|(p, c)| ((*p).to_owned(), c.as_bytes().to_vec())).collect::<Vec<_>>())
        };
        let base = of(&[("a.rs", "x"), ("b.rs", "y")]);
        assert_eq!(base, of(&[("a.rs", "x"), ("b.rs", "y")]));
        for other in [
            of(&[("a.rs", "x"), ("b.rs", "z")]),
            of(&[("a.rs", "x"), ("c.rs", "y")]),
            of(&[("a.rs", "xb.rsy")]),
            of(&[("a.rs", "x")]),
        ] {
            assert_ne!(base, other);
        }
    }
}
