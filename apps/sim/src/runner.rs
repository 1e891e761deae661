//! [`SimRunner`]: a device's interface in simulated time. It takes an instance's commands and reports after modelled
//! time.

use lagoon_runner::{Command, PeerMemory, Report};
use lagoon_transfer::Region;
use std::sync::Arc;

/// A device in simulated time. Like the real executor, it does one bounded piece of work (at most a layer) at a time,
/// peers' work ahead of passes, and drops an aborted step before any later command.
pub trait SimRunner {
    /// What the network charges for: see [`crate::Network::Bill`].
    type Bill: Default;
    /// A command that comes while it works changes when its work ends. Otherwise commands wait for the end.
    const PREEMPTIVE: bool;

    /// Takes a command. It is in effect before the next [`SimRunner::turn`].
    fn push(&mut self, command: Command, now_us: u64);

    /// Does the next piece of work and returns its duration in microseconds; its reports count when that has passed.
    /// `None` if there is no work before the next command.
    fn turn(&mut self, now_us: u64, reports: &mut Vec<Report>) -> Option<u64>;

    /// The piece of work ends now: a preemptive device adds its reports.
    fn end(&mut self, now_us: u64, reports: &mut Vec<Report>);

    /// The bill of the next report; called once for each.
    fn bill(&mut self) -> Self::Bill;

    /// Whether transports use staging buffers beside its KV store.
    fn is_staged(&self) -> bool;

    /// Its KV store, or its staging buffers, as transports see it: one region a layer, of tokens by slot. A copy, or the
    /// memory itself.
    fn regions(&self) -> Vec<Arc<dyn Region>>;

    /// Replaces the store or staging buffers by such a copy, after a transport wrote to it.
    fn take_regions(&mut self, regions: &[Arc<dyn Region>]);

    /// Its store as others map it, if it has peer access under this name.
    fn peer_memory(&self, socket: &str) -> Option<PeerMemory>;
}
