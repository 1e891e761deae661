//! Numbers of work on the device beside steps and of reads at creditors. Each names the machine that asked, so that a
//! report or a reply goes to that machine and to no other.

use lagoon_runner::RemoteTag;

/// The machine that asked the device for work beside steps; [`TagOwner::of`] tells it from a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TagOwner {
    /// A remote attention request or a read of a peer.
    Request,
    /// A seal tag of a lent rBlock.
    Seal,
    /// A block movement.
    Move,
    /// A copy of a block to or from a tier of the prefix cache.
    Tier,
}

impl TagOwner {
    const fn bits(self) -> u64 {
        match self {
            Self::Request => 0,
            Self::Seal => 1 << 62,
            Self::Move => 1 << 63,
            Self::Tier => 1 << 62 | 1 << 63,
        }
    }

    /// The owner of a tag.
    pub(crate) fn of(tag: RemoteTag) -> Self {
        let bits = tag.0 & (Self::Seal.bits() | Self::Move.bits());
        let owners = [Self::Request, Self::Seal, Self::Move, Self::Tier];
        owners.into_iter().find(|owner| owner.bits() == bits).expect("a tag has one owner")
    }
}

/// The machine that reads KV at a creditor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReadOwner {
    /// A step that fetches KV.
    Step,
    /// A block movement.
    Move,
}

/// A read of KV at a creditor, with the machine that asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadId {
    owner: ReadOwner,
    number: u64,
}

/// Set in the wire's form of a block movement's read.
const READ_OF_MOVE: u64 = 1 << 63;

impl ReadId {
    /// The machine that asked for it.
    pub(crate) fn owner(self) -> ReadOwner {
        self.owner
    }

    /// The id in a frame; never 0, which stands for a write or a seal.
    pub(crate) fn to_wire(self) -> u64 {
        match self.owner {
            ReadOwner::Step => self.number,
            ReadOwner::Move => self.number | READ_OF_MOVE,
        }
    }

    /// The read with this id in a frame, which may be a peer's invention; `None` for 0, a write or a seal.
    pub(crate) fn from_wire(id: u64) -> Option<Self> {
        let owner = if id & READ_OF_MOVE == 0 { ReadOwner::Step } else { ReadOwner::Move };
        (id != 0).then_some(Self { owner, number: id & !READ_OF_MOVE })
    }
}

/// Issues tags of work on the device, and ids of reads.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    /// Number of tags issued, by owner.
    taken: [u64; 4],
    /// Number of reads issued, of all owners.
    reads: u64,
}

impl Tags {
    /// A new tag of this owner.
    pub(crate) fn take(&mut self, owner: TagOwner) -> RemoteTag {
        let taken = &mut self.taken[owner as usize];
        *taken += 1;
        RemoteTag(owner.bits() | *taken)
    }

    /// A new read of this owner at a creditor.
    pub(crate) fn read(&mut self, owner: ReadOwner) -> ReadId {
        self.reads += 1;
        ReadId { owner, number: self.reads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_says_who_took_it() {
        let mut tags = Tags::default();
        for owner in [TagOwner::Request, TagOwner::Seal, TagOwner::Move, TagOwner::Tier, TagOwner::Request] {
            let (first, second) = (tags.take(owner), tags.take(owner));
            assert_eq!((TagOwner::of(first), TagOwner::of(second)), (owner, owner));
            assert_ne!(first, second);
        }
    }

    #[test]
    fn a_read_keeps_its_owner_on_the_wire() {
        let mut tags = Tags::default();
        for owner in [ReadOwner::Step, ReadOwner::Move, ReadOwner::Step] {
            let (first, second) = (tags.read(owner), tags.read(owner));
            assert_ne!(first.to_wire(), second.to_wire());
            assert_eq!(ReadId::from_wire(first.to_wire()), Some(first));
            assert_eq!((first.owner(), second.owner()), (owner, owner));
        }
        assert_eq!(ReadId::from_wire(0), None, "a write or a seal");
    }
}
