//! DistAttention between two processes, a debtor and a creditor of one CPU thread each, on the layers of a
//! 125M-parameter Llama (hidden 768, 12 query and 4 KV heads of 64) with random weights and almost all KV remote:
//!
//! * **wait**: from the hand-out of a layer's queries until the device thread has all partials, less the creditor's
//!   computation for that query; over a bare quinn echo of the same bytes between the same processes. Echoes in a row
//!   find warm caches and running threads; layers, with computation in between, do not: the first echo after each
//!   step is counted separately (`paced`);
//! * **overhead**: time per decode step, over that of one instance with all KV, in the debtor's process;
//! * **accounting**: bytes that both instances keep beside the KV.
//!
//! The three are interleaved step by step: a pooled step, a local step, some echoes. Prefill moves its bytes but
//! computes nothing (see `timed`). Each process is pinned to a processor with `taskset` where there is one:
//! `cargo bench -p lagoon-benches --bench pool -- [--contexts 1024,65536] [--batches 1,8] [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

mod echo;
mod node;
mod timed;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use echo::Echo;
use lagoon_benches::model::llama;
use lagoon_benches::quic::Pem;
use lagoon_instance::Event;
use lagoon_model::ModelSpec;
use lagoon_protocol::PartialsFrame;
use lagoon_runner::Report;
use lagoon_transport::{ClusterCa, Frame};
use lagoon_types::limits::BLOCK_TOKENS_DEFAULT;
use lagoon_types::{AttentionGeometry, StepId};
use lagoon_wire::encode;
use node::{CREDITOR, DEBTOR, Side};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};
use timed::STAGES;

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of context.
    #[arg(long, value_delimiter = ',', default_value = "1024,4096,16384,65536")]
    contexts: Vec<u32>,
    /// Sequences that decode together.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    batches: Vec<u32>,
    /// Layers of the model.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Measured steps of each scenario.
    #[arg(long, default_value_t = 100)]
    steps: u32,
    /// Echoes in a row after each step, and after one that comes as a layer's queries do, from a rest.
    #[arg(long, default_value_t = 4)]
    echoes: u32,
    /// Which thread runs the loop.
    #[arg(long, value_enum, default_value_t)]
    runtime: RuntimeArg,
    /// Microseconds that a loop polls for a peer's frame that is due before it sleeps (`serve --poll-us`). Not to be
    /// measured where a process has one processor for loop and device, or shares it.
    #[arg(long, default_value_t = 0)]
    poll_us: u64,
    /// How remote KV is attended to: `ship` sends queries, `fetch` brings the KV in every layer of every step
    /// (Infinite-LLM v1 Figure 12). Waits are those of shipped queries; fetching shows in the steps' times.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ship")]
    policies: Vec<PolicyArg>,
    /// Processors of debtor and creditor.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    cpus: Vec<u32>,
    /// Set in the processes that the benchmark starts.
    #[arg(long, hide = true)]
    role: Option<Role>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    Debtor,
    Creditor,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RuntimeArg {
    /// The process's first thread, beside tokio's workers.
    Main,
    /// One of tokio's workers.
    Worker,
    /// One thread for the loop and the network, as in `lagoon serve`.
    #[default]
    Current,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PolicyArg {
    Ship,
    Fetch,
}

/// One measurement, as its processes get it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Scenario {
    context: u32,
    batch: u32,
    layers: usize,
    steps: u32,
    echoes: u32,
    runtime: RuntimeArg,
    poll_us: u64,
    policy: PolicyArg,
}

/// Order to a child process: a line on its standard input.
#[derive(Serialize, Deserialize)]
struct Order {
    scenario: Scenario,
    pem: Pem,
    /// For the debtor: the creditor's node and its echo.
    creditor: Option<[SocketAddr; 2]>,
}

/// Unmeasured steps at the start.
const WARM_UP: u32 = 5;

