//! One instance's row: a tag, its space, its connection, its location and its links, each in atomic words.
//!
//! * **tag**: the instance's number (0: an empty row) over a generation of 16 bits over [`Flags`]. Number and generation
//!   change around every change of the location, so that a reader that sees the same ones before and after has read one
//!   location.
//! * **space**: lendable blocks over booked ones, in one word: a booking is a compare-and-swap on the word it was chosen by.

use crate::sync::{AtomicU64, Ordering, high, low, word, words};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Flags that bar or demote a creditor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u16);

impl Flags {
    /// It refused a debtor and has sent no heartbeat since.
    pub const PAUSED: Self = Self(1);
    /// Silent, fenced, draining or frozen.
    pub const BARRED: Self = Self(2);
    /// It borrows itself: ranked after all instances that do not.
    pub const BORROWS: Self = Self(4);
    /// Its blocks are in host memory.
    pub const HOST: Self = Self(8);

    /// These flags, with `other` set or not.
    #[must_use]
    pub const fn with(self, other: Self, on: bool) -> Self {
        if on { Self(self.0 | other.0) } else { Self(self.0 & !other.0) }
    }

    /// Whether all flags of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the row is left out of answers.
    pub(crate) const fn is_closed(self) -> bool {
        self.0 & (Self::PAUSED.0 | Self::BARRED.0) != 0
    }

    /// Group of the order that a row belongs to.
    pub(crate) const fn group(self) -> u32 {
        (if self.has(Self::BORROWS) { 2 } else { 0 }) + (if self.has(Self::HOST) { 1 } else { 0 })
    }
}

/// Where an instance is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    pub addr: SocketAddr,
    /// Fingerprint of its host's name; 0 if it is unknown.
    pub host: u64,
}

/// Row number in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(pub(crate) u32);

/// Measured link from one instance to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub peer: u32,
    pub slot: Slot,
    /// Distance class: see [`crate::CLASS_UNMEASURED`].
    pub class: u8,
}

impl Link {
    fn pack(self) -> u64 {
        word(self.peer, (self.slot.0 << 8) | u32::from(self.class))
    }

    #[allow(clippy::cast_possible_truncation, reason = "the class is the lowest byte")]
    fn unpack(word: u64) -> Self {
        Self { peer: high(word), slot: Slot(low(word) >> 8), class: low(word) as u8 }
    }
}

/// A reader's copy of a row's tag and space, each loaded once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) instance: u32,
    pub(crate) flags: Flags,
    /// The word that a booking is based on.
    pub(crate) space: u64,
}

impl Seen {
    pub(crate) fn lendable(&self) -> u32 {
        high(self.space)
    }

    /// Lendable blocks that are not booked.
    pub(crate) fn available(&self) -> u32 {
        high(self.space).saturating_sub(low(self.space))
    }
}

/// One instance's row. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Row {
    tag: AtomicU64,
    space: AtomicU64,
    conn: AtomicU64,
    /// Blocks that the instance never lends: capacity for itself only.
    kept: AtomicU64,
    location: [AtomicU64; 4],
    links: Box<[AtomicU64]>,
}

const GENERATION: u64 = 0xffff_0000;

fn tag(instance: u32, generation: u16, flags: Flags) -> u64 {
    word(instance, (u32::from(generation) << 16) | u32::from(flags.0))
}

#[allow(clippy::cast_possible_truncation, reason = "the flags are the lowest 16 bits")]
fn flags_of(tag: u64) -> Flags {
    Flags(tag as u16)
}

#[allow(clippy::cast_possible_truncation, reason = "the generation is 16 bits")]
fn generation_of(tag: u64) -> u16 {
    ((tag & GENERATION) >> 16) as u16
}

