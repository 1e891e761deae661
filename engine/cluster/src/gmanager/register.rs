//! Registration: checks of joining instances, and instance numbers.

use super::member::Member;
use super::shape::{check_shape, model_shape, same_shape};
use super::{GManager, reject};
use crate::lives::next_incarnation;
use crate::mutants::{self, Mutant};
use crate::planner::InstanceView;
use lagoon_protocol::{MemoryTier, PoolShape, Register, Registered, Rejected, Role, VERSION_MAX, version_refusal};
use lagoon_types::{InstanceId, limits};
use lagoon_view::Location;
use std::net::SocketAddr;

/// Longest text of a registration, in bytes.
const TEXT_BYTES_MAX: usize = 256;
/// Highest number that a process may request.
const NUMBER_ASKED_MAX: u32 = u32::MAX / 2;

impl GManager {
    /// Handles a registration; errors name the values that differ.
    pub fn on_register(&mut self, m: &Register, now_ms: u64) -> Result<Registered, Rejected> {
        self.on_time(now_ms);
        if let Some(refusal) = version_refusal((m.version_min, m.version_max), "the instance", "the gManager") {
            return reject(refusal);
        }
        let Some(shape) = &m.shape else { return reject("the registration names no pool shape".to_owned()) };
        check_shape(shape)?;
        check_sizes(m, shape)?;
        let addr = m.quic_addr.parse().ok().filter(|a: &SocketAddr| !a.ip().is_unspecified() && a.port() != 0);
        let Some(addr) = addr else {
            return reject(format!("{:?} is not an ip:port that peers can reach", m.quic_addr));
        };
        // A new process at an address means that the old one has ended and its lent blocks are lost.
        let mut former = None;
        if let Some(old) = self.by_addr.get(&m.quic_addr).copied()
            && self.members.get(&old).is_some_and(|i| i.registration.incarnation != m.incarnation)
        {
            former = self.replace(old).filter(|old| next_incarnation(old.registration.incarnation) == m.incarnation);
        }
        let same = self.by_incarnation.get(&m.incarnation).copied();
        let others = self.members.len() > usize::from(same.is_some());
        match &self.shape {
            Some(pool) if others => same_shape(pool, shape)?,
            _ => {
                self.pool.shape = model_shape(shape);
                self.shape = Some((**shape).clone());
            }
        }
        let number = match same {
            Some(number) => number,
            None => self.new_number(m)?,
        };
        self.admit(number, m, addr, former)?;
        let version = m.version_max.min(VERSION_MAX);
        let heartbeat_ms = limits::HEARTBEAT_MS;
        Ok(Registered { version, instance: number.0, heartbeat_ms, term: self.config.term })
    }

    /// Living members whose place a registration would take: those of its process and at its address.
    pub fn holders(&self, m: &Register) -> impl Iterator<Item = InstanceId> {
        let same = [self.by_incarnation.get(&m.incarnation), self.by_addr.get(&m.quic_addr)];
        let lives = |id: &InstanceId| self.members.get(id).is_some_and(|member| !member.is_fenced());
        same.into_iter().flatten().copied().filter(lives).collect::<Vec<_>>().into_iter()
    }

    /// Whether it remembers this instance.
    #[must_use]
    pub fn remembers(&self, id: InstanceId) -> bool {
        self.members.contains_key(&id)
    }

    /// Assigns a number to a new process.
    fn new_number(&mut self, m: &Register) -> Result<InstanceId, Rejected> {
        if self.members.len() >= self.config.instances_max {
            return reject(format!("the pool has {} instances, its most", self.config.instances_max));
        }
        let asked = InstanceId(m.instance);
        // A high number would leave too few numbers above it.
        let number = if (1..=NUMBER_ASKED_MAX).contains(&m.instance) && !self.members.contains_key(&asked) {
            asked
        } else {
            InstanceId(self.next)
        };
        self.next = self.next.max(number.0 + 1);
        Ok(number)
    }