pub(crate) fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl Scenario {
    pub(crate) fn model(&self) -> ModelSpec {
        let geometry = AttentionGeometry { heads: 12, kv_heads: 4, head_dim: 64, latent: false };
        llama(self.layers, (768, 2048), geometry)
    }

    /// Tokens that let all sequences decode together during the measurement: the first ones decode while the last
    /// ones are prefilled.
    pub(crate) fn tokens_max(&self) -> u32 {
        self.steps + WARM_UP + 16 + 2 * self.batch * (1 + self.context / 512)
    }

    /// rBlocks for all sequences.
    fn blocks(&self) -> u32 {
        self.batch * ((self.context + self.tokens_max()) / BLOCK_TOKENS_DEFAULT + 4)
    }

    /// Bytes of a layer's frames, there and back.
    fn frame_bytes(&self) -> Result<(usize, usize)> {
        let (rows, geometry) = (self.batch as usize, self.model().geometry);
        let (step, layer, zeros) = (StepId(1), 0, |n: usize| bytes::Bytes::from(vec![0; n]));
        let out = rows * geometry.q_dim() * 4;
        let query = PartialsFrame::Query { step, layer, rows: self.batch, queries: zeros(out) };
        let lse = zeros(rows * geometry.heads as usize * 4);
        let partial =
            PartialsFrame::Partial { step, layer, rows: self.batch, out: zeros(out), lse, count: zeros(rows * 4) };
        Ok((encode(&Frame::Partials(query))?.len(), encode(&Frame::Partials(partial))?.len()))
    }
}

// --- the two processes ---

fn read_order() -> Result<Order> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn micros(durations: impl IntoIterator<Item = Duration>) -> Vec<f64> {
    durations.into_iter().map(|d| d.as_secs_f64() * 1e6).collect()
}

fn account(side: &Side) -> Value {
    let account = side.instance().kv_account();
    json!({ "kv_bytes": account.kv_bytes, "metadata_bytes": account.metadata_bytes })
}

async fn creditor(order: Order) -> Result<()> {
    let echo = echo::serve(&order.pem)?;
    let mut side = Side::start(&order.scenario, order.scenario.blocks(), CREDITOR, Some(&order.pem))?;
    let quic = side.net.as_ref().context("a node")?.node.local_addr();
    println!("{}", json!([quic, echo]));
    let (asked, mut asks) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        let mut line = String::new();
        while std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {}
        asked.blocking_send(())
    });
    // Counted while everything is lent: the peer may be gone at the end.
    let mut most = account(&side);
    loop {
        tokio::select! {
            biased;
            _ = asks.recv() => break,
            turn = side.turn() => {
                if turn.is_err() {
                    break;
                }
            }
        }
        if side.clock.served_len().is_multiple_of(256) && side.instance().status().blocks_lent > 0 {
            most = account(&side);
        }
    }
    println!("{}", json!({ "served_us": micros(side.clock.served()), "stages": side.clock.stages(), "account": most }));
    Ok(())
}

/// Whether a step decoded one token of every sequence.
fn is_full(report: &Report, batch: u32) -> bool {
    matches!(report, Report::Done { samples, .. } if samples.len() == batch as usize)
}

async fn debtor(order: Order) -> Result<()> {
    let Order { scenario, pem, creditor } = order;
    let [creditor, echo] = creditor.context("a creditor")?;
    let (out, back) = scenario.frame_bytes()?;
    let mut echo = Echo::connect(&pem, echo, out, back).await?;
    let mut local = Side::start(&scenario, scenario.blocks(), DEBTOR, None)?;
    local.submit(&scenario);
    let mut local_done = prefill(&mut local, &scenario).await?;
    let mut pooled = Side::start(&scenario, 4 * scenario.batch, DEBTOR, Some(&pem))?;
    pooled.borrow_from(creditor);
    pooled.submit(&scenario);
    let mut pooled_done = prefill(&mut pooled, &scenario).await?;
    let [mut local_us, mut pooled_us, mut echo_us, mut paced_us] = [const { Vec::new() }; 4];
    let mut first_wait = 0;
    for step in 0..WARM_UP + scenario.steps {
        if step == WARM_UP {
            first_wait = pooled.clock.waits().len();
            [&mut local_us, &mut pooled_us, &mut echo_us, &mut paced_us].into_iter().for_each(Vec::clear);
        }
        let (took, report) = full_step(&mut pooled, pooled_done, &scenario).await?;
        pooled_us.push(took);
        pooled_done = report;
        paced_us.push(echo.trip().await?);
        for _ in 0..scenario.echoes {
            echo_us.push(echo.trip().await?);
        }
        let (took, report) = full_step(&mut local, local_done, &scenario).await?;
        local_us.push(took);
        local_done = report;
    }
    let waits = pooled.clock.waits();
    let status = pooled.instance().status();
    let remote: u32 = status.sequences.iter().flat_map(|s| s.remote_blocks.values()).sum();
    let all: u32 = status.sequences.iter().map(|s| s.local_blocks).sum::<u32>() + remote;
    let object = json!({
        "stages": pooled.clock.stages(), "local_us": micros(local_us), "pooled_us": micros(pooled_us), "echo_us": micros(echo_us), "paced_echo_us": micros(paced_us),
        "first_wait": first_wait, "trip_us": micros(waits.iter().map(|w| w.trip)),
        "idle_us": micros(waits.iter().map(|w| w.idle)), "out_bytes": out, "back_bytes": back,
        "remote_share": f64::from(remote) / f64::from(all), "account": account(&pooled),
    });
    println!("{object}");
    Ok(())
}

