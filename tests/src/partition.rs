//! Networks of processes in which single pairs can be cut off from each other.
//!
//! On Linux as root, every instance has a network namespace of its own behind a bridge, and a cut gives each of the
//! pair a wrong hardware address for the other, so its frames reach no one. Elsewhere every instance is behind a UDP
//! relay in this process that drops datagrams between the pair. [`Net::describe`] tells which.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The network namespace and address flags of an instance.
#[derive(Clone, Debug)]
pub struct Place {
    pub namespace: Option<String>,
    pub flags: Vec<String>,
}

impl Place {
    /// Adds a flag.
    #[must_use]
    pub fn with(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }
}

impl Default for Place {
    /// A place on free ports of the loopback interface.
    fn default() -> Self {
        Self { namespace: None, flags: vec!["--http=127.0.0.1:0".to_owned()] }
    }
}

/// A network of named places.
#[derive(Debug)]
pub enum Net {
    Namespaces(Namespaces),
    Relays(Relays),
}

impl Net {
    /// Namespaces, or relays if those cannot be made; `LAGOON_TEST_RELAY` in the environment forces relays.
    ///
    /// # Panics
    /// If the relays cannot be set up.
    #[must_use]
    pub fn new(names: &[&str]) -> Self {
        let namespaces = match std::env::var_os("LAGOON_TEST_RELAY") {
            Some(_) => Err("LAGOON_TEST_RELAY is set".to_owned()),
            None => Namespaces::new(names),
        };
        match namespaces {
            Ok(namespaces) => Self::Namespaces(namespaces),
            Err(reason) => Self::Relays(Relays::new(names, reason)),
        }
    }

    /// The kind of network, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Namespaces(_) => "network namespaces".to_owned(),
            Self::Relays(relays) => format!("user-space UDP relays (no network namespaces: {})", relays.reason),
        }
    }

    /// An address of this process that all places can reach.
    #[must_use]
    pub fn gmanager_ip(&self) -> String {
        match self {
            Self::Namespaces(n) => n.ip(1),
            Self::Relays(_) => "127.0.0.1".to_owned(),
        }
    }

    /// The place `name`.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn place(&self, name: &str) -> Place {
        match self {
            Self::Namespaces(n) => n.place(name),
            Self::Relays(r) => r.place(name),
        }
    }

    /// Cuts two places off from each other.
    ///
    /// # Panics
    /// If that fails.
    pub fn cut(&self, a: &str, b: &str) {
        match self {
            Self::Namespaces(n) => n.cut(a, b),
            Self::Relays(r) => r.cuts.lock().unwrap().extend(r.pairs(a, b)),
        }
    }

    /// Heals a cut.
    ///
    /// # Panics
    /// If that fails.
    pub fn heal(&self, a: &str, b: &str) {
        match self {
            Self::Namespaces(n) => n.heal(a, b),
            Self::Relays(r) => r.cuts.lock().unwrap().retain(|pair| !r.pairs(a, b).contains(pair)),
        }
    }
}

/// Network namespaces on one bridge, removed when dropped.
#[derive(Debug)]
pub struct Namespaces {
    /// Tag of this process and network, in all names.
    tag: String,
    subnet: u32,
    names: Vec<String>,
}

/// A hardware address that no interface on the bridge has.
const NOBODY: &str = "02:00:00:00:00:fe";

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().map_err(|e| format!("ip: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let mut text = format!("ip {arguments}: ");
    let _ = write!(text, "{}", String::from_utf8_lossy(&output.stderr).trim());
    Err(text)
}

impl Namespaces {
    fn new(names: &[&str]) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let (made, process) = (MADE.fetch_add(1, Relaxed), std::process::id());
        // 198.18.0.0/15 is for tests between networks (RFC 2544); several test processes may run at once.
        let subnet = (process.wrapping_mul(16) + made) % 512;
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let net = Self { tag: format!("lg{process}n{made}"), subnet, names };
        net.build()?;
        Ok(net)
    }

    fn build(&self) -> Result<(), String> {
        let bridge = &self.tag;
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("addr add {}/24 dev {bridge}", self.ip(1)))?;
        ip(&format!("link set {bridge} up"))?;
        for (index, name) in self.names.iter().enumerate() {
            let (namespace, port) = (self.namespace(name), format!("{bridge}p{index}"));
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("link add {port} type veth peer name eth0 netns {namespace}"))?;
            ip(&format!("link set {port} master {bridge} up"))?;
            ip(&format!("-n {namespace} addr add {}/24 dev eth0", self.ip_of(name)))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        Ok(())
    }

    fn ip(&self, host: usize) -> String {
        format!("198.{}.{}.{host}", 18 + self.subnet / 256, self.subnet % 256)
    }

    fn ip_of(&self, name: &str) -> String {
        self.ip(2 + self.names.iter().position(|n| n == name).unwrap_or_else(|| panic!("no place {name}")))
    }

    fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.tag)
    }

    fn place(&self, name: &str) -> Place {
        let addr = self.ip_of(name);
        let flags = vec![format!("--http={addr}:0"), format!("--quic={addr}:0")];
        Place { namespace: Some(self.namespace(name)), flags }
    }

    fn cut(&self, a: &str, b: &str) {
        for (from, to) in [(a, b), (b, a)] {
            let (namespace, to) = (self.namespace(from), self.ip_of(to));
            ip(&format!("-n {namespace} neigh replace {to} lladdr {NOBODY} nud permanent dev eth0")).unwrap();
        }
    }

    fn heal(&self, a: &str, b: &str) {
        for (from, to) in [(a, b), (b, a)] {
            ip(&format!("-n {} neigh del {} dev eth0", self.namespace(from), self.ip_of(to))).unwrap();
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // Names that were never made cannot be removed.
        for name in &self.names {
            let _ = ip(&format!("netns del {}", self.namespace(name)));
        }
        let _ = ip(&format!("link del {}", self.tag));
    }
}

