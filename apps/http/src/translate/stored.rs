//! Responses that later requests refer to, in bounded memory.
//!
//! Each has its JSON and the messages of its conversation, turn by turn; responses of one conversation share their turns.
//! Bounds: bytes, number, age. When the store is full, an owner (an API key's name) with more than its share loses its own oldest
//! responses first, then the oldest of all go. An owner sees its own responses only.
//! Responses are stored where requests arrive: at the gateway, not at instances.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Maximum bytes of stored responses.
const STORED_BYTES_MAX: usize = 64 << 20;
/// Maximum of stored responses.
const STORED_COUNT_MAX: usize = 16 << 10;
/// After this time a response is dropped.
const STORED_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// The share of an owner in a full store is this part of its bytes and number.
const OWNER_PART: usize = 4;
/// Bytes that a response takes beside its texts.
const ENTRY_BYTES: usize = 512;

/// The messages that one turn added to a conversation, in JSON with commas between them.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) messages: Arc<str>,
    /// Bytes of all turns that are held, and of the owner's.
    held: [Arc<AtomicUsize>; 2],
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.held.iter().for_each(|held| _ = held.fetch_sub(self.messages.len(), Ordering::Relaxed));
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

/// What an owner has in the store.
#[derive(Debug, Default)]
struct Owned {
    numbers: BTreeSet<u64>,
    /// Bytes beside those of its turns.
    bytes: usize,
    turn_bytes: Arc<AtomicUsize>,
}

impl Owned {
    fn count(&self) -> usize {
        self.numbers.len()
    }

    fn bytes(&self) -> usize {
        self.bytes + self.turn_bytes.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Entries {
    /// In the order in which they were stored.
    by_age: BTreeMap<u64, (String, Instant, Response)>,
    by_id: HashMap<String, u64>,
    owners: BTreeMap<Arc<str>, Owned>,
    next: u64,
    bytes: usize,
}

impl Entries {
    fn remove(&mut self, number: u64) {
        let Some((id, _, response)) = self.by_age.remove(&number) else { return };
        self.by_id.remove(&id);
        self.bytes -= response.bytes();
        let owner = Arc::clone(&response.owner);
        if let Some(owned) = self.owners.get_mut(&owner) {
            owned.numbers.remove(&number);
            owned.bytes -= response.bytes();
            drop(response);
            // A response that is not stored yet may have turns of it.
            if owned.numbers.is_empty() && Arc::strong_count(&owned.turn_bytes) == 1 {
                self.owners.remove(&owner);
            }
        }
    }

    /// Drops responses while there are too many or too old ones.
    fn trim(&mut self, bounds: Bounds, turn_bytes: &AtomicUsize, now: Instant) {
        while let Some((number, (_, at, _))) = self.by_age.first_key_value() {
            let bytes = self.bytes + turn_bytes.load(Ordering::Relaxed);
            let old = now.saturating_duration_since(*at) >= bounds.age_max;
            let (size, most): (fn(&Owned) -> usize, usize) = match bytes > bounds.bytes_max {
                true => (Owned::bytes, bounds.bytes_max),
                false => (Owned::count, bounds.count_max),
            };
            if !old && bytes <= bounds.bytes_max && self.by_age.len() <= bounds.count_max {
                return;
            }
            let above = self.owners.values().filter(|owned| !old && size(owned) > most / OWNER_PART);
            let largest = above.filter(|owned| owned.count() > 0).max_by_key(|owned| size(owned));
            let number = largest.and_then(|owned| owned.numbers.first()).unwrap_or(number);
            let number = *number;
            self.remove(number);
        }
    }
}

impl Default for Stored {
    fn default() -> Self {
        Self::with(Bounds { bytes_max: STORED_BYTES_MAX, count_max: STORED_COUNT_MAX, age_max: STORED_AGE_MAX })
    }
}

impl Stored {
    fn with(bounds: Bounds) -> Self {
        Self { bounds, turn_bytes: Arc::default(), entries: Mutex::default() }
    }

    /// A turn of an owner, whose bytes count as long as a response has it.
    pub(super) fn turn(&self, owner: &Arc<str>, messages: String) -> Arc<Turn> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let of_owner = Arc::clone(&entries.owners.entry(Arc::clone(owner)).or_default().turn_bytes);
        let held = [Arc::clone(&self.turn_bytes), of_owner];
        held.iter().for_each(|held| _ = held.fetch_add(messages.len(), Ordering::Relaxed));
        Arc::new(Turn { messages: messages.into(), held })
    }

    pub(super) fn insert(&self, id: &str, response: Response, now: Instant) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let number = entries.next;
        entries.next += 1;
        entries.bytes += response.bytes();
        let owned = entries.owners.entry(Arc::clone(&response.owner)).or_default();
        owned.numbers.insert(number);
        owned.bytes += response.bytes();
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
        let owner: Arc<str> = owner.into();
        let turns = before.iter().cloned().chain([stored.turn(&owner, "m".repeat(text))]).collect();
        stored.insert(id, Response { owner, turns, json: "{}".into() }, now);
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
        let entries = stored.entries.lock().unwrap();
        assert!(entries.bytes == 0 && entries.owners.is_empty(), "{entries:?}");
    }

    #[test]
    fn in_a_full_store_an_owner_above_its_share_loses_its_own_oldest_first() {
        let now = Instant::now();
        let roomy = Bounds { bytes_max: 40 * ENTRY_BYTES, count_max: 100, ..BOUNDS };
        let few = Bounds { bytes_max: 1 << 20, count_max: 12, ..BOUNDS };
        for (bounds, text) in [(roomy, 2 * ENTRY_BYTES), (few, 8)] {
            let stored = Stored::with(bounds);
            add(&stored, "first", "a", &[], text, now);
            (0..20).for_each(|i| add(&stored, &format!("b{i}"), "b", &[], text, now));
            add(&stored, "last", "a", &[], text, now);
            assert_eq!(present(&stored, &["first", "last"], now), [true, true]);
            let of_b = |i: usize| stored.get(&format!("b{i}"), "b", now).is_some();
            // It has all that others do not need.
            assert!(!of_b(0) && of_b(19) && (0..20).filter(|i| of_b(*i)).count() >= 10);
            // Below their shares all are equal: the oldest goes.
            (0..20).for_each(|i| add(&stored, &format!("c{i}"), &format!("c{i}"), &[], text, now));
            assert_eq!(present(&stored, &["first", "last"], now), [false, false]);
        }
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
