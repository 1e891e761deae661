//! The send side of one peer and class: a bounded queue in front of a QUIC stream.
//!
//! A sender pushes a frame and, when nothing is ahead of it, hands it to QUIC in the same call: no task switch lies
//! between a caller and the connection. Bytes beyond QUIC's flow-control window are left to the writer task. Bulk frames always
//! go through the writer, because a caller must not wait for a connection that is busy encrypting.
//!
//! Locks are taken in the order stream, queue, and never across an await.

use crate::{SendError, TransportConfig, event::Shares, stats::Counters};
use bytes::Bytes;
use futures::task::AtomicWaker;
use lagoon_wire::{Class, EncodedFrame};
use quinn::{SendStream, WriteError};
use std::{
    collections::VecDeque,
    future::Future,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// A frame on its way: pieces that are written become empty.
#[derive(Debug)]
struct Pending {
    pieces: [Bytes; 4],
    bytes: usize,
    since: Instant,
}

/// State under the queue's lock.
#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<Pending>,
    /// Bytes of `frames` and of the frame that is being written. While a stream is there, they are charged to its node.
    bytes: usize,
    /// Of the node at the stream's other end.
    node: Option<Arc<Shares>>,
    /// A stream is there.
    live: bool,
    /// The owner wants a connection even when nothing waits.
    wanted: bool,
    /// A dial task exists.
    dialing: bool,
    closed: bool,
}

impl Queue {
    /// Whether a frame must wait for room: in this queue, where one frame always has room, or of its node.
    fn is_full(&self, bytes: usize, config: &TransportConfig) -> bool {
        let over = self.bytes.saturating_add(bytes) > config.queue_bytes_max && self.bytes > 0;
        let node_over = self.node.as_ref().is_some_and(|node| !node.has_queue_room(bytes));
        self.frames.len() >= config.queue_frames_max || over || node_over
    }

    fn add(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        if let Some(node) = &self.node {
            node.queued(bytes);
        }
    }

    fn subtract(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(node) = &self.node {
            node.unqueued(bytes);
        }
    }

    /// The queue's bytes are charged to another node, or to none.
    fn charge_to(&mut self, node: Option<Arc<Shares>>) {
        let bytes = self.bytes;
        self.subtract(bytes);
        self.node = node;
        self.add(bytes);
    }
}

/// State under the stream's lock.
#[derive(Debug, Default)]
struct Writing {
    stream: Option<SendStream>,
    /// Of the connection that `stream` belongs to.
    key: u64,
    current: Option<Pending>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) class: Class,
    pub(crate) counters: Counters,
    queue: Mutex<Queue>,
    writing: Mutex<Writing>,
    writer: AtomicWaker,
    /// Notified when there is room in the queue again.
    room: Notify,
    /// Notified when a connection is there, or the node closes: a pausing dial task looks again.
    pub(crate) changed: Notify,
}

