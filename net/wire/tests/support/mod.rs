//! One frame of every kind, with fixed content: what the recorded frames hold.

use bytes::Bytes;
use lagoon_protocol::*;
use lagoon_types::{DType, Epoch, InstanceId, LeaseId, SeqId, StepId};
use lagoon_wire::{Frame, Preface};

fn bytes(count: usize, seed: u8) -> Bytes {
    (0..count).map(|i| u8::try_from(i % 251).unwrap().wrapping_mul(7).wrapping_add(seed)).collect()
}

fn latent() -> PoolShape {
    PoolShape { kv_heads: 1, head_dim: 288, latent: true, ..shape() }
}

fn shape() -> PoolShape {
    PoolShape {
        model_hash: bytes(32, 3).to_vec(),
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        kv_dtype: 2,
        block_tokens: 32,
        window: 4096,
        alibi_bias_max: 0,
        attention_softcap: 0,
        latent: false,
        attention_scale: 0,
        windows: vec![],
        unpooled_windows: vec![],
    }
}

fn windows() -> PoolShape {
    PoolShape {
        layers: 3,
        window: 0,
        attention_scale: 0.0625f32.to_bits(),
        windows: vec![0, 300, 0],
        unpooled_windows: vec![128, 1024],
        ..shape()
    }
}

fn heartbeat() -> Heartbeat {
    Heartbeat {
        instance: 3,
        incarnation: 0x0123_4567_89ab_cdef,
        seq: 99,
        blocks_total: 1000,
        blocks_free: 600,
        blocks_lendable: 500,
        lent: vec![Debt { debtor: 2, blocks: 10 }, Debt { debtor: 5, blocks: 1 }],
        blocks_borrowed: 7,
        requests_running: 4,
        requests_waiting: 1,
        links: vec![Link { peer: 2, rtt_us: 120, ..Default::default() }],
        ..Default::default()
    }
}

fn register() -> Register {
    Register {
        version_min: 1,
        version_max: 1,
        name: "node-a".into(),
        quic_addr: "10.0.0.1:7000".into(),
        http_addr: "10.0.0.1:8000".into(),
        role: Role::Kv.into(),
        incarnation: 42,
        shape: Some(Box::new(shape())),
        blocks_total: 1000,
        backend: "wgpu".into(),
        instance: 3,
        ..Default::default()
    }
}

fn membership() -> Vec<(&'static str, ControlBody)> {
    let register = register();
    let of_a_host = Register { host: 0x0102_0304_0506_0708, ..register.clone() };
    let latent = Register { shape: Some(Box::new(latent())), ..register.clone() };
    let windows = Register { version_min: 2, version_max: 2, shape: Some(Box::new(windows())), ..register.clone() };
    let status = InstanceStatus {
        instance: 3,
        name: "node-a".into(),
        quic_addr: "10.0.0.1:7000".into(),
        http_addr: String::new(),
        role: Role::Instance.into(),
        backend: "cpu".into(),
        heartbeat: Some(heartbeat()),
        heartbeat_age_ms: 17,
        alive: true,
        ..Default::default()
    };
    let candidate = Candidate { instance: 9, quic_addr: "10.0.0.9:7000".into(), blocks_lendable: 77, host: 0 };
    vec![
        ("register", ControlBody::Register(Box::new(register))),
        ("register_of_a_host", ControlBody::Register(Box::new(of_a_host))),
        ("register_latent", ControlBody::Register(Box::new(latent))),
        ("register_windows", ControlBody::Register(Box::new(windows))),
        (
            "registered",
            ControlBody::Registered(Registered { version: 1, instance: 3, heartbeat_ms: 250, ..Default::default() }),
        ),
        ("rejected", ControlBody::Rejected(Rejected { reason: "another model: 0303 and 0a0a".into() })),
        ("heartbeat", ControlBody::Heartbeat(Box::new(heartbeat()))),
        (
            "heartbeat_ack",
            ControlBody::HeartbeatAck(HeartbeatAck { known: true, pool_blocks_total: 3000, ..Default::default() }),
        ),
        (
            "borrow_query",
            ControlBody::BorrowQuery(BorrowQuery {
                query: 5,
                debtor: 3,
                blocks: 40,
                exclude: vec![7, 300],
                ..Default::default()
            }),
        ),
        (
            "borrow_advice_of_hosts",
            ControlBody::BorrowAdvice(BorrowAdvice {
                query: 5,
                candidates: vec![Candidate { host: 0x0102_0304_0506_0708, ..candidate.clone() }],
                ..Default::default()
            }),
        ),
        (
            "borrow_advice",
            ControlBody::BorrowAdvice(BorrowAdvice {
                query: 5,
                candidates: vec![candidate],
                pool_blocks_total: 3000,
                pool_blocks_lendable: 900,
                ..Default::default()
            }),
        ),
        ("refusal", ControlBody::Refusal(Refusal { creditor: 9, blocks_lendable: 2 })),
        ("deregister", ControlBody::Deregister(Deregister { instance: 3 })),
        ("status_query", ControlBody::StatusQuery(StatusQuery { query: 6, prefixes: None })),
        (
            "status_reply",
            ControlBody::StatusReply(StatusReply { query: 6, instances: vec![status], ..Default::default() }),
        ),
    ]
}

