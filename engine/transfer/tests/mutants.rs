//! Mistakes made on purpose are found, each within a bounded number of seeds; the same seeds without it are fine
//! (`simulator.rs` runs them). `cargo test -p lagoon-transfer --features mutants --test mutants`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests print what they found")]

mod sim;

use lagoon_transfer::mutants::{Mutant, choose};

/// Seeds in which a mistake must be found.
const SEEDS: u64 = 500;

/// Finds a mistake, and how it shows.
fn hunt(mutant: Mutant) -> String {
    std::panic::set_hook(Box::new(|_| {}));
    for seed in 100_000..100_000 + SEEDS {
        choose(Some(mutant));
        let result = std::panic::catch_unwind(|| sim::World::new(seed, true).run());
        choose(None);
        if let Err(panic) = result {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
            println!("{mutant:?}: seed {seed}: {text}");
            sim::World::new(seed, true).run();
            return text;
        }
    }
    panic!("{mutant:?} was not found in {SEEDS} seeds");
}

/// Each mistake, and a word of the checker that must find it (empty: any).
#[test]
fn mistakes_are_found() {
    for (mutant, word) in [
        (Mutant::CompleteBeforeLast, "completed before its last transfer"),
        (Mutant::AckUndeduped, ""),
        (Mutant::ReleasedUnderReads, ""),
        (Mutant::CreditLost, ""),
        (Mutant::CheckIgnored, "bytes differ"),
        (Mutant::EpochUnchecked, "earlier connection"),
        (Mutant::FreedTwice, "freed once"),
        (Mutant::FreedUnderReads, "while it was being read"),
        (Mutant::CompleteOutOfOrder, "go back"),
    ] {
        let found = hunt(mutant);
        assert!(found.contains(word), "{mutant:?} was found by another checker: {found}");
    }
}
