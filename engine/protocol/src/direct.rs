//! Frames of a direct connection: one-sided reads of a writer's registered memory (KVDirect's TRANSFER), which the
//! writer's event loop does not serve. Fixed headers and raw bytes.

use crate::RefuseCode;

/// Byte range of one export, in one of the writer's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectSegment {
    pub export: u64,
    pub region: u32,
    pub offset: u64,
    /// Not 0.
    pub bytes: u64,
}

/// Frame of a direct connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectFrame {
    /// First frame of the reader: its instance number, and the epoch of its accepted CONNECT.
    Open {
        reader: u32,
        epoch: u64,
    },
    /// Reads segments, concatenated. The reply, in order, is one `Data` or `Refused`.
    Read {
        id: u64,
        segments: Vec<DirectSegment>,
    },
    /// Reads `bytes` zeroes, to measure the path. The reply is `Data`.
    Probe {
        id: u64,
        bytes: u64,
    },
    /// Reply to a read: its `bytes` bytes follow the header.
    Data {
        id: u64,
        bytes: u64,
    },
    Refused {
        id: u64,
        code: RefuseCode,
    },
}
