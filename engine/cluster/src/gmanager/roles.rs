//! Role orders: roles change at run time (docs/adr/0017), by operators' orders and by the balancer, if there is one. The
//! instance itself finishes the work that only its old role does.
//!
//! The last role order is repeated until the instance's heartbeat names its number, also after a fence, until the process
//! is forgotten. Until then the instance may have received any of its orders, and counts as no replacement for another one.
//! A restarted gManager learns roles and changes in progress from heartbeats, and sends no orders of its own.

use super::GManager;
use super::admin::{Refused, SEE_STATUS, refused};
use super::member::{Life, Member, SentRole};
use crate::mutants::{self, Mutant};
use crate::roles::{Balancer, BalancerConfig, RoleView};
use lagoon_protocol::{AdminRole, ControlBody, Heartbeat, Role, RoleOrder, RoleState};
use lagoon_types::{InstanceId, limits};
use std::collections::BTreeMap;

/// Origin of a role order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SwitchedBy {
    Operator,
    Balancer,
}

/// Role orders: numbers, counts and the balancer.
#[derive(Debug)]
pub(super) struct RoleOrders {
    /// Number of the next order.
    next: u64,
    /// Orders counted by old role, new role and origin.
    given: BTreeMap<(Role, Role, SwitchedBy), u64>,
    repeat_at_ms: u64,
    /// Balancer, with `--auto-roles`.
    balancer: Option<Balancer>,
    balance_at_ms: u64,
}

impl RoleOrders {
    /// Order numbers start from the term, so that those of different gManagers differ.
    pub(super) fn new(term: u64, config: Option<BalancerConfig>) -> Self {
        let balancer = config.map(|config| Balancer::new(config, 0));
        Self { next: (term << 24) + 1, given: BTreeMap::new(), repeat_at_ms: 0, balancer, balance_at_ms: 0 }
    }

    /// A new order for an instance whose last unconfirmed order is `before`.
    pub(super) fn next_order(&mut self, before: Option<SentRole>, role: Role) -> SentRole {
        let number = self.next;
        self.next += 1;
        let mut earlier = before.as_ref().map_or_else(Vec::new, |sent| sent.earlier.clone());
        earlier.extend(before.map(|sent| sent.role).filter(|role| !earlier.contains(role)));
        SentRole { role, number, earlier }
    }
}

impl SentRole {
    fn order(&self) -> ControlBody {
        ControlBody::RoleOrder(RoleOrder { role: self.role.into(), number: self.number })
    }
}

fn role_of(number: i32) -> Role {
    Role::try_from(number).unwrap_or(Role::Instance)
}

impl Member {
    /// Its role, as it reports it.
    pub(super) fn role(&self) -> Role {
        role_of(self.role_state().map_or(self.registration.role, |state| state.now))
    }

    /// The role state of its last heartbeat; `None` if its role cannot change, or before its first heartbeat. A kv node's role
    /// never changes, even if its heartbeat claims another one: its certificate allows no other.
    fn role_state(&self) -> Option<RoleState> {
        let fixed = self.registration.role == i32::from(Role::Kv);
        self.heartbeat.as_ref().filter(|_| !fixed).and_then(|h| h.role.as_deref()).copied()
    }

    /// Its future role, as it reports it.
    fn reported(&self) -> Role {
        self.role_state().map_or_else(|| self.role(), |state| role_of(state.becoming.unwrap_or(state.now)))
    }

    /// Its future role: of its unconfirmed order, else as it reports it.
    pub(super) fn becomes(&self) -> Role {
        self.sent_role.as_ref().map_or_else(|| self.reported(), |sent| sent.role)
    }

    /// Drops its unconfirmed order if its heartbeat confirms the number.
    pub(super) fn confirm_role(&mut self) {
        let confirmed = self.role_state().map(|state| state.order_received);
        self.sent_role.take_if(|sent| Some(sent.number) == confirmed);
    }

