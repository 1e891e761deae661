//! Control messages that are answered where they are read: on the task of their connection, without the owner's inbox.
//!
//! The owner gives a function; every connection's task keeps its own copy and looks for another one by a counter, so
//! that nothing is locked for a message.

use crate::{PeerId, Subject};
use lagoon_protocol::Control;
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Answers a control message of a peer, or leaves it to the owner's inbox. It is called on many threads at once and must
/// not block.
pub type AnswerControl = Arc<dyn Fn(PeerId, &Subject, &Control) -> Option<Control> + Send + Sync>;

/// The function that is in force.
#[derive(Default)]
pub(crate) struct Answers {
    current: Mutex<Option<AnswerControl>>,
    changes: AtomicU64,
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers").field("changes", &self.changes).finish_non_exhaustive()
    }
}

impl Answers {
    pub(crate) fn set(&self, answer: Option<AnswerControl>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        *current = answer;
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// One task's copy.
#[derive(Default)]
pub(crate) struct Cached {
    changes: u64,
    answer: Option<AnswerControl>,
}

impl Cached {
    pub(crate) fn answer(
        &mut self,
        answers: &Answers,
        peer: PeerId,
        subject: &Subject,
        message: &Control,
    ) -> Option<Control> {
        let changes = answers.changes.load(Ordering::Acquire);
        if changes != self.changes {
            let current = answers.current.lock().unwrap_or_else(PoisonError::into_inner);
            (self.changes, self.answer) = (answers.changes.load(Ordering::Acquire), current.clone());
        }
        self.answer.as_ref().and_then(|answer| answer(peer, subject, message))
    }
}
