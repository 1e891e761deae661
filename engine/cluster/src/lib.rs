//! Protocol cores of the pool, sans-IO: no sockets, no threads, no clock (`now_ms` is a parameter and never goes
//! back), no randomness except the incarnation that the caller draws. The same calls in the same order give the same
//! outputs, so that a seed replays a failure.
//!
//! * [`RManager`], one per instance, owns the rBlocks: it allocates them to own sequences, lends them, and borrows from
//!   creditors (Infinite-LLM v1 §4.3).
//! * [`GManager`], one per pool, registers instances, keeps the global debt ledger from their heartbeats, and
//!   recommends creditors (v1 §4.4). It holds soft state only.
//! * The [`Balancer`] decides which instance changes between prefill and decode worker.
//! * The [`dispatch::Dispatcher`], one per gateway, decides which instance a request goes to, and when.
//! * [`Dgfm`] resolves circular debts by swaps (v1 §4.5).
//! * [`perf`] predicts throughput (v2 Eq. 5 to 7); the [`Planner`] decides by it which blocks move (v2 Algorithm 1).
//!
//! `lagoon-instance` and the gManager process call it. Methods are of four kinds: getters; `on_*` handle events; plain
//! verbs are commands; `poll` returns the next output. Peers' messages are checked and refused, never trusted; a panic is
//! a bug.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod cached;
pub mod dgfm;
pub mod dispatch;
pub mod gmanager;
mod lives;
pub mod mutants;
pub mod perf;
pub mod planner;
pub mod rmanager;
pub mod roles;
#[cfg(test)]
mod tests;

pub use cached::{Cached, cache_summary};
pub use dgfm::{Dgfm, DgfmConfig, DgfmStats, LedgerRow};
pub use gmanager::{GManager, GManagerConfig, GManagerOutput, GManagerStats, SwitchedBy, serve_query};
pub use lives::next_incarnation;
pub use planner::{
    InstanceView, Order, Plan, Planner, PlannerConfig, PoolView, RemoteBlocks, RequestView, Why, dispatch,
};
pub use rmanager::{
    BorrowFailure, BorrowId, BorrowedLease, CacheReport, CachedPart, ConfigError, LeaseEnded, LentEntry, Output,
    PlacementReport, RManager, RManagerConfig, Revoked, Unmet,
};
pub use roles::{Balancer, BalancerConfig, RoleSwitch, RoleView};
