//! The runner: executes forward passes, DistAttention and micro attention for peers on one device.
//!
//! An [`Executor`] owns the device, the weights (none on a kv node) and the KV store, and runs on one thread. The
//! instance sends [`Command`]s and receives [`Report`]s. [`Executor::turn`] does one bounded piece of work, at most
//! one layer of one pass, so peers' queries are served between any two layers.
//!
//! What must not be here: sockets, clocks, block accounting, scheduling decisions.
#![forbid(unsafe_code)]

mod biased;
mod config;
mod constrained;
pub mod decoder;
mod drafter;
mod executor;
mod forward;
mod hidden;
mod latent;
mod memory;
mod micro_batch;
mod models;
mod pass;
mod queue;
mod remote_query;
mod ring;
mod row_parts;
pub mod sampling;
mod scores;
mod stage;
mod thread;
mod token_counts;
mod work;

pub use config::ExecutorConfig;
pub use decoder::{Activations, Decoder, Model, activation_elements};
pub use drafter::Drafter;
pub use executor::{Executor, Turn};
pub use memory::{KvArena, KvMemory, KvRegion, PeerMemory};
pub use models::Models;
pub use thread::{ExecutorThread, spawn};
pub use token_counts::TokenCounts;
pub use work::{
    Command, DraftId, DraftSeq, DraftWork, Drafted, Fetch, HiddenRows, HiddenSum, MapId, MappedKv, PassError,
    RemoteMerge, RemotePart, RemoteQuery, RemoteRead, RemoteTag, RemoteWork, RemoteWrite, Report, SampleOut,
    SampleSpec, SavedWindow, ScoreRows, SealedBlock, SeqRows, ShareId, Ship, ShipSegment, StageId, StageWork, StepWork,
    WriteSegment,
};
