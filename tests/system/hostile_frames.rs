//! A peer with a valid certificate that sends anything: every message, with numbers that it received or made up, to instances in
//! every state. No instance ends, its answers to other peers stay right, and no memory leaks.

use bytes::Bytes;
use lagoon_instance::RemotePolicy;
use lagoon_protocol as p;
use lagoon_protocol::{BulkFrame, Control, ControlBody as C, PartialsFrame, RefuseCode, Route, StepTicket, TicketSeq};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Rng, STRANGER_ID, Spec, World, greedy};
use lagoon_types::{DType, Epoch, InstanceId, LeaseId, LeaseRun, SeqId, StepId};
use lagoon_wire::Frame;
use std::collections::VecDeque;

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn specs(push: bool) -> [Spec; 4] {
    let remote = if push { RemotePolicy::Fetch } else { RemotePolicy::Ship };
    [
        Spec::prefill(60),
        Spec { push, ..Spec::decode(24) },
        Spec { remote, ..Spec::cpu(10) },
        Spec { role: p::Role::Kv, ..Spec::cpu(30) },
    ]
}

/// Bytes of one layer of one token in the golden model, keys and values.
const LAYER_TOKEN_BYTES: usize = 128;
const SEEDS: u64 = 24;
const FRAMES: u64 = 1_500;

/// Random numbers, and numbers received before, from which frames are made.
struct Hostile {
    rng: Rng,
    /// Numbers that it received last.
    numbers: VecDeque<u64>,
    sent: u64,
}

