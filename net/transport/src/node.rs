//! The node: one endpoint, its peers, and the handle with which its owner sends.

use crate::{
    AnswerControl, BindError, ClassStats, Event, Identity, Inbound, Inbox, NodeRole, PeerId, SendError, Subject,
    TransportConfig,
    answer::Answers,
    close,
    config::FIRST_WINDOW_BYTES,
    event::{Outlet, inbox},
    exports::ExportServer,
    identity::Stamps,
    incoming::{Door, IncomingStats},
    link::Queued,
    open_direct::{DirectConnections, OpenDirect, Opened},
    peer::Peer,
    pins::Pins,
};
use bytes::Bytes;
use futures::future::join_all;
use lagoon_protocol::{BulkFrame, PartialsFrame, version_refusal};
use lagoon_wire::{Class, Frame, FrameReader, Preface, VERSION_MAX, VERSION_MIN, encode, encode_preface};
use quinn::{ClientConfig, Connection, Endpoint, RecvStream, ServerConfig, VarInt};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, time::Instant};

/// Peers by handle and by address.
#[derive(Debug, Default)]
struct Peers {
    by_id: BTreeMap<PeerId, Arc<Peer>>,
    by_addr: BTreeMap<SocketAddr, PeerId>,
    next: u64,
}

impl Peers {
    fn at(&self, addr: SocketAddr) -> Option<&Arc<Peer>> {
        self.by_addr.get(&addr).and_then(|id| self.by_id.get(id))
    }

    /// A new peer, which is the one at `addr` from now on. `None` when there are too many busy ones.
    fn add(&mut self, addr: SocketAddr, peers_max: usize) -> Option<Arc<Peer>> {
        if self.by_id.len() >= peers_max {
            let idle = self.by_id.values().find(|peer| peer.is_idle())?.id;
            self.by_id.remove(&idle);
            self.by_addr.retain(|_, id| *id != idle);
        }
        self.next = self.next.saturating_add(1);
        let peer = Peer::new(PeerId(self.next), addr);
        self.by_id.insert(peer.id, Arc::clone(&peer));
        self.by_addr.insert(addr, peer.id);
        Some(peer)
    }
}

/// QUIC configurations for paths on this machine and off it.
#[derive(Debug)]
struct Paths<T> {
    loopback: T,
    network: T,
}

/// How handshakes are made now: of the identity that was loaded last.
#[derive(Debug)]
struct Tls {
    identity: Identity,
    clients: Paths<ClientConfig>,
    servers: Paths<Arc<ServerConfig>>,
}

impl Tls {
    fn new(identity: Identity, config: &TransportConfig) -> Result<Self, BindError> {
        let (server_tls, client_tls) = (identity.server_tls()?, identity.client_tls()?);
        let server = |path: SocketAddr| -> Result<Arc<ServerConfig>, BindError> {
            let mut server = ServerConfig::with_crypto(Arc::clone(&server_tls) as _);
            server.transport_config(Arc::new(config.quic_with(path, FIRST_WINDOW_BYTES)?));
            Ok(Arc::new(server))
        };
        let client = |path: SocketAddr| -> Result<ClientConfig, BindError> {
            let mut client = ClientConfig::new(Arc::clone(&client_tls) as _);
            client.transport_config(Arc::new(config.quic_with(path, FIRST_WINDOW_BYTES)?));
            Ok(client)
        };
        let (near, far) = (SocketAddr::from(([127, 0, 0, 1], 0)), SocketAddr::from(([192, 0, 2, 1], 0)));
        Ok(Self {
            clients: Paths { loopback: client(near)?, network: client(far)? },
            servers: Paths { loopback: server(near)?, network: server(far)? },
            identity,
        })
    }
}

/// State shared by the node's tasks.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: TransportConfig,
    pub(crate) endpoint: Endpoint,
    pub(crate) runtime: Handle,
    pub(crate) incarnation: u64,
    pub(crate) events: Outlet<Event>,
    pub(crate) partials: Outlet<Inbound<PartialsFrame>>,
    pub(crate) bulk: Outlet<Inbound<BulkFrame>>,
    announced: SocketAddr,
    tls: RwLock<Tls>,
    peers: RwLock<Peers>,
    numbers: AtomicU64,
    closed: AtomicBool,
    pub(crate) answers: Answers,
    pub(crate) direct: RwLock<Option<Arc<ExportServer>>>,
    pub(crate) direct_connections: Arc<DirectConnections>,
    pub(crate) pins: Arc<Pins>,
    pub(crate) door: Arc<Door>,
}

