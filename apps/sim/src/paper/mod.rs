//! The papers' tables and figures, in simulation.

pub mod cluster;
mod device;
mod fabric;
pub mod hardware;
mod lengths;
pub mod measure;
pub mod plot;
pub mod serving;
pub mod traces;
pub mod world;
pub use device::Prefill;
