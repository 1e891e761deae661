//! Work on requests' texts (JSON, chat templates, tokenising) off the threads that serve connections.
//!
//! It is bounded in number and bytes; short texts have their own threads, so that they do not wait behind long ones. A
//! job that has begun counts until it ends, even if its client disconnects: reconnecting does not get around the
//! bounds. A job whose client disconnects before it begins, or between two of its parts, ends there.

use crate::{error::ApiError, limits::CONNECTIONS_MAX};
use axum::http::StatusCode;
use std::{sync::Arc, thread::available_parallelism, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};

/// Largest body that counts as short, in bytes: some milliseconds of work.
pub const SHORT_BYTES_MAX: usize = 64 << 10;
/// Maximum bytes of long texts in work. Tokenising takes up to 150 times its text in memory.
const LONG_BYTES_MAX: usize = 32 << 20;
/// Maximum of long texts in work, on a machine with many processors.
const LONG_JOBS_MAX: usize = 4;
/// Maximum of long texts that wait.
const LONG_WAITING_MAX: usize = 64;
/// Longest wait of a text before its work.
const WAIT_DEADLINE: Duration = Duration::from_secs(60);

/// Bytes that one permit for long texts stands for: 1 MiB.
const PERMIT_BYTES: usize = 1 << 20;
const LONG_PERMITS: usize = LONG_BYTES_MAX / PERMIT_BYTES;

/// The text work of one server. Clones share its bounds.
#[derive(Clone, Debug)]
pub struct TextJobs {
    short: Class,
    long: Class,
    /// Permits taken by the smallest long text.
    long_permits_min: usize,
}

/// Jobs of one kind.
#[derive(Clone, Debug)]
struct Class {
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

/// The client of a job, as the job sees it.
pub(crate) struct Asker<'a>(&'a dyn Fn() -> bool);

impl Asker<'_> {
    /// A client that does not go away.
    #[cfg(test)]
    pub(crate) fn staying() -> Self {
        Self(&|| false)
    }

    /// An error once the client has disconnected.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let gone = || ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("client_gone"), "the client went away");
        if (self.0)() { Err(gone()) } else { Ok(()) }
    }
}

impl Default for TextJobs {
    fn default() -> Self {
        Self::on(available_parallelism().map_or(1, usize::from))
    }
}

impl TextJobs {
    /// Bounds for a machine with `processors` processors: long texts take at most half of them.
    fn on(processors: usize) -> Self {
        let class = |running, waiting| Class {
            running: Arc::new(Semaphore::new(running)),
            waiting: Arc::new(Semaphore::new(waiting)),
        };
        let long_jobs = (processors / 2).clamp(1, LONG_JOBS_MAX);
        Self {
            short: class(2 * processors, CONNECTIONS_MAX),
            long: class(LONG_PERMITS, LONG_WAITING_MAX),
            long_permits_min: LONG_PERMITS / long_jobs,
        }
    }

