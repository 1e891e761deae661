//! Times of calls: on the device, between two events around them in its stream, as a median of rounds; and on the
//! host around the same calls, which is longer if launching takes longer than the work.

use crate::is_smoke;
use anyhow::Context as _;
use lagoon_backend::Device;
use lagoon_cuda::CudaDevice;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Rounds of calls, with their target duration and largest number of calls.
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(20);
const CALLS_MAX: usize = 200;

/// Minimum, median and maximum.
pub(crate) fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[0], values[values.len() / 2], values[values.len() - 1]]
}

/// The time of one call, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    /// Device time: minimum, median and maximum of the rounds.
    pub(crate) us: [f64; 3],
    /// Host time around a round and its wait: the median.
    pub(crate) host_us: f64,
}

impl Time {
    pub(crate) fn seconds(&self) -> f64 {
        self.us[1] / 1e6
    }

    /// The fields of a row: `us` with its spread, and `host_us`.
    pub(crate) fn fields(&self) -> Value {
        let [least, middle, most] = self.us;
        json!({ "us": middle, "us_least": least, "us_most": most, "host_us": self.host_us })
    }
}

/// Times `f(device, i)`, which queues the work of the `i`th call; calls rotate through `copies` inputs, each of which
/// is used once before the measurement.
pub(crate) fn time(
    d: &mut CudaDevice,
    copies: usize,
    mut f: impl FnMut(&mut CudaDevice, usize) -> anyhow::Result<()>,
) -> anyhow::Result<Time> {
    (0..copies).try_for_each(|i| f(d, i))?;
    d.sync()?;
    let started = Instant::now();
    f(d, 0)?;
    d.sync()?;
    let fit = ROUND.as_nanos() / started.elapsed().as_nanos().max(1);
    let (rounds, calls) = match is_smoke() {
        true => (1, 2),
        false => (ROUNDS, usize::try_from(fit).unwrap_or(CALLS_MAX).clamp(2, CALLS_MAX)),
    };
    let (mut device, mut host, mut i) = (Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        let started = Instant::now();
        let begin = d.timestamp()?;
        for _ in 0..calls {
            i += 1;
            f(d, i % copies)?;
        }
        let end = d.timestamp()?;
        d.sync()?;
        host.push(started.elapsed().as_secs_f64() * 1e6 / calls as f64);
        device.push(f64::from(end.since_ms(&begin)?) * 1e3 / calls as f64);
    }
    Ok(Time { us: spread(device), host_us: spread(host)[1] })
}

/// Seconds of one call by the host's clock, for devices without events: the median of rounds of calls and one wait.
pub(crate) fn host_seconds<D: Device>(
    d: &mut D,
    calls: usize,
    mut f: impl FnMut(&mut D) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    f(d)?;
    d.sync()?;
    let (rounds, calls) = if is_smoke() { (1, 1) } else { (5, calls) };
    let mut times = Vec::new();
    for _ in 0..rounds {
        let started = Instant::now();
        (0..calls).try_for_each(|_| f(d))?;
        d.sync()?;
        times.push(started.elapsed().as_secs_f64() / calls as f64);
    }
    Ok(spread(times)[1])
}

/// `value` with the fields of another object.
pub(crate) fn with(mut value: Value, more: Value) -> anyhow::Result<Value> {
    let fields = value.as_object_mut().context("an object")?;
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    Ok(value)
}
