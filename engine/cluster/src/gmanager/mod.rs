//! The gManager: who is in the pool, who owes whom, and whom to ask for blocks (Infinite-LLM v1 §4.4).
//!
//! It knows what heartbeats tell it, no more: loose coherence. A recommendation may be stale; the creditor decides.
//! Invariants:
//! * every instance of the pool has the same [`PoolShape`], the one of the first;
//! * a number is given to one process; a process that comes back (same incarnation) keeps its number, also towards a
//!   gManager that has forgotten it;
//! * an instance that is silent for [`limits::HEARTBEAT_STALE_MS`] is not recommended, and is forgotten after
//!   [`limits::INSTANCE_FORGET_MS`].

mod advise;
#[cfg(test)]
mod tests;

use lagoon_protocol::{
    BorrowAdvice, BorrowQuery, ControlBody, Heartbeat, HeartbeatAck, InstanceStatus, PoolShape, Refusal, Register,
    Registered, Rejected, StatusReply, VERSION_MAX, VERSION_MIN,
};
use lagoon_types::{DType, InstanceId, ModelHash, limits};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Highest number that a process may bring along.
const NUMBER_ASKED_MAX: u32 = u32::MAX / 2;

/// One edge of the global debt ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerRow {
    pub creditor: InstanceId,
    pub debtor: InstanceId,
    pub blocks: u32,
}

/// What the gManager knows of one instance.
#[derive(Debug)]
struct Instance {
    registration: Register,
    /// When it was last heard.
    seen_ms: u64,
    heartbeat: Option<Heartbeat>,
    /// Its own word on what it would lend, corrected by refusals.
    lendable: u32,
    /// Blocks that debtors were sent here for since its last heartbeat.
    recommended: u32,
    /// It refused since its last heartbeat.
    paused: bool,
}

impl Instance {
    fn is_live(&self, now_ms: u64) -> bool {
        now_ms < self.seen_ms + limits::HEARTBEAT_STALE_MS
    }
}

/// The coordinator of one pool. See the module for invariants.
#[derive(Debug)]
pub struct GManager {
    shape: Option<PoolShape>,
    next: u32,
    instances: BTreeMap<InstanceId, Instance>,
}

impl Default for GManager {
    fn default() -> Self {
        Self::new(1)
    }
}

fn reject<T>(reason: String) -> Result<T, Rejected> {
    Err(Rejected { reason })
}

impl GManager {
    /// An empty pool. Numbers are given from `first_instance` (not 0) on.
    #[must_use]
    pub fn new(first_instance: u32) -> Self {
        assert_ne!(first_instance, 0, "0 is never assigned");
        Self { shape: None, next: first_instance, instances: BTreeMap::new() }
    }

    /// Handles any control message; the answer, if any, goes back on its connection. `from` is the instance that
    /// registered on that connection; what needs one is ignored without it, or in another's name.
    pub fn on_control(&mut self, from: Option<InstanceId>, body: &ControlBody, now_ms: u64) -> Option<ControlBody> {
        let is_from = |instance: u32| from == Some(InstanceId(instance));
        match body {
            ControlBody::Register(m) => Some(match self.on_register(m, now_ms) {
                Ok(registered) => ControlBody::Registered(registered),
                Err(rejected) => ControlBody::Rejected(rejected),
            }),
            ControlBody::Heartbeat(m) if is_from(m.instance) => {
                Some(ControlBody::HeartbeatAck(self.on_heartbeat(m, now_ms)))
            }
            ControlBody::BorrowQuery(m) if is_from(m.debtor) => {
                Some(ControlBody::BorrowAdvice(self.on_borrow_query(m, now_ms)))
            }
            ControlBody::Refusal(m) if from.is_some() => {
                self.on_refusal(m);
                None
            }
            ControlBody::Deregister(m) if is_from(m.instance) => {
                self.on_deregister(InstanceId(m.instance));
                None
            }
            ControlBody::StatusQuery(m) => Some(ControlBody::StatusReply(StatusReply {
                query: m.query,
                instances: self.status(now_ms),
                ..Default::default()
            })),
            _ => None,
        }
    }

