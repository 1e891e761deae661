//! Mistakes that are made on purpose, to prove that the simulator's checkers see them.
//!
//! They are compiled in with the feature `mutants` alone, which no production build has: without it [`is`] is `false`
//! at compile time and every hook vanishes. With it a mutant is chosen per thread, and none is by default.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A reader completes a request when its last read is queued.
    CompleteBeforeLast,
    /// A reader takes any acknowledgement for that of the COMPLETE it waits for.
    AckUndeduped,
    /// A reader gives a request's memory back while reads into it are under way.
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

#[cfg(feature = "mutants")]
mod chosen {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        static CHOSEN: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Makes a mistake on this thread from now on, or none.
    pub fn choose(mutant: Option<Mutant>) {
        CHOSEN.set(mutant);
    }

    /// Whether this mistake is made.
    #[must_use]
    pub fn is(mutant: Mutant) -> bool {
        CHOSEN.get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub use chosen::{choose, is};

/// Whether this mistake is made: never in this build.
#[cfg(not(feature = "mutants"))]
#[must_use]
pub const fn is(_mutant: Mutant) -> bool {
    false
}
