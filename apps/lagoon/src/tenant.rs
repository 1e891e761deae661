//! A tenant of the prefix cache as operators name it: the fingerprint of its key's name, and that of its `cache_salt`, eight hexadecimal
//! digits each. Neither tells a name or a salt.

use lagoon_kv::Tenant;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct TenantArg {
    pub(crate) key: u32,
    pub(crate) salt: u32,
}

impl TenantArg {
    /// The fingerprint of a key's name.
    pub(crate) fn key_of(name: &str) -> u32 {
        Tenant::fingerprint(name)
    }
}

impl fmt::Display for TenantArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{:08x}", self.key, self.salt)
    }
}

impl FromStr for TenantArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            let is_hex = part.len() == 8 && part.bytes().all(|c| c.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let both = text.split_once('-').and_then(|(key, salt)| Some((number(key)?, number(salt)?)));
        let (key, salt) =
            both.ok_or_else(|| format!("{text:?} is no tenant as `lagoon kv cache ls --tenants` shows it"))?;
        Ok(Self { key, salt })
    }
}

impl From<TenantArg> for String {
    fn from(tenant: TenantArg) -> Self {
        tenant.to_string()
    }
}

impl TryFrom<String> for TenantArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_read_as_it_is_written() {
        let tenant = TenantArg { key: 0xab, salt: 0xffff_ffff };
        assert_eq!(tenant.to_string(), "000000ab-ffffffff");
        assert_eq!("000000ab-ffffffff".parse(), Ok(tenant));
        for text in ["", "ab-ff", "000000ab-+fffffff", "000000ab", "000000ab-ffffffff-0"] {
            text.parse::<TenantArg>().unwrap_err();
        }
    }
}
