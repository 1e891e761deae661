//! A key's rate limits: requests and tokens per minute, as token buckets that hold one minute's worth.
//!
//! Tokens are charged when they are known, a prompt's once it is accepted (at a gateway an estimate before) and an answer's as they
//! come, so that the balance may fall below zero: then requests wait until it is above zero again.

use crate::error::{ApiError, RATE_LIMIT_EXCEEDED};
use axum::http::StatusCode;
use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

const MINUTE: Duration = Duration::from_secs(60);

/// Rate limits of one key. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// An exhausted limit, and how long it stays so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    what: &'static str,
    per_minute: u32,
    wait: Duration,
}

impl Over {
    /// The 429, with the seconds after which a request is admitted.
    pub(crate) fn error(self, key: &str) -> ApiError {
        let message = format!("the key `{key}` has used its {} {} a minute", self.per_minute, self.what);
        let seconds = u32::try_from(self.wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        ApiError {
            retry_after_s: Some(seconds),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some(RATE_LIMIT_EXCEEDED), message)
        }
    }
}

impl RateLimit {
    /// Limits per minute; `None` is unlimited.
    pub(crate) fn new(requests_per_minute: Option<u32>, tokens_per_minute: Option<u32>, now: Instant) -> Self {
        let bucket = |per_minute| Bucket::new(per_minute, now);
        Self { requests: requests_per_minute.map(bucket), tokens: tokens_per_minute.map(bucket) }
    }

    pub(crate) fn same_limits(&self, other: &Self) -> bool {
        let limits = |of: &Self| [&of.requests, &of.tokens].map(|bucket| bucket.as_ref().map(|b| b.per_minute));
        limits(self) == limits(other)
    }

    /// Charges one request.
    pub(crate) fn request(&self, now: Instant) -> Result<(), Over> {
        let over = |what, bucket: &Bucket, wait| Over { what, per_minute: bucket.per_minute, wait };
        if let Some(tokens) = &self.tokens {
            tokens.take(0.0, now).map_err(|wait| over("tokens", tokens, wait))?;
        }
        if let Some(requests) = &self.requests {
            requests.take(1.0, now).map_err(|wait| over("requests", requests, wait))?;
        }
        Ok(())
    }

    pub(crate) fn tokens(&self, tokens: u64, now: Instant) {
        if let Some(bucket) = &self.tokens {
            bucket.charge(as_f64(tokens), now);
        }
    }

    /// Tokens that were charged and not used.
    pub(crate) fn give_back(&self, tokens: u64, now: Instant) {
        if let Some(bucket) = &self.tokens {
            bucket.charge(-as_f64(tokens), now);
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "tokens of one answer are few")]
fn as_f64(tokens: u64) -> f64 {
    tokens as f64
}

#[derive(Debug)]
struct Bucket {
    per_minute: u32,
    /// The balance, and its time.
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn new(per_minute: u32, now: Instant) -> Self {
        Self { per_minute, level: Mutex::new((f64::from(per_minute), now)) }
    }

    fn change<T>(&self, now: Instant, change: impl FnOnce(&mut f64) -> T) -> T {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let whole = f64::from(self.per_minute);
        let gained = now.saturating_duration_since(level.1).as_secs_f64() / MINUTE.as_secs_f64() * whole;
        *level = ((level.0 + gained).min(whole), now.max(level.1));
        change(&mut level.0)
    }

    /// Takes `amount` if the balance is positive and covers it; else returns the time until it would.
    fn take(&self, amount: f64, now: Instant) -> Result<(), Duration> {
        self.change(now, |level| {
            // For an amount of zero, the balance must be above zero.
            let missing = if amount > 0.0 { amount - *level } else { f64::MIN_POSITIVE - *level };
            if missing > 0.0 {
                return Err(MINUTE.mul_f64(missing / f64::from(self.per_minute)));
            }
            *level -= amount;
            Ok(())
        })
    }

    fn charge(&self, amount: f64, now: Instant) {
        self.change(now, |level| *level -= amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_refused_until_one_is_earned() {
        let now = Instant::now();
        let rate = RateLimit::new(Some(2), None, now);
        assert_eq!([rate.request(now), rate.request(now)], [Ok(()), Ok(())]);
        let over = rate.request(now).unwrap_err();
        assert_eq!((over.what, over.wait), ("requests", MINUTE / 2));
        let error = over.error("team");
        assert_eq!(
            (error.status.as_u16(), error.retry_after_s, error.code),
            (429, Some(31), Some("rate_limit_exceeded"))
        );
        assert!(error.message.contains("team") && error.kind == "rate_limit_error", "{error:?}");
        assert_eq!(rate.request(now + MINUTE / 2), Ok(()));
        assert!(rate.request(now + MINUTE / 2).is_err());
        // A pause earns one minute's worth and no more.
        let late = now + 10 * MINUTE;
        assert_eq!([rate.request(late), rate.request(late)], [Ok(()), Ok(())]);
        assert!(rate.request(late).is_err());
    }

    #[test]
    fn tokens_are_charged_afterwards_and_a_debt_is_waited_for() {
        let now = Instant::now();
        let rate = RateLimit::new(None, Some(60), now);
        assert_eq!(rate.request(now), Ok(()));
        rate.tokens(90, now);
        let over = rate.request(now).unwrap_err();
        assert_eq!((over.what, over.wait.as_secs()), ("tokens", 30));
        assert!(rate.request(now + MINUTE / 2 + Duration::from_millis(1)).is_ok());
        // What is given back is no more than a minute's worth afterwards.
        rate.give_back(600, now + MINUTE);
        rate.tokens(60, now + MINUTE);
        assert!(rate.request(now + MINUTE).is_err());
    }

    #[test]
    fn no_limit_is_none() {
        let rate = RateLimit::default();
        rate.tokens(u64::MAX, Instant::now());
        assert_eq!(rate.request(Instant::now()), Ok(()));
        assert!(rate.same_limits(&RateLimit::new(None, None, Instant::now())));
    }
}
