//! On made trees.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::interfaces::tests::{Tree, two_sockets};

const GPU: &str = "0000:3b:00.0";

fn wanted(quic: &str) -> Wanted {
    Wanted { quic: quic.parse().unwrap(), advertise: None, transfer: None }
}

/// The tree's interfaces, with an address each: 10.0.0.N by name, and an IPv6 one for some.
fn addressed(tree: &Tree, names: &[&str]) -> Vec<Interface> {
    let mut addresses: Vec<(String, IpAddr)> =
        (1..).zip(names).map(|(n, name): (u8, &&str)| ((*name).to_owned(), IpAddr::from([10, 0, 0, n]))).collect();
    addresses.push(("other".to_owned(), "fd00::5".parse().unwrap()));
    addresses.push(("lo".to_owned(), "127.0.0.1".parse().unwrap()));
    interfaces::interfaces(tree.root(), &addresses)
}

fn auto_on(tree: &Tree, names: &[&str], wanted: &Wanted) -> Endpoint {
    auto(wanted, &addressed(tree, names), tree.place(GPU).as_ref())
}

#[test]
fn the_nearest_card_that_is_up_and_has_an_address_is_taken() {
    let tree = two_sockets();
    let wanted = wanted("0.0.0.0:7601");
    let names = ["down", "same", "port", "root", "node", "other"];
    for skipped in 0..4 {
        let rest: Vec<&str> = names.iter().copied().filter(|name| !names[1..=skipped].contains(name)).collect();
        let endpoint = auto_on(&tree, &rest, &wanted);
        assert_eq!(endpoint.interface.as_deref(), Some(names[skipped + 1]), "{endpoint:?}");
        assert_eq!((endpoint.listen.to_string().as_str(), endpoint.advertise), ("10.0.0.2:0", None));
    }
    let endpoint = auto_on(&tree, &["same", "other"], &wanted);
    assert_eq!(endpoint.reason, "behind the device's PCI switch, 100000 Mb/s; there are also other");
}

#[test]
fn of_the_nearest_the_fastest_is_taken_then_the_one_that_peers_know() {
    let tree = Tree::new();
    tree.pci(&format!("pci0000:00/{GPU}"), 0);
    tree.card("a", "pci0000:00/0000:00:01.0", 0, "up", "-1");
    tree.card("b", "pci0000:00/0000:00:02.0", 0, "up", "25000");
    tree.card("c", "pci0000:00/0000:00:03.0", 0, "up", "25000");
    tree.card("d", "pci0000:00/0000:00:04.0", 0, "up", "10000");
    let names = ["a", "b", "c", "d"];
    let chosen = |quic: &str| auto_on(&tree, &names, &wanted(quic)).interface.unwrap();
    assert_eq!(chosen("0.0.0.0:0"), "b");
    assert_eq!(chosen("10.0.0.3:7601"), "c");
    assert_eq!(chosen("10.0.0.4:7601"), "b");
    let advertised = Wanted { advertise: Some("10.0.0.3:9".parse().unwrap()), ..wanted("0.0.0.0:0") };
    assert_eq!(auto_on(&tree, &names, &advertised).interface.unwrap(), "c");
    let port = Wanted { transfer: Some("0.0.0.0:7700".parse().unwrap()), ..wanted("10.0.0.3:0") };
    assert_eq!(auto_on(&tree, &names, &port).listen.to_string(), "10.0.0.3:7700");
}

#[test]
fn what_was_asked_for_stays_where_nothing_is_to_be_chosen() {
    let tree = two_sockets();
    let names = ["same", "other"];
    let far = wanted("10.0.0.2:7601");
    let elsewhere = "203.0.113.5:7601".parse().ok();
    for (wanted, names, words) in [
        (wanted("127.0.0.1:0"), &names[..], "on this host"),
        (Wanted { transfer: "10.0.0.2:7700".parse().ok(), ..far }, &names[..], "--transfer-quic"),
        (Wanted { advertise: elsewhere, ..far }, &names[..], "--advertise"),
        (wanted("[::]:7601"), &names[..], "not several"),
        (far, &names[..1], "not several"),
    ] {
        let endpoint = auto_on(&tree, names, &wanted);
        assert!(endpoint.reason.contains(words), "{endpoint:?}");
        assert_eq!((endpoint.listen, endpoint.advertise), (wanted.base(), wanted.advertise));
        assert_eq!(endpoint.interface, None);
    }
    let unknown = auto(&far, &addressed(&tree, &names), None);
    assert!(unknown.reason.contains("does not know"), "{unknown:?}");
    let host = choose(&InterfaceArg::Auto, &far, None).unwrap();
    assert!(host.reason.contains("no PCI bus") && host.listen == far.base(), "{host:?}");
    let none = choose(&InterfaceArg::None, &far, GPU.parse().ok()).unwrap();
    assert_eq!(none.listen.to_string(), "10.0.0.2:0");
}

#[test]
fn a_named_interface_is_taken_or_refused_with_a_hint() {
    let tree = two_sockets();
    let interfaces = addressed(&tree, &["other", "down", "lo"]);
    let far = wanted("10.0.0.9:7601");
    let advertised = Wanted { advertise: "203.0.113.5:7601".parse().ok(), ..far };
    let endpoint = named("other", &advertised, &interfaces).unwrap();
    assert_eq!((endpoint.listen.to_string().as_str(), endpoint.advertise), ("10.0.0.1:0", None));
    assert_eq!(named("other", &wanted("[::]:0"), &interfaces).unwrap().listen.to_string(), "[fd00::5]:0");
    let both = |addr: &str| Wanted { transfer: addr.parse().ok(), ..far };
    assert_eq!(named("lo", &both("127.0.0.1:5"), &interfaces).unwrap().listen.to_string(), "127.0.0.1:5");
    assert_eq!(named("lo", &both("0.0.0.0:5"), &interfaces).unwrap().listen.to_string(), "10.0.0.3:5");
    for (name, wanted, words) in [
        ("eth7", far, "there is no such"),
        ("down", far, "it is down"),
        ("same", far, "no IPv4 address"),
        ("lo", wanted("[::1]:0"), "no IPv6 address"),
        ("other", both("10.0.0.3:5"), "is no address of"),
    ] {
        let error = named(name, &wanted, &interfaces).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("hint: "), "{error}");
    }
    let hint = named("eth7", &far, &interfaces).unwrap_err().to_string();
    assert!(hint.contains("with an IPv4 address: lo, other"), "{hint}");
    assert!("".parse::<InterfaceArg>().is_err());
    assert_eq!("eth0".parse(), Ok(InterfaceArg::Named("eth0".to_owned())));
}
