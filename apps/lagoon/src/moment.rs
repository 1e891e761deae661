//! A clock that counts suspend: leases that end during suspend have ended when the machine wakes.
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

    /// Runs itself again where the clock that counts suspend is far ahead of the one that does not: a time namespace stands for a
    /// machine that slept.
    #[cfg(target_os = "linux")]
    #[test]
    fn it_counts_suspend() {
        use rustix::time::{ClockId, clock_gettime};
        use std::process::Command;
        const AHEAD_S: u64 = 100_000;
        const NAME: &str = "moment::tests::it_counts_suspend";
        if std::env::var_os("LAGOON_TEST_SLEPT").is_some() {
            let awake = Duration::from_secs(clock_gettime(ClockId::Monotonic).tv_sec.try_into().unwrap());
            assert!(Moment::now() > Moment::START + awake + Duration::from_secs(AHEAD_S - 1));
            return;
        }
        let slept = |program: &std::ffi::OsStr, more: &[&str]| {
            let mut command = Command::new("unshare");
            command.args(["--time", "--boottime", &AHEAD_S.to_string()]).arg(program).args(more);
            command.env("LAGOON_TEST_SLEPT", "1").output()
        };
        if !slept("true".as_ref(), &[]).is_ok_and(|run| run.status.success()) {
            let reason = "time namespaces need privileges";
            eprintln!("SKIPPED {NAME}: {reason}");
            let log = std::env::var_os("LAGOON_SKIP_LOG")
                .map(|path| std::fs::OpenOptions::new().append(true).create(true).open(path));
            log.into_iter().for_each(|file| {
                std::io::Write::write_all(&mut file.unwrap(), format!("{NAME}\t{reason}\n").as_bytes()).unwrap()
            });
            return;
        }
        let run = slept(std::env::current_exe().unwrap().as_os_str(), &["--exact", NAME, "--nocapture"]).unwrap();
        let reply = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && reply.contains("1 passed"), "{run:?}");
    }
}
