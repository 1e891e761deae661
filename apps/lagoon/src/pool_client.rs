//! A client of a pool's gManagers: queries the pool's state, and sends an operator's orders.
//!
//! Of several gManagers the leader answers; the others name it.

use crate::jitter::jittered;
use crate::leader::Terms;
use crate::tenant::TenantArg;
use anyhow::{Context, bail, ensure};
use lagoon_protocol::{
    AdminBody, AdminQuery, AdminReply, BatchPoint, CacheCounts, CacheTenant, Calibration, ControlBody, InstanceStatus,
    Load, MemoryTier, MoveCounts, PrefillCounts, PrefixesKnown, PrefixesPlaced, Role, StatusQuery, StatusReply,
};
use lagoon_transport::{Bound, Class, Event, Frame, Identity, Node, NodeRole, PeerId, TransportConfig};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::Instant;

/// Deadline of one query, first connection included.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// Silence after which another gManager is asked, if there is one.
const SILENCE: Duration = Duration::from_millis(1500);
/// Mean pause before the next gManager is asked while none leads.
const PAUSE: Duration = Duration::from_millis(100);

/// One row of `lagoon status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PoolRow {
    pub(crate) instance: u32,
    pub(crate) name: String,
    pub(crate) role: String,
    /// The role that it changes to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) becoming: Option<String>,
    pub(crate) backend: String,
    pub(crate) alive: bool,
    pub(crate) http_addr: String,
    pub(crate) quic_addr: String,
    pub(crate) heartbeat_age_ms: u64,
    pub(crate) blocks_total: u32,
    pub(crate) blocks_free: u32,
    /// Maximum that it may lend.
    pub(crate) blocks_lend_max: u32,
    pub(crate) blocks_lent: u32,
    pub(crate) blocks_borrowed: u32,
    pub(crate) requests_running: u32,
    pub(crate) requests_waiting: u32,
    pub(crate) tier: String,
    pub(crate) draining: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) moves: Option<MovesRow>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) prefill: Option<PrefillRow>,
    /// Its prefix cache; absent where that is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheRow>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) calibration: Option<CalibrationRow>,
    /// Batch and queue of its last heartbeat, for dispatch.
    #[serde(skip)]
    pub(crate) load: Option<Load>,
    /// The number that the instance drew when it registered; none before a heartbeat.
    #[serde(skip)]
    pub(crate) incarnation: Option<u64>,
}

/// rBlocks moved for an instance's requests, with the fields of its own status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MovesRow {
    pub(crate) in_progress: u32,
    pub(crate) blocks_out: u64,
    pub(crate) blocks_home: u64,
    pub(crate) blocks_between: u64,
}

impl From<MoveCounts> for MovesRow {
    fn from(m: MoveCounts) -> Self {
        let MoveCounts { in_progress, blocks_out, blocks_home, blocks_between } = m;
        Self { in_progress, blocks_out, blocks_home, blocks_between }
    }
}

/// Counters of an instance's prefix cache: see [`CacheCounts`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheRow {
    pub(crate) block_tokens: u32,
    pub(crate) device_blocks: u32,
    pub(crate) host_blocks: u64,
    pub(crate) disk_blocks: u64,
    pub(crate) leased_blocks: u32,
    pub(crate) looked_up_tokens: u64,
    pub(crate) hit_tokens: u64,
    /// Those by where they were found; the rest was in KV memory.
    #[serde(default)]
    pub(crate) pool_hit_tokens: u64,
    #[serde(default)]
    pub(crate) host_hit_tokens: u64,
    #[serde(default)]
    pub(crate) disk_hit_tokens: u64,
    #[serde(default)]
    pub(crate) saved_ms: u64,
    pub(crate) device_evicted_blocks: u64,
    pub(crate) host_evicted_blocks: u64,
    pub(crate) disk_evicted_blocks: u64,
    pub(crate) drop_done: u64,
    /// Those with most cached rBlocks.
    #[serde(default)]
    pub(crate) tenants: Vec<TenantRow>,
}

