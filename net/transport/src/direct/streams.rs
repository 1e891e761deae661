//! The reader's side over QUIC: several connections to one writer, reads spread over them.

use super::{Landing, LastBreath, Path, ReadJob, memory_failure};
use crate::{
    Node, Subject,
    node::{Shared, read_preface},
    open_direct::Opened,
};
use bytes::Bytes;
use lagoon_protocol::{DirectFrame, DirectSegment};
use lagoon_transfer::ReadFailure;
use lagoon_types::InstanceId;
use lagoon_wire::{
    DIRECT_CODE,
    direct::{DirectItem, DirectReader, encode},
};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use std::{
    collections::VecDeque,
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::sync::Notify;

/// Configuration of a path over QUIC.
#[derive(Clone, Copy, Debug)]
pub struct StreamsConfig {
    /// Our number.
    pub reader: InstanceId,
    /// Of the writer's acceptance.
    pub epoch: u64,
    /// Connections in parallel, at least 1.
    pub streams: usize,
}

/// Chunks taken from QUIC in one call; a chunk is the payload of one datagram or of several.
const READ_CHUNKS_MAX: usize = 32;

/// The reads of one stream.
#[derive(Debug, Default)]
struct ReadStream {
    queue: Mutex<StreamQueue>,
    /// Bytes that were asked for and have not arrived.
    bytes: AtomicU64,
    changed: Notify,
}

#[derive(Debug, Default)]
struct StreamQueue {
    /// Taken, and not written to the connection.
    fresh: VecDeque<ReadJob>,
    /// Written, in order.
    asked: VecDeque<ReadJob>,
    closed: bool,
}

impl ReadStream {
    fn lock(&self) -> std::sync::MutexGuard<'_, StreamQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.lock().closed = true;
        // One permit is kept for a writer that is not waiting yet.
        self.changed.notify_one();
    }
}

/// A path over QUIC. Dropping it closes it.
#[derive(Debug)]
pub struct QuicPath {
    streams: Arc<[ReadStream]>,
}

impl Node {
    /// Opens a path to the writer that accepts at `addr`. It takes reads at once; when it cannot be opened it goes
    /// down.
    #[must_use]
    pub fn open_direct(&self, addr: SocketAddr, config: StreamsConfig, landing: &Landing) -> QuicPath {
        let streams: Arc<[ReadStream]> = (0..config.streams.max(1)).map(|_| ReadStream::default()).collect();
        let breath = LastBreath::new(landing);
        for at in 0..streams.len() {
            let shared = Arc::clone(self.shared());
            let (streams, landing, breath) = (Arc::clone(&streams), landing.clone(), Arc::clone(&breath));
            shared.runtime.clone().spawn(async move {
                let Some(read_stream) = streams.get(at) else { return };
                if let Err(reason) = run(&shared, addr, config, read_stream, &landing).await {
                    breath.because(reason);
                }
                // One stream's end is the path's: reads are spread over all of them.
                streams.iter().for_each(ReadStream::close);
                drop(breath);
            });
        }
        QuicPath { streams }
    }
}

impl Path for QuicPath {
    fn name(&self) -> &'static str {
        "quic"
    }

    fn read(&self, job: ReadJob) {
        let read_stream = self.streams.iter().min_by_key(|read_stream| read_stream.bytes.load(Relaxed));
        let Some(read_stream) = read_stream else { return };
        read_stream.bytes.fetch_add(job.transaction.bytes, Relaxed);
        read_stream.lock().fresh.push_back(job);
        read_stream.changed.notify_one();
    }

    fn close(&self) {
        self.streams.iter().for_each(ReadStream::close);
    }
}

impl Drop for QuicPath {
    fn drop(&mut self) {
        self.close();
    }
}

/// A stream's whole life.
async fn run(
    shared: &Arc<Shared>,
    addr: SocketAddr,
    config: StreamsConfig,
    read_stream: &ReadStream,
    landing: &Landing,
) -> Result<(), String> {
    let deadline = shared.config.connect_deadline;
    let dialed = tokio::time::timeout(deadline, dial(shared, addr, config)).await;
    let (connection, mut send, recv, rest) =
        dialed.map_err(|_elapsed| format!("no direct connection within {} ms", deadline.as_millis()))??;
    let subject = Subject::of_peer(&connection)?;
    let entered = shared.enter_direct(&subject, Opened::Here, &connection, shared.config.window_bytes);
    let _entry = entered.map_err(|(_code, reason)| reason)?;
    let writing = write(read_stream, &mut send);
    let reading = Receiver { read_stream, landing, recv, rest, chunks: VecDeque::new() }.run();
    let result = tokio::select! {
        result = writing => result,
        result = reading => result,
    };
    // A stream's error says only that the connection is gone; the connection knows why, until we close it ourselves.
    let result = result.map_err(|reason| connection.close_reason().map_or(reason, |cause| cause.to_string()));
    let output = result.as_ref().err().map_or("closed", String::as_str);
    connection.close(VarInt::from_u32(crate::close::BYE), output.as_bytes());
    result
}

