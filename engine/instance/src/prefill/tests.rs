//! One side of a hand-over, driven by events: what happens to the messages that do not arrive.

use crate::batch::freeze::tests::config;
use crate::{Effect, Event, Instance, InstanceConfig, PeerKey, TICK_MS, TransferConfig, TransferEffect, TransferEvent};
use lagoon_protocol::{
    BorrowAdvice, ControlBody, HeartbeatAck, Hello, OldestWaiting, PrefillReady, PrefillRenew, PrefillRequest,
    PrefillSampling, PrefillTop, Registered, Role, TransferBlocks, TransferConnected, TransferExport, VERSION_MAX,
    Worker, Workers,
};
use lagoon_runner::{Command, Report, SampleOut};
use lagoon_types::limits::LEASE_TTL_MS;
use lagoon_types::{GenerateRequest, RequestOptions, SamplingParams, SeqId};

const PEER: PeerKey = PeerKey(3);

/// Instance 1, which is registered and knows instance 2.
struct Side {
    instance: Instance,
    now_ms: u64,
    /// By which it reads.
    conn: u64,
}

impl Side {
    fn new(role: Role) -> Self {
        let mut config = InstanceConfig { role, ..config() };
        let size = (config.blocks_total, config.block_tokens);
        let transfer = TransferConfig::new(config.model_hash, config.kv, size, String::new());
        config.transfer = Some(transfer.unwrap());
        let mut side = Self { instance: Instance::new(config).unwrap(), now_ms: 1_000, conn: 0 };
        let registered = Registered { version: VERSION_MAX, instance: 1, heartbeat_ms: 250, term: 1 };
        side.on(Event::GManager(ControlBody::Registered(registered)));
        let hello = Hello {
            version_min: VERSION_MAX,
            version_max: VERSION_MAX,
            instance: 2,
            incarnation: 5,
            shape: Some(side.instance.cx.config.pool_shape()),
            ..Hello::default()
        };
        side.on(Event::PeerUp { peer: PEER });
        side.receive(ControlBody::Hello(Box::new(hello)));
        side
    }

    fn on(&mut self, event: Event) -> Vec<Effect> {
        self.instance.handle(event, self.now_ms)
    }

    /// The messages that the peer gets in reply to a message.
    fn receive(&mut self, body: ControlBody) -> Vec<ControlBody> {
        reported(self.on(Event::Control { peer: PEER, body }))
    }

    fn tick(&mut self, ms: u64) -> Vec<ControlBody> {
        self.now_ms += ms;
        reported(self.on(Event::Tick))
    }

    /// Instance 2 asks for a prompt of `total` tokens, of which only so many arrive.
    fn ask(&mut self, total: u32, arrive: usize) -> Vec<Effect> {
        self.ask_as(total, arrive, false)
    }

    fn ask_as(&mut self, total: u32, arrive: usize, push: bool) -> Vec<Effect> {
        let sampling = Some(PrefillSampling { top_p: 1.0, ..PrefillSampling::default() });
        let tokens = vec![1; arrive];
        let known = PrefillRequest { request: 6, seq: 9, ..PrefillRequest::default() };
        let body = PrefillRequest { total, tokens, sampling, push, ..known };
        self.on(Event::Control { peer: PEER, body: ControlBody::PrefillRequest(Box::new(body)) })
    }

    fn renew(&mut self) -> Vec<ControlBody> {
        self.receive(ControlBody::PrefillRenew(PrefillRenew { seq: 1, requests: vec![6], cache_version: 0 }))
    }
}

fn request(tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: vec![1; tokens],
        answered: 0,
        max_tokens: 4,
        sampling: SamplingParams::default(),
        min_tokens: 0,
        stop_ids: Vec::new(),
        return_logits: false,
        options: RequestOptions::default(),
    }
}

fn steps(effects: &[Effect]) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Runner(Command::Step(_))))
}

fn reported(effects: Vec<Effect>) -> Vec<ControlBody> {
    let of = |effect| match effect {
        Effect::Control { body, .. } => Some(body),
        _ => None,
    };
    effects.into_iter().filter_map(of).collect()
}

