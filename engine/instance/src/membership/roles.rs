//! The role of this instance, and how it changes at run time: by drain (docs/adr/0017).
//!
//! While its role changes, an instance accepts only work that both roles accept, and finishes work of the old role. Lent
//! blocks, handed-over leases and reads of its exports need no role and continue.

use super::Membership;
use crate::cx::Cx;
use crate::outcome::Outcome;
use crate::status::Look;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{Role, RoleOrder, RoleState};
use lagoon_types::limits::ROLE_GRACE_MS;

/// Current role and ordered role.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roles {
    now: Role,
    /// The role that it changes to, and since when, in milliseconds.
    next: Option<(Role, u64)>,
    /// Number of the last role order received.
    order_received: u64,
}

impl Roles {
    pub(crate) fn new(role: Role) -> Self {
        Self { now: role, next: None, order_received: 0 }
    }

    pub(crate) fn now(self) -> Role {
        self.now
    }

    /// The role's state for heartbeats.
    pub(crate) fn state(self) -> RoleState {
        RoleState {
            now: self.now.into(),
            becoming: self.becoming().map(Into::into),
            order_received: self.order_received,
        }
    }

    pub(crate) fn becoming(self) -> Option<Role> {
        self.next.map(|(role, _)| role)
    }

    /// The ordered role, else the current one.
    pub(crate) fn target(self) -> Role {
        self.becoming().unwrap_or(self.now)
    }

    /// Whether decode workers may send it prompts.
    pub(crate) fn prefills(self) -> bool {
        self.now.prefills() && self.target().prefills()
    }

    /// Whether its requests' prompts are computed by prefill workers.
    pub(crate) fn sends_away(self) -> bool {
        (self.now, self.target()) == (Role::Decode, Role::Decode)
    }

    /// Whether transports may write into blocks here: the current or the ordered role is decode.
    pub(crate) fn reads(self) -> bool {
        [self.now, self.target()].contains(&Role::Decode)
    }

    /// Whether clients' requests are accepted. An ordered role without clients refuses after [`ROLE_GRACE_MS`]: senders
    /// learn of the order with delay.
    pub(crate) fn accepts(self, now_ms: u64) -> bool {
        let leaves = self.next.is_some_and(|(next, since_ms)| !next.serves() && now_ms >= since_ms + ROLE_GRACE_MS);
        self.now.serves() && !leaves
    }
}

impl Membership {
    /// Whether its role can change: its KV must be readable by transports, and it must run a model.
    pub(super) fn changes_role(cx: &Cx) -> bool {
        cx.config.transfer.is_some() && cx.standing.roles.now.runs()
    }

    /// Handles the gManager's role order.
    pub(super) fn on_role_order(&mut self, cx: &mut Cx, m: RoleOrder) {
        let Ok(role) = Role::try_from(m.role) else { return };
        if !Self::changes_role(cx) || !role.runs() {
            return;
        }
        let roles = &mut cx.standing.roles;
        if roles.order_received != m.number {
            roles.order_received = m.number;
            self.heartbeat_at_ms = 0;
        }
        if role == roles.target() {
            return;
        }
        roles.next = (role != roles.now).then_some((role, cx.now_ms));
        tracing::info!(now = ?roles.now, becoming = ?roles.becoming(), "the role changes");
    }

    /// Switches to the ordered role when all work of only the old one is done.
    pub(super) fn tick_role(&mut self, cx: &mut Cx, look: Look<'_>) {
        let Some((next, since_ms)) = cx.standing.roles.next.filter(|next| has_left(cx, look, *next)) else { return };
        let old = cx.standing.roles.now;
        cx.standing.roles = Roles { now: next, next: None, ..cx.standing.roles };
        tracing::info!(?old, now = ?next, took_ms = cx.now_ms - since_ms, "the role has changed");
        cx.emit(Outcome::RoleChanged { old });
        self.heartbeat_at_ms = 0;
    }
}

/// Whether all work that `next` does not do is finished.
fn has_left(cx: &Cx, look: Look<'_>, (next, since_ms): (Role, u64)) -> bool {
    if mutants::is(Mutant::RoleUnfinished) {
        return true;
    }
    let now = cx.standing.roles.now;
    let serves = now.serves() && !next.serves();
    let prefills = now.prefills() && !next.prefills();
    let sends_away = now == Role::Decode;
    // Blocks being mapped may be given to a reader meanwhile, whose transports write without waiting for the device.
    let maps = next == Role::Decode && cx.stage_blocks() == 0 && cx.memory.prefix.maps();
    let senders_know = cx.now_ms >= since_ms + ROLE_GRACE_MS;
    !maps
        && (!serves || (senders_know && look.batch.seqs().all(|s| s.for_others.is_some())))
        && (!prefills || look.prefills.unfinished_jobs() == 0)
        && (!sends_away || look.prefills.reads_nothing())
}
