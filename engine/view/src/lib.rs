//! The gManager's view of who could lend, for readers that take no lock (Infinite-LLM v1 §4.4, "Scalability").
//!
//! One [`ViewWriter`] keeps a row for each instance and, now and then, publishes an order of the rows; any number of
//! threads ask the [`SortedView`] for creditors at the same time. Everything shared is atomic words:
//! * **rows** are changed in place, so that a refusal counts at once. A row's address is several words; the row's tag,
//!   read before and after, says whether they belong together;
//! * the **order** is in two buffers: the writer fills the one that is not in use and then switches. A reader that was
//!   overtaken by a switch starts again, which costs it one more scan for each publication; it never waits for the
//!   writer, nor the writer for it. The order is a hint about where to look: what is answered comes from the rows;
//! * **bookings** are added to the rows by readers: the first candidate is booked with a compare-and-swap on what the
//!   choice was based on, so that of two readers at once the second chooses anew.
//!
//! It knows nothing of messages or of time. The crate is apart from lagoon-cluster so that its tests build under loom
//! in seconds.
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

pub use row::{Flags, Link, Slot};
pub use view::{Answer, Ask, Found, SortedView, Tier};
pub use writer::ViewWriter;

/// Creditors named at once.
pub const CANDIDATES: usize = 3;
/// The distance class of a link that nobody measured: what lies nearer is preferred, what lies farther comes last.
/// Classes are powers of two of a cost in microseconds.
pub const CLASS_UNMEASURED: u8 = 10;
