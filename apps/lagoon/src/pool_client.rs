//! Asking a gManager for the state of its pool.

use anyhow::{Context, bail};
use lagoon_protocol::{ControlBody, InstanceStatus, StatusQuery};
use lagoon_transport::{Bound, Class, Event, Frame, Identity, Node, PeerId, TransportConfig};
use serde::Serialize;
use std::net::SocketAddr;
use std::time::Duration;

/// Time for one question and its answer, the first connection included.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// One row of `lagoon status`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolRow {
    pub(crate) instance: u32,
    pub(crate) name: String,
    pub(crate) role: &'static str,
    pub(crate) backend: String,
    pub(crate) alive: bool,
    pub(crate) http_addr: String,
    pub(crate) quic_addr: String,
    pub(crate) heartbeat_age_ms: u64,
    pub(crate) blocks_total: u32,
    pub(crate) blocks_free: u32,
    /// What it may ever lend.
    pub(crate) blocks_lend_max: u32,
    pub(crate) blocks_lent: u32,
    pub(crate) blocks_borrowed: u32,
    pub(crate) requests_running: u32,
    pub(crate) requests_waiting: u32,
}

impl From<InstanceStatus> for PoolRow {
    fn from(row: InstanceStatus) -> Self {
        let role = if row.role == lagoon_protocol::Role::Kv as i32 { "kv" } else { "instance" };
        let h = row.heartbeat.unwrap_or_default();
        Self {
            instance: row.instance,
            name: row.name,
            role,
            backend: row.backend,
            alive: row.alive,
            http_addr: row.http_addr,
            quic_addr: row.quic_addr,
            heartbeat_age_ms: row.heartbeat_age_ms,
            blocks_total: h.blocks_total,
            blocks_free: h.blocks_free,
            blocks_lend_max: row.lend_blocks_max.unwrap_or(h.blocks_total),
            blocks_lent: h.lent.iter().map(|d| d.blocks).sum(),
            blocks_borrowed: h.blocks_borrowed,
            requests_running: h.requests_running,
            requests_waiting: h.requests_waiting,
        }
    }
}

/// A connection to a gManager.
#[derive(Debug)]
pub(crate) struct PoolClient {
    bound: Bound,
    gmanager: PeerId,
    queries: u64,
}

impl PoolClient {
    /// Within a tokio runtime. The connection is made with the first question.
    pub(crate) fn new(gmanager: SocketAddr, identity: &Identity) -> anyhow::Result<Self> {
        let any = if gmanager.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let bound = Node::bind(any.parse()?, identity, TransportConfig::default()).context("open a UDP socket")?;
        let gmanager = bound.node.connect(gmanager, &[Class::Control]).context("too many peers")?;
        Ok(Self { bound, gmanager, queries: 0 })
    }

    /// The pool's instances, by number.
    pub(crate) async fn rows(&mut self) -> anyhow::Result<Vec<PoolRow>> {
        self.queries += 1;
        let query = Frame::Control(ControlBody::StatusQuery(StatusQuery { query: self.queries }).into());
        self.bound.node.send(self.gmanager, &query, ANSWER_DEADLINE).await.context("ask the gManager")?;
        match tokio::time::timeout(ANSWER_DEADLINE, self.answer()).await {
            Ok(rows) => rows,
            Err(_) => bail!(
                "the gManager did not answer within {} s\nhint: check the address and that the certificates are of \
                 the same CA",
                ANSWER_DEADLINE.as_secs()
            ),
        }
    }

    async fn answer(&mut self) -> anyhow::Result<Vec<PoolRow>> {
        while let Some(event) = self.bound.events.recv().await {
            match event {
                Event::Control { message, .. } => {
                    if let Some(ControlBody::StatusReply(reply)) = message.body
                        && reply.query == self.queries
                    {
                        return Ok(reply.instances.into_iter().map(PoolRow::from).collect());
                    }
                }
                Event::Unreachable { addr, reason, .. } => {
                    let hint = if reason.contains("certificate") {
                        "\nhint: both ends need certificates of the same CA"
                    } else {
                        ""
                    };
                    bail!("the gManager at {addr} cannot be reached: {reason}{hint}")
                }
                _ => {}
            }
        }
        bail!("the transport was closed")
    }
}