/// Cached rBlocks of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TenantRow {
    /// See [`crate::tenant`].
    pub(crate) tenant: TenantArg,
    pub(crate) device_blocks: u32,
    pub(crate) host_blocks: u64,
    pub(crate) disk_blocks: u64,
}

impl From<&CacheTenant> for TenantRow {
    fn from(t: &CacheTenant) -> Self {
        Self {
            tenant: TenantArg { key: t.key, salt: t.salt },
            device_blocks: t.device_blocks,
            host_blocks: t.host_blocks,
            disk_blocks: t.disk_blocks,
        }
    }
}

impl From<&CacheCounts> for CacheRow {
    fn from(c: &CacheCounts) -> Self {
        Self {
            block_tokens: c.block_tokens,
            device_blocks: c.device_blocks,
            host_blocks: c.host_blocks,
            disk_blocks: c.disk_blocks,
            leased_blocks: c.leased_blocks,
            looked_up_tokens: c.looked_up_tokens,
            hit_tokens: c.hit_tokens,
            pool_hit_tokens: c.pool_hit_tokens,
            host_hit_tokens: c.host_hit_tokens,
            disk_hit_tokens: c.disk_hit_tokens,
            saved_ms: c.saved_ms,
            device_evicted_blocks: c.device_evicted_blocks,
            host_evicted_blocks: c.host_evicted_blocks,
            disk_evicted_blocks: c.disk_evicted_blocks,
            drop_done: c.drop_done,
            tenants: c.tenants.iter().map(TenantRow::from).collect(),
        }
    }
}

/// Prompts computed by one instance for another, with the fields of an instance's own status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PrefillRow {
    pub(crate) workers: u32,
    pub(crate) away: u32,
    pub(crate) jobs: u32,
    pub(crate) queued_tokens: u64,
    pub(crate) jobs_done: u64,
    pub(crate) pulled: u64,
    pub(crate) own: u64,
    pub(crate) bytes: u64,
    pub(crate) reading_us: u64,
    pub(crate) reads: u64,
    pub(crate) transactions: u64,
    pub(crate) times: PrefillTimesRow,
    pub(crate) decode_ms: u64,
    pub(crate) decoded: u64,
    /// Absent in replies of older versions.
    #[serde(default)]
    pub(crate) waiting_here: u32,
}

/// Sums over requests, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PrefillTimesRow {
    pub(crate) queue_ms: u64,
    pub(crate) prefill_ms: u64,
    pub(crate) decode_queue_ms: u64,
    pub(crate) transfer_ms: u64,
}

impl From<&PrefillCounts> for PrefillRow {
    fn from(c: &PrefillCounts) -> Self {
        Self {
            workers: c.workers,
            away: c.away,
            jobs: c.jobs,
            queued_tokens: c.queued_tokens,
            jobs_done: c.jobs_done,
            pulled: c.pulled,
            own: c.own,
            bytes: c.bytes,
            reading_us: c.reading_us,
            reads: c.reads,
            transactions: c.transactions,
            times: PrefillTimesRow {
                queue_ms: c.queue_ms,
                prefill_ms: c.prefill_ms,
                decode_queue_ms: c.decode_queue_ms,
                transfer_ms: c.transfer_ms,
            },
            decode_ms: c.decode_ms,
            decoded: c.decoded,
            waiting_here: c.waiting,
        }
    }
}

/// An instance's calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CalibrationRow {
    /// Time of a step without attention, in microseconds, by batch size.
    pub(crate) step_us: BTreeMap<u32, f64>,
    pub(crate) attention_us_per_ktoken: f64,
    pub(crate) prefill_us_per_token: f64,
    pub(crate) copy_bytes_per_s: f64,
    pub(crate) prompt_attention_us_per_ktoken: f64,
}

impl From<&Calibration> for CalibrationRow {
    fn from(c: &Calibration) -> Self {
        Self {
            step_us: c.batches.iter().map(|p| (p.batch, p.step_us)).collect(),
            attention_us_per_ktoken: c.attention_us_per_ktoken,
            prefill_us_per_token: c.prefill_us_per_token,
            copy_bytes_per_s: c.copy_bytes_per_s,
            prompt_attention_us_per_ktoken: c.prompt_attention_us_per_ktoken,
        }
    }
}

