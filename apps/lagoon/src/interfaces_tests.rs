//! On trees as the kernel makes them.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use std::fs;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const ADDRESS: &str = "0000:3b:00.0";

/// A tree like `/sys`.
pub(crate) struct Tree(TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        let tree = Self(TempDir::new().unwrap());
        for directory in ["class/net", "bus/pci/devices", "devices"] {
            fs::create_dir_all(tree.root().join(directory)).unwrap();
        }
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    fn put(&self, directory: &str, file: &str, text: &str) {
        fs::write(self.root().join(directory).join(file), format!("{text}\n")).unwrap();
    }

    /// A PCI function at `way`, its bridges and itself.
    pub(crate) fn pci(&self, way: &str, node: i32) -> String {
        let directory = format!("devices/{way}");
        fs::create_dir_all(self.root().join(&directory)).unwrap();
        self.put(&directory, "numa_node", &node.to_string());
        let address = way.rsplit('/').next().unwrap();
        symlink(self.root().join(&directory), self.root().join("bus/pci/devices").join(address)).unwrap();
        directory
    }

    fn interface(&self, name: &str, parent: &str, state: &str, speed: &str) -> String {
        let directory = format!("{parent}/net/{name}");
        fs::create_dir_all(self.root().join(&directory)).unwrap();
        self.put(&directory, "operstate", state);
        self.put(&directory, "speed", speed);
        symlink(self.root().join(&directory), self.root().join("class/net").join(name)).unwrap();
        directory
    }

    /// A network card at `way`.
    pub(crate) fn card(&self, name: &str, way: &str, node: i32, state: &str, speed: &str) {
        let device = self.pci(way, node);
        let directory = self.interface(name, &device, state, speed);
        symlink("../..", self.root().join(directory).join("device")).unwrap();
    }

    /// An interface without a device, over others.
    pub(crate) fn made_of(&self, name: &str, lower: &[&str]) {
        let directory = self.interface(name, "devices/virtual", "up", "-1");
        for lower in lower {
            let link = self.root().join(&directory).join(format!("lower_{lower}"));
            symlink(self.root().join("class/net").join(lower), link).unwrap();
        }
    }

    pub(crate) fn place(&self, address: &str) -> Option<Place> {
        Place::of_pci(self.root(), address.parse().unwrap())
    }
}

/// Two sockets, switches below their roots, and a GPU behind one of them.
pub(crate) fn two_sockets() -> Tree {
    let tree = Tree::new();
    tree.pci(&format!("pci0000:3a/0000:3a:00.0/0000:3c:00.0/{ADDRESS}"), 0);
    tree.card("same", "pci0000:3a/0000:3a:00.0/0000:3c:00.0/0000:3d:00.0", 0, "up", "100000");
    tree.card("port", "pci0000:3a/0000:3a:00.0/0000:3e:00.0/0000:3f:00.0", 0, "up", "100000");
    tree.card("root", "pci0000:3a/0000:3a:01.0/0000:40:00.0", 0, "up", "200000");
    tree.card("node", "pci0000:17/0000:17:00.0/0000:18:00.0", 0, "up", "400000");
    tree.card("other", "pci0000:85/0000:85:00.0/0000:86:00.0", 1, "up", "400000");
    tree.card("down", "pci0000:3a/0000:3a:00.0/0000:3c:01.0/0000:41:00.0", 0, "down", "-1");
    tree.made_of("lo", &[]);
    tree
}

fn found(tree: &Tree) -> Vec<Interface> {
    interfaces(tree.root(), &[])
}

fn nearness(tree: &Tree, name: &str) -> Option<Nearness> {
    let device = tree.place(ADDRESS).unwrap();
    found(tree).iter().find(|interface| interface.name == name).unwrap().nearness(&device)
}

#[test]
fn the_path_between_card_and_device_is_classified() {
    let tree = two_sockets();
    let cases = [
        ("same", Nearness::SameSwitch(2)),
        ("port", Nearness::SameSwitch(1)),
        ("root", Nearness::SameRoot),
        ("node", Nearness::SameNode),
        ("other", Nearness::Any),
    ];
    for (name, expected) in cases {
        assert_eq!(nearness(&tree, name), Some(expected), "{name}");
    }
    assert!(cases.is_sorted_by(|(_, a), (_, b)| a > b));
    assert_eq!(nearness(&tree, "lo"), None);
}

#[test]
fn a_system_with_one_node_has_none() {
    let tree = Tree::new();
    tree.pci(&format!("pci0000:00/{ADDRESS}"), -1);
    tree.card("eth0", "pci0000:20/0000:20:01.0", -1, "up", "1000");
    assert_eq!(nearness(&tree, "eth0"), Some(Nearness::Any));
    assert_eq!(tree.place(ADDRESS).unwrap().node(), None);
    assert_eq!(tree.place("0000:99:00.0"), None);
}

#[test]
fn states_speeds_and_addresses_are_those_of_the_interface() {
    let tree = two_sockets();
    tree.card("quiet", "pci0000:90/0000:90:00.0", 1, "unknown", "-1");
    tree.card("carried", "pci0000:90/0000:91:00.0", 1, "unknown", "-1");
    tree.put("class/net/carried", "carrier", "1");
    let address: IpAddr = "10.0.0.7".parse().unwrap();
    let found = interfaces(tree.root(), &[("root".to_owned(), address), ("gone".to_owned(), address)]);
    let names: Vec<&str> = found.iter().map(|interface| interface.name.as_str()).collect();
    assert_eq!(names, ["carried", "down", "lo", "node", "other", "port", "quiet", "root", "same"]);
    let of = |name: &str| found.iter().find(|interface| interface.name == name).unwrap();
    assert!(!of("down").up && of("root").up && !of("quiet").up && of("carried").up);
    assert_eq!((of("root").megabits, of("down").megabits), (Some(200_000), None));
    assert_eq!((of("root").address(address), of("same").address(address)), (Some(address), None));
    assert_eq!(of("root").address("::".parse().unwrap()), None);
}

/// A bond, a VLAN on it, and a card whose driver has a bus of its own.
#[test]
fn what_is_made_of_cards_is_where_they_are() {
    let tree = two_sockets();
    tree.made_of("bond0", &["other", "root"]);
    tree.made_of("bond0.7", &["bond0"]);
    tree.made_of("veth", &["lo"]);
    tree.made_of("ring", &["ring"]);
    assert_eq!(nearness(&tree, "bond0"), Some(Nearness::SameRoot));
    assert_eq!(nearness(&tree, "bond0.7"), Some(Nearness::SameRoot));
    assert_eq!((nearness(&tree, "veth"), nearness(&tree, "ring")), (None, None));
    let device = tree.pci("pci0000:3a/0000:3a:05.0", 0);
    let directory = tree.interface("virt", &format!("{device}/virtio2"), "up", "-1");
    symlink("../..", tree.root().join(directory).join("device")).unwrap();
    assert_eq!(nearness(&tree, "virt"), Some(Nearness::SameRoot));
}
