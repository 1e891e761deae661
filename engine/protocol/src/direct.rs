//! The frames of a direct connection: reads of a writer's registered memory (KVDirect's TRANSFER), served without its
//! loop. Fixed headers and raw bytes.

use crate::RefuseCode;

/// Bytes of one export, in one of the writer's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectSegment {
    pub export: u64,
    pub region: u32,
    pub offset: u64,
    /// Not 0.
    pub bytes: u64,
}

/// What a direct connection carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectFrame {
    /// First frame of the reader: who reads, by which acceptance of its CONNECT.
    Open {
        reader: u32,
        epoch: u64,
    },
    /// Asks for segments, one behind the other. Answered in order by one `Data` or `Refused`.
    Read {
        id: u64,
        segments: Vec<DirectSegment>,
    },
    /// Asks for `bytes` zeroes, to measure the path. Answered by `Data`.
    Probe {
        id: u64,
        bytes: u64,
    },
    /// Announces the `bytes` bytes of a read; they follow the header.
    Data {
        id: u64,
        bytes: u64,
    },
    Refused {
        id: u64,
        code: RefuseCode,
    },
}
