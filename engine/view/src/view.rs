//! Reader side of the view: queries for creditors, and the choice among rows.

use crate::index::Index;
use crate::order::{GROUPS, Order};
use crate::row::{Flags, Link, Location, Row, Seen, Slot};
use crate::sync::{AtomicU64, Ordering};
use crate::{CANDIDATES, CLASS_UNMEASURED};
use std::cmp::Reverse;
use std::sync::Arc;

/// Lendable rows that a reader compares in one group of the order at most: enough to spread competing debtors between
/// two publications.
const WINDOW: usize = 16;
/// Times that a reader chooses again because another one booked its first choice.
const RETRIES: usize = 4;
/// Links of one instance.
pub(crate) const LINKS: usize = 16;

/// Memory tier that a debtor wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// Device memory first, then host memory.
    #[default]
    Any,
    Device,
    Host,
}

/// Query of a debtor for creditors.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub debtor: u32,
    pub blocks: u32,
    /// Instances to leave out of the answer.
    pub exclude: &'a [u32],
    pub tier: Tier,
}

/// Candidate creditor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub instance: u32,
    pub location: Location,
    pub lendable: u32,
}

/// Answer to [`Ask`]: at most [`CANDIDATES`] creditors, best first, and the pool's totals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub found: Vec<Found>,
    /// The debtor's blocks plus the lend limits of all other live instances.
    pub blocks_total: u64,
    /// Lendable blocks of all live instances but the debtor.
    pub blocks_lendable: u64,
}

/// Rows, index, order and totals of a view: memory that its writer and all readers share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) rows: Box<[Row]>,
    pub(crate) index: Index,
    pub(crate) order: Order,
    pub(crate) blocks_cap: AtomicU64,
    pub(crate) blocks_lendable: AtomicU64,
}

/// Read handle of the view. Clones share the view.
#[derive(Clone, Debug)]
pub struct SortedView(pub(crate) Arc<Shared>);

/// A candidate: its sort key, and the row state that the key was computed from.
#[derive(Clone, Copy, Debug)]
struct Choice {
    key: (usize, u8, Reverse<u32>, u32),
    slot: u32,
    seen: Seen,
}

/// The best choices so far, in order.
#[derive(Debug, Default)]
struct Best {
    choices: [Option<Choice>; CANDIDATES],
}

impl Best {
    fn offer(&mut self, choice: Choice) {
        let mut carried = Some(choice);
        for place in &mut self.choices {
            // The same row may be offered as a neighbour and again as a large one.
            if place.is_some_and(|p| carried.is_some_and(|c| p.seen.instance == c.seen.instance)) {
                return;
            }
            if place.is_none_or(|p| carried.is_some_and(|c| c.key < p.key)) {
                std::mem::swap(place, &mut carried);
            }
            if carried.is_none() {
                return;
            }
        }
    }

    /// Whether no row of a later group could enter the list.
    fn is_full(&self, group: usize) -> bool {
        self.choices[CANDIDATES - 1].is_some_and(|c| c.key.0 <= group)
    }
}

impl Tier {
    fn wants(self, group: usize) -> bool {
        match self {
            Self::Any => true,
            Self::Device => group.is_multiple_of(2),
            Self::Host => !group.is_multiple_of(2),
        }
    }
}

impl SortedView {
    /// As [`SortedView::ask`] for a debtor that registered on connection `conn`; `None` if the view does not list it with
    /// that connection: the caller must query the gManager.
    #[must_use]
    pub fn ask_from(&self, conn: u64, ask: &Ask<'_>) -> Option<Answer> {
        let row = &self.0.rows[self.0.index.find(ask.debtor)? as usize];
        let known = row.see().is_some_and(|s| s.instance == ask.debtor && !s.flags.has(Flags::BARRED));
        (known && row.conn() == conn).then(|| self.ask(ask))
    }

