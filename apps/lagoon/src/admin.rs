//! Operators' orders (`lagoon drain`, `lagoon role`, `lagoon kv …`): sent to a gManager over QUIC, or as JSON through
//! the endpoint of `lagoon up`, which has the pool's certificates.

use crate::api_client::ApiClient;
use crate::args::TlsArgs;
use crate::hosts;
use crate::pool_client::{PoolClient, PoolRow, PoolState};
use anyhow::Context;
use lagoon_protocol::{
    AdminBody, AdminCacheDrop, AdminDrain, AdminMove, AdminOrder, AdminPlacements, AdminPlan, AdminReply, AdminRole,
    CacheTenants, OrderOutcome, PlacementRow, Role,
};
use lagoon_transport::NodeRole;
use lagoon_types::limits;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Interval of looks at an order that is waited for.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// Time by which an order has ended, done or not.
const FOLLOW_DEADLINE: Duration = Duration::from_millis(limits::MOVE_DEADLINE_MS + 2 * limits::MOVE_GRACE_MS);

/// The pool that a command is for.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PoolArgs {
    /// The endpoint of `lagoon up`.
    #[arg(long, global = true, default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,
    /// Key for administration of that endpoint; if it has none, --api-key, from the same machine only.
    #[arg(long, global = true, value_name = "KEY", env = "LAGOON_ADMIN_KEY", hide_env_values = true)]
    pub(crate) admin_key: Option<String>,
    #[arg(long, global = true, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// The authority of an https:// server's certificate.
    #[arg(long, global = true, value_name = "PEM", env = "LAGOON_CA")]
    pub(crate) ca: Option<PathBuf>,
    /// Ask the gManager itself (host:port of its QUIC endpoint; needs a certificate); of several, comma-separated, the one
    /// that leads.
    #[arg(long, global = true, value_name = "ADDR", value_delimiter = ',', value_parser = hosts::address)]
    pub(crate) gmanager: Vec<SocketAddr>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
}

impl PoolArgs {
    /// A client of the endpoint.
    pub(crate) fn client(&self) -> anyhow::Result<ApiClient> {
        let key = self.admin_key.clone().or_else(|| self.api_key.clone());
        ApiClient::new(&self.url, key, self.ca.as_deref())
    }
}

/// The roles that an instance may change to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NewRole {
    /// Computes prompts for decode workers, which read the KV from its memory.
    Prefill,
    /// Takes requests and has their prompts computed by prefill workers.
    Decode,
    /// Runs requests, prompts and answers, and computes prompts for others where no prefill worker can.
    #[value(alias = "instance")]
    #[serde(alias = "instance")]
    Both,
}

impl From<NewRole> for Role {
    fn from(role: NewRole) -> Self {
        match role {
            NewRole::Prefill => Self::Prefill,
            NewRole::Decode => Self::Decode,
            NewRole::Both => Self::Instance,
        }
    }
}

/// An operator's order, as JSON and on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    Drain {
        instance: u32,
        #[serde(default)]
        cancel: bool,
        #[serde(default)]
        stop: bool,
    },
    Role {
        instance: u32,
        role: NewRole,
    },
    /// As `AdminMove`, with 0 for unset fields.
    Move {
        debtor: u32,
        seq: u64,
        #[serde(default)]
        blocks: u32,
        #[serde(default)]
        source: u32,
        #[serde(default)]
        target: u32,
        #[serde(default)]
        dry_run: bool,
        #[serde(default)]
        first: Option<u32>,
    },
    /// As `AdminPlacements`, without its request: 0 and `None` mean all.
    Placements {
        #[serde(default)]
        debtor: u32,
        #[serde(default)]
        seq: Option<u64>,
        /// Instance, debtor and sequence of the row to continue after.
        #[serde(default)]
        after: (u32, u32, u64),
    },
    Plan {},
    /// Empty the prefix cache of an instance; 0: of all. Of tenants with these fingerprints; `None`: any.
    CacheDrop {
        instance: u32,
        #[serde(default)]
        key: Option<u32>,
        #[serde(default)]
        salt: Option<u32>,
    },
    /// Query how an earlier order ended.
    Outcome {
        order: u64,
    },
}

