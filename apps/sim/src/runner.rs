//! What stands for a device: it takes an instance's commands and answers with reports after modelled time.

use lagoon_runner::{Command, Report};
use lagoon_transfer::Region;
use std::sync::Arc;

/// A device under simulated time. As the real executor: peers' work overtakes passes, one bounded piece of work (at
/// most a layer) at a time, and a step that was aborted is forgotten before any later command is seen.
pub trait SimRunner {
    /// Takes a command. It is in effect before the next [`SimRunner::turn`].
    fn push(&mut self, command: Command);

    /// Does the next piece of work and says how long it takes, in microseconds. Its reports are heard when it is over.
    /// `None` if there is nothing to do before the next command.
    fn turn(&mut self, now_us: u64, reports: &mut Vec<Report>) -> Option<u64>;

    /// Whether transports see memory beside its KV store.
    fn is_staged(&self) -> bool;

    /// A copy of its KV store, or of the memory beside it, as transports see it: one region a layer, of keys by slot.
    fn regions(&self) -> Vec<Arc<dyn Region>>;

    /// Such a copy, into which something was read, becomes what it was of.
    fn take_regions(&mut self, regions: &[Arc<dyn Region>]);
}
