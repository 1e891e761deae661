//! Shared blocks: owners of a block's memory beyond its first owner, which the pool lists.
//!
//! Without virtual memory several owners share one block number. With it, each owner has an address of its own, and
//! several addresses map one memory. The pool keeps the first owners and the counts.
//!
//! Invariants: every entry has at least two owners, and every list has each owner or address once.

use super::Owner;
use lagoon_types::PhysBlock;
use std::collections::{BTreeMap, BTreeSet};

/// Index of shared blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Sharing {
    /// Further owners of a block number, beside the pool's.
    others: BTreeMap<PhysBlock, BTreeSet<Owner>>,
    /// Memory of each address that shares it, and the addresses of each memory.
    memory_of: BTreeMap<PhysBlock, u64>,
    addresses: BTreeMap<u64, BTreeSet<PhysBlock>>,
    memories: u64,
}

impl Sharing {
    /// Whether the block's memory has several owners.
    pub(super) fn is_shared(&self, block: PhysBlock) -> bool {
        self.others.contains_key(&block) || self.memory_of.contains_key(&block)
    }

    /// Whether `owner` is a further owner of this number.
    pub(super) fn has(&self, block: PhysBlock, owner: Owner) -> bool {
        self.others.get(&block).is_some_and(|others| others.contains(&owner))
    }

    /// Further owners of a number.
    pub(super) fn others(&self, block: PhysBlock) -> impl Iterator<Item = Owner> + '_ {
        self.others.get(&block).into_iter().flatten().copied()
    }

    /// Adds an owner to a number.
    pub(super) fn join(&mut self, block: PhysBlock, owner: Owner) {
        assert!(self.others.entry(block).or_default().insert(owner), "{owner:?} has {block} already");
    }

    /// Removes an owner from a shared number; `first` is the pool's owner. Returns the pool's new owner, `None` if the number
    /// is not shared by `owner`.
    pub(super) fn leave(&mut self, block: PhysBlock, owner: Owner, first: Owner) -> Option<Owner> {
        let others = self.others.get_mut(&block)?;
        let next = if first == owner { others.pop_first()? } else { others.remove(&owner).then_some(first)? };
        if others.is_empty() {
            self.others.remove(&block);
        }
        Some(next)
    }

    /// Replaces a further owner of a number; false if `from` is not one (the pool's first owner).
    pub(super) fn replace(&mut self, block: PhysBlock, from: Owner, to: Owner) -> bool {
        let replaced = self.others.get_mut(&block).is_some_and(|others| others.remove(&from));
        if replaced {
            self.join(block, to);
        }
        replaced
    }

    /// Removes and returns the further owners of a number.
    pub(super) fn forget_others(&mut self, block: PhysBlock) -> BTreeSet<Owner> {
        self.others.remove(&block).unwrap_or_default()
    }

    /// Records that address `to` maps the memory of address `from` as well.
    pub(super) fn map(&mut self, from: PhysBlock, to: PhysBlock) {
        self.memories += 1;
        let memory = *self.memory_of.entry(from).or_insert(self.memories);
        let addresses = self.addresses.entry(memory).or_default();
        addresses.extend([from, to]);
        assert_eq!(self.memory_of.insert(to, memory), None, "{to} has memory already");
    }

    /// Removes an address from its shared memory; false if no other address maps it.
    pub(super) fn unmap(&mut self, block: PhysBlock) -> bool {
        let Some(memory) = self.memory_of.remove(&block) else { return false };
        let addresses = self.addresses.get_mut(&memory).expect("its memory has addresses");
        addresses.remove(&block);
        if addresses.len() == 1 {
            addresses.iter().for_each(|last| _ = self.memory_of.remove(last));
            self.addresses.remove(&memory);
        }
        true
    }

    /// Memory of the index, in bytes; a B-tree's node is at least half full.
    pub(super) fn metadata_bytes(&self) -> usize {
        let owners: usize = self.others.values().map(BTreeSet::len).sum();
        let lists = self.others.len() * size_of::<(PhysBlock, BTreeSet<Owner>)>() + owners * size_of::<Owner>();
        let addresses = self.memory_of.len() * (size_of::<(PhysBlock, u64)>() + size_of::<PhysBlock>());
        2 * (lists + addresses + self.addresses.len() * size_of::<(u64, BTreeSet<PhysBlock>)>())
    }

    /// Counts the shares beyond each first owner, and checks the invariants. Linear.
    ///
    /// # Panics
    /// If lists are empty or disagree, or have an owner twice.
    pub(super) fn check(&self, owner: impl Fn(PhysBlock) -> Owner) -> u32 {
        for (block, others) in &self.others {
            assert!(!others.is_empty() && !others.contains(&Owner::Free), "{block} is shared, and has no other owner");
            assert!(owner(*block) != Owner::Free && !others.contains(&owner(*block)), "{block} has an owner twice");
        }
        let of = |(memory, addresses): (&u64, &BTreeSet<PhysBlock>)| {
            assert!(addresses.len() > 1, "memory {memory} is not shared");
            let listed = |a: &PhysBlock| self.memory_of.get(a) == Some(memory) && owner(*a) != Owner::Free;
            assert!(addresses.iter().all(listed), "an address of memory {memory} is free, or of another one");
            addresses.len() - 1
        };
        let mapped: usize = self.addresses.iter().map(of).sum();
        assert_eq!(mapped + self.addresses.len(), self.memory_of.len(), "an address shares no memory");
        let joined: usize = self.others.values().map(BTreeSet::len).sum();
        u32::try_from(joined + mapped).expect("holdings fit u32")
    }
}
