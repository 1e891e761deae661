//! An instance's choice among its pool's gManagers: connected to all, registered with the leader.
//!
//! A standby names the leader, if it knows it; then that one is asked, else the others in turn, with growing pauses.

use lagoon_transport::{Class, Node, NodeRole, PeerId};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Maximum of remembered gManagers, including those that standbys named.
const GMANAGERS_MAX: usize = 16;
/// Pause before another gManager is asked; it doubles while none leads.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How long a term rules out earlier ones since it was last seen: longer than any leader's lease. An earlier term after
/// that is from a new etcd.
const TERM_HOLD: Duration = Duration::from_secs(90);

/// The latest term that was seen, and when.
#[derive(Debug, Default)]
pub(crate) struct Terms(Option<(u64, Instant)>);

impl Terms {
    /// Notes the term that a leader reports. False if a later one was seen while a leader of the earlier one may still
    /// act: then its message does not count.
    pub(crate) fn note(&mut self, term: u64, now: Instant) -> bool {
        let later = self.0.is_some_and(|(latest, at)| term < latest && now.duration_since(at) < TERM_HOLD);
        if !later {
            self.0 = Some((term, now));
        }
        !later
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Leader {
    /// In the order in which they are asked.
    known: Vec<PeerId>,
    connected: BTreeSet<PeerId>,
    /// The gManager in use.
    current: Option<PeerId>,
    /// The gManager in use has accepted a registration, whose reply has its term. Orders before that have no known term.
    followed: bool,
    /// The gManager used last: the one after it in `known` is asked next.
    last: Option<PeerId>,
    /// The leader that a standby named.
    named: Option<PeerId>,
    pause: Duration,
    not_before: Instant,
    terms: Terms,
}

impl Leader {
    /// A choice among `addrs`; `node` keeps connections to all.
    pub(crate) fn new(node: &Node, addrs: &[SocketAddr]) -> Self {
        let known = addrs
            .iter()
            .take(GMANAGERS_MAX)
            .filter_map(|addr| node.connect_role(*addr, &[Class::Control], NodeRole::GManager));
        Self::of(known.collect(), Instant::now())
    }

    fn of(known: Vec<PeerId>, now: Instant) -> Self {
        let (current, last, named) = (None, None, None);
        Self {
            known,
            connected: BTreeSet::new(),
            current,
            followed: false,
            last,
            named,
            pause: PAUSE,
            not_before: now,
            terms: Terms::default(),
        }
    }

    pub(crate) fn is_gmanager(&self, peer: PeerId) -> bool {
        self.known.contains(&peer)
    }

    /// The gManager in use.
    pub(crate) fn current(&self) -> Option<PeerId> {
        self.current
    }

    /// A gManager is connected.
    pub(crate) fn on_up(&mut self, peer: PeerId) {
        self.connected.insert(peer);
    }

    /// Handles the loss of a gManager's connection. True if it was the one in use.
    pub(crate) fn on_down(&mut self, peer: PeerId) -> bool {
        self.connected.remove(&peer);
        self.leave(peer)
    }

    /// [`Terms::note`] for the gManager in use.
    pub(crate) fn note_term(&mut self, term: u64, now: Instant) -> bool {
        self.terms.note(term, now)
    }

    /// The gManager in use accepted a registration: it leads.
    pub(crate) fn on_registered(&mut self) {
        (self.pause, self.named, self.followed) = (PAUSE, None, true);
    }

    /// Whether the gManager in use has accepted a registration.
    pub(crate) fn is_followed(&self) -> bool {
        self.followed
    }

    /// The gManager in use does not lead; `named`: the leader that it named.
    pub(crate) fn on_not_leader(&mut self, peer: PeerId, named: Option<PeerId>, now: Instant) -> bool {
        self.named = named.filter(|n| *n != peer);
        if let Some(named) = self.named
            && !self.known.contains(&named)
            && self.known.len() < GMANAGERS_MAX
        {
            self.known.push(named);
        }
        // Spread, so that the instances of a pool do not ask the next one in step.
        self.not_before = now + self.pause.mul_f64(rand::random_range(0.5..1.0));
        self.pause = (2 * self.pause).min(PAUSE_MAX);
        self.leave(peer)
    }

    fn leave(&mut self, peer: PeerId) -> bool {
        let left = self.current == Some(peer);
        if left {
            (self.current, self.last, self.followed) = (None, Some(peer), false);
        }
        left
    }

    /// Chooses a gManager if none is in use.
    pub(crate) fn choose(&mut self, now: Instant) -> Option<PeerId> {
        if self.current.is_some() || now < self.not_before {
            return None;
        }
        // A named leader is tried once.
        let named = self.named.take().filter(|peer| self.connected.contains(peer));
        let after = self.last.and_then(|last| self.known.iter().position(|p| *p == last)).map_or(0, |at| at + 1);
        let turn = || self.known[after..].iter().chain(&self.known[..after]).find(|p| self.connected.contains(p));
        self.current = named.or_else(|| turn().copied());
        self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PeerId = PeerId(1);
    const B: PeerId = PeerId(2);
    const C: PeerId = PeerId(3);

    #[test]
    fn they_are_asked_in_turn_with_growing_pauses() {
        let start = Instant::now();
        let mut leader = Leader::of(vec![A, B], start);
        assert_eq!(leader.choose(start), None, "nobody is connected");
        leader.on_up(B);
        assert_eq!(leader.choose(start), Some(B));
        assert_eq!(leader.choose(start), None, "it is talked to already");
        leader.on_up(A);
        assert!(leader.on_not_leader(B, None, start));
        assert_eq!(leader.choose(start), None, "a pause");
        assert_eq!(leader.choose(start + PAUSE), Some(A));
        assert!(leader.on_not_leader(A, None, start));
        assert_eq!(leader.choose(start + PAUSE.mul_f64(0.99)), None, "a longer pause");
        assert_eq!(leader.choose(start + 2 * PAUSE), Some(B));
        assert!(!leader.is_followed());
        leader.on_registered();
        assert!(leader.is_followed());
        assert!(!leader.on_down(A) && leader.on_down(B));
        assert_eq!((leader.current(), leader.choose(start + PAUSE_MAX)), (None, None));
        assert!(!leader.is_followed());
    }

    #[test]
    fn an_earlier_term_does_not_count_beside_a_later_one() {
        let start = Instant::now();
        let mut leader = Leader::of(vec![A, B], start);
        assert!(leader.note_term(7, start) && leader.note_term(9, start) && leader.note_term(9, start));
        assert!(!leader.note_term(7, start + TERM_HOLD / 2), "its leader is over");
        assert!(leader.note_term(9, start + TERM_HOLD / 2));
        assert!(!leader.note_term(8, start + TERM_HOLD), "the later one was seen since");
        assert!(leader.note_term(3, start + 2 * TERM_HOLD), "the store is a new one");
    }

    #[test]
    fn the_named_one_comes_next_if_it_is_connected() {
        let start = Instant::now();
        let mut leader = Leader::of(vec![A, B], start);
        for peer in [A, B, C] {
            leader.on_up(peer);
        }
        assert_eq!(leader.choose(start), Some(A));
        assert!(leader.on_not_leader(A, Some(C), start), "one that nobody had listed");
        assert!(leader.is_gmanager(C));
        assert_eq!(leader.choose(start + PAUSE), Some(C));
        assert!(leader.on_down(C));
        assert_eq!(leader.choose(start + PAUSE), Some(A), "the first after the last");
        // It named itself, or one that is not there: the next in turn.
        assert!(leader.on_not_leader(A, Some(A), start));
        assert_eq!(leader.choose(start + PAUSE_MAX), Some(B));
        assert!(leader.on_not_leader(B, Some(C), start));
        assert_eq!(leader.choose(start + 2 * PAUSE_MAX), Some(A));
    }
}
