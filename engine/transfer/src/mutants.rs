//! Deliberate bugs: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A reader completes a request when its last read is queued.
    CompleteBeforeLast,
    /// A reader accepts any acknowledgement for its oldest COMPLETE.
    AckUndeduped,
    /// A reader releases a request's memory while reads into it are in progress.
    ReleasedUnderReads,
    /// A reader does not recover the credits of a lost path.
    CreditLost,
    /// A reader ignores checks of arrived blocks.
    CheckIgnored,
    /// A writer serves reads of an earlier connection.
    EpochUnchecked,
    /// A writer frees a completed export again when its lease ends.
    FreedTwice,
    /// A writer frees an export while it serves reads of it.
    FreedUnderReads,
    /// A writer executes a COMPLETE with any sequence number.
    CompleteOutOfOrder,
}
