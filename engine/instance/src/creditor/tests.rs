//! What debtors with a valid lease may send, and what becomes of it.

mod relays;

use crate::batch::freeze::tests::config;
use crate::{Effect, Event, Instance, InstanceConfig, PeerKey};
use bytes::Bytes;
use lagoon_protocol::{
    BulkFrame, ControlBody, Hello, LeaseGrant, LeaseRequest, PartialsFrame, RefuseCode, Registered, Route, StepTicket,
    TicketSeq, VERSION_MAX,
};
use lagoon_runner::{Command, RemoteQuery};
use lagoon_types::limits::{
    DATA_FRAME_BYTES_MAX, REMOTE_REQUEST_PEER_BYTES_MAX, REMOTE_REQUEST_PEER_TICKETS_MAX,
    REMOTE_REQUEST_PEER_WAITING_MAX, REMOTE_REQUEST_TICKETS_MAX, REMOTE_REQUEST_WAITING_MAX,
};
use lagoon_types::{AttentionGeometry, DType, Epoch, KvShape, LeaseId, LeaseRun, SeqId, StepId};

const STEP: StepId = StepId(8);

/// An instance that lends to instances 2 and 3, which are behind connections 2 and 3.
struct Scene {
    instance: Instance,
    config: InstanceConfig,
}

impl Scene {
    fn new(config: InstanceConfig) -> Self {
        let mut scene = Self { instance: Instance::new(config.clone()).unwrap(), config };
        let registered = Registered { version: VERSION_MAX, instance: 1, heartbeat_ms: 250, term: 1 };
        scene.on(Event::GManager(ControlBody::Registered(registered)));
        for instance in [2, 3] {
            let peer = PeerKey(instance.into());
            let hello = Hello {
                version_min: VERSION_MAX,
                version_max: VERSION_MAX,
                instance,
                incarnation: 5,
                shape: Some(scene.config.pool_shape()),
                ..Hello::default()
            };
            scene.on(Event::PeerUp { peer });
            scene.on(Event::Control { peer, body: ControlBody::Hello(Box::new(hello)) });
        }
        scene
    }

    fn on(&mut self, event: Event) -> Vec<Effect> {
        self.instance.handle(event, 1_000)
    }

    fn lease(&mut self, peer: u64, blocks: u32) -> (LeaseId, Epoch) {
        let request = LeaseRequest { request: 1, seq: 1, blocks, blocks_min: blocks, ..LeaseRequest::default() };
        let effects = self.on(Event::Control { peer: PeerKey(peer), body: ControlBody::LeaseRequest(request) });
        let grant = effects.into_iter().find_map(|effect| match effect {
            Effect::Control { body: ControlBody::LeaseGrant(grant), .. } => Some(grant),
            _ => None,
        });
        let LeaseGrant { lease, epoch, .. } = grant.expect("there is memory to lend");
        (LeaseId(lease), Epoch(epoch))
    }

    fn partials(&mut self, peer: u64, frame: PartialsFrame) -> Vec<Effect> {
        self.on(Event::Partials { peer: PeerKey(peer), frame })
    }

    /// The step attends to a lease's first token.
    fn ticket(&mut self, peer: u64, lease: (LeaseId, Epoch), rows: u32) -> Vec<Effect> {
        self.ticket_of(peer, STEP, &[lease], rows)
    }

    /// The step attends to these leases' first tokens.
    fn ticket_of(&mut self, peer: u64, step: StepId, leases: &[(LeaseId, Epoch)], rows: u32) -> Vec<Effect> {
        self.routed(peer, step, leases, rows, Route::Direct)
    }

    /// The step attends to these leases' first tokens, by this route.
    fn routed(&mut self, peer: u64, step: StepId, leases: &[(LeaseId, Epoch)], rows: u32, route: Route) -> Vec<Effect> {
        let run = |(at, (lease, epoch)): (u32, &(LeaseId, Epoch))| LeaseRun {
            lease: *lease,
            epoch: *epoch,
            offset: 0,
            len: 1,
            first_pos: at,
        };
        let runs = (0..).zip(leases).map(run).collect();
        let seqs = vec![TicketSeq { seq: SeqId(1), rows, pos0: 10, runs }];
        let ticket = StepTicket { step, deadline_ms: 9_000, dtype: DType::F32, route, seqs };
        self.partials(peer, PartialsFrame::Ticket(ticket))
    }

