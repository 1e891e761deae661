//! A debtor with one borrowing sequence, driven by events.

use super::FrozenDebt;
use crate::config::SchedulerConfig;
use crate::{Effect, Event, Instance, InstanceConfig, JointConfig, LayerWindows, PeerKey, RemotePolicy};
use lagoon_protocol::{
    BorrowAdvice, BulkFrame, Candidate, ControlBody, Freeze, Frozen, Hello, LeaseGrant, MemoryTier, Registered, Role,
    Thaw, VERSION_MAX,
};
use lagoon_runner::{Command, Report, SampleOut};
use lagoon_types::limits::FREEZE_MS_MAX;
use lagoon_types::{
    AttentionGeometry, DType, GenerateRequest, InstanceId, KvDType, KvShape, MicroBatch, ModelHash, RequestOptions,
    SamplingParams, SeqId, StepId, TokenEvent,
};

const SEQ: SeqId = SeqId(7);
/// Instance 2.
pub(crate) const PEER: PeerKey = PeerKey(3);

pub(crate) fn config() -> InstanceConfig {
    InstanceConfig {
        name: "a".to_owned(),
        quic_addr: "127.0.0.1:1".to_owned(),
        http_addr: String::new(),
        host: String::new(),
        backend: "cpu".to_owned(),
        role: Role::Instance,
        tier: MemoryTier::Host,
        calibration: None,
        incarnation: 11,
        model_hash: ModelHash::default(),
        geometry: AttentionGeometry { heads: 1, kv_heads: 1, head_dim: 2, latent: false },
        kv: KvShape { layers: 1, kv_heads: 1, head_dim: 2, dtype: KvDType::F32 },
        window: None,
        windowed: None,
        layer_windows: LayerWindows::default(),
        attention_scale: 1.0,
        alibi: None,
        attention_softcap: None,
        max_positions: 1_000,
        vocab: 10,
        block_tokens: 4,
        blocks_total: 4,
        lend_blocks_max: 0,
        lend_reserve_blocks: 1,
        sched: SchedulerConfig { queue: 4, running: 4, step_rows: 64, drafts: 0, draft_model: false },
        remote: RemotePolicy::Ship,
        wire: DType::F32,
        fetch_tokens: 0,
        link_bytes_per_s: 1e9,
        attention_flops: 1e9,
        prefix_cache: false,
        joint: JointConfig::OFF,
        target_step_ms: None,
        transfer: None,
        lent: None,
        peer_access: None,
    }
}

/// An instance of 4 blocks with a sequence of 30 tokens, of which the oldest 4 blocks are at instance 2 and full.
pub(crate) struct Scene {
    instance: Instance,
    now_ms: u64,
    /// The step in flight.
    pub(crate) step: Option<(StepId, MicroBatch)>,
    /// The last read of a creditor's KV.
    pub(crate) read: Option<u64>,
}

impl Scene {
    fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: InstanceConfig) -> Self {
        let shape = config.pool_shape();
        let instance = Instance::new(config).unwrap();
        let mut scene = Self { instance, now_ms: 1_000, step: None, read: None };
        let registered = Registered { version: VERSION_MAX, instance: 1, heartbeat_ms: 250, term: 1 };
        scene.on(Event::GManager(ControlBody::Registered(registered)));
        let hello = Hello {
            version_min: VERSION_MAX,
            version_max: VERSION_MAX,
            instance: 2,
            incarnation: 5,
            shape: Some(shape),
            ..Hello::default()
        };
        scene.on(Event::PeerUp { peer: PEER });
        scene.on(Event::Control { peer: PEER, body: ControlBody::Hello(Box::new(hello)) });
        let ack = lagoon_protocol::HeartbeatAck { known: true, pool_blocks_total: 100, ..Default::default() };
        scene.on(Event::GManager(ControlBody::HeartbeatAck(ack)));
        let request = GenerateRequest {
            prompt: vec![1; 30],
            answered: 0,
            max_tokens: 2,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions::default(),
        };
        let effects = scene.on(Event::Submit { seq: SEQ, request: Box::new(request) });
        let query = effects.iter().find_map(|e| match e {
            Effect::ToGManager(ControlBody::BorrowQuery(q)) => Some(q.clone()),
            _ => None,
        });
        let query = query.expect("the prompt does not fit");
        assert_eq!(query.blocks, 4);
        let candidate = Candidate { instance: 2, quic_addr: "127.0.0.1:2".to_owned(), blocks_lendable: 9, host: 0 };
        let advice = BorrowAdvice {
            query: query.query,
            candidates: vec![candidate],
            pool_blocks_total: 100,
            pool_blocks_lendable: 9,
            ..Default::default()
        };
        let effects = scene.on(Event::GManager(ControlBody::BorrowAdvice(advice)));
        let asked = effects.iter().find_map(|e| match e {
            Effect::Control { body: ControlBody::LeaseRequest(r), .. } => Some(r.clone()),
            _ => None,
        });
        let request = asked.expect("the candidate is asked").request;
        let grant = LeaseGrant { request, lease: 40, epoch: 1, blocks: 4, ttl_ms: 15_000, ..Default::default() };
        scene.on(Event::Control { peer: PEER, body: ControlBody::LeaseGrant(grant) });
        scene.finish_step();
        scene
    }

    /// The step in flight gives its token.
    fn finish_step(&mut self) -> Vec<Effect> {
        let (step, micro_batch) = self.step.take().expect("a step is in progress");
        let sample = SampleOut { seq: SEQ, token: Some(3), ..SampleOut::default() };
        self.on(Event::Runner(Report::Done { step, micro_batch, samples: vec![sample] }))
    }

    fn thaw(&mut self, cycle: u64) -> Vec<Effect> {
        self.on(Event::GManager(ControlBody::Thaw(Thaw { cycle })))
    }

    fn debt(&self) -> Option<FrozenDebt> {
        self.instance.frozen()
    }

    pub(crate) fn on(&mut self, event: Event) -> Vec<Effect> {
        let effects = self.instance.handle(event, self.now_ms);
        for effect in &effects {
            if let Effect::Bulk { frame: BulkFrame::Read { id, .. }, .. } = effect {
                self.read = Some(*id);
            }
        }
        if let Some(step) = effects.iter().find_map(|e| match e {
            Effect::Runner(Command::Step(work)) => Some((work.step, work.micro_batch)),
            _ => None,
        }) {
            self.step = Some(step);
        }
        effects
    }

    fn frozen_answer(&mut self, cycle: u64, creditor: u32) -> Frozen {
        let freeze = Freeze { cycle, creditor, blocks: 3, ttl_ms: 5_000 };
        let effects = self.on(Event::GManager(ControlBody::Freeze(freeze)));
        let answer = effects.into_iter().find_map(|e| match e {
            Effect::ToGManager(ControlBody::Frozen(frozen)) => Some(frozen),
            _ => None,
        });
        answer.expect("a freeze is answered")
    }
}