impl Hostile {
    fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), numbers: VecDeque::new(), sent: 0 }
    }

    /// Remembers every number of a received message.
    fn learn(&mut self, frame: &Frame) {
        let text = format!("{frame:?}");
        let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u64>().ok());
        self.numbers.extend(numbers.take(40));
        let over = self.numbers.len().saturating_sub(120);
        self.numbers.drain(..over);
    }

    fn n(&mut self) -> u64 {
        let received = self.numbers.get(self.rng.index(self.numbers.len().max(1))).copied().unwrap_or(1);
        match self.rng.below(10) {
            0..5 => received,
            5 => received.wrapping_add(1),
            6 => received.wrapping_sub(1),
            7 => self.rng.below(12),
            8 => self.rng.pick(&[0, 1, u64::MAX, 1 << 62, 1 << 63, u64::MAX - 1, u64::from(u32::MAX)]),
            _ => u64::from(STRANGER_ID.0),
        }
    }

    fn n32(&mut self) -> u32 {
        match self.rng.below(8) {
            0 => self.rng.pick(&[0, 1, u32::MAX, u32::MAX - 1, 1 << 31, 1 << 20]),
            1 | 2 => self.n() as u32,
            _ => self.rng.below(20) as u32,
        }
    }

    fn yes(&mut self) -> bool {
        self.rng.once_in(2)
    }

    fn many<T>(&mut self, most: u64, of: impl Fn(&mut Self) -> T) -> Vec<T> {
        (0..self.rng.below(most + 1)).map(|_| of(self)).collect()
    }

    fn bytes(&mut self, likely: usize) -> Bytes {
        let len = match self.rng.below(4) {
            0 => self.rng.index(likely.min(4096) + 2),
            _ => likely.min(1 << 20),
        };
        let fill = self.rng.pick(&[0, 0x3e, 0x7f, 0xff]);
        Bytes::from(vec![fill; len])
    }

    fn run(&mut self) -> LeaseRun {
        let (lease, epoch) = (LeaseId(self.n()), Epoch(self.n()));
        LeaseRun { lease, epoch, offset: self.n32(), len: self.n32(), first_pos: self.n32() }
    }

    fn layout(&mut self) -> Option<p::TransferLayout> {
        self.yes().then(|| p::TransferLayout {
            model_hash: self.bytes(32).to_vec(),
            block_tokens: self.n32(),
            blocks: self.n32(),
            first_layer: self.n32(),
            layers: self.n32(),
            first_head: self.n32(),
            heads: self.n32(),
            head_dim: self.n32(),
            region_bytes: self.many(3, Self::n),
            planes: self.many(3, |h| p::TransferPlane {
                region: h.n32(),
                base: h.n(),
                axes: h.many(7, |h| p::TransferAxis { dim: h.n32() as i32, size: h.n32(), stride: h.n() }),
                dtype: h.n32(),
                first_layer: h.n32(),
                part: h.n32() as i32,
            }),
            latent: self.yes(),
            windowed_layers: self.n32(),
            window: self.n32(),
        })
    }

    fn sampling(&mut self) -> Option<p::PrefillSampling> {
        let any = [0.0, -1.0, f32::NAN, f32::INFINITY, 0.7, 1e30];
        self.yes().then(|| p::PrefillSampling {
            temperature: self.rng.pick(&any),
            top_k: self.n32(),
            top_p: self.rng.pick(&any),
            min_p: self.rng.pick(&any),
            seed: self.n(),
            logprobs: self.yes().then(|| self.n32()),
            index: self.n(),
            return_logits: self.yes(),
        })
    }

    /// What an asker of prefills says.
    fn asks(&mut self) -> C {
        let tokens = self.rng.below(24);
        let (total, first) = if self.yes() { (tokens as u32, 0) } else { (self.n32(), self.n32()) };
        match self.rng.below(3) {
            0 => C::PrefillRenew(p::PrefillRenew {
                seq: self.n(),
                requests: self.many(4, Self::n),
                cache_version: self.n(),
            }),
            1 => C::PrefillCancel(p::PrefillCancel { requests: self.many(4, Self::n) }),
            _ => C::PrefillRequest(Box::new(p::PrefillRequest {
                request: self.rng.below(16),
                seq: self.n(),
                total,
                first,
                tokens: (0..tokens).map(|_| self.rng.below(130) as u32).collect(),
                sampling: self.sampling(),
                push: self.yes(),
                banned: self.many(4, |of| of.rng.below(200) as u32),
                window: self.yes(),
                logit_bias: self.many(4, |of| p::LogitBias {
                    token: of.rng.below(200) as u32,
                    bias: of.rng.pick(&[0.5, -100.0, f32::NAN, 1e30]),
                }),
                penalties: self.yes().then(|| p::PrefillPenalties {
                    presence: self.rng.pick(&[0.0, 0.5, f32::NAN, 1e30]),
                    frequency: self.rng.pick(&[0.0, -2.0, f32::INFINITY]),
                    repetition: self.yes().then(|| self.rng.pick(&[1.5, 0.0, -1.0, f32::NAN])),
                }),
                allowed: self.many(4, |of| of.rng.below(200) as u32),
                cache_salt: if self.yes() { "tenant".to_owned() } else { String::new() },
                constraint: if self.yes() { None } else { Some(self.constraint()) },
            })),
        }
    }

    fn constraint(&mut self) -> p::PrefillConstraint {
        let text = |of: &mut Self| of.rng.pick(&["{}", "a+", "start: \"a\"", "[", ""]).to_owned();
        let reasoning = |of: &mut Self| p::PrefillReasoning {
            is_open: of.yes(),
            opens: of.yes().then(|| of.n32()),
            ends: of.many(40, Self::n32),
            until: of.yes().then(|| of.n32()),
            may_end: of.yes(),
        };
        p::PrefillConstraint {
            kind: self.rng.below(6) as u32,
            texts: self.many(3, text),
            reasoning: if self.yes() { Some(reasoning(self)) } else { None },
        }
    }

    /// What a debtor says.
    fn borrows(&mut self) -> C {
        match self.rng.below(6) {
            5 => C::RelayMembers(p::RelayMembers {
                members: self.many(20, |own| p::RelayMember {
                    instance: own.n32(),
                    quic_addr: if own.yes() { "1.2.3.4:5" } else { "nowhere" }.to_owned(),
                }),
            }),
            4 => C::LeaseHashes(p::LeaseHashes {
                lease: self.n(),
                epoch: self.n(),
                first: self.n32(),
                depth: self.n32(),
                hashes: self.bytes(64).to_vec(),
            }),
            0 => C::LeaseRelease(p::LeaseRelease {
                lease: self.n(),
                epoch: self.n(),
                entries: self.n32(),
                first: self.n32(),
            }),
            1 => C::LeaseRenew(p::LeaseRenew { leases: self.many(4, Self::n), seq: self.n() }),
            _ => C::LeaseRequest(p::LeaseRequest {
                request: self.rng.below(16),
                seq: self.n(),
                blocks: self.n32(),
                blocks_min: self.n32(),
                purpose: self.n32() as i32,
                waited_ms: self.yes().then(|| self.n32()),
                hashes: if self.yes() { self.bytes(64).to_vec() } else { Vec::new() },
            }),
        }
    }

    /// What a creditor says.
    fn lends(&mut self) -> C {
        match self.rng.below(7) {
            0 => C::LeaseGrant(p::LeaseGrant {
                request: self.n(),
                lease: self.n(),
                epoch: self.n(),
                blocks: self.n32(),
                ttl_ms: self.n(),
                cached: self.n32(),
            }),
            1 => {
                C::LeaseRefuse(p::LeaseRefuse { request: self.n(), blocks_lendable: self.n32(), reason: String::new() })
            }
            2 => C::LeaseReleased(p::LeaseReleased { lease: self.n(), entries: self.n32(), first: self.n32() }),
            3 => C::LeaseRenewed(p::LeaseRenewed { unknown: self.many(4, Self::n), seq: self.n() }),
            4 => C::LeaseSealed(p::LeaseSealed {
                lease: self.n(),
                epoch: self.n(),
                entries: self.many(6, Self::n32),
                blocks: self.many(6, Self::n32),
            }),
            5 => C::Recall(p::Recall {
                recall: self.n(),
                blocks: self.n32(),
                deadline_ms: self.n32(),
                pause_ms: self.n32(),
            }),
            _ => C::LeaseRevoked(p::LeaseRevoked {
                lease: self.n(),
                reason: String::new(),
                first: self.n32(),
                entries: self.n32(),
            }),
        }
    }

    /// What a prefill worker says.
    fn prefills(&mut self) -> C {
        match self.rng.below(3) {
            0 => C::PrefillRefused(p::PrefillRefused {
                request: self.n(),
                reason: String::new(),
                queued_tokens: self.n(),
            }),
            1 => C::PrefillRenewed(p::PrefillRenewed {
                seq: self.n(),
                unknown: self.many(4, Self::n),
                queued_tokens: self.n(),
                cached: Some(Box::new(p::CacheSummary {
                    fingerprints: self.bytes(64).to_vec(),
                    complete: self.n().is_multiple_of(2),
                })),
                cache_version: self.n(),
            }),
            _ => C::PrefillReady(Box::new(p::PrefillReady {
                request: self.n(),
                lease: self.n(),
                epoch: self.n(),
                blocks: self.n32(),
                ttl_ms: self.n(),
                token: self.n32(),
                has_ended: self.yes(),
                logprob: self.yes().then_some(f32::NAN),
                top: self.many(3, |h| p::PrefillTop { id: h.n32(), logprob: 0.5 }),
                logits: self.bytes(512).to_vec(),
                export: self.n(),
                why: String::new(),
                queued_ms: self.n(),
                prefill_ms: self.n(),
                queued_tokens: self.n(),
                window_blocks: self.n32(),
                cached_tokens: self.n32(),
                pool_cached_tokens: self.n32(),
                host_cached_tokens: self.n32(),
                disk_cached_tokens: self.n32(),
            })),
        }
    }

    /// What readers and writers of KV say.
    fn transfers(&mut self) -> C {
        match self.rng.below(8) {
            0 => C::TransferConnect(Box::new(p::TransferConnect {
                conn: self.n(),
                incarnation: self.rng.pick(&[900, 901]),
                attempt: self.n(),
                layout: self.layout(),
                loss_allowed: self.yes(),
                host: String::new(),
            })),
            1 => C::TransferConnected(Box::new(p::TransferConnected {
                conn: self.n(),
                attempt: self.n(),
                incarnation: self.n(),
                epoch: self.n(),
                completed: self.n(),
                layout: self.layout(),
                credit_bytes: self.n(),
                ttl_ms: self.n(),
                arenas: Vec::new(),
                addr: "10.9.9.9:9".to_owned(),
            })),
            2 => C::TransferRefused(p::TransferRefused { conn: self.n(), attempt: self.n(), reason: String::new() }),
            3 => C::TransferExport(p::TransferExport {
                conn: self.n(),
                export: self.n(),
                request: self.n(),
                first_token: self.n32(),
                tokens: self.n32(),
                blocks: self.many(4, |h| p::TransferBlocks { first: h.n32(), count: h.n32() }),
                checks: self.bytes(16).to_vec(),
                first_layer: self.n32(),
                layers: self.n32(),
            }),
            4 => C::TransferRenew(p::TransferRenew { conn: self.n(), exports: self.many(4, Self::n), seq: self.n() }),
            5 => {
                C::TransferRenewed(p::TransferRenewed { conn: self.n(), unknown: self.many(4, Self::n), seq: self.n() })
            }
            6 => C::TransferComplete(p::TransferComplete {
                conn: self.n(),
                seq: self.n(),
                export: self.n(),
                outcome: self.n32() as i32,
                incarnation: self.rng.pick(&[900, 901]),
            }),
            _ => C::TransferCompleted(p::TransferCompleted { conn: self.n(), seq: self.n(), incarnation: self.n() }),
        }
    }

    /// What only the gManager, an operator or an instance at the gManager says.
    fn misdirected(&mut self) -> C {
        match self.rng.below(6) {
            0 => C::Fenced(p::Fenced { instance: self.n32(), incarnation: self.n() }),
            1 => C::DrainOrder(p::DrainOrder { on: true, stop: true }),
            2 => C::MoveKvCache(p::MoveKvCache { seq: self.n(), blocks: self.n32(), ..Default::default() }),
            3 => C::Freeze(p::Freeze { cycle: 1, creditor: self.n32(), blocks: self.n32(), ttl_ms: self.n32() }),
            4 => C::RoleOrder(p::RoleOrder { role: self.n32() as i32, number: self.n() }),
            _ => C::Heartbeat(Box::new(p::Heartbeat {
                instance: self.n32(),
                incarnation: self.n(),
                ..Default::default()
            })),
        }
    }

    fn ticket(&mut self) -> Frame {
        let seqs =
            self.many(2, |h| TicketSeq { seq: SeqId(h.n()), rows: h.n32(), pos0: h.n32(), runs: h.many(3, Self::run) });
        let (step, dtype) = (StepId(self.rng.below(8)), self.rng.pick(&[DType::F32, DType::F16, DType::BF16]));
        let other = InstanceId(1 + self.rng.below(4) as u32);
        let route = self.rng.pick(&[0, 1, 2]);
        let route = [Route::Direct, Route::Through(other), Route::Relay(vec![other, InstanceId(1)])][route].clone();
        PartialsFrame::Ticket(StepTicket { step, deadline_ms: self.n32(), dtype, route, seqs }).into()
    }

    fn partials(&mut self) -> Frame {
        let (step, layer, rows) = (StepId(self.n()), self.rng.below(4) as u32, self.rng.below(4) as u32);
        let r = rows as usize;
        let debtor = InstanceId(self.rng.below(5) as u32);
        match self.rng.below(8) {
            6 => {
                let (step, queries) = (StepId(self.rng.below(8)), self.bytes(r * 256));
                PartialsFrame::RelayedQuery { debtor, step, layer, rows, queries }
            }
            7 => PartialsFrame::RelayedPartial {
                debtor,
                step: StepId(self.rng.below(8)),
                layer,
                rows,
                out: self.bytes(r * 256),
                lse: self.bytes(r * 16),
                count: self.bytes(r * 4),
            },
            0 => PartialsFrame::StepCancel { step: StepId(self.rng.below(8)) },
            1 => PartialsFrame::Refused { step, code: RefuseCode::StaleEpoch, detail: String::new() },
            2 | 3 => {
                PartialsFrame::Query { step: StepId(self.rng.below(8)), layer, rows, queries: self.bytes(r * 256) }
            }
            _ => PartialsFrame::Partial {
                step,
                layer,
                rows,
                out: self.bytes(r * 256),
                lse: self.bytes(r * 16),
                count: self.bytes(r * 16),
            },
        }
        .into()
    }

    fn bulk(&mut self) -> Frame {
        let (lease, epoch, layer) = (LeaseId(self.n()), Epoch(self.n()), self.rng.below(4) as u32);
        let tokens = self.rng.below(6) as u32;
        let kv = self.bytes(tokens as usize * LAYER_TOKEN_BYTES);
        match self.rng.below(6) {
            0 | 1 => BulkFrame::Write { lease, epoch, layer, offset: self.n32(), tokens, kv },
            2 => BulkFrame::Seal { lease, epoch, entry: self.n32(), hash: [self.n32() as u8; 32] },
            3 => BulkFrame::Read {
                id: self.n(),
                lease,
                epoch,
                layer,
                offset: self.n32(),
                tokens: self.n32(),
                deadline_ms: self.n32(),
            },
            4 => BulkFrame::Data { id: self.n(), layer, tokens, kv },
            _ => BulkFrame::Refused { id: self.n(), lease, code: RefuseCode::OutOfRange, detail: String::new() },
        }
        .into()
    }

    fn frame(&mut self) -> Frame {
        let body = match self.rng.below(12) {
            0 | 1 => return self.bulk(),
            2 => return self.partials(),
            3 => return self.ticket(),
            4 | 5 => self.asks(),
            6 | 7 => self.borrows(),
            8 => self.lends(),
            9 => self.prefills(),
            10 => self.transfers(),
            _ => self.misdirected(),
        };
        Frame::Control(Control { body: Some(body) })
    }

    /// Plays along far enough that the other side goes on.
    fn answer(&mut self, frame: &Frame) -> Option<Frame> {
        Some(match frame {
            Frame::Control(Control { body: Some(C::LeaseRequest(m)) }) => {
                let blocks = if self.yes() { m.blocks } else { self.n32() };
                let (lease, epoch) = (self.n(), self.n());
                C::LeaseGrant(p::LeaseGrant { request: m.request, lease, epoch, blocks, ttl_ms: 15_000, cached: 0 })
                    .into()
            }
            Frame::Control(Control { body: Some(C::PrefillRequest(m)) }) => {
                C::PrefillReady(Box::new(p::PrefillReady {
                    request: m.request,
                    lease: self.n(),
                    epoch: self.n(),
                    blocks: if self.yes() { m.total.div_ceil(4) } else { self.n32() },
                    ttl_ms: 15_000,
                    token: self.n32(),
                    logits: self.bytes(512).to_vec(),
                    ..Default::default()
                }))
                .into()
            }
            Frame::Control(Control { body: Some(C::LeaseRelease(m)) }) => {
                C::LeaseReleased(p::LeaseReleased { lease: m.lease, entries: m.entries, first: m.first }).into()
            }
            Frame::Partials(PartialsFrame::Query { step, layer, rows, .. }) => {
                let r = *rows as usize;
                let (out, lse, count) = (self.bytes(r * 256), self.bytes(r * 16), self.bytes(r * 16));
                PartialsFrame::Partial { step: *step, layer: *layer, rows: *rows, out, lse, count }.into()
            }
            Frame::Bulk(BulkFrame::Read { id, layer, tokens, .. }) => {
                let kv = self.bytes(*tokens as usize * LAYER_TOKEN_BYTES);
                BulkFrame::Data { id: *id, layer: *layer, tokens: *tokens, kv }.into()
            }
            _ => return None,
        })
    }

    /// One move: it receives what there is, and sends something.
    fn act(&mut self, world: &mut World) {
        while let Some((node, frame)) = world.received() {
            self.learn(&frame);
            let answer = self.answer(&frame).filter(|_| self.rng.below(4) > 0);
            answer.into_iter().for_each(|answer| _ = world.hostile(node, answer));
        }
        let (node, frame) = (self.rng.index(4), self.frame());
        self.sent += u64::from(world.hostile(node, frame));
    }
}