    /// Its possible future roles without further orders.
    fn may_become(&self) -> impl Iterator<Item = Role> {
        let assumed = mutants::is(Mutant::RoleUnacknowledged);
        let earlier = self.sent_role.iter().filter(move |_| !assumed).flat_map(|sent| sent.earlier.iter().copied());
        let reported = [if assumed { self.becomes() } else { self.reported() }, self.becomes()];
        earlier.chain(reported)
    }

    /// Whether it keeps its role, whichever of its orders it has received.
    fn is_settled(&self) -> bool {
        self.may_become().all(|role| role == self.role())
    }

    /// Whether it computes prompts for others now and in its future role.
    pub(super) fn prefills(&self) -> bool {
        self.role().prefills() && self.becomes().prefills()
    }

    /// Whether it does the work of a side now and in every possible future role, so that another instance may stop. Its
    /// registered role alone is not enough: it may be changing by another gManager's order, or its KV may not be readable.
    fn replaces(&self, prefills: bool) -> bool {
        let Some(heartbeat) = &self.heartbeat else { return false };
        if prefills {
            heartbeat.role.is_some() && self.role().prefills() && self.may_become().all(Role::prefills)
        } else {
            self.role().serves() && self.may_become().all(Role::serves)
        }
    }

    /// The role order to repeat.
    fn role_unacknowledged(&self) -> Option<&SentRole> {
        self.sent_role.as_ref().filter(|_| self.life == Life::Live && self.role_state().is_some())
    }

    /// Its heartbeat for status: an ordered role counts at once as the future role, until it is confirmed.
    pub(super) fn with_role(&self, heartbeat: Heartbeat) -> Heartbeat {
        let becoming = (!self.is_settled()).then_some(self.becomes().into());
        let with = |state: &RoleState| Box::new(RoleState { now: self.role().into(), becoming, ..*state });
        Heartbeat { role: heartbeat.role.as_deref().map(with), ..heartbeat }
    }
}

/// The balancer's view of an instance; `None` before its first heartbeat.
fn view_of(id: InstanceId, member: &Member) -> Option<RoleView> {
    let heartbeat = member.heartbeat.as_ref()?;
    let prefill = heartbeat.prefill.as_deref().copied().unwrap_or_default();
    let share = |part: u32, whole: u32| f64::from(part) / f64::from(whole.max(1));
    let batch_max = heartbeat.load.as_ref().map_or(0, |load| load.batch_max);
    let used = heartbeat.blocks_total.saturating_sub(heartbeat.blocks_free);
    Some(RoleView {
        id,
        role: member.role(),
        becoming: (!member.is_settled()).then_some(member.becomes()),
        changes: heartbeat.role.is_some(),
        running: heartbeat.requests_running,
        jobs: prefill.jobs,
        waiting: prefill.waiting,
        taken: share(heartbeat.requests_running, batch_max).max(share(used, heartbeat.blocks_total)),
    })
}

impl GManager {
    /// Number of ordered role changes, by old role, new role and origin.
    pub fn role_switches(&self) -> impl Iterator<Item = (Role, Role, SwitchedBy, u64)> {
        self.role_orders.given.iter().map(|((from, to, by), count)| (*from, *to, *by, *count))
    }

    /// Handles an operator's role order.
    pub(super) fn admin_role(&mut self, m: &AdminRole) -> Result<(), Refused> {
        let id = InstanceId(m.instance);
        let Some(member) = self.members.get(&id) else {
            return refused(format!("there is no instance {}", m.instance), SEE_STATUS);
        };
        let Some(role) = Role::try_from(m.role).ok().filter(|role| role.runs()) else {
            return refused("no instance becomes a kv node", "roles are prefill, decode and both");
        };
        if !member.is_live(self.now_ms) {
            return refused(format!("instance {} is not alive", id.0), SEE_STATUS);
        }
        if !member.role().runs() {
            return refused(
                format!("instance {} is a kv node: it has no weights to compute with", id.0),
                "start an instance with the role",
            );
        }
        let Some(heartbeat) = &member.heartbeat else {
            return refused(format!("nothing is known of instance {} yet", id.0), "try again in a second");
        };
        if heartbeat.role.is_none() {
            let backend = &member.registration.backend;
            return refused(
                format!(
                    "instance {} cannot change its role: its KV ({backend}) is not in memory that others read",
                    id.0
                ),
                "restart it with --role, or with --stage-kv-tokens: then it can be changed",
            );
        }
        if member.is_draining() {
            return refused(format!("instance {} is being drained", id.0), "`lagoon drain --cancel` ends that");
        }
        self.check_left(id, role)?;
        self.give_role(id, role, SwitchedBy::Operator);
        Ok(())
    }

