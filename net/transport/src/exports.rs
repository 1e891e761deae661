//! [`ExportServer`]: a writer's exports and regions, which tasks of a node read for peers, and the connections that read them.
//!
//! It knows no node: `direct/serve.rs` serves connections from it.

use crate::{Subject, close};
use bytes::Bytes;
use lagoon_protocol::RefuseCode;
use lagoon_transfer::{GrantId, Region, Remote, Segment, Writer};
use lagoon_types::{InstanceId, limits};
use quinn::{Connection, VarInt};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Readers whose nodes are remembered before those that are not connected any more are forgotten.
const READERS_MAX: usize = 2 * limits::TRANSFER_CONNS_MAX;

/// Whose reads a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) reader: InstanceId,
    pub(crate) epoch: u64,
}

/// A writer's exports and regions, shared between its owner and the tasks that serve reads of them.
pub struct ExportServer {
    writer: Mutex<Writer>,
    regions: Vec<Arc<dyn Region>>,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    connections: Mutex<Connections>,
    /// Nodes of those that connected as readers, at most [`READERS_MAX`].
    nodes: Mutex<BTreeMap<InstanceId, Arc<str>>>,
}

/// Open connections by number, and the last number.
#[derive(Default)]
struct Connections {
    last: u64,
    open: BTreeMap<u64, (Who, Connection)>,
}

impl fmt::Debug for ExportServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportServer").field("regions", &self.regions.len()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read that is being served; it ends when its last snapshot is dropped.
struct Served {
    server: Arc<ExportServer>,
    grant: GrantId,
}

impl Drop for Served {
    fn drop(&mut self) {
        let now_ms = (self.server.clock)();
        lock(&self.server.writer).end_read(self.grant, now_ms);
    }
}

/// Bytes of a region that QUIC sends without a copy; they keep the read open.
struct Snapshot {
    bytes: Bytes,
    _served: Arc<Served>,
}

impl AsRef<[u8]> for Snapshot {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ExportServer {
    /// Shares a writer. `regions` are those of its layout, by number; `clock` is the milliseconds that the owner's
    /// calls of the writer use, too.
    #[must_use]
    pub fn new(
        writer: Writer,
        regions: Vec<Arc<dyn Region>>,
        clock: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (writer, clock) = (Mutex::new(writer), Box::new(clock) as _);
        Arc::new(Self { writer, regions, clock, connections: Mutex::default(), nodes: Mutex::default() })
    }

    /// From now on direct connections open as `reader` only with a certificate of the node of `subject`: that of the session in
    /// which the reader connected. One for which this is never called is known by its epoch alone.
    pub fn reader_is(&self, reader: InstanceId, subject: &Subject) {
        let mut nodes = lock(&self.nodes);
        nodes.insert(reader, Arc::clone(&subject.node));
        if nodes.len() > READERS_MAX {
            let writer = lock(&self.writer);
            nodes.retain(|other, _| *other == reader || writer.epoch(*other).is_some());
        }
    }

    /// Whether a node's direct connection may open as a reader.
    pub(crate) fn may_open(&self, reader: InstanceId, node: &str) -> Result<(), String> {
        match lock(&self.nodes).get(&reader) {
            Some(holder) if **holder != *node => Err(format!("{reader} is of node {holder:?}, not of node {node:?}")),
            _ => Ok(()),
        }
    }

    /// Lets the owner act on the writer, with the time. Reads wait meanwhile: do nothing slow here.
    pub fn with<T>(&self, act: impl FnOnce(&mut Writer, u64) -> T) -> T {
        let now_ms = (self.clock)();
        act(&mut lock(&self.writer), now_ms)
    }

    /// The regions of the writer's layout.
    #[must_use]
    pub fn regions(&self) -> &[Arc<dyn Region>] {
        &self.regions
    }

    /// Closes the connections of a reader's acceptance: carries `WriterOutput::Cut` out.
    pub fn cut(&self, reader: InstanceId, epoch: u64) {
        let who = Who { reader, epoch };
        let connections = lock(&self.connections);
        for (_, connection) in connections.open.values().filter(|(other, _)| *other == who) {
            connection.close(VarInt::from_u32(close::STALE), b"the writer cut the path");
        }
    }

    /// Admits a read and gives its bytes. The export stays as long as any of them is held.
    ///
    /// # Errors
    /// The refusal for the reader.
    pub fn read(
        self: &Arc<Self>,
        reader: InstanceId,
        epoch: u64,
        segments: &[Segment],
    ) -> Result<Vec<Bytes>, RefuseCode> {
        let grant = self.with(|writer, now_ms| writer.admit(reader, epoch, segments, now_ms))?;
        let served = Arc::new(Served { server: Arc::clone(self), grant });
        let snapshot = |segment: &Segment| {
            let Remote { region, offset, bytes } = segment.remote;
            let region = usize::try_from(region).ok().and_then(|region| self.regions.get(region));
            let bytes = usize::try_from(bytes).map_err(|_too_large| RefuseCode::OutOfRange)?;
            let bytes = region.ok_or(RefuseCode::OutOfRange)?.snapshot(offset, bytes).map_err(|error| {
                tracing::warn!(%error, "an exported range cannot be read");
                RefuseCode::Device
            })?;
            Ok(Bytes::from_owner(Snapshot { bytes, _served: Arc::clone(&served) }))
        };
        segments.iter().map(snapshot).collect()
    }

    /// Remembers an open connection, until it leaves; gives its number.
    pub(crate) fn enter(&self, who: Who, connection: &Connection) -> u64 {
        let mut connections = lock(&self.connections);
        connections.last = connections.last.saturating_add(1);
        let key = connections.last;
        connections.open.insert(key, (who, connection.clone()));
        key
    }

    /// Forgets a connection that has ended.
    pub(crate) fn leave(&self, key: u64) {
        lock(&self.connections).open.remove(&key);
    }
}
