//! KV transfer between a prefill worker (the **writer**) and a decode worker (the **reader**): KVDirect §4, sans-I/O.
//!
//! * [`Layout`] says where a worker's KV lies; [`plan()`] compares two of them (CONNECT).
//! * [`Pull`] and [`extent`] turn an export into byte ranges; [`coalesce`](mod@coalesce) merges them (TRANSFER).
//! * [`Reader`] is the transaction queue: it connects, reads within credits, verifies, and sends COMPLETE.
//! * [`Writer`] keeps exports under leases, admits reads of them, and frees each exactly once.
//! * [`Lander`] puts arriving bytes where they belong, checked; [`Region`] is the memory on both sides.
//!
//! No sockets, no threads, no clock: `now_ms` is a parameter and never goes back, and whoever owns a state machine
//! carries out its outputs. Pull is the paper's: the reader allocates all or nothing before the first read, decides
//! the moment, and nothing of the writer's scheduler takes part. What peers send is checked and refused, never
//! trusted; panics are bugs of ours.
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
pub use layout::{Axis, Dim, Grid, Layout, LayoutError, LayoutParts, Part, Plane};
pub use plan::{Conversion, Mismatch, Span, View, Way, plan};
pub use pull::{Local, Pull, PullError, Remote, check_block, check_blocks};
pub use reader::{ConnId, Failure, Offer, PullId, ReadFailure, Reader, ReaderConfig, ReaderOutput, ReaderStats};
#[cfg(target_os = "linux")]
pub use region::DeviceRegion;
pub use region::{HeapRegion, Region, RegionError};
pub use writer::{ExportError, FreeReason, GrantId, Writer, WriterConfig, WriterOutput, WriterStats};