impl From<Order> for AdminBody {
    fn from(order: Order) -> Self {
        match order {
            Order::Drain { instance, cancel, stop } => Self::Drain(AdminDrain { instance, cancel, stop }),
            Order::Role { instance, role } => Self::Role(AdminRole { instance, role: Role::from(role).into() }),
            Order::Move { debtor, seq, blocks, source, target, dry_run, first } => {
                Self::Move(AdminMove { debtor, seq, blocks, source, target, dry_run, first })
            }
            Order::Placements { debtor, seq, after: (after_instance, after_debtor, after_seq) } => {
                Self::Placements(AdminPlacements { debtor, seq, after_instance, after_debtor, after_seq })
            }
            Order::Plan {} => Self::Plan(AdminPlan {}),
            Order::CacheDrop { instance, key, salt } => {
                let of = (key.is_some() || salt.is_some()).then_some(CacheTenants { key, salt });
                Self::CacheDrop(AdminCacheDrop { instance, of })
            }
            Order::Outcome { order } => Self::Order(AdminOrder { order }),
        }
    }
}

/// Reply to an order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) moves: Vec<Move>,
    pub(crate) placements: Vec<Placement>,
    /// Whether there are rows after the last one of `placements`.
    #[serde(default)]
    pub(crate) more: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<Outcome>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dropped: Option<Dropped>,
}

/// Instances that were ordered to empty their prefix caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dropped {
    pub(crate) instances: Vec<u32>,
    /// Number of the order, for [`crate::pool_client::CacheRow::drop_done`].
    pub(crate) number: u64,
}

/// How an order ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Whether it has ended; the other fields are valid only then.
    pub(crate) ended: bool,
    pub(crate) blocks: u32,
    pub(crate) moved: u32,
    /// Why not all of them moved.
    pub(crate) reason: String,
}

/// Blocks of one request to move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Move {
    pub(crate) order: u64,
    /// DEBTOR/SEQ.
    pub(crate) request: String,
    pub(crate) blocks: u32,
    pub(crate) source: u32,
    pub(crate) target: u32,
    /// Expected change of the pool's throughput, in tokens per second.
    pub(crate) gain_tokens_per_s: f64,
}

/// Blocks of one request on one instance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Placement {
    /// DEBTOR/SEQ.
    pub(crate) request: String,
    pub(crate) instance: u32,
    pub(crate) blocks: u32,
    /// Those that could move now.
    pub(crate) blocks_sealed: u32,
}

impl Placement {
    /// Instance, debtor and sequence of the row.
    fn key(&self) -> Option<(u32, u32, u64)> {
        let (debtor, seq) = self.request.split_once('/')?;
        Some((self.instance, debtor.parse().ok()?, seq.parse().ok()?))
    }
}

impl From<AdminReply> for Answer {
    fn from(reply: AdminReply) -> Self {
        let moves = reply.moves.into_iter().map(|m| Move {
            order: m.order,
            request: format!("{}/{}", m.debtor, m.seq),
            blocks: m.blocks,
            source: m.source,
            target: m.target,
            gain_tokens_per_s: m.gain_tokens_per_s,
        });
        let placement = |row: PlacementRow| {
            let entry = row.entry?;
            Some(Placement {
                request: format!("{}/{}", entry.debtor, entry.seq),
                instance: row.instance,
                blocks: entry.blocks,
                blocks_sealed: entry.blocks_sealed,
            })
        };
        let outcome = reply.outcome.map(|o| {
            let OrderOutcome { ended, blocks, moved, reason } = o;
            Outcome { ended, blocks, moved, reason }
        });
        let placements = reply.placements.into_iter().filter_map(placement).collect();
        let dropped = reply.dropped.map(|d| Dropped { instances: d.instances, number: d.number });
        Self { moves: moves.collect(), placements, more: reply.more, outcome, dropped }
    }
}

/// The path to the pool for orders.
#[derive(Debug)]
pub(crate) enum Operator {
    GManager(Box<PoolClient>),
    Http(ApiClient),
}

impl Operator {
    pub(crate) fn new(args: &PoolArgs) -> anyhow::Result<Self> {
        if args.gmanager.is_empty() {
            return Ok(Self::Http(args.client()?));
        }
        Ok(Self::GManager(Box::new(PoolClient::new(&args.gmanager, &args.tls.identity(&[NodeRole::Operator])?)?)))
    }

    pub(crate) async fn order(&mut self, order: Order) -> anyhow::Result<Answer> {
        match self {
            Self::GManager(client) => Ok(client.admin(order.into()).await?.into()),
            Self::Http(client) => {
                let answer = client.post("/lagoon/admin", &serde_json::to_value(order)?).await?;
                serde_json::from_value(answer).context(
                    "no pool's endpoint answered\nhint: --url is that of `lagoon up`; --gmanager asks a pool that was \
                     made by hand",
                )
            }
        }
    }

