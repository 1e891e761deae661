//! Budget of retries: a share of all requests, so that retries do not multiply the load of an overloaded pool.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

/// Retries that each request adds.
const SHARE: f64 = 0.2;
/// Retries that each second adds: a pool with few requests recovers, too.
const PER_SECOND: f64 = 1.0;
/// Maximum of saved retries.
const SAVED_MAX: f64 = 10.0;
/// Longest `Retry-After` that is respected.
const REST_MAX: Duration = Duration::from_secs(60);

/// The rest that a header `Retry-After` asks for, in seconds or until a date (RFC 9110, section 10.2.3).
pub(crate) fn retry_after(output: &str, now: SystemTime) -> Option<Duration> {
    let seconds = output.parse().ok().map(Duration::from_secs);
    let until = || httpdate::parse_http_date(output).ok().map(|until| until.duration_since(now).unwrap_or_default());
    seconds.or_else(until).map(|rest| rest.min(REST_MAX))
}

/// See the module's documentation; also instances that asked for a rest (`Retry-After`).
#[derive(Debug)]
pub(crate) struct RetryBudget {
    saved: f64,
    at: Instant,
    resting: BTreeMap<SocketAddr, Instant>,
}

impl RetryBudget {
    pub(crate) fn new(now: Instant) -> Self {
        Self { saved: SAVED_MAX, at: now, resting: BTreeMap::new() }
    }

    /// Adds the share of a new request.
    pub(crate) fn deposit(&mut self) {
        self.saved = (self.saved + SHARE).min(SAVED_MAX);
    }

    /// Takes one retry; false if there is none.
    pub(crate) fn withdraw(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.saved = (self.saved + elapsed * PER_SECOND).min(SAVED_MAX);
        let may = self.saved >= 1.0;
        self.saved -= if may { 1.0 } else { 0.0 };
        may
    }

    /// Returns a counted retry that was not sent, as no instance could be reached.
    pub(crate) fn give_back(&mut self) {
        self.saved = (self.saved + 1.0).min(SAVED_MAX);
    }

    /// An instance asked not to be asked again for `rest`.
    pub(crate) fn rest(&mut self, addr: SocketAddr, rest: Duration, now: Instant) {
        self.resting.retain(|_, until| *until > now);
        self.resting.insert(addr, now + rest);
    }

    pub(crate) fn has_resting(&self, now: Instant) -> bool {
        self.resting.values().any(|until| *until > now)
    }

    pub(crate) fn is_resting(&self, addr: SocketAddr, now: Instant) -> bool {
        self.resting.get(&addr).is_some_and(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_share_of_requests_and_one_a_second() {
        let now = Instant::now();
        let mut budget = RetryBudget::new(now);
        let spent = |budget: &mut RetryBudget, now| (0..1000).filter(|_| budget.withdraw(now)).count();
        assert_eq!(spent(&mut budget, now), 10);
        (0..25).for_each(|_| budget.deposit());
        assert_eq!(spent(&mut budget, now), 5);
        budget.give_back();
        assert_eq!(spent(&mut budget, now), 1);
        assert_eq!(spent(&mut budget, now + Duration::from_millis(3500)), 3);
        (0..10_000).for_each(|_| budget.deposit());
        assert_eq!(spent(&mut budget, now + Duration::from_secs(3600)), 10);
    }

    #[test]
    fn an_instance_rests_for_the_time_of_its_retry_after() {
        let (now, addr) = (Instant::now(), SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut budget = RetryBudget::new(now);
        budget.rest(addr, Duration::from_secs(2), now);
        let at = |ms| now + Duration::from_millis(ms);
        assert!(budget.is_resting(addr, at(1999)) && !budget.is_resting(addr, at(2000)));
    }

    #[test]
    fn a_rest_is_in_seconds_or_until_a_date_and_nobody_rests_for_a_day() {
        let seconds = Duration::from_secs;
        let now = httpdate::parse_http_date("Fri, 31 Jul 2026 12:00:00 GMT").unwrap();
        for (output, rest) in [
            ("0", Some(0)),
            ("7", Some(7)),
            ("86400", Some(60)),
            ("Fri, 31 Jul 2026 12:00:09 GMT", Some(9)),
            ("Fri, 31 Jul 2026 11:00:00 GMT", Some(0)),
            ("Sat, 01 Aug 2026 12:00:00 GMT", Some(60)),
            ("-1", None),
            ("soon", None),
        ] {
            assert_eq!(retry_after(output, now), rest.map(seconds), "{output}");
        }
    }
}
