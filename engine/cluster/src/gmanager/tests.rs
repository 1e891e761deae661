//! Registration, the ledger, and whom the gManager recommends.

mod cache_drops;
mod hostile;
mod invariants;
mod life;
mod oldest_heads;
mod placement;
mod roles;

use super::*;
use lagoon_protocol::{
    BorrowQuery, Debt, Heartbeat, Link, MemoryTier, PlacementEntry, Refusal, Register, Registered, Role, TierRequest,
    VERSION_MAX, VERSION_MIN,
};
use lagoon_types::{DType, SeqId};

fn shape() -> PoolShape {
    PoolShape {
        model_hash: vec![7; 32],
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        kv_dtype: DType::F16.code().into(),
        block_tokens: 32,
        window: 0,
        alibi_bias_max: 0,
        attention_softcap: 0,
        latent: false,
        attention_scale: 0.125f32.to_bits(),
        windows: vec![],
        unpooled_windows: vec![],
    }
}

/// A process; its address follows from its incarnation.
fn register(incarnation: u64) -> Register {
    Register {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        name: format!("n{incarnation}"),
        quic_addr: format!("10.0.0.{incarnation}:7000"),
        http_addr: String::new(),
        role: Role::Instance.into(),
        incarnation,
        shape: Some(Box::new(shape())),
        blocks_total: 100,
        backend: "cpu".to_owned(),
        instance: 0,
        ..Register::default()
    }
}

fn heartbeat(instance: u32, seq: u64, lendable: u32) -> Heartbeat {
    Heartbeat {
        instance,
        incarnation: instance.into(),
        seq,
        blocks_total: 100,
        blocks_free: lendable,
        blocks_lendable: lendable,
        ..Heartbeat::default()
    }
}

/// Instances 1, 2, … with these lendable blocks.
fn pool(lendable: &[u32]) -> GManager {
    let mut gm = GManager::default();
    for (i, blocks) in (1u32..).zip(lendable) {
        assert_eq!(gm.on_register(&register(i.into()), 0).unwrap().instance, i);
        assert!(gm.on_heartbeat(&heartbeat(i, 1, *blocks), 0).known);
    }
    gm
}

fn ask(gm: &mut GManager, debtor: u32, blocks: u32, exclude: &[u32]) -> Vec<u32> {
    let advice = gm
        .on_borrow_query(&BorrowQuery { query: 5, debtor, blocks, exclude: exclude.to_vec(), ..Default::default() }, 0);
    assert_eq!(advice.query, 5);
    advice.candidates.iter().map(|c| c.instance).collect()
}

fn reason(result: Result<Registered, Rejected>) -> String {
    result.unwrap_err().reason
}

#[test]
fn a_mismatch_is_rejected_with_both_values() {
    let mut gm = pool(&[1]);
    let with = |f: fn(&mut Register)| {
        let mut r = register(9);
        f(&mut r);
        r
    };
    let mut rejects = |f, expected: &str| {
        let text = reason(gm.on_register(&with(f), 0));
        assert!(text.contains(expected), "{text:?} should say {expected:?}");
    };
    rejects(
        |r| r.shape.as_mut().unwrap().model_hash = vec![8; 32],
        "the instance's model hash is 0808080808080808, the pool's is 0707070707070707",
    );
    rejects(|r| r.shape.as_mut().unwrap().kv_dtype = 3, "the instance's KV element type is bf16, the pool's is f16");
    rejects(|r| r.shape.as_mut().unwrap().kv_dtype = 4, "the instance's KV element type is fp8, the pool's is f16");
    rejects(|r| r.shape.as_mut().unwrap().block_tokens = 64, "the instance's block_tokens is 64, the pool's is 32");
    rejects(|r| r.shape.as_mut().unwrap().window = 5, "the instance's window is 5, the pool's is 0");
    rejects(
        |r| r.shape.as_mut().unwrap().alibi_bias_max = 8f32.to_bits(),
        "the instance's alibi_bias_max is 8, the pool's is 0",
    );
    rejects(
        |r| r.shape.as_mut().unwrap().alibi_bias_max = f32::NAN.to_bits(),
        "alibi_bias_max is NaN: expected 0 or more",
    );
    rejects(
        |r| r.shape.as_mut().unwrap().attention_softcap = 50f32.to_bits(),
        "the instance's attention_softcap is 50, the pool's is 0",
    );
    rejects(
        |r| r.shape.as_mut().unwrap().attention_softcap = (-1f32).to_bits(),
        "attention_softcap is -1: expected 0 or more",
    );
    rejects(
        |r| {
            let shape = r.shape.as_mut().unwrap();
            (shape.latent, shape.kv_heads) = (true, 2);
        },
        "kv_heads is 2: latent attention has 1",
    );
    rejects(
        |r| (r.version_min, r.version_max) = (1, 1),
        "the instance speaks protocol version 1, the gManager version 3: no common version, the instance is older; hint: upgrade",
    );
    rejects(
        |r| (r.version_min, r.version_max) = (VERSION_MAX + 1, VERSION_MAX + 2),
        "versions 4 to 5, the gManager version 3: no common version, the gManager is older",
    );
    rejects(|r| r.shape = None, "no pool shape");
    rejects(|r| r.shape.as_mut().unwrap().model_hash = vec![8; 31], "32 bytes, not 31");
    rejects(|r| r.shape.as_mut().unwrap().kv_heads = 0, "kv_heads 0");
    rejects(|r| r.shape.as_mut().unwrap().kv_dtype = 99, "99 is no element type");
    rejects(|r| r.quic_addr = "0.0.0.0:7000".to_owned(), "\"0.0.0.0:7000\" is not an ip:port that peers can reach");
    assert_eq!(gm.status(0).len(), 1);
}

