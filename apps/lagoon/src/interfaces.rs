//! Network interfaces as the kernel describes them, and their distance to a device on the PCI bus.

use lagoon_backend::PciAddress;
use std::fmt;
use std::net::IpAddr;
use std::path::{Component, Path};

/// Where the kernel describes devices (sysfs).
pub(crate) const SYSFS: &str = "/sys";
/// Maximum depth of lower interfaces: a VLAN on a bond on a card is three.
const LOWER_MAX: u32 = 4;

/// PCI location of a device: the root complex, the bridges that lead to it, outermost first, and itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    path: Vec<String>,
    /// NUMA node, if the system has several.
    node: Option<u32>,
}

/// Nearness of a network card to a device, farthest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    Any,
    SameNode,
    SameRoot,
    /// Below a common PCI switch: number of bridges shared.
    SameSwitch(usize),
}

impl fmt::Display for Nearness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "not near the device",
            Self::SameNode => "on the device's NUMA node",
            Self::SameRoot => "at the device's PCI root",
            Self::SameSwitch(_) => "behind the device's PCI switch",
        })
    }
}

impl Place {
    pub(crate) fn nearness(&self, other: &Self) -> Nearness {
        let shared = self.path.iter().zip(&other.path).take_while(|(a, b)| a == b).count();
        match shared {
            0 if self.node.is_some() && self.node == other.node => Nearness::SameNode,
            0 => Nearness::Any,
            1 => Nearness::SameRoot,
            bridges => Nearness::SameSwitch(bridges - 1),
        }
    }

    /// Location of a device directory, with links resolved; `None` if it is on no PCI bus.
    fn of(directory: &Path) -> Option<Self> {
        let directory = directory.canonicalize().ok()?;
        let is_pci = |part: &str| part.parse::<PciAddress>().is_ok();
        // Directories below the PCI function (`virtio0`, say) are not part of the path.
        let own = directory.ancestors().find(|at| at.file_name().and_then(|name| name.to_str()).is_some_and(is_pci))?;
        let names = own.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let path = names.skip_while(|name| !name.starts_with("pci")).map(str::to_owned).collect();
        // The kernel writes -1 if there is only one node.
        let node = read(&own.join("numa_node")).and_then(|text| text.parse().ok());
        Some(Self { path, node })
    }

    /// Location of a PCI function.
    pub(crate) fn of_pci(sysfs: &Path, address: PciAddress) -> Option<Self> {
        Self::of(&sysfs.join("bus/pci/devices").join(address.to_string()))
    }

    pub(crate) fn node(&self) -> Option<u32> {
        self.node
    }
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) up: bool,
    /// Speed in megabits per second, if reported.
    pub(crate) megabits: Option<u64>,
    /// Locations of its cards: none for a virtual interface, several for a bond.
    pub(crate) places: Vec<Place>,
    /// Addresses that others on its network can reach.
    pub(crate) addresses: Vec<IpAddr>,
}

impl Interface {
    /// Its first address of the family of `like`.
    pub(crate) fn address(&self, like: IpAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == like.is_ipv4())
    }

    /// Nearness of its nearest card.
    pub(crate) fn nearness(&self, device: &Place) -> Option<Nearness> {
        self.places.iter().map(|place| place.nearness(device)).max()
    }
}

fn read(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

fn places(network: &Path, name: &str, depth: u32) -> Vec<Place> {
    let own = network.join(name);
    if let Some(place) = Place::of(&own.join("device")) {
        return vec![place];
    }
    if depth == 0 {
        return Vec::new();
    }
    let lower = std::fs::read_dir(own).into_iter().flatten().filter_map(|entry| {
        let name = entry.ok()?.file_name();
        Some(name.to_str()?.strip_prefix("lower_")?.to_owned())
    });
    lower.flat_map(|lower| places(network, &lower, depth - 1)).collect()
}

/// The interfaces in `sysfs`, by name, with their `addresses`.
pub(crate) fn interfaces(sysfs: &Path, addresses: &[(String, IpAddr)]) -> Vec<Interface> {
    let network = sysfs.join("class/net");
    let describe = |name: String| {
        let own = network.join(&name);
        let is = |file: &str, value: &str| read(&own.join(file)).as_deref() == Some(value);
        Interface {
            // Some drivers report only the carrier.
            up: is("operstate", "up") || is("operstate", "unknown") && is("carrier", "1"),
            megabits: read(&own.join("speed")).and_then(|text| text.parse().ok()).filter(|megabits| *megabits > 0),
            places: places(&network, &name, LOWER_MAX),
            addresses: addresses.iter().filter(|(of, _)| *of == name).map(|(_, address)| *address).collect(),
            name,
        }
    };
    let names = std::fs::read_dir(&network).into_iter().flatten();
    let mut found: Vec<Interface> =
        names.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).map(describe).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// This machine's reachable addresses, by interface.
pub(crate) fn addresses() -> std::io::Result<Vec<(String, IpAddr)>> {
    let reachable = |address: &IpAddr| match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    let all = if_addrs::get_if_addrs()?.into_iter().map(|interface| (interface.name.clone(), interface.ip()));
    Ok(all.filter(|(_, address)| reachable(address)).collect())
}

#[cfg(all(test, target_os = "linux"))]
#[path = "interfaces_tests.rs"]
pub(crate) mod tests;
