//! Direct connections that stand, with whom: they belong to no session, and end when a certificate is revoked all the same.

use crate::{Subject, event::Window, node::Shared, session::close};
use quinn::{Connection, VarInt};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// By a number of their own. As many as there are connections.
#[derive(Debug, Default)]
pub(crate) struct DirectConnections(Mutex<BTreeMap<u64, (Subject, Connection)>>);

/// A direct connection's entry; it goes when this is dropped.
#[derive(Debug)]
pub(crate) struct OpenDirect {
    of: Arc<DirectConnections>,
    key: u64,
    _window: Window,
}

impl DirectConnections {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (Subject, Connection)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the connections with every node for which `ends` returns true.
    pub(crate) fn cut(&self, ends: impl Fn(&Subject) -> bool) {
        for (subject, connection) in self.lock().values().filter(|(subject, _)| ends(subject)) {
            tracing::warn!(node = %subject.node, "a direct connection ends: the peer's certificate is revoked");
            connection.close(VarInt::from_u32(close::IDENTITY), b"the peer's certificate is revoked");
        }
    }
}

impl Drop for OpenDirect {
    fn drop(&mut self) {
        self.of.lock().remove(&self.key);
    }
}

impl Shared {
    /// Remembers a direct connection, until the entry is dropped, and lets it hold up to `window` bytes unread.
    ///
    /// # Errors
    /// When the certificate was revoked since the handshake.
    pub(crate) fn enter_direct(
        &self,
        subject: &Subject,
        connection: &Connection,
        window: u32,
    ) -> Result<OpenDirect, String> {
        let (of, key) = (Arc::clone(&self.direct_connections), self.next_number());
        of.lock().insert(key, (subject.clone(), connection.clone()));
        let _window = self.pins.shares(subject, &self.config).widen(connection, window);
        let entry = OpenDirect { of, key, _window };
        // After it was entered: a list that is loaded from here on finds it.
        if self.is_revoked(subject) {
            return Err(format!("the certificate of node {:?} is revoked", subject.node));
        }
        Ok(entry)
    }
}
