//! Tiers of nodes' prefix caches.

use super::{World, place};
use lagoon_instance::{CacheTierConfig, CacheTiersStatus, Event};
use lagoon_sim::Disk;

impl World {
    /// Gives a new process its tiers: an empty one in host memory, and on disk what earlier processes of the node left.
    pub(super) fn start_tiers(&mut self, node: usize) {
        let spec = &self.specs[node];
        let (host_bytes, disk_bytes) = (spec.host_cache_bytes, spec.disk_cache_bytes);
        if host_bytes == 0 && disk_bytes == 0 {
            return;
        }
        let tiers = CacheTierConfig { host_bytes, disk_bytes, load_tokens_min: Some(1) };
        self.process_mut(node).instance.keep_copies(tiers);
        if disk_bytes > 0 {
            let found = self.sim.disks.entry(place(node)).or_insert_with(|| Disk::new(disk_bytes)).found();
            self.handle(node, Event::Disk(found));
        }
    }

    /// A node's disk tier.
    ///
    /// # Panics
    /// If it has none.
    pub fn disk_mut(&mut self, node: usize) -> &mut Disk {
        self.sim.disks.get_mut(&place(node)).unwrap()
    }

    /// Counters of a node's tiers.
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    pub fn tiers(&self, node: usize) -> CacheTiersStatus {
        self.live(node).status().cache_tiers.unwrap()
    }
}
