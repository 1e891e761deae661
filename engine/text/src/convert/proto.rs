//! Reader of SentencePiece's `ModelProto`: the fields that a tokenizer needs, of a protobuf message.
//!
//! The bytes are untrusted. Every length is checked against the bytes that are left, and numbers of pieces and their lengths have
//! limits; nothing here panics.

/// Most pieces of a model.
const PIECES_MAX: usize = 4 << 20;
/// Longest piece, in bytes. SentencePiece's trainer writes at most 16 characters unless configured otherwise.
pub(super) const PIECE_BYTES_MAX: usize = 512;

/// Kind of a piece (`SentencePiece.Type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    /// Takes an id and stands for no text; only GGUF files have such.
    Unused,
    Byte,
}

/// One entry of the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// Algorithm of the model (`TrainerSpec.model_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Unigram,
    Bpe,
}

/// Why a file cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The bytes are not a valid message.
    Malformed(String),
    /// The message is valid and needs an unsupported feature.
    Unsupported(String),
}

impl From<String> for Refusal {
    fn from(problem: String) -> Self {
        Self::Malformed(problem)
    }
}

/// The used fields of a `ModelProto`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelProto {
    pub(super) pieces: Vec<Piece>,
    pub(super) algorithm: Algorithm,
    pub(super) byte_fallback: bool,
    pub(super) bos_id: Option<u32>,
    pub(super) eos_id: Option<u32>,
    pub(super) charsmap: Vec<u8>,
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) escape_whitespaces: bool,
}

