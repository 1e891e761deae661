//! The thread of an instance's loop and its network, with a runtime of its own.
//!
//! Frames that layers wait for pass through here, so nothing else runs here (HTTP has other threads), and no thread
//! switch lies between the socket and the loop.

use crate::node::NodeLoop;
use anyhow::Context;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// The thread. Dropping it without a loop ends it.
#[derive(Debug)]
pub(crate) struct LoopThread {
    handle: Handle,
    start: oneshot::Sender<NodeLoop>,
    ended: oneshot::Receiver<anyhow::Result<()>>,
}

impl LoopThread {
    /// Starts the thread; its loop is given later and runs until `stop`.
    pub(crate) fn spawn(stop: CancellationToken) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (start, started) = oneshot::channel::<NodeLoop>();
        let (end, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("lagoon-loop".into())
            .spawn(move || {
                // The owner may be dropped before it has made a loop.
                let Ok(node) = runtime.block_on(started) else { return };
                let result = runtime.block_on(node.run(stop));
                drop(end.send(result));
            })
            .context("start a thread for the loop")?;
        Ok(Self { handle, start, ended })
    }

    /// The runtime in which the loop's network must be opened.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs the loop to its end.
    pub(crate) async fn run(self, node: NodeLoop) -> anyhow::Result<()> {
        if self.start.send(node).is_err() {
            anyhow::bail!("the loop's thread has ended before its loop began");
        }
        self.ended.await.context("the loop's thread has ended without a result")?
    }
}