impl From<&CalibrationRow> for Calibration {
    fn from(row: &CalibrationRow) -> Self {
        Self {
            batches: row.step_us.iter().map(|(batch, us)| BatchPoint { batch: *batch, step_us: *us }).collect(),
            attention_us_per_ktoken: row.attention_us_per_ktoken,
            prefill_us_per_token: row.prefill_us_per_token,
            copy_bytes_per_s: row.copy_bytes_per_s,
            prompt_attention_us_per_ktoken: row.prompt_attention_us_per_ktoken,
        }
    }
}

/// A pool's state, from its gManager.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PoolState {
    pub(crate) gmanager: GManagerRow,
    pub(crate) instances: Vec<PoolRow>,
}

/// The leading gManager, which answered.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct GManagerRow {
    pub(crate) addr: String,
    pub(crate) term: u64,
    /// Addresses of standbys asked before.
    pub(crate) standbys: Vec<String>,
}

impl From<InstanceStatus> for PoolRow {
    fn from(row: InstanceStatus) -> Self {
        let role = role_name(row.role()).to_owned();
        let incarnation = row.heartbeat.as_ref().map(|h| h.incarnation);
        let h = row.heartbeat.unwrap_or_default();
        Self {
            instance: row.instance,
            name: row.name,
            role,
            becoming: h.role.filter(|r| r.becoming.is_some()).map(|r| role_name(r.becoming()).to_owned()),
            backend: row.backend,
            alive: row.alive,
            http_addr: row.http_addr,
            quic_addr: row.quic_addr,
            heartbeat_age_ms: row.heartbeat_age_ms,
            blocks_total: h.blocks_total,
            blocks_free: h.blocks_free,
            blocks_lend_max: row.lend_blocks_max.unwrap_or(h.blocks_total),
            blocks_lent: h.lent.iter().map(|d| d.blocks).fold(0, u32::saturating_add),
            blocks_borrowed: h.blocks_borrowed,
            requests_running: h.requests_running,
            requests_waiting: h.requests_waiting,
            tier: tier_name(row.tier).to_owned(),
            draining: h.draining,
            moves: h.moves.as_deref().copied().map(MovesRow::from),
            prefill: h.prefill.as_deref().map(PrefillRow::from),
            cache: h.cache.as_deref().map(CacheRow::from),
            calibration: row.calibration.as_ref().map(CalibrationRow::from),
            load: h.load,
            incarnation,
        }
    }
}

/// The role's name on the command line.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Instance => "instance",
        Role::Kv => "kv",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

/// The tier's name on the command line.
pub(crate) fn tier_name(tier: i32) -> &'static str {
    if tier == MemoryTier::Host as i32 { "host" } else { "device" }
}

/// A client of a pool's gManagers.
#[derive(Debug)]
pub(crate) struct PoolClient {
    bound: Bound,
    gmanagers: Vec<PeerId>,
    /// gManagers that have shown a gManager's certificate.
    proven: BTreeSet<PeerId>,
    /// Index in `gmanagers` of the one to ask.
    at: usize,
    queries: u64,
    terms: Terms,
}

/// Result of asking one gManager.
enum Outcome {
    Answer(Box<ControlBody>),
    NotLeader { leader_addr: String },
    Unreachable { reason: String },
    Silent,
}

impl PoolClient {
    /// A client. Call within a tokio runtime. It connects with the first query.
    pub(crate) fn new(gmanagers: &[SocketAddr], identity: &Identity) -> anyhow::Result<Self> {
        let first = gmanagers.first().context("no gManager is named\nhint: --gmanager HOST:PORT")?;
        let any = if first.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let bound = Node::bind(any.parse()?, identity, TransportConfig::default()).context("open a UDP socket")?;
        let peers = gmanagers.iter().map(|addr| bound.node.connect(*addr, &[Class::Control]));
        let gmanagers = peers.collect::<Option<Vec<_>>>().context("too many gManagers")?;
        Ok(Self { bound, gmanagers, proven: BTreeSet::new(), at: 0, queries: 0, terms: Terms::default() })
    }