/// A node and the inboxes of its received frames and events.
#[derive(Debug)]
pub struct Bound {
    pub node: Node,
    /// Control messages and the life of peers. Poll it before the others.
    pub events: Inbox<Event>,
    pub partials: Inbox<Inbound<PartialsFrame>>,
    pub bulk: Inbox<Inbound<BulkFrame>>,
}

/// The handle of a node. Clones share it; when the last one is dropped, the node closes abruptly ([`Node::close`] does
/// so in order).
#[derive(Clone, Debug)]
pub struct Node {
    inner: Arc<Guard>,
}

#[derive(Debug)]
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.shut(b"the node was dropped");
    }
}

impl Bound {
    /// Returns the node and discards every frame that peers send in sessions: for an endpoint that serves direct connections
    /// only. Sessions begin and end as usual. Call it within a tokio runtime.
    pub fn into_node(self) -> Node {
        let Self { node, mut events, mut partials, mut bulk } = self;
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    Some(_) = events.recv() => {}
                    Some(_) = partials.recv() => {}
                    Some(_) = bulk.recv() => {}
                    // The node was dropped.
                    else => return,
                }
            }
        });
        node
    }
}

impl Node {
    /// Opens an endpoint on `addr` that accepts peers of `identity`'s cluster. Call it within a tokio runtime.
    pub fn bind(addr: SocketAddr, identity: &Identity, config: TransportConfig) -> Result<Bound, BindError> {
        config.check()?;
        let stamps = identity.stamps();
        let tls = Tls::new(identity.clone(), &config)?;
        let endpoint = config.endpoint(addr, Some(ServerConfig::clone(&tls.servers.network)))?;
        let local = endpoint.local_addr().map_err(|source| BindError::Socket { addr, source })?;
        let (events_in, events) = inbox(config.inbox_frames_max, config.inbox_bytes_max);
        let (partials_in, partials) = inbox(config.inbox_frames_max, config.inbox_bytes_max);
        let (bulk_in, bulk) = inbox(config.inbox_frames_max, config.inbox_bytes_max);
        let shared = Arc::new(Shared {
            announced: config.advertise.unwrap_or(local),
            tls: RwLock::new(tls),
            runtime: Handle::current(),
            incarnation: rand::random(),
            events: events_in,
            partials: partials_in,
            bulk: bulk_in,
            peers: RwLock::default(),
            numbers: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            answers: Answers::default(),
            direct: RwLock::default(),
            direct_connections: Arc::default(),
            pins: Arc::default(),
            door: Arc::default(),
            endpoint,
            config,
        });
        shared.runtime.spawn(Arc::clone(&shared).accept_all());
        if !stamps.is_empty() {
            shared.runtime.spawn(reload_all(Arc::downgrade(&shared), stamps));
        }
        Ok(Bound { node: Self { inner: Arc::new(Guard(shared)) }, events, partials, bulk })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.0
    }

    /// Whom this node's certificate is for, as loaded last: roles and validity may change while it runs, node and key do not.
    #[must_use]
    pub fn subject(&self) -> Subject {
        self.shared().identity().subject().clone()
    }

    /// Counters of incoming connections by outcome.
    #[must_use]
    pub fn incoming(&self) -> IncomingStats {
        self.shared().door.stats()
    }

