//! KV transfer between a prefill worker (the **writer**) and a decode worker (the **reader**): KVDirect §4, sans-I/O.
//!
//! * [`Layout`] is the memory layout of a worker's KV; [`plan()`] compares two of them (CONNECT).
//! * [`Pull`] and [`extent`] turn an export into byte ranges; [`coalesce`](mod@coalesce) merges them (TRANSFER).
//! * [`Reader`] is the transaction queue: it connects, reads within credits, verifies, and sends COMPLETE.
//! * [`Writer`] keeps exports under leases, admits reads of them, and frees each exactly once.
//! * [`Lander`] copies arriving bytes to their places and checks them; [`Region`] is the memory on both sides.
//!
//! No sockets, no threads, no clock: `now_ms` is a parameter and never goes back; the owner of a state machine
//! (`lagoon-instance`) executes its outputs. Transfers are pulls as in the paper: the reader allocates all or nothing
//! before the first read and decides when to read, without the writer's scheduler. Peers' messages are checked and
//! refused, never trusted; a panic is a bug.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod check;
pub mod coalesce;
pub mod extent;
pub mod land;
pub mod layout;
pub mod mutants;
pub mod plan;
pub mod pull;
pub mod reader;
pub mod region;
pub mod writer;

pub use check::{Check, Checker};
pub use coalesce::{Part as TransactionPart, Segment, Transaction};
pub use land::{Fill, Landed, Lander, Pulls};
#[cfg(target_os = "linux")]
pub use land::{PeerRegions, land_on_device};
pub use layout::{Axis, Dim, Grid, Layout, LayoutAttention, LayoutError, LayoutParts, Part, Plane};
pub use plan::{Conversion, Mismatch, Span, View, Way, plan};
pub use pull::{Local, Pull, PullError, Remote, check_block, check_blocks};
pub use reader::{ConnId, Failure, Offer, PullId, ReadFailure, Reader, ReaderConfig, ReaderOutput, ReaderStats};
#[cfg(target_os = "linux")]
pub use region::DeviceRegion;
pub use region::{HeapRegion, Region, RegionError};
pub use writer::{EpochSecret, ExportError, FreeReason, GrantId, Writer, WriterConfig, WriterOutput, WriterStats};
