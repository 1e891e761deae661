//! One instance as a state machine: `handle(Event, now) -> Effects`.
//!
//! It owns the scheduler, the rManager with its pool, the block tables of its sequences and the peer table; it drives a
//! runner through [`lagoon_runner::Command`]s. It does no I/O, reads no clock and starts no thread, so the simulator
//! runs the same code as production.
//!
//! Invariants, asserted here or in the layers below:
//! * Every wait has a deadline: borrows, steps, peers' frames, admission.
//! * Every accepted request ends with exactly one `Finished` or `Failed`.
//! * Memory of a sequence in a step is never freed before the step ends.
//! * Lost KV of a sequence is recomputed from its tokens; an emitted token is never emitted again.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod batch;
mod config;
mod cost;
mod creditor;
mod cx;
mod event;
mod instance;
mod joint;
mod look;
mod membership;
mod moves;
mod outcome;
mod prefill;
mod status;
mod step;

pub use batch::freeze::FrozenDebt;
pub use config::{InstanceConfig, JointConfig, LayerWindows, RemotePolicy, SchedulerConfig, TransferConfig};
pub use cost::{CostModel, LinkCost, OwnCost};
pub use cx::prefix::PrefixStatus;
pub use cx::tiers::{CacheTierConfig, CacheTierStatus, CacheTiersStatus};
pub use event::{BlockKv, DiskEffect, DiskEvent, DiskLoss, Effect, Event, PeerKey, TransferEffect, TransferEvent};
pub use instance::Instance;
pub use joint::{JointState, JointStatus, MEMBER_SEQ_BASE};
pub use moves::{MovePace, MoveStatus, MovedBlocks};
pub use prefill::{LastTimes, PrefillStatus, PrefillTimes, StageUser};
pub use status::{InstanceStatus, SequencePlacement};
pub use step::mapped::PeerAccessStatus;
pub use step::relays::RelayStatus;

/// The shell sends [`Event::Tick`] at least this often.
pub const TICK_MS: u64 = 20;
