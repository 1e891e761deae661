//! Tuning of attention on a CUDA device: shapes of the decode kernel, and whether warpgroup kernels are used. Measured
//! before the device is opened, once for each device, driver, kernels and shape, and cached in the user's cache
//! directory.
//!
//! A child process measures ([`crate::cuda_trial`]). A failed trial is cached like a successful one and not repeated.
//! `--calibrate=off` neither measures nor reads the cache, and untuned shapes serve; `always` does not read it. Nothing
//! here fails a start: failures to measure, read or write are logged.

use crate::args::CalibrateArg;
use crate::calibration_cache::cache_home;
use crate::cuda_trial::{self, Outcome, Wanted, Warpgroups};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::kernels::tune::Tuned;
use lagoon_cuda::{CudaDevice, CudaProbe, ProbedDevice, kernels};
use lagoon_types::{AttentionGeometry, DType};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Incremented when measurements or trial conditions change.
const VERSION: u32 = 1;

/// Cached findings for one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remembered {
    /// Shapes of the decode kernel.
    pub(crate) decode: Option<Tuned>,
    /// Result of the warpgroup kernels' trial, if made.
    pub(crate) warpgroups: Option<Warpgroups>,
}

/// The cache file's content.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    key: String,
    decode: Option<String>,
    warpgroups: Option<Warpgroups>,
}

/// The machine's part of a key: device, driver and kernels.
pub(crate) fn machine(probed: &ProbedDevice, driver: u32) -> String {
    let (major, minor) = probed.compute_capability;
    let kernels = kernels::FATBIN.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| mix(sum, *byte));
    let (name, sms) = (&probed.name, probed.multiprocessors);
    format!("{VERSION} {name} {major}.{minor} {sms} driver {driver} kernels {kernels:016x}")
}