/// Lets it play until it has sent its frames, while requests of others come.
fn play(seed: u64, recommended: bool, push: bool) -> World {
    let mut world = World::pool(pool(), (seed % 2 == 1).then_some(seed), &specs(push));
    let mut hostile = Hostile::new(seed);
    world.let_stranger_in(recommended);
    for turn in 0..FRAMES {
        if turn % 150 == 0 {
            let (node, tokens) = (1 + (turn as usize / 150) % 2, 20 + hostile.rng.index(60));
            world.submit(node, greedy(prompt(seed * 1_000 + turn, tokens, 128), 4));
        }
        (0..hostile.rng.below(12)).for_each(|_| world.step());
        hostile.act(&mut world);
    }
    assert!(hostile.sent > FRAMES / 2, "most of what it makes up is a frame: {}", hostile.sent);
    world.cut_stranger();
    world
}

/// A debtor and asker that sends anything: the others' answers are those of a pool without it.
#[test]
fn anything_that_a_peer_sends_is_refused_or_served() {
    for seed in 0..SEEDS {
        let mut world = play(seed, false, seed % 4 < 2);
        world.run();
        assert_equals_single(&format!("seed {seed}"), &world, &pool());
        world.run_for(40_000);
        world.check_empty();
    }
}

/// As a creditor and prefill worker that the gManager recommends, it may damage the answers of those that use it. They end, and
/// nothing stays taken.
#[test]
fn anything_that_a_recommended_peer_sends_ends_no_instance() {
    for seed in 0..SEEDS {
        let mut world = play(seed, true, seed % 4 < 2);
        world.run();
        assert!(world.requests.iter().all(|log| log.end.is_some()));
        world.run_for(40_000);
        world.check_empty();
    }
}