    /// Chooses creditors by group, distance and availability, and books the blocks there.
    #[must_use]
    pub fn ask(&self, ask: &Ask<'_>) -> Answer {
        let own = self.0.index.find(ask.debtor).map(|slot| &self.0.rows[slot as usize]);
        let mut links = [Link { peer: 0, slot: Slot(0), class: 0 }; LINKS];
        let mut linked = 0;
        if let Some(row) = own {
            row.links(|link| {
                links[linked] = link;
                linked += 1;
            });
        }
        let links = &links[..linked];
        let mut best = self.choose(ask, links);
        for _ in 0..RETRIES {
            let Some(first) = best.choices[0] else { break };
            let taken = ask.blocks.min(first.seen.available());
            if taken == 0 || self.0.rows[first.slot as usize].book_if(first.seen.space, taken) {
                return self.answer(ask, own, &best, taken);
            }
            best = self.choose(ask, links);
        }
        let taken = best.choices[0].map_or(0, |first| {
            let taken = ask.blocks.min(first.seen.available());
            self.0.rows[first.slot as usize].book(taken);
            taken
        });
        self.answer(ask, own, &best, taken)
    }

    /// Books the remaining blocks at the further candidates, and lists all candidates.
    fn answer(&self, ask: &Ask<'_>, own: Option<&Row>, best: &Best, first_taken: u32) -> Answer {
        let mut left = ask.blocks - first_taken;
        let mut found = Vec::with_capacity(CANDIDATES);
        for (at, choice) in best.choices.iter().flatten().enumerate() {
            let row = &self.0.rows[choice.slot as usize];
            if at > 0 {
                let taken = left.min(choice.seen.available());
                if taken > 0 {
                    row.book(taken);
                }
                left -= taken;
            }
            // The instance may have left since it was chosen.
            if let Some(location) = row.location(choice.seen.instance) {
                found.push(Found { instance: choice.seen.instance, location, lendable: choice.seen.lendable() });
            }
        }
        // Blocks that the debtor never lends are capacity for itself even while it is barred, as in `HeartbeatAck`.
        let own = own.filter(|row| row.see().is_some_and(|s| s.instance == ask.debtor));
        let lends = own.and_then(Row::see).filter(|s| !s.flags.has(Flags::BARRED));
        let lendable = lends.map_or(0, |s| u64::from(s.lendable()));
        Answer {
            found,
            blocks_total: self.0.blocks_cap.load(Ordering::Acquire) + own.map_or(0, Row::kept),
            blocks_lendable: self.0.blocks_lendable.load(Ordering::Acquire).saturating_sub(lendable),
        }
    }

    fn choose(&self, ask: &Ask<'_>, links: &[Link]) -> Best {
        loop {
            let reading = self.0.order.read();
            let mut best = Best::default();
            for link in links {
                self.consider(ask, link.slot.0, links, &mut best);
            }
            for group in (0..GROUPS).filter(|g| ask.tier.wants(*g)) {
                let mut near = 0;
                for slot in reading.group(group) {
                    near += usize::from(self.consider(ask, slot, links, &mut best));
                    if near == WINDOW {
                        break;
                    }
                }
                if best.is_full(group) {
                    break;
                }
            }
            if self.0.order.is_current(&reading) {
                return best;
            }
        }
    }

    /// Offers a row if it may lend. Returns whether it has unbooked blocks and is not far.
    fn consider(&self, ask: &Ask<'_>, slot: u32, links: &[Link], best: &mut Best) -> bool {
        let Some(seen) = self.0.rows.get(slot as usize).and_then(Row::see) else { return false };
        let group = seen.flags.group() as usize;
        let unfit = seen.instance == ask.debtor || seen.flags.is_closed() || seen.lendable() == 0;
        if unfit || !ask.tier.wants(group) || ask.exclude.contains(&seen.instance) {
            return false;
        }
        let link = links.iter().find(|l| l.peer == seen.instance);
        let class = link.map_or(CLASS_UNMEASURED, |l| l.class);
        let key = (group, class, Reverse(seen.available()), seen.instance);
        best.offer(Choice { key, slot, seen });
        seen.available() > 0 && class <= CLASS_UNMEASURED
    }
}
