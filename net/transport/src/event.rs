//! Events that a node reports to its owner, and the bounded inboxes that carry them.

use crate::{Subject, TransportConfig, config::FIRST_WINDOW_BYTES};
use lagoon_protocol::Control;
use lagoon_wire::Class;
use quinn::{Connection, VarInt};
use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};

/// A node's handle of a peer; stable over reconnects and restarts of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer{}", self.0)
    }
}

/// Control messages and the life of peers. `session` numbers the time between `Up` and `Down` of a peer, uniquely in
/// this node: data frames carry it too, so that leftovers of an ended session are recognised.
#[derive(Debug)]
pub enum Event {
    /// A session begins. The peer accepts at `addr`; `incarnation` is random per process; `subject` is whom its certificate is
    /// for, and does not change within the session.
    Up { peer: PeerId, session: u64, addr: SocketAddr, incarnation: u64, subject: Subject },
    /// The session is over. Frames sent in it may or may not have been delivered; none will be any more.
    Down { peer: PeerId, session: u64, reason: String },
    /// The peer could not be reached; reported once until it is. Attempts go on while there is something to send.
    Unreachable { peer: PeerId, addr: SocketAddr, reason: String },
    /// Frames waited for a connection for longer than the deadline and were dropped.
    Expired { peer: PeerId, class: Class, frames: usize },
    /// An incoming connection was refused (no certificate, another CA, a bad preface). Best effort: may be dropped.
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
    rx: mpsc::Receiver<(T, Room)>,
}

/// Bytes that a queued item holds of the inbox's budget and of its node's share.
#[derive(Debug, Default)]
struct Room {
    _held: Option<OwnedSemaphorePermit>,
    _charge: Option<Charge>,
}

/// A frame's part of its node's share of a class, from its first received byte until it has left the inbox. A node keeps its shares
/// as long as anything is charged to them, also across a reconnect.
#[derive(Debug)]
pub(crate) struct Charge {
    _held: [Option<OwnedSemaphorePermit>; 2],
    _shares: Arc<Shares>,
}

/// Budgets of one node (certificate) here, over all its addresses: frames of each class that are queued or partly received, so
/// that one node can neither fill an inbox nor delay others' frames; unread bytes of its connections; and bytes of frames that
/// wait to be sent to it.
#[derive(Debug)]
pub(crate) struct Shares {
    classes: [Share; 3],
    /// Bytes of windows that are not given to a connection.
    unread: Mutex<u32>,
    /// Bytes of frames that are queued for its connections.
    queued: AtomicUsize,
    queued_max: usize,
    /// Notified when less is queued.
    queue_room: Notify,
}

/// Receive window of a connection beyond [`FIRST_WINDOW_BYTES`]; returned to its node's share on drop.
#[derive(Debug)]
pub(crate) struct Window {
    shares: Arc<Shares>,
    bytes: u32,
}

impl Drop for Window {
    fn drop(&mut self) {
        let mut unread = self.shares.lock_unread();
        *unread = unread.saturating_add(self.bytes);
    }
}

/// Of one inbox.
#[derive(Debug)]
struct Share {
    frames: Arc<Semaphore>,
    kib: Arc<Semaphore>,
    kib_max: u32,
}

/// Nodes that there is room for when each uses its share.
pub(crate) const SHARES: usize = 4;

impl Shares {
    pub(crate) fn new(config: &TransportConfig) -> Self {
        let classes = Class::ALL.map(|_| Share::new(config.inbox_frames_max, config.inbox_bytes_max));
        Self {
            classes,
            unread: Mutex::new(config.node_window_bytes),
            queued: AtomicUsize::new(0),
            queued_max: config.node_queue_bytes_max,
            queue_room: Notify::new(),
        }
    }

    /// Whether a frame of so many bytes may be queued for the node: one frame always may. Links that ask at once may exceed
    /// the limit by a frame each.
    pub(crate) fn has_queue_room(&self, bytes: usize) -> bool {
        let queued = self.queued.load(Relaxed);
        queued == 0 || queued.saturating_add(bytes) <= self.queued_max
    }

