//! What tests of the kernels share.

pub(crate) mod device;
pub(crate) mod shim;
