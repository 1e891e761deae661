//! Any bytes as a config.json: no panic, and errors that name file and field.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = lagoon_model::fuzz::config(data);
});
