//! Which format a tensor gets: the target's, a wider one where errors cost most, or one with smaller blocks where rows do not fit.

use lagoon_backend::WeightFormat;
use lagoon_model::export::{Kind, Role};

/// What a file's matrices are in, mostly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

impl Target {
    /// Every target, by its name.
    pub const ALL: [(Self, &str); 8] = [
        (Self::F16, "f16"),
        (Self::Bf16, "bf16"),
        (Self::Q8_0, "q8_0"),
        (Self::Q4_0, "q4_0"),
        (Self::Q4K, "q4_k"),
        (Self::Q5K, "q5_k"),
        (Self::Q6K, "q6_k"),
        (Self::Mxfp4, "mxfp4"),
    ];

    /// The format of most matrices.
    #[must_use]
    pub const fn format(self) -> WeightFormat {
        match self {
            Self::F16 => WeightFormat::F16,
            Self::Bf16 => WeightFormat::BF16,
            Self::Q8_0 => WeightFormat::Q8_0,
            Self::Q4_0 => WeightFormat::Q4_0,
            Self::Q4K => WeightFormat::Q4K,
            Self::Q5K => WeightFormat::Q5K,
            Self::Q6K => WeightFormat::Q6K,
            Self::Mxfp4 => WeightFormat::Mxfp4,
        }
    }

    /// The number in `general.file_type` (llama.cpp's `LLAMA_FTYPE`), of Q4_K and Q5_K their medium mixtures.
    #[must_use]
    pub const fn file_type(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::Bf16 => 32,
            Self::Q8_0 => 7,
            Self::Q4_0 => 2,
            Self::Q4K => 15,
            Self::Q5K => 17,
            Self::Q6K => 18,
            Self::Mxfp4 => 38,
        }
    }

    /// The wider format of tensors in which an error costs most; the format itself if it has 6 bits or more.
    const fn wider(self) -> WeightFormat {
        match self {
            Self::F16 | Self::Bf16 | Self::Q8_0 => self.format(),
            _ => WeightFormat::Q6K,
        }
    }

    /// The format of a tensor with rows of `cols` columns, of a model with so many layers, with experts or without.
    ///
    /// The head has [`Target::wider`], also where it is the embedding table. So have, with Q4_K and Q5_K, values and down projections in
    /// the first and last eighth of layers and in each third between them. With MXFP4 only experts are in it where there are any.
    #[must_use]
    pub fn format_of(self, role: Role, cols: usize, layers: usize, has_experts: bool) -> WeightFormat {
        let others = if self == Self::Mxfp4 && has_experts { WeightFormat::Q8_0 } else { self.format() };
        let format = match role {
            Role::Wide => return WeightFormat::F32,
            Role::Head | Role::Table { is_head: true } => self.wider(),
            Role::Table { is_head: false } => others,
            Role::Matrix { layer, kind } => match (self, kind) {
                (Self::Q4K, Kind::Fused) => WeightFormat::Q5K,
                (Self::Q5K, Kind::Fused) => WeightFormat::Q6K,
                (Self::Q4K | Self::Q5K, Kind::Values | Kind::Down | Kind::ExpertsDown)
                    if is_sensitive(layer, layers) =>
                {
                    self.wider()
                }
                (_, Kind::ExpertsUp | Kind::ExpertsDown) => self.format(),
                _ => others,
            },
        };
        fitting(format, cols)
    }
}

/// Whether a layer is one of those whose errors cost most: the first and the last eighth, and each third between them.
const fn is_sensitive(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// The format, or where rows of so many columns are no whole blocks the next that they are whole blocks of: Q8_0, else F16.
const fn fitting(format: WeightFormat, cols: usize) -> WeightFormat {
    if format.bytes(cols).is_some() {
        format
    } else if WeightFormat::Q8_0.bytes(cols).is_some() {
        WeightFormat::Q8_0
    } else {
        WeightFormat::F16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_do_not_fit_get_smaller_blocks() {
        assert_eq!(fitting(WeightFormat::Q4K, 512), WeightFormat::Q4K);
        assert_eq!(fitting(WeightFormat::Q4K, 320), WeightFormat::Q8_0);
        assert_eq!(fitting(WeightFormat::Mxfp4, 100), WeightFormat::F16);
        assert_eq!(fitting(WeightFormat::BF16, 100), WeightFormat::BF16);
    }

    #[test]
    fn half_of_the_layers_are_sensitive() {
        let of = |layers: usize| (0..layers).filter(|layer| is_sensitive(*layer, layers)).collect::<Vec<_>>();
        assert_eq!(of(4), [2, 3]);
        assert_eq!(of(32), [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        assert_eq!(of(1), [0]);
    }
}