    /// The address on which this node accepts.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        // The endpoint's socket was asked when it was bound; a failure now could only be ours.
        self.shared().endpoint.local_addr().unwrap_or(self.shared().announced)
    }

    /// Random per node: how peers tell a restart.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shared().incarnation
    }

    /// Names the process that accepts at `addr`, connects `classes` now and keeps them connected; other classes are
    /// connected by the first frame sent. Idempotent. `None` when the node remembers too many busy peers.
    pub fn connect(&self, addr: SocketAddr, classes: &[Class]) -> Option<PeerId> {
        Some(self.keep_connected(&self.shared().peer_at(addr)?, classes))
    }

    /// As [`Node::connect`], for a peer whose certificate must have `role`, whichever side dials. A peer that was known by `addr`
    /// before stays a peer of its own.
    pub fn connect_role(&self, addr: SocketAddr, classes: &[Class], role: NodeRole) -> Option<PeerId> {
        Some(self.keep_connected(&self.shared().peer_of_role(addr, role)?, classes))
    }

    fn keep_connected(&self, peer: &Arc<Peer>, classes: &[Class]) -> PeerId {
        for class in classes {
            peer.link(*class).want(true);
        }
        self.shared().ensure_dials(peer);
        peer.id
    }

    /// From now on `answer` is asked about every control message before it goes to the inbox; `None` ends that.
    pub fn answer_control(&self, answer: Option<AnswerControl>) {
        self.shared().answers.set(answer);
    }

    /// Serves direct connections from the exports of `server` from now on; `None` refuses them.
    pub fn serve_direct(&self, server: Option<Arc<ExportServer>>) {
        *self.shared().direct.write().unwrap_or_else(PoisonError::into_inner) = server;
    }

    /// Stops keeping a peer connected. A session that exists goes on until it ends.
    pub fn release(&self, peer: PeerId) {
        if let Some(peer) = self.shared().peer(peer) {
            Class::ALL.iter().for_each(|class| peer.link(*class).want(false));
        }
    }

    /// Sends a frame without waiting. On success it is queued or handed to QUIC; [`SendError::Full`] is back-pressure.
    pub fn try_send(&self, peer: PeerId, frame: &Frame) -> Result<(), SendError> {
        let shared = self.shared();
        if shared.is_closed() {
            return Err(SendError::Closed);
        }
        let peer = shared.peer(peer).ok_or(SendError::UnknownPeer)?;
        let class = frame.class();
        if peer.link(class).push(encode(frame)?, &shared.config)? == Queued::NeedsDial {
            shared.spawn_dial(&peer, class);
        }
        Ok(())
    }

    /// As [`Node::try_send`], but waits for room in the queue until `deadline` has passed.
    pub async fn send(&self, peer: PeerId, frame: &Frame, deadline: Duration) -> Result<(), SendError> {
        let until = Instant::now().checked_add(deadline).ok_or(SendError::Deadline)?;
        loop {
            match self.try_send(peer, frame) {
                Err(SendError::Full) => {}
                done => return done,
            }
            let peer = self.shared().peer(peer).ok_or(SendError::UnknownPeer)?;
            let bytes = encode(frame)?.len();
            let room = peer.link(frame.class()).wait_for_room(&self.shared().config, bytes);
            tokio::time::timeout_at(until, room).await.map_err(|_elapsed| SendError::Deadline)?;
        }
    }

    /// Round trip to a connected peer, as QUIC estimates it.
    #[must_use]
    pub fn rtt(&self, peer: PeerId) -> Option<Duration> {
        self.shared().peer(peer)?.rtt()
    }

    /// Whether this node has dialed the peer at `addr` in the present session: then it is there, and does not only announce the
    /// address.
    #[must_use]
    pub fn is_reached(&self, peer: PeerId, addr: SocketAddr) -> bool {
        self.shared().peer(peer).is_some_and(|peer| peer.addr == addr && peer.reached.load(Relaxed))
    }

    /// What was sent to and received from a peer in one class, over all its sessions.
    #[must_use]
    pub fn stats(&self, peer: PeerId, class: Class) -> Option<ClassStats> {
        Some(self.shared().peer(peer)?.link(class).counters.snapshot())
    }

    /// The address that a peer was dialed at, or announced.
    #[must_use]
    pub fn addr(&self, peer: PeerId) -> Option<SocketAddr> {
        Some(self.shared().peer(peer)?.addr)
    }

    /// Closes in order: no new frames, those that wait for a connected peer are sent and read by it within `deadline`,
    /// then every connection is closed. Frames for peers that are not connected are dropped.
    pub async fn close(&self, deadline: Duration) {
        let shared = self.shared();
        let peers = shared.all_peers();
        peers.iter().for_each(|peer| Class::ALL.iter().for_each(|class| peer.link(*class).close()));
        let flush = async {
            for peer in &peers {
                // A connection that the peer knows of and we do not would end the session when we give it up.
                while peer.session.lock().await.is_growing() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            shared.closed.store(true, Relaxed);
            for peer in &peers {
                for class in Class::ALL {
                    let link = peer.link(class);
                    while link.is_live() && !link.is_drained() {
                        link.wait_for_progress().await;
                    }
                    link.finish();
                }
            }
            for peer in &peers {
                peer.wait_for_end().await;
            }
        };
        if tokio::time::timeout(deadline, flush).await.is_err() {
            tracing::warn!("closing with frames that were not delivered in time");
        }
        shared.shut(b"bye");
        drop(tokio::time::timeout(Duration::from_millis(500), shared.endpoint.wait_idle()).await);
    }
}