    /// Runs `work` on a text of `bytes` bytes, as soon as there is room.
    ///
    /// # Errors
    /// `work`'s error; 429 if too many long texts wait, 503 if the wait is too long.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Asker<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.permit(bytes).await?;
        let (answer, answered) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let result = work(&Asker(&|| answer.is_closed()));
            drop(permit);
            // The receiver was dropped if the client disconnected.
            let _ = answer.send(result);
        });
        answered.await.unwrap_or_else(|_panicked| Err(ApiError::internal("the tokenizer panicked")))
    }

    async fn permit(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let (class, permits) = if bytes <= SHORT_BYTES_MAX {
            (&self.short, 1)
        } else {
            (&self.long, bytes.div_ceil(PERMIT_BYTES).clamp(self.long_permits_min, LONG_PERMITS))
        };
        let again = |error: ApiError| ApiError { retry_after_s: Some(1), ..error };
        let _place = Arc::clone(&class.waiting).try_acquire_owned().map_err(|_full| {
            let message = format!(
                "{LONG_WAITING_MAX} requests with long texts wait to be tokenised\nhint: send the request again in a moment"
            );
            again(ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message))
        })?;
        let permits = u32::try_from(permits).expect("at most LONG_PERMITS");
        let permit = timeout(WAIT_DEADLINE, Arc::clone(&class.running).acquire_many_owned(permits)).await;
        let permit = permit.map_err(|_elapsed| {
            let seconds = WAIT_DEADLINE.as_secs();
            let message =
                format!("the request waited {seconds} s to be tokenised\nhint: send the request again in a moment");
            again(ApiError::unavailable(message))
        })?;
        Ok(permit.expect("the semaphore is never closed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: usize = 8 << 20;

    /// A job that lasts until it is ended.
    fn begin(jobs: &TextJobs, bytes: usize) -> (mpsc::Sender<()>, tokio::task::JoinHandle<Result<(), ApiError>>) {
        let (end, ended) = mpsc::channel::<()>();
        let jobs = jobs.clone();
        let job = tokio::spawn(async move {
            jobs.run(bytes, move |asker| {
                let _ = ended.recv();
                asker.check()
            })
            .await
        });
        (end, job)
    }

    async fn until(done: impl Fn() -> bool) {
        let deadline = tokio::time::Instant::now() + WAIT_DEADLINE;
        while !done() {
            assert!(tokio::time::Instant::now() < deadline, "it has not come to that");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_short_text_does_not_wait_for_long_ones() {
        let jobs = TextJobs::on(2);
        let long: Vec<_> = (0..3).map(|_| begin(&jobs, LONG)).collect();
        until(|| jobs.long.waiting.available_permits() == LONG_WAITING_MAX - 2).await;
        assert_eq!(jobs.run(SHORT_BYTES_MAX, |asker| asker.check().map(|()| 7)).await, Ok(7));
        assert!(long.iter().all(|(_, job)| !job.is_finished()));
        for (end, job) in long {
            drop(end);
            assert_eq!(job.await.unwrap(), Ok(()));
        }
    }

    #[tokio::test]
    async fn work_counts_until_it_ends_and_not_only_until_its_client_hangs_up() {
        let jobs = TextJobs::on(2);
        let (end, running) = begin(&jobs, LONG);
        until(|| jobs.long.running.available_permits() == 0).await;
        for _ in 0..LONG_WAITING_MAX {
            let (_, again) = begin(&jobs, LONG);
            until(|| jobs.long.waiting.available_permits() == LONG_WAITING_MAX - 1).await;
            again.abort();
            until(|| jobs.long.waiting.available_permits() == LONG_WAITING_MAX).await;
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        assert_eq!(jobs.long.running.available_permits(), 0, "it still runs");
        drop(end);
        until(|| jobs.long.running.available_permits() == LONG_PERMITS).await;
    }

    #[tokio::test]
    async fn long_texts_that_wait_are_bounded_in_number() {
        let jobs = TextJobs::on(64);
        let held: Vec<_> = (0..LONG_JOBS_MAX + LONG_WAITING_MAX).map(|_| begin(&jobs, LONG)).collect();
        until(|| jobs.long.waiting.available_permits() == 0 && jobs.long.running.available_permits() == 0).await;
        let refused = jobs.run(LONG, |_| Ok(())).await.unwrap_err();
        assert!(refused.status == 429 && refused.retry_after_s.is_some(), "{refused:?}");
        assert_eq!(jobs.run(1, |_| Ok(())).await, Ok(()));
        drop(held);
    }

    #[tokio::test]
    async fn a_job_that_panics_gives_its_room_back() {
        let jobs = TextJobs::on(2);
        let panicked = jobs.run(LONG, |_| -> Result<(), ApiError> { panic!("as a tokenizer might") }).await;
        assert_eq!(panicked.unwrap_err().status, 500);
        until(|| jobs.long.running.available_permits() == LONG_PERMITS).await;
    }
}
