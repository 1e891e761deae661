//! A clock that counts suspend: what expires has expired when the machine wakes.
//!
//! `std::time::Instant` does not (`CLOCK_MONOTONIC` on Linux): a leader suspended with the machine would take an
//! expired lease for a valid one.

use std::time::Duration;

/// A time of this clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    /// The clock's origin.
    pub(crate) const START: Self = Self(Duration::ZERO);

    #[cfg(unix)]
    pub(crate) fn now() -> Self {
        use rustix::time::{ClockId, clock_gettime};
        #[cfg(target_os = "linux")]
        let clock = ClockId::Boottime;
        // On this system CLOCK_MONOTONIC counts suspend.
        #[cfg(not(target_os = "linux"))]
        let clock = ClockId::Monotonic;
        let now = clock_gettime(clock);
        let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
        Self(Duration::new(seconds, nanos))
    }

    #[cfg(not(unix))]
    pub(crate) fn now() -> Self {
        static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
        Self(START.elapsed())
    }

    /// Time since an earlier moment; none if it is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time from this moment to now.
    pub(crate) fn elapsed(self) -> Duration {
        Self::now().since(self)
    }
}

impl std::ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }
}

impl std::ops::Sub<Duration> for Moment {
    type Output = Self;

    fn sub(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_forward() {
        let (first, second) = (Moment::now(), Moment::now());
        assert!(first > Moment::START && first <= second);
        assert_eq!((first + Duration::from_secs(5)).since(first), Duration::from_secs(5));
        assert_eq!(first.since(first + Duration::from_secs(5)), Duration::ZERO);
        assert_eq!(first + Duration::from_secs(3) - Duration::from_secs(3), first);
    }
}
