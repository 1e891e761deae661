//! XXH3-128 (seed 0), also fused with a copy: one pass over memory for both.
//!
//! A stripe of 64 bytes is loaded once, hashed in registers and stored from there; a hash after a copy would read
//! everything again. Long copies to aligned targets use non-temporal stores, so that the target's cache lines are not
//! read first. The hash is of the bytes stored, even if the source changes meanwhile.
//!
//! Non-temporal stores are visible to other threads and processes only after [`Xxh3::settle`] (a store fence, as slow
//! as copying some KiB): call it once before handing over many copies, not once a copy.
//!
//! The algorithm is that of the xxHash specification, version 0.8. Inputs of up to 240 bytes, a case of its own
//! there, go to the twox-hash crate; the tests compare all other lengths with that crate.

use crate::cpu::simd::Isa;
use std::{fmt, sync::OnceLock};
use twox_hash::XxHash3_128;

/// Bytes that are hashed at once.
const STRIPE: usize = 64;
/// Stripes after which the sums are scrambled: one for every word of the secret at which a stripe's part begins.
const BLOCK_STRIPES: usize = (SECRET.len() - STRIPE) / 8;
/// Longest input of the algorithm's short cases.
const SHORT: usize = 240;
/// Copies of at least so many bytes use non-temporal stores.
const STREAM_BYTES_MIN: usize = 2 << 10;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;

/// The sums' first values.
const START: [u64; 8] = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// The specification's default secret.
#[rustfmt::skip]
static SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];
/// Where the secret's parts begin: for scrambling, for the last stripe, and for merging the low and the high half.
const SCRAMBLE_AT: usize = SECRET.len() - STRIPE;
const LAST_AT: usize = SECRET.len() - STRIPE - 7;
const LOW_AT: usize = 11;
const HIGH_AT: usize = SECRET.len() - STRIPE - 11;

/// An XXH3-128 hash in progress.
#[derive(Clone)]
pub struct Xxh3 {
    isa: Isa,
    /// Bytes so far.
    bytes: u64,
    sums: [u64; 8],
    /// Stripes of the current block that are in `sums`.
    stripes: usize,
    /// The last stripe that is in `sums`.
    last: [u8; STRIPE],
    /// The bytes behind it: 1 to 64 once there are more than [`SHORT`] bytes, because the end is treated apart.
    rest: [u8; STRIPE],
    rest_len: usize,
    /// All bytes, while there are at most [`SHORT`].
    short: [u8; SHORT],
    /// Total bytes announced by [`Self::begin`], or 0; and the hash if all came in one call.
    expected: u64,
    whole: Option<u128>,
    /// Non-temporal stores were made since the last [`Self::settle`].
    unsettled: bool,
}

impl Default for Xxh3 {
    fn default() -> Self {
        // Asked once: a hash may be as short as a block of 4 KiB.
        static BEST: OnceLock<Isa> = OnceLock::new();
        Self::of(*BEST.get_or_init(Isa::best))
    }
}

