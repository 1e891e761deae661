//! KV transfer over every path, as a share of what the machine can do, in one run: KVDirect's blocks (4 KiB to 1 MiB,
//! 1,024 and 2,048 of them), merged and not, verified and not; over shared memory against memcpy, over QUIC with one to
//! several connections against quinn's own bulk stream, raw TCP, and one message a block on the same connection.
//!
//! `cargo bench -p lagoon-benches --bench transfer -- [--json] [--smoke]`. The peers run in the same rounds as the
//! parties, and medians are reported.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("the benchmark shares memory as Linux does");
}

#[cfg(target_os = "linux")]
#[path = "transfer/rig.rs"]
mod rig;

#[cfg(target_os = "linux")]
#[path = "transfer/peers.rs"]
mod peers;

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    run::main()
}

#[cfg(target_os = "linux")]
mod run {
    use super::{
        peers::Peers,
        rig::{Rig, Scheme, Way},
    };
    use anyhow::Result;
    use clap::Parser;
    use serde_json::{Value, json};

    #[derive(Parser)]
    struct Args {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
        /// Rounds over all parties; the medians of the rounds are reported.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Sizes of a block, in KiB.
        #[arg(long, value_delimiter = ',', default_values_t = [4, 16, 64, 256, 1024])]
        block_kib: Vec<u32>,
        /// Numbers of blocks.
        #[arg(long, value_delimiter = ',', default_values_t = [1024, 2048])]
        blocks: Vec<u32>,
        /// Numbers of QUIC connections.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
        lanes: Vec<usize>,
        /// Threads that copy over shared memory.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
        threads: Vec<usize>,
        /// Two small sizes, one round: whether it works.
        #[arg(long)]
        smoke: bool,
        /// Given by `cargo bench`.
        #[arg(long, hide = true)]
        bench: bool,
    }

    fn median(values: &mut [f64]) -> f64 {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// A way to move the bytes, its rates in each round, and the peer that it is compared with.
    struct Party {
        name: String,
        limit: String,
        gb_per_s: Vec<f64>,
        detail: Value,
    }

    fn parties(args: &Args) -> Vec<(String, String, Way, Scheme)> {
        let mut out = Vec::new();
        for threads in &args.threads {
            for (verify, coalesce) in [(true, true), (false, true), (true, false)] {
                let name = format!("host, {threads} threads{}", marks(verify, coalesce));
                let limit = format!("memcpy, {threads} threads");
                out.push((name, limit, Way::Host(*threads), Scheme { verify, coalesce, one_by_one: false }));
            }
        }
        for lanes in &args.lanes {
            for (verify, coalesce) in [(true, true), (false, true), (true, false)] {
                let name = format!("quic, {lanes} connections{}", marks(verify, coalesce));
                out.push((name, "quinn".to_owned(), Way::Quic(*lanes), Scheme { verify, coalesce, one_by_one: false }));
            }
        }
        let message = Scheme { verify: true, coalesce: false, one_by_one: true };
        out.push(("quic, a message a block".to_owned(), "quinn".to_owned(), Way::Quic(1), message));
        out
    }

    fn marks(verify: bool, coalesce: bool) -> &'static str {
        match (verify, coalesce) {
            (true, true) => "",
            (false, _) => ", unverified",
            (true, false) => ", not merged",
        }
    }