    /// Its node of the pool.
    pub(crate) fn node(&self) -> &Node {
        &self.bound.node
    }

    /// The pool's instances, by number.
    pub(crate) async fn rows(&mut self) -> anyhow::Result<Vec<PoolRow>> {
        Ok(self.state().await?.instances)
    }

    /// The pool as its gManager knows it. One that leads in an earlier term than was seen lately does not count.
    pub(crate) async fn state(&mut self) -> anyhow::Result<PoolState> {
        Ok(self.exchange(None).await?.0)
    }

    /// As [`Self::state`], and reports to other gateways which `prefixes` were placed; with what they have reported.
    pub(crate) async fn exchange(
        &mut self,
        prefixes: Option<Box<PrefixesPlaced>>,
    ) -> anyhow::Result<(PoolState, Option<Box<PrefixesKnown>>)> {
        let mut earlier = 0;
        for _ in 0..=self.gmanagers.len() {
            let (reply, standbys) = self.status(prefixes.clone()).await?;
            if self.terms.note(reply.term, std::time::Instant::now()) {
                let addr = |peer: &PeerId| self.bound.node.addr(*peer).map(|a| a.to_string()).unwrap_or_default();
                let standbys = standbys.iter().map(addr).collect();
                let gmanager = GManagerRow { addr: addr(&self.gmanagers[self.at]), term: reply.term, standbys };
                let instances = reply.instances.into_iter().map(PoolRow::from).collect();
                return Ok((PoolState { gmanager, instances }, reply.prefixes));
            }
            earlier = reply.term;
            self.at = (self.at + 1) % self.gmanagers.len();
            tokio::time::sleep(jittered(PAUSE)).await;
        }
        bail!("only a gManager of the earlier term {earlier} answers\nhint: stop it: another one led after it")
    }

    async fn status(&mut self, prefixes: Option<Box<PrefixesPlaced>>) -> anyhow::Result<(StatusReply, Vec<PeerId>)> {
        self.queries += 1;
        let query = self.queries;
        let mine = move |body: &ControlBody| matches!(body, ControlBody::StatusReply(reply) if reply.query == query);
        let (answer, standbys) = self.ask(ControlBody::StatusQuery(StatusQuery { query, prefixes }), mine).await?;
        let ControlBody::StatusReply(reply) = answer else { bail!("no status") };
        Ok((reply, standbys))
    }

    /// Sends an operator's order; an error has the reason and a hint.
    pub(crate) async fn admin(&mut self, body: AdminBody) -> anyhow::Result<AdminReply> {
        // Replies to orders name no term: the one to ask is found first.
        self.state().await?;
        self.queries += 1;
        let query = self.queries;
        let mine = move |body: &ControlBody| matches!(body, ControlBody::AdminReply(reply) if reply.query == query);
        let order = ControlBody::AdminQuery(AdminQuery { query, body: Some(body) });
        let (answer, _) = self.ask(order, mine).await?;
        let ControlBody::AdminReply(reply) = answer else { bail!("no answer to an order") };
        let hint = if reply.hint.is_empty() { String::new() } else { format!("\nhint: {}", reply.hint) };
        ensure!(reply.error.is_empty(), "{}{hint}", reply.error);
        Ok(*reply)
    }

