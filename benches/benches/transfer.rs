//! KV transfer over every path, as a share of the machine's limits, in one run: KVDirect's blocks (4 KiB to 1 MiB,
//! 1,024 and 2,048 of them), merged or not, verified or not; over shared memory against memcpy; over QUIC with one to
//! several connections against quinn's own bulk stream with the same configuration, raw TCP, and one message a block
//! on the same connection. The lower bound of verification is in the same run: hashing a block in cache, and copies
//! with hashes but without the protocol.
//!
//! Last, the transfer's share of a request's latency at an 8B model's shape, modelled from the measurements
//! (`share.rs`).
//!
//! `cargo bench --workspace --bench transfer -- [--json] [--quick | --smoke]`. The peers run in the same rounds as the
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
#[path = "transfer/share.rs"]
mod share;

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    run::main()
}

#[cfg(target_os = "linux")]
mod run {
    use super::{
        peers::Peers,
        rig::{Rig, Scheme, Way},
        share,
    };
    use anyhow::Result;
    use clap::Parser;
    use lagoon_benches::measure::{commit, device, hardware_threads, median};
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
        streams: Vec<usize>,
        /// Threads that copy over shared memory.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
        threads: Vec<usize>,
        /// Shared memory only: no TCP, no QUIC, no share of latency.
        #[arg(long)]
        host: bool,
        /// Three rounds of 1,024 blocks of 4, 64 and 512 KiB: two minutes.
        #[arg(long)]
        quick: bool,
        /// Two small sizes, one round: whether it works.
        #[arg(long)]
        smoke: bool,
        /// Given by `cargo bench`.
        #[arg(long, hide = true)]
        bench: bool,
    }

    /// A transfer path, or a limit.
    #[derive(Clone, Copy)]
    enum What {
        Memcpy(usize),
        CheckInCache,
        CopyAndCheck(usize),
        Tcp,
        Quinn,
        Transfer(Way, Scheme),
    }

    /// A path or limit, its rates in each round, and the party that it is compared with.
    struct Party {
        name: String,
        limit: String,
        what: What,
        gb_per_s: Vec<f64>,
        detail: Value,
    }

    impl Party {
        fn new(name: String, limit: &str, what: What) -> Self {
            Self { name, limit: limit.to_owned(), what, gb_per_s: Vec::new(), detail: Value::Null }
        }
    }

    pub(super) const MESSAGE: &str = "quic, a message a block";

    fn parties(args: &Args) -> Vec<Party> {
        let scheme = |(verify, coalesce)| Scheme { verify, coalesce, one_by_one: false };
        let schemes = [(true, true), (false, true), (true, false)];
        let mut out = vec![Party::new("check in cache, 1 thread".to_owned(), "memcpy, 1 threads", What::CheckInCache)];
        for threads in &args.threads {
            let limit = format!("memcpy, {threads} threads");
            out.push(Party::new(limit.clone(), &limit, What::Memcpy(*threads)));
            let name = format!("copy and check, {threads} threads");
            out.push(Party::new(name, &limit, What::CopyAndCheck(*threads)));
            for marked in schemes {
                let name = format!("host, {threads} threads{}", marks(marked));
                out.push(Party::new(name, &limit, What::Transfer(Way::Host(*threads), scheme(marked))));
            }
        }
        if args.host {
            return out;
        }
        out.push(Party::new("tcp".to_owned(), "tcp", What::Tcp));
        out.push(Party::new("quinn".to_owned(), "quinn", What::Quinn));
        for streams in &args.streams {
            for marked in schemes {
                let name = format!("quic, {streams} connections{}", marks(marked));
                out.push(Party::new(name, "quinn", What::Transfer(Way::Quic(*streams), scheme(marked))));
            }
        }
        let message = Scheme { verify: true, coalesce: false, one_by_one: true };
        out.push(Party::new(MESSAGE.to_owned(), "quinn", What::Transfer(Way::Quic(1), message)));
        out
    }

    fn marks((verify, coalesce): (bool, bool)) -> &'static str {
        match (verify, coalesce) {
            (true, true) => "",
            (false, _) => ", unverified",
            (true, false) => ", not merged",
        }
    }

    /// All parties on one size, one after the other in every round.
    fn measure(args: &Args, block_bytes: u32, blocks: u32) -> Result<Vec<Party>> {
        let mut rig = Rig::new(block_bytes, blocks)?;
        let mut peers = Peers::start(rig.bytes())?;
        let mut out = parties(args);
        // The first round warms up: page faults, connections, congestion windows.
        for round in 0..=args.rounds {
            for party in &mut out {
                let seconds = match party.what {
                    What::Memcpy(threads) => rig.memcpy(threads),
                    What::CheckInCache => rig.check_in_cache(),
                    What::CopyAndCheck(threads) => rig.copy_and_check(threads),
                    What::Tcp => peers.tcp()?,
                    What::Quinn => peers.quinn()?,
                    What::Transfer(way, scheme) => {
                        let (seconds, detail) = rig.transfer(way, scheme)?;
                        party.detail = detail;
                        seconds
                    }
                };
                #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
                let rate = rig.bytes() as f64 / seconds / 1e9;
                party.gb_per_s.extend((round > 0).then_some(rate));
            }
        }
        Ok(out)
    }

    fn row(parties: &[Party], block_bytes: u32, blocks: u32) -> Value {
        let rates: Vec<(&str, f64)> =
            parties.iter().map(|party| (party.name.as_str(), median(party.gb_per_s.clone()))).collect();
        let of = |name: &str| rates.iter().find(|(other, _)| *other == name).map_or(f64::NAN, |(_, rate)| *rate);
        // On a machine with other load, the best rounds say more than the medians.
        let best = |name: &str| {
            let party = parties.iter().find(|party| party.name == name);
            party.into_iter().flat_map(|party| &party.gb_per_s).copied().fold(f64::NAN, f64::max)
        };
        let rows: Vec<Value> = parties
            .iter()
            .map(|party| {
                let rate = of(&party.name);
                json!({ "party": party.name, "gb_per_s": rate, "limit": party.limit, "of_limit": rate / of(&party.limit), "best_gb_per_s": best(&party.name),
                    "best_of_limit": best(&party.name) / best(&party.limit),
                    "of_tcp": rate / of("tcp"), "over_message_a_block": rate / of(MESSAGE), "detail": party.detail })
            })
            .collect();
        json!({ "block_bytes": block_bytes, "blocks": blocks, "parties": rows })
    }

    fn print(size: &Value) {
        println!("\n{} blocks of {} bytes", size["blocks"], size["block_bytes"]);
        println!("{:<40} {:>9} {:>9} {:>9} {:>9} {:>9}", "", "GB/s", "of limit", "best", "of tcp", "/message");
        for row in size["parties"].as_array().into_iter().flatten() {
            let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
            println!(
                "{:<40} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
                row["party"].as_str().unwrap_or_default(),
                number("gb_per_s"),
                number("of_limit"),
                number("best_of_limit"),
                number("of_tcp"),
                number("over_message_a_block")
            );
        }
    }

    pub(super) fn main() -> Result<()> {
        let mut args = Args::parse();
        let _ = args.bench;
        if args.quick {
            (args.rounds, args.block_kib, args.blocks, args.streams) = (3, vec![4, 64, 512], vec![1024], vec![1, 2]);
        }
        if args.smoke {
            (args.rounds, args.block_kib, args.blocks) = (1, vec![4, 64], vec![128]);
            (args.streams, args.threads) = (vec![1, 2], vec![1, 2]);
        }
        let mut sizes = Vec::new();
        for blocks in &args.blocks {
            for kib in &args.block_kib {
                let size = row(&measure(&args, kib * 1024, *blocks)?, kib * 1024, *blocks);
                if !args.json {
                    print(&size);
                }
                sizes.push(size);
            }
        }
        let share = match args.host {
            true => Value::Null,
            false => share::of(share::Overheads::measure(args.rounds)?, &sizes),
        };
        if args.json {
            let object = json!({ "bench": "transfer", "device": device(), "commit": commit(), "rounds": args.rounds,
                "hardware_threads": hardware_threads(), "sizes": sizes, "share_of_latency": share });
            println!("{object:#}");
        } else if !args.host {
            share::print(&share);
        }
        Ok(())
    }
}
