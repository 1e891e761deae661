//! Block hashes of the prefix chain: hashes over everything that a block's KV depends on (model, adapter, element type,
//! rotary embedding, and every token up to the block's end). Equal block hashes mean equal KV: the prefix cache's key.
//!
//! `root = H(model, adapter, dtype, rope, block_tokens)`, `id_i = H(id_{i-1}, tokens of block i)`: a chain, so a block
//! hash covers the whole prefix. Every field is length-prefixed: no two different inputs hash the same bytes.
//!
//! The last 8 bytes of a block hash are its tenant's ([`Tenant`]), so that whoever holds a block knows whose it is: 24 bytes of the chain
//! tell blocks apart.

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

/// Whose block it is: fingerprints of the two parts of its salt, the name of an API key and `cache_salt`; 0 for an empty part. 32 bits
/// tell tenants apart for an operator, and are too few to tell a salt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant {
    pub key: u32,
    pub salt: u32,
}

/// Tenants by the parts of their salts; `None`: any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenants {
    pub key: Option<u32>,
    pub salt: Option<u32>,
}

/// Bytes of a block hash before its tenant.
const CHAIN_BYTES: usize = 24;
const TENANT_CONTEXT: &str = "lagoon 2026-11 tenant fingerprint";
const ROOT_CONTEXT: &str = "lagoon 2026-11 block identity root";
const SALT_CONTEXT: &str = "lagoon 2026-11 block identity salt";
const BLOCK_CONTEXT: &str = "lagoon 2026-11 block identity";

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

impl Tenant {
    /// The tenant of a salt: the name of a key, NUL, `cache_salt`; without a NUL `cache_salt` alone.
    #[must_use]
    pub fn of(salt: &str) -> Self {
        let (key, salt) = salt.split_once('\0').unwrap_or(("", salt));
        Self { key: Self::fingerprint(key), salt: Self::fingerprint(salt) }
    }

    /// The fingerprint of a part of a salt.
    #[must_use]
    pub fn fingerprint(part: &str) -> u32 {
        if part.is_empty() {
            return 0;
        }
        let hash = blake3::derive_key(TENANT_CONTEXT, part.as_bytes());
        u32::from_be_bytes(hash.first_chunk().copied().unwrap_or_default()).max(1)
    }

    fn bytes(self) -> [u8; 8] {
        (u64::from(self.key) << 32 | u64::from(self.salt)).to_be_bytes()
    }
}

impl Tenants {
    /// Whether a block is of one of them.
    #[must_use]
    pub fn have(&self, hash: &BlockHash) -> bool {
        let Tenant { key, salt } = hash.tenant();
        self.key.is_none_or(|of| of == key) && self.salt.is_none_or(|of| of == salt)
    }
}

impl BlockHash {
    /// Whose block it is.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        let [key, salt] = [CHAIN_BYTES, CHAIN_BYTES + 4].map(|at| {
            let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
            u32::from_be_bytes(bytes.copied().unwrap_or_default())
        });
        Tenant { key, salt }
    }

    fn with_tenant(digest: blake3::Hash, tenant: Tenant) -> Self {
        let mut bytes = *digest.as_bytes();
        bytes[CHAIN_BYTES..].copy_from_slice(&tenant.bytes());
        Self(bytes)
    }

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
        Self::with_tenant(hasher.finalize(), Tenant::default())
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
        Self::with_tenant(hasher.finalize(), Tenant::of(salt))
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
        Self::with_tenant(hasher.finalize(), self.tenant())
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
    fn a_block_tells_its_tenant_and_not_the_salt() {
        let root = BlockHash::root(&ROOT);
        let of = |salt: &str| root.salted(salt).then(&[1, 2, 3, 4]).then(&[5]).tenant();
        assert_eq!(of(""), Tenant::default());
        let [key, other, alone, both] = ["alice\0", "bob\0", "mine", "alice\0mine"].map(of);
        assert_eq!((key.salt, alone.key), (0, 0));
        assert_eq!((both.key, both.salt), (key.key, alone.salt));
        assert!(key.key != other.key && key.key != Tenant::fingerprint("mine") && key.key > 0);
        let block = root.salted("alice\0mine").then(&[1]);
        let has = |key, salt| Tenants { key, salt }.have(&block);
        assert!(has(None, None) && has(Some(key.key), None) && has(Some(key.key), Some(alone.salt)));
        assert!(!has(Some(other.key), None) && !has(Some(key.key), Some(0)));
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
