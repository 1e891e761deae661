//! Hashes of the effects of a run's instances: two builds with equal hashes on many seeds have the same behaviour.
//!
//! Each run has a thread to itself, and the recorder is thread-local: [`record`] wraps a run, and both worlds call
//! [`note`] for every event that an instance handles. Without a recorder a note costs one check.

use lagoon_instance::Effect;
use lagoon_types::SeqId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// FNV-1a over formatted text: equal on every machine.
#[derive(Clone, Copy, Debug)]
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl std::fmt::Write for Fnv {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}

/// Recorder of a run's effects.
#[derive(Clone, Debug, Default)]
struct Recorder {
    events: u64,
    all: Fnv,
    /// Hashes by instance and sequence, independent of the order among sequences.
    emitted: BTreeMap<(usize, SeqId), Fnv>,
}

/// Hashes of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashes {
    /// Events that instances handled.
    pub events: u64,
    /// Hash of every effect, in order, with its instance and event number.
    pub effects: u64,
    /// Hash of the clients' events, request by request.
    pub requests: u64,
}

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Runs `run` and records the effects of its instances.
pub fn record<T>(run: impl FnOnce() -> T) -> (T, Hashes) {
    RECORDER.set(Some(Recorder::default()));
    let result = run();
    let Recorder { events, all, emitted } = RECORDER.take().unwrap_or_default();
    let mut requests = Fnv::default();
    for ((place, seq), hash) in emitted {
        let _ = write!(requests, "{place} {seq} {:x};", hash.0);
    }
    (result, Hashes { events, effects: all.0, requests: requests.0 })
}

/// Records the effects of an event that an instance has handled.
pub(crate) fn note(place: usize, effects: &[Effect]) {
    RECORDER.with_borrow_mut(|recorder| {
        let Some(recorder) = recorder else { return };
        recorder.events += 1;
        for effect in effects {
            // Formatting into a hash cannot fail.
            let _ = write!(recorder.all, "{place} {} {effect:?};", recorder.events);
            if let Effect::Emit { seq, event } = effect {
                let _ = write!(recorder.emitted.entry((place, *seq)).or_default(), "{event:?};");
            }
        }
    });
}
