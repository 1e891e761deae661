//! A peer: one other process by its address, with a link for each class and the session that spans them.

use crate::{NodeRole, PeerId, Subject, event::Alive, incoming::Place, link::Link, pins::Pin};
use lagoon_wire::Class;
use quinn::Connection;
use std::{
    net::SocketAddr,
    pin::pin,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// The process that a session is with (incarnation), and the number of sessions with us that it has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) incarnation: u64,
    pub(crate) generation: u64,
}

/// A connection that carries a class.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Unique in this node: tells this connection from later ones.
    pub(crate) key: u64,
    /// We dialed it.
    pub(crate) dialed: bool,
    pub(crate) connection: Connection,
    /// The remote has ended its direction, and all that it sent is in our inboxes.
    pub(crate) finished: bool,
    /// Held while the connection is.
    pub(crate) _place: Option<Place>,
}

/// The session's state. Held under an async lock, so that events leave in the order of the changes they report.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Sessions with an unchanged remote that we have ended. Prefaces carry it, so that the remote notices the end
    /// even if it missed the closing of the connections.
    pub(crate) generation: u64,
    pub(crate) remote: Option<Remote>,
    /// Whom the session is with, while it is up.
    pub(crate) subject: Option<Subject>,
    /// Held while it is up.
    pub(crate) pin: Option<Pin>,
    pub(crate) slots: [Option<Slot>; 3],
    /// We are connecting, by class.
    pub(crate) attempting: [bool; 3],
    /// Number of the current session, as in [`crate::Event::Up`].
    pub(crate) number: u64,
    pub(crate) alive: Option<Arc<Alive>>,
    pub(crate) since: Option<Instant>,
    /// Short sessions and failed attempts in a row.
    pub(crate) failures: u32,
    /// [`crate::Event::Unreachable`] was emitted since the last session.
    pub(crate) unreachable_reported: bool,
}

impl Session {
    pub(crate) fn is_up(&self) -> bool {
        self.slots.iter().any(Option::is_some)
    }

    /// Whether the remote has ended its direction of every connection.
    pub(crate) fn is_finished(&self) -> bool {
        self.slots.iter().flatten().all(|slot| slot.finished)
    }

    /// A connection of the running session is being made by us.
    pub(crate) fn is_growing(&self) -> bool {
        self.is_up() && self.attempting.contains(&true)
    }

    pub(crate) fn slot(&self, class: Class) -> Option<&Slot> {
        self.slots.get(class.index()).and_then(Option::as_ref)
    }

    pub(crate) fn is_attempting(&self, class: Class) -> bool {
        self.attempting.get(class.index()).copied().unwrap_or(false)
    }

    pub(crate) fn set_attempting(&mut self, class: Class, value: bool) {
        if let Some(attempting) = self.attempting.get_mut(class.index()) {
            *attempting = value;
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) addr: SocketAddr,
    pub(crate) session: tokio::sync::Mutex<Session>,
    /// Notified when the session is over, and when the remote has ended its direction of a connection.
    pub(crate) ending: Notify,
    links: [Link; 3],
    /// Role that this peer's certificate must have.
    required: OnceLock<NodeRole>,
    /// A connection of the session was dialed by us: the peer is at `addr`, and does not only say so.
    pub(crate) reached: AtomicBool,
    /// For getters that must not wait for the session's lock.
    pub(crate) rtt_source: std::sync::Mutex<Option<Connection>>,
}

impl Peer {
    pub(crate) fn new(id: PeerId, addr: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            id,
            addr,
            session: tokio::sync::Mutex::default(),
            ending: Notify::new(),
            links: Class::ALL.map(Link::new),
            required: OnceLock::new(),
            reached: AtomicBool::new(false),
            rtt_source: std::sync::Mutex::default(),
        })
    }

    /// From now on only certificates for `role` are let in.
    pub(crate) fn require(&self, role: NodeRole) {
        let first = self.required.get_or_init(|| role);
        debug_assert_eq!(*first, role, "a peer is wanted for one thing");
    }

    pub(crate) fn has_role_required(&self) -> bool {
        self.required.get().is_some()
    }

    /// The role that `subject` lacks to be this peer.
    pub(crate) fn lacks(&self, subject: &Subject) -> Option<NodeRole> {
        self.required.get().copied().filter(|role| !subject.roles.has(*role))
    }

    pub(crate) fn link(&self, class: Class) -> &Link {
        let [control, partials, bulk] = &self.links;
        match class {
            Class::Control => control,
            Class::Partials => partials,
            Class::Bulk => bulk,
        }
    }

    /// Waits until the remote has read all that we sent and has closed the connections, or leaves as well.
    pub(crate) async fn wait_for_end(&self) {
        let connections: Vec<Connection> =
            self.session.lock().await.slots.iter().flatten().map(|slot| slot.connection.clone()).collect();
        // Our reader may be blocked by a full inbox whose owner has stopped reading, and would not notice.
        let closed = futures::future::join_all(connections.iter().map(Connection::closed));
        let reported = async {
            loop {
                let mut reported = pin!(self.ending.notified());
                reported.as_mut().enable();
                let session = self.session.lock().await;
                if !session.is_up() || session.is_finished() {
                    return;
                }
                drop(session);
                reported.await;
            }
        };
        tokio::select! {
            _ = closed => {}
            () = reported => {}
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.links.iter().all(Link::is_idle)
    }

    /// Round trip of the path, as QUIC estimates it.
    pub(crate) fn rtt(&self) -> Option<Duration> {
        let source = self.rtt_source.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        source.as_ref().map(Connection::rtt)
    }
}
