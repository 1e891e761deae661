//! Cache of calibrations in the user's cache directory: one small JSON file for each model, backend, device, element
//! type and number of threads.
//!
//! An unreadable file, or one with another key, counts as absent; if writing fails, the next start measures again.

use crate::pool_client::CalibrationRow;
use lagoon_protocol::Calibration;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Raised when something is measured in another way within a version of this program.
pub(crate) const MEASUREMENTS: u32 = 2;

/// Everything that a measurement depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// Version of this program, and [`MEASUREMENTS`].
    pub(crate) version: String,
    /// Hash of the model, which covers the weights' element type.
    pub(crate) model: String,
    pub(crate) backend: String,
    pub(crate) device: String,
    pub(crate) kv_dtype: String,
    pub(crate) kv_layers: u32,
    /// Threads as requested.
    pub(crate) threads: Option<usize>,
    pub(crate) runs_requests: bool,
    /// Most rows and sequences of a step.
    pub(crate) step: (u32, u32),
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    key: Key,
    calibration: CalibrationRow,
}

/// Directory of the cache: `$XDG_CACHE_HOME/lagoon/calibration`, or under `~/.cache`. `None` without a home.
pub(crate) fn dir() -> Option<PathBuf> {
    Some(cache_home()?.join("calibration"))
}

/// This program's directory in the user's cache.
pub(crate) fn cache_home() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("lagoon"))
}

/// Number of cached files.
pub(crate) fn entries() -> usize {
    dir().and_then(|dir| std::fs::read_dir(dir).ok()).map_or(0, |files| files.flatten().count())
}

impl Key {
    /// File name: readable parts of the key, and a checksum of all of it.
    fn file(&self) -> String {
        let text = format!("{self:?}");
        // FNV-1a: stable over builds, and the whole key is compared on reading anyway.
        let sum = text
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        format!("{}-{}-{}-{sum:016x}.json", self.model.get(..16).unwrap_or("model"), self.backend, self.kv_dtype)
    }
}

/// The cached calibration for `key`.
pub(crate) fn load(key: &Key) -> Option<Calibration> {
    load_from(&dir()?, key)
}

fn load_from(dir: &Path, key: &Key) -> Option<Calibration> {
    let text = std::fs::read_to_string(dir.join(key.file())).ok()?;
    let entry: Entry = serde_json::from_str(&text).ok()?;
    (entry.key == *key).then(|| Calibration::from(&entry.calibration))
}

/// Writes a calibration to the cache; a failure is only logged.
pub(crate) fn store(key: &Key, calibration: &Calibration) {
    let Some(dir) = dir() else { return };
    if let Err(error) = store_in(&dir, key, calibration) {
        tracing::warn!(dir = %dir.display(), %error, "the calibration could not be cached");
    }
}

/// Writes atomically: instances of one pool start together.
fn store_in(dir: &Path, key: &Key, calibration: &Calibration) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    let mut draft = tempfile::NamedTempFile::new_in(dir)?;
    serde_json::to_writer_pretty(&mut draft, &Entry { key: key.clone(), calibration: calibration.into() })?;
    draft.persist(dir.join(key.file()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::BatchPoint;

    #[test]
    fn a_measurement_is_found_for_its_own_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("new");
        let key = Key {
            version: "1".to_owned(),
            model: "ab".repeat(32),
            backend: "cpu".to_owned(),
            device: "a / b".to_owned(),
            kv_dtype: "f16".to_owned(),
            kv_layers: 2,
            threads: None,
            runs_requests: true,
            step: (512, 64),
        };
        assert_eq!(load_from(&dir, &key), None);
        let calibration = Calibration {
            batches: vec![BatchPoint { batch: 1, step_us: 10.5 }, BatchPoint { batch: 64, step_us: 99.0 }],
            attention_us_per_ktoken: 3.25,
            prefill_us_per_token: 1.5,
            copy_bytes_per_s: 1e9,
            prompt_attention_us_per_ktoken: 0.5,
        };
        store_in(&dir, &key, &calibration).unwrap();
        assert_eq!(load_from(&dir, &key), Some(calibration.clone()));
        let other = Key { threads: Some(1), ..key.clone() };
        assert_eq!(load_from(&dir, &other), None);
        // Another key's file under this name, and half a file.
        std::fs::copy(dir.join(key.file()), dir.join(other.file())).unwrap();
        assert_eq!(load_from(&dir, &other), None);
        std::fs::write(dir.join(key.file()), "{").unwrap();
        assert_eq!(load_from(&dir, &key), None);
        store_in(&dir, &key, &calibration).unwrap();
        assert_eq!(load_from(&dir, &key), Some(calibration));
    }
}