fn window() -> TransferArena {
    TransferArena {
        region: 0,
        socket: "/run/kv".into(),
        token: bytes(32, 6).to_vec(),
        device: bytes(16, 7).to_vec(),
        bytes: 92 << 20,
    }
}

fn contract() -> Vec<(&'static str, ControlBody)> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        instance: 3,
        incarnation: 42,
        shape: Some(shape()),
        ..Default::default()
    };
    let of_a_host = Hello { host: "rack-7".into(), ..hello.clone() };
    let member = |instance, quic_addr: &str| RelayMember { instance, quic_addr: quic_addr.into() };
    let lent = LentMemory { memory: Some(window()), host: "boot/mnt/1000".into(), blocks: 640 };
    let lender = Hello { lent: Some(Box::new(lent)), ..hello.clone() };
    vec![
        ("hello", ControlBody::Hello(Box::new(hello))),
        ("hello_of_a_lender", ControlBody::Hello(Box::new(lender))),
        ("hello_of_a_host", ControlBody::Hello(Box::new(of_a_host))),
        (
            "relay_members",
            ControlBody::RelayMembers(RelayMembers {
                members: vec![member(9, "10.0.0.9:7000"), member(300, "10.0.0.10:7000")],
            }),
        ),
        (
            "lease_request",
            ControlBody::LeaseRequest(LeaseRequest {
                request: 8,
                seq: 1,
                blocks: 40,
                blocks_min: 10,
                ..Default::default()
            }),
        ),
        (
            "lease_grant",
            ControlBody::LeaseGrant(LeaseGrant {
                request: 8,
                lease: 11,
                epoch: 12,
                blocks: 40,
                ttl_ms: 15_000,
                ..Default::default()
            }),
        ),
        (
            "lease_refuse",
            ControlBody::LeaseRefuse(LeaseRefuse { request: 8, blocks_lendable: 3, reason: "busy".into() }),
        ),
        (
            "lease_release",
            ControlBody::LeaseRelease(LeaseRelease { lease: 11, epoch: 12, entries: 40, ..Default::default() }),
        ),
        ("lease_released", ControlBody::LeaseReleased(LeaseReleased { lease: 11, entries: 40, ..Default::default() })),
        (
            "lease_sealed_lent",
            ControlBody::LeaseSealed(LeaseSealed { lease: 11, epoch: 12, entries: vec![3, 4], blocks: vec![90, 91] }),
        ),
        ("lease_renew", ControlBody::LeaseRenew(LeaseRenew { leases: vec![11, 1 << 40], seq: 0 })),
        ("lease_renewed", ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![11], seq: 0 })),
        ("lease_renew_numbered", ControlBody::LeaseRenew(LeaseRenew { leases: vec![11, 1 << 40], seq: 300 })),
        ("lease_renewed_numbered", ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![11], seq: 300 })),
    ]
}

