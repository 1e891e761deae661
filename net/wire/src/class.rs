//! Classes of streams with the cap of each, and the version of their frames.

use lagoon_types::limits;
use std::fmt;

/// Version of the frame layouts that this build writes and reads. Prefaces and control frames keep 1 in every version of the
/// protocol (`VERSION_MAX`), so that processes of different versions can refuse each other by name.
pub(crate) const FRAME_VERSION: u8 = 1;

/// Class of a stream. Each class has its own connection, so that bulk never delays partials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    Control,
    Partials,
    Bulk,
}

impl Class {
    /// All classes, in the order of [`Class::index`].
    pub const ALL: [Self; 3] = [Self::Control, Self::Partials, Self::Bulk];

    /// Stable number for the wire; 0 is the preface.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Partials => 2,
            Self::Bulk => 3,
        }
    }

    /// Inverse of [`Class::code`].
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Control),
            2 => Some(Self::Partials),
            3 => Some(Self::Bulk),
            _ => None,
        }
    }

    /// Position in [`Class::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Control => 0,
            Self::Partials => 1,
            Self::Bulk => 2,
        }
    }

    /// Largest body of a frame, in bytes: everything after the header.
    #[must_use]
    pub const fn body_bytes_max(self) -> usize {
        match self {
            Self::Control => limits::CONTROL_FRAME_BYTES_MAX,
            Self::Partials | Self::Bulk => limits::DATA_FRAME_BYTES_MAX,
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Partials => "partials",
            Self::Bulk => "bulk",
        })
    }
}
