//! The device thread around its [`Models`].

use crate::executor::Turn;
use crate::models::Models;
use crate::work::{Command, Report};
use lagoon_backend::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Handle to an executor, with its drafter, on its own thread. Dropping it ends the thread after its current turn; a thread that does
/// not end within [`END_WAIT`] is abandoned.
#[derive(Debug)]
pub struct ExecutorThread {
    commands: Option<Sender<Command>>,
    progress: Arc<Progress>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// Time that a dropped handle waits for its thread.
const END_WAIT: Duration = Duration::from_secs(2);

/// Time of a busy executor's last progress.
#[derive(Debug)]
struct Progress {
    started: Instant,
    /// Microseconds from `started`, plus one; 0 while idle.
    busy_since: AtomicU64,
}

impl Progress {
    fn new() -> Self {
        Self { started: Instant::now(), busy_since: AtomicU64::new(0) }
    }

    /// Records progress: the executor starts work, or did some and goes on.
    fn advanced(&self) {
        let us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX - 1);
        self.busy_since.store(us + 1, Relaxed);
    }

    fn idle(&self) {
        self.busy_since.store(0, Relaxed);
    }

    fn is_idle(&self) -> bool {
        self.busy_since.load(Relaxed) == 0
    }

    fn stuck_for(&self) -> Option<Duration> {
        let since = self.busy_since.load(Relaxed).checked_sub(1)?;
        self.started.elapsed().checked_sub(Duration::from_micros(since))
    }
}

impl ExecutorThread {
    /// Queues a command; never blocks. The number of queued commands is bounded by the instance: one step a micro-batch, and its
    /// limit on peers' work.
    ///
    /// # Errors
    /// Returns the command if the thread has ended.
    pub fn send(&self, command: Command) -> Result<(), Box<Command>> {
        match &self.commands {
            Some(commands) => commands.send(command).map_err(|e| Box::new(e.0)),
            None => Err(Box::new(command)),
        }
    }

    /// Time since the executor last finished a piece of work (at most a layer) while it has more: it waits for the
    /// device or hangs in a call. `None` while idle.
    #[must_use]
    pub fn stuck_for(&self) -> Option<Duration> {
        self.progress.stuck_for()
    }
}

impl Drop for ExecutorThread {
    fn drop(&mut self) {
        self.commands = None;
        // Disconnected when the thread has ended; a panic there was reported by its own hook.
        let _ = self.ended.recv_timeout(END_WAIT);
    }
}

/// Runs `models` on a thread of its own. `report` is called on that thread and must not block for long; it is
/// dropped when the thread ends, also by a panic.
///
/// # Panics
/// If the operating system gives no thread.
pub fn spawn<D: Device>(models: Models<D>, report: impl FnMut(Report) + Send + 'static) -> ExecutorThread {
    let (commands, queue) = channel();
    let (end, ended) = channel::<()>();
    let progress = Arc::new(Progress::new());
    let shown = Arc::clone(&progress);
    std::thread::Builder::new()
        .name("lagoon-device".into())
        .spawn(move || {
            // Dropped in reverse order: the thread has ended when the device is closed.
            let _end = end;
            let (mut models, mut report) = (models, report);
            run(&mut models, &queue, &shown, &mut report);
        })
        .unwrap_or_else(|error| panic!("no thread for the device: {error}"));
    ExecutorThread { commands: Some(commands), progress, ended }
}

fn run<D: Device>(
    models: &mut Models<D>,
    queue: &Receiver<Command>,
    progress: &Progress,
    report: &mut dyn FnMut(Report),
) {
    loop {
        loop {
            match queue.try_recv() {
                Ok(command) => models.push(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        if progress.is_idle() {
            progress.advanced();
        }
        let wait = match models.try_turn(report) {
            Turn::Worked => {
                progress.advanced();
                continue;
            }
            // A device that is nearly done is polled at once, as its own wait would.
            Turn::Queued(left) if left.is_zero() => {
                std::thread::yield_now();
                continue;
            }
            Turn::Queued(left) => left,
            Turn::Idle => {
                progress.idle();
                Duration::from_secs(1)
            }
        };
        match queue.recv_timeout(wait) {
            Ok(command) => models.push(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
