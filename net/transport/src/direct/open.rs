//! Direct connections that stand, with whom: they belong to no session, and end when a certificate is revoked all the same.

use crate::{Subject, close, event::Window, node::Shared};
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

impl Shared {
    /// Remembers a direct connection, until the entry is dropped, and lets it hold up to `window` bytes unread.
    ///
    /// # Errors
    /// When the node has its share of them, or the certificate was revoked since the handshake: the code to close it with, and why.
    pub(crate) fn enter_direct(
        &self,
        subject: &Subject,
        opened: Opened,
        connection: &Connection,
        window: u32,
    ) -> Result<OpenDirect, (u32, String)> {
        let (of, key) = (Arc::clone(&self.direct_connections), self.next_number());
        let counted = (opened == Opened::There).then(|| Arc::clone(&subject.node));
        let counts = counted.iter().try_for_each(|node| of.count(node, self.config.direct_node_max));
        counts.map_err(|reason| (close::LIMIT, reason))?;
        of.lock().connections.insert(key, (subject.clone(), connection.clone()));
        let _window = self.pins.shares(subject, &self.config).widen(connection, window);
        let entry = OpenDirect { of, key, counted, _window };
        // After it was entered: a list that is loaded from here on finds it.
        if self.is_revoked(subject) {
            return Err((close::IDENTITY, format!("the certificate of node {:?} is revoked", subject.node)));
        }
        Ok(entry)
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
