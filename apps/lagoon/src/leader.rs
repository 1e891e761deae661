//! Which of a pool's gManagers to talk to: connected to all, registered with the one that leads.
//!
//! A standby says who leads, or that it does not know; then the others are asked in turn, with a pause that grows.

use lagoon_transport::{Class, Node, PeerId};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// gManagers that are remembered at most, those that standbys named included.
const GMANAGERS_MAX: usize = 16;
/// Pause before another gManager is asked; it doubles while none leads.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Leader {
    /// In the order in which they are asked.
    known: Vec<PeerId>,
    connected: BTreeSet<PeerId>,
    /// Whom the instance talks to.
    current: Option<PeerId>,
    /// The last one talked to: the next in turn is asked.
    last: Option<PeerId>,
    /// The one that a standby named.
    named: Option<PeerId>,
    pause: Duration,
    not_before: Instant,
}

impl Leader {
    /// Of the gManagers at `addrs`, to each of which `node` keeps a connection from now on.
    pub(crate) fn new(node: &Node, addrs: &[SocketAddr]) -> Self {
        let known = addrs.iter().take(GMANAGERS_MAX).filter_map(|addr| node.connect(*addr, &[Class::Control]));
        Self::of(known.collect(), Instant::now())
    }

    fn of(known: Vec<PeerId>, now: Instant) -> Self {
        let (current, last, named) = (None, None, None);
        Self { known, connected: BTreeSet::new(), current, last, named, pause: PAUSE, not_before: now }
    }

    pub(crate) fn is_gmanager(&self, peer: PeerId) -> bool {
        self.known.contains(&peer)
    }

    /// Whom to talk to.
    pub(crate) fn current(&self) -> Option<PeerId> {
        self.current
    }

    /// One is connected.
    pub(crate) fn on_up(&mut self, peer: PeerId) {
        self.connected.insert(peer);
    }

    /// One is gone. True if it was the one talked to.
    pub(crate) fn on_down(&mut self, peer: PeerId) -> bool {
        self.connected.remove(&peer);
        self.leave(peer)
    }

    /// The current one accepted a registration: it leads.
    pub(crate) fn on_registered(&mut self) {
        (self.pause, self.named) = (PAUSE, None);
    }

    /// The current one does not lead; `named` is who does, if it knew.
    pub(crate) fn on_not_leader(&mut self, peer: PeerId, named: Option<PeerId>, now: Instant) -> bool {
        self.named = named.filter(|n| *n != peer);
        if let Some(named) = self.named
            && !self.known.contains(&named)
            && self.known.len() < GMANAGERS_MAX
        {
            self.known.push(named);
        }
        self.not_before = now + self.pause;
        self.pause = (2 * self.pause).min(PAUSE_MAX);
        self.leave(peer)
    }

    fn leave(&mut self, peer: PeerId) -> bool {
        let left = self.current == Some(peer);
        if left {
            (self.current, self.last) = (None, Some(peer));
        }
        left
    }

    /// If nobody is talked to: whom to talk to from now on.
    pub(crate) fn choose(&mut self, now: Instant) -> Option<PeerId> {
        if self.current.is_some() || now < self.not_before {
            return None;
        }
        // Named once, tried once.
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
        assert_eq!(leader.choose(start + PAUSE), None, "a longer pause");
        assert_eq!(leader.choose(start + 2 * PAUSE), Some(B));
        leader.on_registered();
        assert!(!leader.on_down(A) && leader.on_down(B));
        assert_eq!((leader.current(), leader.choose(start + PAUSE_MAX)), (None, None));
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
