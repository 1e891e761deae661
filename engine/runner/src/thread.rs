//! The device thread around an [`Executor`].

use crate::executor::{Executor, Turn};
use crate::work::{Command, Report};
use lagoon_backend::Device;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Handle to an executor on its own thread. Dropping it ends the thread after its current turn.
#[derive(Debug)]
pub struct ExecutorThread {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl ExecutorThread {
    /// Queues a command; never blocks. The number of commands under way is bounded by the instance: one step a lane,
    /// and its limit on guests' work.
    ///
    /// # Errors
    /// Returns the command if the thread has ended.
    pub fn send(&self, command: Command) -> Result<(), Box<Command>> {
        match &self.commands {
            Some(commands) => commands.send(command).map_err(|e| Box::new(e.0)),
            None => Err(Box::new(command)),
        }
    }
}

impl Drop for ExecutorThread {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the device thread was already reported by its own hook.
            let _ = thread.join();
        }
    }
}

/// Runs `executor` on a thread of its own; `report` is called on that thread and must not block for long.
///
/// # Panics
/// If the operating system gives no thread.
pub fn spawn<D: Device>(mut executor: Executor<D>, mut report: impl FnMut(Report) + Send + 'static) -> ExecutorThread {
    let (commands, queue) = channel();
    let thread = std::thread::Builder::new()
        .name("lagoon-device".into())
        .spawn(move || run(&mut executor, &queue, &mut report))
        .unwrap_or_else(|error| panic!("no thread for the device: {error}"));
    ExecutorThread { commands: Some(commands), thread: Some(thread) }
}

fn run<D: Device>(executor: &mut Executor<D>, queue: &Receiver<Command>, report: &mut dyn FnMut(Report)) {
    loop {
        loop {
            match queue.try_recv() {
                Ok(command) => executor.push(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let patience = match executor.try_turn(report) {
            Turn::Worked => continue,
            // A device that is nearly there is asked again at once, as its own waiting would.
            Turn::Queued(left) if left.is_zero() => {
                std::thread::yield_now();
                continue;
            }
            Turn::Queued(left) => left,
            Turn::Idle => Duration::from_secs(1),
        };
        match queue.recv_timeout(patience) {
            Ok(command) => executor.push(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
