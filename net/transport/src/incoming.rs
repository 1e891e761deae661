//! Who is let in to a handshake: bounds on all incoming ones and on those of each address: an IPv4 address, or a /64 network of
//! IPv6, as one host has at least that many.

use crate::TransportConfig;
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Counters of incoming connections by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IncomingStats {
    /// Sent back to show that their address is theirs (QUIC Retry).
    pub retried: u64,
    /// Turned away: too many at once, of all or of one address.
    pub turned_away: u64,
}

/// Decision on an incoming connection.
#[derive(Debug)]
pub(crate) enum Entry {
    Enter(Place),
    Retry,
    TurnAway,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    handshakes: usize,
    connections: usize,
}

#[derive(Debug, Default)]
struct Counts {
    handshakes: usize,
    /// Addresses with a handshake or a connection.
    by_address: BTreeMap<IpAddr, Count>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Door {
    counts: Mutex<Counts>,
    retried: AtomicU64,
    turned_away: AtomicU64,
}

/// One address's place: of a handshake, later of its connection. Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    door: Arc<Door>,
    address: IpAddr,
    connected: bool,
}

/// Whose an IP address counts as.
fn holder(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on a handshake. `proven`: the source address is validated; `may_retry`: a QUIC Retry may be sent to it.
    pub(crate) fn knock(
        self: &Arc<Self>,
        address: IpAddr,
        (proven, may_retry): (bool, bool),
        config: &TransportConfig,
    ) -> Entry {
        let address = holder(address);
        let mut counts = self.lock();
        if !proven && counts.handshakes >= config.handshakes_unproven_max {
            let (tally, entry) =
                if may_retry { (&self.retried, Entry::Retry) } else { (&self.turned_away, Entry::TurnAway) };
            tally.fetch_add(1, Relaxed);
            return entry;
        }
        let own = counts.by_address.get(&address).copied().unwrap_or_default();
        if counts.handshakes >= config.handshakes_max
            || own.handshakes >= config.handshakes_address_max
            || own.connections >= config.connections_address_max
        {
            self.turned_away.fetch_add(1, Relaxed);
            return Entry::TurnAway;
        }
        counts.handshakes = counts.handshakes.saturating_add(1);
        let own = counts.by_address.entry(address).or_default();
        own.handshakes = own.handshakes.saturating_add(1);
        Entry::Enter(Place { door: Arc::clone(self), address, connected: false })
    }

    pub(crate) fn stats(&self) -> IncomingStats {
        IncomingStats { retried: self.retried.load(Relaxed), turned_away: self.turned_away.load(Relaxed) }
    }

    fn leave(&self, address: IpAddr, connected: bool) {
        let mut counts = self.lock();
        if !connected {
            counts.handshakes = counts.handshakes.saturating_sub(1);
        }
        let Some(own) = counts.by_address.get_mut(&address) else { return };
        let of = if connected { &mut own.connections } else { &mut own.handshakes };
        *of = of.saturating_sub(1);
        if own.handshakes == 0 && own.connections == 0 {
            counts.by_address.remove(&address);
        }
    }
}

impl Place {
    /// The handshake is done, preface included: the place is that of a connection from now on.
    pub(crate) fn connect(&mut self) {
        let mut counts = self.door.lock();
        let own = counts.by_address.entry(self.address).or_default();
        own.handshakes = own.handshakes.saturating_sub(1);
        own.connections = own.connections.saturating_add(1);
        counts.handshakes = counts.handshakes.saturating_sub(1);
        self.connected = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.door.leave(self.address, self.connected);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One host has a whole /64 network of addresses: they share one count.
    #[test]
    fn addresses_of_one_ipv6_network_count_together() {
        let config = TransportConfig { handshakes_address_max: 2, ..TransportConfig::default() };
        let door = Arc::new(Door::default());
        let knock = |address: &str| door.knock(address.parse().unwrap(), (true, true), &config);
        let held = [knock("2001:db8:0:7::1"), knock("2001:db8:0:7:ffff::2")];
        assert!(held.iter().all(|entry| matches!(entry, Entry::Enter(_))), "{held:?}");
        assert!(matches!(knock("2001:db8:0:7::3"), Entry::TurnAway));
        let others = ["2001:db8:0:8::1", "192.0.2.1", "192.0.2.2"].map(knock);
        assert!(others.iter().all(|entry| matches!(entry, Entry::Enter(_))), "{others:?}");
        drop(held);
        assert!(matches!(knock("2001:db8:0:7::3"), Entry::Enter(_)));
    }
}
