//! Roles that change at run time (docs/adr/0017). Who gets another role is decided by operators, and by the balancer if there is one;
//! the instance changes by itself, by finishing what only its old role does.
//!
//! The last word to an instance on its role is repeated until its heartbeat names it, over fences, until the process has left the
//! books. Until then nobody knows which of the orders it has heard, and it replaces nobody. A gManager that starts anew
//! learns from heartbeats what each instance is and what it is becoming, and adds nothing.

use super::GManager;
use super::admin::{Refused, SEE_STATUS, refused};
use super::member::{Life, Member};
use crate::mutants::{self, Mutant};
use crate::roles::{Balancer, BalancerConfig, RoleView};
use lagoon_protocol::{AdminRole, ControlBody, Heartbeat, Role, RoleOrder, RoleState};
use lagoon_types::{InstanceId, limits};
use std::collections::BTreeMap;

/// Who decided that an instance gets another role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SwitchedBy {
    Operator,
    Balancer,
}

/// What was decided on roles, counted.
#[derive(Debug)]
pub(super) struct RoleOrders {
    /// Number of the next one.
    next: u64,
    /// By the role that an instance had, the one it is to have, and who said so.
    given: BTreeMap<(Role, Role, SwitchedBy), u64>,
    repeat_at_ms: u64,
    /// With `--auto-roles`.
    balancer: Option<Balancer>,
    balance_at_ms: u64,
}

impl RoleOrders {
    /// Numbers of another gManager's orders are not given again: terms differ.
    pub(super) fn new(term: u64, config: Option<BalancerConfig>) -> Self {
        let balancer = config.map(|config| Balancer::new(config, 0));
        Self { next: (term << 24) + 1, given: BTreeMap::new(), repeat_at_ms: 0, balancer, balance_at_ms: 0 }
    }

    /// An order to one that was told `before` and has not confirmed it.
    pub(super) fn tell(&mut self, before: Option<SentRole>, role: Role) -> SentRole {
        let number = self.next;
        self.next += 1;
        let mut perhaps = before.as_ref().map_or_else(Vec::new, |told| told.perhaps.clone());
        perhaps.extend(before.map(|told| told.role).filter(|role| !perhaps.contains(role)));
        SentRole { role, number, perhaps }
    }
}

/// A role that an instance was told to have, and has not said that it heard.
#[derive(Clone, Debug)]
pub(super) struct SentRole {
    role: Role,
    number: u64,
    /// What it was told before, and may have heard instead.
    perhaps: Vec<Role>,
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
    /// Its role, by its own word.
    pub(super) fn role(&self) -> Role {
        role_of(self.role_state().map_or(self.registration.role, |state| state.now))
    }

    /// What it said of its role; `None` if that does not change, or it said nothing yet.
    fn role_state(&self) -> Option<RoleState> {
        self.heartbeat.as_ref().and_then(|h| h.role.as_deref()).copied()
    }

    /// The role that it will have by its own word.
    fn says(&self) -> Role {
        self.role_state().map_or_else(|| self.role(), |state| role_of(state.becoming.unwrap_or(state.now)))
    }

    /// The role that it will have: as it was last told, else by its own word.
    pub(super) fn becomes(&self) -> Role {
        self.told.as_ref().map_or_else(|| self.says(), |told| told.role)
    }

    /// Its word has come: an order that it names is carried out, or was followed by another gManager's.
    pub(super) fn hear_role(&mut self) {
        let heard = self.role_state().map(|state| state.heard);
        self.told.take_if(|told| Some(told.number) == heard);
    }

    /// The roles that it may have in the end, if nobody says anything else.
    fn may_become(&self) -> impl Iterator<Item = Role> {
        let heard = mutants::is(Mutant::RoleUnacknowledged);
        let perhaps = self.told.iter().filter(move |_| !heard).flat_map(|told| told.perhaps.iter().copied());
        let says = [if heard { self.becomes() } else { self.says() }, self.becomes()];
        perhaps.chain(says)
    }

    /// Whether it has a role and keeps it, whatever it has heard of its orders.
    fn is_settled(&self) -> bool {
        self.may_become().all(|role| role == self.role())
    }

    /// Whether it computes prompts for others, and will.
    pub(super) fn prefills(&self) -> bool {
        self.role().prefills() && self.becomes().prefills()
    }

    /// Whether it does and will do what another one stops doing, whatever it has heard of its orders. What it registered with is not
    /// enough: with that alone it may be changing its role since another gManager's time, or have KV that nobody can read.
    fn replaces(&self, prefills: bool) -> bool {
        let Some(heartbeat) = &self.heartbeat else { return false };
        if prefills {
            heartbeat.role.is_some() && self.role().prefills() && self.may_become().all(Role::prefills)
        } else {
            self.role().serves() && self.may_become().all(Role::serves)
        }
    }

    /// What to tell it again.
    fn role_unacknowledged(&self) -> Option<&SentRole> {
        self.told.as_ref().filter(|_| self.life == Life::Live && self.role_state().is_some())
    }

    /// Its heartbeat as others shall see it: a role counts from when it was ordered, and one that may yet become another one has
    /// not changed back.
    pub(super) fn with_role(&self, heartbeat: Heartbeat) -> Heartbeat {
        let becoming = (!self.is_settled()).then_some(self.becomes().into());
        let with = |state: &RoleState| Box::new(RoleState { now: self.role().into(), becoming, ..*state });
        Heartbeat { role: heartbeat.role.as_deref().map(with), ..heartbeat }
    }
}

/// What the balancer needs to know of an instance; `None` before its first heartbeat.
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
    /// How often instances were told to change their role, by the old one, the new one, and who decided that.
    pub fn role_switches(&self) -> impl Iterator<Item = (Role, Role, SwitchedBy, u64)> {
        self.role_orders.given.iter().map(|((from, to, by), count)| (*from, *to, *by, *count))
    }

    /// An operator wants an instance to have another role.
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
                "start it anew with --role, or with --stage-kv-tokens: then it can be changed",
            );
        }
        if member.is_draining() {
            return refused(format!("instance {} is being drained", id.0), "`lagoon drain --cancel` ends that");
        }
        self.check_left(id, role)?;
        self.give_role(id, role, SwitchedBy::Operator);
        Ok(())
    }

    /// Whether somebody else does what an instance would not do any more.
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

    /// Tells an instance which role it shall have, unless it was told that before.
    pub(super) fn give_role(&mut self, id: InstanceId, role: Role, by: SwitchedBy) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let (from, before) = (member.role(), member.becomes());
        let told = self.role_orders.tell(member.told.take(), role);
        let order = told.order();
        member.told = Some(told);
        if before != role {
            *self.role_orders.given.entry((from, role, by)).or_default() += 1;
            tracing::warn!(instance = %id, ?from, to = ?role, ?by, "an instance changes its role");
        }
        self.settle(id);
        self.send(id, order);
        self.role_orders.repeat_at_ms = self.now_ms + limits::ROLE_REPEAT_MS;
    }

    /// When an order is repeated, if one is to be, or the balancer looks again.
    pub(super) fn roles_wake_ms(&self) -> Option<u64> {
        let unacknowledged = self.members.values().any(|m| m.role_unacknowledged().is_some());
        let repeat = unacknowledged.then_some(self.role_orders.repeat_at_ms);
        let balance = self.role_orders.balancer.is_some().then_some(self.role_orders.balance_at_ms);
        repeat.into_iter().chain(balance).min()
    }

    /// Lets the balancer decide, if there is one.
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

    /// Repeats what instances have not taken up.
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
