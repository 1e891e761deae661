//! Mutants: deliberate bugs that prove that a simulator's checkers detect them.

/// Declares a crate's mutants: the enum `Mutant`, and the function `is` that the crate's hooks call.
///
/// Only the crate's feature `mutants` compiles them in, and no production build enables it: without it `is` is `false`
/// at compile time and every hook vanishes. With it, `choose` selects one mutant per thread; the default is none.
#[macro_export]
macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// A deliberate bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant {
            $($(#[$doc])* $name,)+
        }

        #[cfg(feature = "mutants")]
        std::thread_local! {
            static CHOSEN: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
        }

        /// Selects the mutant of this thread, or none.
        #[cfg(feature = "mutants")]
        pub fn choose(mutant: Option<Mutant>) {
            CHOSEN.set(mutant);
        }

        /// Whether this thread selected the mutant.
        #[cfg(feature = "mutants")]
        #[must_use]
        pub fn is(mutant: Mutant) -> bool {
            CHOSEN.get() == Some(mutant)
        }

        /// Whether this thread selected the mutant: never in this build.
        #[cfg(not(feature = "mutants"))]
        #[must_use]
        pub const fn is(_mutant: Mutant) -> bool {
            false
        }
    };
}
