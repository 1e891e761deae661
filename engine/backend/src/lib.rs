//! The backend contract ([`Device`]), the host CPU backend that is oracle and default ([`cpu`]), and the conformance
//! suite ([`conformance`]) by which every backend proves itself.

#[cfg(target_os = "linux")]
pub mod arena;
pub mod conformance;
pub mod cpu;
pub mod device;
pub mod paced;

#[cfg(target_os = "linux")]
pub use arena::{ArenaError, ArenaView, SharedArena};
pub use cpu::CpuDevice;
pub use device::{AttnBatch, AttnRows, Device, DeviceError, DeviceInfo, Mode, Partials, WeightSource};
pub use paced::{Lateness, PaceProfile, Paced};
