//! Metadata of every measurement: the median of its runs, the machine and the commit.

/// Arithmetic mean; NaN without values.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The median; NaN without values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The processor's name, from /proc/cpuinfo.
#[must_use]
pub fn device() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

/// Hardware threads of this machine.
#[must_use]
pub fn hardware_threads() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

/// The commit under measurement, from git.
#[must_use]
pub fn commit() -> Option<String> {
    let output = std::process::Command::new("git").args(["describe", "--always", "--dirty"]).output().ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