    /// Adds a process as member. A known one starts with empty state, but stays fenced. Its drain and its unconfirmed orders
    /// stay valid, also for its next incarnation after a fence (`former` is the last one).
    fn admit(
        &mut self,
        id: InstanceId,
        m: &Register,
        addr: SocketAddr,
        former: Option<Member>,
    ) -> Result<(), Rejected> {
        let old = self.remove_member(id).or(former);
        let kept = m.blocks_total - m.lend_blocks_max.map_or(m.blocks_total, |cap| cap.min(m.blocks_total));
        let Some(slot) = self.sorted.add(id.0, kept, Location { addr, host: m.host }) else {
            return reject(format!("the pool has {} instances, its most", self.config.instances_max));
        };
        let mut member = Member::new(m.clone(), slot, self.now_ms);
        member.round = self.rounds.joined();
        if mutants::is(Mutant::RoleForgotten) {
            member.sent_role = Role::try_from(m.role).ok().map(|role| self.role_orders.next_order(None, role));
        }
        if let Some(old) = old {
            if old.is_fenced() && old.registration.incarnation == m.incarnation {
                member.life = super::member::Life::Fenced;
                self.rounds.left(member.round);
            }
            (member.drain, member.sent_role) = (old.drain, old.sent_role);
            member.cache_drops = old.cache_drops;
            if mutants::is(Mutant::RoleFenced) && old.registration.incarnation != m.incarnation {
                member.sent_role = None;
            }
        }
        if !member.is_fenced() {
            self.live += 1;
            self.pool.instances.insert(id, instance_view(m, member.is_draining()));
        }
        self.checks.insert((member.check_ms, id));
        self.by_incarnation.insert(m.incarnation, id);
        self.by_addr.insert(m.quic_addr.clone(), id);
        self.members.insert(id, member);
        self.gather_requests(id);
        self.settle(id);
        Ok(())
    }

    /// Removes an instance that deregisters, and fences it.
    pub fn on_deregister(&mut self, instance: InstanceId) {
        self.replace(instance);
    }

    /// Removes a process that has ended, and fences it, so that no instance waits for its leases to expire.
    fn replace(&mut self, id: InstanceId) -> Option<Member> {
        let member = self.remove_member(id)?;
        self.send_fence(id, member.registration.incarnation);
        Some(member)
    }
}

/// Bounds the strings and lists of a registration, because the status of the pool repeats them to every asker.
fn check_sizes(m: &Register, shape: &PoolShape) -> Result<(), Rejected> {
    if m.blocks_total.checked_mul(shape.block_tokens).is_none() {
        return reject(format!("{} blocks of {} tokens exceed 32-bit slots", m.blocks_total, shape.block_tokens));
    }
    let texts = [("name", &m.name), ("http_addr", &m.http_addr), ("backend", &m.backend)];
    if let Some((what, text)) = texts.into_iter().find(|(_, text)| text.len() > TEXT_BYTES_MAX) {
        return reject(format!("{what} has {} bytes: at most {TEXT_BYTES_MAX}", text.len()));
    }
    let points = m.calibration.as_ref().map_or(0, |c| c.batches.len());
    if points > limits::CALIBRATION_POINTS_MAX {
        return reject(format!("a calibration of {points} points: at most {}", limits::CALIBRATION_POINTS_MAX));
    }
    Ok(())
}

/// The planner's view of an instance before its first heartbeat: it receives no blocks.
fn instance_view(m: &Register, draining: bool) -> InstanceView {
    InstanceView {
        role: Role::try_from(m.role).unwrap_or(Role::Instance),
        tier: MemoryTier::try_from(m.tier).unwrap_or(MemoryTier::Device),
        calibration: m.calibration.as_deref().cloned(),
        blocks_total: m.blocks_total,
        draining,
        paused: true,
        ..InstanceView::default()
    }
}
