//! The role of this instance, and how it changes at run time: by drain (docs/adr/0017).
//!
//! An instance that is told another role does, until it has that, what both roles do, and finishes what only the old one
//! does. What it lends, what it handed over and what is read of it needs no role: that goes on.

use crate::instance::Instance;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{Role, RoleOrder, RoleState};
use lagoon_types::limits::ROLE_GRACE_MS;

/// What it is, and what it is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roles {
    now: Role,
    /// The role that it changes to, and since when.
    next: Option<(Role, u64)>,
    /// The number of the last order that it heard.
    heard: u64,
}

impl Roles {
    pub(crate) fn new(role: Role) -> Self {
        Self { now: role, next: None, heard: 0 }
    }

    pub(crate) fn now(self) -> Role {
        self.now
    }

    /// For heartbeats.
    pub(crate) fn state(self) -> RoleState {
        RoleState { now: self.now.into(), becoming: self.becoming().map(Into::into), heard: self.heard }
    }

    pub(crate) fn becoming(self) -> Option<Role> {
        self.next.map(|(role, _)| role)
    }

    /// The role that it will have if nobody says otherwise.
    pub(crate) fn target(self) -> Role {
        self.becoming().unwrap_or(self.now)
    }

    /// Whether prompts of decode workers are for it.
    pub(crate) fn prefills(self) -> bool {
        self.now.prefills() && self.target().prefills()
    }

    /// Whether its requests' prompts are computed by prefill workers.
    pub(crate) fn sends_away(self) -> bool {
        (self.now, self.target()) == (Role::Decode, Role::Decode)
    }

    /// Whether transports may write into blocks here: of a decode worker, of one that is about to be one, and of one that was
    /// until nothing is read any more.
    pub(crate) fn reads(self) -> bool {
        [self.now, self.target()].contains(&Role::Decode)
    }

    /// Whether clients' requests are accepted. Those that come just after an order were sent by somebody who had not heard
    /// of it.
    pub(crate) fn accepts(self, now_ms: u64) -> bool {
        let leaves = self.next.is_some_and(|(next, since_ms)| !next.serves() && now_ms >= since_ms + ROLE_GRACE_MS);
        self.now.serves() && !leaves
    }
}

impl Instance {
    /// Whether it can have another role than it began with: whoever computes for others must be read, whoever has others
    /// compute must read.
    pub(crate) fn changes_role(&self) -> bool {
        self.cx.config.transfer.is_some() && self.membership.roles.now.runs()
    }

    /// The gManager's word on the role.
    pub(crate) fn on_role_order(&mut self, m: RoleOrder) {
        let Ok(role) = Role::try_from(m.role) else { return };
        if !self.changes_role() || !role.runs() {
            return;
        }
        if self.membership.roles.heard != m.number {
            self.membership.roles.heard = m.number;
            self.membership.tell_at_once();
        }
        if role == self.membership.roles.target() {
            return;
        }
        let now = self.membership.roles.now;
        self.membership.roles.next = (role != now).then_some((role, self.cx.now_ms));
        tracing::info!(?now, becoming = ?self.membership.roles.becoming(), "the role changes");
    }

    /// The new role counts when nothing is left that only the old one does.
    pub(crate) fn tick_role(&mut self) {
        let Some((next, since_ms)) =
            self.membership.roles.next.filter(|(next, since_ms)| self.has_left(*next, *since_ms))
        else {
            return;
        };
        let old = self.membership.roles.now;
        self.batch.due.touch();
        self.membership.roles = Roles { now: next, next: None, ..self.membership.roles };
        tracing::info!(?old, now = ?next, took_ms = self.cx.now_ms - since_ms, "the role has changed");
        if old == Role::Decode {
            self.leave_workers();
        }
        self.membership.tell_at_once();
    }

    /// Whether it has finished what it does as it is and will not do as `next`.
    fn has_left(&self, next: Role, since_ms: u64) -> bool {
        if mutants::is(Mutant::RoleUnfinished) {
            return true;
        }
        let now = self.membership.roles.now;
        let serves = now.serves() && !next.serves();
        let prefills = now.prefills() && !next.prefills();
        let sends_away = now == Role::Decode;
        // What is being mapped may be given to a reader meanwhile. Its transports wait for no device if they write there.
        let maps = next == Role::Decode && self.stage_blocks() == 0 && self.cx.memory.prefix.maps();
        let heard = self.cx.now_ms >= since_ms + ROLE_GRACE_MS;
        !maps
            && (!serves || (heard && self.batch.seqs().all(|s| self.prefill.is_job(s.id))))
            && (!prefills || self.jobs() == 0)
            && (!sends_away || self.prefill.reads_nothing())
    }
}
