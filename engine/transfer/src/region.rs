//! Registered memory: the source and destination of transfers.
//!
//! A region checks every access against its size, and returns reference-counted snapshots: the bytes of a snapshot do not
//! change while it lives, so that a transport can send them without a copy while the owner continues. [`HeapRegion`] is
//! memory of this process; shared and device memory implement the same trait.

use bytes::Bytes;
use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

/// Error of a region access.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    #[error("bytes {offset} to {end} of a region of {bytes} bytes")]
    Outside { offset: u64, end: u64, bytes: u64 },
    /// The range to read is being written, or the range to write is being read: a bug of the region's owner.
    #[error("bytes {offset} to {end} are in use")]
    Busy { offset: u64, end: u64 },
    #[error("the region failed: {0}")]
    Failed(String),
}

/// Region of registered memory.
pub trait Region: Send + Sync + fmt::Debug {
    /// Size of the region.
    fn bytes(&self) -> u64;

    /// A snapshot: bytes of a range that do not change while it lives.
    ///
    /// # Errors
    /// If the range is outside or being written.
    fn snapshot(&self, offset: u64, bytes: usize) -> Result<Bytes, RegionError>;

    /// Calls `visit` with the bytes of a range, in order, without a copy (device memory: copied to the host in parts).
    ///
    /// # Errors
    /// As [`Region::snapshot`].
    fn view(&self, offset: u64, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), RegionError>;

    /// Calls `fill` with the bytes of a range to write; it must write all of them.
    ///
    /// # Errors
    /// If the range is outside or in use.
    fn fill(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), RegionError>;

    /// This region if it is device memory, where the accesses above copy to or from the host; else `None`.
    #[cfg(target_os = "linux")]
    fn on_device(&self) -> Option<&DeviceRegion> {
        None
    }
}

/// Checks a range against a region's size and returns it in `usize`.
///
/// # Errors
/// [`RegionError::Outside`].
pub fn bounded(offset: u64, bytes: usize, region_bytes: u64) -> Result<std::ops::Range<usize>, RegionError> {
    let end = offset.saturating_add(bytes as u64);
    let outside = RegionError::Outside { offset, end, bytes: region_bytes };
    if end > region_bytes {
        return Err(outside);
    }
    match (usize::try_from(offset), usize::try_from(end)) {
        (Ok(start), Ok(end)) => Ok(start..end),
        _ => Err(outside),
    }
}

/// Memory of this process in copy-on-write pages: a write copies a page that a snapshot still shows.
#[derive(Debug)]
pub struct HeapRegion {
    pages: Vec<RwLock<Arc<Vec<u8>>>>,
    page_bytes: usize,
    bytes: u64,
}

