//! Panics of the code under test are findings: caught, with message and place, and not printed.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// The message of the panic that was caught on this thread.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
    static WATCHED: RefCell<bool> = const { RefCell::new(false) };
}

static HOOK: Once = Once::new();

/// Runs `f`; a panic becomes an error with its message and place.
pub(super) fn watch<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !WATCHED.with_borrow(|w| *w) {
                return usual(info);
            }
            CAUGHT.set(Some(info.to_string()));
        }));
    });
    WATCHED.set(true);
    // The state that the panic left behind is dropped with its world.
    let result = catch_unwind(AssertUnwindSafe(f));
    WATCHED.set(false);
    result.map_err(|_payload| CAUGHT.take().unwrap_or_else(|| "a panic without a message".to_owned()))
}
