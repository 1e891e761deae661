//! Address of a request's client, and the network that its shares are counted by.

use std::net::{IpAddr, Ipv6Addr};

/// Client address of a request; an extension of every request that [`serve`](crate::serve()) accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddr(pub IpAddr);

impl ClientAddr {
    /// What its share is counted by: one IPv6 client has a whole /64.
    pub(crate) fn network(self) -> IpAddr {
        match self.0.to_canonical() {
            IpAddr::V4(addr) => addr.into(),
            IpAddr::V6(addr) => Ipv6Addr::from_bits(addr.to_bits() & !u128::from(u64::MAX)).into(),
        }
    }
}
