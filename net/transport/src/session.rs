//! Which connection carries a class, and when a session begins and ends.
//!
//! A connection carries frames only once its acceptor has answered the dialer's preface, so settling which of two
//! simultaneous dials stays loses nothing: the dial of the process with the smaller incarnation wins.

use crate::{
    Event, Inbound, SendError, Subject,
    answer::Cached,
    close,
    event::{Alive, Charge, Ended, SHARES, Shares, Window},
    incoming::Place,
    link::Link,
    node::Shared,
    peer::{Peer, Remote, Session, Slot},
};
use bytes::Bytes;
use lagoon_wire::{Class, Frame, FrameReader, encode};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use std::{
    future::poll_fn,
    sync::{Arc, PoisonError, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A session that lasts this long counts as a success: the next dial does not pause.
const STEADY: Duration = Duration::from_secs(2);

/// Both halves of a connection's stream, the preface already read.
#[derive(Debug)]
pub(crate) struct Wires {
    pub(crate) connection: Connection,
    /// Whom the other end's certificate is for.
    pub(crate) subject: Subject,
    pub(crate) send: SendStream,
    pub(crate) recv: RecvStream,
    /// Bytes that arrived behind the preface.
    pub(crate) rest: Bytes,
    /// Its place among its address's connections, if it is an incoming one.
    pub(crate) place: Option<Place>,
}

/// Why an incoming connection does not become this class's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accept,
    /// Our own dial wins, or has won.
    Duplicate,
    /// The dialer has itself ended the session that this connection was for.
    Stale,
}

impl Shared {
    /// Whether `subject` may have a connection of this peer: while a session is up, its address is its holder's, and a node
    /// that has any session is known by the key with which it began. Its certificate may have been revoked since the handshake.
    ///
    /// # Errors
    /// Who has it, or that the certificate is revoked.
    pub(crate) fn may_enter(&self, peer: &Peer, session: &Session, subject: &Subject) -> Result<(), String> {
        if self.is_revoked(subject) {
            return Err(format!("the certificate of node {:?} is revoked", subject.node));
        }
        if let Some(role) = peer.lacks(subject) {
            return Err(format!(
                "a certificate for {} (node {:?}) answers at {}, where a {role} is expected; it is not let in; \
                 hint: `lagoon certs issue DIR NAME --role {role}`",
                subject.roles, subject.node, peer.addr
            ));
        }
        if let Some(holder) = session.subject.as_ref().filter(|holder| session.is_up() && *holder != subject) {
            return Err(format!(
                "the address {} is that of node {:?}, which is connected; this certificate is for node {:?}{}",
                peer.addr,
                holder.node,
                subject.node,
                if holder.node == subject.node { " with another key" } else { "" },
            ));
        }
        // A node has its share of the places for peers, too.
        let sessions_max = (self.config.peers_max / SHARES).max(1);
        self.pins.admits(subject, if session.is_up() { usize::MAX } else { sessions_max })
    }

    /// Decides about an incoming connection.
    pub(crate) fn judge(&self, session: &Session, class: Class, remote: Remote) -> Verdict {
        let known = session.remote.filter(|known| known.incarnation == remote.incarnation);
        if known.is_some_and(|known| remote.generation < known.generation) {
            return Verdict::Stale;
        }
        let ours_lives = session.slot(class).is_some_and(|slot| slot.dialed) && session.remote == Some(remote);
        if self.incarnation < remote.incarnation && (session.is_attempting(class) || ours_lives) {
            return Verdict::Duplicate;
        }
        Verdict::Accept
    }

    /// Ends a session that the new connection contradicts: another process, a new generation, or a class that the
    /// remote considers lost.
    pub(crate) async fn make_way(&self, peer: &Peer, session: &mut Session, class: Class, remote: Remote) {
        if let Some(known) = session.remote.filter(|known| *known != remote) {
            let restarted = known.incarnation != remote.incarnation;
            let reason = if restarted { "the peer's process was replaced" } else { "the peer ended the session" };
            self.end_session(peer, session, reason.to_owned()).await;
        } else if session.slot(class).is_some() {
            self.end_session(peer, session, "the peer connected anew".to_owned()).await;
            session.generation = session.generation.saturating_add(1);
        }
    }

    /// Makes `wires` the connection of `class`; begins a session if there is none.
    pub(crate) async fn adopt(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        session: &mut Session,
        class: Class,
        remote: Remote,
        dialed: bool,
        wires: Wires,
    ) {
        session.remote = Some(remote);
        if !session.is_up() {
            session.number = self.next_number();
            // The pin is the session's once it has a slot: this future may be dropped while it reports the session.
            let pin = self.pins.begin(&wires.subject, &self.config);
            session.subject = Some(wires.subject.clone());
            session.alive = Some(Alive::new());
            session.since = Some(Instant::now());
            session.unreachable_reported = false;
            let (id, number, addr) = (peer.id, session.number, peer.addr);
            let (incarnation, subject) = (remote.incarnation, wires.subject.clone());
            self.events.report(Event::Up { peer: id, session: number, addr, incarnation, subject }).await;
            session.pin = Some(pin);
        }
        let Some(alive) = session.alive.clone() else { return };
        let Some(shares) = session.pin.as_ref().map(|pin| Arc::clone(&pin.shares)) else { return };
        let key = self.next_number();
        let (connection, _place) = (wires.connection.clone(), wires.place);
        let slot = Slot { key, dialed, connection, finished: false, _place };
        if let Some(place) = session.slots.get_mut(class.index()) {
            *place = Some(slot);
        }
        if dialed {
            peer.reached.store(true, Relaxed);
        }
        let prefer = class == Class::Partials;
        let mut source = peer.rtt_source.lock().unwrap_or_else(PoisonError::into_inner);
        if prefer || source.is_none() {
            *source = Some(wires.connection.clone());
        }
        drop(source);
        let subject = wires.subject;
        peer.link(class).attach(key, wires.send, Arc::clone(&shares));
        self.spawn_writer(peer, class, key, wires.connection.clone());
        let _window = shares.widen(&wires.connection, self.config.window_bytes);
        let reader = Reader {
            class,
            session: session.number,
            alive,
            shares,
            charge: None,
            _window,
            recv: wires.recv,
            rest: wires.rest,
            subject,
            cached: Cached::default(),
        };
        self.spawn_reader(peer, key, wires.connection, reader);
    }

    fn spawn_writer(self: &Arc<Self>, peer: &Arc<Peer>, class: Class, key: u64, connection: Connection) {
        let (shared, peer) = (Arc::clone(self), Arc::clone(peer));
        self.runtime.spawn(async move {
            let result = poll_fn(|cx| peer.link(class).poll_writer(key, cx)).await;
            if let Err(error) = result {
                let reason = cause(&connection, format!("writing {class} frames: {error}"));
                shared.lost(&peer, class, key, reason).await;
            }
        });
    }

    fn spawn_reader(self: &Arc<Self>, peer: &Arc<Peer>, key: u64, connection: Connection, reader: Reader) {
        let (shared, peer) = (Arc::clone(self), Arc::clone(peer));
        self.runtime.spawn(async move {
            let class = reader.class;
            let reason = match reader.run(&shared, &peer).await {
                Stop::BadFrame(reason) => {
                    tracing::warn!(peer = %peer.addr, %class, reason, "closing a connection for a bad frame");
                    connection.close(VarInt::from_u32(close::BAD_FRAME), reason.as_bytes());
                    reason
                }
                Stop::Closed(reason) => cause(&connection, reason),
                Stop::Finished if shared.finished(&peer, class, key).await => "the peer left: bye".to_owned(),
                Stop::Finished => {
                    // The peer leaves in order, and its other classes' streams are not read yet: the reader that ends last
                    // closes the connections.
                    let closed = tokio::time::timeout(shared.config.idle_timeout, connection.closed()).await;
                    closed.map_or_else(|_elapsed| "the peer closed the stream".to_owned(), |error| error.to_string())
                }
                Stop::Ended => return,
            };
            shared.lost(&peer, class, key, reason).await;
        });
    }

    /// Records that the peer has ended its direction of a connection and that all of it was read. True when that holds for
    /// every connection: we close them then, which shows the leaving peer that nothing was lost. (QUIC's
    /// acknowledgements do not show it: closing a connection discards bytes that the other side received and did not read.)
    async fn finished(&self, peer: &Peer, class: Class, key: u64) -> bool {
        let mut session = peer.session.lock().await;
        let slot = session.slots.get_mut(class.index()).and_then(Option::as_mut).filter(|slot| slot.key == key);
        let Some(slot) = slot else { return false };
        slot.finished = true;
        peer.ending.notify_waiters();
        // If both sides leave, both have sent all their frames, and neither waits for the other.
        session.is_finished() && !self.is_closed()
    }

    /// Handles the loss of a connection: ends its session, and dials again if a link has frames or keeps its connection.
    pub(crate) async fn lost(self: &Arc<Self>, peer: &Arc<Peer>, class: Class, key: u64, reason: String) {
        let mut session = peer.session.lock().await;
        if session.slot(class).is_none_or(|slot| slot.key != key) {
            return;
        }
        session.generation = session.generation.saturating_add(1);
        self.end_session(peer, &mut session, reason).await;
        drop(session);
        self.ensure_dials(peer);
    }

    /// Closes every connection of the session and reports its end. If this future is dropped while it waits for room in the inbox,
    /// [`Shared::lost`] ends the session: it sees the closed connections.
    pub(crate) async fn end_session(&self, peer: &Peer, session: &mut Session, reason: String) {
        if !session.is_up() {
            return;
        }
        let (code, reported) = match self.is_closed() {
            true => (close::BYE, "bye"),
            false => (close::SESSION_OVER, reason.as_str()),
        };
        for slot in session.slots.iter().flatten() {
            slot.connection.close(VarInt::from_u32(code), reported.as_bytes());
        }
        let down = self.events.reserve().await;
        if let Some(alive) = session.alive.take() {
            alive.end();
        }
        (session.subject, session.pin) = (None, None);
        peer.reached.store(false, Relaxed);
        self.forget_aliases(peer);
        for class in Class::ALL {
            if session.slots.get_mut(class.index()).and_then(Option::take).is_some() {
                peer.link(class).detach();
            }
        }
        *peer.rtt_source.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let steady = session.since.take().is_some_and(|since| since.elapsed() >= STEADY);
        session.failures = if steady { 0 } else { session.failures.saturating_add(1) };
        tracing::debug!(peer = %peer.addr, reason, "a session is over");
        peer.ending.notify_waiters();
        down.send(Event::Down { peer: peer.id, session: session.number, reason });
    }
}

/// A stream's error says only that the connection is gone; the connection knows why.
fn cause(connection: &Connection, otherwise: String) -> String {
    connection.close_reason().map_or(otherwise, |error| error.to_string())
}

/// Why a reader stopped.
enum Stop {
    BadFrame(String),
    Closed(String),
    /// The peer ended the stream between frames.
    Finished,
    /// Another task ended the session, or the inbox was dropped.
    Ended,
}

/// The receiving side of one connection.
struct Reader {
    class: Class,
    session: u64,
    alive: Arc<Alive>,
    /// Of the node's sessions together.
    shares: Arc<Shares>,
    /// Of the frame that is being received, once some of it is kept.
    charge: Option<Charge>,
    _window: Window,
    recv: RecvStream,
    rest: Bytes,
    subject: Subject,
    cached: Cached,
}

/// Sends an answer on the connection on which its question came.
fn reply(shared: &Shared, link: &Link, frame: &Frame) -> Result<(), SendError> {
    link.push(encode(frame)?, &shared.config).map(drop)
}

/// Largest ratio of a decoded control message's memory to its bytes on the wire: an empty entry of a list has two bytes there, and
/// up to 64 in memory.
const CONTROL_EXPANSION: usize = 32;
/// Largest memory of a decoded frame that has `bytes` bytes on the wire.
fn decoded(class: Class, bytes: usize) -> usize {
    match class {
        Class::Control => bytes.saturating_mul(CONTROL_EXPANSION),
        Class::Partials | Class::Bulk => bytes,
    }
}

/// Bytes taken from QUIC at once.
const READ_BYTES_MAX: usize = 1 << 20;

impl Reader {
    async fn run(mut self, shared: &Shared, peer: &Peer) -> Stop {
        let class = self.class;
        let mut frames = FrameReader::new();
        let mut bytes = 0usize;
        loop {
            let before = self.rest.len();
            let next = frames.next_frame(class, &mut self.rest);
            bytes = bytes.saturating_add(before.saturating_sub(self.rest.len()));
            match next {
                Ok(Some(frame)) => {
                    peer.link(class).counters.received(bytes);
                    if self.deliver(shared, peer, frame, bytes).await.is_err() {
                        return Stop::Ended;
                    }
                    bytes = 0;
                    continue;
                }
                Ok(None) => {
                    // Of a frame that exceeds the node's share only the chunk that QUIC handed out last is kept.
                    let announced = frames.announced().filter(|_| self.charge.is_none());
                    if let Some(announced) = announced {
                        let Ok(charge) = self.shares.charge(class, decoded(class, announced)).await else {
                            return Stop::Ended;
                        };
                        self.charge = Some(charge);
                    }
                }
                Err(error) => return Stop::BadFrame(format!("a bad {class} frame: {error}")),
            }
            match self.recv.read_chunk(READ_BYTES_MAX, true).await {
                Ok(Some(chunk)) => self.rest = chunk.bytes,
                Ok(None) if frames.at_boundary() => return Stop::Finished,
                Ok(None) => return Stop::BadFrame(format!("the {class} stream ended within a frame")),
                Err(error) => return Stop::Closed(format!("reading {class} frames: {error}")),
            }
        }
    }

    async fn deliver(&mut self, shared: &Shared, peer: &Peer, frame: Frame, bytes: usize) -> Result<(), Ended> {
        let (link, peer, session) = (peer.link(Class::Control), peer.id, self.session);
        let charge = self.charge.take();
        let bytes = decoded(self.class, bytes);
        let charged = async || match charge {
            Some(charge) => Ok(charge),
            None => self.shares.charge(self.class, bytes).await,
        };
        match frame {
            Frame::Control(message) => {
                if message.body.is_none() {
                    tracing::debug!(%peer, "a control message of a newer version was skipped");
                }
                if let Some(answer) = self.cached.answer(&shared.answers, peer, &self.subject, &message) {
                    // A reply that finds a full queue is dropped: the asker repeats requests that matter.
                    if let Err(error) = reply(shared, link, &Frame::Control(answer)) {
                        tracing::debug!(%peer, %error, "an answer was not sent");
                    }
                    return Ok(());
                }
                shared
                    .events
                    .deliver(Event::Control { peer, session, message }, bytes, &self.alive, charged().await?)
                    .await
            }
            Frame::Partials(frame) => {
                shared.partials.deliver(Inbound { peer, session, frame }, bytes, &self.alive, charged().await?).await
            }
            Frame::Bulk(frame) => {
                shared.bulk.deliver(Inbound { peer, session, frame }, bytes, &self.alive, charged().await?).await
            }
        }
    }
}