/// Reads and steps are numbered one after the other: a peer that guesses the numbers of what others are asked for answers, and
/// refuses, nothing.
#[test]
fn nobody_answers_for_another() {
    for remote in [RemotePolicy::Fetch, RemotePolicy::Ship] {
        let mut world = World::pool(pool(), None, &[Spec { remote, ..Spec::cpu(8) }, Spec::cpu(30), Spec::cpu(30)]);
        world.let_stranger_in(false);
        let request = world.submit(0, greedy(prompt(120, 80, 128), 6));
        while !world.requests[request].is_over() {
            world.step();
            for id in 1..60 {
                for (layer, tokens) in [(0, 4), (1, 16), (0, 24)] {
                    let kv = Bytes::from(vec![0x3e; tokens as usize * LAYER_TOKEN_BYTES]);
                    world.hostile(0, BulkFrame::Data { id, layer, tokens, kv });
                }
                let (lease, code, detail) = (LeaseId(1), RefuseCode::UnknownLease, String::new());
                world.hostile(0, BulkFrame::Refused { id, lease, code, detail: detail.clone() });
                world.hostile(0, PartialsFrame::Refused { step: StepId(id), code, detail });
            }
        }
        assert_equals_single(&format!("{remote:?}"), &world, &pool());
        assert_eq!(world.live(0).status().recoveries, 0, "nothing was lost");
    }
}

