//! The gManager's view of creditors, for readers that take no lock (Infinite-LLM v1 §4.4, "Scalability").
//!
//! One [`ViewWriter`] owns a row per instance and publishes a sorted order of the rows from time to time; any number of
//! threads query the [`SortedView`] concurrently. All shared state is atomic words:
//! * **rows** are updated in place, so that a refusal takes effect at once. A row's address is several words; a reader
//!   accepts them if the row's tag is equal before and after;
//! * the **order** is double-buffered: the writer fills the unused buffer and then switches. A reader overtaken by a
//!   switch scans again; readers and writer never wait for each other. The order only says which rows to look at;
//!   answers are read from the rows;
//! * **bookings** are added to the rows by readers: a compare-and-swap on the space word that the choice was based on
//!   books the first candidate, so that of two concurrent readers the second chooses again.
//!
//! It must never use messages or time. The crate is separate from lagoon-cluster so that its tests build under loom in
//! seconds.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod index;
#[cfg(all(test, loom))]
mod loom_tests;
mod order;
mod row;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;
mod view;
mod writer;

pub use row::{Flags, Link, Location, Slot};
pub use view::{Answer, Ask, Found, SortedView, Tier};
pub use writer::ViewWriter;

/// Creditors in one answer.
pub const CANDIDATES: usize = 3;
/// Distance class of an unmeasured link: instances in lower classes are preferred, those in higher ones come last.
/// Classes are powers of two of a cost in microseconds.
pub const CLASS_UNMEASURED: u8 = 10;
