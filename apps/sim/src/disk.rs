//! The disk tier of a simulated process's prefix cache: it outlives the process, evicts by bytes, and has damage and
//! failures as a test asks for.

use lagoon_instance::{BlockKv, DiskEffect, DiskEvent, DiskLoss};
use lagoon_kv::{BlockHash, Tier};

/// One directory.
#[derive(Debug)]
pub struct Disk {
    blocks: Tier<BlockKv>,
    /// Its next so many reads find damage.
    pub damaged_reads: u32,
    /// It takes no writes, as a full file system.
    pub is_full: bool,
}

impl Disk {
    /// An empty one for `bytes` of KV.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { blocks: Tier::new(bytes), damaged_reads: 0, is_full: false }
    }

    /// What a new process finds.
    #[must_use]
    pub fn found(&self) -> DiskEvent {
        DiskEvent::Found { hashes: self.blocks.hashes().copied().collect(), bytes: self.blocks.bytes() }
    }

    /// Carries out an effect, at once.
    pub fn carry_out(&mut self, effect: DiskEffect) -> DiskEvent {
        match effect {
            DiskEffect::Write { hash, .. } if self.is_full => {
                let (result, bytes) = (Err(DiskLoss::Failed), None);
                DiskEvent::Written { hash, result, evicted: Vec::new(), bytes }
            }
            DiskEffect::Write { hash, kv } => {
                let size = kv.iter().map(|layer| layer.len() as u64).sum();
                let mut evicted = self.blocks.insert(hash, size, kv).into_iter().map(|(of, _)| of).collect::<Vec<_>>();
                let before = evicted.len();
                evicted.retain(|of| *of != hash);
                let result = if evicted.len() == before { Ok(()) } else { Err(DiskLoss::Failed) };
                DiskEvent::Written { hash, result, evicted, bytes: Some(self.blocks.bytes()) }
            }
            DiskEffect::Drop { tenants } => {
                let gone: Vec<BlockHash> = self.blocks.hashes().filter(|hash| tenants.have(hash)).copied().collect();
                gone.iter().for_each(|hash| drop(self.blocks.remove(hash)));
                DiskEvent::Dropped { left: self.blocks.hashes().copied().collect(), bytes: self.blocks.bytes() }
            }
            DiskEffect::Read { read, hash } => {
                self.blocks.touch(&hash);
                let result = if self.blocks.contains(&hash) && self.damaged_reads > 0 {
                    self.damaged_reads -= 1;
                    self.blocks.remove(&hash);
                    Err(DiskLoss::Damaged)
                } else {
                    self.blocks.get(&hash).cloned().ok_or(DiskLoss::Missing)
                };
                DiskEvent::Read { read, result }
            }
        }
    }
}