    /// Asks until the leading gManager answers, within the deadline; asks standbys again.
    async fn ask(
        &mut self,
        body: ControlBody,
        mine: impl Fn(&ControlBody) -> bool,
    ) -> anyhow::Result<(ControlBody, Vec<PeerId>)> {
        let deadline = Instant::now() + ANSWER_DEADLINE;
        let question = Frame::Control(body.into());
        let mut standbys = Vec::new();
        let mut unreachable: BTreeMap<PeerId, String> = BTreeMap::new();
        while Instant::now() < deadline {
            let peer = self.gmanagers[self.at];
            self.bound.node.send(peer, &question, ANSWER_DEADLINE).await.context("ask the gManager")?;
            let until = if self.gmanagers.len() > 1 { deadline.min(Instant::now() + SILENCE) } else { deadline };
            match self.outcome(peer, until, &mine).await? {
                Outcome::Answer(answer) => {
                    standbys.retain(|standby| *standby != peer);
                    return Ok((*answer, standbys));
                }
                Outcome::NotLeader { leader_addr } => {
                    unreachable.clear();
                    if !standbys.contains(&peer) {
                        standbys.push(peer);
                    }
                    self.follow(&leader_addr);
                    tokio::time::sleep(jittered(PAUSE)).await;
                }
                Outcome::Unreachable { reason } => {
                    unreachable.insert(peer, reason);
                    if unreachable.len() == self.gmanagers.len() {
                        break;
                    }
                    self.at = (self.at + 1) % self.gmanagers.len();
                }
                Outcome::Silent => self.at = (self.at + 1) % self.gmanagers.len(),
            }
        }
        Err(self.no_answer(&unreachable, !standbys.is_empty()))
    }

    fn follow(&mut self, leader_addr: &str) {
        let named = leader_addr.parse().ok().and_then(|addr| self.bound.node.connect(addr, &[Class::Control]));
        if let Some(named) = named
            && !self.gmanagers.contains(&named)
        {
            self.gmanagers.push(named);
        }
        let place = named.and_then(|named| self.gmanagers.iter().position(|peer| *peer == named));
        self.at = place.unwrap_or((self.at + 1) % self.gmanagers.len());
    }

    fn no_answer(&self, unreachable: &BTreeMap<PeerId, String>, standbys: bool) -> anyhow::Error {
        if let Some((peer, reason)) = unreachable.iter().next() {
            let addr = self.bound.node.addr(*peer).map(|a| a.to_string()).unwrap_or_default();
            let hint =
                if reason.contains("certificate") { "\nhint: both ends need certificates of the same CA" } else { "" };
            return anyhow::anyhow!("the gManager at {addr} cannot be reached: {reason}{hint}");
        }
        let seconds = ANSWER_DEADLINE.as_secs();
        if standbys {
            return anyhow::anyhow!(
                "no gManager leads: only standbys answered within {seconds} s\nhint: they elect one through etcd; is \
                 it running?"
            );
        }
        anyhow::anyhow!(
            "the gManager did not answer within {seconds} s\nhint: check the address and that the certificates are of \
             the same CA"
        )
    }

    async fn outcome(
        &mut self,
        asked: PeerId,
        until: Instant,
        mine: &impl Fn(&ControlBody) -> bool,
    ) -> anyhow::Result<Outcome> {
        loop {
            let Ok(event) = tokio::time::timeout_at(until, self.bound.events.recv()).await else {
                return Ok(Outcome::Silent);
            };
            match event.context("the transport was closed")? {
                Event::Up { peer, subject, .. } if subject.roles.has(NodeRole::GManager) => {
                    self.proven.insert(peer);
                }
                Event::Up { peer, subject, .. } => {
                    self.proven.remove(&peer);
                    if peer == asked {
                        let reason = format!("its certificate is for {}, not for a gManager", subject.roles);
                        return Ok(Outcome::Unreachable { reason });
                    }
                }
                Event::Control { peer, message, .. } if self.proven.contains(&peer) => match message.body {
                    Some(body) if mine(&body) => return Ok(Outcome::Answer(Box::new(body))),
                    Some(ControlBody::Rejected(rejected)) if peer == asked => bail!("{}", rejected.reason),
                    Some(ControlBody::NotLeader(standby)) if peer == asked => {
                        return Ok(Outcome::NotLeader { leader_addr: standby.leader_addr });
                    }
                    _ => {}
                },
                Event::Unreachable { peer, reason, .. } if peer == asked => {
                    return Ok(Outcome::Unreachable { reason });
                }
                _ => {}
            }
        }
    }
}