impl Row {
    pub(crate) fn new(links: usize) -> Self {
        let location = std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            tag: AtomicU64::new(0),
            space: AtomicU64::new(0),
            conn: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            location,
            links: words(links),
        }
    }

    // Readers.

    /// `None` for an empty row.
    pub(crate) fn see(&self) -> Option<Seen> {
        let tag = self.tag.load(Ordering::Acquire);
        let space = self.space.load(Ordering::Acquire);
        (high(tag) != 0).then(|| Seen { instance: high(tag), flags: flags_of(tag), space })
    }

    /// The location of `instance`, if the row still belongs to it.
    pub(crate) fn location(&self, instance: u32) -> Option<Location> {
        let before = self.tag.load(Ordering::Acquire);
        // Acquire: a reader that sees a word of a later location sees the tag that was changed before it, below.
        let words = [0, 1, 2, 3].map(|i: usize| self.location[i].load(Ordering::Acquire));
        let after = self.tag.load(Ordering::Acquire);
        let same = (before ^ after) & !0xffff == 0;
        (same && high(before) == instance).then(|| unpack(words))
    }

    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Acquire)
    }

    pub(crate) fn conn(&self) -> u64 {
        self.conn.load(Ordering::Acquire)
    }

    /// Books blocks if the space still equals `seen`; returns whether it did.
    pub(crate) fn book_if(&self, seen: u64, blocks: u32) -> bool {
        let booked = word(high(seen), low(seen).saturating_add(blocks));
        self.space.compare_exchange(seen, booked, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Books blocks whatever the space is.
    pub(crate) fn book(&self, blocks: u32) {
        let add = |s: u64| Some(word(high(s), low(s).saturating_add(blocks)));
        let always = self.space.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        debug_assert!(always.is_ok(), "the update refuses nothing");
    }

    pub(crate) fn links_len(&self) -> usize {
        self.links.len()
    }

    /// Calls `each` for every link.
    pub(crate) fn links(&self, mut each: impl FnMut(Link)) {
        for link in &self.links {
            match link.load(Ordering::Acquire) {
                0 => return,
                packed => each(Link::unpack(packed)),
            }
        }
    }

    // The writer.

    /// Gives an empty row to an instance.
    pub(crate) fn occupy(&self, instance: u32, flags: Flags, kept: u32, location: Location) {
        let generation = generation_of(self.tag.load(Ordering::Relaxed)).wrapping_add(1);
        for (word, value) in self.location.iter().zip(pack(location)) {
            // Release: a reader that sees this value sees the empty tag before it, or a later one.
            word.store(value, Ordering::Release);
        }
        self.conn.store(0, Ordering::Release);
        self.kept.store(u64::from(kept), Ordering::Release);
        self.space.store(0, Ordering::Release);
        self.set_links(&[]);
        self.tag.store(tag(instance, generation, flags), Ordering::Release);
    }

    pub(crate) fn vacate(&self) {
        let generation = generation_of(self.tag.load(Ordering::Relaxed));
        self.tag.store(tag(0, generation, Flags::default()), Ordering::Release);
        self.conn.store(0, Ordering::Release);
    }

    pub(crate) fn flags(&self) -> Flags {
        flags_of(self.tag.load(Ordering::Relaxed))
    }

    pub(crate) fn set_flags(&self, flags: Flags) {
        let old = self.tag.load(Ordering::Relaxed);
        self.tag.store(tag(high(old), generation_of(old), flags), Ordering::Release);
    }

    pub(crate) fn set_conn(&self, conn: u64) {
        self.conn.store(conn, Ordering::Release);
    }

    /// New space; earlier bookings are forgotten.
    pub(crate) fn set_lendable(&self, blocks: u32) {
        self.space.store(word(blocks, 0), Ordering::Release);
    }

    /// At most `blocks` are lendable; bookings stand.
    pub(crate) fn cap_lendable(&self, blocks: u32) {
        let cap = |s: u64| Some(word(high(s).min(blocks), low(s)));
        let always = self.space.fetch_update(Ordering::AcqRel, Ordering::Acquire, cap);
        debug_assert!(always.is_ok(), "the update refuses nothing");
    }

    pub(crate) fn set_links(&self, links: &[Link]) {
        for (at, word) in self.links.iter().enumerate() {
            word.store(links.get(at).map_or(0, |l| l.pack()), Ordering::Release);
        }
    }
}

/// An IPv4 address is distinguished from an IPv6 one by the highest bit of the last word. A flow label is not kept.
#[allow(clippy::cast_possible_truncation, reason = "the halves of an IPv6 address are taken apart")]
fn pack(Location { addr, host }: Location) -> [u64; 4] {
    match addr {
        SocketAddr::V4(a) => [u64::from(u32::from(*a.ip())), 0, u64::from(a.port()), host],
        SocketAddr::V6(a) => {
            let ip = u128::from(*a.ip());
            let port = 1 << 63 | u64::from(a.scope_id()) << 16 | u64::from(a.port());
            [(ip >> 64) as u64, ip as u64, port, host]
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "ports are the lowest 16 bits, scopes 32 above them")]
fn unpack([upper, lower, port, host]: [u64; 4]) -> Location {
    let addr = if port >> 63 == 0 {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::from(low(upper))), port as u16)
    } else {
        let ip = Ipv6Addr::from(u128::from(upper) << 64 | u128::from(lower));
        SocketAddr::V6(SocketAddrV6::new(ip, port as u16, 0, (port >> 16) as u32))
    };
    Location { addr, host }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn locations_survive() {
        for text in ["10.0.0.1:7000", "255.255.255.255:65535", "[::1]:7", "[fe80::1%3]:9", "[2001:db8::ff00:42:8329]:1"]
        {
            let location = Location { addr: text.parse().unwrap(), host: u64::MAX - 1 };
            assert_eq!(unpack(pack(location)), location);
        }
    }

    #[test]
    fn links_survive() {
        let link = Link { peer: u32::MAX, slot: Slot((1 << 24) - 1), class: 255 };
        assert_eq!(Link::unpack(link.pack()), link);
    }
}
