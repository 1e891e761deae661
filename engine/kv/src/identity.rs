//! Block hashes of the prefix chain: hashes over everything that a block's KV depends on (model, adapter, element type,
//! rotary embedding, and every token up to the block's end). Equal block hashes mean equal KV: the prefix cache's key.
//!
//! `root = H(model, adapter, dtype, rope, block_tokens)`, `id_i = H(id_{i-1}, tokens of block i)`: a chain, so a block
//! hash covers the whole prefix. Every field is length-prefixed: no two different inputs hash the same bytes.

use lagoon_types::{KvDType, ModelHash};

/// Inputs of the root of a model's prefix chain.
#[derive(Clone, Copy, Debug)]
pub struct IdentityRoot<'a> {
    pub model: ModelHash,
    /// Identity of a fine-tuning adapter, empty for none.
    pub adapter: &'a [u8],
    pub dtype: KvDType,
    /// Canonical description of the rotary embedding and its scaling.
    pub rope: &'a [u8],
    pub block_tokens: u32,
}

/// Block hash of the prefix chain: identity of one full block and all preceding tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

const ROOT_CONTEXT: &str = "lagoon 2026-11 block identity root";
const SALT_CONTEXT: &str = "lagoon 2026-11 block identity salt";
const BLOCK_CONTEXT: &str = "lagoon 2026-11 block identity";

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

impl BlockHash {
    /// Its first 8 bytes as a number, in the order of the hashes: stands for the hash where an error costs a look only.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        u64::from_be_bytes(self.0.first_chunk().copied().unwrap_or_default())
    }

    /// Block hashes as sent, 32 bytes each. `None` if the bytes are no whole number of them.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Vec<Self>> {
        let (hashes, rest) = bytes.as_chunks();
        rest.is_empty().then(|| hashes.iter().copied().map(Self).collect())
    }

    /// Inverse of [`BlockHash::read`].
    #[must_use]
    pub fn write(hashes: &[Self]) -> Vec<u8> {
        hashes.iter().flat_map(|hash| hash.0).collect()
    }

    /// The root of the chain, before the first block.
    #[must_use]
    pub fn root(root: &IdentityRoot<'_>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        field(&mut hasher, &root.model.0);
        field(&mut hasher, root.adapter);
        field(&mut hasher, &[root.dtype.code()]);
        field(&mut hasher, root.rope);
        field(&mut hasher, &root.block_tokens.to_le_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The root of a tenant's chain: no block hash under it is one under another salt. An empty salt changes nothing.
    #[must_use]
    pub fn salted(&self, salt: &str) -> Self {
        if salt.is_empty() {
            return *self;
        }
        let mut hasher = blake3::Hasher::new_derive_key(SALT_CONTEXT);
        field(&mut hasher, &self.0);
        field(&mut hasher, salt.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The block hash of the next block in the chain, which holds `tokens`.
    #[must_use]
    pub fn then(&self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(BLOCK_CONTEXT);
        field(&mut hasher, &self.0);
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        tokens.iter().for_each(|t| {
            hasher.update(&t.to_le_bytes());
        });
        Self(*hasher.finalize().as_bytes())
    }

    /// Block hashes of every full block of `tokens`; the partial tail has none.
    #[must_use]
    pub fn chain(root: &IdentityRoot<'_>, tokens: &[u32]) -> Vec<Self> {
        let mut last = Self::root(root);
        let full = tokens.chunks_exact(root.block_tokens as usize);
        full.map(|block| {
            last = last.then(block);
            last
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: IdentityRoot<'_> = IdentityRoot {
        model: ModelHash([7; 32]),
        adapter: b"",
        dtype: KvDType::F16,
        rope: b"theta=1e4",
        block_tokens: 4,
    };

    #[test]
    fn equal_prefixes_share_identities_and_a_change_spreads_forward() {
        let a = BlockHash::chain(&ROOT, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let b = BlockHash::chain(&ROOT, &[1, 2, 3, 4, 5, 6, 7, 0]);
        assert_eq!((a.len(), b.len()), (2, 2));
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        let c = BlockHash::chain(&ROOT, &[0, 2, 3, 4, 5, 6, 7, 8]);
        assert_ne!(a[1], c[1], "the same tokens after another prefix are another block");
    }

    #[test]
    fn a_salt_separates_chains() {
        let root = BlockHash::root(&ROOT);
        let salted = [root, root.salted("a"), root.salted("b"), root.then(&[]), root.salted("ab")];
        let distinct: std::collections::BTreeSet<_> = salted.iter().map(|root| root.then(&[1, 2, 3, 4])).collect();
        assert_eq!((distinct.len(), root.salted("")), (salted.len(), root));
    }

    #[test]
    fn everything_that_the_kv_depends_on_is_in_the_identity() {
        let base = BlockHash::root(&ROOT);
        let others = [
            IdentityRoot { model: ModelHash([8; 32]), ..ROOT },
            IdentityRoot { adapter: b"lora", ..ROOT },
            IdentityRoot { dtype: KvDType::BF16, ..ROOT },
            IdentityRoot { dtype: KvDType::Fp8, ..ROOT },
            IdentityRoot { rope: b"theta=5e5", ..ROOT },
            IdentityRoot { block_tokens: 8, ..ROOT },
            // Fields do not run into each other.
            IdentityRoot { adapter: b"theta", rope: b"=1e4", ..ROOT },
        ];
        for other in &others {
            assert_ne!(BlockHash::root(other), base, "{other:?}");
        }
    }
}