/// Messages of the pool's prefix cache.
fn cached() -> Vec<(&'static str, ControlBody)> {
    let summary = CacheSummary { fingerprints: bytes(16, 8).to_vec(), complete: true };
    let run = CachedRun { instance: 9, quic_addr: "10.0.0.9:7000".into(), first: 1, blocks: 2, before: 1 };
    vec![
        (
            "borrow_query_prefix",
            ControlBody::BorrowQuery(BorrowQuery {
                query: 6,
                debtor: 3,
                prefix: bytes(24, 2).to_vec(),
                ..Default::default()
            }),
        ),
        (
            "borrow_advice_cached",
            ControlBody::BorrowAdvice(BorrowAdvice {
                query: 6,
                pool_blocks_total: 3000,
                cached: vec![run],
                ..Default::default()
            }),
        ),
        (
            "heartbeat_cached",
            ControlBody::Heartbeat(Box::new(Heartbeat {
                instance: 3,
                incarnation: 42,
                seq: 18,
                cached: Some(Box::new(summary)),
                ..Default::default()
            })),
        ),
        (
            "lease_request_cached",
            ControlBody::LeaseRequest(LeaseRequest {
                request: 9,
                seq: 1,
                blocks: 2,
                blocks_min: 1,
                waited_ms: Some(7),
                hashes: bytes(64, 3).to_vec(),
                ..Default::default()
            }),
        ),
        (
            "lease_grant_cached",
            ControlBody::LeaseGrant(LeaseGrant {
                request: 9,
                lease: 13,
                epoch: 14,
                blocks: 2,
                ttl_ms: 15_000,
                cached: 2,
            }),
        ),
        (
            "lease_hashes",
            ControlBody::LeaseHashes(LeaseHashes {
                lease: 11,
                epoch: 12,
                first: 3,
                depth: 40,
                hashes: bytes(64, 4).to_vec(),
            }),
        ),
    ]
}

fn joint() -> Vec<(&'static str, ControlBody)> {
    let message = |body| ControlBody::Joint(Box::new(Joint { owner: 3, job: 0x1_0000_0004, body: Some(body) }));
    let lease = |instance| JointLease { instance, lease: 11, epoch: 12, blocks: 24, ttl_ms: 15_000 };
    let member = |instance, quic_addr: &str| JointMember { instance, quic_addr: quic_addr.to_owned() };
    let prompt = JointPrompt {
        total: 96,
        first: 0,
        tokens: vec![1, 300, 70_000],
        members: vec![member(3, "10.0.0.1:7601"), member(4, "10.0.0.2:7601")],
        known_blocks: 1,
        stripe_blocks: 16,
        cache_salt: "tenant".to_owned(),
    };
    let reason = "its batch is full".to_owned();
    vec![
        ("joint_ask", message(JointBody::Ask(JointAsk { blocks: 24, total: 100 }))),
        ("joint_willing", message(JointBody::Willing(JointWilling { rows: 512 }))),
        ("joint_prompt", message(JointBody::Prompt(prompt))),
        ("joint_granted", message(JointBody::Granted(JointGranted { leases: vec![lease(3), lease(5)] }))),
        ("joint_start", message(JointBody::Start(JointStart { leases: vec![lease(3), lease(5)], age_ms: 7 }))),
        ("joint_stripe", message(JointBody::Stripe(JointStripe { stripe: 2 }))),
        ("joint_left", message(JointBody::Left(JointLeft { blocks: 9, reason }))),
        ("joint_end", message(JointBody::End(JointEnd { reason: "the request ended".to_owned() }))),
        ("joint_meet", message(JointBody::Meet(JointMeet {}))),
    ]
}