/// One step of FNV-1a.
fn mix(sum: u64, byte: u8) -> u64 {
    (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
}

fn file(dir: &Path, key: &str) -> PathBuf {
    dir.join(format!("{:016x}.json", key.bytes().fold(0xcbf2_9ce4_8422_2325, mix)))
}

/// Directory of the cache; `None` without a home.
fn dir() -> Option<PathBuf> {
    Some(cache_home()?.join("cuda-tuning"))
}

/// A cache file's content, and its key; `None` if it is damaged or of another version.
fn open(file: &Path) -> Option<(String, Remembered)> {
    let Entry { key, decode, warpgroups } = serde_json::from_str(&std::fs::read_to_string(file).ok()?).ok()?;
    let decode = decode.map(|text| text.parse()).transpose().ok()?;
    Some((key, Remembered { decode, warpgroups }))
}

/// The cached findings for `key`.
fn load(dir: &Path, key: &str) -> Option<Remembered> {
    open(&file(dir, key)).filter(|(found, _)| found == key).map(|(_, remembered)| remembered)
}

/// Writes atomically: instances of one pool start together.
fn store(dir: &Path, key: &str, remembered: &Remembered) -> anyhow::Result<()> {
    let Remembered { decode, warpgroups } = remembered.clone();
    let entry = Entry { key: key.to_owned(), decode: decode.map(|tuned| tuned.to_string()), warpgroups };
    std::fs::create_dir_all(dir)?;
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    serde_json::to_writer_pretty(&mut draft, &entry)?;
    draft.persist(file(dir, key))?;
    Ok(())
}

/// All cached findings for this machine: model shape, findings, and file.
pub(crate) fn all(machine: &str) -> Vec<(String, Remembered, PathBuf)> {
    let files = dir().and_then(|dir| std::fs::read_dir(dir).ok());
    let mut all: Vec<_> = files
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let (key, remembered) = open(&entry.path())?;
            Some((key.strip_prefix(machine)?.trim().to_owned(), remembered, entry.path()))
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Findings on attention for a device, from the cache or measured now. Called before the device is opened.
pub(crate) fn prepare(
    ordinal: u32,
    when: CalibrateArg,
    precision: Precision,
    geometry: AttentionGeometry,
    dtype: DType,
) -> Remembered {
    let CudaProbe::Present { driver_version, devices } = lagoon_cuda::probe() else { return Remembered::default() };
    let Some(probed) = devices.get(ordinal as usize).filter(|_| when != CalibrateArg::Off) else {
        return Remembered::default();
    };
    // f32 has its own kernels.
    if dtype == DType::F32 {
        return Remembered::default();
    }
    let AttentionGeometry { heads, kv_heads, head_dim, .. } = geometry;
    let key = format!("{} {heads}/{kv_heads}x{head_dim} {dtype}", machine(probed, driver_version));
    let dir = dir();
    let known = dir.as_deref().filter(|_| when == CalibrateArg::Auto).and_then(|dir| load(dir, &key));
    let mut remembered = known.unwrap_or_default();
    let takes_warpgroups =
        probed.compute_capability.0 == 9 && [64, 128].contains(&head_dim) && precision == Precision::Fast;
    let wanted = Wanted {
        ordinal,
        geometry,
        dtype,
        decode: remembered.decode.is_none() && [64, 96, 128, 256].contains(&head_dim),
        warpgroups: remembered.warpgroups.is_none() && takes_warpgroups,
    };
    if wanted.decode || wanted.warpgroups {
        measure(wanted, &mut remembered, dir.as_deref(), &key);
    }
    remembered
}

/// Measures and caches the findings.
fn measure(wanted: Wanted, remembered: &mut Remembered, dir: Option<&Path>, key: &str) {
    let started = Instant::now();
    let found = match cuda_trial::ask(wanted) {
        Ok(found) => found,
        Err(error) => return tracing::warn!("attention is not tuned: {error:#}"),
    };
    tracing::info!(took = ?started.elapsed(), ?found, "tuned attention");
    if let Some(reason) = &found.missing {
        tracing::warn!(reason, "attention is not tuned (--calibrate=off does not try)");
    }
    let failed = found.warpgroups.as_ref().filter(|tried| tried.outcome == Outcome::Failed).cloned();
    remembered.decode = found.decode.or(remembered.decode);
    remembered.warpgroups = found.warpgroups.or(remembered.warpgroups.take());
    let kept = match dir {
        Some(dir) => store(dir, key, remembered).map(|()| file(dir, key)),
        None => Err(anyhow::anyhow!("no cache directory (XDG_CACHE_HOME or HOME)")),
    };
    match (failed, kept) {
        (Some(tried), Ok(file)) => tracing::warn!(
            file = %file.display(),
            "warpgroup attention failed its trial and is not tried again (--calibrate=always does): {}",
            tried.finding
        ),
        (Some(tried), Err(error)) => {
            tracing::warn!("warpgroup attention failed its trial: {}; this is not kept: {error:#}", tried.finding);
        }
        (None, Err(error)) => tracing::warn!("how attention was tuned is not kept: {error:#}"),
        (None, Ok(_)) => {}
    }
}

impl Remembered {
    /// Sets the device's tuning to the findings.
    pub(crate) fn apply(&self, device: &mut CudaDevice, geometry: AttentionGeometry, dtype: DType) {
        let base = *device.tuning();
        let used = self.warpgroups.as_ref().is_some_and(|tried| tried.outcome == Outcome::Used);
        let wgmma = used && device.takes_warpgroups(geometry, dtype);
        device.set_tuning(Tuning { wgmma, ..self.decode.map_or(base, |tuned| tuned.apply(base)) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_cuda::kernels::tune::{CONTEXTS, tune};

    #[test]
    fn a_tuning_is_kept_for_its_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let tuned = tune(128, &Tuning::untuned(132), CONTEXTS, |class, _| Ok::<_, ()>(f64::from(class.warps))).unwrap();
        let failed = Warpgroups { outcome: Outcome::Failed, finding: "a trap".to_owned() };
        let kept = Remembered { decode: Some(tuned), warpgroups: Some(failed) };
        assert_eq!(load(dir.path(), "a"), None);
        store(dir.path(), "a", &kept).unwrap();
        assert_eq!((load(dir.path(), "a"), load(dir.path(), "b")), (Some(kept.clone()), None));
        // Another key's file in its place.
        std::fs::copy(file(dir.path(), "a"), file(dir.path(), "b")).unwrap();
        assert_eq!((load(dir.path(), "a"), load(dir.path(), "b")), (Some(kept), None));
        // Damaged as JSON, as a shape, and as an outcome.
        let text = std::fs::read_to_string(file(dir.path(), "a")).unwrap();
        for (from, to) in [("}", ""), ("tuning-3 128", "tuning-3 129"), ("failed", "perfect")] {
            assert!(text.contains(from), "{text}");
            std::fs::write(file(dir.path(), "a"), text.replace(from, to)).unwrap();
            assert_eq!(load(dir.path(), "a"), None, "{from} is {to}");
        }
    }
}
