//! The current and the ordered role of this instance, and what they allow. Only the membership changes them.

use lagoon_protocol::{Role, RoleState};
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

    /// The role that it changes to.
    pub(crate) fn becoming(self) -> Option<Role> {
        self.next.map(|(role, _)| role)
    }

    /// The role that it changes to, and since when, in milliseconds.
    pub(crate) fn next(self) -> Option<(Role, u64)> {
        self.next
    }

    /// Takes the number of a role order. True if it is another than the last one's.
    pub(crate) fn note_order(&mut self, number: u64) -> bool {
        std::mem::replace(&mut self.order_received, number) != number
    }

    /// Begins to change to an ordered role; the current one ends a change.
    pub(crate) fn order(&mut self, role: Role, now_ms: u64) {
        self.next = (role != self.now).then_some((role, now_ms));
    }

    /// Ends the change: the ordered role is the current one.
    pub(crate) fn switch(&mut self) {
        self.now = self.target();
        self.next = None;
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
