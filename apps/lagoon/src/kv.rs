//! `lagoon kv`: where requests' rBlocks are, and moving them by hand.

use crate::admin::{Answer, Operator, Order, PoolArgs};
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
    Ls,
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
        /// Say what would be ordered, and order nothing.
        #[arg(long)]
        dry_run: bool,
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
        /// Say what would be ordered, and order nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// What the planner would order next. It orders nothing because of this.
    Plan,
}

/// Asks the pool and prints its answer.
pub(crate) async fn run(args: KvArgs) -> anyhow::Result<()> {
    let mut operator = Operator::new(&args.pool)?;
    let (order, dry) = match &args.command {
        KvCommand::Ls => (Order::Placements {}, false),
        KvCommand::Plan => (Order::Plan {}, true),
        KvCommand::Move { request, blocks, first, from, to, dry_run } => {
            let (debtor, seq) = parse_request(&mut operator, request).await?;
            let (source, target) = (operator.find(from).await?.instance, operator.find(to).await?.instance);
            let (blocks, first, dry_run) = (*blocks, *first, *dry_run);
            (Order::Move { debtor, seq, blocks, source, target, dry_run, first }, dry_run)
        }
        KvCommand::Recall { request, blocks, first, from, dry_run } => {
            let (debtor, seq) = parse_request(&mut operator, request).await?;
            let source = match from {
                Some(from) => operator.find(from).await?.instance,
                None => 0,
            };
            let (blocks, first, dry_run) = (*blocks, *first, *dry_run);
            (Order::Move { debtor, seq, blocks, source, target: 0, dry_run, first }, dry_run)
        }
    };
    let answer = operator.order(order).await?;
    print(&args, &answer, dry)
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn print(args: &KvArgs, answer: &Answer, dry: bool) -> anyhow::Result<()> {
    if args.json {
        let shown = match args.command {
            KvCommand::Ls => json!({ "placements": answer.placements }),
            _ => json!({ "moves": answer.moves, "dry_run": dry }),
        };
        println!("{}", serde_json::to_string(&shown)?);
        return Ok(());
    }
    if matches!(args.command, KvCommand::Ls) {
        let mut rows = answer.placements.clone();
        rows.sort();
        let mut table = Table::new(&["REQUEST", "INSTANCE", "BLOCKS", "SEALED"]);
        for row in &rows {
            let numbers = [row.instance, row.blocks, row.blocks_sealed].map(|n| n.to_string());
            table.row([vec![row.request.clone()], numbers.to_vec()].concat());
        }
        print!("{table}");
        return Ok(());
    }
    if answer.moves.is_empty() {
        println!("nothing to move");
        return Ok(());
    }
    let mut table = Table::new(&["ORDER", "REQUEST", "BLOCKS", "FROM", "TO", "GAIN (tok/s)"]);
    for m in &answer.moves {
        // What was not ordered has no number.
        let order = if m.order == 0 { "-".to_owned() } else { m.order.to_string() };
        let gain = format!("{:.1}", m.gain_tokens_per_s);
        let [blocks, source, target] = [m.blocks, m.source, m.target].map(|n| n.to_string());
        table.row(vec![order, m.request.clone(), blocks, source, target, gain]);
    }
    print!("{table}");
    if dry {
        println!("nothing was ordered (dry run)");
    }
    Ok(())
}

/// DEBTOR/SEQ; the debtor by number or name.
async fn parse_request(operator: &mut Operator, text: &str) -> anyhow::Result<(u32, u64)> {
    const HINT: &str = "hint: a request is DEBTOR/SEQ, as `lagoon kv ls` prints it";
    let (debtor, seq) = text.split_once('/').with_context(|| format!("{text:?} names no request\n{HINT}"))?;
    let seq = seq.parse().with_context(|| format!("{seq:?} is no sequence number\n{HINT}"))?;
    Ok((operator.find(debtor).await?.instance, seq))
}