/// A prefill worker that has computed a prompt, and the messages that report it.
fn computed() -> (Side, Vec<ControlBody>) {
    let mut side = Side::new(Role::Prefill);
    let step = side.ask(7, 7).into_iter().find_map(|effect| match effect {
        Effect::Runner(Command::Step(work)) => Some(work),
        _ => None,
    });
    let step = step.expect("the prompt is computed");
    let sample = SampleOut { seq: step.seqs[0].seq, token: Some(3), ..SampleOut::default() };
    let done = Report::Done { step: step.step, micro_batch: step.micro_batch, samples: vec![sample] };
    let job = side.on(Event::Runner(done)).into_iter().find_map(|effect| match effect {
        Effect::Transfer(TransferEffect::Export { job, .. }) => Some(job),
        _ => None,
    });
    let export = TransferEvent::Exported { job: job.expect("it is exported"), export: Ok(40) };
    let messages = reported(side.on(Event::Transfer(export)));
    (side, messages)
}

fn ready(messages: &[ControlBody]) -> Option<&PrefillReady> {
    messages.iter().find_map(|body| match body {
        ControlBody::PrefillReady(ready) => Some(&**ready),
        _ => None,
    })
}

/// The reply is sent again by no other path: both sides would renew for ever, one a lease, the other a request.
#[test]
fn a_reply_that_found_a_full_queue_is_sent_again() {
    let (mut side, messages) = computed();
    let first = ready(&messages).expect("the asker gets a reply").clone();
    side.on(Event::SendFailed { peer: PEER });
    let again = side.renew();
    let ControlBody::PrefillRenewed(renewed) = &again[0] else { panic!("{again:?}") };
    assert_eq!(renewed.unknown, [0u64; 0], "it has it");
    assert_eq!(ready(&again), Some(&first));
    // Not to one that has received it: its lease is renewed, and its request is not asked for.
    let renew = PrefillRenew { seq: 2, requests: Vec::new(), cache_version: 0 };
    assert_eq!(ready(&side.receive(ControlBody::PrefillRenew(renew))), None);
}

#[test]
fn a_prompt_of_which_a_part_found_a_full_queue_is_not_waited_for() {
    let mut side = Side::new(Role::Prefill);
    side.ask(7, 4);
    assert_eq!(side.instance.status().prefill.jobs, 1);
    let answer = side.renew();
    let ControlBody::PrefillRenewed(renewed) = &answer[0] else { panic!("{answer:?}") };
    assert_eq!(renewed.unknown, [6]);
    assert_eq!(side.instance.status().prefill.jobs, 0);
}

/// A decode worker that has asked instance 2 for a prompt, and the request's number.
fn asking(push: bool) -> (Side, u64) {
    let mut side = Side::new(Role::Decode);
    side.instance.cx.config.transfer.as_mut().unwrap().push = push;
    let worker =
        Worker { instance: 2, quic_addr: "127.0.0.1:2".to_owned(), role: Role::Prefill.into(), blocks_total: 9 };
    let workers = Workers { version: 5, workers: vec![worker] };
    let connect =
        reported(side.on(Event::GManager(ControlBody::Workers(workers)))).into_iter().find_map(|body| match body {
            ControlBody::TransferConnect(connect) => Some(connect),
            _ => None,
        });
    let connect = connect.expect("it connects to what it is to read");
    side.conn = connect.conn;
    side.receive(ControlBody::TransferConnected(Box::new(TransferConnected {
        conn: connect.conn,
        attempt: connect.attempt,
        incarnation: 5,
        epoch: 1,
        completed: 0,
        layout: connect.layout,
        credit_bytes: 1 << 20,
        ttl_ms: LEASE_TTL_MS,
        arenas: Vec::new(),
        addr: String::new(),
    })));
    let asked = reported(side.on(Event::Submit { seq: SeqId(1), request: Box::new(request(7)) })).into_iter().find_map(
        |body| match body {
            ControlBody::PrefillRequest(m) => Some(m.request),
            _ => None,
        },
    );
    (side, asked.expect("the worker is asked"))
}

fn answer(request: u64) -> ControlBody {
    ControlBody::PrefillReady(Box::new(PrefillReady {
        request,
        lease: 70,
        epoch: 2,
        blocks: 2,
        ttl_ms: LEASE_TTL_MS,
        token: 3,
        export: 40,
        ..PrefillReady::default()
    }))
}

fn releases(messages: &[ControlBody]) -> usize {
    messages.iter().filter(|body| matches!(body, ControlBody::LeaseRelease(m) if m.lease == 70)).count()
}