/// A kv node computes micro attention by its own config.json: all that it reads there is in the shape.
#[test]
fn another_scale_or_other_windows_are_rejected_by_name() {
    let hybrid = |r: &mut Register| r.shape.as_mut().unwrap().windows = vec![128, 0, 128, 0];
    let mut gm = GManager::default();
    let mut first = register(1);
    hybrid(&mut first);
    gm.on_register(&first, 0).unwrap();
    let mut rejects = |change: fn(&mut PoolShape), expected: &str| {
        let mut r = register(9);
        hybrid(&mut r);
        change(r.shape.as_mut().unwrap());
        let text = reason(gm.on_register(&r, 0));
        assert!(text.contains(expected), "{text:?} should say {expected:?}");
    };
    rejects(|s| s.attention_scale = 0.25f32.to_bits(), "the instance's attention_scale is 0.25, the pool's is 0.125");
    rejects(
        |s| s.windows = vec![0, 128, 0, 128],
        "the instance's windows is [0, 128, 0, 128], the pool's is [128, 0, 128, 0]",
    );
    rejects(|s| s.unpooled_windows = vec![64], "the instance's unpooled_windows is [64], the pool's is []");
    for bad in [0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut r = register(9);
        r.shape.as_mut().unwrap().attention_scale = bad.to_bits();
        let text = reason(GManager::default().on_register(&r, 0));
        assert!(text.contains("attention_scale is"), "{text}");
    }
    rejects(|s| s.windows = vec![128; 5], "windows has 5 entries, the pool 4 layers");
    rejects(|s| s.unpooled_windows = vec![1; 1 << 16], "unpooled_windows has 65536 entries beside 4 layers: at most");
    rejects(|s| s.unpooled_windows = vec![0], "unpooled_windows has a 0");
}

#[test]
fn an_empty_pool_takes_another_shape() {
    let mut gm = pool(&[1, 1]);
    let mut other = register(9);
    other.shape.as_mut().unwrap().layers = 5;
    assert!(gm.on_register(&other, 0).is_err());
    gm.on_deregister(InstanceId(1));
    assert!(gm.on_register(&other, 0).is_err());
    assert_eq!(gm.tick(limits::INSTANCE_FORGET_MS), [InstanceId(2)]);
    assert!(gm.on_register(&other, 0).is_ok());
    assert_eq!(gm.shape().unwrap().layers, 5);
}

