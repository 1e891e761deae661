//! Numbers of tensors' types in GGUF files, with their names.

use lagoon_backend::WeightFormat;
use std::fmt;

/// A tensor's type as its file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored(pub(crate) u32);

/// Types that are not supported, by number.
const OTHERS: [(u32, &str); 18] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// Names of the types that files may have and Lagoon refuses.
pub fn refused_types() -> impl Iterator<Item = &'static str> {
    OTHERS.iter().map(|(_, name)| *name)
}

impl Stored {
    /// The format, if it is supported.
    pub(crate) const fn format(self) -> Option<WeightFormat> {
        Some(match self.0 {
            0 => WeightFormat::F32,
            1 => WeightFormat::F16,
            2 => WeightFormat::Q4_0,
            3 => WeightFormat::Q4_1,
            6 => WeightFormat::Q5_0,
            7 => WeightFormat::Q5_1,
            8 => WeightFormat::Q8_0,
            10 => WeightFormat::Q2K,
            11 => WeightFormat::Q3K,
            12 => WeightFormat::Q4K,
            13 => WeightFormat::Q5K,
            14 => WeightFormat::Q6K,
            20 => WeightFormat::Iq4Nl,
            23 => WeightFormat::Iq4Xs,
            30 => WeightFormat::BF16,
            39 => WeightFormat::Mxfp4,
            _ => return None,
        })
    }

    /// The number of a format; `None` for those that no GGUF file has.
    pub(crate) fn of(format: WeightFormat) -> Option<Self> {
        let mut numbers = (0..=u8::MAX).map(|number| Self(number.into()));
        numbers.find(|stored| stored.format() == Some(format))
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let other = OTHERS.iter().find(|(number, _)| *number == self.0).map(|(_, name)| *name);
        match self.format().map(WeightFormat::name).or(other) {
            Some(name) => f.write_str(name),
            None => write!(f, "type {}", self.0),
        }
    }
}