/// Reference to a page.
struct Held(Arc<Vec<u8>>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl HeapRegion {
    /// A region of `bytes` zeroes in pages of `page_bytes` (not 0); a snapshot inside one page is not a copy.
    #[must_use]
    pub fn new(bytes: usize, page_bytes: usize) -> Self {
        assert!(page_bytes > 0, "a page holds something");
        let sizes = (0..bytes.div_ceil(page_bytes)).map(|page| page_bytes.min(bytes - page * page_bytes));
        let pages = sizes.map(|size| RwLock::new(Arc::new(vec![0; size]))).collect();
        Self { pages, page_bytes, bytes: bytes as u64 }
    }

    /// The parts of a range: page, and range in the page.
    fn parts(&self, range: std::ops::Range<usize>) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        let page_bytes = self.page_bytes;
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let (page, start) = (at / page_bytes, at % page_bytes);
            let len = (page_bytes - start).min(range.end - at);
            at += len;
            Some((page, start..start + len))
        })
    }

    fn page(&self, page: usize) -> Arc<Vec<u8>> {
        Arc::clone(&self.pages[page].read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Region for HeapRegion {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn snapshot(&self, offset: u64, bytes: usize) -> Result<Bytes, RegionError> {
        let range = bounded(offset, bytes, self.bytes)?;
        let mut parts = self.parts(range.clone());
        match (parts.next(), parts.next()) {
            (None, _) => Ok(Bytes::new()),
            (Some((page, part)), None) => Ok(Bytes::from_owner(Held(self.page(page))).slice(part)),
            _ => {
                let mut out = Vec::with_capacity(bytes);
                self.parts(range).for_each(|(page, part)| out.extend_from_slice(&self.page(page)[part]));
                Ok(out.into())
            }
        }
    }

    fn view(&self, offset: u64, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), RegionError> {
        let range = bounded(offset, bytes, self.bytes)?;
        self.parts(range).for_each(|(page, part)| visit(&self.page(page)[part]));
        Ok(())
    }

    fn fill(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), RegionError> {
        let range = bounded(offset, bytes, self.bytes)?;
        for (page, part) in self.parts(range) {
            let mut page = self.pages[page].write().unwrap_or_else(PoisonError::into_inner);
            fill(&mut Arc::make_mut(&mut page)[part]);
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
impl From<lagoon_backend::ArenaError> for RegionError {
    fn from(error: lagoon_backend::ArenaError) -> Self {
        match error {
            lagoon_backend::ArenaError::Outside { offset, end, bytes } => Self::Outside { offset, end, bytes },
            lagoon_backend::ArenaError::Busy { offset, end } => Self::Busy { offset, end },
        }
    }
}

#[cfg(target_os = "linux")]
impl Region for lagoon_backend::SharedArena {
    fn bytes(&self) -> u64 {
        self.bytes() as u64
    }

    fn snapshot(&self, offset: u64, bytes: usize) -> Result<Bytes, RegionError> {
        Ok(self.read_lock(offset, bytes)?)
    }

    fn view(&self, offset: u64, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), RegionError> {
        Ok(self.view(offset, bytes, visit)?)
    }

    fn fill(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), RegionError> {
        Ok(self.fill(offset, bytes, fill)?)
    }
}

#[cfg(target_os = "linux")]
impl From<lagoon_backend::DeviceError> for RegionError {
    fn from(error: lagoon_backend::DeviceError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Part of a shared device region. Accesses are not synchronised: each staging buffer there has one user at a time
/// (`lagoon_instance::prefill`).
#[cfg(target_os = "linux")]
#[derive(Clone, Debug)]
pub struct DeviceRegion {
    shared: Arc<dyn lagoon_backend::SharedRegion>,
    base: u64,
    bytes: u64,
}

#[cfg(target_os = "linux")]
impl DeviceRegion {
    /// `count` consecutive regions of `bytes` bytes each in a shared device region.
    #[must_use]
    pub fn consecutive(shared: &Arc<dyn lagoon_backend::SharedRegion>, count: u32, bytes: u64) -> Vec<Arc<dyn Region>> {
        let region = |n| Self { shared: Arc::clone(shared), base: u64::from(n) * bytes, bytes };
        (0..count).map(|n| Arc::new(region(n)) as _).collect()
    }

    /// Offset of a range in the shared device region.
    ///
    /// # Errors
    /// [`RegionError::Outside`].
    pub fn place(&self, offset: u64, bytes: u64) -> Result<u64, RegionError> {
        let end = offset.saturating_add(bytes);
        let outside = RegionError::Outside { offset, end, bytes: self.bytes };
        if end <= self.bytes { Ok(self.base + offset) } else { Err(outside) }
    }

    /// XXH3-128 of ranges (offset, bytes), computed on the device.
    ///
    /// # Errors
    /// If a range is outside, or the device fails.
    pub fn checks(&self, ranges: &[(u64, u64)]) -> Result<Vec<crate::Check>, RegionError> {
        let place = |&(offset, bytes): &(u64, u64)| Ok((self.place(offset, bytes)?, bytes));
        let ranges = ranges.iter().map(place).collect::<Result<Vec<_>, RegionError>>()?;
        Ok(self.shared.hashes(&ranges)?.into_iter().map(crate::Check::from_hash).collect())
    }
}

/// Bytes of device memory that [`Region::view`] copies to the host at once.
#[cfg(target_os = "linux")]
const VIEW_PART_BYTES: usize = 4 << 20;

#[cfg(target_os = "linux")]
impl Region for DeviceRegion {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn snapshot(&self, offset: u64, bytes: usize) -> Result<Bytes, RegionError> {
        let at = self.place(offset, bytes as u64)?;
        let mut out = vec![0; bytes];
        self.shared.read(at, &mut out)?;
        Ok(out.into())
    }

    fn view(&self, offset: u64, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), RegionError> {
        let at = self.place(offset, bytes as u64)?;
        let mut part = vec![0; bytes.min(VIEW_PART_BYTES)];
        let mut done = 0;
        while done < bytes {
            let now = (bytes - done).min(VIEW_PART_BYTES);
            self.shared.read(at + done as u64, &mut part[..now])?;
            visit(&part[..now]);
            done += now;
        }
        Ok(())
    }

    fn fill(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), RegionError> {
        let at = self.place(offset, bytes as u64)?;
        let mut filled = vec![0; bytes];
        fill(&mut filled);
        Ok(self.shared.write(at, &filled)?)
    }

    fn on_device(&self) -> Option<&DeviceRegion> {
        Some(self)
    }
}

/// Writes `bytes` to a region at `offset`.
///
/// # Errors
/// As [`Region::fill`].
pub fn write(region: &dyn Region, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
    let mut rest = bytes;
    region.fill(offset, bytes.len(), &mut |target| {
        let (now, later) = rest.split_at(target.len());
        target.copy_from_slice(now);
        rest = later;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_keeps_its_bytes() {
        let region = HeapRegion::new(100, 16);
        write(&region, 10, &[7; 40]).unwrap();
        let within = region.snapshot(16, 16).unwrap();
        let across = region.snapshot(8, 20).unwrap();
        write(&region, 0, &[9; 100]).unwrap();
        assert_eq!(within, [7; 16].as_slice());
        assert_eq!(across, [[0; 2].as_slice(), &[7; 18]].concat());
        let mut seen = Vec::new();
        region.view(90, 10, &mut |part| seen.extend_from_slice(part)).unwrap();
        assert_eq!(seen, [9; 10]);
    }

    #[test]
    fn nothing_outside() {
        let region = HeapRegion::new(100, 16);
        assert_eq!(region.snapshot(90, 11), Err(RegionError::Outside { offset: 90, end: 101, bytes: 100 }));
        assert!(region.snapshot(u64::MAX, 1).is_err() && write(&region, 100, &[1]).is_err());
        assert_eq!(region.snapshot(100, 0).unwrap().len(), 0);
    }
}
