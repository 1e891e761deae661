//! The writer's side: direct connections served from its exports.

use crate::{
    Subject,
    exports::{ExportServer, Who},
    incoming::Place,
    node::Shared,
    open_direct::OpenDirect,
};
use bytes::Bytes;
use lagoon_protocol::{DirectFrame, DirectSegment};
use lagoon_transfer::{Remote, Segment};
use lagoon_types::InstanceId;
use lagoon_wire::direct::{DirectItem, DirectReader, encode};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use std::sync::Arc;

/// Zeroes that probes are answered with, piece by piece.
const ZEROES: &[u8] = &[0; 256 << 10];
/// Bytes taken from QUIC at once: requests are small.
const READ_BYTES_MAX: usize = 64 << 10;

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
