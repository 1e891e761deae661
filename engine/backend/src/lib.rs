//! The backend contract ([`Device`], its [`capabilities`] and their [`operands`]), the host CPU backend ([`cpu`]: oracle and default),
//! the conformance suite ([`conformance`]) that every backend passes, formats of stored weights ([`formats`]), and host
//! and device memory shared between processes ([`arena`], [`shared_region`], [`xxh3`]).

#[cfg(target_os = "linux")]
pub mod arena;
pub mod capabilities;
mod columns;
pub mod conformance;
pub mod cpu;
pub mod device;
mod error;
pub mod formats;
mod forward;
pub mod operands;
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
pub use columns::take_columns;
pub use cpu::CpuDevice;
pub use device::{Device, DeviceInfo, ExpertBuffers, Partials};
pub use error::DeviceError;
pub use formats::WeightFormat;
pub use operands::{
    Activation, AttnBatch, AttnRows, Experts, GroupScore, HeadStrides, KvPiece, LatentRow, Mode, Routing, SWIGLU_ALPHA,
    SWIGLU_LIMIT, Scoring, WeightPart, WeightSource,
};
pub use pci::{PciAddress, PciAddressError};
#[cfg(target_os = "linux")]
pub use shared_region::{DeviceUuid, PeerMemory, PeerRegion, RegionCopy, SharedRegion};
pub use xxh3::Xxh3;
