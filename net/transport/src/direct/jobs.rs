//! A queue of work for a few threads, which wakes as few of them as the work needs.
//!
//! A thread that is woken while the waking thread still runs may be scheduled behind a third one on the only other processor, and
//! wait there until that one sleeps. So a caller that pushes many jobs wakes one thread only; each thread wakes the next after
//! its first job if more are queued, when the caller probably sleeps. A job waits for one other job at most.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

#[derive(Debug)]
pub(super) struct Jobs<T> {
    queue: Mutex<Queue<T>>,
    call: Condvar,
    threads: usize,
}

#[derive(Debug)]
struct Queue<T> {
    jobs: VecDeque<T>,
    closed: bool,
    /// Threads that wait and were not called: never less than there are.
    asleep: usize,
    /// A thread was woken, and none has begun or ended a wait since.
    called: bool,
}

impl<T> Jobs<T> {
    /// For so many threads that take.
    pub(super) fn new(threads: usize) -> Self {
        let queue = Queue { jobs: VecDeque::new(), closed: false, asleep: 0, called: false };
        Self { queue: Mutex::new(queue), call: Condvar::new(), threads }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job. After [`Jobs::close`] it is dropped.
    pub(super) fn push(&self, job: T) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        queue.jobs.push_back(job);
        let first = !queue.called;
        self.wake(queue, first);
    }

    /// Refuses further jobs; the threads end after those that are queued.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.call.notify_all();
    }

    /// The next job; waits for it. `None`: closed, and all is taken. `worked`: this thread has done one before. `idle` is
    /// called when there is none, before it waits or ends.
    pub(super) fn take(&self, mut worked: bool, idle: impl FnOnce()) -> Option<T> {
        let mut idle = Some(idle);
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                let more = worked && !queue.jobs.is_empty();
                self.wake(queue, more);
                return Some(job);
            }
            if let Some(idle) = idle.take() {
                drop(queue);
                idle();
                queue = self.lock();
                continue;
            }
            if queue.closed {
                return None;
            }
            queue.asleep = queue.asleep.saturating_add(1).min(self.threads);
            queue.called = false;
            queue = self.call.wait(queue).unwrap_or_else(PoisonError::into_inner);
            (queue.called, worked) = (false, false);
        }
    }

    /// Calls a thread, if it should and one sleeps.
    fn wake(&self, mut queue: MutexGuard<'_, Queue<T>>, should: bool) {
        let call = should && queue.asleep > 0;
        if call {
            (queue.asleep, queue.called) = (queue.asleep.saturating_sub(1), true);
        }
        drop(queue);
        if call {
            self.call.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{Arc, Barrier, mpsc::channel},
        time::Duration,
    };

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn every_job_is_done_once_and_threads_end() {
        for threads in 1..4 {
            let jobs = Arc::new(Jobs::new(threads));
            let (done, results) = channel();
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    let (jobs, done) = (Arc::clone(&jobs), done.clone());
                    std::thread::spawn(move || {
                        // Each thread reports its results when it has nothing else to do.
                        let mut held = Vec::new();
                        while let Some(job) = jobs.take(true, || held.drain(..).for_each(|job| done.send(job).unwrap()))
                        {
                            held.push(job);
                        }
                    })
                })
                .collect();
            let mut all = Vec::new();
            for burst in 0..200u32 {
                let size = burst % 7;
                (0..size).for_each(|n| jobs.push(burst * 7 + n));
                // Everybody sleeps again, or nearly.
                all.extend((0..size).map(|_| results.recv_timeout(TIMEOUT).unwrap()));
            }
            jobs.push(u32::MAX);
            jobs.close();
            jobs.push(0);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            all.extend(results.try_iter());
            all.sort_unstable();
            let expected = (0..200).flat_map(|burst| (0..burst % 7).map(move |n| burst * 7 + n)).chain([u32::MAX]);
            assert!(all.into_iter().eq(expected), "{threads} threads");
        }
    }

    /// Each burst is a job that ends when all are there, and two that end when both threads have one.
    #[test]
    fn both_threads_work() {
        let jobs: Arc<Jobs<Arc<Barrier>>> = Arc::new(Jobs::new(2));
        let (gate, both) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let jobs = Arc::clone(&jobs);
                std::thread::spawn(move || {
                    let mut worked = false;
                    while let Some(job) = jobs.take(worked, || ()) {
                        job.wait();
                        worked = true;
                    }
                })
            })
            .collect();
        for burst in 0..300 {
            for job in [&gate, &both, &both] {
                jobs.push(Arc::clone(job));
            }
            gate.wait();
            // Sometimes they sleep again before the next.
            while burst % 3 > 0 && jobs.lock().asleep < 2 {
                std::thread::yield_now();
            }
        }
        jobs.close();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    }
}
