//! Slot numbers of a KV store and the memory behind them.

/// The rBlocks of a KV store. Slot `s` belongs to the rBlock address `s / block_tokens`.
///
/// Without virtual memory there are as many addresses as blocks ([`KvSpace::flat`]). A device that maps memory behind
/// addresses (vAttention) has more addresses than blocks: first the **address rows**, one per sequence with KV here (the
/// paper's request ids), in which the sequence's rBlock `i` lies at address `row * row_blocks + i`, so that consecutive
/// tokens are one run in any physical memory; then **loose** addresses, for lent blocks and for sequences without a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpace {
    /// Tokens of an rBlock.
    pub block_tokens: u32,
    /// rBlocks of memory.
    pub blocks: u32,
    /// Address rows; 0 without virtual memory.
    pub rows: u32,
    /// rBlocks of an address row: those of the longest sequence.
    pub row_blocks: u32,
    /// Loose rBlock addresses, which follow the rows; at least `blocks`.
    pub loose_blocks: u32,
}

impl KvSpace {
    /// A space without virtual memory: every address is a block.
    #[must_use]
    pub const fn flat(blocks: u32, block_tokens: u32) -> Self {
        Self { block_tokens, blocks, rows: 0, row_blocks: 0, loose_blocks: blocks }
    }

    /// Adds `rows` address rows of `row_blocks` rBlocks, and `2 * blocks` loose addresses.
    #[must_use]
    pub const fn with_rows(self, rows: u32, row_blocks: u32) -> Self {
        Self { rows, row_blocks, loose_blocks: self.blocks.saturating_mul(2), ..self }
    }

    /// Number of rBlock addresses; `None` if their slots do not fit `u32` (`u32::MAX` means no slot).
    #[must_use]
    pub fn addresses(&self) -> Option<u32> {
        let blocks = self.rows.checked_mul(self.row_blocks)?.checked_add(self.loose_blocks)?;
        blocks.checked_mul(self.block_tokens).filter(|slots| *slots < u32::MAX).map(|_| blocks)
    }

    /// Number of slots.
    ///
    /// # Panics
    /// If [`KvSpace::addresses`] is `None`.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.addresses().expect("slots are numbered by u32") as usize * self.block_tokens as usize
    }
}