/// Connects, exchanges prefaces and sends the reader's id and epoch.
pub(super) async fn dial(
    shared: &Arc<Shared>,
    addr: SocketAddr,
    config: StreamsConfig,
) -> Result<(Connection, SendStream, RecvStream, Bytes), String> {
    let connecting = shared.endpoint.connect_with(shared.client_config(addr), addr, crate::SERVER_NAME);
    let connection = connecting.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())?;
    let (mut send, mut recv) = connection.open_bi().await.map_err(|error| error.to_string())?;
    let [preface] = shared.preface_of(DIRECT_CODE, 0)?;
    let open = DirectFrame::Open { reader: config.reader.0, epoch: config.epoch };
    let open = encode(&open).map_err(|error| error.to_string())?;
    send.write_all_chunks(&mut [preface, open]).await.map_err(|error| error.to_string())?;
    let (preface, rest) = match read_preface(&mut recv).await {
        Ok(answer) => answer,
        Err(reason) => return Err(connection.close_reason().map_or(reason, |error| error.to_string())),
    };
    shared.check_preface(&preface, &connection, DIRECT_CODE)?;
    Ok((connection, send, recv, rest))
}

/// Sends reads until the stream is closed.
async fn write(read_stream: &ReadStream, send: &mut SendStream) -> Result<(), String> {
    loop {
        let mut frames = {
            let mut queue = read_stream.lock();
            if queue.closed {
                return Ok(());
            }
            let mut frames = Vec::new();
            while let Some(job) = queue.fresh.pop_front() {
                let segments = job.transaction.segments.iter().map(|segment| DirectSegment {
                    export: segment.export,
                    region: segment.remote.region,
                    offset: segment.remote.offset,
                    bytes: segment.remote.bytes,
                });
                let read = DirectFrame::Read { id: job.read, segments: segments.collect() };
                frames.push(encode(&read).map_err(|error| format!("our own read is refused: {error}"))?);
                // Before it is written: the answer may be faster than this task.
                queue.asked.push_back(job);
            }
            frames
        };
        if frames.is_empty() {
            read_stream.changed.notified().await;
        } else {
            send.write_all_chunks(&mut frames).await.map_err(|error| error.to_string())?;
        }
    }
}

/// The receiving side of a stream.
struct Receiver<'a> {
    read_stream: &'a ReadStream,
    landing: &'a Landing,
    recv: RecvStream,
    rest: Bytes,
    /// Chunks taken from QUIC that follow `rest`.
    chunks: VecDeque<Bytes>,
}

impl fmt::Debug for Receiver<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver")
    }
}

impl Receiver<'_> {
    async fn run(mut self) -> Result<(), String> {
        let mut frames = DirectReader::new();
        loop {
            let Some(frame) = self.next_frame(&mut frames).await? else {
                return Err("the writer ended the connection".to_owned());
            };
            let (DirectFrame::Data { id, .. } | DirectFrame::Refused { id, .. }) = &frame else {
                return Err(format!("a writer does not send {frame:?}"));
            };
            let job = self.read_stream.lock().asked.pop_front();
            let job = job.filter(|job| job.read == *id).ok_or_else(|| format!("read {id} was not asked for now"))?;
            let result = match frame {
                DirectFrame::Data { bytes, .. } if bytes == job.transaction.bytes => {
                    self.land(&mut frames, &job).await?
                }
                DirectFrame::Refused { code, .. } => Err(ReadFailure::Refused(code)),
                _ => return Err(format!("read {id} was answered with another size")),
            };
            self.read_stream.bytes.fetch_sub(job.transaction.bytes, Relaxed);
            self.landing.deliver(&job, result);
        }
    }

    async fn more(&mut self) -> Result<bool, String> {
        if self.chunks.is_empty() {
            // One lock of the connection, and one look at its credit, for all of them.
            let mut taken = [const { Bytes::new() }; READ_CHUNKS_MAX];
            let count = self.recv.read_chunks(&mut taken).await.map_err(|error| error.to_string())?;
            self.chunks.extend(taken.into_iter().take(count.unwrap_or(0)));
        }
        let next = self.chunks.pop_front();
        let more = next.is_some();
        self.rest = next.unwrap_or_default();
        Ok(more)
    }

    async fn next_frame(&mut self, frames: &mut DirectReader) -> Result<Option<DirectFrame>, String> {
        loop {
            match frames.next_item(&mut self.rest).map_err(|error| error.to_string())? {
                Some(DirectItem::Frame(frame)) => return Ok(Some(frame)),
                Some(DirectItem::Bytes(_)) => return Err("data that was not announced".to_owned()),
                None if !self.more().await? => return Ok(None),
                None => {}
            }
        }
    }

    /// Lands the announced data. The outer error ends the path, the inner one the read.
    async fn land(
        &mut self,
        frames: &mut DirectReader,
        job: &ReadJob,
    ) -> Result<Result<lagoon_transfer::Landed, ReadFailure>, String> {
        let mut lander = self.landing.lander(job);
        let mut failed = None;
        let mut left = job.transaction.bytes;
        while left > 0 {
            match frames.next_item(&mut self.rest).map_err(|error| error.to_string())? {
                Some(DirectItem::Bytes(bytes)) => {
                    left = left.saturating_sub(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                    // Bytes of a failed read are consumed too, so that the stream's next answer is found.
                    if failed.is_none() {
                        failed = lander.push(&bytes).err();
                    }
                }
                Some(DirectItem::Frame(frame)) => return Err(format!("{frame:?} within data")),
                None if !self.more().await? => return Err("the stream ended within data".to_owned()),
                None => {}
            }
        }
        let landed = failed.map_or_else(|| lander.finish(), Err);
        Ok(landed.map_err(|error| memory_failure(&error)))
    }
}
