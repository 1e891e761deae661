//! The models of one device thread: the served one, and its draft model if it has one.

use crate::drafter::Drafter;
use crate::executor::{Executor, Turn, blocking};
use crate::work::{Command, Report};
use lagoon_backend::Device;

/// A served model's executor, and the drafter beside it, whose turns alternate. Runs on one thread: see [`crate::spawn`].
#[derive(Debug)]
pub struct Models<D: Device> {
    served: Executor<D>,
    drafter: Option<Drafter<D>>,
    /// The last turn was the drafter's, if it had work.
    drafted_last: bool,
}

impl<D: Device> Models<D> {
    /// Models of one thread; with a drafter for [`Command::Draft`].
    #[must_use]
    pub fn new(served: Executor<D>, drafter: Option<Drafter<D>>) -> Self {
        Self { served, drafter, drafted_last: false }
    }

    /// The served model's executor.
    pub fn served(&mut self) -> &mut Executor<D> {
        &mut self.served
    }

    /// Queues a command: see [`Executor::push`].
    ///
    /// # Panics
    /// On a [`Command::Draft`] without a drafter, and where the executor's does.
    pub fn push(&mut self, command: Command) {
        match command {
            Command::Draft(work) => self.drafter.as_mut().expect("there is a draft model").push(work),
            command => self.served.push(command),
        }
    }

    /// Does one bounded piece of work, waiting for the device if there is no other. Returns false if there was no
    /// work.
    pub fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        blocking(|| self.try_turn(reports))
    }

    /// Does one bounded piece of work of either model; peers' requests come before drafts. Waits for the device only if the device
    /// does not queue.
    pub fn try_turn(&mut self, reports: &mut dyn FnMut(Report)) -> Turn {
        let Some(drafter) = &mut self.drafter else { return self.served.try_turn(reports) };
        if !self.served.has_remote_requests() {
            self.drafted_last = !self.drafted_last;
            if self.drafted_last && matches!(drafter.try_turn(reports), Turn::Worked) {
                return Turn::Worked;
            }
        }
        match self.served.try_turn(reports) {
            Turn::Worked => Turn::Worked,
            turn => turn.or(drafter.try_turn(reports)),
        }
    }
}
