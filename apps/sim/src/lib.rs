//! The deterministic simulator: the shipped instances and gManager under a simulated clock and fabric.
//!
//! Real parts: [`lagoon_instance::Instance`], [`lagoon_cluster::GManager`] and everything below them, and the codec
//! ([`lagoon_wire`]) for every frame. Replaced parts: the device ([`SimRunner`]: a timing model, symbolic or of real
//! hardware), the transport (a [`Network`]: the [`Fabric`] has sessions as WIRE.md promises them, no packets;
//! [`Transfers`]: KV transfer paths between the shipped reader and writer), and clocks ([`Agenda`], [`Clock`]). One thread, one queue ordered by
//! time and then by insertion, one seeded generator, no iteration over hash maps: a seed replays a run.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod agenda;
pub mod chaos;
pub mod clock;
pub mod disk;
pub mod dispatching;
pub mod effects;
pub mod fabric;
pub mod happening;
pub mod leases;
pub mod network;
pub mod paper;
pub mod place;
pub mod pool;
pub mod process;
pub mod rng;
pub mod runner;
pub mod shared;
pub mod symbolic;
pub mod world;

pub use agenda::Agenda;
pub use clock::Clock;
pub use disk::Disk;
pub use fabric::{Fabric, LinkProfile, decode};
pub use network::{Delivery, Network};
pub use place::{GMANAGER, Place};
pub use pool::{NodeSpec, PoolSpec};
pub use process::{Coordinator, Process};
pub use rng::Rng;
pub use runner::SimRunner;
pub use shared::{DeviceFault, Registrations};
pub use world::{Delays, Emission, Step, Transfers, World};
