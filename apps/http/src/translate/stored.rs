//! Responses that later requests refer to, in bounded memory.
//!
//! Each has its JSON and the messages of its conversation, turn by turn; responses of one conversation share their turns.
//! Bounds: bytes, number, age; the oldest responses go first. An owner (an API key's name) sees its own responses only.
//! Responses are stored where requests arrive: at the gateway, not at instances.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Maximum bytes of stored responses.
const BYTES_MAX: usize = 64 << 20;
/// Maximum of stored responses.
const COUNT_MAX: usize = 16 << 10;
/// After this time a response is dropped.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Bytes that a response takes beside its texts.
const ENTRY_BYTES: usize = 512;

/// The messages that one turn added to a conversation, in JSON with commas between them.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) messages: Arc<str>,
    /// Bytes of all turns that are held.
    held: Arc<AtomicUsize>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.held.fetch_sub(self.messages.len(), Ordering::Relaxed);
    }
}

/// A stored response.
#[derive(Clone, Debug)]
pub(super) struct Response {
    pub(super) owner: Arc<str>,
    pub(super) turns: Vec<Arc<Turn>>,
    pub(super) json: Arc<str>,
}

impl Response {
    /// Bytes beside those of its turns.
    fn bytes(&self) -> usize {
        self.json.len() + size_of_val(self.turns.as_slice()) + ENTRY_BYTES
    }
}

/// The bounds of a store.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    bytes_max: usize,
    count_max: usize,
    age_max: Duration,
}

/// The stored responses of a process.
#[derive(Debug)]
pub(super) struct Stored {
    bounds: Bounds,
    turn_bytes: Arc<AtomicUsize>,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// In the order in which they were stored.
    by_age: BTreeMap<u64, (String, Instant, Response)>,
    by_id: HashMap<String, u64>,
    next: u64,
    bytes: usize,
}

impl Entries {
    fn remove(&mut self, number: u64) {
        if let Some((id, _, response)) = self.by_age.remove(&number) {
            self.by_id.remove(&id);
            self.bytes -= response.bytes();
        }
    }

    /// Drops the oldest responses while there are too many or too old ones.
    fn trim(&mut self, bounds: Bounds, turn_bytes: &AtomicUsize, now: Instant) {
        while let Some((number, (_, at, _))) = self.by_age.first_key_value() {
            let bytes = self.bytes + turn_bytes.load(Ordering::Relaxed);
            let old = now.saturating_duration_since(*at) >= bounds.age_max;
            if !old && bytes <= bounds.bytes_max && self.by_age.len() <= bounds.count_max {
                return;
            }
            let number = *number;
            self.remove(number);
        }
    }
}

impl Default for Stored {
    fn default() -> Self {
        Self::with(Bounds { bytes_max: BYTES_MAX, count_max: COUNT_MAX, age_max: AGE_MAX })
    }
}

impl Stored {
    fn with(bounds: Bounds) -> Self {
        Self { bounds, turn_bytes: Arc::default(), entries: Mutex::default() }
    }

    /// A turn, whose bytes count as long as a response has it.
    pub(super) fn turn(&self, messages: String) -> Arc<Turn> {
        self.turn_bytes.fetch_add(messages.len(), Ordering::Relaxed);
        Arc::new(Turn { messages: messages.into(), held: Arc::clone(&self.turn_bytes) })
    }

    pub(super) fn insert(&self, id: &str, response: Response, now: Instant) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let number = entries.next;
        entries.next += 1;
        entries.bytes += response.bytes();
        entries.by_id.insert(id.to_owned(), number);
        entries.by_age.insert(number, (id.to_owned(), now, response));
        entries.trim(self.bounds, &self.turn_bytes, now);
    }

    /// The owner's response of this id.
    pub(super) fn get(&self, id: &str, owner: &str, now: Instant) -> Option<Response> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.trim(self.bounds, &self.turn_bytes, now);
        let (_, _, response) = entries.by_age.get(entries.by_id.get(id)?)?;
        (*response.owner == *owner).then(|| response.clone())
    }

    /// Drops the owner's response of this id; `None` if there is none.
    pub(super) fn remove(&self, id: &str, owner: &str, now: Instant) -> Option<()> {
        self.get(id, owner, now)?;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *entries.by_id.get(id)?;
        entries.remove(number);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { bytes_max: 8 * ENTRY_BYTES, count_max: 4, age_max: Duration::from_secs(60) };

    fn add(stored: &Stored, id: &str, owner: &str, before: &[Arc<Turn>], text: usize, now: Instant) {
        let turns = before.iter().cloned().chain([stored.turn("m".repeat(text))]).collect();
        stored.insert(id, Response { owner: owner.into(), turns, json: "{}".into() }, now);
    }

    fn present(stored: &Stored, ids: &[&str], now: Instant) -> Vec<bool> {
        ids.iter().map(|id| stored.get(id, "a", now).is_some()).collect()
    }

    #[test]
    fn the_oldest_responses_go_first_by_number_bytes_and_age() {
        let now = Instant::now();
        let stored = Stored::with(BOUNDS);
        for id in ["1", "2", "3", "4", "5"] {
            add(&stored, id, "a", &[], 8, now);
        }
        assert_eq!(present(&stored, &["1", "2", "5"], now), [false, true, true]);
        add(&stored, "6", "a", &[], 5 * ENTRY_BYTES, now);
        assert_eq!(present(&stored, &["3", "4", "5", "6"], now), [false, false, true, true]);
        add(&stored, "7", "a", &[], 8 * ENTRY_BYTES, now);
        assert_eq!(
            present(&stored, &["5", "6", "7"], now),
            [false; 3],
            "one that is larger than the store is not kept"
        );
        let later = now + BOUNDS.age_max;
        add(&stored, "8", "a", &[], 8, now);
        add(&stored, "9", "a", &[], 8, later);
        assert_eq!(present(&stored, &["8", "9"], later), [false, true]);
        assert_eq!(stored.turn_bytes.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn turns_are_shared_and_counted_until_the_last_response_has_gone() {
        let now = Instant::now();
        let stored = Stored::with(BOUNDS);
        add(&stored, "1", "a", &[], 8, now);
        let turns = stored.get("1", "a", now).unwrap().turns;
        add(&stored, "2", "a", &turns, 16, now);
        drop(turns);
        assert_eq!(stored.turn_bytes.load(Ordering::Relaxed), 24);
        assert_eq!(stored.remove("1", "a", now), Some(()));
        assert_eq!(stored.get("2", "a", now).unwrap().turns.len(), 2);
        assert_eq!(stored.turn_bytes.load(Ordering::Relaxed), 24);
        assert_eq!(stored.remove("2", "a", now), Some(()));
        assert_eq!(stored.turn_bytes.load(Ordering::Relaxed), 0);
        assert_eq!(stored.entries.lock().unwrap().bytes, 0);
    }

    #[test]
    fn an_owner_has_its_own_responses_only() {
        let now = Instant::now();
        let stored = Stored::with(BOUNDS);
        add(&stored, "1", "a", &[], 8, now);
        assert!(stored.get("1", "b", now).is_none() && stored.get("2", "a", now).is_none());
        assert_eq!(stored.remove("1", "b", now), None);
        assert!(stored.get("1", "a", now).is_some());
    }
}
