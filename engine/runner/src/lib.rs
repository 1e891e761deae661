//! The runner: executes forward passes, DistAttention and micro attention for peers on one device.
//!
//! An [`Executor`] owns the device, the weights (none on a kv node) and the KV store, and runs on one thread. It is
//! driven by [`Command`]s and answers with [`Report`]s; [`Executor::turn`] does one bounded piece of work, at most one
//! layer of one pass, so that peers' queries are served between any two layers.
//!
//! What must not be here: sockets, clocks, block accounting, scheduling decisions.
#![forbid(unsafe_code)]

mod config;
mod executor;
mod forward;
mod memory;
mod micro_batch;
mod pass;
mod queue;
mod remote_query;
pub mod sampling;
mod stage;
mod thread;
mod work;

pub use config::ExecutorConfig;
pub use executor::{Executor, Turn};
pub use forward::Model;
pub use memory::{KvArena, KvMemory, KvRegion, PeerMemory};
pub use thread::{ExecutorThread, spawn};
pub use work::{
    Command, Fetch, MapId, MappedKv, PassError, RemotePart, RemoteQuery, RemoteRead, RemoteTag, RemoteWork,
    RemoteWrite, Report, SampleOut, SampleSpec, SealedBlock, SeqRows, ShareId, Ship, StageId, StageWork, StepWork,
    WriteSegment,
};
