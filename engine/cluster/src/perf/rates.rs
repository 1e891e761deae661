//! Rates of an instance: its [`Calibration`], checked once.

use lagoon_protocol::Calibration;
use lagoon_types::limits::CALIBRATION_POINTS_MAX;

/// Rates f and g of Eq. 5, as times, from a valid [`Calibration`].
#[derive(Clone, Copy, Debug)]
pub struct Rates<'a> {
    calibration: &'a Calibration,
    /// Time of decode attention per token, all layers.
    pub attention_us: f64,
}

impl<'a> Rates<'a> {
    /// The rates of a peer's calibration; `None` if a figure is not finite or not positive, or batches do not ascend. A node
    /// that runs no requests (`runs` is false) needs no batches.
    #[must_use]
    pub fn new(calibration: &'a Calibration, runs: bool) -> Option<Self> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let points = &calibration.batches;
        let few = points.len() <= CALIBRATION_POINTS_MAX;
        let ascending = points.windows(2).all(|p| p[0].batch < p[1].batch);
        let sound = few && ascending && points.iter().all(|p| p.batch > 0 && positive(p.step_us));
        let enough = !runs || !points.is_empty();
        let attention = positive(calibration.attention_us_per_ktoken);
        (sound && enough && attention)
            .then(|| Self { calibration, attention_us: calibration.attention_us_per_ktoken / 1_024.0 })
    }

    /// Time of a step of `batch` sequences without attention, all layers: W(β)/f(β). Linear between measured batches. Below
    /// the first batch it is the first's (bound by reading the weights); above the last it grows as between the last two, or
    /// in proportion if there is only one. 0 for an empty batch.
    #[must_use]
    pub fn other_us(&self, batch: u32) -> f64 {
        let points = &self.calibration.batches;
        let (Some(first), Some(last)) = (points.first(), points.last()) else { return 0.0 };
        if batch == 0 {
            return 0.0;
        }
        if batch <= first.batch {
            return first.step_us;
        }
        let at = points.iter().position(|p| p.batch >= batch).unwrap_or(points.len() - 1);
        if at == 0 {
            return last.step_us * f64::from(batch) / f64::from(last.batch);
        }
        let (a, b) = (points[at - 1], points[at]);
        let share = f64::from(batch - a.batch) / f64::from(b.batch - a.batch);
        // Noise may make the last two descend; larger batches must not become free.
        let inside = batch <= b.batch;
        let rise = if inside { b.step_us - a.step_us } else { (b.step_us - a.step_us).max(0.0) };
        (a.step_us + share * rise).max(0.0)
    }

    /// Rate of KV copies out of and into the store, in bytes per second; infinite if unmeasured.
    #[must_use]
    pub fn copy_bytes_per_s(&self) -> f64 {
        let rate = self.calibration.copy_bytes_per_s;
        if rate.is_finite() && rate > 0.0 { rate } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::BatchPoint;

    fn calibration(points: &[(u32, f64)]) -> Calibration {
        Calibration {
            batches: points.iter().map(|(batch, step_us)| BatchPoint { batch: *batch, step_us: *step_us }).collect(),
            attention_us_per_ktoken: 1_024.0,
            prefill_us_per_token: 1.0,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: 0.0,
        }
    }

    #[test]
    fn between_points_it_is_linear_and_beyond_them_it_goes_on() {
        let c = calibration(&[(2, 100.0), (4, 120.0), (8, 200.0)]);
        let r = Rates::new(&c, true).unwrap();
        let expected = [(0, 0.0), (1, 100.0), (2, 100.0), (3, 110.0), (4, 120.0), (6, 160.0), (8, 200.0), (16, 360.0)];
        for (batch, us) in expected {
            assert_eq!(r.other_us(batch), us, "batch {batch}");
        }
        assert_eq!((r.attention_us, r.copy_bytes_per_s()), (1.0, f64::INFINITY));
        let one = calibration(&[(4, 100.0)]);
        let r = Rates::new(&one, true).unwrap();
        assert_eq!((r.other_us(1), r.other_us(4), r.other_us(8)), (100.0, 100.0, 200.0));
        let descending = calibration(&[(1, 100.0), (2, 90.0)]);
        assert_eq!(Rates::new(&descending, true).unwrap().other_us(50), 100.0);
    }

    #[test]
    fn figures_that_cannot_be_are_refused() {
        let bad = [vec![(2, 1.0), (2, 2.0)], vec![(0, 1.0)], vec![(1, f64::NAN)], vec![(1, -1.0)], vec![]];
        for points in bad {
            assert!(Rates::new(&calibration(&points), true).is_none(), "{points:?}");
        }
        assert!(Rates::new(&calibration(&[]), false).is_some(), "a kv node runs nothing");
        let no_attention = Calibration { attention_us_per_ktoken: 0.0, ..calibration(&[(1, 1.0)]) };
        assert!(Rates::new(&no_attention, true).is_none());
    }
}
