//! Any bytes as a stream of any class: no panic, and accepted frames survive a round trip.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    lagoon_wire::fuzz::stream(data);
});
