//! SentencePiece's normalizer, exactly: the precompiled character map, spaces, and the dummy prefix.
//!
//! The library's `Precompiled` takes the shortest match of the map, and panics on a malformed one; this one takes the longest, as
//! SentencePiece does, and refuses a malformed map when the model is loaded.

use serde::{Deserialize, Deserializer};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// SentencePiece's character for a space.
pub(crate) const SPACE: char = '\u{2581}';
/// Longest character map, in bytes; that of NFKC has a quarter of a million.
const CHARSMAP_BYTES_MAX: usize = 4 << 20;
/// Longest key of the character map, in bytes.
const KEY_BYTES_MAX: usize = 128;
/// Most prefixes of keys of the character map; that of NFKC has a hundred thousand.
const PREFIXES_MAX: usize = 1 << 20;
/// Longest replacement of the character map, in bytes.
const REPLACEMENT_BYTES_MAX: usize = 256;

/// Normalizer of a tokenizer: one that the library has, or SentencePiece's.
#[derive(Clone, Debug)]
pub(crate) enum TextNormalizer {
    Library(NormalizerWrapper),
    SentencePiece(PieceNormalizer),
}

impl Normalizer for TextNormalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match self {
            Self::Library(normalizer) => normalizer.normalize(text),
            Self::SentencePiece(normalizer) => {
                normalizer.normalize(text);
                Ok(())
            }
        }
    }
}

/// A `tokenizer.json` names normalizers of the library only.
impl<'de> Deserialize<'de> for TextNormalizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NormalizerWrapper::deserialize(deserializer).map(Self::Library)
    }
}

/// Rules of `NormalizerSpec`.
#[derive(Clone, Debug, Default)]
pub(crate) struct PieceNormalizer {
    /// Replacements by the character map; `None` for the identity.
    pub(crate) charsmap: Option<Charsmap>,
    /// Texts that no rule changes: the user-defined pieces.
    pub(crate) kept: Trie,
    pub(crate) dummy_prefix: DummyPrefix,
    pub(crate) remove_extra_whitespaces: bool,
    pub(crate) escape_whitespaces: bool,
}

/// Where a space is put before the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DummyPrefix {
    #[default]
    Never,
    /// At the beginning of the whole text.
    First,
    /// There and after each special token.
    Always,
}

impl PieceNormalizer {
    /// Whether every character of a text is kept, at its length or more.
    pub(crate) fn keeps_all(&self) -> bool {
        self.charsmap.is_none() && !self.remove_extra_whitespaces
    }

    /// Normalises a part of a text that lies between special tokens.
    fn normalize(&self, text: &mut NormalizedString) {
        let (mut edits, mut rest) = (Edits::default(), text.get());
        if self.remove_extra_whitespaces {
            while let Some((" ", length)) = self.prefix(rest) {
                edits.replace(rest, length, "".chars());
                rest = &rest[length..];
            }
        }
        if !rest.is_empty() {
            self.prepend(text.offsets_original().0, &mut edits);
        }
        let mut after_space = self.remove_extra_whitespaces;
        while let Some((found, length)) = self.prefix(rest) {
            let found = if after_space { found.trim_start_matches(' ') } else { found };
            edits.replace(rest, length, found.chars().map(|c| self.escape(c)));
            if !found.is_empty() {
                after_space = self.remove_extra_whitespaces && found.ends_with(' ');
            }
            rest = &rest[length..];
        }
        if self.remove_extra_whitespaces {
            edits.strip_end(self.escape(' '));
        }
        text.transform(edits.characters, edits.head_removed);
    }

    fn prepend(&self, offset: usize, edits: &mut Edits) {
        if self.dummy_prefix == DummyPrefix::Always || (self.dummy_prefix == DummyPrefix::First && offset == 0) {
            edits.characters.push((self.escape(' '), 1));
        }
    }

    fn escape(&self, c: char) -> char {
        if c == ' ' && self.escape_whitespaces { SPACE } else { c }
    }

    /// The normalized form of the beginning of `text`, and the number of bytes of `text` that it replaces; `None` at the end.
    fn prefix<'a>(&'a self, text: &'a str) -> Option<(&'a str, usize)> {
        let first = text.chars().next()?;
        if let Some((length, _)) = self.kept.longest(text) {
            return Some((&text[..length], length));
        }
        let mapped = self.charsmap.as_ref().and_then(|map| map.longest(text));
        Some(mapped.unwrap_or((&text[..first.len_utf8()], first.len_utf8())))
    }
}

/// Changes of a text, as [`NormalizedString::transform`] takes them: a character with 0 stands for the next character of the
/// text, with 1 for none, with -n for the next 1 + n.
#[derive(Default)]
struct Edits {
    characters: Vec<(char, isize)>,
    /// Characters removed before the first one.
    head_removed: usize,
}

impl Edits {
    /// Puts `found` in place of the first `length` bytes of `rest`.
    fn replace(&mut self, rest: &str, length: usize, found: impl Iterator<Item = char>) {
        let mut replaced = rest[..length].chars().count();
        for c in found {
            self.characters.push((c, isize::from(replaced == 0)));
            replaced = replaced.saturating_sub(1);
        }
        self.remove(replaced);
    }

    /// Removes the next `count` characters of the text.
    fn remove(&mut self, count: usize) {
        match self.characters.last_mut() {
            Some((_, change)) => *change -= count.cast_signed(),
            None => self.head_removed += count,
        }
    }