impl ModelProto {
    /// Parses a file. Absent fields have the defaults of SentencePiece's schema.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let mut model = Self {
            pieces: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            bos_id: Some(1),
            eos_id: Some(2),
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        };
        let mut message = Message { rest: bytes, name: "ModelProto" };
        while let Some((field, value)) = message.next()? {
            match field {
                1 if model.pieces.len() == PIECES_MAX => {
                    return Err(Refusal::Malformed(format!("it has more than {PIECES_MAX} pieces")));
                }
                1 => {
                    let index = model.pieces.len();
                    model.pieces.push(piece(value.bytes("pieces")?, index)?);
                }
                2 => model.trainer(value.bytes("trainer_spec")?)?,
                3 => model.normalizer(value.bytes("normalizer_spec")?)?,
                5 => denormalizer(value.bytes("denormalizer_spec")?)?,
                _ => {}
            }
        }
        if model.pieces.is_empty() {
            return Err(Refusal::Malformed("it has no `pieces`".to_owned()));
        }
        Ok(model)
    }

    fn trainer(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let mut message = Message { rest: bytes, name: "trainer_spec" };
        while let Some((field, value)) = message.next()? {
            match field {
                3 => {
                    self.algorithm = match value.number("model_type")? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        other => {
                            let name =
                                ["3 (WORD)", "4 (CHAR)"].into_iter().find(|name| name.starts_with(&other.to_string()));
                            let name = name.map_or_else(|| other.to_string(), str::to_owned);
                            let problem = format!("the `model_type` {name} is not supported; BPE and UNIGRAM are");
                            return Err(Refusal::Unsupported(problem));
                        }
                    }
                }
                24 if value.number("treat_whitespace_as_suffix")? != 0 => {
                    return Err(Refusal::Unsupported("`treat_whitespace_as_suffix` is not supported".to_owned()));
                }
                35 => self.byte_fallback = value.number("byte_fallback")? != 0,
                41 => self.bos_id = id(value.number("bos_id")?),
                42 => self.eos_id = id(value.number("eos_id")?),
                _ => {}
            }
        }
        Ok(())
    }

    fn normalizer(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let mut message = Message { rest: bytes, name: "normalizer_spec" };
        while let Some((field, value)) = message.next()? {
            match field {
                2 => self.charsmap = value.bytes("precompiled_charsmap")?.to_vec(),
                3 => self.add_dummy_prefix = value.number("add_dummy_prefix")? != 0,
                4 => self.remove_extra_whitespaces = value.number("remove_extra_whitespaces")? != 0,
                5 => self.escape_whitespaces = value.number("escape_whitespaces")? != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

/// A rule of the denormalizer would change decoded text; none of the supported families has one.
fn denormalizer(bytes: &[u8]) -> Result<(), Refusal> {
    let mut message = Message { rest: bytes, name: "denormalizer_spec" };
    while let Some((field, value)) = message.next()? {
        if field == 2 && !value.bytes("precompiled_charsmap")?.is_empty() {
            return Err(Refusal::Unsupported("a `denormalizer_spec` with a charsmap is not supported".to_owned()));
        }
    }
    Ok(())
}

fn piece(bytes: &[u8], index: usize) -> Result<Piece, Refusal> {
    let mut message = Message { rest: bytes, name: "pieces" };
    let malformed = |problem: &str| Refusal::Malformed(format!("the piece {index} {problem}"));
    let (mut text, mut score, mut kind) = (String::new(), 0.0, PieceKind::Normal);
    while let Some((field, value)) = message.next()? {
        match field {
            1 => {
                let bytes = value.bytes("piece")?;
                if bytes.len() > PIECE_BYTES_MAX {
                    return Err(malformed(&format!("has {} bytes, more than {PIECE_BYTES_MAX}", bytes.len())));
                }
                text = std::str::from_utf8(bytes)
                    .map_err(|error| malformed(&format!("is not UTF-8: {error}")))?
                    .to_owned();
            }
            2 => score = value.float("score")?,
            3 => {
                kind = match value.number("type")? {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    6 => PieceKind::Byte,
                    5 => {
                        return Err(Refusal::Unsupported(format!(
                            "the piece {index} has the type UNUSED, which is not supported"
                        )));
                    }
                    other => return Err(malformed(&format!("has the unknown type {other}"))),
                }
            }
            _ => {}
        }
    }
    if text.is_empty() {
        return Err(malformed("is empty"));
    }
    if !score.is_finite() {
        return Err(malformed(&format!("has the score {score}")));
    }
    Ok(Piece { text, score, kind })
}

/// An id of `TrainerSpec`; negative for none.
fn id(value: u64) -> Option<u32> {
    u32::try_from(value).ok()
}

/// A protobuf message under reading.
struct Message<'a> {
    rest: &'a [u8],
    /// For messages.
    name: &'static str,
}

/// The value of a field.
#[derive(Clone, Copy)]
enum Value<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn number(self, field: &str) -> Result<u64, Refusal> {
        match self {
            Self::Varint(value) => Ok(value),
            _ => Err(Refusal::Malformed(format!("the field `{field}` is not a number"))),
        }
    }

    fn float(self, field: &str) -> Result<f32, Refusal> {
        match self {
            Self::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(Refusal::Malformed(format!("the field `{field}` is not a float"))),
        }
    }

    fn bytes(self, field: &str) -> Result<&'a [u8], Refusal> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(Refusal::Malformed(format!("the field `{field}` has no length"))),
        }
    }
}

impl<'a> Message<'a> {
    /// The number and the value of the next field; `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, Value<'a>)>, String> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Value::Fixed64
            }
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => match self.take(4)? {
                &[a, b, c, d] => Value::Fixed32([a, b, c, d]),
                _ => return Err(self.cut()),
            },
            other => return Err(format!("`{}` has a field of the unknown wire type {other}", self.name)),
        };
        Ok(Some((tag >> 3, value)))
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.rest.split_first().ok_or_else(|| self.cut())?;
            self.rest = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(format!("`{}` has a number of more than 10 bytes", self.name))
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], String> {
        let split = usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length));
        let (taken, rest) = split.ok_or_else(|| self.cut())?;
        self.rest = rest;
        Ok(taken)
    }

    fn cut(&self) -> String {
        format!("`{}` ends within a field", self.name)
    }
}
