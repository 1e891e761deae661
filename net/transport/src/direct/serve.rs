//! The writer's side: exports that transport tasks serve.

use super::OpenDirect;
use crate::{Subject, incoming::Place, node::Shared};
use bytes::Bytes;
use lagoon_protocol::{DirectFrame, DirectSegment, RefuseCode};
use lagoon_transfer::{GrantId, Region, Remote, Segment, Writer};
use lagoon_types::{InstanceId, limits};
use lagoon_wire::direct::{DirectItem, DirectReader, encode};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Readers whose nodes are remembered before those that are not connected any more are forgotten.
const READERS_MAX: usize = 2 * limits::TRANSFER_CONNS_MAX;
/// Zeroes that probes are answered with, piece by piece.
const ZEROES: &[u8] = &[0; 256 << 10];
/// Bytes taken from QUIC at once: requests are small.
const READ_BYTES_MAX: usize = 64 << 10;

/// Whose reads a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Who {
    reader: InstanceId,
    epoch: u64,
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
    fn may_open(&self, reader: InstanceId, node: &str) -> Result<(), String> {
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
            connection.close(VarInt::from_u32(crate::close::STALE), b"the writer cut the path");
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

    fn enter(&self, who: Who, connection: &Connection) -> u64 {
        let mut connections = lock(&self.connections);
        connections.last = connections.last.saturating_add(1);
        let key = connections.last;
        connections.open.insert(key, (who, connection.clone()));
        key
    }

    fn leave(&self, key: u64) {
        lock(&self.connections).open.remove(&key);
    }
}

impl Shared {
    /// Serves a direct connection until it ends, and holds `held` until then. Its prefaces are exchanged.
    pub(crate) fn spawn_direct(
        &self,
        server: Arc<ExportServer>,
        held: (Option<Place>, OpenDirect),
        (subject, connection): (Subject, Connection),
        wires: (SendStream, RecvStream, Bytes),
    ) {
        self.runtime.spawn(async move {
            let _held = held;
            let addr = connection.remote_address();
            let (send, recv, rest) = wires;
            let mut task = Task { server, subject, connection, send, recv, rest, key: None };
            if let Err(reason) = task.run().await {
                let code = VarInt::from_u32(crate::close::BAD_FRAME);
                task.connection.close(code, reason.as_bytes());
                tracing::debug!(%addr, reason, "a direct connection ended");
            }
            task.key.into_iter().for_each(|key| task.server.leave(key));
        });
    }
}

/// One direct connection at the writer.
struct Task {
    server: Arc<ExportServer>,
    /// Whom the reader's certificate is for.
    subject: Subject,
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
    rest: Bytes,
    key: Option<u64>,
}

impl Task {
    async fn run(&mut self) -> Result<(), String> {
        let mut frames = DirectReader::new();
        let mut who = None;
        loop {
            while let Some(item) = frames.next_item(&mut self.rest).map_err(|error| error.to_string())? {
                let DirectItem::Frame(frame) = item else { return Err("a reader sends no data".to_owned()) };
                match (frame, who) {
                    (DirectFrame::Open { reader, epoch }, None) => {
                        let opened = Who { reader: InstanceId(reader), epoch };
                        self.server.may_open(opened.reader, &self.subject.node)?;
                        self.key = Some(self.server.enter(opened, &self.connection));
                        let from = self.connection.remote_address();
                        tracing::info!(reader, %from, "KV is read over QUIC");
                        who = Some(opened);
                    }
                    (DirectFrame::Read { id, segments }, Some(who)) => self.serve(who, id, &segments).await?,
                    (DirectFrame::Probe { id, bytes }, Some(_)) => self.probe(id, bytes).await?,
                    (frame, _) => return Err(format!("out of place: {frame:?}")),
                }
            }
            match self.recv.read_chunk(READ_BYTES_MAX, true).await {
                Ok(Some(chunk)) => self.rest = chunk.bytes,
                Ok(None) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    async fn serve(&mut self, who: Who, id: u64, segments: &[DirectSegment]) -> Result<(), String> {
        let segments: Vec<Segment> = segments
            .iter()
            .map(|s| Segment {
                export: s.export,
                remote: Remote { region: s.region, offset: s.offset, bytes: s.bytes },
            })
            .collect();
        match self.server.read(who.reader, who.epoch, &segments) {
            Ok(snapshots) => {
                let bytes = segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.remote.bytes));
                self.write(&DirectFrame::Data { id, bytes }, snapshots).await
            }
            Err(code) => self.write(&DirectFrame::Refused { id, code }, Vec::new()).await,
        }
    }

    async fn probe(&mut self, id: u64, bytes: u64) -> Result<(), String> {
        let mut left = usize::try_from(bytes).unwrap_or(0);
        let mut pieces = Vec::new();
        while left > 0 {
            let piece = Bytes::from_static(ZEROES).split_to(left.min(ZEROES.len()));
            left = left.saturating_sub(piece.len());
            pieces.push(piece);
        }
        self.write(&DirectFrame::Data { id, bytes }, pieces).await
    }

    async fn write(&mut self, frame: &DirectFrame, data: Vec<Bytes>) -> Result<(), String> {
        let mut pieces = vec![encode(frame).map_err(|error| error.to_string())?];
        pieces.extend(data);
        self.send.write_all_chunks(&mut pieces).await.map_err(|error| error.to_string())
    }
}
