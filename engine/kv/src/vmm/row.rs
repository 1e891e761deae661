//! Row: one range of virtual memory and its use.

use std::collections::BTreeSet;
use std::ops::Range;

/// Use of an address row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Unused; its memory stays mapped for the next request.
    Idle,
    Request,
    Lent,
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) used: Use,
    /// rBlocks of addresses, in every tensor; empty until first needed.
    pub(super) range: Range<u32>,
    /// End of the mapped places, counted from the range's first.
    pub(super) high: u32,
    /// Places that stay empty: moved away, behind the window, or recalled. Growth does not fill them.
    pub(super) vacant: BTreeSet<u32>,
    /// Tokens of the last step.
    pub(super) tokens: u32,
    /// Tokens at the front whose stripes other rows may map as well.
    pub(super) shared_tokens: u32,
    /// Of a lent row: position of the first token of each rBlock, `None` for a recalled one.
    pub(super) lent_rows: Vec<Option<u32>>,
}

impl Row {
    pub(super) fn new(range: Range<u32>) -> Self {
        Self {
            used: Use::Idle,
            range,
            high: 0,
            vacant: BTreeSet::new(),
            tokens: 0,
            shared_tokens: 0,
            lent_rows: Vec::new(),
        }
    }
}