impl Shared {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    fn shut(&self, reason: &[u8]) {
        self.closed.store(true, Relaxed);
        for peer in self.all_peers() {
            Class::ALL.iter().for_each(|class| peer.link(*class).close());
        }
        self.endpoint.close(VarInt::from_u32(close::BYE), reason);
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Relaxed)
    }

    fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    fn all_peers(&self) -> Vec<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).by_id.values().cloned().collect()
    }

    /// The peer that accepts at `addr`, remembered from now on. `None` when there are too many busy ones.
    pub(crate) fn peer_at(&self, addr: SocketAddr) -> Option<Arc<Peer>> {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        match peers.at(addr) {
            Some(peer) => Some(Arc::clone(peer)),
            None => peers.add(addr, self.config.peers_max),
        }
    }

    /// As [`Shared::peer_at`], of a peer that must have `role`.
    fn peer_of_role(&self, addr: SocketAddr, role: NodeRole) -> Option<Arc<Peer>> {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.at(addr).filter(|peer| peer.has_role_required()) {
            return Some(Arc::clone(peer));
        }
        let peer = peers.add(addr, self.config.peers_max)?;
        peer.require(role);
        Some(peer)
    }

    /// Remembers that `peer`, which was let in, announces `addr`, while its session lasts. False when that address belongs to
    /// another peer; it gives way to a peer of which a role is required.
    pub(crate) fn alias(&self, addr: SocketAddr, peer: &Peer) -> bool {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        let holder = peers.at(addr).filter(|holder| holder.id != peer.id);
        let free = holder.is_none_or(|holder| peer.has_role_required() && !holder.has_role_required());
        if free {
            peers.by_addr.insert(addr, peer.id);
        }
        free
    }

    /// Forgets the addresses that a peer announced.
    pub(crate) fn forget_aliases(&self, peer: &Peer) {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        peers.by_addr.retain(|addr, id| *id != peer.id || *addr == peer.addr);
    }

    pub(crate) fn client_config(&self, remote: SocketAddr) -> ClientConfig {
        let tls = self.tls.read().unwrap_or_else(PoisonError::into_inner);
        let path = if remote.ip().is_loopback() { &tls.clients.loopback } else { &tls.clients.network };
        path.clone()
    }

    pub(crate) fn server_config(&self, remote: SocketAddr) -> Arc<ServerConfig> {
        let tls = self.tls.read().unwrap_or_else(PoisonError::into_inner);
        let path = if remote.ip().is_loopback() { &tls.servers.loopback } else { &tls.servers.network };
        Arc::clone(path)
    }

    pub(crate) fn identity(&self) -> Identity {
        self.tls.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    pub(crate) fn is_revoked(&self, subject: &Subject) -> bool {
        self.tls.read().unwrap_or_else(PoisonError::into_inner).identity.is_revoked(subject)
    }

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
        let widened = || self.pins.shares(subject, &self.config).widen(connection, window);
        let (max, numbered) = (self.config.direct_node_max, (self.next_number(), connection));
        let entered = self.direct_connections.enter((subject, opened), max, numbered, widened);
        let entry = entered.map_err(|reason| (close::LIMIT, reason))?;
        // After it was entered: a list that is loaded from here on finds it.
        if self.is_revoked(subject) {
            return Err((close::IDENTITY, format!("the certificate of node {:?} is revoked", subject.node)));
        }
        Ok(entry)
    }

    /// Handshakes from now on are made with this identity. Sessions and direct connections go on, but those with peers whose
    /// certificates it revokes.
    async fn set_identity(self: &Arc<Self>, identity: Identity) -> Result<(), BindError> {
        let tls = Tls::new(identity.clone(), &self.config)?;
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = tls;
        self.direct_connections.cut(|subject| identity.is_revoked(subject));
        // At one time: each waits for room in the inbox when it has closed its connections.
        let ends = self.all_peers().into_iter().map(|peer| {
            let identity = &identity;
            async move {
                let mut session = peer.session.lock().await;
                if session.subject.as_ref().is_some_and(|subject| identity.is_revoked(subject)) {
                    tracing::warn!(peer = %peer.addr, "a session ends: the peer's certificate is revoked");
                    self.end_session(&peer, &mut session, "the peer's certificate is revoked".to_owned()).await;
                }
            }
        });
        join_all(ends).await;
        Ok(())
    }

    /// Our preface, ready to be written.
    pub(crate) fn preface(&self, class: Class, generation: u64) -> Result<[Bytes; 1], String> {
        self.preface_of(class.code(), generation)
    }

    /// As [`Shared::preface`], by the class's code.
    pub(crate) fn preface_of(&self, class: u8, generation: u64) -> Result<[Bytes; 1], String> {
        let preface = Preface {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            incarnation: self.incarnation,
            generation,
            listen_addr: self.announced.to_string(),
            class: u32::from(class),
        };
        encode_preface(&preface).map(|encoded| [encoded.head]).map_err(|error| error.to_string())
    }

    /// Checks a peer's preface; gives the address on which it accepts.
    pub(crate) fn check_preface(
        &self,
        preface: &Preface,
        connection: &Connection,
        class: u8,
    ) -> Result<SocketAddr, String> {
        let versions = (preface.version_min, preface.version_max);
        if let Some(refusal) = version_refusal(versions, "the peer", "this process") {
            return Err(refusal);
        }
        if preface.class != u32::from(class) {
            return Err(format!("the preface names class {} on a connection of class {class}", preface.class));
        }
        let addr: SocketAddr = preface
            .listen_addr
            .parse()
            .map_err(|_not_an_address| format!("the preface's address {:?} is none", preface.listen_addr))?;
        let ip = if addr.ip().is_unspecified() { connection.remote_address().ip().to_canonical() } else { addr.ip() };
        Ok(SocketAddr::new(ip, addr.port()))
    }
}