/// As after a SIGSTOP: what came meanwhile is handled behind the tick that notices the time.
#[test]
fn an_answer_from_before_a_long_pause_is_given_back() {
    let (mut side, request) = asking(false);
    // The worker answered a question just before, so that it does not count as silent.
    let question = (0..200).find_map(|_| {
        side.tick(TICK_MS).into_iter().find_map(|body| match body {
            ControlBody::PrefillRenew(m) if m.requests == [request] => Some(m.seq),
            _ => None,
        })
    });
    let renewed = lagoon_protocol::PrefillRenewed { seq: question.unwrap(), ..Default::default() };
    side.receive(ControlBody::PrefillRenewed(renewed));
    side.tick(LEASE_TTL_MS + 5_000);
    let output = side.receive(answer(request));
    assert_eq!((side.instance.cx.memory.rm.debtor.held.iter().count(), releases(&output)), (0, 1), "{output:?}");
}

/// The worker frees what it handed to the old life when it learns of the new one, which must not take it in between.
#[test]
fn a_life_does_not_take_what_the_one_before_it_asked_for() {
    let (mut side, request) = asking(false);
    let ack = HeartbeatAck { known: true, fenced: true, ..HeartbeatAck::default() };
    side.on(Event::GManager(ControlBody::HeartbeatAck(ack)));
    let output = side.receive(answer(request));
    assert_eq!((side.instance.cx.memory.rm.debtor.held.iter().count(), releases(&output)), (0, 1), "{output:?}");
}

/// The export is announced behind the answer, which found a full queue: both are sent again, the export first.
#[test]
fn an_export_is_kept_for_the_answer_that_names_it() {
    let (mut side, request) = asking(false);
    let export = TransferExport {
        conn: side.conn,
        export: 40,
        request,
        first_token: 0,
        tokens: 7,
        first_layer: 0,
        layers: 0,
        blocks: vec![TransferBlocks { first: 0, count: 2 }],
        checks: vec![0; 32],
    };
    let output = side.receive(ControlBody::TransferExport(export));
    assert!(!output.iter().any(|body| matches!(body, ControlBody::TransferComplete(_))), "{output:?}");
    let effects = side.on(Event::Control { peer: PEER, body: answer(request) });
    assert!(effects.iter().any(|e| matches!(e, Effect::Transfer(TransferEffect::Read { .. }))), "{effects:?}");
}

#[test]
fn what_is_answered_and_never_exported_is_given_back() {
    let (mut side, request) = asking(false);
    let output = side.receive(answer(request));
    assert_eq!((side.instance.cx.memory.rm.debtor.held.iter().count(), releases(&output)), (1, 0), "{output:?}");
    let output: Vec<ControlBody> = (0..LEASE_TTL_MS / TICK_MS / 2 + 1).flat_map(|_| side.tick(TICK_MS)).collect();
    assert_eq!(side.instance.cx.memory.rm.debtor.held.iter().count(), 0);
    assert!(releases(&output) > 0);
}

/// The worker that has not begun it may wait for that memory itself, for an older request.
#[test]
fn memory_for_a_prompt_that_no_worker_has_begun_is_freed_for_an_older_request() {
    let (mut side, request) = asking(true);
    assert_eq!(side.instance.cx.memory.rm.available(), 2, "it has memory before it asks");
    let oldest_waiting = Some(OldestWaiting { debtor: 2, waits_ms: 900 });
    let ack = HeartbeatAck { known: true, pool_blocks_total: 100, oldest_waiting, ..HeartbeatAck::default() };
    side.on(Event::GManager(ControlBody::HeartbeatAck(ack)));
    let output = side.tick(TICK_MS);
    let cancelled = |body: &ControlBody| matches!(body, ControlBody::PrefillCancel(m) if m.requests == [request]);
    assert!(output.iter().any(cancelled), "{output:?}");
    assert_eq!(side.instance.cx.memory.rm.available(), 4);
    let asked = |body: &ControlBody| matches!(body, ControlBody::PrefillRequest(_));
    assert!(!side.tick(TICK_MS).iter().any(asked), "the older one comes first");
}