/// Task that a caller must start after queueing a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Queued {
    Done,
    /// No connection and no dial task: the caller starts one.
    NeedsDial,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub(crate) fn new(class: Class) -> Self {
        Self {
            class,
            counters: Counters::default(),
            queue: Mutex::default(),
            writing: Mutex::default(),
            writer: AtomicWaker::new(),
            room: Notify::new(),
            changed: Notify::new(),
        }
    }

    /// Queues a frame, or writes it at once when the way is free.
    pub(crate) fn push(&self, frame: EncodedFrame, config: &TransportConfig) -> Result<Queued, SendError> {
        let bytes = frame.len();
        let [first, second, third] = frame.payload;
        let pending = Pending { pieces: [frame.head, first, second, third], bytes, since: Instant::now() };
        let (live, needs_dial) = {
            let mut queue = lock(&self.queue);
            if queue.closed {
                return Err(SendError::Closed);
            }
            if queue.is_full(bytes, config) {
                return Err(SendError::Full);
            }
            queue.add(bytes);
            queue.frames.push_back(pending);
            let needs_dial = !queue.live && !queue.dialing;
            queue.dialing |= needs_dial;
            (queue.live, needs_dial)
        };
        if live {
            self.write_now();
        }
        Ok(if needs_dial { Queued::NeedsDial } else { Queued::Done })
    }

    /// Waits until `push` may succeed where it returned `Full`.
    pub(crate) async fn wait_for_room(&self, config: &TransportConfig, bytes: usize) {
        let node = lock(&self.queue).node.clone();
        let mut notified = pin!(self.room.notified());
        let mut of_node = pin!(async {
            match &node {
                Some(node) => node.queue_room().await,
                None => std::future::pending::<()>().await,
            }
        });
        // Both are registered before the check, so that room made in between is not missed.
        notified.as_mut().enable();
        let made = futures::poll!(of_node.as_mut()).is_ready();
        let full = {
            let queue = lock(&self.queue);
            !queue.closed && queue.is_full(bytes, config)
        };
        if full && !made {
            tokio::select! {
                () = notified => {}
                () = of_node => {}
            }
        }
    }

    /// Waits until a frame was handed to QUIC or dropped, unless nothing waits already.
    pub(crate) async fn wait_for_progress(&self) {
        let mut notified = pin!(self.room.notified());
        notified.as_mut().enable();
        if self.is_live() && !self.is_drained() {
            notified.await;
        }
    }

    fn write_now(&self) {
        if self.class == Class::Bulk {
            self.writer.wake();
            return;
        }
        match self.writing.try_lock() {
            // A frame is half written: the writer task waits for QUIC and goes on with the queue.
            Ok(writing) if writing.current.is_some() => {}
            Ok(mut writing) => {
                let mut cx = Context::from_waker(std::task::Waker::noop());
                if !matches!(self.poll_write(&mut writing, &mut cx), Poll::Ready(Ok(()))) {
                    drop(writing);
                    self.writer.wake();
                }
            }
            // The holder may have seen the queue empty before our push.
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => self.writer.wake(),
        }
    }

    /// Writes frames until the queue is empty (`Ready`) or QUIC takes no more (`Pending`, `cx` is woken).
    fn poll_write(&self, writing: &mut Writing, cx: &mut Context<'_>) -> Poll<Result<(), WriteError>> {
        let Writing { stream, current, .. } = writing;
        let Some(stream) = stream else { return Poll::Ready(Ok(())) };
        loop {
            if current.is_none() {
                *current = lock(&self.queue).frames.pop_front();
            }
            let Some(frame) = current else { return Poll::Ready(Ok(())) };
            while frame.pieces.iter().any(|piece| !piece.is_empty()) {
                match pin!(stream.write_chunks(&mut frame.pieces)).poll(cx) {
                    Poll::Ready(Ok(_written)) => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            let bytes = frame.bytes;
            *current = None;
            self.counters.sent(bytes);
            lock(&self.queue).subtract(bytes);
            self.room.notify_waiters();
        }
    }

    /// The writer task's body: ends with an error, or without one when the stream `key` is not this link's any more.
    pub(crate) fn poll_writer(&self, key: u64, cx: &mut Context<'_>) -> Poll<Result<(), WriteError>> {
        self.writer.register(cx.waker());
        let mut writing = lock(&self.writing);
        if writing.key != key || writing.stream.is_none() {
            return Poll::Ready(Ok(()));
        }
        match self.poll_write(&mut writing, cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
        }
    }

    /// A connection to the node with these shares is there: frames that wait go out.
    pub(crate) fn attach(&self, key: u64, stream: SendStream, node: Arc<Shares>) {
        let mut writing = lock(&self.writing);
        let cut = writing.current.take().map_or(0, |frame| frame.bytes);
        *writing = Writing { stream: Some(stream), key, current: None };
        let mut queue = lock(&self.queue);
        queue.subtract(cut);
        queue.charge_to(Some(node));
        queue.live = true;
        drop(queue);
        drop(writing);
        self.changed.notify_waiters();
    }

    /// The session is over: the stream goes, and with it all that waited.
    pub(crate) fn detach(&self) {
        let mut writing = lock(&self.writing);
        let cut = writing.current.take();
        writing.stream = None;
        let mut queue = lock(&self.queue);
        queue.live = false;
        let dropped = queue.frames.len().saturating_add(usize::from(cut.is_some()));
        queue.frames.clear();
        let bytes = queue.bytes;
        queue.subtract(bytes);
        queue.node = None;
        drop(queue);
        drop(writing);
        self.counters.dropped(dropped);
        self.writer.wake();
        self.room.notify_waiters();
    }

    /// Finishes the stream (FIN): bytes handed to QUIC are still delivered.
    pub(crate) fn finish(&self) {
        if let Some(stream) = lock(&self.writing).stream.as_mut() {
            // A stream that is closed already needs no end.
            drop(stream.finish());
        }
    }

    /// No frame is accepted any more.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_waiters();
        self.room.notify_waiters();
    }

    /// Whether nothing waits to be handed to QUIC.
    pub(crate) fn is_drained(&self) -> bool {
        let queue = lock(&self.queue);
        queue.frames.is_empty() && queue.bytes == 0
    }

    /// Whether the peer may be forgotten as far as this link goes.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.frames.is_empty() && !queue.live && !queue.wanted && !queue.dialing
    }

    /// Whether a connection is there.
    pub(crate) fn is_live(&self) -> bool {
        lock(&self.queue).live
    }

    /// The owner wants (or no longer wants) a connection even when nothing waits.
    pub(crate) fn want(&self, wanted: bool) {
        lock(&self.queue).wanted = wanted;
    }

    /// Claims the role of the dial task. True if a connection is needed and no task dials.
    pub(crate) fn claim_dial(&self) -> bool {
        let mut queue = lock(&self.queue);
        let needed = !queue.closed && !queue.live && !queue.dialing && (queue.wanted || !queue.frames.is_empty());
        queue.dialing |= needed;
        needed
    }

    /// The dial task asks whether it may end; if so, it is no longer the dial task.
    pub(crate) fn dial_may_end(&self) -> bool {
        let mut queue = lock(&self.queue);
        let end = queue.closed || queue.live || (!queue.wanted && queue.frames.is_empty());
        queue.dialing &= !end;
        end
    }

    /// Drops frames that have waited for a connection for too long; gives their number.
    pub(crate) fn expire(&self, deadline: Duration) -> usize {
        let mut queue = lock(&self.queue);
        if queue.live {
            return 0;
        }
        let before = queue.frames.len();
        while let Some(front) = queue.frames.front() {
            if front.since.elapsed() < deadline {
                break;
            }
            let bytes = front.bytes;
            queue.subtract(bytes);
            queue.frames.pop_front();
        }
        let expired = before.saturating_sub(queue.frames.len());
        drop(queue);
        if expired > 0 {
            self.counters.dropped(expired);
            self.room.notify_waiters();
        }
        expired
    }
}