#[test]
fn a_process_keeps_its_number() {
    let mut gm = pool(&[1, 1]);
    assert_eq!(gm.on_register(&register(2), 5).unwrap().instance, 2);
    // A new process at an old address is another instance.
    let restarted = Register { incarnation: 22, ..register(2) };
    assert_eq!(gm.on_register(&restarted, 6).unwrap().instance, 3);
    assert_eq!(gm.status(6).iter().map(|s| s.instance).collect::<Vec<_>>(), [1, 3]);
    assert!(!gm.on_heartbeat(&heartbeat(2, 9, 1), 6).known);
    // A gManager that knows nothing grants the number that it gave before, unless another has it.
    let mut gm = GManager::default();
    assert_eq!(gm.on_register(&Register { instance: 7, ..register(2) }, 0).unwrap().instance, 7);
    assert_eq!(gm.on_register(&Register { instance: 7, ..register(3) }, 0).unwrap().instance, 8);
    assert_eq!(gm.on_register(&Register { instance: u32::MAX, ..register(4) }, 0).unwrap().instance, 9);
}

#[test]
fn the_pool_has_a_largest_size() {
    let mut gm = GManager::default();
    for i in 0..limits::INSTANCES_MAX {
        let quic_addr = format!("10.1.{}.{}:1", i / 256, i % 256);
        gm.on_register(&Register { incarnation: 1000 + i as u64, quic_addr, ..register(1) }, 0).unwrap();
    }
    assert!(reason(gm.on_register(&register(1), 0)).contains("16384"));
}

#[test]
fn stale_heartbeats_change_nothing() {
    let mut gm = pool(&[0, 10]);
    assert!(gm.on_heartbeat(&heartbeat(2, 1, 50), 0).known);
    assert_eq!(gm.on_borrow_query(&BorrowQuery { debtor: 1, ..Default::default() }, 0).pool_blocks_lendable, 10);
    gm.on_heartbeat(&heartbeat(2, 2, 50), 0);
    assert_eq!(gm.on_borrow_query(&BorrowQuery { debtor: 1, ..Default::default() }, 0).pool_blocks_lendable, 50);
    let other = Heartbeat { incarnation: 99, seq: 9, ..heartbeat(2, 9, 1) };
    let ack = gm.on_heartbeat(&other, 0);
    assert_eq!((ack.known, ack.pool_blocks_total), (false, 200));
}

#[test]
fn what_is_never_lent_is_capacity_of_its_owner_only() {
    let mut gm = GManager::default();
    for (incarnation, lend_blocks_max) in [(1, None), (2, Some(30)), (3, Some(0))] {
        gm.on_register(&Register { lend_blocks_max, ..register(incarnation) }, 0).unwrap();
    }
    let mut advice = |debtor| gm.on_borrow_query(&BorrowQuery { debtor, ..Default::default() }, 0);
    let capacities = [1, 2, 3].map(|debtor| advice(debtor).pool_blocks_total);
    assert_eq!(capacities, [100 + 30, 100 + 100, 100 + 100 + 30]);
}

#[test]
fn the_most_available_come_first_and_the_unfit_not_at_all() {
    let mut gm = pool(&[90, 10, 30, 0, 20, 5]);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [3, 5, 2]);
    assert_eq!(ask(&mut gm, 1, 0, &[3, 2]), [5, 6]);
    assert_eq!(ask(&mut gm, 3, 0, &[]), [1, 5, 2]);
    // Silent instances are skipped, and their blocks are not counted.
    let now_ms = limits::HEARTBEAT_STALE_MS;
    gm.on_heartbeat(&heartbeat(2, 2, 10), now_ms);
    let advice = gm.on_borrow_query(
        &BorrowQuery { query: 1, debtor: 1, blocks: 1, exclude: vec![], ..Default::default() },
        now_ms,
    );
    assert_eq!(advice.candidates.iter().map(|c| c.instance).collect::<Vec<_>>(), [2]);
    assert_eq!((advice.pool_blocks_total, advice.pool_blocks_lendable), (100, 10));
    let alive: Vec<_> = gm.status(now_ms).iter().map(|s| s.alive).collect();
    assert_eq!(alive, [false, true, false, false, false, false]);
}

#[test]
fn near_creditors_come_before_large_ones() {
    let mut gm = pool(&[0, 10, 90, 50]);
    // 2 is near by its own measurement, 3 far by the debtor's; 4 is unmeasured.
    let link = |peer, rtt_us| vec![Link { peer, rtt_us, ..Default::default() }];
    gm.on_heartbeat(&Heartbeat { links: link(3, 20_000), ..heartbeat(1, 2, 0) }, 0);
    gm.on_heartbeat(&Heartbeat { links: link(1, 60), ..heartbeat(2, 2, 10) }, 0);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [2, 4, 3]);
    // Noise within a power of two decides nothing.
    gm.on_heartbeat(&Heartbeat { links: link(1, 70), ..heartbeat(3, 3, 90) }, 0);
    gm.on_heartbeat(&Heartbeat { links: link(1, 120), ..heartbeat(2, 3, 10) }, 0);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [3, 2, 4]);
}

