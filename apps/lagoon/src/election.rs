//! Election of the leading gManager: the one that holds a key in etcd through a lease.
//!
//! Invariants:
//! * a leader's time counts from before its request for the lease (or the renewal), and ends a margin before the lease:
//!   when another can get the key, this one has stopped, however long it was paused. Code that answers calls
//!   [`Election::standing`] first, which compares with a clock that counts suspend, not with what a task has noticed;
//! * a term is etcd's revision at which the key was created: a later leader's is larger;
//! * a leader that cannot reach etcd stops before its lease ends. Nothing else depends on etcd.

use crate::etcd::{Claim, Etcd, EtcdError, EtcdLease, Held};
use crate::moment::Moment;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Flags of the election among several gManagers.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ElectionArgs {
    /// Addresses of one etcd cluster (http://host:port, comma-separated): of all gManagers with the same prefix, one
    /// leads and the others stand by.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Prefix of this pool's keys in etcd.
    #[arg(long, value_name = "PREFIX", default_value = "/lagoon", requires = "etcd")]
    etcd_prefix: String,
    /// Seconds after which the lease of a lost leader ends and another leads.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "etcd",
          value_parser = clap::value_parser!(u64).range(2..=60))]
    etcd_lease_s: u64,
}

/// Whether a gManager leads now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Leads {
        term: u64,
    },
    /// `leader`: address of the leading gManager; empty if unknown.
    Follows {
        leader: String,
    },
}

/// The lease held, for answering threads to read without a lock.
#[derive(Debug)]
struct Lease {
    /// Clock that counts suspend, as etcd does.
    clock: fn() -> Moment,
    term: AtomicU64,
    /// Until when this process may lead, in microseconds of the clock; 0 without a lease.
    until_us: AtomicU64,
}

impl Lease {
    fn new() -> Self {
        Self { clock: Moment::now, term: AtomicU64::new(0), until_us: AtomicU64::new(0) }
    }

    fn hold(&self, term: u64, until: Moment) {
        self.term.store(term, SeqCst);
        self.until_us.store(us(until), SeqCst);
    }

    fn end(&self) {
        self.until_us.store(0, SeqCst);
    }

    /// The term in which this process leads now. Terms grow, and a term is set before its time, so the term is the one
    /// of the time read, or a later one.
    fn leads(&self) -> Option<u64> {
        let term = self.term.load(SeqCst);
        let holds = us((self.clock)()) < self.until_us.load(SeqCst);
        (holds && term == self.term.load(SeqCst)).then_some(term)
    }
}

fn us(at: Moment) -> u64 {
    u64::try_from(at.since(Moment::START).as_micros()).unwrap_or(u64::MAX)
}

/// Permission to answer in one term, for other threads; see [`Election::standing`].
#[derive(Clone, Debug)]
pub(crate) struct Mandate {
    lease: Arc<Lease>,
    term: u64,
}

impl Mandate {
    /// Whether the term goes on. To be called before every answer.
    pub(crate) fn holds(&self) -> bool {
        self.lease.leads() == Some(self.term)
    }
}