/// Counters of prefix caches, and orders to empty them.
fn cache_orders() -> Vec<(&'static str, ControlBody)> {
    let counts = CacheCounts {
        device_blocks: 1,
        host_blocks: 2,
        disk_blocks: 3,
        leased_blocks: 4,
        looked_up_tokens: 5,
        hit_tokens: 6,
        device_evicted_blocks: 7,
        host_evicted_blocks: 8,
        disk_evicted_blocks: 9,
        drop_done: 10,
        block_tokens: 11,
        ..Default::default()
    };
    let of = CacheTenants { key: Some(0x0102_0304), salt: None };
    let drop = AdminCacheDrop { instance: 4, of: None };
    let drop_of = AdminCacheDrop { instance: 4, of: Some(of) };
    let tenant = CacheTenant { key: 0x0102_0304, salt: 5, device_blocks: 6, host_blocks: 7, disk_blocks: 8 };
    let (pool_hit_tokens, host_hit_tokens, disk_hit_tokens) = (1, 2, 3);
    let found = CacheCounts { pool_hit_tokens, host_hit_tokens, disk_hit_tokens, saved_ms: 4, ..counts.clone() };
    let tenants = CacheCounts { tenants: vec![tenant], ..counts.clone() };
    let dropped = Some(CacheDropped { instances: vec![3, 4], number: 0x1_0000_0007 });
    vec![
        (
            "heartbeat_cache_counts",
            ControlBody::Heartbeat(Box::new(Heartbeat { cache: Some(Box::new(counts)), ..heartbeat() })),
        ),
        (
            "heartbeat_cache_found",
            ControlBody::Heartbeat(Box::new(Heartbeat { cache: Some(Box::new(found)), ..heartbeat() })),
        ),
        ("cache_drop", ControlBody::CacheDrop(CacheDrop { number: 0x1_0000_0007, of: None })),
        ("cache_drop_of", ControlBody::CacheDrop(CacheDrop { number: 0x1_0000_0007, of: Some(of) })),
        ("admin_cache_drop", ControlBody::AdminQuery(AdminQuery { query: 8, body: Some(AdminBody::CacheDrop(drop)) })),
        (
            "admin_reply_dropped",
            ControlBody::AdminReply(Box::new(AdminReply { query: 8, dropped, ..Default::default() })),
        ),
        (
            "admin_cache_drop_of",
            ControlBody::AdminQuery(AdminQuery { query: 8, body: Some(AdminBody::CacheDrop(drop_of)) }),
        ),
        (
            "heartbeat_cache_tenants",
            ControlBody::Heartbeat(Box::new(Heartbeat { cache: Some(Box::new(tenants)), ..heartbeat() })),
        ),
    ]
}

/// Where prompts went: what gateways tell each other, and what prefill workers report.
fn placed() -> Vec<(&'static str, ControlBody)> {
    let placed = vec![PlacedPrefix { instance: 3, hashes: bytes(16, 9).to_vec(), tokens: 4096 }];
    let own = PrefixesPlaced { gateway: 0xfeed_0000_0000_0001, placed: placed.clone(), known: 12, term: 2 };
    let known = PrefixesKnown { placed, last: 13 };
    let summary = CacheSummary { fingerprints: bytes(16, 8).to_vec(), complete: true };
    vec![
        ("status_query_prefixes", ControlBody::StatusQuery(StatusQuery { query: 6, prefixes: Some(Box::new(own)) })),
        (
            "status_reply_prefixes",
            ControlBody::StatusReply(StatusReply {
                query: 6,
                term: 2,
                prefixes: Some(Box::new(known)),
                ..Default::default()
            }),
        ),
        (
            "prefill_renew_cache",
            ControlBody::PrefillRenew(PrefillRenew { seq: 2, requests: vec![12], cache_version: 7 }),
        ),
        (
            "prefill_renewed_cache",
            ControlBody::PrefillRenewed(PrefillRenewed {
                seq: 2,
                unknown: vec![],
                queued_tokens: 4096,
                cached: Some(Box::new(summary)),
                cache_version: 9,
            }),
        ),
    ]
}

