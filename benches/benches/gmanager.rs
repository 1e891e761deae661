//! The gManager's costs over the pool's size: `cargo bench -p lagoon-benches --bench gmanager -- [--json]
//! [--instances 10,1000] [--requests 100] [--plot FILE.svg]`.
//!
//! Every instance runs `--requests` requests, a tenth of which have blocks on a creditor; a heartbeat carries the rows
//! that changed, an eighth of them. Reported for each size, on one thread unless noted:
//! * **register_us**, **full_us**: a registration, and the first heartbeat with all rows;
//! * **heartbeat_us**: a heartbeat, median and 99th percentile;
//! * **query_ns**: a debtor's query through the gManager; **view_ns**: the same from the view without it;
//!   **view_per_s**: the same on all processors while the writer keeps publishing;
//! * **publish_us**: sorting the view again;
//! * **plan_ms**: a planning round; **round_ms**: the whole tick, with its orders issued;
//! * **bytes**: growth of the process by the kernel's count, and the view's share of it.
#![allow(clippy::print_stdout, reason = "a benchmark prints its result")]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use lagoon_cluster::{GManager, GManagerConfig, GManagerOutput, PlannerConfig, serve_query};
use lagoon_plot::{Panel, Series};
use lagoon_protocol::{
    BatchPoint, BorrowQuery, Calibration, Debt, Heartbeat, Link, Load, PlacementEntry, PoolShape, Register,
    VERSION_MAX, VERSION_MIN,
};
use lagoon_types::{DType, InstanceId, limits};
use serde::Serialize;
use std::time::Instant;

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Pool sizes.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1_000, 10_000])]
    instances: Vec<u32>,
    /// Requests of each instance.
    #[arg(long, default_value_t = 100)]
    requests: u32,
    /// Rounds of heartbeats that are measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Draws how times and memory grow into this SVG file.
    #[arg(long)]
    plot: Option<std::path::PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    instances: u32,
    requests: u64,
    register_us: f64,
    full_us: f64,
    heartbeat_us: f64,
    heartbeat_p99_us: f64,
    query_ns: f64,
    view_ns: f64,
    view_per_s: f64,
    view_threads: usize,
    publish_us: f64,
    plan_ms: f64,
    round_ms: f64,
    orders: u64,
    bytes: u64,
    view_bytes: u64,
}

const BLOCKS: u32 = 10_000;
/// The request of each debtor that is long.
const LONG: u32 = 3;

/// SplitMix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let a = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}

fn register(i: u32) -> Register {
    let shape = PoolShape {
        model_hash: vec![7; 32],
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        kv_dtype: DType::F16.code().into(),
        block_tokens: 32,
        window: 0,
        alibi_bias_max: 0,
        attention_softcap: 0,
        latent: false,
        attention_scale: 0.125f32.to_bits(),
        windows: vec![],
        unpooled_windows: vec![],
    };
    let batches = [(1, 12_000.0), (16, 14_000.0), (64, 22_000.0), (256, 60_000.0)];
    Register {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        name: format!("n{i}"),
        quic_addr: format!("10.{}.{}.{}:7000", i >> 16 & 255, i >> 8 & 255, i & 255),
        incarnation: u64::from(i),
        shape: Some(Box::new(shape)),
        blocks_total: BLOCKS,
        backend: "cuda".to_owned(),
        calibration: Some(Box::new(Calibration {
            batches: batches.map(|(batch, step_us)| BatchPoint { batch, step_us }).to_vec(),
            attention_us_per_ktoken: 30.0,
            prefill_us_per_token: 50.0,
            copy_bytes_per_s: 1e10,
            prompt_attention_us_per_ktoken: 0.0,
        })),
        ..Register::default()
    }
}

/// A simulated pool: the messages of each instance.
struct Pool {
    instances: u32,
    requests: u32,
    random: u64,
}

impl Pool {
    /// The creditor of an instance: every second instance owes to its neighbour.
    fn creditor(&self, i: u32) -> Option<u32> {
        (i % 2 == 1 && i < self.instances).then_some(i + 1)
    }

    fn is_remote(seq: u32) -> bool {
        seq.is_multiple_of(10)
    }

    /// Placement entries of an instance, those that `chosen` takes.
    fn rows(&mut self, i: u32, chosen: impl Fn(u32) -> bool) -> Vec<PlacementEntry> {
        let mut rows = Vec::new();
        let mut row = |debtor: u32, seq: u32, random: &mut u64| {
            // A planning round moves a debtor's long request.
            let long = seq == LONG && debtor % 2 == 1;
            let blocks = if long { 4_000 } else { u32::try_from(draw(random) % 150).unwrap_or(0) + 1 };
            rows.push(PlacementEntry { debtor, seq: seq.into(), blocks, blocks_sealed: blocks - 1 });
        };
        for seq in (0..self.requests).filter(|s| chosen(*s)) {
            row(i, seq, &mut self.random);
        }
        if i > 1 && self.creditor(i - 1) == Some(i) {
            for seq in (0..self.requests).filter(|s| Self::is_remote(*s) && chosen(*s)) {
                row(i - 1, seq, &mut self.random);
            }
        }
        rows
    }

