//! Connecting a relay with the members behind it (docs/adr/0039).

use prost::Message;

/// Debtor to relay: creditors beside it to connect to, so that it can relay queries to them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RelayMembers {
    #[prost(message, repeated, tag = "1")]
    pub members: Vec<RelayMember>,
}

/// Creditor beside a relay.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RelayMember {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// Address at which it accepts connections.
    #[prost(string, tag = "2")]
    pub quic_addr: String,
}
