//! The HTTP server's engine: sends requests to the node's loop, and receives their events.

use crate::node::{Input, Shared, gone};
use crate::node_status::NodeStatus;
use lagoon_http::{CancelGuard, Engine, EngineInfo, Generation};
use lagoon_types::{GenerateRequest, RequestError, SeqId};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Maximum of one request's events that wait for their client.
const EVENTS_MAX: usize = 4096;
/// Deadline of the loop's reply to a status query.
const STATUS_DEADLINE: Duration = Duration::from_secs(5);

/// A handle of the node's loop.
#[derive(Debug)]
pub(crate) struct NodeEngine {
    inputs: mpsc::Sender<Input>,
    shared: Arc<Shared>,
    next: AtomicU64,
    info: EngineInfo,
}

impl NodeEngine {
    pub(crate) fn new(inputs: mpsc::Sender<Input>, shared: Arc<Shared>, info: EngineInfo) -> Self {
        Self { inputs, shared, next: AtomicU64::new(1), info }
    }

    /// The node's present status.
    pub(crate) async fn status(&self) -> Option<NodeStatus> {
        node_status(&self.inputs).await
    }
}

/// The present status of the node behind `inputs`.
pub(crate) async fn node_status(inputs: &mpsc::Sender<Input>) -> Option<NodeStatus> {
    let (reply, answer) = oneshot::channel();
    inputs.send(Input::Status { reply }).await.ok()?;
    tokio::time::timeout(STATUS_DEADLINE, answer).await.ok()?.ok()
}

impl Engine for NodeEngine {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, RequestError> {
        let seq = SeqId(self.next.fetch_add(1, Relaxed));
        let room = (request.max_tokens as usize).saturating_add(3).min(EVENTS_MAX);
        let (events, receiver) = mpsc::channel(room);
        self.inputs.try_send(Input::Submit { seq, request: Box::new(request), events }).map_err(
            |error| match error {
                mpsc::error::TrySendError::Full(_) => {
                    RequestError::QueueFull { queued: self.inputs.max_capacity(), limit: self.inputs.max_capacity() }
                }
                mpsc::error::TrySendError::Closed(_) => gone(),
            },
        )?;
        let inputs = self.inputs.clone();
        let guard = CancelGuard::new(move || {
            // A full queue must not lose the cancellation; a guard is dropped outside of async code.
            if let Err(mpsc::error::TrySendError::Full(input)) = inputs.try_send(Input::Cancel { seq })
                && let Ok(runtime) = tokio::runtime::Handle::try_current()
            {
                runtime.spawn(async move { inputs.send(input).await });
            }
        });
        Ok(Generation { events: receiver, guard })
    }

    fn info(&self) -> EngineInfo {
        let pool = *self.shared.pool_tokens.lock().unwrap_or_else(PoisonError::into_inner);
        EngineInfo {
            capacity_tokens: Some(u32::try_from(pool).unwrap_or(u32::MAX)),
            ready: !self.inputs.is_closed() && !self.shared.leaving.load(Relaxed),
            ..self.info.clone()
        }
    }
}
