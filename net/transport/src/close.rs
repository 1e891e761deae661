//! Application codes with which connections are closed. WIRE.md lists them.

pub(crate) const BYE: u32 = 0;
pub(crate) const SESSION_OVER: u32 = 1;
pub(crate) const DUPLICATE: u32 = 2;
pub(crate) const STALE: u32 = 3;
pub(crate) const BAD_FRAME: u32 = 4;
pub(crate) const BAD_PREFACE: u32 = 5;
pub(crate) const LIMIT: u32 = 6;
pub(crate) const IDENTITY: u32 = 7;
