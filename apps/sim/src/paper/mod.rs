//! The papers' tables and figures, in simulation.

pub mod caching;
pub mod cluster;
pub mod context;
pub mod conversation;
mod device;
pub mod dgfm;
pub mod dispatch;
mod fabric;
mod gateway;
pub mod goodput;
pub mod hardware;
mod lengths;
pub mod longtail;
pub mod measure;
pub mod migration;
pub mod mixed;
pub mod model;
pub mod readings;
pub mod report;
pub mod run;
pub mod serving;
pub mod suite;
pub mod traces;
pub use device::Prefill;
