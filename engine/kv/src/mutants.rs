//! Mistakes that are made on purpose: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A block whose memory is given to somebody keeps the name of what it held.
    StaleName,
}
