//! Memory of KV that other processes read, fill or map.

/// Memory of one layer's KV that others may read and fill.
#[cfg(target_os = "linux")]
pub type KvArena = lagoon_backend::SharedArena;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type KvArena = std::convert::Infallible;

/// A window of the device, as transports use it.
#[cfg(target_os = "linux")]
pub type KvRegion = std::sync::Arc<dyn lagoon_backend::SharedRegion>;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type KvRegion = std::convert::Infallible;

/// A creditor's memory, to be mapped.
#[cfg(target_os = "linux")]
pub type PeerMemory = lagoon_backend::PeerMemory;
/// Memory is not shared on this system.
#[cfg(not(target_os = "linux"))]
pub type PeerMemory = std::convert::Infallible;

/// Where transports read KV and fill it: the store itself, or memory beside it.
#[derive(Clone, Debug)]
pub enum KvMemory {
    /// Of the host, one arena a layer; none where nothing is shared.
    Host(Vec<KvArena>),
    /// Of the device, layers of so many bytes one behind the other.
    Device { window: KvRegion, layers: u32, layer_bytes: usize },
}

impl KvMemory {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Host(arenas) if arenas.is_empty())
    }
}
