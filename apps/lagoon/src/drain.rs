//! `lagoon drain`: an instance accepts no more requests, its lent and borrowed rBlocks move away, and it may then stop.

use crate::admin::{Operator, Order, PoolArgs};
use crate::pool_client::PoolRow;
use crate::watch::Watch;
use serde_json::json;

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

/// Orders the drain and, with `--wait`, follows it to its end.
pub(crate) async fn run(args: DrainArgs) -> anyhow::Result<()> {
    let mut operator = Operator::new(&args.pool)?;
    let mut watch = Watch::new(args.json, args.timeout_s);
    let row = operator.find(&args.instance).await?;
    operator.order(Order::Drain { instance: row.instance, cancel: args.cancel, stop: args.stop }).await?;
    let what = if args.cancel { "serves again" } else { "is draining" };
    watch.say(&format!("{} ({}) {what}", row.name, row.instance));
    if args.wait {
        follow(&mut watch, &mut operator, row.instance, args.stop).await?;
        watch.say(if args.stop { "drained and stopped" } else { "drained" });
    }
    watch
        .answer(&json!({ "instance": row.instance, "name": row.name, "draining": !args.cancel, "drained": args.wait }));
    Ok(())
}

/// Requests and blocks that a draining instance still has.
fn left(row: &PoolRow) -> String {
    format!(
        "{} requests run, {} wait, {} rBlocks lent, {} borrowed",
        row.requests_running, row.requests_waiting, row.blocks_lent, row.blocks_borrowed
    )
}

/// Whether nothing is left; true for one that has stopped or left the pool.
fn is_drained(row: &PoolRow, stops: bool) -> bool {
    let busy = row.requests_running + row.requests_waiting + row.blocks_lent + row.blocks_borrowed;
    if stops { !row.alive } else { row.draining && busy == 0 }
}

/// Waits until nothing is left there.
async fn follow(watch: &mut Watch, operator: &mut Operator, instance: u32, stops: bool) -> anyhow::Result<()> {
    loop {
        let rows = operator.rows().await?;
        let row = rows.iter().find(|row| row.instance == instance);
        let Some(row) = row.filter(|row| !is_drained(row, stops)) else { return Ok(()) };
        let late = |when: &str| {
            format!(
                "{} is not drained {when}\nhint: it continues; `lagoon status` shows it, --cancel ends it",
                row.name
            )
        };
        watch.pause(left(row), late).await?;
    }
}