    /// An instance wants to be in the pool.
    pub fn on_register(&mut self, m: &Register, now_ms: u64) -> Result<Registered, Rejected> {
        if m.version_min > VERSION_MAX || m.version_max < VERSION_MIN {
            return reject(format!(
                "protocol versions {} to {} of the instance and {VERSION_MIN} to {VERSION_MAX} of the gManager have \
                 none in common",
                m.version_min, m.version_max
            ));
        }
        let Some(shape) = &m.shape else { return reject("the registration names no pool shape".to_owned()) };
        check_shape(shape)?;
        let reachable = |a: SocketAddr| !a.ip().is_unspecified() && a.port() != 0;
        if !m.quic_addr.parse().is_ok_and(reachable) {
            return reject(format!("{:?} is not an ip:port that peers can reach", m.quic_addr));
        }
        // A new process at an address means that the old one is gone.
        self.instances
            .retain(|_, i| i.registration.quic_addr != m.quic_addr || i.registration.incarnation == m.incarnation);
        let others = self.instances.values().any(|i| i.registration.incarnation != m.incarnation);
        match &self.shape {
            Some(pool) if others => same_shape(pool, shape)?,
            _ => self.shape = Some(shape.clone()),
        }
        let number = self.number_for(m)?;
        self.instances.insert(
            number,
            Instance {
                registration: m.clone(),
                seen_ms: now_ms,
                heartbeat: None,
                lendable: 0,
                recommended: 0,
                paused: false,
            },
        );
        let version = m.version_max.min(VERSION_MAX);
        Ok(Registered { version, instance: number.0, heartbeat_ms: limits::HEARTBEAT_MS, term: 0 })
    }

    /// The number that a registering process has or gets.
    fn number_for(&mut self, m: &Register) -> Result<InstanceId, Rejected> {
        let same = self.instances.iter().find(|(_, i)| i.registration.incarnation == m.incarnation);
        if let Some((number, _)) = same {
            return Ok(*number);
        }
        if self.instances.len() >= limits::INSTANCES_MAX {
            return reject(format!("the pool has {} instances, its most", limits::INSTANCES_MAX));
        }
        let asked = InstanceId(m.instance);
        // A high number would leave too few above it.
        let number = if (1..=NUMBER_ASKED_MAX).contains(&m.instance) && !self.instances.contains_key(&asked) {
            asked
        } else {
            InstanceId(self.next)
        };
        self.next = self.next.max(number.0 + 1);
        Ok(number)
    }

    /// An instance says how it is. Heartbeats of another process under its number, and older ones, change nothing.
    pub fn on_heartbeat(&mut self, m: &Heartbeat, now_ms: u64) -> HeartbeatAck {
        let instance = self.instances.get_mut(&InstanceId(m.instance));
        let instance = instance.filter(|i| i.registration.incarnation == m.incarnation);
        let known = instance.is_some();
        if let Some(instance) = instance {
            instance.seen_ms = now_ms;
            if instance.heartbeat.as_ref().is_none_or(|h| h.seq < m.seq) {
                instance.lendable = m.blocks_lendable;
                (instance.recommended, instance.paused) = (0, false);
                instance.heartbeat = Some(m.clone());
            }
        }
        let pool_blocks_total = self.capacity_of(InstanceId(m.instance), now_ms);
        HeartbeatAck { known, pool_blocks_total, seq: m.seq, ..Default::default() }
    }

    /// A debtor is short of blocks: at most three creditors, best first.
    pub fn on_borrow_query(&mut self, query: &BorrowQuery, now_ms: u64) -> BorrowAdvice {
        let candidates = self.candidates(query, now_ms);
        let debtor = InstanceId(query.debtor);
        let others = self.instances.iter().filter(|(id, i)| **id != debtor && i.is_live(now_ms));
        BorrowAdvice {
            query: query.query,
            candidates,
            pool_blocks_total: self.capacity_of(debtor, now_ms),
            pool_blocks_lendable: others.map(|(_, i)| u64::from(i.lendable)).sum(),
        }
    }

    /// A creditor refused somebody: the ledger is corrected, and nobody is sent there until it is heard again.
    pub fn on_refusal(&mut self, m: &Refusal) {
        if let Some(instance) = self.instances.get_mut(&InstanceId(m.creditor)) {
            instance.lendable = instance.lendable.min(m.blocks_lendable);
            instance.paused = true;
        }
    }

    /// An instance leaves in order.
    pub fn on_deregister(&mut self, instance: InstanceId) {
        self.instances.remove(&instance);
    }

    /// Forgets the instances that are silent for long; returns them.
    pub fn tick(&mut self, now_ms: u64) -> Vec<InstanceId> {
        let gone = |i: &Instance| now_ms >= i.seen_ms + limits::INSTANCE_FORGET_MS;
        let forgotten = self.instances.iter().filter(|(_, i)| gone(i)).map(|(id, _)| *id).collect();
        self.instances.retain(|_, i| !gone(i));
        forgotten
    }