fn partials() -> Vec<(&'static str, PartialsFrame)> {
    let run = |lease, first_pos| LeaseRun { lease: LeaseId(lease), epoch: Epoch(12), offset: 32, len: 64, first_pos };
    let ticket = StepTicket {
        step: StepId(77),
        deadline_ms: 10_000,
        dtype: DType::F16,
        route: Route::Direct,
        seqs: vec![
            TicketSeq { seq: SeqId(1), rows: 2, pos0: 4096, runs: vec![run(11, 0), run(13, 64)] },
            TicketSeq { seq: SeqId(2), rows: 1, pos0: 200, runs: vec![run(14, 32)] },
        ],
    };
    let step = StepId(77);
    let routed = |route| PartialsFrame::Ticket(StepTicket { route, ..ticket.clone() });
    vec![
        ("ticket_of_a_member", routed(Route::Through(InstanceId(9)))),
        ("ticket_of_a_relay", routed(Route::Relay(vec![InstanceId(4), InstanceId(300)]))),
        (
            "relayed_query",
            PartialsFrame::RelayedQuery {
                debtor: InstanceId(3),
                step,
                layer: 5,
                rows: 3,
                queries: bytes(3 * 4 * 8 * 2, 1),
            },
        ),
        (
            "relayed_partial",
            PartialsFrame::RelayedPartial {
                debtor: InstanceId(3),
                step,
                layer: 5,
                rows: 3,
                out: bytes(3 * 4 * 8 * 2, 2),
                lse: bytes(3 * 4 * 4, 3),
                count: bytes(3 * 4, 4),
            },
        ),
        (
            "step_not_relayed",
            PartialsFrame::Refused { step, code: RefuseCode::NotRelayed, detail: "9 is not connected".into() },
        ),
        ("ticket", PartialsFrame::Ticket(ticket)),
        ("query", PartialsFrame::Query { step, layer: 5, rows: 3, queries: bytes(3 * 4 * 8 * 2, 1) }),
        (
            "partial",
            PartialsFrame::Partial {
                step,
                layer: 5,
                rows: 3,
                out: bytes(3 * 4 * 8 * 2, 2),
                lse: bytes(3 * 4 * 4, 3),
                count: bytes(3 * 4, 4),
            },
        ),
        ("step_refused", PartialsFrame::Refused { step, code: RefuseCode::StaleEpoch, detail: "epoch 12".into() }),
        ("step_cancel", PartialsFrame::StepCancel { step }),
    ]
}

fn bulk() -> Vec<(&'static str, BulkFrame)> {
    let (lease, epoch) = (LeaseId(11), Epoch(12));
    let mut hash = [0; 32];
    hash.copy_from_slice(&bytes(32, 9));
    vec![
        ("write", BulkFrame::Write { lease, epoch, layer: 5, offset: 32, tokens: 4, kv: bytes(4 * 16 * 2, 5) }),
        ("seal", BulkFrame::Seal { lease, epoch, entry: 1, hash }),
        ("read", BulkFrame::Read { id: 31, lease, epoch, layer: 5, offset: 32, tokens: 4, deadline_ms: 500 }),
        ("data", BulkFrame::Data { id: 31, layer: 5, tokens: 4, kv: bytes(4 * 16 * 2, 6) }),
        (
            "bulk_refused",
            BulkFrame::Refused { id: 31, lease, code: RefuseCode::HashMismatch, detail: "entry 1".into() },
        ),
    ]
}

/// Every kind of frame with its recording's name.
pub(crate) fn samples() -> Vec<(String, Frame)> {
    let control = membership()
        .into_iter()
        .chain(contract())
        .chain(cached())
        .chain(cache_orders())
        .chain(placed())
        .chain(joint())
        .chain(disaggregated())
        .chain(transfer());
    control
        .map(|(name, body)| (format!("control_{name}"), body.into()))
        .chain(partials().into_iter().map(|(name, frame)| (format!("partials_{name}"), frame.into())))
        .chain(bulk().into_iter().map(|(name, frame)| (format!("bulk_{name}"), frame.into())))
        .collect()
}

fn sampling() -> PrefillSampling {
    PrefillSampling {
        temperature: 0.5,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.05,
        seed: 7,
        logprobs: Some(2),
        index: 3,
        return_logits: true,
    }
}

fn prefill(request: PrefillRequest) -> ControlBody {
    ControlBody::PrefillRequest(Box::new(request))
}

fn ready(reply: PrefillReady) -> ControlBody {
    ControlBody::PrefillReady(Box::new(reply))
}

fn penalised(request: PrefillRequest) -> ControlBody {
    let penalties = Some(PrefillPenalties { presence: 0.5, frequency: -0.25, repetition: Some(1.5) });
    prefill(PrefillRequest { penalties, ..request })
}

fn salted(request: PrefillRequest) -> ControlBody {
    let (allowed, cache_salt) = (vec![2, 300], "tenant".into());
    prefill(PrefillRequest { allowed, cache_salt, ..request })
}

