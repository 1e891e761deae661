//! Writer side of the view: rows, totals and publications. The gManager calls it.

use crate::index::Index;
use crate::order::Order;
use crate::row::{Flags, Link, Location, Row, Slot};
use crate::sync::{AtomicU64, Ordering, high, low, word};
use crate::view::{LINKS, Shared, SortedView};
use std::sync::Arc;

/// Write handle of the view; there is one per view.
#[derive(Debug)]
pub struct ViewWriter {
    shared: Arc<Shared>,
    free: Vec<u32>,
    /// Rows from here on were never used.
    used: u32,
    /// Scratch for sorting: group over what is not available, instance over slot.
    sorted: Vec<(u64, u64)>,
}

impl ViewWriter {
    /// A view for `capacity` instances (below 2^24).
    ///
    /// # Panics
    /// If there are more.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self::with_links(capacity, LINKS)
    }

    pub(crate) fn with_links(capacity: usize, links: usize) -> Self {
        assert!(capacity < 1 << 24, "a slot has 24 bits");
        assert!(links <= LINKS, "readers have room for so many");
        let shared = Shared {
            rows: (0..capacity).map(|_| Row::new(links)).collect(),
            index: Index::new(capacity),
            order: Order::new(capacity),
            blocks_cap: AtomicU64::new(0),
            blocks_lendable: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), free: Vec::new(), used: 0, sorted: Vec::new() }
    }

    /// A read handle of the view.
    #[must_use]
    pub fn view(&self) -> SortedView {
        SortedView(Arc::clone(&self.shared))
    }

    fn row(&self, slot: Slot) -> &Row {
        &self.shared.rows[slot.0 as usize]
    }

    /// Adds a row for an instance (not 0) that lends nothing yet; `None` if the view is full. `kept` is the number of blocks
    /// that it never lends.
    pub fn add(&mut self, instance: u32, flags: Flags, kept: u32, location: Location) -> Option<Slot> {
        assert_ne!(instance, 0, "0 is an empty row");
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if (self.used as usize) < self.shared.rows.len() => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        self.row(Slot(slot)).occupy(instance, flags, kept, location);
        self.shared.index.insert(instance, slot);
        Some(Slot(slot))
    }

    /// Removes the row of an instance.
    pub fn remove(&mut self, slot: Slot, instance: u32) {
        self.shared.index.remove(instance);
        self.row(slot).vacate();
        self.free.push(slot.0);
    }

    /// Sets the connection on which the instance registered, for [`SortedView::ask_from`]; 0 is none.
    pub fn set_conn(&mut self, slot: Slot, conn: u64) {
        self.row(slot).set_conn(conn);
    }

    /// Sets an instance's flags.
    pub fn set_flags(&mut self, slot: Slot, flags: Flags) {
        self.row(slot).set_flags(flags);
    }

    /// An instance's flags.
    #[must_use]
    pub fn flags(&self, slot: Slot) -> Flags {
        self.row(slot).flags()
    }

    /// Sets the blocks that the instance would lend now, and clears its bookings.
    pub fn set_lendable(&mut self, slot: Slot, blocks: u32) {
        self.row(slot).set_lendable(blocks);
    }

    /// Limits the lendable blocks after a refusal; bookings stand.
    pub fn cap_lendable(&mut self, slot: Slot, blocks: u32) {
        self.row(slot).cap_lendable(blocks);
    }

    /// Books blocks for a debtor that was not sent by [`SortedView::ask`].
    pub fn book(&mut self, slot: Slot, blocks: u32) {
        self.row(slot).book(blocks);
    }

    /// Sets the instance's measured links, nearest first; those beyond [`ViewWriter::LINKS`] count as unmeasured.
    pub fn set_links(&mut self, slot: Slot, links: &[Link]) {
        self.row(slot).set_links(links);
    }

    /// Links that one instance may have.
    pub const LINKS: usize = LINKS;

    /// Sets the pool's totals: the lend limits of all live instances, and the blocks that they would lend now.
    pub fn set_totals(&mut self, blocks_cap: u64, blocks_lendable: u64) {
        self.shared.blocks_cap.store(blocks_cap, Ordering::Release);
        self.shared.blocks_lendable.store(blocks_lendable, Ordering::Release);
    }

    /// Sorts the rows with lendable blocks and publishes the order.
    pub fn publish(&mut self) {
        let mut sorted = std::mem::take(&mut self.sorted);
        sorted.clear();
        for slot in 0..self.used {
            let Some(seen) = self.row(Slot(slot)).see() else { continue };
            if seen.lendable() > 0 && !seen.flags.has(Flags::BARRED) {
                sorted.push((word(seen.flags.group(), !seen.available()), word(seen.instance, slot)));
            }
        }
        sorted.sort_unstable();
        self.shared.order.publish(sorted.iter().map(|(first, second)| (high(*first) as usize, low(*second))));
        self.sorted = sorted;
    }

    #[cfg(all(test, loom))]
    pub(crate) fn booked(&self, slot: u32) -> u32 {
        let seen = self.row(Slot(slot)).see().unwrap();
        seen.lendable() - seen.available()
    }

    /// Memory of the view, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let capacity = self.shared.rows.len();
        let links = self.shared.rows.first().map_or(0, |r| r.links_len()) * 8;
        let index = (capacity * 4).next_power_of_two() * 8;
        capacity * (size_of::<Row>() + links + 2 * 4) + index + self.sorted.capacity() * size_of::<(u64, u64)>()
    }
}
