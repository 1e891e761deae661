//! What operators ask of a pool (`lagoon drain`, `lagoon kv …`): to a gManager over QUIC, or through the endpoint of
//! `lagoon up`, which has the pool's certificates, as JSON.

use crate::api_client::ApiClient;
use crate::args::TlsArgs;
use crate::pool_client::{PoolClient, PoolRow, PoolState};
use anyhow::Context;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use lagoon_protocol::{AdminBody, AdminDrain, AdminMove, AdminPlacements, AdminPlan, AdminReply, PlacementRow};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Mutex;

/// Which pool is meant.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PoolArgs {
    /// The endpoint of `lagoon up`.
    #[arg(long, global = true, default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,
    #[arg(long, global = true, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Ask the gManager itself (ip:port of its QUIC endpoint; needs a certificate); of several, comma-separated, the one
    /// that leads.
    #[arg(long, global = true, value_name = "ADDR", value_delimiter = ',')]
    pub(crate) gmanager: Vec<SocketAddr>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
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
    /// As `AdminMove`: 0 is what it is there.
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
    Placements {},
    Plan {},
}

impl From<Order> for AdminBody {
    fn from(order: Order) -> Self {
        match order {
            Order::Drain { instance, cancel, stop } => Self::Drain(AdminDrain { instance, cancel, stop }),
            Order::Move { debtor, seq, blocks, source, target, dry_run, first } => {
                Self::Move(AdminMove { debtor, seq, blocks, source, target, dry_run, first })
            }
            Order::Placements {} => Self::Placements(AdminPlacements {}),
            Order::Plan {} => Self::Plan(AdminPlan {}),
        }
    }
}

/// What came of an order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) moves: Vec<Move>,
    pub(crate) placements: Vec<Placement>,
}

/// Blocks of one request that are to move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Move {
    pub(crate) order: u64,
    /// DEBTOR/SEQ.
    pub(crate) request: String,
    pub(crate) blocks: u32,
    pub(crate) source: u32,
    pub(crate) target: u32,
    /// Expected change of the pool's throughput.
    pub(crate) gain_tokens_per_s: f64,
}

/// Where blocks of one request are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Placement {
    /// DEBTOR/SEQ.
    pub(crate) request: String,
    pub(crate) instance: u32,
    pub(crate) blocks: u32,
    /// Of these, blocks that could move now.
    pub(crate) blocks_sealed: u32,
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
        Self { moves: moves.collect(), placements: reply.placements.into_iter().filter_map(placement).collect() }
    }
}

/// Where orders go.
#[derive(Debug)]
pub(crate) enum Operator {
    GManager(Box<PoolClient>),
    Http(ApiClient),
}

impl Operator {
    pub(crate) fn new(args: &PoolArgs) -> anyhow::Result<Self> {
        if args.gmanager.is_empty() {
            return Ok(Self::Http(ApiClient::new(&args.url, args.api_key.clone())?));
        }
        Ok(Self::GManager(Box::new(PoolClient::new(&args.gmanager, &args.tls.identity()?)?)))
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

    /// The instance that `text` names: its number, or its name if only one has it.
    pub(crate) async fn find(&mut self, text: &str) -> anyhow::Result<PoolRow> {
        let rows = self.rows().await?;
        let number = text.parse::<u32>().ok();
        let mut found: Vec<&PoolRow> = rows.iter().filter(|row| Some(row.instance) == number).collect();
        if found.is_empty() {
            found = rows.iter().filter(|row| row.name == text).collect();
        }
        // The name of one that is gone may be another's by now.
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

/// The pool's side of [`Operator::Http`], served by `lagoon up`: `POST /lagoon/admin`.
pub(crate) async fn serve(State(client): State<Arc<Mutex<PoolClient>>>, Json(order): Json<Order>) -> Response {
    let reply = client.lock().await.admin(order.into()).await;
    match reply {
        Ok(reply) => Json(Answer::from(reply)).into_response(),
        Err(error) => {
            let body = json!({ "error": { "message": format!("{error:#}"), "code": "order_refused" } });
            (StatusCode::CONFLICT, Json(body)).into_response()
        }
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
        for order in [moves, Order::Drain { instance: 4, cancel: false, stop: true }, Order::Plan {}] {
            let text = serde_json::to_string(&order).unwrap();
            assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order, "{text}");
        }
        let short: Order = serde_json::from_str(r#"{"move": {"debtor": 1, "seq": 7}}"#).unwrap();
        let AdminBody::Move(m) = short.into() else { panic!("{short:?}") };
        assert_eq!((m.debtor, m.seq, m.blocks, m.target, m.dry_run, m.first), (1, 7, 0, 0, false, None));
    }
}
