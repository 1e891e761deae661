//! Registration: who may join, under which number.

use super::member::Member;
use super::shape::{check_shape, model_shape, same_shape};
use super::{GManager, reject};
use crate::lives::next_incarnation;
use crate::mutants::{self, Mutant};
use crate::planner::InstanceView;
use lagoon_protocol::{MemoryTier, Register, Registered, Rejected, Role, VERSION_MAX, VERSION_MIN};
use lagoon_types::{InstanceId, limits};
use std::net::SocketAddr;

/// Highest number that a process may bring along.
const NUMBER_ASKED_MAX: u32 = u32::MAX / 2;

impl GManager {
    /// An instance wants to be in the pool.
    pub fn on_register(&mut self, m: &Register, now_ms: u64) -> Result<Registered, Rejected> {
        self.on_time(now_ms);
        if m.version_min > VERSION_MAX || m.version_max < VERSION_MIN {
            return reject(format!(
                "protocol versions {} to {} of the instance and {VERSION_MIN} to {VERSION_MAX} of the gManager have \
                 none in common",
                m.version_min, m.version_max
            ));
        }
        let Some(shape) = &m.shape else { return reject("the registration names no pool shape".to_owned()) };
        check_shape(shape)?;
        let addr = m.quic_addr.parse().ok().filter(|a: &SocketAddr| !a.ip().is_unspecified() && a.port() != 0);
        let Some(addr) = addr else {
            return reject(format!("{:?} is not an ip:port that peers can reach", m.quic_addr));
        };
        // A new process at an address means that the old one is gone, and what it lent with it.
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
                self.shape = Some(shape.clone());
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

    /// The number of a process that has none here.
    fn new_number(&mut self, m: &Register) -> Result<InstanceId, Rejected> {
        if self.members.len() >= self.config.instances_max {
            return reject(format!("the pool has {} instances, its most", self.config.instances_max));
        }
        let asked = InstanceId(m.instance);
        // A high number would leave too few above it.
        let number = if (1..=NUMBER_ASKED_MAX).contains(&m.instance) && !self.members.contains_key(&asked) {
            asked
        } else {
            InstanceId(self.next)
        };
        self.next = self.next.max(number.0 + 1);
        Ok(number)
    }

    /// Puts a process into the books. One that is there already starts anew, but a fence stays. What it was told stands: a drain goes
    /// on, and an order that it has not confirmed is repeated, also to its next life after a fence (`former` is the last one).
    fn admit(
        &mut self,
        id: InstanceId,
        m: &Register,
        addr: SocketAddr,
        former: Option<Member>,
    ) -> Result<(), Rejected> {
        let old = self.remove_member(id).or(former);
        let kept = m.blocks_total - m.lend_blocks_max.map_or(m.blocks_total, |cap| cap.min(m.blocks_total));
        let Some(slot) = self.sorted.add(id.0, kept, addr) else {
            return reject(format!("the pool has {} instances, its most", self.config.instances_max));
        };
        let mut member = Member::new(m.clone(), slot, self.now_ms);
        member.round = self.rounds.joined();
        if mutants::is(Mutant::RoleForgotten) {
            member.told = Role::try_from(m.role).ok().map(|role| self.role_orders.tell(None, role));
        }
        if let Some(old) = old {
            if old.is_fenced() && old.registration.incarnation == m.incarnation {
                member.life = super::member::Life::Fenced;
                self.rounds.left(member.round);
            }
            (member.drain, member.told) = (old.drain, old.told);
            if mutants::is(Mutant::RoleFenced) && old.registration.incarnation != m.incarnation {
                member.told = None;
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

    /// An instance leaves in order.
    pub fn on_deregister(&mut self, instance: InstanceId) {
        self.replace(instance);
    }

    /// A process is gone for good: everybody hears of it, so that nobody waits for its leases to end.
    fn replace(&mut self, id: InstanceId) -> Option<Member> {
        let member = self.remove_member(id)?;
        self.tell_fence(id, member.registration.incarnation);
        Some(member)
    }
}

/// What the planner sees before the first heartbeat: nothing to give.
fn instance_view(m: &Register, draining: bool) -> InstanceView {
    InstanceView {
        role: Role::try_from(m.role).unwrap_or(Role::Instance),
        tier: MemoryTier::try_from(m.tier).unwrap_or(MemoryTier::Device),
        calibration: m.calibration.clone(),
        blocks_total: m.blocks_total,
        draining,
        paused: true,
        ..InstanceView::default()
    }
}
