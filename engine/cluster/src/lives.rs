//! Incarnations of one process: each fence ends one, and the process continues with the next.

/// The next incarnation of a process after a fence: SplitMix64 of the last one, so that the gManager recognises the process.
#[must_use]
pub fn next_incarnation(incarnation: u64) -> u64 {
    let a = incarnation.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let a = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}
