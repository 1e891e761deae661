//! Any bytes as a GGUF file: no panic, tensors within the file, and errors that name it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = lagoon_model::fuzz::gguf::read(data);
});