/// The lease's entries that are released by these effects.
fn released(effects: &[Effect]) -> u32 {
    let of = |e: &Effect| match e {
        Effect::Control { body: ControlBody::LeaseRelease(r), .. } => r.entries - r.first,
        _ => 0,
    };
    effects.iter().map(of).sum()
}

fn finished(effects: &[Effect]) -> bool {
    effects.iter().any(|e| matches!(e, Effect::Emit { seq: SEQ, event: TokenEvent::Finished { .. } }))
}

#[test]
fn the_debt_with_most_full_blocks_is_frozen_and_reported_in_heartbeats() {
    let mut scene = Scene::new();
    let none = scene.frozen_answer(1, 9);
    assert_eq!((none.blocks, scene.debt()), (0, None));
    let frozen = scene.frozen_answer(2, 2);
    assert_eq!((frozen.blocks, frozen.seq, frozen.free), (3, SEQ.0, 0));
    let debt = scene.debt().unwrap();
    assert_eq!((debt.cycle, debt.creditor, debt.seq, debt.until_ms), (2, InstanceId(2), SEQ, 6_000));
    // Asked again it says the same; another cycle is refused and changes nothing.
    assert_eq!(scene.frozen_answer(2, 2), frozen);
    assert_eq!((scene.frozen_answer(3, 2).blocks, scene.debt()), (0, Some(debt)));
    scene.now_ms += 300;
    let effects = scene.on(Event::Tick);
    let reported = effects.iter().any(|e| matches!(e, Effect::ToGManager(ControlBody::Heartbeat(h)) if h.frozen == 2));
    assert!(reported);
    // A thaw of another cycle is none.
    scene.thaw(3);
    assert_eq!(scene.debt(), Some(debt));
    scene.thaw(2);
    assert_eq!(scene.debt(), None);
}

#[test]
fn a_cancellation_waits_for_the_thaw() {
    let mut scene = Scene::new();
    scene.frozen_answer(2, 2);
    let mut effects = scene.on(Event::Cancel { seq: SEQ });
    effects.extend(scene.finish_step());
    assert_eq!(released(&effects), 0);
    assert_eq!(scene.step, None, "it leaves the batch");
    assert!(scene.instance.batch.is_over(SEQ));
    assert_eq!(released(&scene.thaw(2)), 4);
    assert_eq!(scene.instance.status().sequences.len(), 0);
}

#[test]
fn a_finish_is_reported_at_once_and_frees_memory_at_the_time_limit() {
    let mut scene = Scene::new();
    scene.frozen_answer(2, 2);
    let effects = scene.finish_step();
    assert!(finished(&effects) && released(&effects) == 0);
    scene.now_ms = 5_999;
    let effects = scene.on(Event::Tick);
    assert_eq!(released(&effects), 0);
    scene.now_ms = 6_000;
    let effects = scene.on(Event::Tick);
    assert!(released(&effects) == 4 && !finished(&effects));
    assert_eq!((scene.debt(), scene.instance.status().blocks_free), (None, 4));
}

#[test]
fn a_lost_creditor_ends_the_freeze() {
    let mut scene = Scene::new();
    scene.frozen_answer(2, 2);
    scene.on(Event::PeerDown { peer: PEER });
    assert_eq!(scene.debt(), None);
    assert_eq!(scene.instance.status().sequences.len(), 1, "it is computed again");
}

#[test]
fn a_finished_sequence_ends_with_its_creditor_and_is_reported_once() {
    let mut scene = Scene::new();
    scene.frozen_answer(2, 2);
    assert!(finished(&scene.finish_step()));
    let effects = scene.on(Event::PeerDown { peer: PEER });
    assert!(!effects.iter().any(|e| matches!(e, Effect::Emit { .. })), "{effects:?}");
    assert_eq!((scene.debt(), scene.instance.status().sequences.len()), (None, 0));
    assert_eq!(scene.instance.status().blocks_free, 4);
}

#[test]
fn no_gmanager_freezes_for_longer_than_the_limit() {
    let mut scene = Scene::new();
    let freeze = Freeze { cycle: 1, creditor: 2, blocks: 3, ttl_ms: u32::MAX };
    scene.on(Event::GManager(ControlBody::Freeze(freeze)));
    assert_eq!(scene.debt().unwrap().until_ms, scene.now_ms + FREEZE_MS_MAX);
}
