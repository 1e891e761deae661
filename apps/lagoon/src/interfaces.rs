//! Network interfaces as the kernel describes them, and how near each is to a device on the PCI bus.

use lagoon_backend::PciAddress;
use std::fmt;
use std::net::IpAddr;
use std::path::{Component, Path};

/// Where the kernel describes devices.
pub(crate) const SYSFS: &str = "/sys";
/// Interfaces below an interface that are looked at: a VLAN on a bond on a card is three.
const LOWER_MAX: u32 = 4;

/// Where a device is: the root complex and the bridges that lead to it, outermost first, and itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    path: Vec<String>,
    /// NUMA node, if the system has several.
    node: Option<u32>,
}

/// How near a network card is to a device, farthest first: what data between the two must cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    Any,
    SameNode,
    SameRoot,
    /// Below so many bridges that lead to both.
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

    /// Of a device's directory, with all links followed; `None` if it is on no PCI bus.
    fn of(directory: &Path) -> Option<Self> {
        let directory = directory.canonicalize().ok()?;
        let is_pci = |part: &str| part.parse::<PciAddress>().is_ok();
        // What lies below its PCI function (`virtio0`, say) is no part of the way to it.
        let own = directory.ancestors().find(|at| at.file_name().and_then(|name| name.to_str()).is_some_and(is_pci))?;
        let names = own.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let path = names.skip_while(|name| !name.starts_with("pci")).map(str::to_owned).collect();
        // -1 where there is one only.
        let node = read(&own.join("numa_node")).and_then(|text| text.parse().ok());
        Some(Self { path, node })
    }

    /// Of a function on the PCI bus.
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
    /// Megabits per second, if it says so.
    pub(crate) megabits: Option<u64>,
    /// Of the cards that it is made of: none of a virtual one, several of a bond.
    pub(crate) places: Vec<Place>,
    /// Those that others on its network can reach.
    pub(crate) addresses: Vec<IpAddr>,
}

impl Interface {
    /// Its first address of `like`'s family.
    pub(crate) fn address(&self, like: IpAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == like.is_ipv4())
    }

    /// Of its card that is nearest.
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

/// The interfaces that `sysfs` describes, by name, with those of `addresses` that are theirs.
pub(crate) fn interfaces(sysfs: &Path, addresses: &[(String, IpAddr)]) -> Vec<Interface> {
    let network = sysfs.join("class/net");
    let describe = |name: String| {
        let own = network.join(&name);
        let is = |file: &str, value: &str| read(&own.join(file)).as_deref() == Some(value);
        Interface {
            // Some drivers do not say, but for the carrier.
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

/// This machine's addresses that others can reach, by interface.
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