/// Runs from the end of one step, `done`, to the end of the next that decodes all sequences. Steps in which a
/// sequence waits for a block are not measured.
async fn full_step(side: &mut Side, mut done: Report, scenario: &Scenario) -> Result<(Duration, Report)> {
    loop {
        let start = Instant::now();
        side.step(Event::Runner(done));
        let (end, report) = side.until_done().await?;
        if is_full(&report, scenario.batch) {
            return Ok((end - start, report));
        }
        done = report;
    }
}

/// Runs until all sequences have decoded in one step.
async fn prefill(side: &mut Side, scenario: &Scenario) -> Result<Report> {
    loop {
        let (_, report) = side.until_done().await?;
        if is_full(&report, scenario.batch) {
            return Ok(report);
        }
        side.step(Event::Runner(report));
    }
}

fn run_role(role: Role) -> Result<()> {
    let order = read_order()?;
    let runtime_arg = order.scenario.runtime;
    let mut builder = match runtime_arg {
        RuntimeArg::Current => tokio::runtime::Builder::new_current_thread(),
        RuntimeArg::Main | RuntimeArg::Worker => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let work = async move {
        match role {
            Role::Debtor => debtor(order).await,
            Role::Creditor => creditor(order).await,
        }
    };
    match runtime_arg {
        RuntimeArg::Worker => runtime.block_on(async { tokio::spawn(work).await })?,
        RuntimeArg::Main | RuntimeArg::Current => runtime.block_on(work),
    }
}

// --- the benchmark's own process ---

struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Process {
    fn start(role: &str, cpu: Option<u32>, order: &Order) -> Result<Self> {
        let exe = std::env::current_exe()?;
        let mut command = match cpu {
            Some(cpu) => {
                let mut taskset = Command::new("taskset");
                taskset.arg("-c").arg(cpu.to_string()).arg(exe);
                taskset
            }
            None => Command::new(exe),
        };
        let command = command.args(["--role", role]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start the {role}"))?;
        let mut stdin = child.stdin.take().context("a pipe")?;
        writeln!(stdin, "{}", serde_json::to_string(order)?)?;
        let lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        Ok(Self { child, stdin: Some(stdin), lines })
    }

    fn line(&mut self) -> Result<Value> {
        let line = self.lines.next().context("a process of the benchmark ended early")??;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn numbers(value: &Value, key: &str) -> Vec<f64> {
    value[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// 10th, 50th and 90th percentile.
fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 5, 9].map(|tenth| values.get(values.len() * tenth / 10).copied().unwrap_or(f64::NAN))
}

fn spread_json(values: Vec<f64>) -> Value {
    let [p10, p50, p90] = spread(values).map(|v| (v * 10.0).round() / 10.0);
    json!({ "p10": p10, "p50": p50, "p90": p90 })
}

/// Medians of the times between consecutive stages, from layer `first` on.
fn stages(debtor: &Value, creditor: &Value, first: usize) -> Value {
    let at = |stage: usize| -> Vec<f64> {
        let side = if (3..8).contains(&stage) { creditor } else { debtor };
        side["stages"][stage].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let between = |stage: usize| {
        let times: Vec<f64> = at(stage).iter().zip(at(stage + 1)).skip(first).map(|(a, b)| b - a).collect();
        (spread(times)[1] * 10.0).round() / 10.0
    };
    (0..STAGES - 1).map(between).collect()
}

fn measure(args: &Args, context: u32, batch: u32, policy: PolicyArg, pinned: bool) -> Result<Value> {
    let scenario = Scenario {
        context,
        batch,
        layers: args.layers,
        steps: args.steps,
        echoes: args.echoes,
        runtime: args.runtime,
        poll_us: args.poll_us,
        policy,
    };
    let ca = ClusterCa::generate("bench")?;
    let cpu = |at: usize| args.cpus.get(at).copied().filter(|_| pinned);
    let order = Order { scenario: scenario.clone(), pem: Pem::issue(&ca, "creditor")?, creditor: None };
    let mut creditor = Process::start("creditor", cpu(1), &order)?;
    let addrs = serde_json::from_value(creditor.line()?)?;
    let order = Order { scenario, pem: Pem::issue(&ca, "debtor")?, creditor: Some(addrs) };
    let mut debtor = Process::start("debtor", cpu(0), &order)?;
    let seen = debtor.line()?;
    creditor.stdin = None;
    let served = creditor.line()?;
    let mut result = summary(args, context, batch, &seen, &served)?;
    result["policy"] = json!(policy);
    Ok(result)
}

fn summary(args: &Args, context: u32, batch: u32, seen: &Value, served: &Value) -> Result<Value> {
    let (trips, busy) = (numbers(seen, "trip_us"), numbers(served, "served_us"));
    ensure!(trips.len() == busy.len(), "{} trips, {} queries served", trips.len(), busy.len());
    let first = usize::try_from(seen["first_wait"].as_u64().context("a count")?)?;
    let net: Vec<f64> = trips.iter().zip(&busy).skip(first).map(|(trip, busy)| trip - busy).collect();
    let measured = |values: Vec<f64>| values.into_iter().skip(first).collect::<Vec<_>>();
    let (local, pooled, echo) = (numbers(seen, "local_us"), numbers(seen, "pooled_us"), numbers(seen, "echo_us"));
    let paced = numbers(seen, "paced_echo_us");
    let middle = |values: &[f64]| spread(values.to_vec())[1];
    let sum = |key: &str| {
        let of = |value: &Value| value["account"][key].as_f64().unwrap_or(f64::NAN);
        of(seen) + of(served)
    };
    let layers = f64::from(as_u32(args.layers));
    let round = |x: f64, digits: i32| (x * 10f64.powi(digits)).round() / 10f64.powi(digits);
    Ok(json!({
        "context": context, "batch": batch, "remote_share": round(seen["remote_share"].as_f64().unwrap_or(0.0), 3),
        "out_bytes": seen["out_bytes"], "back_bytes": seen["back_bytes"], "waits": net.len(),
        "wait_over_echo": round(middle(&net) / middle(&echo), 2),
        "wait_over_paced_echo": round(middle(&net) / middle(&paced), 2),
        "stages_us": stages(seen, served, first),
        "wait_us": spread_json(net), "echo_us": spread_json(echo), "paced_echo_us": spread_json(paced),
        "idle_us": spread_json(measured(numbers(seen, "idle_us"))), "creditor_us": spread_json(measured(busy)),
        "overhead": round(middle(&pooled) / middle(&local) - 1.0, 3),
        "overhead_us_per_layer": round((middle(&pooled) - middle(&local)) / layers, 1),
        "pooled_step_us": spread_json(pooled), "local_step_us": spread_json(local),
        "metadata_percent": round(100.0 * sum("metadata_bytes") / sum("kv_bytes"), 3),
    }))
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(role) = args.role {
        return run_role(role);
    }
    let pinned = Command::new("taskset").arg("--version").stdout(Stdio::null()).status().is_ok();
    let mut results = Vec::new();
    if !args.json {
        println!(
            "{:>8} {:>5} {:>6} {:>7} {:>9} {:>9} {:>6} {:>6} {:>11} {:>11} {:>9} {:>7}",
            "context",
            "batch",
            "policy",
            "remote",
            "wait us",
            "echo us",
            "ratio",
            "paced",
            "pooled us",
            "local us",
            "overhead",
            "meta %"
        );
    }
    for &context in &args.contexts {
        for &batch in &args.batches {
            for &policy in &args.policies {
                let r = measure(&args, context, batch, policy, pinned)
                    .with_context(|| format!("{context} tokens x {batch}"))?;
                if !args.json {
                    let p50 = |key: &str| r[key]["p50"].as_f64().unwrap_or(f64::NAN);
                    let number = |key: &str| r[key].as_f64().unwrap_or(f64::NAN);
                    println!(
                        "{context:>8} {batch:>5} {:>6} {:>7.3} {:>9.1} {:>9.1} {:>6.2} {:>6.2} {:>11.1} {:>11.1} {:>8.1}% {:>7.3}",
                        r["policy"].as_str().unwrap_or_default(),
                        number("remote_share"),
                        p50("wait_us"),
                        p50("echo_us"),
                        number("wait_over_echo"),
                        number("wait_over_paced_echo"),
                        p50("pooled_step_us"),
                        p50("local_step_us"),
                        100.0 * number("overhead"),
                        number("metadata_percent"),
                    );
                }
                results.push(r);
            }
        }
    }
    if args.json {
        let object = json!({
            "benchmark": "pool", "layers": args.layers, "steps": args.steps, "runtime": args.runtime,
            "poll_us": args.poll_us, "pinned": pinned.then_some(args.cpus), "results": results,
        });
        println!("{object:#}");
    }
    Ok(())
}
