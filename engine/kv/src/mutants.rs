//! Deliberate bugs: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A block whose memory is given to a new owner keeps its old block hash.
    StaleHash,
    /// A shared block is free when one of its owners releases it.
    SharedFreed,
    /// A shared block is handed over as if it had one owner.
    SharedHandedOver,
    /// A copy of a block counts although the block got other content while it was read.
    StaleCopy,
}
