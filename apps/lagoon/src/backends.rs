//! The instances behind a gateway, as it knows them.

use lagoon_cluster::dispatch::{Elsewhere, InstanceLoad, Placed};
use lagoon_http::ApiError;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// An instance's HTTP server, and its last reported load.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backend {
    /// Its name in `x-lagoon-instance`: letters, digits and signs.
    pub(crate) name: String,
    pub(crate) http_addr: SocketAddr,
    pub(crate) load: InstanceLoad,
    /// When it reported that.
    pub(crate) reported: Instant,
}

/// The present instances. Called for every request; must not block.
pub(crate) trait Backends: Send + Sync {
    /// Instances that take requests.
    fn serving(&self) -> Vec<Backend>;

    /// When the state was asked for that the others give: the same for as long as nothing changes. `None` if that is not known.
    fn asked(&self) -> Option<Instant> {
        None
    }

    /// Instances whose metrics are read: also those that take no requests.
    fn scraped(&self) -> Vec<Backend> {
        self.serving()
    }

    /// Memory of nodes that take no requests, and lend.
    fn elsewhere(&self) -> Elsewhere {
        Elsewhere::default()
    }

    /// Reports to the pool's other gateways where prompts went. Without others nothing happens.
    fn share_prefixes(&self, _placed: Vec<Placed<SocketAddr>>) {}

    /// What other gateways have reported since the last call.
    fn shared_prefixes(&self) -> Vec<Placed<SocketAddr>> {
        Vec::new()
    }

    /// Whether the instance at this address is known to be dead; false if unknown.
    fn is_dead(&self, http_addr: SocketAddr) -> bool;

    /// Whether an instance of this name is in the pool; it may have been lost lately.
    fn knows(&self, name: &str) -> bool;

    /// For how long no state has arrived, if so; the last state is used.
    fn silent_for(&self) -> Option<Duration>;
}

/// A fixed list of servers, without further state.
impl Backends for Vec<Backend> {
    fn serving(&self) -> Vec<Backend> {
        self.clone()
    }

    fn asked(&self) -> Option<Instant> {
        self.iter().map(|backend| backend.reported).max()
    }

    fn is_dead(&self, _http_addr: SocketAddr) -> bool {
        false
    }

    fn knows(&self, name: &str) -> bool {
        self.iter().any(|backend| backend.name == name)
    }

    fn silent_for(&self) -> Option<Duration> {
        None
    }
}

/// The error of a request for which there is no instance.
pub(crate) fn none_alive() -> ApiError {
    ApiError::unavailable("no instance is alive")
}
