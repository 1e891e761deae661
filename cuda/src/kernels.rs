//! The kernels of `cuda/kernels/`, seen from the host: names, parameters, launch geometry.
//!
//! Every kernel takes exactly one argument, a `repr(C)` structure passed by value, so that a launch is a name, a grid, a
//! block, bytes of dynamic shared memory and the bytes of one structure. Addresses are raw device addresses (`u64`; 0
//! where an optional array is absent), sizes and strides are in elements unless a name says bytes, and element types are
//! given by [`lagoon_types::DType::code`]. Structures here and in `cuda/kernels/shared/params.cuh` have the same fields in
//! the same order; their sizes are asserted on both sides.
//!
//! Conventions that every kernel relies on and the caller ensures:
//!
//! * activations are f32, rows `stride` elements apart;
//! * weights are `[rows][ld]` in their own type, where `ld` is [`weight_ld`] of the columns: rows start at multiples of 16
//!   bytes, and the elements between `cols` and `ld` are zero; packed ones lie as [`packed`] says;
//! * a KV store's layer is two planes, K and V, in which the element `d` of KV head `h` of slot `s` lies at `plane +
//!   (s * token_stride + h * head_stride + d) * size`. Kernels for tensor cores need planes and strides in multiples
//!   of 16 bytes, of 4 with KV in 8 bits ([`attention::KvView::is_aligned`]); others take any.
//!
//! A grid whose x dimension would be 0 must not be launched. A launch with more than [`SHARED_BYTES_DEFAULT`] bytes of
//! dynamic shared memory needs `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` raised first, once for each function, to
//! [`dynamic_shared_bytes_max`].

pub mod attention;
pub mod boxes;
pub mod experts;
pub mod latent;
pub mod linear;
pub mod packed;
pub mod pointwise;
pub mod sample;
pub mod tune;
pub mod weight;

mod names;
mod pieces;
mod shapes;

pub use names::{ALL, SM90, dynamic_shared_bytes_max};

/// The kernels' fatbin: machine code for compute capabilities 8.0 and 9.0, and PTX of 8.0 for later devices. Built by
/// `cargo xtask kernels`. A static: every use of a constant may be a copy of its own (5 MB each).
pub static FATBIN: &[u8] = include_bytes!("../kernels/kernels.fatbin");

/// Compiler of [`FATBIN`], for people.
pub const FATBIN_SOURCE: &str = "NVRTC 12.2.140";

/// Oldest CUDA version whose drivers load [`FATBIN`]: 1000 times the major and 10 times the minor version of NVRTC.
pub const CUDA_VERSION_MIN: u32 = 12_020;

/// Dynamic shared memory of a launch without opting in, in bytes.
pub const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// Threads of a warp.
pub const WARP: u32 = 32;

/// One kernel launch, without its stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch<P> {
    /// The function's name in the fatbin.
    pub name: &'static str,
    /// Blocks in x, y and z; none is 0.
    pub grid: [u32; 3],
    /// Threads in a block (x only).
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel's only argument.
    pub params: P,
}

impl<P> Launch<P> {
    /// A launch with a one-dimensional grid and no dynamic shared memory.
    const fn flat(name: &'static str, blocks: u32, block: u32, params: P) -> Self {
        Self { name, grid: [blocks, 1, 1], block, shared_bytes: 0, params }
    }
}

/// Row stride of a weight in elements: `cols` rounded up so that rows start at multiples of 16 bytes.
#[must_use]
pub const fn weight_ld(cols: usize, element_bytes: usize) -> usize {
    cols.next_multiple_of(16 / element_bytes)
}
