//! `lagoon kv`: shows where requests' rBlocks are, and moves them by hand. `lagoon kv cache` is in `kv_cache.rs`.

use crate::admin::{Move, Operator, Order, Outcome, Placement, PoolArgs};
use crate::kv_cache::{self, CacheCommand};
use crate::log::{out, outln};
use crate::table::Table;
use anyhow::Context;
use serde_json::json;

/// `lagoon kv`.
#[derive(Debug, clap::Args)]
pub(crate) struct KvArgs {
    #[command(subcommand)]
    command: KvCommand,
    #[command(flatten)]
    pool: PoolArgs,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum KvCommand {
    /// The request placement map: rBlocks of every request, by instance.
    #[command(visible_alias = "list")]
    Ls {
        /// DEBTOR or DEBTOR/SEQ: of these requests only.
        request: Option<String>,
    },
    /// Move rBlocks of one request from one instance to another.
    Move {
        /// DEBTOR/SEQ, as `lagoon kv ls` prints it.
        request: String,
        /// rBlocks to move [default: as many as there are].
        #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
        blocks: u32,
        /// The sequence's first rBlock that may move, from 0; the next ones there follow [default: the oldest of those that leave the
        /// instance that runs the request, the newest of others].
        #[arg(long, value_name = "BLOCK")]
        first: Option<u32>,
        /// Name or number of the instance that has them.
        #[arg(long, value_name = "INSTANCE")]
        from: String,
        /// Name or number of the instance that shall have them.
        #[arg(long, value_name = "INSTANCE")]
        to: String,
        /// Print the moves that would be ordered, without ordering them.
        #[arg(long)]
        dry_run: bool,
        /// Wait until the move has ended, and print its result.
        #[arg(long, conflicts_with = "dry_run")]
        wait: bool,
    },
    /// Bring rBlocks of one request back to the instance that runs it.
    Recall {
        /// DEBTOR/SEQ, as `lagoon kv ls` prints it.
        request: String,
        /// rBlocks to bring back [default: as many as there are].
        #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
        blocks: u32,
        /// The sequence's first rBlock that may come back, from 0; the next ones there follow [default: the newest].
        #[arg(long, value_name = "BLOCK")]
        first: Option<u32>,
        /// Name or number of the instance to take them from [default: the one that has most].
        #[arg(long, value_name = "INSTANCE")]
        from: Option<String>,
        /// Print the moves that would be ordered, without ordering them.
        #[arg(long)]
        dry_run: bool,
        /// Wait until the move has ended, and print its result.
        #[arg(long, conflicts_with = "dry_run")]
        wait: bool,
    },
    /// Print how an order of `move` or `recall` ended.
    Order {
        /// Its number, as `move` and `recall` print it.
        order: u64,
        /// Wait until it has ended.
        #[arg(long)]
        wait: bool,
    },
    /// Print the moves that the planner would order next, without ordering them.
    Plan,
    /// The prefix cache: what each instance has, and how to empty it.
    Cache {
        #[command(subcommand)]
        command: CacheCommand,
    },
}

/// Sends the command to the pool and prints the reply.
pub(crate) async fn run(args: KvArgs) -> anyhow::Result<()> {
    let mut operator = Operator::new(&args.pool)?;
    match &args.command {
        KvCommand::Ls { request } => {
            let (debtor, seq) = match request {
                Some(text) => parse_requests(&mut operator, text).await?,
                None => (0, None),
            };
            show_placements(&args, operator.placements(debtor, seq).await?)
        }
        KvCommand::Cache { command } => kv_cache::run(command, args.json, &mut operator).await,
        KvCommand::Plan => {
            let moves = operator.order(Order::Plan {}).await?.moves;
            show_moves(&args, &moves, true, None)
        }
        KvCommand::Order { order, wait } => {
            let outcome = match wait {
                true => operator.follow(*order).await?,
                false => operator.order(Order::Outcome { order: *order }).await?.outcome.context("no answer")?,
            };
            show_outcome(&args, *order, &outcome)
        }
        KvCommand::Move { request, blocks, first, from, to, dry_run, wait } => {
            let (debtor, seq) = parse_request(&mut operator, request).await?;
            let (source, target) = (operator.find(from).await?.instance, operator.find(to).await?.instance);
            let (blocks, first, dry_run) = (*blocks, *first, *dry_run);
            let order = Order::Move { debtor, seq, blocks, source, target, dry_run, first };
            give(&args, &mut operator, order, dry_run, *wait).await
        }
        KvCommand::Recall { request, blocks, first, from, dry_run, wait } => {
            let (debtor, seq) = parse_request(&mut operator, request).await?;
            let source = match from {
                Some(from) => operator.find(from).await?.instance,
                None => 0,
            };
            let (blocks, first, dry_run) = (*blocks, *first, *dry_run);
            let order = Order::Move { debtor, seq, blocks, source, target: 0, dry_run, first };
            give(&args, &mut operator, order, dry_run, *wait).await
        }
    }
}

/// Orders a move, follows it with `wait`, and prints both. A move of nothing is an error.
async fn give(args: &KvArgs, operator: &mut Operator, order: Order, dry: bool, wait: bool) -> anyhow::Result<()> {
    let moves = operator.order(order).await?.moves;
    let outcome = match moves.first().filter(|_| wait && !dry) {
        Some(given) => Some(operator.follow(given.order).await?),
        None => None,
    };
    show_moves(args, &moves, dry, outcome.as_ref())?;
    if let Some(Outcome { moved: 0, reason, .. }) = outcome {
        anyhow::bail!("nothing moved: {reason}");
    }
    Ok(())
}

fn show_placements(args: &KvArgs, mut rows: Vec<Placement>) -> anyhow::Result<()> {
    if args.json {
        outln!("{}", serde_json::to_string(&json!({ "placements": rows }))?);
        return Ok(());
    }
    rows.sort();
    let mut table = Table::new(&["REQUEST", "INSTANCE", "BLOCKS", "SEALED"]);
    for row in &rows {
        let numbers = [row.instance, row.blocks, row.blocks_sealed].map(|n| n.to_string());
        table.row([vec![row.request.clone()], numbers.to_vec()].concat());
    }
    out!("{table}");
    Ok(())
}

fn show_outcome(args: &KvArgs, order: u64, outcome: &Outcome) -> anyhow::Result<()> {
    if args.json {
        outln!("{}", serde_json::to_string(&json!({ "order": order, "outcome": outcome }))?);
    } else {
        outln!("{}", describe(outcome));
    }
    Ok(())
}

fn describe(Outcome { ended, blocks, moved, reason }: &Outcome) -> String {
    match (*ended, moved == blocks) {
        (false, _) => format!("{blocks} rBlocks are on their way"),
        (true, true) => format!("{moved} rBlocks moved"),
        (true, false) => format!("{moved} of {blocks} rBlocks moved: {reason}"),
    }
}

fn show_moves(args: &KvArgs, moves: &[Move], dry: bool, outcome: Option<&Outcome>) -> anyhow::Result<()> {
    if args.json {
        let mut shown = json!({ "moves": moves, "dry_run": dry });
        if let Some(outcome) = outcome {
            shown["outcome"] = serde_json::to_value(outcome)?;
        }
        outln!("{}", serde_json::to_string(&shown)?);
        return Ok(());
    }
    if moves.is_empty() {
        outln!("nothing to move");
        return Ok(());
    }
    let mut table = Table::new(&["ORDER", "REQUEST", "BLOCKS", "FROM", "TO", "GAIN (tok/s)"]);
    for m in moves {
        // A dry run has no order number.
        let order = if m.order == 0 { "-".to_owned() } else { m.order.to_string() };
        let gain = format!("{:.1}", m.gain_tokens_per_s);
        let [blocks, source, target] = [m.blocks, m.source, m.target].map(|n| n.to_string());
        table.row(vec![order, m.request.clone(), blocks, source, target, gain]);
    }
    out!("{table}");
    if dry {
        outln!("nothing was ordered (dry run)");
    }
    if let Some(outcome) = outcome {
        outln!("{}", describe(outcome));
    }
    Ok(())
}

const HINT: &str = "hint: a request is DEBTOR/SEQ, as `lagoon kv ls` prints it";

/// Parses DEBTOR or DEBTOR/SEQ.
async fn parse_requests(operator: &mut Operator, text: &str) -> anyhow::Result<(u32, Option<u64>)> {
    if text.contains('/') {
        let (debtor, seq) = parse_request(operator, text).await?;
        return Ok((debtor, Some(seq)));
    }
    Ok((operator.find(text).await?.instance, None))
}

/// Parses DEBTOR/SEQ; the debtor by number or name.
async fn parse_request(operator: &mut Operator, text: &str) -> anyhow::Result<(u32, u64)> {
    let (debtor, seq) = text.split_once('/').with_context(|| format!("{text:?} names no request\n{HINT}"))?;
    let seq = seq.parse().with_context(|| format!("{seq:?} is no sequence number\n{HINT}"))?;
    Ok((operator.find(debtor).await?.instance, seq))
}