#[test]
fn bandwidth_counts_as_distance() {
    let mut gm = pool(&[0, 10, 90]);
    // A block has 64 KiB: 3.3 s at 20 KB/s, 65 us at 1 GB/s.
    let link = |peer, bytes_per_s| Link { peer, rtt_us: 100, bytes_per_s, ..Default::default() };
    gm.on_heartbeat(&Heartbeat { links: vec![link(2, 1_000_000_000), link(3, 20_000)], ..heartbeat(1, 2, 0) }, 0);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [2, 3]);
    // It is measured again, and the far one is gone.
    gm.on_heartbeat(&Heartbeat { links: vec![link(3, 1_000_000_000)], ..heartbeat(1, 3, 0) }, 0);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [3, 2]);
    gm.on_deregister(InstanceId(3));
    assert_eq!(ask(&mut gm, 1, 0, &[]), [2]);
}

#[test]
fn mapped_creditors_are_seen_by_the_planner_while_they_are_reported() {
    let mut gm = pool(&[0, 10, 90]);
    let link = |peer, mapped| Link { peer, mapped, ..Default::default() };
    let mapped = |gm: &GManager| gm.pool.instances[&InstanceId(1)].mapped.iter().map(|id| id.0).collect::<Vec<_>>();
    gm.on_heartbeat(&Heartbeat { links: vec![link(3, true), link(2, false)], ..heartbeat(1, 2, 0) }, 0);
    assert_eq!(mapped(&gm), [3]);
    gm.on_heartbeat(&Heartbeat { links: vec![link(3, false), link(2, true)], ..heartbeat(1, 3, 0) }, 0);
    assert_eq!(mapped(&gm), [2]);
    gm.on_heartbeat(&heartbeat(1, 4, 0), 0);
    assert_eq!(mapped(&gm), [0u32; 0]);
}

#[test]
fn tiers_and_who_borrows() {
    let mut gm = pool(&[0, 10, 90, 50]);
    gm.on_register(&Register { tier: MemoryTier::Host.into(), ..register(3) }, 0).unwrap();
    gm.on_heartbeat(&heartbeat(3, 2, 90), 0);
    gm.on_heartbeat(&Heartbeat { blocks_borrowed: 1, ..heartbeat(4, 2, 50) }, 0);
    let mut with = |tier: TierRequest| {
        let advice = gm.on_borrow_query(&BorrowQuery { debtor: 1, tier: tier.into(), ..Default::default() }, 0);
        advice.candidates.iter().map(|c| c.instance).collect::<Vec<_>>()
    };
    assert_eq!(with(TierRequest::Any), [2, 3, 4]);
    assert_eq!(with(TierRequest::DeviceOnly), [2, 4]);
    assert_eq!(with(TierRequest::HostOnly), [3]);
    gm.on_heartbeat(&Heartbeat { frozen: 7, ..heartbeat(2, 3, 10) }, 0);
    gm.on_heartbeat(&Heartbeat { draining: true, ..heartbeat(3, 3, 90) }, 0);
    assert_eq!(ask(&mut gm, 1, 0, &[]), [4], "nobody else lends");
}

#[test]
fn queries_are_answered_without_the_gmanager() {
    let mut gm = pool(&[0, 30]);
    let query = BorrowQuery { query: 5, debtor: 1, blocks: 20, ..Default::default() };
    gm.tick(0);
    assert_eq!(serve_query(&gm.view(), 8, &query), None, "nobody registered on that connection");
    gm.set_conn(InstanceId(1), 8);
    let advice = serve_query(&gm.view(), 8, &query).unwrap();
    assert_eq!((advice.query, advice.candidates.len()), (5, 1));
    assert_eq!(advice.candidates[0].quic_addr, "10.0.0.2:7000");
    assert_eq!(
        serve_query(&gm.view(), 8, &query).map(|a| (a.pool_blocks_total, a.pool_blocks_lendable)),
        Some((200, 30))
    );
    // A refusal is seen at once; so is a fence.
    gm.on_refusal(&Refusal { creditor: 2, blocks_lendable: 0 });
    assert_eq!(serve_query(&gm.view(), 8, &query).unwrap().candidates, []);
    gm.set_conn(InstanceId(1), 0);
    assert_eq!(serve_query(&gm.view(), 8, &query), None);
}

