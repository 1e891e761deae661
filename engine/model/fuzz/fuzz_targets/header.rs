//! Any bytes as a safetensors file and as its header: no panic, and tensors within the file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = lagoon_model::fuzz::header(data);
});
