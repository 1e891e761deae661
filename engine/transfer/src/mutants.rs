//! Mistakes that are made on purpose: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A reader completes a request when its last read is queued.
    CompleteBeforeLast,
    /// A reader takes any acknowledgement for that of the COMPLETE it waits for.
    AckUndeduped,
    /// A reader gives a request's memory back while reads into it are in progress.
    ReleasedUnderReads,
    /// A reader does not get the credits of a lost path back.
    CreditLost,
    /// A reader believes what arrives.
    CheckIgnored,
    /// A writer serves reads of an earlier connection.
    EpochUnchecked,
    /// A writer frees an export that was completed once more when its lease ends.
    FreedTwice,
    /// A writer frees an export while reads of it are being served.
    FreedUnderReads,
    /// A writer carries a COMPLETE out whatever number it has.
    CompleteOutOfOrder,
}