    fn query(&mut self, peer: u64, rows: u32, queries: &Bytes) -> Vec<Effect> {
        self.partials(peer, PartialsFrame::Query { step: STEP, layer: 0, rows, queries: queries.clone() })
    }

    /// Writes a lease's first token.
    fn write(&mut self, peer: u64, (lease, epoch): (LeaseId, Epoch)) -> Vec<Effect> {
        let kv = Bytes::from(vec![0; self.config.kv.layer_token_bytes()]);
        let frame = BulkFrame::Write { lease, epoch, layer: 0, offset: 0, tokens: 1, kv };
        self.on(Event::Bulk { peer: PeerKey(peer), frame })
    }
}

fn queries(effects: &[Effect]) -> Vec<&RemoteQuery> {
    let mut queries = Vec::new();
    for effect in effects {
        if let Effect::Runner(Command::RemoteQuery(query)) = effect {
            queries.push(query);
        }
    }
    queries
}

/// The codes of steps and reads that are refused.
fn refused(effects: &[Effect]) -> Vec<RefuseCode> {
    let of = |effect: &Effect| match effect {
        Effect::Partials { frame: PartialsFrame::Refused { code, .. }, .. }
        | Effect::Bulk { frame: BulkFrame::Refused { code, .. }, .. } => Some(*code),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

/// The device would be asked for more rows than it was given, and asserts that it is not.
#[test]
fn a_query_that_waits_is_not_of_a_later_ticket_of_its_name() {
    let mut scene = Scene::new(InstanceConfig { lend_blocks_max: 3, ..config() });
    let lease = scene.lease(2, 1);
    let row = scene.config.geometry.q_dim() * DType::F32.size();
    let one = Bytes::from(vec![0; row]);
    scene.ticket(2, lease, 1);
    assert_eq!(queries(&scene.query(2, 1, &one)).len(), 0, "it waits for its KV");
    assert_eq!(refused(&scene.ticket(2, lease, 2)), []);
    let effects = scene.write(2, lease);
    let sizes = |q: &&RemoteQuery| (q.queries.len(), q.seqs.iter().map(|s| s.rows as usize).sum::<usize>() * row);
    assert!(queries(&effects).iter().map(sizes).all(|(is, wants)| is == wants), "{effects:?}");
    let effects = scene.query(2, 2, &Bytes::from(vec![0; 2 * row]));
    assert_eq!(queries(&effects).iter().map(sizes).collect::<Vec<_>>(), [(2 * row, 2 * row)]);
}

/// Frames as long as they come are refused long before the number of them that may wait; others' are not.
#[test]
fn a_peers_queries_wait_up_to_so_many_bytes() {
    let geometry = AttentionGeometry { heads: 64, kv_heads: 1, head_dim: 1024, latent: false };
    let kv = KvShape { head_dim: 1024, ..config().kv };
    let mut scene = Scene::new(InstanceConfig { lend_blocks_max: 3, geometry, kv, ..config() });
    let (first, second) = (scene.lease(2, 1), scene.lease(3, 1));
    let rows = 64;
    let query = Bytes::from(vec![0; rows as usize * geometry.q_dim() * DType::F32.size()]);
    scene.ticket(2, first, rows);
    scene.ticket(3, second, rows);
    // The ticket takes a few bytes, too.
    let most = REMOTE_REQUEST_PEER_BYTES_MAX / query.len() - 1;
    for _ in 0..most {
        assert_eq!(refused(&scene.query(2, rows, &query)), []);
    }
    assert_eq!(refused(&scene.query(2, rows, &query)), [RefuseCode::Overloaded]);
    assert_eq!(refused(&scene.query(3, rows, &query)), [], "another's");
    // The step that was refused waits no more: the next one finds room.
    assert_eq!(refused(&scene.ticket(2, first, rows)), []);
    assert_eq!(refused(&scene.query(2, rows, &query)), []);
    assert_eq!(queries(&scene.write(2, first)).len(), 1, "of the step that was not refused");
}

#[test]
fn a_read_is_not_longer_than_a_frame() {
    let geometry = AttentionGeometry { heads: 64, kv_heads: 64, head_dim: 1024, latent: false };
    let kv = KvShape { kv_heads: 64, head_dim: 1024, ..config().kv };
    let tokens = u32::try_from(DATA_FRAME_BYTES_MAX / kv.layer_token_bytes()).unwrap();
    let blocks = tokens.div_ceil(config().block_tokens);
    let config = InstanceConfig { blocks_total: blocks + 2, lend_blocks_max: blocks, geometry, kv, ..config() };
    let mut scene = Scene::new(config);
    let (lease, epoch) = scene.lease(2, blocks);
    let mut read = |tokens| {
        let frame = BulkFrame::Read { id: 4, lease, epoch, layer: 0, offset: 0, tokens, deadline_ms: 9_000 };
        refused(&scene.on(Event::Bulk { peer: PeerKey(2), frame }))
    };
    assert_eq!(read(tokens), [RefuseCode::OutOfRange]);
    assert_eq!(read(1), [], "it waits to be written");
}

/// Small tickets, queries and reads take none of the other debtors' places.
#[test]
fn a_peer_has_a_quarter_of_the_places() {
    let mut scene = Scene::new(InstanceConfig { lend_blocks_max: 3, ..config() });
    let (first, second) = (scene.lease(2, 1), scene.lease(3, 1));
    let mut codes = Vec::new();
    for step in 0..REMOTE_REQUEST_TICKETS_MAX as u64 {
        codes.extend(refused(&scene.ticket_of(2, StepId(100 + step), &[first], 1)));
    }
    let beyond = REMOTE_REQUEST_TICKETS_MAX - REMOTE_REQUEST_PEER_TICKETS_MAX;
    assert_eq!(codes, vec![RefuseCode::Overloaded; beyond]);
    assert_eq!(refused(&scene.ticket_of(3, STEP, &[second], 1)), [], "another's");

    let row = Bytes::from(vec![0; scene.config.geometry.q_dim() * DType::F32.size()]);
    let mut codes = Vec::new();
    for id in 0..REMOTE_REQUEST_WAITING_MAX as u64 {
        let (lease, epoch) = first;
        let frame = BulkFrame::Read { id, lease, epoch, layer: 0, offset: 0, tokens: 1, deadline_ms: 9_000 };
        codes.extend(refused(&scene.on(Event::Bulk { peer: PeerKey(2), frame })));
    }
    let beyond = REMOTE_REQUEST_WAITING_MAX - REMOTE_REQUEST_PEER_WAITING_MAX;
    assert_eq!(codes, vec![RefuseCode::Overloaded; beyond]);
    let frame = PartialsFrame::Query { step: StepId(100), layer: 0, rows: 1, queries: row.clone() };
    assert_eq!(refused(&scene.partials(2, frame)), [RefuseCode::Overloaded], "reads and queries count together");
    assert_eq!(refused(&scene.query(3, 1, &row)), [], "another's");
    // On the device they count as well.
    scene.write(2, first);
    scene.ticket(2, first, 1);
    assert_eq!(refused(&scene.query(2, 1, &row)), [RefuseCode::Overloaded]);
}

/// A debtor names only sequences whose KV is at the creditor; one without any would start at once, with nothing to wait for.
#[test]
fn a_sequence_without_runs_is_malformed() {
    let mut scene = Scene::new(InstanceConfig { lend_blocks_max: 3, ..config() });
    assert_eq!(refused(&scene.ticket_of(2, STEP, &[], 1)), [RefuseCode::Malformed]);
}

/// An instance that takes a peer for itself would replace the peer's connection and leases by its own number's.
#[test]
fn a_peer_with_this_instances_number_is_refused() {
    let mut scene = Scene::new(config());
    let peer = PeerKey(7);
    let hello = Hello {
        version_min: VERSION_MAX,
        version_max: VERSION_MAX,
        instance: 1,
        incarnation: 5,
        shape: Some(scene.config.pool_shape()),
        ..Hello::default()
    };
    scene.on(Event::PeerUp { peer });
    let effects = scene.on(Event::Control { peer, body: ControlBody::Hello(Box::new(hello)) });
    let closed = |effect: &Effect| matches!(effect, Effect::Close { peer: of, reason } if *of == peer && reason.contains("hint:"));
    assert!(effects.iter().any(closed), "{effects:?}");
}