    /// Checks that another instance does the work that this one would stop doing.
    fn check_left(&self, id: InstanceId, role: Role) -> Result<(), Refused> {
        if mutants::is(Mutant::LastLeaves) {
            return Ok(());
        }
        let member = &self.members[&id];
        let counts = |m: &Member| m.is_live(self.now_ms) && !m.is_draining();
        let others = |prefills| self.members.iter().any(|(o, m)| *o != id && counts(m) && m.replaces(prefills));
        if member.role().serves() && !role.serves() && !others(false) {
            return refused(
                format!("instance {} is the last one that takes requests", id.0),
                "give another instance role decode or both first, and wait until it has that",
            );
        }
        if member.role().prefills() && !role.prefills() && !others(true) {
            return refused(
                format!("instance {} is the last one that computes prompts for others", id.0),
                "give another instance role prefill or both first, and wait until it has that",
            );
        }
        Ok(())
    }

    /// Sends a role order to an instance, and counts it if it changes the future role.
    pub(super) fn give_role(&mut self, id: InstanceId, role: Role, by: SwitchedBy) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let (from, before) = (member.role(), member.becomes());
        let sent = self.role_orders.next_order(member.sent_role.take(), role);
        let order = sent.order();
        member.sent_role = Some(sent);
        if before != role {
            *self.role_orders.given.entry((from, role, by)).or_default() += 1;
            tracing::warn!(instance = %id, ?from, to = ?role, ?by, "an instance changes its role");
        }
        self.settle(id);
        self.send(id, order);
        self.role_orders.repeat_at_ms = self.now_ms + limits::ROLE_REPEAT_MS;
    }

    /// Time of the next repeat of a role order, or of the balancer's next decision.
    pub(super) fn roles_wake_ms(&self) -> Option<u64> {
        let unacknowledged = self.members.values().any(|m| m.role_unacknowledged().is_some());
        let repeat = unacknowledged.then_some(self.role_orders.repeat_at_ms);
        let balance = self.role_orders.balancer.is_some().then_some(self.role_orders.balance_at_ms);
        repeat.into_iter().chain(balance).min()
    }

    /// Runs the balancer, if there is one.
    pub(super) fn balance_roles(&mut self) {
        if self.role_orders.balancer.is_none() || self.now_ms < self.role_orders.balance_at_ms {
            return;
        }
        self.role_orders.balance_at_ms = self.now_ms + limits::HEARTBEAT_MS;
        let counts = |m: &Member| m.is_live(self.now_ms) && !m.is_draining() && m.role().runs();
        let members = self.members.iter().filter(|(_, m)| counts(m));
        let views: Vec<RoleView> = members.filter_map(|(id, m)| view_of(*id, m)).collect();
        let now_ms = self.now_ms;
        let switch = self.role_orders.balancer.as_mut().and_then(|balancer| balancer.decide(&views, now_ms));
        if let Some(switch) = switch {
            self.give_role(switch.id, switch.to, SwitchedBy::Balancer);
        }
    }

    /// Repeats unconfirmed role orders.
    pub(super) fn repeat_roles(&mut self) {
        if self.now_ms < self.role_orders.repeat_at_ms || mutants::is(Mutant::RoleUnrepeated) {
            return;
        }
        self.role_orders.repeat_at_ms = self.now_ms + limits::ROLE_REPEAT_MS;
        let unacknowledged = self.members.iter().filter_map(|(id, m)| Some((*id, m.role_unacknowledged()?.order())));
        let unacknowledged: Vec<(InstanceId, ControlBody)> = unacknowledged.collect();
        unacknowledged.into_iter().for_each(|(id, order)| self.send(id, order));
    }
}