/// The head of the queue may wait for memory that the asker of the pushed prompt holds.
#[test]
fn a_pushed_prompt_is_not_behind_what_waits_for_others_memory() {
    for push in [false, true] {
        let mut side = Side::new(Role::Instance);
        let ack = HeartbeatAck { known: true, pool_blocks_total: 100, ..HeartbeatAck::default() };
        side.on(Event::GManager(ControlBody::HeartbeatAck(ack)));
        let query = side.on(Event::Submit { seq: SeqId(1), request: Box::new(request(18)) }).into_iter().find_map(
            |e| match e {
                Effect::ToGManager(ControlBody::BorrowQuery(query)) => Some(query.query),
                _ => None,
            },
        );
        let query = query.expect("a head that needs more than this instance has");
        let nobody = BorrowAdvice { query, pool_blocks_total: 100, ..BorrowAdvice::default() };
        side.on(Event::GManager(ControlBody::BorrowAdvice(nobody)));
        assert_eq!(steps(&side.ask_as(7, 7, push)), push, "push: {push}");
    }
}

/// An answer is long, a request's number short.
#[test]
fn a_request_that_is_named_often_is_answered_once() {
    let (mut side, _) = computed();
    side.on(Event::SendFailed { peer: PEER });
    let again =
        side.receive(ControlBody::PrefillRenew(PrefillRenew { seq: 1, requests: vec![6; 50], cache_version: 0 }));
    let answers = again.iter().filter(|body| matches!(body, ControlBody::PrefillReady(_))).count();
    assert_eq!(answers, 1);
}

fn refusals(messages: &[ControlBody]) -> usize {
    messages.iter().filter(|body| matches!(body, ControlBody::PrefillRefused(_))).count()
}

fn prompt(request: u64, arrive: usize, sampling: PrefillSampling) -> ControlBody {
    let tokens = vec![1; arrive];
    ControlBody::PrefillRequest(Box::new(PrefillRequest {
        request,
        seq: 9,
        total: 7,
        first: 0,
        tokens,
        sampling: Some(sampling),
        ..PrefillRequest::default()
    }))
}

/// It would fail all requests of the step in which its token is sampled.
#[test]
fn a_prompt_with_sampling_that_nobody_can_do_is_refused() {
    for (temperature, top_p) in [(f32::NAN, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, f32::INFINITY)] {
        let mut side = Side::new(Role::Prefill);
        let sampling = PrefillSampling { temperature, top_p, ..PrefillSampling::default() };
        let effects = side.on(Event::Control { peer: PEER, body: prompt(6, 7, sampling) });
        assert!(!steps(&effects), "{sampling:?}");
        assert_eq!(refusals(&reported(effects)), 1, "{sampling:?}");
    }
}

#[test]
fn prompts_that_never_become_complete_are_few() {
    let mut side = Side::new(Role::Prefill);
    let sampling = PrefillSampling { top_p: 1.0, ..PrefillSampling::default() };
    for request in 1..=8 {
        assert_eq!(refusals(&side.receive(prompt(request, 4, sampling))), 0, "{request}");
    }
    assert_eq!(refusals(&side.receive(prompt(9, 4, sampling))), 1);
    assert_eq!(side.instance.status().prefill.jobs, 8);
}

#[test]
fn an_answer_names_tokens_of_the_vocabulary_and_no_more_than_were_asked_for() {
    for top in [vec![PrefillTop { id: 99, logprob: 0.0 }], vec![PrefillTop { id: 1, logprob: 0.0 }; 1_000]] {
        let (mut side, request) = asking(false);
        let ControlBody::PrefillReady(sensible) = answer(request) else { panic!("it is an answer") };
        let output = side.receive(ControlBody::PrefillReady(Box::new(PrefillReady { top, ..*sensible })));
        assert_eq!((side.instance.cx.memory.rm.debtor.held.iter().count(), releases(&output)), (0, 1), "{output:?}");
    }
}

#[test]
fn an_answer_with_the_largest_numbers_is_one_like_others() {
    let (mut side, number) = asking(false);
    let ControlBody::PrefillReady(sensible) = answer(number) else { panic!("it is an answer") };
    let (ttl_ms, queued_ms, prefill_ms, queued_tokens) = (u64::MAX, u64::MAX, u64::MAX, u64::MAX);
    let answer = PrefillReady { ttl_ms, queued_ms, prefill_ms, queued_tokens, ..*sensible };
    side.receive(ControlBody::PrefillReady(Box::new(answer)));
    assert_eq!(side.instance.cx.memory.rm.debtor.held.iter().count(), 1);
    side.on(Event::Submit { seq: SeqId(2), request: Box::new(request(7)) });
    (0..LEASE_TTL_MS / TICK_MS).for_each(|_| drop(side.tick(TICK_MS)));
    assert_eq!(side.instance.cx.memory.rm.debtor.held.iter().count(), 0);
}