    fn heartbeat(&mut self, i: u32, seq: u64, full: bool) -> Heartbeat {
        let turn = u32::try_from(seq % 8).unwrap_or(0);
        let placements = self.rows(i, |s| full || s % 8 == turn);
        let lent =
            if i > 1 && self.creditor(i - 1) == Some(i) { vec![Debt { debtor: i - 1, blocks: 700 }] } else { vec![] };
        let random = u32::try_from(draw(&mut self.random) % 1_000).unwrap_or(0);
        let free = if self.creditor(i).is_some() { random / 5 } else { 6_000 + random };
        let peers = (1..=4).map(|d| (i + d - 1) % self.instances + 1).filter(|p| *p != i);
        let rtt_us = 50 + random % 100;
        Heartbeat {
            instance: i,
            incarnation: i.into(),
            seq,
            blocks_total: BLOCKS,
            blocks_free: free,
            blocks_lendable: free / 2,
            lent,
            blocks_borrowed: if self.creditor(i).is_some() { 700 } else { 0 },
            requests_running: self.requests,
            requests_waiting: 8,
            links: peers.map(|peer| Link { peer, rtt_us, bytes_per_s: 12_500_000_000, ..Link::default() }).collect(),
            placements,
            placements_full: full,
            load: Some(Load {
                batch: if self.creditor(i).is_some() { self.requests } else { self.requests / 4 },
                context_tokens: u64::from(self.requests) * if self.creditor(i).is_some() { 2_000 } else { 500 },
                remote_tokens: if self.creditor(i).is_some() { 20_000 } else { 0 },
                remote_request_tokens: 0,
                queue_blocks: if self.creditor(i).is_some() { vec![200; 8] } else { vec![] },
                batch_max: 256,
                step_us: 30_000,
                head_waits_ms: 0,
                prefill_tokens: None,
                answer_tokens_max: None,
            }),
            ..Heartbeat::default()
        }
    }
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

fn percentile(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "an index")]
    let at = ((times.len() - 1) as f64 * share) as usize;
    times[at]
}

/// Resident bytes of this process.
fn resident() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").context("read this process's memory")?;
    let pages: u64 = statm.split(' ').nth(1).context("a second field")?.parse()?;
    Ok(pages * 4096)
}

fn drained(gm: &mut GManager) -> u64 {
    let mut sent = 0;
    while let Some(GManagerOutput::Send { .. }) = gm.poll() {
        sent += 1;
    }
    sent
}

fn measure(args: &Args, instances: u32) -> Result<Row> {
    let before = resident()?;
    let config = GManagerConfig {
        instances_max: (instances as usize).clamp(16, limits::INSTANCES_MAX),
        planner: Some(PlannerConfig::default()),
        plan_ms: u64::MAX / 4,
        ..GManagerConfig::default()
    };
    let mut gm = GManager::with_config(config);
    let mut pool = Pool { instances, requests: args.requests, random: 7 };
    let start = Instant::now();
    for i in 1..=instances {
        let registered = gm.on_register(&register(i), 0).map_err(|r| anyhow::anyhow!(r.reason))?;
        ensure!(registered.instance == i, "numbers are given in order");
    }
    let register_us = micros(start) / f64::from(instances);
    let mut full = Vec::new();
    for i in 1..=instances {
        let m = pool.heartbeat(i, 1, true);
        let start = Instant::now();
        gm.on_heartbeat(&m, 1);
        full.push(micros(start));
    }
    let bytes = resident()?.saturating_sub(before);
    let mut beats = Vec::new();
    for round in 0..args.rounds {
        let seq = u64::from(round) + 2;
        for i in 1..=instances {
            let m = pool.heartbeat(i, seq, false);
            let start = Instant::now();
            let ack = gm.on_heartbeat(&m, seq);
            beats.push(micros(start));
            ensure!(ack.known && !ack.placements_wanted, "the heartbeat was taken");
        }
    }
    let now = u64::from(args.rounds) + 2 + limits::VIEW_MS;
    let start = Instant::now();
    gm.tick(now);
    let publish_us = micros(start);
    let (query_ns, view_ns, view_per_s, view_threads) = queries(&mut gm, instances, now);
    let start = Instant::now();
    let plan = gm.plan().context("a planner")?;
    let plan_ms = micros(start) / 1e3;
    let orders = plan.orders.len() as u64;
    drop(plan);
    drained(&mut gm);
    let start = Instant::now();
    gm.plan_now();
    let round_ms = micros(start) / 1e3;
    drained(&mut gm);
    Ok(Row {
        instances,
        requests: gm.placements().filter(|r| r.entry.as_ref().is_some_and(|e| e.debtor == r.instance)).count() as u64,
        register_us,
        full_us: percentile(&mut full, 0.5),
        heartbeat_us: percentile(&mut beats, 0.5),
        heartbeat_p99_us: percentile(&mut beats, 0.99),
        query_ns,
        view_ns,
        view_per_s,
        view_threads,
        publish_us,
        plan_ms,
        round_ms,
        orders,
        bytes,
        view_bytes: gm.view_bytes() as u64,
    })
}

