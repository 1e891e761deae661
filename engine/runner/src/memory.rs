//! KV memory that other processes read, fill or map: types that also exist on systems without shared memory. Also memory behind
//! slots, and the errors of devices without a kind of memory.

use lagoon_backend::{Device, DeviceError, VirtualMemory as _};
use std::ops::Range;

/// Host memory of one layer's KV that transports read and fill.
#[cfg(target_os = "linux")]
pub type KvArena = lagoon_backend::SharedArena;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type KvArena = std::convert::Infallible;

/// A shared device region, as transports use it.
#[cfg(target_os = "linux")]
pub type KvRegion = std::sync::Arc<dyn lagoon_backend::SharedRegion>;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type KvRegion = std::convert::Infallible;

/// A creditor's device memory, to be mapped (peer access).
#[cfg(target_os = "linux")]
pub type PeerMemory = lagoon_backend::PeerMemory;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type PeerMemory = std::convert::Infallible;

/// Memory in which transports read and fill KV: the store itself, or staging buffers.
#[derive(Clone, Debug)]
pub enum KvMemory {
    /// Host memory, one arena a layer; empty if nothing is shared.
    Host(Vec<KvArena>),
    /// A shared device region, layers of `layer_bytes` bytes one after the other.
    Device { region: KvRegion, layers: u32, layer_bytes: usize },
}

impl KvMemory {
    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Host(arenas) if arenas.is_empty())
    }
}

/// Maps memory behind slots; without virtual memory they have it.
pub(crate) fn hold<D: Device>(device: &mut D, kv: &mut D::Kv, slots: &[Range<u32>]) -> Result<(), DeviceError> {
    device.virtual_memory().map_or(Ok(()), |memory| memory.kv_hold(kv, slots))
}

/// The error of a device without a capability.
pub(crate) fn without(capability: &str) -> DeviceError {
    DeviceError::Unsupported(format!("it has no {capability}"))
}

/// The error of a device without peer access.
pub(crate) fn no_peer_access() -> DeviceError {
    without("peer access: other processes cannot map its memory, nor it theirs")
}
