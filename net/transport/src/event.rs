//! What a node tells its owner, and the bounded inboxes through which it does.

use lagoon_protocol::Control;
use lagoon_wire::Class;
use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// A node's handle of a peer; stable over reconnects and restarts of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer{}", self.0)
    }
}

/// Control messages and the life of peers. `session` numbers the time between `Up` and `Down` of a peer, uniquely in
/// this node: data frames carry it too, so that leftovers of an ended session can be told.
#[derive(Debug)]
pub enum Event {
    /// A session begins. The peer accepts at `addr`; `incarnation` is random per process.
    Up { peer: PeerId, session: u64, addr: SocketAddr, incarnation: u64 },
    /// The session is over. Frames sent in it may or may not have been delivered; none will be any more.
    Down { peer: PeerId, session: u64, reason: String },
    /// The peer could not be reached; said once until it is. Attempts go on while there is something to send.
    Unreachable { peer: PeerId, addr: SocketAddr, reason: String },
    /// Frames waited for a connection for longer than the deadline and were dropped.
    Expired { peer: PeerId, class: Class, frames: usize },
    /// Somebody connected and was refused (no certificate, another CA, a bad preface). Best effort.
    Refused { addr: SocketAddr, reason: String },
    /// A message. Its body is `None` when this build does not know it.
    Control { peer: PeerId, session: u64, message: Control },
}

/// A data frame and where it came from.
#[derive(Debug)]
pub struct Inbound<T> {
    pub peer: PeerId,
    /// As in [`Event::Up`].
    pub session: u64,
    pub frame: T,
}

/// The receiving end of one class: bounded in frames and bytes.
#[derive(Debug)]
pub struct Inbox<T> {
    rx: mpsc::Receiver<(T, Option<OwnedSemaphorePermit>)>,
}

impl<T> Inbox<T> {
    /// The next item; `None` when the node is closed. Cancel-safe.
    pub async fn recv(&mut self) -> Option<T> {
        self.rx.recv().await.map(|(item, _room)| item)
    }

    /// The next item, if there is one.
    pub fn try_recv(&mut self) -> Option<T> {
        self.rx.try_recv().ok().map(|(item, _room)| item)
    }

    /// As [`Inbox::recv`], for a thread outside the runtime.
    pub fn blocking_recv(&mut self) -> Option<T> {
        self.rx.blocking_recv().map(|(item, _room)| item)
    }

    /// Poll form of [`Inbox::recv`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        Poll::Ready(ready!(self.rx.poll_recv(cx)).map(|(item, _room)| item))
    }

    /// Items that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rx.len()
    }

    /// True when nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rx.is_empty()
    }
}

/// Whether a session still delivers. Checked and used under one lock, so that nothing follows its `Down`.
#[derive(Debug)]
pub(crate) struct Alive(Mutex<bool>);

impl Alive {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(true)))
    }

    pub(crate) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// The sending end of an [`Inbox`].
#[derive(Debug)]
pub(crate) struct Outlet<T> {
    tx: mpsc::Sender<(T, Option<OwnedSemaphorePermit>)>,
    room: Arc<Semaphore>,
    room_kib: u32,
}

/// The owner dropped the inbox, or the session is over.
#[derive(Debug)]
pub(crate) struct Ended;

/// Makes an inbox of `frames` items and `bytes` bytes.
pub(crate) fn inbox<T>(frames: usize, bytes: usize) -> (Outlet<T>, Inbox<T>) {
    let (tx, rx) = mpsc::channel(frames);
    let room_kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX >> 4).min(u32::MAX >> 4);
    let room = Arc::new(Semaphore::new(usize::try_from(room_kib).unwrap_or(usize::MAX >> 4)));
    (Outlet { tx, room, room_kib }, Inbox { rx })
}

impl<T> Outlet<T> {
    /// Delivers an item of `bytes` bytes unless its session has ended; waits for room.
    pub(crate) async fn deliver(&self, item: T, bytes: usize, alive: &Alive) -> Result<(), Ended> {
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(self.room_kib);
        let room = match kib {
            0 => None,
            _ => Some(Arc::clone(&self.room).acquire_many_owned(kib).await.map_err(|_closed| Ended)?),
        };
        let slot = self.tx.reserve().await.map_err(|_closed| Ended)?;
        let alive = alive.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !*alive {
            return Err(Ended);
        }
        slot.send((item, room));
        Ok(())
    }

    /// Delivers news; waits for room. Nobody listens any more once the owner is gone, which is no error.
    pub(crate) async fn tell(&self, item: T) {
        if self.tx.send((item, None)).await.is_err() {
            tracing::trace!("the owner of the node has dropped its events");
        }
    }

    /// Delivers news that may be lost when there is no room.
    pub(crate) fn mention(&self, item: T) {
        if self.tx.try_send((item, None)).is_err() {
            tracing::trace!("no room for an event that may be lost");
        }
    }
}