    pub(crate) fn queued(&self, bytes: usize) {
        self.queued.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn unqueued(&self, bytes: usize) {
        self.queued.fetch_sub(bytes, Relaxed);
        self.queue_room.notify_waiters();
    }

    /// Waits until less is queued than when it was first polled.
    pub(crate) async fn queue_room(&self) {
        self.queue_room.notified().await;
    }

    fn lock_unread(&self) -> MutexGuard<'_, u32> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Widens a connection's receive window while the result lives: to `wanted` bytes, or by an eighth of the node's remaining
    /// share if that is less.
    pub(crate) fn widen(self: &Arc<Self>, connection: &Connection, wanted: u32) -> Window {
        let mut unread = self.lock_unread();
        let bytes = wanted.saturating_sub(FIRST_WINDOW_BYTES).min(*unread / 8);
        *unread = unread.saturating_sub(bytes);
        drop(unread);
        connection.set_receive_window(VarInt::from_u32(FIRST_WINDOW_BYTES.saturating_add(bytes)));
        Window { shares: Arc::clone(self), bytes }
    }

    /// Waits until there is room for a frame of so many decoded bytes.
    pub(crate) async fn charge(self: &Arc<Self>, class: Class, bytes: usize) -> Result<Charge, Ended> {
        let share = self.of(class);
        let frame = Arc::clone(&share.frames).acquire_owned().await.map_err(|_closed| Ended)?;
        let _held = [Some(frame), take(&share.kib, kib(bytes), share.kib_max).await?];
        Ok(Charge { _held, _shares: Arc::clone(self) })
    }

    fn of(&self, class: Class) -> &Share {
        let [control, partials, bulk] = &self.classes;
        match class {
            Class::Control => control,
            Class::Partials => partials,
            Class::Bulk => bulk,
        }
    }
}

impl Share {
    /// Of an inbox of so many items and bytes.
    fn new(frames: usize, bytes: usize) -> Self {
        let kib_max = kib(bytes / SHARES).max(1);
        Self {
            frames: Arc::new(Semaphore::new((frames / SHARES).max(1))),
            kib: Arc::new(Semaphore::new(usize::try_from(kib_max).unwrap_or(usize::MAX >> 4))),
            kib_max,
        }
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes >> 10).unwrap_or(u32::MAX >> 4).min(u32::MAX >> 4)
}

/// So many KiB of `room`, at most all of it.
async fn take(room: &Arc<Semaphore>, wanted: u32, most: u32) -> Result<Option<OwnedSemaphorePermit>, Ended> {
    match wanted.min(most) {
        0 => Ok(None),
        some => Arc::clone(room).acquire_many_owned(some).await.map(Some).map_err(|_closed| Ended),
    }
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
    tx: mpsc::Sender<(T, Room)>,
    room: Arc<Semaphore>,
    room_kib: u32,
}

/// Room for one event in the inbox; `None` once the owner has dropped it, which is no error.
#[derive(Debug)]
pub(crate) struct Reserved<'a, T>(Option<mpsc::Permit<'a, (T, Room)>>);

impl<T> Reserved<'_, T> {
    pub(crate) fn send(self, item: T) {
        match self.0 {
            Some(permit) => permit.send((item, Room::default())),
            None => tracing::trace!("the owner of the node has dropped its events"),
        }
    }
}

/// The owner dropped the inbox, or the session is over.
#[derive(Debug)]
pub(crate) struct Ended;

/// Makes an inbox of `frames` items and `bytes` bytes.
pub(crate) fn inbox<T>(frames: usize, bytes: usize) -> (Outlet<T>, Inbox<T>) {
    let (tx, rx) = mpsc::channel(frames);
    let room_kib = kib(bytes);
    let room = Arc::new(Semaphore::new(usize::try_from(room_kib).unwrap_or(usize::MAX >> 4)));
    (Outlet { tx, room, room_kib }, Inbox { rx })
}

impl<T> Outlet<T> {
    /// Delivers an item of `bytes` decoded bytes, which is charged to its node, unless its session has ended; waits for room.
    pub(crate) async fn deliver(&self, item: T, bytes: usize, alive: &Alive, charge: Charge) -> Result<(), Ended> {
        let room = Room { _held: take(&self.room, kib(bytes), self.room_kib).await?, _charge: Some(charge) };
        let slot = self.tx.reserve().await.map_err(|_closed| Ended)?;
        let alive = alive.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !*alive {
            return Err(Ended);
        }
        slot.send((item, room));
        Ok(())
    }

    /// Delivers an event; waits for room.
    pub(crate) async fn report(&self, item: T) {
        self.reserve().await.send(item);
    }

    /// Room for an event that reports a change of state. Cancellation-safe: the caller changes the state and sends without an
    /// await in between.
    pub(crate) async fn reserve(&self) -> Reserved<'_, T> {
        Reserved(self.tx.reserve().await.ok())
    }

    /// Delivers news that may be lost when there is no room.
    pub(crate) fn mention(&self, item: T) {
        if self.tx.try_send((item, Room::default())).is_err() {
            tracing::trace!("no room for an event that may be lost");
        }
    }
}
