//! `lagoon drain`: an instance takes no more requests, its lent and borrowed rBlocks move away, and it may stop then.

use crate::admin::{Operator, Order, PoolArgs};
use crate::pool_client::PoolRow;
use serde_json::json;
use std::time::{Duration, Instant};

/// How often a drain is looked at.
const WATCH_EVERY: Duration = Duration::from_millis(250);

/// `lagoon drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    /// Name or number of the instance (`lagoon status`).
    instance: String,
    /// End a drain: the instance serves and lends again.
    #[arg(long, conflicts_with_all = ["wait", "stop"])]
    cancel: bool,
    /// Wait until nothing is left there.
    #[arg(long)]
    wait: bool,
    /// Stop its process when nothing is left there.
    #[arg(long)]
    stop: bool,
    /// Seconds to wait at most.
    #[arg(long, value_name = "N", default_value_t = 600)]
    timeout_s: u64,
    #[command(flatten)]
    pool: PoolArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Orders the drain and, if asked, follows it to its end.
pub(crate) async fn run(args: DrainArgs) -> anyhow::Result<()> {
    let mut operator = Operator::new(&args.pool)?;
    let row = operator.find(&args.instance).await?;
    operator.order(Order::Drain { instance: row.instance, cancel: args.cancel, stop: args.stop }).await?;
    let what = if args.cancel { "serves again" } else { "is draining" };
    say(&args, &format!("{} ({}) {what}", row.name, row.instance));
    let drained = args.wait && follow(&args, &mut operator, row.instance).await?;
    if args.json {
        print_json(
            &json!({ "instance": row.instance, "name": row.name, "draining": !args.cancel, "drained": drained }),
        );
    }
    Ok(())
}

/// What is left on an instance that is drained.
fn left(row: &PoolRow) -> String {
    format!(
        "{} requests run, {} wait, {} rBlocks lent, {} borrowed",
        row.requests_running, row.requests_waiting, row.blocks_lent, row.blocks_borrowed
    )
}

/// Whether nothing is left; one that has stopped or left the pool has nothing left.
fn is_drained(row: &PoolRow, stops: bool) -> bool {
    let busy = row.requests_running + row.requests_waiting + row.blocks_lent + row.blocks_borrowed;
    if stops { !row.alive } else { row.draining && busy == 0 }
}

async fn follow(args: &DrainArgs, operator: &mut Operator, instance: u32) -> anyhow::Result<bool> {
    let started = Instant::now();
    let mut said = String::new();
    loop {
        let rows = operator.rows().await?;
        let row = rows.iter().find(|row| row.instance == instance);
        let Some(row) = row.filter(|row| !is_drained(row, args.stop)) else { break };
        anyhow::ensure!(
            started.elapsed() < Duration::from_secs(args.timeout_s),
            "{} is not drained after {} s: {}\nhint: it goes on; `lagoon status` shows it, --cancel ends it",
            row.name,
            args.timeout_s,
            left(row)
        );
        let now = left(row);
        if now != said {
            say(args, &now);
            said = now;
        }
        tokio::time::sleep(WATCH_EVERY).await;
    }
    say(args, if args.stop { "drained and stopped" } else { "drained" });
    Ok(true)
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn say(args: &DrainArgs, text: &str) {
    if !args.json {
        println!("{text}");
    }
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn print_json(value: &serde_json::Value) {
    println!("{value}");
}
