//! Shared device regions: device memory that several processes on a host map, through which KV moves between devices
//! without passing host memory. A device packs KV into its own region and unpacks from it ([`crate::SharedRegions`]).
//! Transports, on threads of their own, use the own region by [`SharedRegion`] and another process's by
//! [`PeerRegion`].
//!
//! Invariants: reads and writes of a call are complete when it returns, on whichever stream of the device they ran; a
//! peer's region stays mapped, and its memory allocated, until it is dropped, even if its process has ended. The two
//! processes agree by messages which one may write which part.

use crate::DeviceError;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A device's UUID, equal in all processes of a host.
pub type DeviceUuid = [u8; 16];

/// Shareable device memory of another process on this host, to be mapped.
#[derive(Debug)]
pub struct PeerMemory {
    /// The device whose memory it is.
    pub device: DeviceUuid,
    /// Size in bytes, as reported by its owner.
    pub bytes: u64,
    pub descriptor: OwnedFd,
}

/// A range of a peer's region and its destination in the own region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionCopy {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}

/// A shared device region of this process, usable from any thread.
///
/// A range outside the region is [`DeviceError::Unsupported`].
pub trait SharedRegion: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// The device whose memory it is.
    fn device(&self) -> DeviceUuid;

    /// A descriptor that another process on this host can map. The memory is exported once, at the first call.
    ///
    /// # Errors
    /// If the driver or the system refuses.
    fn descriptor(&self) -> Result<OwnedFd, DeviceError>;

    /// Copies bytes to the host.
    ///
    /// # Errors
    /// Those of the driver.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes from the host.
    ///
    /// # Errors
    /// Those of the driver.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// XXH3-128 ([`crate::Xxh3`]) of each range `(at, bytes)`, computed on the device if it can.
    ///
    /// # Errors
    /// Those of the driver.
    fn hashes(&self, ranges: &[(u64, u64)]) -> Result<Vec<u128>, DeviceError>;

    /// Maps the region of another process: `bytes` bytes on the device `of`. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if this device cannot access that one's memory; the driver's for any other
    /// descriptor.
    fn import(
        self: Arc<Self>,
        of: &DeviceUuid,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Box<dyn PeerRegion>, DeviceError>;

    /// Number of peers' regions that are mapped now.
    fn mapped(&self) -> usize;
}

/// A mapped region of another process, for reading only.
pub trait PeerRegion: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// Copies bytes to the host.
    ///
    /// # Errors
    /// As [`SharedRegion::read`].
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies ranges to the own region that imported this one, on the device.
    ///
    /// # Errors
    /// As [`SharedRegion::read`].
    fn copy(&self, moves: &[RegionCopy]) -> Result<(), DeviceError>;

    /// Measured copy rates in bytes per second: from this region to memory of the own device, and within the own
    /// device.
    ///
    /// # Errors
    /// As [`SharedRegion::read`], also if there is no memory to measure with.
    fn rates(&self) -> Result<(f64, f64), DeviceError>;
}