/// How often an identity's files are looked at.
const RELOAD_EVERY: Duration = Duration::from_secs(2);

/// Reloads the identity when its files change, until the node is dropped. Invalid files are logged and change nothing.
async fn reload_all(shared: Weak<Shared>, mut seen: Stamps) {
    loop {
        tokio::time::sleep(RELOAD_EVERY).await;
        let Some(shared) = shared.upgrade().filter(|shared| !shared.is_closed()) else { return };
        let identity = shared.identity();
        let looked = tokio::task::spawn_blocking(move || {
            let loaded = identity.reload(&mut seen);
            (loaded.map(|loaded| identity.renewed(loaded?)), seen)
        });
        let Ok((loaded, stamps)) = looked.await else { return };
        seen = stamps;
        let Some(loaded) = loaded else { continue };
        let result = match loaded {
            Ok(identity) => shared.set_identity(identity).await,
            Err(error) => Err(error.into()),
        };
        match result {
            Ok(()) => tracing::info!("the node's certificate files were reloaded"),
            Err(error) => tracing::warn!(
                %error,
                "the node's new certificate cannot be used; the one before is still in use\n\
                 hint: write certificate and key, then look with `lagoon certs show`"
            ),
        }
    }
}

/// Reads the preface that a stream starts with; gives it and the bytes behind it.
pub(crate) async fn read_preface(recv: &mut RecvStream) -> Result<(Preface, Bytes), String> {
    let mut frames = FrameReader::new();
    loop {
        let chunk = recv.read_chunk(usize::MAX, true).await.map_err(|error| format!("reading a preface: {error}"))?;
        let mut bytes = chunk.ok_or("the stream ended before its preface")?.bytes;
        match frames.next_preface(&mut bytes) {
            Ok(Some(preface)) => return Ok((preface, bytes)),
            Ok(None) => {}
            Err(error) => return Err(format!("a bad preface: {error}")),
        }
    }
}