    fn strip_end(&mut self, stripped: char) {
        while let Some((_, change)) = self.characters.pop_if(|(c, _)| *c == stripped) {
            self.remove((1 - change).unsigned_abs());
        }
    }
}

/// SentencePiece's precompiled character map: replacements by longest match.
#[derive(Clone, Debug)]
pub(crate) struct Charsmap {
    keys: Trie,
    /// By the values of `keys`.
    replacements: Vec<String>,
}

impl Charsmap {
    /// Parses `precompiled_charsmap`: the length of a double-array trie in bytes, the trie (little-endian u32), and the
    /// replacements, each ended by a zero byte. The trie's values are places among the replacements.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > CHARSMAP_BYTES_MAX {
            return Err(format!("it has {} bytes, more than {CHARSMAP_BYTES_MAX}", bytes.len()));
        }
        let split = bytes.split_first_chunk::<4>().and_then(|(size, rest)| {
            let size = usize::try_from(u32::from_le_bytes(*size)).ok()?;
            rest.split_at_checked(size).filter(|_| size > 0 && size.is_multiple_of(4))
        });
        let (trie, texts) = split.ok_or("its trie's length does not fit")?;
        let texts = std::str::from_utf8(texts).map_err(|error| format!("its replacements are not UTF-8: {error}"))?;
        let units: Vec<u32> = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        let mut map = Self { keys: Trie::default(), replacements: Vec::new() };
        for (key, place) in DoubleArray(&units).entries()? {
            let text = texts.get(place..).ok_or_else(|| format!("its replacement at {place} is not there"))?;
            let end = text.bytes().take(REPLACEMENT_BYTES_MAX + 1).position(|byte| byte == 0);
            let end = end
                .ok_or_else(|| format!("its replacement at {place} has no end within {REPLACEMENT_BYTES_MAX} bytes"))?;
            let index = u32::try_from(map.replacements.len()).map_err(|_error| "it is too long".to_owned())?;
            map.replacements.push(text[..end].to_owned());
            map.keys.insert(&key, index);
        }
        Ok(map)
    }

    fn longest(&self, text: &str) -> Option<(&str, usize)> {
        let (length, index) = self.keys.longest(text)?;
        let replacement = usize::try_from(index).ok().and_then(|index| self.replacements.get(index))?;
        Some((replacement, length))
    }
}

/// The units of a darts-clone double array.
struct DoubleArray<'a>(&'a [u32]);

impl DoubleArray<'_> {
    const LEAF: u32 = 1 << 31;

    fn offset(unit: u32) -> usize {
        // At most 22 bits shifted by 8.
        ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
    }

    /// All keys with their values. Keys may share nodes, at their ends as well, so that only limits detect a cycle.
    fn entries(&self) -> Result<Vec<(String, usize)>, String> {
        let root = self.0.first().ok_or("its trie is empty")?;
        let mut entries = Vec::new();
        let mut prefixes = 0;
        let mut nodes = vec![(Self::offset(*root), Vec::new())];
        while let Some((base, key)) = nodes.pop() {
            for byte in 1..=u8::MAX {
                let at = base ^ usize::from(byte);
                let Some(&unit) = self.0.get(at) else { continue };
                if unit & (Self::LEAF | 0xff) != u32::from(byte) {
                    continue;
                }
                prefixes += 1;
                if prefixes > PREFIXES_MAX || key.len() == KEY_BYTES_MAX {
                    return Err(format!(
                        "its trie has a cycle, more than {PREFIXES_MAX} nodes, or a key of more than {KEY_BYTES_MAX} bytes"
                    ));
                }
                let mut key = key.clone();
                key.push(byte);
                let next = at ^ Self::offset(unit);
                if unit & (1 << 8) != 0 {
                    let value = *self.0.get(next).ok_or("its trie has a value outside of it")?;
                    let text =
                        String::from_utf8(key.clone()).map_err(|error| format!("a key is not UTF-8: {error}"))?;
                    entries.push((text, (value & !Self::LEAF) as usize));
                }
                nodes.push((next, key));
            }
        }
        Ok(entries)
    }
}

/// Texts with values, found by longest match.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trie {
    /// The first is the root.
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// Ascending by byte.
    children: Vec<(u8, usize)>,
    value: Option<u32>,
}

impl Trie {
    /// Adds `key`, which is not empty.
    pub(crate) fn insert(&mut self, key: &str, value: u32) {
        if self.nodes.is_empty() {
            self.nodes.push(Node::default());
        }
        let mut at = 0;
        for byte in key.bytes() {
            at = match self.nodes[at].children.binary_search_by_key(&byte, |child| child.0) {
                Ok(place) => self.nodes[at].children[place].1,
                Err(place) => {
                    let next = self.nodes.len();
                    self.nodes[at].children.insert(place, (byte, next));
                    self.nodes.push(Node::default());
                    next
                }
            };
        }
        self.nodes[at].value = Some(value);
    }

    /// Length in bytes and value of the longest key that `text` begins with.
    fn longest(&self, text: &str) -> Option<(usize, u32)> {
        let (mut node, mut longest) = (self.nodes.first()?, None);
        for (index, byte) in text.bytes().enumerate() {
            let Ok(place) = node.children.binary_search_by_key(&byte, |child| child.0) else { break };
            node = &self.nodes[node.children[place].1];
            longest = node.value.map(|value| (index + 1, value)).or(longest);
        }
        longest
    }
}