/// Pairs of sender and receiver whose datagrams are dropped.
type Cuts = Arc<Mutex<BTreeSet<(SocketAddr, SocketAddr)>>>;

/// A relay in front of every place.
#[derive(Debug)]
pub struct Relays {
    reason: String,
    /// The address where an instance listens, and the relay's address, which peers use.
    addrs: BTreeMap<String, (SocketAddr, SocketAddr)>,
    cuts: Cuts,
    stop: Arc<AtomicBool>,
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    // So that relays notice a stop.
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

impl Relays {
    fn new(names: &[&str], reason: String) -> Self {
        let (cuts, stop) = (Cuts::default(), Arc::new(AtomicBool::new(false)));
        let relay = |name: &&str| {
            // Another process is unlikely to take the port first.
            let behind = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let front = Arc::new(socket());
            let addr = front.local_addr().unwrap();
            let (cuts, stop) = (Arc::clone(&cuts), Arc::clone(&stop));
            std::thread::spawn(move || relay(&front, behind, &cuts, &stop));
            ((*name).to_owned(), (behind, addr))
        };
        let addrs = names.iter().map(relay).collect();
        Self { reason, addrs, cuts, stop }
    }

    fn place(&self, name: &str) -> Place {
        let (behind, front) = self.addrs[name];
        let flags = vec!["--http=127.0.0.1:0".to_owned(), format!("--quic={behind}"), format!("--advertise={front}")];
        Place { namespace: None, flags }
    }

    fn pairs(&self, a: &str, b: &str) -> [(SocketAddr, SocketAddr); 2] {
        let (a, b) = (self.addrs[a].0, self.addrs[b].0);
        [(a, b), (b, a)]
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Relays datagrams of dialers to `front`, each over a socket of its own, and the replies back, unless the pair is
/// cut.
fn relay(front: &Arc<UdpSocket>, behind: SocketAddr, cuts: &Cuts, stop: &Arc<AtomicBool>) {
    let mut dialers: BTreeMap<SocketAddr, Arc<UdpSocket>> = BTreeMap::new();
    let mut bytes = vec![0; 65_536];
    while !stop.load(Relaxed) {
        let Ok((count, from)) = front.recv_from(&mut bytes) else { continue };
        let far = dialers.entry(from).or_insert_with(|| {
            let far = Arc::new(socket());
            let (front, back) = (Arc::clone(front), Arc::clone(&far));
            let (cuts, stop) = (Arc::clone(cuts), Arc::clone(stop));
            std::thread::spawn(move || answers(&front, &back, from, behind, &cuts, &stop));
            far
        });
        if !cuts.lock().unwrap().contains(&(from, behind)) {
            // A datagram that the kernel refuses counts as lost.
            let _ = far.send_to(&bytes[..count], behind);
        }
    }
}

fn answers(front: &UdpSocket, far: &UdpSocket, dialer: SocketAddr, behind: SocketAddr, cuts: &Cuts, stop: &AtomicBool) {
    let mut bytes = vec![0; 65_536];
    while !stop.load(Relaxed) {
        let Ok((count, from)) = far.recv_from(&mut bytes) else { continue };
        if from == behind && !cuts.lock().unwrap().contains(&(behind, dialer)) {
            let _ = front.send_to(&bytes[..count], dialer);
        }
    }
}
