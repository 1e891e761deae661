//! Which of several gManagers leads: whoever holds a key in etcd through a lease.
//!
//! Invariants:
//! * a leader's time is counted from before it asked for its lease (or the renewal), and ends a margin before the lease
//!   does: when another can get the key, this one has stopped, however long it was paused in between. Whoever is about to
//!   answer asks [`Election::standing`] first, which compares with the clock, not with what a task has noticed;
//! * a term is the store's revision at which the key was made: a later leader's is larger;
//! * a leader that cannot reach etcd stops before its lease ends. Nothing else depends on etcd.

use crate::etcd::{Claim, Etcd, EtcdError, EtcdLease, Held};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How several gManagers find out who leads.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ElectionArgs {
    /// Addresses of one etcd cluster (http://host:port, comma-separated): of all gManagers with the same prefix, one
    /// leads and the others stand by.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Prefix of this pool's keys in etcd.
    #[arg(long, value_name = "PREFIX", default_value = "/lagoon", requires = "etcd")]
    etcd_prefix: String,
    /// Seconds until the lease of a leader that is gone ends, and another leads.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "etcd",
          value_parser = clap::value_parser!(u64).range(2..=60))]
    etcd_lease_s: u64,
}

/// What a gManager is at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Leads {
        term: u64,
    },
    /// `leader` is the address of the one that leads; empty if it is not known.
    Follows {
        leader: String,
    },
}

/// The lease that is held, as threads that answer read it, without a lock.
#[derive(Debug)]
struct Lease {
    origin: Instant,
    term: AtomicU64,
    /// Until when this process may act on it, in microseconds since `origin`; 0 if none is held.
    until_us: AtomicU64,
}

impl Lease {
    fn new() -> Self {
        Self { origin: Instant::now(), term: AtomicU64::new(0), until_us: AtomicU64::new(0) }
    }

    fn hold(&self, term: u64, until: Instant) {
        self.term.store(term, SeqCst);
        self.until_us.store(self.us(until), SeqCst);
    }

    fn end(&self) {
        self.until_us.store(0, SeqCst);
    }

    fn us(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.origin).as_micros()).unwrap_or(u64::MAX)
    }

    /// The term in which this process leads now. Terms of one process grow and a term is set before its time, so the term
    /// is the one that the time belongs to, or a later one.
    fn leads(&self) -> Option<u64> {
        let term = self.term.load(SeqCst);
        let holds = self.us(Instant::now()) < self.until_us.load(SeqCst);
        (holds && term == self.term.load(SeqCst)).then_some(term)
    }
}

/// Tells threads whether this process leads in a term; see [`Election::standing`].
#[derive(Clone, Debug)]
pub(crate) struct Mandate {
    lease: Arc<Lease>,
    term: u64,
}

impl Mandate {
    /// Whether the term goes on. To be asked before every answer.
    pub(crate) fn holds(&self) -> bool {
        self.lease.leads() == Some(self.term)
    }
}

#[derive(Debug)]
struct State {
    lease: Arc<Lease>,
    /// Who leads, as far as it is known.
    leader: Mutex<String>,
}

impl State {
    fn new() -> Self {
        Self { lease: Arc::new(Lease::new()), leader: Mutex::default() }
    }

    fn leader(&self) -> MutexGuard<'_, String> {
        self.leader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes part in the election, or leads alone without one.
#[derive(Debug)]
pub(crate) struct Election {
    state: Arc<State>,
    /// `None` without etcd: then the lease never ends.
    task: Option<JoinHandle<()>>,
}

impl Election {
    /// Starts to campaign as `own`, until `stop`; without etcd this gManager leads from now on.
    pub(crate) fn start(args: &ElectionArgs, own: SocketAddr, stop: CancellationToken) -> anyhow::Result<Self> {
        let state = Arc::new(State::new());
        if args.etcd.is_empty() {
            let ages = Duration::from_secs(100 * 365 * 24 * 3600);
            state.lease.hold(term_by_clock(SystemTime::now()), Instant::now() + ages);
            return Ok(Self { state, task: None });
        }
        // Several attempts fit in what is left of a lease.
        let limit = Duration::from_secs(args.etcd_lease_s) / 5;
        let campaign = Campaign {
            etcd: Etcd::new(&args.etcd, limit)?,
            key: format!("{}/leader", args.etcd_prefix.trim_end_matches('/')),
            own: own.to_string(),
            ttl_s: args.etcd_lease_s,
            poll: limit / 3,
            state: state.clone(),
        };
        Ok(Self { state, task: Some(tokio::spawn(campaign.run(stop))) })
    }

    /// What this gManager is now. To be asked before every answer.
    pub(crate) fn standing(&self) -> Standing {
        match self.state.lease.leads() {
            Some(term) => Standing::Leads { term },
            None => Standing::Follows { leader: self.state.leader().clone() },
        }
    }

    /// For threads that answer in `term`.
    pub(crate) fn mandate(&self, term: u64) -> Mandate {
        Mandate { lease: self.state.lease.clone(), term }
    }

