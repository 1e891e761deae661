//! Whether the batch is looked at after an event: only then can a sequence grow, come back, be admitted or take part in a
//! step. It is if a sequence, the queue or the pool changed since it was looked at last, or if a time has come until which a
//! sequence was to wait.
//!
//! Invariants:
//! * whoever changes a sequence, the queue, or what a decision about them depends on, calls [`Due::touch`]; the pool counts
//!   its changes itself;
//! * whoever leaves a sequence as it is until a time calls [`Due::wake_at`];
//! * so looking again without either would change nothing.

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Due {
    changes: u64,
    /// Changes, those of the pool apart, before the batch was looked at last.
    seen: (u64, u64),
    /// A sequence waits until then.
    wake_ms: u64,
}

impl Due {
    pub(super) fn new() -> Self {
        Self { changes: 1, seen: (0, 0), wake_ms: u64::MAX }
    }

    /// Something changed.
    pub(crate) fn touch(&mut self) {
        self.changes += 1;
    }

    /// Something is to be tried again at this time.
    pub(crate) fn wake_at(&mut self, at_ms: u64) {
        self.wake_ms = self.wake_ms.min(at_ms);
    }

    /// Whether the batch is to be looked at.
    pub(crate) fn is_due(&self, pool_changes: u64, now_ms: u64) -> bool {
        self.seen != (self.changes, pool_changes) || now_ms >= self.wake_ms
    }

    /// The batch is looked at: what changes from now on counts for the next time.
    pub(crate) fn begin(&mut self, pool_changes: u64) {
        self.seen = (self.changes, pool_changes);
        self.wake_ms = u64::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_due_after_a_change_here_or_in_the_pool_and_when_a_time_has_come() {
        let mut due = Due::new();
        assert!(due.is_due(0, 0), "at first");
        due.begin(0);
        assert!(!due.is_due(0, u64::MAX - 1));
        due.touch();
        assert!(due.is_due(0, 0));
        due.begin(0);
        assert!(due.is_due(1, 0));
        due.begin(1);
        due.wake_at(20);
        due.wake_at(30);
        assert!(!due.is_due(1, 19) && due.is_due(1, 20));
        due.begin(1);
        assert!(!due.is_due(1, 20), "whoever waits still says so again");
    }
}
