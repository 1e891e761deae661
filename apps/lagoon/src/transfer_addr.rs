//! Address of an instance's KV transfer endpoint: of several network cards the one next to its device (KVDirect, §4.2).
//!
//! The endpoint accepts readers, and the instance's own reads leave from it.

use crate::interfaces::{self, Interface, Nearness, Place, SYSFS};
use anyhow::Context;
use lagoon_backend::PciAddress;
use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::str::FromStr;

/// Value of `--transfer-interface`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum InterfaceArg {
    /// The one that is nearest to the device, where there are several.
    #[default]
    Auto,
    /// Whichever has the address of `--transfer-quic` or `--quic`.
    None,
    Named(String),
}

impl FromStr for InterfaceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("a network interface's name, auto or none".to_owned()),
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            name => Ok(Self::Named(name.to_owned())),
        }
    }
}

/// Configured addresses that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Where peers are accepted.
    pub(crate) quic: SocketAddr,
    /// The address for peers, if another.
    pub(crate) advertise: Option<SocketAddr>,
    /// `--transfer-quic`.
    pub(crate) transfer: Option<SocketAddr>,
}

/// The chosen endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) listen: SocketAddr,
    /// Address for readers, if not the one listened on; with the port listened on.
    pub(crate) advertise: Option<SocketAddr>,
    /// The interface, if one was chosen.
    pub(crate) interface: Option<String>,
    /// The reason, for operators.
    pub(crate) reason: String,
}

impl Wanted {
    fn base(&self) -> SocketAddr {
        self.transfer.unwrap_or(SocketAddr::new(self.quic.ip(), 0))
    }

    fn as_listened(&self, reason: impl Into<String>) -> Endpoint {
        Endpoint { listen: self.base(), advertise: self.advertise, interface: None, reason: reason.into() }
    }

    fn on(&self, interface: &Interface, address: IpAddr, reason: String) -> Endpoint {
        let listen = SocketAddr::new(address, self.base().port());
        Endpoint { listen, advertise: None, interface: Some(interface.name.clone()), reason }
    }
}

/// Chooses the endpoint on this machine, for an instance whose device is at `device`.
///
/// # Errors
/// If a named interface cannot be used.
pub(crate) fn choose(arg: &InterfaceArg, wanted: &Wanted, device: Option<PciAddress>) -> anyhow::Result<Endpoint> {
    let sysfs = Path::new(SYSFS);
    let found = || {
        let addresses = interfaces::addresses().context("ask for the addresses of network interfaces")?;
        anyhow::Ok(interfaces::interfaces(sysfs, &addresses))
    };
    match arg {
        InterfaceArg::None => Ok(wanted.as_listened("--transfer-interface none")),
        InterfaceArg::Named(name) => named(name, wanted, &found()?),
        InterfaceArg::Auto => {
            let Some(device) = device else { return Ok(wanted.as_listened("the device is on no PCI bus")) };
            Ok(auto(wanted, &found()?, Place::of_pci(sysfs, device).as_ref()))
        }
    }
}

fn named(name: &str, wanted: &Wanted, interfaces: &[Interface]) -> anyhow::Result<Endpoint> {
    let base = wanted.base().ip();
    let family = if base.is_ipv4() { "IPv4" } else { "IPv6" };
    let with_address: Vec<&str> =
        interfaces.iter().filter(|i| i.up && i.address(base).is_some()).map(|i| i.name.as_str()).collect();
    let hint = format!("hint: up, with an {family} address: {}", with_address.join(", "));
    let Some(interface) = interfaces.iter().find(|interface| interface.name == name) else {
        anyhow::bail!("--transfer-interface {name}: there is no such network interface\n{hint}");
    };
    anyhow::ensure!(interface.up, "--transfer-interface {name}: it is down\n{hint}");
    let Some(address) = interface.address(base) else {
        anyhow::bail!(
            "--transfer-interface {name}: it has no {family} address that others can reach, as --quic has\n{hint}"
        );
    };
    anyhow::ensure!(
        wanted.transfer.is_none_or(|addr| addr.ip().is_unspecified() || interface.addresses.contains(&addr.ip())),
        "--transfer-quic {base} is no address of --transfer-interface {name}\nhint: leave one of them out"
    );
    let address = if wanted.transfer.is_some() && !base.is_unspecified() { base } else { address };
    Ok(wanted.on(interface, address, format!("--transfer-interface {name}")))
}

/// Chooses automatically. `device` is `None` if the kernel does not know it.
fn auto(wanted: &Wanted, interfaces: &[Interface], device: Option<&Place>) -> Endpoint {
    let base = wanted.base().ip();
    let local = |address: IpAddr| interfaces.iter().any(|interface| interface.addresses.contains(&address));
    if wanted.transfer.is_some_and(|addr| !addr.ip().is_unspecified()) {
        return wanted.as_listened("--transfer-quic");
    }
    if wanted.quic.ip().is_loopback() {
        return wanted.as_listened("peers are on this host");
    }
    if wanted.advertise.is_some_and(|addr| !addr.ip().is_unspecified() && !local(addr.ip())) {
        return wanted.as_listened("--advertise names no address of this host");
    }
    let Some(device) = device else { return wanted.as_listened("the kernel does not know the device's PCI address") };
    let advertised = wanted.advertise.map_or(wanted.quic.ip(), |addr| addr.ip());
    match &ranked(interfaces, base, advertised, device)[..] {
        [] | [_] => wanted.as_listened("there are not several network cards to choose from"),
        [(interface, address, nearness), rest @ ..] => {
            let others: Vec<&str> = rest.iter().map(|(other, ..)| other.name.as_str()).collect();
            let reason = format!("{}; there are also {}", describe(interface, *nearness), others.join(", "));
            wanted.on(interface, *address, reason)
        }
    }
}

/// Interfaces with a card and an address of `family`, the best first: the nearest, then the fastest, then the one whose
/// address peers have anyway.
pub(crate) fn ranked<'a>(
    interfaces: &'a [Interface],
    family: IpAddr,
    advertised: IpAddr,
    device: &Place,
) -> Vec<(&'a Interface, IpAddr, Nearness)> {
    let usable = interfaces.iter().filter(|interface| interface.up);
    let row = |interface: &'a Interface| Some((interface, interface.address(family)?, interface.nearness(device)?));
    let mut rows: Vec<_> = usable.filter_map(row).collect();
    let order = |(interface, _, nearness): &(&'a Interface, IpAddr, Nearness)| {
        let fastest_first = Reverse(interface.megabits);
        (Reverse(*nearness), fastest_first, !interface.addresses.contains(&advertised), interface.name.clone())
    };
    rows.sort_by_cached_key(order);
    rows
}

/// Description such as `behind the device's PCI switch, 400000 Mb/s`.
pub(crate) fn describe(interface: &Interface, nearness: Nearness) -> String {
    let speed = interface.megabits.map_or_else(String::new, |megabits| format!(", {megabits} Mb/s"));
    format!("{nearness}{speed}")
}

#[cfg(all(test, target_os = "linux"))]
#[path = "transfer_addr_tests.rs"]
mod tests;