    /// All parties on one size: in every round each goes once, peers among them.
    fn measure(args: &Args, block_bytes: u32, blocks: u32) -> Result<Vec<Party>> {
        let mut rig = Rig::new(block_bytes, blocks)?;
        let mut peers = Peers::start(rig.bytes())?;
        let parties = parties(args);
        let mut out: Vec<Party> = Vec::new();
        for threads in &args.threads {
            let name = format!("memcpy, {threads} threads");
            out.push(Party { limit: name.clone(), name, gb_per_s: Vec::new(), detail: Value::Null });
        }
        for name in ["tcp", "quinn"] {
            out.push(Party {
                name: name.to_owned(),
                limit: name.to_owned(),
                gb_per_s: Vec::new(),
                detail: Value::Null,
            });
        }
        let first = out.len();
        for (name, limit, ..) in &parties {
            out.push(Party { name: name.clone(), limit: limit.clone(), gb_per_s: Vec::new(), detail: Value::Null });
        }
        // The first round warms up: page faults, connections, windows.
        for round in 0..=args.rounds {
            for (at, party) in out.iter_mut().enumerate() {
                let seconds = match at.checked_sub(first).and_then(|at| parties.get(at)) {
                    Some((_, _, way, scheme)) => {
                        let (seconds, detail) = rig.transfer(*way, *scheme)?;
                        party.detail = detail;
                        seconds
                    }
                    None if party.name == "tcp" => peers.tcp()?,
                    None if party.name == "quinn" => peers.quinn()?,
                    None => rig.memcpy(args.threads.get(at).copied().unwrap_or(1)),
                };
                #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
                let rate = rig.bytes() as f64 / seconds / 1e9;
                party.gb_per_s.extend((round > 0).then_some(rate));
            }
        }
        Ok(out)
    }

    fn row(parties: &mut [Party], block_bytes: u32, blocks: u32) -> Value {
        let medians: Vec<(String, f64)> =
            parties.iter_mut().map(|party| (party.name.clone(), median(&mut party.gb_per_s))).collect();
        let of = |name: &str| medians.iter().find(|(other, _)| other == name).map_or(f64::NAN, |(_, rate)| *rate);
        let message = of("quic, a message a block");
        let rows: Vec<Value> = parties
            .iter()
            .map(|party| {
                let rate = of(&party.name);
                json!({ "party": party.name, "gb_per_s": rate, "limit": party.limit, "of_limit": rate / of(&party.limit),
                    "over_message_a_block": rate / message, "detail": party.detail })
            })
            .collect();
        json!({ "block_bytes": block_bytes, "blocks": blocks, "parties": rows })
    }

    fn print(size: &Value) {
        println!("\n{} blocks of {} bytes", size["blocks"], size["block_bytes"]);
        println!("{:<40} {:>9} {:>9} {:>9}", "", "GB/s", "of limit", "/message");
        for row in size["parties"].as_array().into_iter().flatten() {
            println!(
                "{:<40} {:>9.2} {:>9.2} {:>9.2}",
                row["party"].as_str().unwrap_or_default(),
                row["gb_per_s"].as_f64().unwrap_or(f64::NAN),
                row["of_limit"].as_f64().unwrap_or(f64::NAN),
                row["over_message_a_block"].as_f64().unwrap_or(f64::NAN)
            );
        }
    }

    /// The commit that was measured, where git knows it.
    fn commit() -> Option<String> {
        let output = std::process::Command::new("git").args(["describe", "--always", "--dirty"]).output().ok()?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn device() -> Option<String> {
        let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = info.lines().find(|line| line.starts_with("model name"))?;
        line.split_once(':').map(|(_, name)| name.trim().to_owned())
    }

    pub(super) fn main() -> Result<()> {
        let mut args = Args::parse();
        if args.smoke {
            (args.rounds, args.block_kib, args.blocks) = (1, vec![4, 64], vec![128]);
            (args.lanes, args.threads) = (vec![1, 2], vec![1, 2]);
        }
        let mut sizes = Vec::new();
        for blocks in &args.blocks {
            for kib in &args.block_kib {
                let mut parties = measure(&args, kib * 1024, *blocks)?;
                let size = row(&mut parties, kib * 1024, *blocks);
                if !args.json {
                    print(&size);
                }
                sizes.push(size);
            }
        }
        if args.json {
            let threads = std::thread::available_parallelism().map_or(0, usize::from);
            let object = json!({ "bench": "transfer", "device": device(), "commit": commit(), "rounds": args.rounds,
                "hardware_threads": threads, "sizes": sizes });
            println!("{object:#}");
        }
        Ok(())
    }
}
