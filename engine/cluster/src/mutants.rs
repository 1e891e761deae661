//! Mistakes that are made on purpose, to prove that the simulator's checkers see them.
//!
//! They are compiled in with the feature `mutants` alone, which no production build has: without it [`is`] is `false`
//! at compile time and every hook vanishes. With it a mutant is chosen per thread, and none is by default.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A creditor grants blocks of a lease that stands once more.
    DoubleGrant,
    /// A debtor takes a release for confirmed as soon as it is sent.
    ReleaseUnconfirmed,
    /// A creditor serves whom it lends to, whatever lease and epoch are named.
    EpochUnchecked,
    /// A debtor frees a block that moves when its copy is verified, before its table points to the copy.
    FreedBeforeSwitched,
    /// A creditor does not tell that a block that moves there is sealed.
    SealUntold,
    /// A debtor does not wait for that: it switches when it has sent the seal.
    SealUnawaited,
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