/// Leases and prefills have one space of numbers in a debtor's incarnation: what uses one twice is refused, whichever comes first.
#[test]
fn one_number_for_a_lease_and_a_prefill_is_refused() {
    let lease =
        |request| C::LeaseRequest(p::LeaseRequest { request, seq: 1, blocks: 1, blocks_min: 1, ..Default::default() });
    let prefill = |request| {
        // One token is missing, so that the prompt is still gathered when the lease's request comes.
        let (tokens, total) = (vec![1, 2, 3, 4, 5], 6);
        let sampling = Some(p::PrefillSampling { top_p: 1.0, ..Default::default() });
        C::PrefillRequest(Box::new(p::PrefillRequest {
            request,
            seq: 1,
            total,
            tokens,
            sampling,
            ..Default::default()
        }))
    };
    let mut world = World::pool(pool(), None, &specs(false));
    world.let_stranger_in(false);
    for (number, bodies, of) in [(1, [lease(1), prefill(1)], "lease"), (2, [prefill(2), lease(2)], "prefill")] {
        bodies.into_iter().for_each(|body| assert!(world.hostile(0, body)));
        world.run_for(100);
        let received: Vec<C> = std::iter::from_fn(|| world.received())
            .filter_map(|(_, frame)| match frame {
                Frame::Control(Control { body }) => body,
                _ => None,
            })
            .collect();
        let reasons = received.iter().filter_map(|body| match body {
            C::LeaseRefuse(m) if m.request == number => Some(m.reason.as_str()),
            C::PrefillRefused(m) if m.request == number => Some(m.reason.as_str()),
            _ => None,
        });
        assert_eq!(reasons.collect::<Vec<_>>(), [format!("{number} is the number of a {of}")], "{received:?}");
    }
    world.cut_stranger();
    world.run_for(40_000);
    world.check_empty();
}