#[derive(Debug)]
struct State {
    lease: Arc<Lease>,
    /// Address of the leader, as far as known.
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

/// Takes part in the election; leads alone without one.
#[derive(Debug)]
pub(crate) struct Election {
    state: Arc<State>,
    /// `None` without etcd: the lease never ends.
    task: Option<JoinHandle<()>>,
}

impl Election {
    /// Campaigns as `own` until `stop`; without etcd this gManager leads at once.
    pub(crate) fn start(args: &ElectionArgs, own: SocketAddr, stop: CancellationToken) -> anyhow::Result<Self> {
        let state = Arc::new(State::new());
        if args.etcd.is_empty() {
            let ages = Duration::from_secs(100 * 365 * 24 * 3600);
            state.lease.hold(term_by_clock(SystemTime::now()), Moment::now() + ages);
            return Ok(Self { state, task: None });
        }
        // Several attempts fit the rest of a lease.
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

    /// Whether this gManager leads now. To be called before every answer.
    pub(crate) fn standing(&self) -> Standing {
        match self.state.lease.leads() {
            Some(term) => Standing::Leads { term },
            None => Standing::Follows { leader: self.state.leader().clone() },
        }
    }

    /// A mandate for threads that answer in `term`.
    pub(crate) fn mandate(&self, term: u64) -> Mandate {
        Mandate { lease: self.state.lease.clone(), term }
    }

    /// Waits after `stop` until the lease is revoked, so that another leads at once.
    pub(crate) async fn ended(self) {
        if let Some(task) = self.task
            && let Err(error) = task.await
        {
            tracing::error!(%error, "the election's task failed");
        }
    }
}

/// Term without an election: milliseconds since 2025, so that a gManager started later has a larger term.
fn term_by_clock(now: SystemTime) -> u64 {
    const YEAR_2025: Duration = Duration::from_secs(1_735_689_600);
    let age = now.duration_since(UNIX_EPOCH + YEAR_2025).unwrap_or_default();
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Until when a leader may act that requested a lease of `ttl` at `asked`. A tenth is margin for clock drift.
fn act_until(asked: Moment, ttl: Duration) -> Moment {
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
                    // The revoked lease lets another lead at once; if etcd is unreachable, the lease expires.
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

    /// Tries to get the key. `None` if another gManager has it.
    async fn claim(&mut self) -> Result<Option<(EtcdLease, u64)>, EtcdError> {
        if let Some(Held { value, .. }) = self.etcd.get(&self.key).await? {
            self.follow(value);
            return Ok(None);
        }
        let asked = Moment::now();
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

    /// Records the leader; a predecessor at this gManager's own address is none.
    fn follow(&self, leader: String) {
        *self.state.leader() = if leader == self.own { String::new() } else { leader };
    }

    /// Renews the lease until it is lost, or `stop`.
    async fn lead(&mut self, lease: EtcdLease, term: u64, stop: &CancellationToken) {
        let mut failing = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.poll) => {}
            }
            let asked = Moment::now();
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

    /// Renews the lease if the key is still this term's; `None` if the key or the lease no longer exists.
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

    /// The machine is suspended while this process leads, and wakes when another may have the lease.
    #[test]
    fn a_leader_that_slept_past_its_lease_does_not_act() {
        thread_local!(static SLEPT: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) });
        let lease = Arc::new(Lease { clock: || Moment::START + SLEPT.get(), ..Lease::new() });
        lease.hold(7, act_until((lease.clock)(), Duration::from_secs(10)));
        let mandate = Mandate { lease: lease.clone(), term: 7 };
        SLEPT.set(Duration::from_millis(8_999));
        assert!(lease.leads() == Some(7) && mandate.holds());
        SLEPT.set(Duration::from_secs(600));
        assert!(lease.leads().is_none() && !mandate.holds());
        let own = Lease::new();
        assert!(
            (own.clock)().since(Moment::now() - Duration::from_secs(1)) > Duration::ZERO,
            "a clock that counts sleep"
        );
    }

    #[test]
    fn a_leader_ends_before_its_lease_without_a_message() {
        let asked = Moment::now();
        assert_eq!(act_until(asked, Duration::from_secs(10)), asked + Duration::from_secs(9));
        let election = Election { state: Arc::new(State::new()), task: None };
        election.state.leader().push_str("a:1");
        let follows = Standing::Follows { leader: "a:1".to_owned() };
        assert_eq!(election.standing(), follows);
        let soon = Moment::now() + Duration::from_millis(50);
        election.state.lease.hold(7, soon);
        let mandate = election.mandate(7);
        assert!(election.standing() == Standing::Leads { term: 7 } && mandate.holds());
        std::thread::sleep(Duration::from_millis(60));
        assert!(election.standing() == follows && !mandate.holds());
        election.state.lease.hold(9, Moment::now() + Duration::from_secs(60));
        assert!(!mandate.holds() && election.mandate(9).holds(), "a term does not come back");
    }
}