    /// Rows of the request placement map: of all requests, or of a debtor's or one request.
    pub(crate) async fn placements(&mut self, debtor: u32, seq: Option<u64>) -> anyhow::Result<Vec<Placement>> {
        let (mut rows, mut after) = (Vec::new(), (0, 0, 0));
        loop {
            let page = self.order(Order::Placements { debtor, seq, after }).await?;
            let last = page.placements.last().and_then(Placement::key).filter(|last| *last > after);
            rows.extend(page.placements);
            match last.filter(|_| page.more) {
                Some(last) => after = last,
                None => return Ok(rows),
            }
        }
    }

    /// Waits until an order has ended, and returns how.
    pub(crate) async fn follow(&mut self, order: u64) -> anyhow::Result<Outcome> {
        let deadline = Instant::now() + FOLLOW_DEADLINE;
        loop {
            let outcome = self.order(Order::Outcome { order }).await?.outcome;
            let outcome = outcome.context("the gManager does not know the question\nhint: is it of this version?")?;
            if outcome.ended {
                return Ok(outcome);
            }
            anyhow::ensure!(Instant::now() < deadline, "order {order} has not ended in time");
            tokio::time::sleep(FOLLOW_EVERY).await;
        }
    }

    /// The pool's instances.
    pub(crate) async fn rows(&mut self) -> anyhow::Result<Vec<PoolRow>> {
        match self {
            Self::GManager(client) => client.rows().await,
            Self::Http(client) => {
                let status = client.get("/lagoon/status").await?;
                let rows = serde_json::from_value(status["instances"].clone());
                rows.context("no pool's endpoint answered\nhint: --url is that of `lagoon up`")
            }
        }
    }

    /// The instance named by `text`: its number, or its name if unique.
    pub(crate) async fn find(&mut self, text: &str) -> anyhow::Result<PoolRow> {
        let rows = self.rows().await?;
        let number = text.parse::<u32>().ok();
        let mut found: Vec<&PoolRow> = rows.iter().filter(|row| Some(row.instance) == number).collect();
        if found.is_empty() {
            found = rows.iter().filter(|row| row.name == text).collect();
        }
        // Another instance may have the name of an instance that left.
        if found.len() > 1 {
            found.retain(|row| row.alive);
        }
        match found[..] {
            [row] => Ok(row.clone()),
            [] => anyhow::bail!("no instance is called {text:?}\nhint: `lagoon status` lists names and numbers"),
            _ => anyhow::bail!(
                "{} instances are called {text:?}\nhint: name one by its number, see `lagoon status`",
                found.len()
            ),
        }
    }
}

impl Order {
    /// Whether it changes rows of the pool's status.
    pub(crate) fn changes_status(self) -> bool {
        matches!(self, Self::Drain { .. } | Self::Role { .. } | Self::CacheDrop { .. })
    }
}

/// The whole state, for `lagoon status`.
pub(crate) fn state_json(state: &PoolState) -> serde_json::Value {
    json!({ "gmanager": state.gmanager, "instances": state.instances })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_as_they_are_written() {
        let moves = Order::Move { debtor: 1, seq: 7, blocks: 3, source: 2, target: 1, dry_run: true, first: Some(4) };
        let rows = Order::Placements { debtor: 1, seq: Some(7), after: (2, 1, 5) };
        let drain = Order::Drain { instance: 4, cancel: false, stop: true };
        let role = Order::Role { instance: 4, role: NewRole::Both };
        let drop = Order::CacheDrop { instance: 0, key: Some(7), salt: None };
        for order in [moves, drain, role, Order::Plan {}, rows, drop, Order::Outcome { order: 9 }] {
            let text = serde_json::to_string(&order).unwrap();
            assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order, "{text}");
        }
        let short: Order = serde_json::from_str(r#"{"move": {"debtor": 1, "seq": 7}}"#).unwrap();
        let AdminBody::Move(m) = short.into() else { panic!("{short:?}") };
        assert_eq!((m.debtor, m.seq, m.blocks, m.target, m.dry_run, m.first), (1, 7, 0, 0, false, None));
        let all: Order = serde_json::from_str(r#"{"placements": {}}"#).unwrap();
        assert_eq!(all, Order::Placements { debtor: 0, seq: None, after: (0, 0, 0) });
    }
}
