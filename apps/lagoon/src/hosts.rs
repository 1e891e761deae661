//! Addresses on the command line, as numbers or names: `127.0.0.1:8000`, `gmanager.example:7600`.
//!
//! Names are looked up once, when the command starts, by the system's resolver. A lookup has a deadline. A name with several addresses
//! stands for its first IPv4 address, or its first one if all are IPv6: a process that listens on `localhost` and one that connects to
//! it mean the same.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

/// Deadline of the lookup of one name.
const LOOKUP_DEADLINE: Duration = Duration::from_secs(5);
/// Longest name, in bytes (DNS).
const NAME_BYTES_MAX: usize = 253;

/// Parses `HOST:PORT`, for clap.
///
/// # Errors
/// If it is no address, or if the name is unknown or not answered for in time; with a hint.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let Some((name, port)) = text.rsplit_once(':') else {
        return Err(format!("{text:?} has no port\nhint: HOST:PORT, for example 127.0.0.1:8000"));
    };
    let port: u16 = port.parse().map_err(|_not_a_number| {
        format!("{port:?} is not a port\nhint: HOST:PORT with a port of at most 65535; IPv6 addresses in brackets: [::1]:8000")
    })?;
    Ok(SocketAddr::new(look_up(name, lookup)?, port))
}

/// Parses a host without a port, for clap.
///
/// # Errors
/// As [`address`].
pub(crate) fn host(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    bare.parse().or_else(|_not_a_number| look_up(text, lookup))
}

/// The system's resolver.
fn lookup(name: &str) -> std::io::Result<Vec<IpAddr>> {
    Ok((name, 0).to_socket_addrs()?.map(|addr| addr.ip()).collect())
}

/// The address that stands for `name`. The resolver runs on a thread of its own, which is left behind if it does not answer.
fn look_up(
    name: &str,
    resolver: impl FnOnce(&str) -> std::io::Result<Vec<IpAddr>> + Send + 'static,
) -> Result<IpAddr, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(plain) {
        return Err(format!(
            "{name:?} is neither an IP address nor a host name\nhint: IPv6 addresses in brackets: [::1]:8000"
        ));
    }
    let (sender, found) = mpsc::sync_channel(1);
    let named = name.to_owned();
    let resolving = std::thread::Builder::new().name("lookup".to_owned()).spawn(move || {
        // The receiver has gone if the deadline has passed.
        let _ = sender.send(resolver(&named));
    });
    resolving.map_err(|error| format!("the lookup of {name:?} did not start: {error}"))?;
    let hint = "hint: check the name and this machine's resolver (`getent hosts NAME`), or give the IP address";
    let addrs = match found.recv_timeout(LOOKUP_DEADLINE) {
        Ok(Ok(addrs)) => addrs,
        Ok(Err(error)) => return Err(format!("no address of {name:?}: {error}\n{hint}")),
        Err(_late) => return Err(format!("no address of {name:?} within {} s\n{hint}", LOOKUP_DEADLINE.as_secs())),
    };
    let chosen = addrs.iter().find(|addr| addr.is_ipv4()).or(addrs.first());
    chosen.copied().ok_or_else(|| format!("{name:?} has no address\n{hint}"))
}

/// `--host` and `--port`: parts of an address that another flag gives whole.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct HostPortArgs {
    /// Host of the HTTP endpoint, in place of the one in --http or --listen.
    #[arg(long, value_name = "HOST", value_parser = host)]
    host: Option<IpAddr>,
    /// Port of the HTTP endpoint, in place of the one in --http or --listen.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
}

impl HostPortArgs {
    /// `addr` with the parts that are given.
    pub(crate) fn at(self, addr: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(addr.ip()), self.port.unwrap_or(addr.port()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn numbers_are_addresses_without_a_lookup() {
        assert_eq!(address("10.1.2.3:80"), Ok(SocketAddr::from(([10, 1, 2, 3], 80))));
        assert_eq!(address("[::1]:80").unwrap().to_string(), "[::1]:80");
        assert_eq!(host("0.0.0.0").unwrap().to_string(), "0.0.0.0");
        assert_eq!((host("::").unwrap(), host("[::]").unwrap()), ("::".parse().unwrap(), "::".parse().unwrap()));
    }

    #[test]
    fn this_host_is_known_by_name() {
        assert_eq!(address("localhost:7600"), Ok(SocketAddr::from(([127, 0, 0, 1], 7600))));
        assert_eq!(host("localhost"), Ok(IpAddr::from([127, 0, 0, 1])));
    }

    #[test]
    fn a_name_stands_for_its_first_ipv4_address() {
        let of = |addrs: &'static [&str]| {
            look_up("a-name.example", move |name| {
                assert_eq!(name, "a-name.example");
                Ok(addrs.iter().map(|addr| addr.parse().unwrap()).collect())
            })
        };
        assert_eq!(of(&["fd00::1", "10.0.0.2", "10.0.0.1"]), Ok(IpAddr::from([10, 0, 0, 2])));
        assert_eq!(of(&["fd00::2", "fd00::1"]).unwrap().to_string(), "fd00::2");
        assert!(of(&[]).unwrap_err().contains("has no address\nhint: "));
    }

    #[test]
    fn what_is_no_address_is_named_with_a_hint() {
        let unknown = look_up("nobody", |_| Err(io::Error::other("Name or service not known"))).unwrap_err();
        assert!(unknown.contains("\"nobody\": Name or service not known\nhint: check the name"), "{unknown}");
        let long = "a".repeat(NAME_BYTES_MAX + 1);
        for text in ["8000", "localhost", "::1:x", ":80", "a b:80", "host:", "host:70000", &format!("{long}:1")] {
            assert!(address(text).unwrap_err().contains("\nhint: "), "{text}");
        }
    }

    #[test]
    fn host_and_port_replace_parts() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 8000));
        assert_eq!(HostPortArgs::default().at(addr), addr);
        let host = HostPortArgs { host: Some(IpAddr::from([0, 0, 0, 0])), port: None };
        assert_eq!(host.at(addr).to_string(), "0.0.0.0:8000");
        assert_eq!(HostPortArgs { host: None, port: Some(9) }.at(addr).to_string(), "127.0.0.1:9");
    }
}