#[test]
fn competing_debtors_are_spread() {
    let mut gm = pool(&[0, 0, 0, 30, 30, 30]);
    let firsts: Vec<_> = (1..=3).map(|debtor| ask(&mut gm, debtor, 20, &[])[0]).collect();
    assert_eq!(firsts, [4, 5, 6]);
    // All are booked out, yet who says so is the creditor.
    assert_eq!(ask(&mut gm, 1, 30, &[]).len(), 3);
    assert_eq!(ask(&mut gm, 1, 30, &[]).len(), 3);
    // A heartbeat starts anew.
    gm.on_heartbeat(&heartbeat(6, 2, 25), 0);
    assert_eq!(ask(&mut gm, 1, 1, &[])[0], 6);
}

#[test]
fn a_refusal_pauses_until_the_next_heartbeat() {
    let mut gm = pool(&[0, 30, 20]);
    gm.on_refusal(&Refusal { creditor: 2, blocks_lendable: 3 });
    assert_eq!(ask(&mut gm, 1, 5, &[]), [3]);
    assert_eq!(gm.on_borrow_query(&BorrowQuery { debtor: 1, ..Default::default() }, 0).pool_blocks_lendable, 23);
    gm.on_heartbeat(&heartbeat(2, 1, 30), 0);
    assert_eq!(ask(&mut gm, 1, 5, &[]), [3], "that heartbeat is the old one");
    gm.on_heartbeat(&heartbeat(2, 2, 30), 0);
    assert_eq!(ask(&mut gm, 1, 5, &[]), [2, 3]);
}

#[test]
fn kv_nodes_lend_too() {
    let mut gm = pool(&[0]);
    let kv = Register { role: Role::Kv.into(), ..register(2) };
    gm.on_register(&kv, 0).unwrap();
    assert_eq!(ask(&mut gm, 1, 5, &[]), [0; 0], "nothing is known of it before its first heartbeat");
    gm.on_heartbeat(&heartbeat(2, 1, 30), 0);
    assert_eq!(ask(&mut gm, 1, 5, &[]), [2]);
}

#[test]
fn the_ledger_is_what_creditors_report() {
    let mut gm = pool(&[0, 0]);
    let lent = vec![Debt { debtor: 2, blocks: 7 }, Debt { debtor: 9, blocks: 1 }];
    gm.on_heartbeat(&Heartbeat { lent, ..heartbeat(1, 2, 0) }, 0);
    let row = |debtor, blocks| LedgerRow { creditor: InstanceId(1), debtor: InstanceId(debtor), blocks };
    assert_eq!(gm.ledger(), [row(2, 7), row(9, 1)]);
}

#[test]
fn nobody_speaks_in_anothers_name() {
    let mut gm = pool(&[0, 30]);
    let mut say = |from: Option<u32>, body: ControlBody| gm.on_control(from.map(InstanceId), &body, 0);
    let query = || {
        ControlBody::BorrowQuery(BorrowQuery { query: 1, debtor: 1, blocks: 1, exclude: vec![], ..Default::default() })
    };
    assert!(matches!(say(Some(1), query()), Some(ControlBody::BorrowAdvice(_))));
    assert_eq!(say(Some(2), query()), None);
    assert_eq!(say(None, query()), None);
    assert_eq!(say(Some(1), ControlBody::Heartbeat(Box::new(heartbeat(2, 5, 0)))), None);
    assert_eq!(say(Some(1), ControlBody::Deregister(lagoon_protocol::Deregister { instance: 2 })), None);
    assert_eq!(say(None, ControlBody::Refusal(Refusal { creditor: 2, blocks_lendable: 0 })), None);
    let status = say(None, ControlBody::StatusQuery(lagoon_protocol::StatusQuery { query: 3, prefixes: None }));
    let Some(ControlBody::StatusReply(status)) = status else { panic!("{status:?}") };
    assert_eq!((status.query, status.instances.len()), (3, 2));
    assert!(matches!(say(Some(1), query()), Some(ControlBody::BorrowAdvice(a)) if a.candidates.len() == 1));
}
