//! A process's own clock, with an offset and a rate that differ from true time.

/// A clock that gives milliseconds, as the shells' clocks, for true microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// True time of its start.
    pub born_us: u64,
    /// Its reading at the start.
    pub offset_ms: u64,
    /// Rate error in parts per million (negative: slow); within ±500,000.
    pub skew_ppm: i32,
}

impl Clock {
    /// A clock that shows simulated time.
    #[must_use]
    pub const fn exact() -> Self {
        Self { born_us: 0, offset_ms: 0, skew_ppm: 0 }
    }

    /// Own microseconds since the start.
    #[must_use]
    pub fn elapsed_us(&self, now_us: u64) -> u64 {
        let true_us = now_us.saturating_sub(self.born_us);
        let skew = i128::from(true_us) * i128::from(self.skew_ppm) / 1_000_000;
        u64::try_from(i128::from(true_us) + skew).unwrap_or(0)
    }

    /// The clock's reading in milliseconds.
    #[must_use]
    pub fn now_ms(&self, now_us: u64) -> u64 {
        self.offset_ms + self.elapsed_us(now_us) / 1000
    }

    /// True microseconds in which `own_us` pass on this clock, rounded up.
    #[must_use]
    pub fn true_us(&self, own_us: u64) -> u64 {
        let rate = u64::try_from(1_000_000 + i64::from(self.skew_ppm)).unwrap_or(1).max(1);
        (own_us * 1_000_000).div_ceil(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skewed_clock_runs_fast_or_slow() {
        let fast = Clock { born_us: 1_000_000, offset_ms: 7, skew_ppm: 10_000 };
        assert_eq!(fast.now_ms(1_000_000), 7);
        assert_eq!(fast.now_ms(101_000_000), 7 + 101_000);
        assert_eq!(fast.true_us(101_000), 100_000);
        let slow = Clock { skew_ppm: -500_000, ..fast };
        assert_eq!(slow.now_ms(3_000_000), 7 + 1_000);
        assert_eq!(slow.true_us(20_000), 40_000);
        assert_eq!(Clock::exact().now_ms(5_999), 5);
    }
}
