//! Windows: memory of a device that several processes on a host map, through which KV goes from one to another without passing
//! the host's memory. A device packs into its own and unpacks from it ([`crate::SharedRegions`]); transports, which have threads
//! of their own, use it by [`SharedRegion`], and another process's by [`PeerRegion`].
//!
//! Invariants: what a call has read or written was read or written when it returns, whichever stream of the device it went
//! through; a peer's window is mapped until it is dropped, and its memory is there as long, also when its process is gone.
//! Who may write which part when is what the two processes tell each other.

use crate::DeviceError;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Names a device on this host, whichever process asks.
pub type DeviceUuid = [u8; 16];

/// Memory that another process on this host has made shareable, to be mapped.
#[derive(Debug)]
pub struct PeerMemory {
    /// The device that it is of.
    pub device: DeviceUuid,
    /// Its size, as its owner says.
    pub bytes: u64,
    pub descriptor: OwnedFd,
}

/// Part of a peer's window that is copied to part of one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionCopy {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}

/// A window of this process's device, for any thread.
///
/// Every range that is named lies within the window; one that does not is [`DeviceError::Unsupported`].
pub trait SharedRegion: Send + Sync + fmt::Debug {
    /// Its size.
    fn bytes(&self) -> u64;

    /// The device that it is memory of.
    fn device(&self) -> DeviceUuid;

    /// A descriptor by which another process on this host maps it: the memory is exported once, at the first call.
    ///
    /// # Errors
    /// When the driver or the system refuses one.
    fn descriptor(&self) -> Result<OwnedFd, DeviceError>;

    /// Copies bytes to the host.
    ///
    /// # Errors
    /// What the driver says.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes from the host.
    ///
    /// # Errors
    /// What the driver says.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// XXH3-128 ([`crate::Xxh3`]) of some ranges `(at, bytes)`, computed where they are if the device can.
    ///
    /// # Errors
    /// What the driver says.
    fn hashes(&self, ranges: &[(u64, u64)]) -> Result<Vec<u128>, DeviceError>;

    /// Maps the window that another process has made, on the device `of`, of so many bytes. The descriptor may be closed
    /// afterwards.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if that is another device whose memory this one cannot access; what the driver says of a
    /// descriptor that is no such memory.
    fn import(
        self: Arc<Self>,
        of: &DeviceUuid,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Box<dyn PeerRegion>, DeviceError>;

    /// Peers' windows that are mapped now.
    fn mapped(&self) -> usize;
}

/// A window of another process, mapped. It is only read.
pub trait PeerRegion: Send + Sync + fmt::Debug {
    /// Its size.
    fn bytes(&self) -> u64;

    /// Copies bytes to the host.
    ///
    /// # Errors
    /// As [`SharedRegion::read`].
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies to the own window that it was imported by, on the device.
    ///
    /// # Errors
    /// As [`SharedRegion::read`].
    fn copy(&self, moves: &[RegionCopy]) -> Result<(), DeviceError>;

    /// Bytes per second that a copy from it to memory of the own device carries, and one within the own device.
    ///
    /// # Errors
    /// As [`SharedRegion::read`], also where there is no memory to measure with.
    fn rates(&self) -> Result<(f64, f64), DeviceError>;
}
