//! Whether an event makes the batch due: only then may sequences grow, swap in, be admitted or join a step. It is due
//! if a sequence, the queue or the pool has changed since the last look, or if a sequence's retry time has come.
//!
//! Invariants:
//! * code that changes a sequence, the queue, or an input of decisions about them calls [`Due::touch`]; the pool counts
//!   its own changes;
//! * code that leaves a sequence waiting until a time calls [`Due::wake_at`];
//! * so looking again without either would change nothing.

/// Change counter and next wake time of the batch. See the module's documentation.
#[derive(Debug)]
pub(super) struct Due {
    changes: u64,
    /// `changes`, and the pool's changes, at the last look.
    seen: (u64, u64),
    /// Earliest time at which a waiting sequence is tried again, in milliseconds.
    wake_ms: u64,
}

impl Due {
    pub(super) fn new() -> Self {
        Self { changes: 1, seen: (0, 0), wake_ms: u64::MAX }
    }

    /// Notes a change: the batch is due.
    pub(super) fn touch(&mut self) {
        self.changes += 1;
    }

    /// Makes the batch due at `at_ms`.
    pub(super) fn wake_at(&mut self, at_ms: u64) {
        self.wake_ms = self.wake_ms.min(at_ms);
    }

    /// Whether the batch is due.
    pub(super) fn is_due(&self, pool_changes: u64, now_ms: u64) -> bool {
        self.seen != (self.changes, pool_changes) || now_ms >= self.wake_ms
    }

    /// Starts a look at the batch: later changes count for the next one.
    pub(super) fn begin(&mut self, pool_changes: u64) {
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
        assert!(!due.is_due(1, 20), "a sequence that still waits sets its wake time again");
    }
}
