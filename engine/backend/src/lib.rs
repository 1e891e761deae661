//! The backend contract ([`Device`] and its [`capabilities`]), the host CPU backend ([`cpu`]: oracle and default),
//! the conformance suite ([`conformance`]) that every backend passes, formats of stored weights ([`formats`]), and host
//! and device memory shared between processes ([`arena`], [`shared_region`], [`xxh3`]).

#[cfg(target_os = "linux")]
pub mod arena;
pub mod capabilities;
pub mod conformance;
pub mod cpu;
pub mod device;
pub mod formats;
mod forward;
pub mod paced;
pub mod pci;
#[cfg(target_os = "linux")]
pub mod shared_region;
pub mod xxh3;

#[cfg(target_os = "linux")]
pub use arena::{ArenaError, ArenaView, SharedArena};
pub use capabilities::{
    KvCounters, LaunchCounters, PeerAccess, Queued, RegionId, SampleRow, SampledRow, Sampling, SharedArenas,
    SharedRegions, VirtualMemory,
};
#[cfg(target_os = "linux")]
pub use capabilities::{LentKv, OwnRegion, SharedKv};
pub use cpu::CpuDevice;
pub use device::{
    Activation, AttnBatch, AttnRows, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, GroupScore, HeadStrides,
    KvPiece, LatentRow, Mode, Partials, Routing, SWIGLU_ALPHA, SWIGLU_LIMIT, Scoring, WeightPart, WeightSource,
};
pub use formats::WeightFormat;
pub use paced::{Lateness, PaceProfile, Paced};
pub use pci::{PciAddress, PciAddressError};
#[cfg(target_os = "linux")]
pub use shared_region::{DeviceUuid, PeerMemory, PeerRegion, RegionCopy, SharedRegion};
pub use xxh3::Xxh3;