    /// After `stop`: waits until the lease was given back, so that another leads at once.
    pub(crate) async fn ended(self) {
        if let Some(task) = self.task
            && let Err(error) = task.await
        {
            tracing::error!(%error, "the election's task failed");
        }
    }
}

/// Without an election: milliseconds since 2025, so that a gManager that was started later has a larger term.
fn term_by_clock(now: SystemTime) -> u64 {
    const YEAR_2025: Duration = Duration::from_secs(1_735_689_600);
    let age = now.duration_since(UNIX_EPOCH + YEAR_2025).unwrap_or_default();
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Until when a leader may act that asked at `asked` for a lease of `ttl`. A tenth is for clocks that run apart.
fn act_until(asked: Instant, ttl: Duration) -> Instant {
    asked + ttl - ttl / 10
}

struct Campaign {
    etcd: Etcd,
    key: String,
    own: String,
    ttl_s: u64,
    poll: Duration,
    state: Arc<State>,
}

impl Campaign {
    async fn run(mut self, stop: CancellationToken) {
        let mut silent = false;
        while !stop.is_cancelled() {
            match self.claim().await {
                Ok(Some((lease, term))) => {
                    tracing::warn!(term, "this gManager leads");
                    self.lead(lease, term, &stop).await;
                    self.state.lease.end();
                    // Whatever ended it, nobody has to wait for the lease's end; if etcd is away, it ends by itself.
                    if let Err(error) = self.etcd.revoke(lease).await {
                        tracing::debug!(%error, "the lease was not given back");
                    }
                    tracing::warn!(term, "this gManager does not lead any more");
                    silent = false;
                }
                Ok(None) => silent = false,
                Err(error) => {
                    if !std::mem::replace(&mut silent, true) {
                        tracing::warn!(%error, "no election; trying again");
                    }
                    self.state.leader().clear();
                }
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(self.poll) => {}
            }
        }
    }

    /// Tries to get the key. `None` if another has it.
    async fn claim(&mut self) -> Result<Option<(EtcdLease, u64)>, EtcdError> {
        if let Some(Held { value, .. }) = self.etcd.get(&self.key).await? {
            self.follow(value);
            return Ok(None);
        }
        let asked = Instant::now();
        let (lease, ttl) = self.etcd.grant(self.ttl_s).await?;
        match self.etcd.claim(&self.key, &self.own, lease).await {
            Ok(Claim::Ours(term)) => {
                self.state.lease.hold(term, act_until(asked, ttl));
                self.state.leader().clone_from(&self.own);
                Ok(Some((lease, term)))
            }
            Ok(Claim::Theirs(other)) => {
                self.follow(other.value);
                self.etcd.revoke(lease).await?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A predecessor at this very address is not a leader to send anybody to.
    fn follow(&self, leader: String) {
        *self.state.leader() = if leader == self.own { String::new() } else { leader };
    }

    /// Renews until that fails for good, or `stop`.
    async fn lead(&mut self, lease: EtcdLease, term: u64, stop: &CancellationToken) {
        let mut failing = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.poll) => {}
            }
            let asked = Instant::now();
            match self.renew(lease, term).await {
                Ok(Some(ttl)) => {
                    self.state.lease.hold(term, act_until(asked, ttl));
                    failing = false;
                }
                Ok(None) => return,
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "the lease was not renewed; trying again");
                    }
                    if self.state.lease.leads().is_none() {
                        self.state.leader().clear();
                        return;
                    }
                }
            }
        }
    }

    /// Renews the lease if the key is still the one that was made; `None` if either is gone.
    async fn renew(&mut self, lease: EtcdLease, term: u64) -> Result<Option<Duration>, EtcdError> {
        match self.etcd.get(&self.key).await? {
            Some(held) if held.revision == term => self.etcd.keep_alive(lease).await,
            other => {
                self.follow(other.map(|held| held.value).unwrap_or_default());
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn alone_it_leads_and_a_later_one_has_a_larger_term() {
        let args = ElectionArgs::default();
        let alone = Election::start(&args, "127.0.0.1:1".parse().unwrap(), CancellationToken::new()).unwrap();
        assert!(matches!(alone.standing(), Standing::Leads { term } if term > 0));
        let at = |seconds| term_by_clock(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), 1);
        assert_eq!(at(1_795_000_060) - at(1_795_000_000), 60_000);
        alone.ended().await;
    }

    #[test]
    fn a_leader_ends_before_its_lease_without_being_told() {
        let asked = Instant::now();
        assert_eq!(act_until(asked, Duration::from_secs(10)), asked + Duration::from_secs(9));
        let election = Election { state: Arc::new(State::new()), task: None };
        election.state.leader().push_str("a:1");
        let follows = Standing::Follows { leader: "a:1".to_owned() };
        assert_eq!(election.standing(), follows);
        let soon = Instant::now() + Duration::from_millis(50);
        election.state.lease.hold(7, soon);
        let mandate = election.mandate(7);
        assert!(election.standing() == Standing::Leads { term: 7 } && mandate.holds());
        std::thread::sleep(Duration::from_millis(60));
        assert!(election.standing() == follows && !mandate.holds());
        election.state.lease.hold(9, Instant::now() + Duration::from_secs(60));
        assert!(!mandate.holds() && election.mandate(9).holds(), "a term does not come back");
    }
}
