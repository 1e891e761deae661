//! Bytes of tokens, by the decoder of a `tokenizer.json`.
//!
//! The supported decoders map each token to bytes independently of its neighbours, except at the beginning of the text;
//! the text is those bytes read as UTF-8. This makes streaming exact, in constant time per token. Other decoders are
//! refused.

use serde_json::Value;

/// Mapping from tokens to bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// GPT-2's alphabet: every character of a token stands for one byte.
    ByteLevel,
    /// SentencePiece pieces.
    Pieces(PieceRules),
}

/// Rules from SentencePiece pieces to bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PieceRules {
    /// Literal replacements, in order.
    pub(crate) replace: Vec<(String, String)>,
    /// `<0x41>` is the byte 0x41.
    pub(crate) byte_fallback: bool,
    /// The character for a space, and whether it is removed from the text's first token.
    pub(crate) metaspace: Option<(char, bool)>,
    /// A byte to strip from the beginning of the text, and how often at most.
    pub(crate) strip: Option<(u8, usize)>,
    /// Tokens are words, with a space between them.
    pub(crate) separated: bool,
}

impl Scheme {
    /// Parses the `decoder` of a `tokenizer.json`; the error names the unsupported part.
    pub(crate) fn parse(decoder: &Value) -> Result<Self, String> {
        if decoder.is_null() {
            return Ok(Self::Pieces(PieceRules { separated: true, ..PieceRules::default() }));
        }
        let parts = match (kind(decoder), &decoder["decoders"]) {
            ("Sequence", Value::Array(parts)) => parts.as_slice(),
            _ => std::slice::from_ref(decoder),
        };
        if parts.iter().any(|part| kind(part) == "ByteLevel") {
            return match parts.iter().find(|part| !matches!(kind(part), "ByteLevel" | "Fuse")) {
                None => Ok(Self::ByteLevel),
                Some(other) => Err(format!("{} together with ByteLevel", kind(other))),
            };
        }
        let mut rules = PieceRules::default();
        let mut fused = false;
        for part in parts {
            rules.add(part, &mut fused)?;
        }
        Ok(Self::Pieces(rules))
    }

    /// Appends the bytes of `token`, before [`Scheme::strip`].
    pub(crate) fn append(&self, token: &str, first: bool, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => append_byte_level(token, out),
            Self::Pieces(rules) => rules.append(token, first, out),
        }
    }

    /// A byte to strip from the beginning of a text, and how often at most.
    pub(crate) fn strip(&self) -> Option<(u8, usize)> {
        match self {
            Self::ByteLevel => None,
            Self::Pieces(rules) => rules.strip,
        }
    }
}

fn kind(decoder: &Value) -> &str {
    decoder["type"].as_str().unwrap_or("an unnamed decoder")
}

impl PieceRules {
    fn add(&mut self, part: &Value, fused: &mut bool) -> Result<(), String> {
        match kind(part) {
            "Replace" => match (part["pattern"]["String"].as_str(), part["content"].as_str()) {
                (Some(from), Some(to)) if !*fused && !from.is_empty() => self.replace.push((from.into(), to.into())),
                _ => return Err("Replace with a pattern, or after Fuse".to_owned()),
            },
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Metaspace" => {
                let replacement = part["replacement"].as_str().and_then(|text| text.chars().next());
                let first = part["prepend_scheme"].as_str() != Some("never");
                self.metaspace = Some((replacement.ok_or("Metaspace without a replacement")?, first));
            }
            "Strip" => {
                let content = part["content"].as_str().and_then(|text| match text.as_bytes() {
                    [byte] => Some(*byte),
                    _ => None,
                });
                let (start, stop) = (part["start"].as_u64().unwrap_or(0), part["stop"].as_u64().unwrap_or(0));
                match (content, usize::try_from(start)) {
                    (Some(byte), Ok(start)) if *fused && stop == 0 => self.strip = Some((byte, start)),
                    _ => return Err("Strip at the end of the text, or before Fuse".to_owned()),
                }
            }
            other => return Err(other.to_owned()),
        }
        Ok(())
    }

    fn append(&self, token: &str, first: bool, out: &mut Vec<u8>) {
        if self.separated && !first {
            out.push(b' ');
        }
        let mut text = std::borrow::Cow::Borrowed(token);
        for (from, to) in &self.replace {
            text = text.replace(from.as_str(), to).into();
        }
        if let Some(byte) = self.byte_fallback.then(|| fallback_byte(&text)).flatten() {
            out.push(byte);
            return;
        }
        if let Some((space, vanishes)) = self.metaspace {
            text = text.replace(space, if first && vanishes { "" } else { " " }).into();
        }
        out.extend_from_slice(text.as_bytes());
    }
}

/// The byte of a token such as `<0x41>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Inverts GPT-2's alphabet. A token with a character outside it (an added token) is its own UTF-8.
fn append_byte_level(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// GPT-2's alphabet: one letter for each byte.
pub(crate) fn letters() -> impl Iterator<Item = char> {
    (0..=0x143_u32).filter_map(char::from_u32).filter(|letter| byte_of(*letter).is_some())
}

/// The letters of GPT-2's alphabet by byte.
pub(crate) fn letters_by_byte() -> [char; 256] {
    let mut table = ['\0'; 256];
    for letter in letters() {
        if let Some(byte) = byte_of(letter) {
            table[usize::from(byte)] = letter;
        }
    }
    table
}

/// Printable bytes of Latin-1 stand for themselves; the other 68, in ascending order, are U+0100 and up.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(|code| byte_of(char::from_u32(code).unwrap())).collect();
        bytes.sort_unstable();
        assert!(bytes.into_iter().eq(0..=255));
        assert_eq!(letters().count(), 256);
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('A')), (Some(b' '), Some(b'\n'), Some(b'A')));
    }

    #[test]
    fn unknown_decoders_are_refused_by_name() {
        let parse = |text: &str| Scheme::parse(&serde_json::from_str(text).unwrap());
        assert_eq!(parse(r#"{"type":"WordPiece","prefix":"","cleanup":true}"#), Err("WordPiece".to_owned()));
        let mixed = r#"{"type":"Sequence","decoders":[{"type":"ByteLevel"},{"type":"CTC"}]}"#;
        assert_eq!(parse(mixed), Err("CTC together with ByteLevel".to_owned()));
        let strip = r#"{"type":"Sequence","decoders":[{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
        assert!(parse(strip).is_err());
    }
}