/// Queries through the gManager, from the view, and from the view by several threads during publishing.
fn queries(gm: &mut GManager, instances: u32, now: u64) -> (f64, f64, f64, usize) {
    const ASKED: u32 = 20_000;
    let query = |n: u32| BorrowQuery { query: n.into(), debtor: n % instances + 1, blocks: 2, ..Default::default() };
    for i in 1..=instances {
        gm.set_conn(InstanceId(i), i.into());
    }
    let start = Instant::now();
    for n in 0..ASKED {
        assert!(!gm.on_borrow_query(&query(n), now).candidates.is_empty());
    }
    let query_ns = micros(start) * 1e3 / f64::from(ASKED);
    let view = gm.view();
    let ask = |n: u32| {
        let query = query(n);
        assert!(serve_query(&view, query.debtor.into(), &query).is_some());
    };
    let start = Instant::now();
    (0..ASKED).for_each(ask);
    let view_ns = micros(start) * 1e3 / f64::from(ASKED);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let start = Instant::now();
    let seconds = std::thread::scope(|scope| {
        let askers: Vec<_> = (0..threads)
            .map(|t| {
                let ask = &ask;
                let first = u32::try_from(t).unwrap_or(0) * 7919;
                scope.spawn(move || (first..first + ASKED).for_each(ask))
            })
            .collect();
        let mut at = now;
        while !askers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            at += limits::VIEW_MS;
            gm.publish_now(at);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        start.elapsed().as_secs_f64()
    });
    #[allow(clippy::cast_precision_loss, reason = "a few processors")]
    let asked = threads as f64 * f64::from(ASKED);
    (query_ns, view_ns, asked / seconds, threads)
}

/// Plots of times and memory over the pool's size.
fn panels(rows: &[Row]) -> Vec<Panel> {
    let line = |name: &str, of: &dyn Fn(&Row) -> f64| Series {
        name: name.to_owned(),
        points: rows.iter().map(|r| (f64::from(r.instances), of(r))).collect(),
    };
    let panel = |title: &str, y_label: &str, series| Panel {
        title: title.to_owned(),
        x_label: "instances".to_owned(),
        y_label: y_label.to_owned(),
        log_x: true,
        log_y: true,
        series,
    };
    #[allow(clippy::cast_precision_loss, reason = "a plot")]
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    vec![
        panel(
            "a heartbeat",
            "microseconds",
            vec![line("median", &|r| r.heartbeat_us), line("99th percentile", &|r| r.heartbeat_p99_us)],
        ),
        panel("a planning round", "milliseconds", vec![line("plan and orders", &|r| r.round_ms)]),
        panel(
            "memory",
            "MiB",
            vec![line("resident", &|r| mebibytes(r.bytes)), line("view", &|r| mebibytes(r.view_bytes))],
        ),
    ]
}

fn main() -> Result<()> {
    let args = Args::parse();
    let rows = args.instances.iter().map(|n| measure(&args, *n)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &args.plot {
        let title = format!("The gManager over the pool's size, {} requests an instance", args.requests);
        std::fs::write(path, lagoon_plot::figure(&title, &panels(&rows), 3)?).context("write the plot")?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "bench": "gmanager", "rows": rows }))?);
        return Ok(());
    }
    println!(
        "{:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>10} {:>9} {:>8} {:>8} {:>7} {:>9}",
        "instances",
        "requests",
        "reg us",
        "full us",
        "beat us",
        "p99 us",
        "query ns",
        "view ns",
        "view/s",
        "publ us",
        "plan ms",
        "round ms",
        "orders",
        "MB"
    );
    for r in &rows {
        println!(
            "{:>9} {:>9} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.0} {:>8.0} {:>10.0} {:>9.1} {:>8.2} {:>8.2} {:>7} {:>9.1}",
            r.instances,
            r.requests,
            r.register_us,
            r.full_us,
            r.heartbeat_us,
            r.heartbeat_p99_us,
            r.query_ns,
            r.view_ns,
            r.view_per_s,
            r.publish_us,
            r.plan_ms,
            r.round_ms,
            r.orders,
            r.bytes as f64 / 1e6
        );
    }
    Ok(())
}