fn constrained(request: PrefillRequest) -> ControlBody {
    let reasoning =
        Some(PrefillReasoning { is_open: true, opens: Some(7), ends: vec![8, 300], until: Some(9), may_end: true });
    let constraint = Some(PrefillConstraint { kind: 3, texts: vec!["yes".into(), "no".into()], reasoning });
    prefill(PrefillRequest { constraint, ..request })
}

fn disaggregated() -> Vec<(&'static str, ControlBody)> {
    let worker =
        Worker { instance: 4, quic_addr: "10.0.0.4:7000".into(), role: Role::Prefill.into(), blocks_total: 900 };
    let request = PrefillRequest {
        request: 12,
        seq: 34,
        total: 5,
        first: 0,
        tokens: vec![1, 200, 30_000],
        sampling: Some(sampling()),
        ..PrefillRequest::default()
    };
    let (banned, window) = (vec![2, 300], true);
    let logit_bias = vec![LogitBias { token: 300, bias: -2.5 }];
    let reply = PrefillReady {
        request: 12,
        lease: 77,
        epoch: 88,
        blocks: 1,
        ttl_ms: 15_000,
        token: 9,
        logprob: Some(-0.5),
        top: vec![PrefillTop { id: 9, logprob: -0.5 }, PrefillTop { id: 10, logprob: -1.5 }],
        logits: bytes(8, 1).to_vec(),
        export: 99,
        why: "because".into(),
        queued_ms: 11,
        prefill_ms: 222,
        queued_tokens: 3333,
        window_blocks: 0,
        cached_tokens: 0,
        has_ended: false,
        ..Default::default()
    };
    let state = RoleState { now: Role::Instance.into(), becoming: Some(Role::Decode.into()), order_received: 0 };
    let order_received =
        Heartbeat { role: Some(Box::new(RoleState { order_received: 0x1_0000_0007, ..state })), ..heartbeat() };
    let changing = Heartbeat { role: Some(Box::new(state)), ..heartbeat() };
    let role = AdminRole { instance: 4, role: Role::Prefill.into() };
    let asked = AdminQuery { query: 7, body: Some(AdminBody::Role(role)) };
    let tokens = PrefillRenewed { queued_tokens: 4096, ..Default::default() };
    vec![
        ("workers", ControlBody::Workers(Workers { version: 0xabc, workers: vec![worker] })),
        ("prefill_request", prefill(request.clone())),
        ("prefill_request_banned", prefill(PrefillRequest { banned, ..request.clone() })),
        ("prefill_request_windowed", prefill(PrefillRequest { window, ..request.clone() })),
        ("prefill_request_biased", prefill(PrefillRequest { logit_bias, ..request.clone() })),
        ("prefill_request_penalised", penalised(request.clone())),
        ("prefill_request_salted", salted(request.clone())),
        ("prefill_request_constrained", constrained(request)),
        ("prefill_ready", ready(reply.clone())),
        ("prefill_ready_ended", ready(PrefillReady { has_ended: true, ..reply.clone() })),
        ("prefill_ready_windowed", ready(PrefillReady { blocks: 3, window_blocks: 2, ..reply })),
        (
            "prefill_refused",
            ControlBody::PrefillRefused(PrefillRefused { request: 12, reason: "full".into(), queued_tokens: 5 }),
        ),
        ("prefill_renew", ControlBody::PrefillRenew(PrefillRenew { seq: 2, requests: vec![12, 13], cache_version: 0 })),
        ("prefill_renewed", ControlBody::PrefillRenewed(PrefillRenewed { seq: 2, unknown: vec![13], ..tokens })),
        ("prefill_cancel", ControlBody::PrefillCancel(PrefillCancel { requests: vec![12] })),
        ("role_order", ControlBody::RoleOrder(RoleOrder { role: Role::Decode.into(), number: 0 })),
        ("role_order_numbered", ControlBody::RoleOrder(RoleOrder { role: Role::Decode.into(), number: 7 })),
        ("role_heartbeat_heard", ControlBody::Heartbeat(Box::new(order_received))),
        ("role_heartbeat", ControlBody::Heartbeat(Box::new(changing))),
        ("admin_role", ControlBody::AdminQuery(asked)),
    ]
}

