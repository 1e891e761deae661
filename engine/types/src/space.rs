//! How the slots of a KV store are numbered, and how much memory is behind them.

/// The rBlocks of a KV store. Slot `s` is in the rBlock of addresses `s / block_tokens`.
///
/// Where slots are memory, there are as many addresses as blocks ([`KvSpace::flat`]). A device that maps memory behind
/// addresses (vAttention) has more addresses than blocks: first the **rows**, one for each sequence that has KV here (the
/// paper's request ids), in which the sequence's rBlock `i` lies at address `row * row_blocks + i`, so that consecutive
/// tokens are one run whatever memory is behind them; then **loose** addresses, for lent rows and for what finds no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpace {
    /// Tokens of an rBlock.
    pub block_tokens: u32,
    /// rBlocks of memory.
    pub blocks: u32,
    /// 0 where slots are memory.
    pub rows: u32,
    /// rBlocks of a row: the longest sequence.
    pub row_blocks: u32,
    /// rBlocks of addresses behind the rows; at least `blocks`.
    pub loose_blocks: u32,
}

impl KvSpace {
    /// Slots that are memory.
    #[must_use]
    pub const fn flat(blocks: u32, block_tokens: u32) -> Self {
        Self { block_tokens, blocks, rows: 0, row_blocks: 0, loose_blocks: blocks }
    }

    /// With `rows` rows of `row_blocks` rBlocks, and room for lent rows in any order.
    #[must_use]
    pub const fn with_rows(self, rows: u32, row_blocks: u32) -> Self {
        Self { rows, row_blocks, loose_blocks: self.blocks.saturating_mul(2), ..self }
    }

    /// rBlocks of addresses, or `None` if their slots are not numbered by `u32` (whose last number means none).
    #[must_use]
    pub fn addresses(&self) -> Option<u32> {
        let blocks = self.rows.checked_mul(self.row_blocks)?.checked_add(self.loose_blocks)?;
        blocks.checked_mul(self.block_tokens).filter(|slots| *slots < u32::MAX).map(|_| blocks)
    }

    /// Slots that have addresses.
    ///
    /// # Panics
    /// If [`KvSpace::addresses`] is `None`.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.addresses().expect("slots are numbered by u32") as usize * self.block_tokens as usize
    }
}
