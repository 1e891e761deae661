//! Mistakes that are made on purpose, to prove that a simulator's checkers see them.

/// Declares a crate's mistakes: `Mutant`, and `is`, which hooks ask.
///
/// They are compiled in with the crate's feature `mutants` alone, which no production build has: without it `is` is
/// `false` at compile time and every hook vanishes. With it a mutant is chosen per thread by `choose`, and none is by
/// default.
#[macro_export]
macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// A mistake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant {
            $($(#[$doc])* $name,)+
        }

        #[cfg(feature = "mutants")]
        std::thread_local! {
            static CHOSEN: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
        }

        /// Makes a mistake on this thread from now on, or none.
        #[cfg(feature = "mutants")]
        pub fn choose(mutant: Option<Mutant>) {
            CHOSEN.set(mutant);
        }

        /// Whether this mistake is made.
        #[cfg(feature = "mutants")]
        #[must_use]
        pub fn is(mutant: Mutant) -> bool {
            CHOSEN.get() == Some(mutant)
        }

        /// Whether this mistake is made: never in this build.
        #[cfg(not(feature = "mutants"))]
        #[must_use]
        pub const fn is(_mutant: Mutant) -> bool {
            false
        }
    };
}