fn transfer_layout() -> TransferLayout {
    let axis = |dim: TransferDim, size, stride| TransferAxis { dim: dim.into(), size, stride };
    let plane = TransferPlane {
        region: 1,
        base: 4096,
        axes: vec![
            axis(TransferDim::Block, 9, 4096),
            axis(TransferDim::Token, 16, 256),
            axis(TransferDim::Kv, 2, 128),
            axis(TransferDim::Head, 4, 32),
            axis(TransferDim::Elem, 32, 1),
        ],
        dtype: DType::F16.code().into(),
        first_layer: 3,
        part: TransferPart::Keys.into(),
    };
    TransferLayout {
        model_hash: bytes(32, 2).to_vec(),
        block_tokens: 16,
        blocks: 9,
        first_layer: 3,
        layers: 1,
        first_head: 4,
        heads: 4,
        head_dim: 32,
        region_bytes: vec![1 << 16, 1 << 33],
        planes: vec![plane],
        ..TransferLayout::default()
    }
}

fn transfer() -> Vec<(&'static str, ControlBody)> {
    let connect = TransferConnect {
        conn: 5,
        incarnation: 0xfeed,
        attempt: 2,
        layout: Some(transfer_layout()),
        loss_allowed: true,
        host: "host-a".into(),
    };
    let connected = TransferConnected {
        conn: 5,
        attempt: 2,
        incarnation: 0xbeef,
        epoch: 3,
        completed: 41,
        layout: Some(transfer_layout()),
        credit_bytes: 64 << 20,
        ttl_ms: 15_000,
        arenas: vec![TransferArena {
            region: 1,
            socket: "/run/kv".into(),
            token: bytes(32, 3).to_vec(),
            ..TransferArena::default()
        }],
        addr: "10.0.0.4:7010".into(),
    };
    let layout = TransferLayout { latent: true, windowed_layers: 12, window: 127, ..transfer_layout() };
    let windows = TransferConnect { layout: Some(layout), ..connect.clone() };
    let connected_window = TransferConnected { arenas: vec![window()], ..connected.clone() };
    let export = TransferExport {
        conn: 5,
        export: 99,
        request: 12,
        first_token: 32,
        tokens: 40,
        blocks: vec![TransferBlocks { first: 7, count: 2 }, TransferBlocks { first: 2, count: 1 }],
        checks: bytes(48, 4).to_vec(),
        first_layer: 0,
        layers: 0,
    };
    let complete = TransferComplete {
        conn: 5,
        seq: 42,
        export: 99,
        outcome: TransferOutcome::Abandoned.into(),
        incarnation: 0xbeef,
    };
    vec![
        ("transfer_connect_windows", ControlBody::TransferConnect(Box::new(windows))),
        ("transfer_connect", ControlBody::TransferConnect(Box::new(connect))),
        ("transfer_connected", ControlBody::TransferConnected(Box::new(connected))),
        ("transfer_connected_window", ControlBody::TransferConnected(Box::new(connected_window))),
        (
            "transfer_refused",
            ControlBody::TransferRefused(TransferRefused { conn: 5, attempt: 2, reason: "f16 is not f32".into() }),
        ),
        ("transfer_export", ControlBody::TransferExport(export)),
        ("transfer_renew", ControlBody::TransferRenew(TransferRenew { conn: 5, exports: vec![99, 100], seq: 8 })),
        ("transfer_renewed", ControlBody::TransferRenewed(TransferRenewed { conn: 5, unknown: vec![100], seq: 8 })),
        ("transfer_complete", ControlBody::TransferComplete(complete)),
        (
            "transfer_completed",
            ControlBody::TransferCompleted(TransferCompleted { conn: 5, seq: 42, incarnation: 0xbeef }),
        ),
    ]
}

/// The recorded preface.
pub(crate) fn preface() -> Preface {
    Preface {
        version_min: 1,
        version_max: 1,
        incarnation: 0xfeed_beef,
        generation: 4,
        listen_addr: "10.0.0.1:7000".into(),
        class: 2,
    }
}
