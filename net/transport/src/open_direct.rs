//! Direct connections that stand, with whom: they belong to no session, and end when a certificate is revoked all the same.

use crate::{Subject, close, event::Window};
use lagoon_types::limits::DIRECT_CONNECTIONS_MAX;
use quinn::{Connection, VarInt};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// By a number of their own.
#[derive(Debug, Default)]
struct Open {
    connections: BTreeMap<u64, (Subject, Connection)>,
    /// How many each node has opened here.
    accepted: BTreeMap<Arc<str>, usize>,
}

/// Those that peers open are bounded for each node, and together.
#[derive(Debug, Default)]
pub(crate) struct DirectConnections(Mutex<Open>);

/// Who opened a direct connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// This process, to read.
    Here,
    /// The peer: it counts in its node's share.
    There,
}

/// A direct connection's entry; it goes when this is dropped.
#[derive(Debug)]
pub(crate) struct OpenDirect {
    of: Arc<DirectConnections>,
    key: u64,
    /// Whose share it counts in.
    counted: Option<Arc<str>>,
    _window: Window,
}

impl DirectConnections {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more of a node that may have `max`, of all that this process accepts.
    fn count(&self, node: &Arc<str>, max: usize) -> Result<(), String> {
        let mut open = self.lock();
        if open.accepted.values().sum::<usize>() >= DIRECT_CONNECTIONS_MAX {
            return Err("too many direct connections".to_owned());
        }
        let own = open.accepted.entry(Arc::clone(node)).or_default();
        if *own >= max {
            return Err(format!("node {node:?} has {own} direct connections, its most"));
        }
        *own = own.saturating_add(1);
        Ok(())
    }

    /// Remembers a direct connection of a node that may open `max` here, until the entry is dropped. The entry holds `window`.
    ///
    /// # Errors
    /// When the node, or all nodes together, have their share of them.
    pub(crate) fn enter(
        self: &Arc<Self>,
        (subject, opened): (&Subject, Opened),
        max: usize,
        (key, connection): (u64, &Connection),
        window: impl FnOnce() -> Window,
    ) -> Result<OpenDirect, String> {
        let counted = (opened == Opened::There).then(|| Arc::clone(&subject.node));
        counted.iter().try_for_each(|node| self.count(node, max))?;
        self.lock().connections.insert(key, (subject.clone(), connection.clone()));
        Ok(OpenDirect { of: Arc::clone(self), key, counted, _window: window() })
    }

    /// Closes the connections with whom `ends` says so.
    pub(crate) fn cut(&self, ends: impl Fn(&Subject) -> bool) {
        for (subject, connection) in self.lock().connections.values().filter(|(subject, _)| ends(subject)) {
            tracing::warn!(node = %subject.node, "a direct connection ends: the peer's certificate is revoked");
            connection.close(VarInt::from_u32(close::IDENTITY), b"the peer's certificate is revoked");
        }
    }
}

impl Drop for OpenDirect {
    fn drop(&mut self) {
        let mut open = self.of.lock();
        open.connections.remove(&self.key);
        if let Some(node) = &self.counted
            && let Some(own) = open.accepted.get_mut(node)
        {
            *own = own.saturating_sub(1);
            if *own == 0 {
                open.accepted.remove(node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_accepts_so_many_of_all_nodes() {
        let open = DirectConnections::default();
        let nodes: Vec<Arc<str>> = (0..4).map(|node| format!("node {node}").into()).collect();
        for node in &nodes {
            (0..DIRECT_CONNECTIONS_MAX / 4).for_each(|_| open.count(node, DIRECT_CONNECTIONS_MAX / 4).unwrap());
        }
        let refused = open.count(&"node 9".into(), DIRECT_CONNECTIONS_MAX / 4).unwrap_err();
        assert_eq!(refused, "too many direct connections");
    }
}