    /// Blocks of the largest request that `debtor` could ever hold: its own and what other live instances may lend.
    #[must_use]
    pub fn capacity_of(&self, debtor: InstanceId, now_ms: u64) -> u64 {
        let live = self.instances.iter().filter(|(_, i)| i.is_live(now_ms));
        let share = |(id, i): (&InstanceId, &Instance)| {
            let total = i.registration.blocks_total;
            if *id == debtor { total } else { i.registration.lend_blocks_max.map_or(total, |cap| cap.min(total)) }
        };
        live.map(|row| u64::from(share(row))).sum()
    }

    /// The shape that instances of this pool have; `None` before the first.
    #[must_use]
    pub fn shape(&self) -> Option<&PoolShape> {
        self.shape.as_ref()
    }

    /// The global debt ledger, by creditor and debtor, as of the last heartbeats.
    #[must_use]
    pub fn ledger(&self) -> Vec<LedgerRow> {
        let rows = self.instances.iter().flat_map(|(id, i)| {
            let lent = i.heartbeat.iter().flat_map(|h| &h.lent);
            lent.map(|d| LedgerRow { creditor: *id, debtor: InstanceId(d.debtor), blocks: d.blocks })
        });
        rows.collect()
    }

    /// Every known instance, by number.
    #[must_use]
    pub fn status(&self, now_ms: u64) -> Vec<InstanceStatus> {
        let row = |(id, i): (&InstanceId, &Instance)| InstanceStatus {
            instance: id.0,
            name: i.registration.name.clone(),
            quic_addr: i.registration.quic_addr.clone(),
            http_addr: i.registration.http_addr.clone(),
            role: i.registration.role,
            backend: i.registration.backend.clone(),
            heartbeat: i.heartbeat.clone(),
            heartbeat_age_ms: now_ms.saturating_sub(i.seen_ms),
            alive: i.is_live(now_ms),
            tier: i.registration.tier,
            calibration: i.registration.calibration.clone(),
            lend_blocks_max: i.registration.lend_blocks_max,
        };
        self.instances.iter().map(row).collect()
    }
}

/// Refuses shapes that no pool can have.
fn check_shape(shape: &PoolShape) -> Result<(), Rejected> {
    if shape.model_hash.len() != 32 {
        return reject(format!("a model hash has 32 bytes, not {}", shape.model_hash.len()));
    }
    let sizes = [shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens];
    if sizes.contains(&0) || !shape.heads.is_multiple_of(shape.kv_heads) {
        return reject(format!(
            "layers {}, heads {}, kv_heads {}, head_dim {}, block_tokens {}: expected none to be 0, and heads to be a \
             multiple of kv_heads",
            shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens
        ));
    }
    if shape.block_tokens > limits::BLOCK_TOKENS_MAX {
        return reject(format!("block_tokens is {}: at most {}", shape.block_tokens, limits::BLOCK_TOKENS_MAX));
    }
    match u8::try_from(shape.kv_dtype).ok().and_then(DType::from_code) {
        Some(_) => Ok(()),
        None => reject(format!("{} is no element type", shape.kv_dtype)),
    }
}

/// Refuses an instance that differs from the pool, naming both values of the first field that does.
pub(crate) fn same_shape(pool: &PoolShape, instance: &PoolShape) -> Result<(), Rejected> {
    let hash = |s: &PoolShape| <[u8; 32]>::try_from(&s.model_hash[..]).map(ModelHash).unwrap_or_default().to_string();
    let dtype = |s: &PoolShape| {
        let dtype = u8::try_from(s.kv_dtype).ok().and_then(DType::from_code);
        dtype.map_or_else(|| s.kv_dtype.to_string(), |d| d.to_string())
    };
    let number = |of: fn(&PoolShape) -> u32| (of(pool).to_string(), of(instance).to_string());
    let fields = [
        (
            "model hash",
            if pool.model_hash == instance.model_hash { Default::default() } else { (hash(pool), hash(instance)) },
        ),
        ("layers", number(|s| s.layers)),
        ("heads", number(|s| s.heads)),
        ("kv_heads", number(|s| s.kv_heads)),
        ("head_dim", number(|s| s.head_dim)),
        ("KV element type", (dtype(pool), dtype(instance))),
        ("block_tokens", number(|s| s.block_tokens)),
        ("window", number(|s| s.window)),
    ];
    for (name, (ours, theirs)) in fields {
        if ours != theirs {
            return reject(format!("the instance's {name} is {theirs}, the pool's is {ours}"));
        }
    }
    if pool == instance {
        Ok(())
    } else {
        reject(format!("the instance's shape is {instance:?}, the pool's is {pool:?}"))
    }
}
