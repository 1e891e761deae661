//! Any bytes as a model.safetensors.index.json: no panic, and no file outside of the directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = lagoon_model::fuzz::index(data);
});
