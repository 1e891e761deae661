//! How the role of this instance changes at run time: by drain (docs/adr/0017).
//!
//! While its role changes, an instance accepts only work that both roles accept, and finishes work of the old role. Lent
//! blocks, handed-over leases and reads of its exports need no role and continue.

use super::Membership;
use crate::cx::Cx;
use crate::look::Look;
use crate::outcome::Outcome;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{Role, RoleOrder};
use lagoon_types::limits::ROLE_GRACE_MS;

impl Membership {
    /// Whether its role can change: its KV must be readable by transports, and it must run a model.
    pub(super) fn changes_role(cx: &Cx) -> bool {
        cx.config.transfer.is_some() && cx.standing.roles.now().runs()
    }

    /// Handles the gManager's role order.
    pub(super) fn on_role_order(&mut self, cx: &mut Cx, m: RoleOrder) {
        let Ok(role) = Role::try_from(m.role) else { return };
        if !Self::changes_role(cx) || !role.runs() {
            return;
        }
        let roles = &mut cx.standing.roles;
        if roles.note_order(m.number) {
            self.heartbeat_at_ms = 0;
        }
        if role == roles.target() {
            return;
        }
        roles.order(role, cx.now_ms);
        tracing::info!(now = ?roles.now(), becoming = ?roles.becoming(), "the role changes");
    }

    /// Switches to the ordered role when all work of only the old one is done.
    pub(super) fn tick_role(&mut self, cx: &mut Cx, look: Look<'_>) {
        let Some((next, since_ms)) = cx.standing.roles.next().filter(|next| has_left(cx, look, *next)) else { return };
        let old = cx.standing.roles.now();
        cx.standing.roles.switch();
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
    let now = cx.standing.roles.now();
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