impl fmt::Debug for Xxh3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Xxh3").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Xxh3 {
    /// Longest input of the algorithm's short cases, in bytes; the host hashes those for a device.
    pub const SHORT: usize = SHORT;

    /// The hash of at most [`Self::SHORT`] bytes.
    ///
    /// # Panics
    /// If there are more.
    #[must_use]
    pub fn short(bytes: &[u8]) -> u128 {
        assert!(bytes.len() <= SHORT, "a short input");
        XxHash3_128::oneshot(bytes)
    }

    /// The secret and the sums' first values, for kernels that hash.
    #[must_use]
    pub fn tables() -> (&'static [u8; 192], [u64; 8]) {
        (&SECRET, START)
    }

    /// A hash that uses this instruction set.
    ///
    /// # Panics
    /// If this processor lacks it.
    #[must_use]
    pub fn with(isa: Isa) -> Self {
        assert!(isa.is_supported(), "{isa} on this processor");
        Self::of(isa)
    }

    fn of(isa: Isa) -> Self {
        let (last, rest, short) = ([0; STRIPE], [0; STRIPE], [0; SHORT]);
        let (expected, whole) = (0, None);
        Self {
            isa: isa.base(),
            bytes: 0,
            sums: START,
            stripes: 0,
            last,
            rest,
            rest_len: 0,
            short,
            expected,
            whole,
            unsettled: false,
        }
    }

    /// Starts a hash of `bytes` bytes in total. Faster than [`Self::reset`] if all bytes come in one call.
    pub fn begin(&mut self, bytes: u64) {
        self.reset();
        self.expected = bytes;
    }

    /// Starts a new hash. Copies made so far are as settled as before.
    pub fn reset(&mut self) {
        (self.expected, self.whole) = (0, None);
        (self.bytes, self.sums, self.stripes, self.rest_len) = (0, START, 0, 0);
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        // SAFETY: the source is a slice, nothing is stored.
        unsafe { self.advance(bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) };
    }

    /// Waits until all copies are visible to other threads and processes (store fence). Also called on drop.
    pub fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: every processor of this architecture has it; it touches no memory.
            unsafe {
                std::arch::x86_64::_mm_sfence();
            }
        }
    }

    /// Hashes the next bytes and copies them to `target`; other threads may read it after [`Self::settle`].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&mut self, source: &[u8], target: &mut [u8]) {
        assert_eq!(source.len(), target.len(), "a copy has its source's length");
        // SAFETY: both are slices of this length, one of them exclusive.
        unsafe { self.advance(source.as_ptr(), target.as_mut_ptr(), source.len()) };
    }

    /// The next `bytes` bytes, at `from`; they are copied to `to` unless that is null. Every byte is read once.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for so many bytes, and they do not overlap.
    pub(crate) unsafe fn advance(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        assert!(self.whole.is_none(), "more bytes than were expected");
        let before = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        self.bytes += bytes as u64;
        if before == 0 && self.bytes == self.expected && bytes > SHORT && bytes.is_multiple_of(STRIPE) {
            // SAFETY: so many stripes are within both memories, by the caller's promise.
            unsafe { self.add(from, to, bytes / STRIPE, true) };
            self.whole = Some(digest(&self.sums, self.bytes));
            return;
        }
        if self.bytes <= SHORT as u64 {
            // SAFETY: there is room for SHORT bytes; the rest is the caller's promise.
            unsafe { take(from, to, &mut self.short[before..before + bytes]) };
            return;
        }
        if self.rest_len == 0 && before > 0 {
            let short = self.short;
            // SAFETY: an array, of which `before` bytes are set; nothing is stored.
            unsafe { self.feed(short.as_ptr(), std::ptr::null_mut(), before) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.feed(from, to, bytes) };
    }

    /// As [`Self::advance`], for at least one byte of an input that is not short.
    unsafe fn feed(&mut self, mut from: *const u8, mut to: *mut u8, mut bytes: usize) {
        // Moves on in both memories.
        macro_rules! step {
            ($count:expr) => {
                from = from.wrapping_add($count);
                to = if to.is_null() { to } else { to.wrapping_add($count) };
                bytes -= $count;
            };
        }
        if self.rest_len > 0 {
            let count = bytes.min(STRIPE - self.rest_len);
            // SAFETY: `count` bytes are within both memories, by the caller's promise.
            unsafe { take(from, to, &mut self.rest[self.rest_len..self.rest_len + count]) };
            self.rest_len += count;
            step!(count);
            if bytes == 0 {
                return;
            }
            self.last = self.rest;
            self.add_last();
        }
        // At least one byte stays behind, and the last stripe before it is kept.
        let whole = (bytes - 1) / STRIPE;
        if whole > 1 {
            // SAFETY: `whole` stripes are within both memories.
            unsafe { self.add(from, to, whole - 1, false) };
            step!((whole - 1) * STRIPE);
        }
        if whole > 0 {
            // SAFETY: another stripe is within both memories.
            unsafe { take(from, to, &mut self.last) };
            step!(STRIPE);
            self.add_last();
        }
        // SAFETY: `bytes`, which is 1 to 64, are left in both memories.
        unsafe { take(from, to, &mut self.rest[..bytes]) };
        self.rest_len = bytes;
    }

    fn add_last(&mut self) {
        let last = self.last;
        // SAFETY: an array of one stripe; nothing is stored.
        unsafe { self.add(last.as_ptr(), std::ptr::null_mut(), 1, false) };
    }

    /// Adds whole stripes, and copies them. `end`: the last one is the input's.
    ///
    /// # Safety
    /// As [`Self::advance`], for `count` stripes.
    unsafe fn add(&mut self, from: *const u8, to: *mut u8, count: usize, end: bool) {
        let place = match to {
            _ if to.is_null() => Place::Nowhere,
            _ if count * STRIPE >= STREAM_BYTES_MIN && to.align_offset(STRIPE) == 0 => {
                self.unsettled = true;
                Place::PastCaches
            }
            _ => Place::Caches,
        };
        let (sums, mut at) = (&mut self.sums, self.stripes);
        // SAFETY: the processor has the instruction set (`with`), the memories are the caller's promise, streamed
        // targets are aligned, and fewer than BLOCK_STRIPES stripes are in the current block.
        unsafe {
            match (self.isa, place) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Place::Nowhere) => x86::avx512::<0>(sums, &mut at, from, to, count, end),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Place::Caches) => x86::avx512::<1>(sums, &mut at, from, to, count, end),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Place::PastCaches) => x86::avx512::<2>(sums, &mut at, from, to, count, end),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Place::Nowhere) => x86::avx2::<0>(sums, &mut at, from, to, count, end),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Place::Caches) => x86::avx2::<1>(sums, &mut at, from, to, count, end),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Place::PastCaches) => x86::avx2::<2>(sums, &mut at, from, to, count, end),
                _ => portable(sums, &mut at, from, to, count, end),
            }
        }
        self.stripes = at;
    }

    /// The hash of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u128 {
        if let Some(whole) = self.whole {
            return whole;
        }
        if self.bytes <= SHORT as u64 {
            let bytes = usize::try_from(self.bytes).unwrap_or(SHORT);
            return XxHash3_128::oneshot(&self.short[..bytes]);
        }
        let mut end = [0; STRIPE];
        let (before, behind) = end.split_at_mut(STRIPE - self.rest_len);
        before.copy_from_slice(&self.last[self.rest_len..]);
        behind.copy_from_slice(&self.rest[..self.rest_len]);
        let mut sums = self.sums;
        add_stripe(&mut sums, &end, LAST_AT);
        digest(&sums, self.bytes)
    }
}

