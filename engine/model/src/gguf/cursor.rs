//! Checked reading of a GGUF file's header: every length is compared with the bytes that are left before it is used.

use bytes::Bytes;

/// Place in a file under reading. A problem is a text without the file's name.
pub(super) struct Cursor {
    bytes: Bytes,
    at: usize,
}

impl Cursor {
    pub(super) fn new(bytes: Bytes) -> Self {
        Self { bytes, at: 0 }
    }

    /// Another cursor at the same place.
    pub(super) fn ahead(&self) -> Self {
        Self { bytes: self.bytes.clone(), at: self.at }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// The next `len` bytes, which share memory with the file.
    pub(super) fn take(&mut self, len: u64) -> Result<Bytes, String> {
        let left = self.bytes.len() - self.at;
        match usize::try_from(len) {
            Ok(len) if len <= left => {
                let taken = self.bytes.slice(self.at..self.at + len);
                self.at += len;
                Ok(taken)
            }
            _ => Err(format!("{len} bytes at {} are not there: the file has {} bytes", self.at, self.bytes.len())),
        }
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let taken = self.take(N as u64)?;
        Ok(<[u8; N]>::try_from(&taken[..]).expect("as many bytes were taken"))
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// A count of at most `max`.
    pub(super) fn count(&mut self, what: &str, max: u64) -> Result<u64, String> {
        match self.u64()? {
            count if count <= max => Ok(count),
            count => Err(format!("it has {count} {what}, more than {max}")),
        }
    }

    /// A string of at most `max` bytes.
    pub(super) fn text(&mut self, max: u64) -> Result<String, String> {
        let len = self.count("bytes in a string", max)?;
        let bytes = self.take(len)?;
        std::str::from_utf8(&bytes).map(str::to_owned).map_err(|error| format!("a string is not UTF-8: {error}"))
    }
}
