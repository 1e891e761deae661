//! Mistakes that are made on purpose: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A block whose memory is given to somebody keeps the name of what it held.
    StaleName,
    /// A block that several have is free when one of them gives it back.
    SharedFreed,
    /// A block that several have is handed over as if its owner were the only one.
    SharedHandedOver,
}
