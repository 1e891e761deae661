//! Deliberate bugs: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A block whose memory is given to a new owner keeps its old block hash.
    StaleHash,
    /// A shared block is free when one of its owners releases it.
    SharedFreed,
    /// A shared block is handed over as if it had one owner.
    SharedHandedOver,
}
