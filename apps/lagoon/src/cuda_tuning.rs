//! How attention is cut on a CUDA device: measured at start, once for each device, driver, kernels and shape, and kept in the
//! user's cache directory as a few lines of text beside what it holds for.
//!
//! It follows `--calibrate`: `off` neither measures nor reads, and the untuned shapes serve. Nothing here fails a start: what
//! cannot be measured, read or written is said in the log.

use crate::args::CalibrateArg;
use crate::calibration_cache::cache_home;
use lagoon_cuda::kernels::tune::Tuned;
use lagoon_cuda::{CudaDevice, TuneFor, kernels};
use lagoon_types::{AttentionGeometry, DType};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What measuring may take of a start.
const TIME_MAX: Duration = Duration::from_secs(3);
/// Bytes of the device that it may take, before weights and KV are there.
const BYTES_MAX: u64 = 1 << 30;

/// What a tuning holds for, in one line.
fn key(device: &CudaDevice, geometry: AttentionGeometry, dtype: DType) -> String {
    let a = device.attributes();
    let (major, minor) = a.compute_capability;
    let kernels = kernels::FATBIN.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| mix(sum, *byte));
    let AttentionGeometry { heads, kv_heads, head_dim } = geometry;
    let (name, driver, sms) = (&a.name, a.driver_version, a.multiprocessors);
    format!("{name} {major}.{minor} {sms} driver {driver} kernels {kernels:016x} {heads}/{kv_heads}x{head_dim} {dtype}")
}

/// FNV-1a.
fn mix(sum: u64, byte: u8) -> u64 {
    (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
}

fn file(dir: &Path, key: &str) -> PathBuf {
    dir.join(format!("{:016x}.txt", key.bytes().fold(0xcbf2_9ce4_8422_2325, mix)))
}

/// What is kept for this key; a file of another key or form counts as absent.
fn load(dir: &Path, key: &str) -> Option<Tuned> {
    let text = std::fs::read_to_string(file(dir, key)).ok()?;
    let (first, rest) = text.split_once('\n')?;
    (first == key).then(|| rest.parse().ok())?
}

/// A whole file or none: instances of one pool start together.
fn store(dir: &Path, key: &str, tuned: &Tuned) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    std::io::Write::write_all(&mut draft, format!("{key}\n{tuned}").as_bytes())?;
    draft.persist(file(dir, key))?;
    Ok(())
}

/// Cuts attention as was found best, now or earlier.
pub(crate) fn tune(device: &mut CudaDevice, when: CalibrateArg, geometry: AttentionGeometry, dtype: DType) {
    if when == CalibrateArg::Off {
        return;
    }
    let key = key(device, geometry, dtype);
    let dir = cache_home().map(|home| home.join("cuda-tuning"));
    let known = dir.as_ref().filter(|_| when == CalibrateArg::Auto).and_then(|dir| load(dir, &key));
    let tuned = known.or_else(|| {
        let tuned = measure(device, geometry, dtype)?;
        if let Some(dir) = &dir
            && let Err(error) = store(dir, &key, &tuned)
        {
            tracing::warn!(dir = %dir.display(), %error, "how attention was tuned is not kept");
        }
        Some(tuned)
    });
    if let Some(mut tuned) = tuned {
        // A file may have been written on another device of the same name.
        tuned.wgmma &= device.attributes().compute_capability.0 == 9;
        device.set_tuning(tuned.apply(*device.tuning()));
    }
}

fn measure(device: &mut CudaDevice, geometry: AttentionGeometry, dtype: DType) -> Option<Tuned> {
    let started = Instant::now();
    let what = TuneFor { geometry, dtype, contexts: None, time_max: TIME_MAX, bytes_max: BYTES_MAX };
    match device.tune(&what) {
        Ok(found) => {
            tracing::info!(took = ?started.elapsed(), ?found, "tuned attention");
            found.map(|(tuned, _)| tuned)
        }
        Err(error) => {
            tracing::warn!(%error, "attention is not tuned (--calibrate=off does not try)");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{file, load, store};
    use lagoon_cuda::kernels::attention::Tuning;
    use lagoon_cuda::kernels::tune::{CONTEXTS, tune};

    #[test]
    fn a_tuning_is_kept_for_its_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let tuned = tune(128, &Tuning::untuned(132), CONTEXTS, |class, _| Ok::<_, ()>(f64::from(class.warps))).unwrap();
        assert_eq!(load(dir.path(), "a"), None);
        store(dir.path(), "a", &tuned).unwrap();
        assert_eq!((load(dir.path(), "a"), load(dir.path(), "b")), (Some(tuned), None));
        // Another key's file in its place, and one that is damaged.
        std::fs::copy(file(dir.path(), "a"), file(dir.path(), "b")).unwrap();
        std::fs::write(file(dir.path(), "a"), "a\nlagoon").unwrap();
        assert_eq!((load(dir.path(), "a"), load(dir.path(), "b")), (None, None));
    }
}