impl Drop for Xxh3 {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Destination of stripes.
enum Place {
    Nowhere,
    Caches,
    PastCaches,
}

/// Reads bytes once, into `kept`, and stores them from there.
///
/// # Safety
/// As [`Xxh3::advance`], for as many bytes as `kept` has.
unsafe fn take(from: *const u8, to: *mut u8, kept: &mut [u8]) {
    // SAFETY: the caller's promise; `kept` is a slice of ours, which overlaps neither.
    unsafe {
        std::ptr::copy_nonoverlapping(from, kept.as_mut_ptr(), kept.len());
        if !to.is_null() {
            std::ptr::copy_nonoverlapping(kept.as_ptr(), to, kept.len());
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn add_stripe(sums: &mut [u64; 8], stripe: &[u8; STRIPE], secret_at: usize) {
    for lane in 0..8 {
        let data = word(stripe, lane * 8);
        let key = data ^ word(&SECRET, secret_at + lane * 8);
        sums[lane ^ 1] = sums[lane ^ 1].wrapping_add(data);
        sums[lane] = sums[lane].wrapping_add((key & 0xffff_ffff).wrapping_mul(key >> 32));
    }
}

fn scramble(sums: &mut [u64; 8]) {
    for (lane, sum) in sums.iter_mut().enumerate() {
        *sum = (*sum ^ (*sum >> 47) ^ word(&SECRET, SCRAMBLE_AT + lane * 8)).wrapping_mul(PRIME32_1);
    }
}

fn merge(sums: &[u64; 8], secret_at: usize, start: u64) -> u64 {
    let product = |pair: usize| {
        let [a, b] = [0, 1].map(|i| sums[pair * 2 + i] ^ word(&SECRET, secret_at + (pair * 2 + i) * 8));
        let product = u128::from(a) * u128::from(b);
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the product are folded")]
        let folded = product as u64 ^ (product >> 64) as u64;
        folded
    };
    let mut x = (0..4).fold(start, |sum, pair| sum.wrapping_add(product(pair)));
    x = (x ^ (x >> 37)).wrapping_mul(PRIME_MX1);
    x ^ (x >> 32)
}

/// The hash of `bytes` bytes, whose stripes are all in the sums.
fn digest(sums: &[u64; 8], bytes: u64) -> u128 {
    let low = merge(sums, LOW_AT, bytes.wrapping_mul(PRIME64_1));
    let high = merge(sums, HIGH_AT, !bytes.wrapping_mul(PRIME64_2));
    u128::from(high) << 64 | u128::from(low)
}

/// For any processor.
///
/// # Safety
/// As [`Xxh3::add`].
unsafe fn portable(sums: &mut [u64; 8], at: &mut usize, from: *const u8, to: *mut u8, count: usize, end: bool) {
    for stripe in 0..count {
        let mut kept = [0; STRIPE];
        let to = if to.is_null() { to } else { to.wrapping_add(stripe * STRIPE) };
        // SAFETY: the stripe is one of `count` that are within both memories.
        unsafe { take(from.wrapping_add(stripe * STRIPE), to, &mut kept) };
        if end && stripe + 1 == count {
            return add_stripe(sums, &kept, LAST_AT);
        }
        add_stripe(sums, &kept, *at * 8);
        *at += 1;
        if *at == BLOCK_STRIPES {
            scramble(sums);
            *at = 0;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The same with vectors. `PLACE`: 0 stores nothing, 1 stores, 2 stores past the caches (non-temporal).
    //!
    //! Every block is unsafe for the reasons that [`super::Xxh3::add`] names: the processor has the features, and the
    //! memories hold `count` stripes. Secrets of stripe `at`, below BLOCK_STRIPES, are within the secret.
    #![allow(clippy::undocumented_unsafe_blocks, reason = "one contract for both, stated above")]

    use super::{BLOCK_STRIPES, LAST_AT, PRIME32_1, SCRAMBLE_AT, SECRET, STRIPE};
    use std::arch::x86_64::*;

    /// Prefetch distance in bytes, further than the hardware prefetcher's, which stops at the end of a page.
    const AHEAD: usize = 1024;

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const PLACE: u8>(
        sums: &mut [u64; 8],
        at: &mut usize,
        mut from: *const u8,
        mut to: *mut u8,
        count: usize,
        end: bool,
    ) {
        unsafe {
            let mut sum = _mm512_loadu_si512(sums.as_ptr().cast());
            let add = |from: *const u8, to: *mut u8, secret: *const u8| {
                let data = _mm512_loadu_si512(from.cast());
                match PLACE {
                    1 => _mm512_storeu_si512(to.cast(), data),
                    2 => _mm512_stream_si512(to.cast(), data),
                    _ => {}
                }
                let key = _mm512_xor_si512(data, _mm512_loadu_si512(secret.cast()));
                let product = _mm512_mul_epu32(key, _mm512_srli_epi64::<32>(key));
                let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
                _mm512_add_epi64(product, swapped)
            };
            let mut count = count - usize::from(end);
            while count > 0 {
                let run = count.min(BLOCK_STRIPES - *at);
                let mut secret = SECRET.as_ptr().add(*at * 8);
                for _ in 0..run {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                    sum = _mm512_add_epi64(sum, add(from, to, secret));
                    (from, to) = (from.wrapping_add(STRIPE), to.wrapping_add(STRIPE));
                    secret = secret.wrapping_add(8);
                }
                (*at, count) = (*at + run, count - run);
                if *at == BLOCK_STRIPES {
                    let prime = _mm512_set1_epi64(PRIME32_1 as i64);
                    let key = _mm512_loadu_si512(SECRET.as_ptr().add(SCRAMBLE_AT).cast());
                    let mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64::<47>(sum)), key);
                    let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
                    sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64::<32>(high));
                    *at = 0;
                }
            }
            if end {
                sum = _mm512_add_epi64(sum, add(from, to, SECRET.as_ptr().add(LAST_AT)));
            }
            _mm512_storeu_si512(sums.as_mut_ptr().cast(), sum);
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<const PLACE: u8>(
        sums: &mut [u64; 8],
        at: &mut usize,
        mut from: *const u8,
        mut to: *mut u8,
        count: usize,
        end: bool,
    ) {
        unsafe {
            let mut sum = [0, 1].map(|half| _mm256_loadu_si256(sums.as_ptr().cast::<__m256i>().add(half)));
            let add = |sum: &mut [__m256i; 2], from: *const u8, to: *mut u8, secret: *const u8| {
                for (half, sum) in sum.iter_mut().enumerate() {
                    let data = _mm256_loadu_si256(from.cast::<__m256i>().add(half));
                    match PLACE {
                        1 => _mm256_storeu_si256(to.cast::<__m256i>().add(half), data),
                        2 => _mm256_stream_si256(to.cast::<__m256i>().add(half), data),
                        _ => {}
                    }
                    let key = _mm256_xor_si256(data, _mm256_loadu_si256(secret.cast::<__m256i>().add(half)));
                    let product = _mm256_mul_epu32(key, _mm256_srli_epi64::<32>(key));
                    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                    *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, swapped));
                }
            };
            let mut count = count - usize::from(end);
            while count > 0 {
                let run = count.min(BLOCK_STRIPES - *at);
                let mut secret = SECRET.as_ptr().add(*at * 8);
                for _ in 0..run {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                    add(&mut sum, from, to, secret);
                    (from, to) = (from.wrapping_add(STRIPE), to.wrapping_add(STRIPE));
                    secret = secret.wrapping_add(8);
                }
                (*at, count) = (*at + run, count - run);
                if *at == BLOCK_STRIPES {
                    let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
                    for (half, sum) in sum.iter_mut().enumerate() {
                        let key = _mm256_loadu_si256(SECRET.as_ptr().add(SCRAMBLE_AT).cast::<__m256i>().add(half));
                        let mixed = _mm256_xor_si256(_mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum)), key);
                        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                        *sum = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high));
                    }
                    *at = 0;
                }
            }
            if end {
                add(&mut sum, from, to, SECRET.as_ptr().add(LAST_AT));
            }
            for (half, sum) in sum.into_iter().enumerate() {
                _mm256_storeu_si256(sums.as_mut_ptr().cast::<__m256i>().add(half), sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn supported() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_supported())
    }

    fn content(bytes: usize) -> Vec<u8> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.to_le_bytes()[7]
        };
        (0..bytes).map(|_| next()).collect()
    }

    #[test]
    fn every_length_is_that_of_the_reference() {
        let all = content(5000);
        for isa in supported() {
            let mut hash = Xxh3::with(isa);
            for len in (0..2200).rev().chain([3071, 3072, 3073, 4095, 4096, 4097, 5000]) {
                hash.reset();
                hash.update(&all[..len]);
                let expected = XxHash3_128::oneshot(&all[..len]);
                assert_eq!(hash.finish(), expected, "{isa}, {len} bytes");
                // The same if the length is known before, whether they come at once or not.
                for cut in [len, len / 3] {
                    hash.begin(len as u64);
                    hash.update(&all[..cut]);
                    hash.update(&all[cut..len]);
                    assert_eq!(hash.finish(), expected, "{isa}, {len} bytes, known");
                }
            }
        }
    }

    /// Longer than what is copied past the caches, to targets of every alignment.
    #[test]
    fn what_is_hashed_is_what_is_copied() {
        let all = content(40_000);
        for isa in supported() {
            let parts = [(0, 40_000), (1, 32_768), (3, 8_191), (2, 4_096), (64, 4_096 + 64 + 1), (5, 241), (0, 64)];
            for ((start, len), known) in parts.into_iter().flat_map(|part| [(part, false), (part, true)]) {
                for shift in [0, 1, 32, 63] {
                    let mut memory = vec![0xaa; len + 2 * 128];
                    let at = memory.as_ptr().align_offset(64) + shift;
                    let mut hash = Xxh3::with(isa);
                    if known {
                        hash.begin(len as u64);
                    }
                    hash.copy(&all[start..start + len], &mut memory[at..at + len]);
                    assert!(memory[at..at + len] == all[start..start + len], "{isa}, {len} at {shift}");
                    assert!(memory[..at].iter().chain(&memory[at + len..]).all(|byte| *byte == 0xaa));
                    assert_eq!(hash.finish(), XxHash3_128::oneshot(&all[start..start + len]), "{isa}, {len}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_do_not_change_a_hash(cuts in prop::collection::vec((0usize..1500, any::<bool>()), 1..12)) {
            let all = content(cuts.iter().map(|(len, _)| len).sum());
            for isa in supported() {
                let mut hash = Xxh3::with(isa);
                let mut out = vec![0; all.len()];
                let mut at = 0;
                for (len, copied) in &cuts {
                    let range = at..at + len;
                    match copied {
                        true => hash.copy(&all[range.clone()], &mut out[range]),
                        false => hash.update(&all[range]),
                    }
                    at += len;
                    prop_assert_eq!(hash.finish(), XxHash3_128::oneshot(&all[..at]));
                }
                let mut at = 0;
                for (len, copied) in &cuts {
                    prop_assert!(!copied || out[at..at + len] == all[at..at + len]);
                    at += len;
                }
            }
        }
    }
}
