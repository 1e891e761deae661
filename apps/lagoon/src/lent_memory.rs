//! Lent device memory that debtors on this host map and attend to in place: offers own memory, and fetches creditors'.
//! A descriptor is handed out over a unix socket, once to each connecting debtor; the loop waits for neither.

use crate::scratch::Scratch;
use lagoon_protocol::{LentMemory, TransferArena};
use lagoon_runner::{KvRegion, MapId, PeerMemory};
use std::thread;
use tokio::sync::mpsc;

#[cfg(target_os = "linux")]
pub(crate) use lagoon_transport::direct::boot_id;
#[cfg(target_os = "linux")]
use lagoon_transport::direct::{ArenaServer, fetch_memory, host_identity};

/// Offers lent memory until dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    #[cfg(target_os = "linux")]
    _server: ArenaServer,
    _socket: Scratch,
}

/// Offers a shared device region with `blocks` rBlocks; returns the offer for debtors' Hellos, and its server.
#[cfg(target_os = "linux")]
pub(crate) fn offer(region: &KvRegion, blocks: u32) -> anyhow::Result<(LentMemory, Offer)> {
    use anyhow::Context as _;
    let socket = Scratch::new("lent")?;
    let server =
        ArenaServer::of_region(&socket.path().join("arena"), region.as_ref()).context("offer device memory")?;
    let lent = LentMemory { memory: server.arenas().first().cloned(), host: host_identity(), blocks };
    Ok((lent, Offer { _server: server, _socket: socket }))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn offer(region: &KvRegion, _blocks: u32) -> anyhow::Result<(LentMemory, Offer)> {
    match *region {}
}

/// This host's identity, as creditors name theirs; `None` if it cannot map their memory.
#[cfg(target_os = "linux")]
pub(crate) fn host() -> Option<String> {
    Some(host_identity()).filter(|host| !host.is_empty())
}

/// None where the kernel has no boot id.
#[cfg(not(target_os = "linux"))]
pub(crate) fn boot_id() -> Option<String> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn host() -> Option<String> {
    None
}

#[cfg(target_os = "linux")]
fn fetch(memory: &TransferArena) -> Result<PeerMemory, String> {
    fetch_memory(memory).map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn fetch(_memory: &TransferArena) -> Result<PeerMemory, String> {
    Err("device memory is shared on Linux only".to_owned())
}

/// Result of fetching a creditor's memory of `blocks` rBlocks.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) map: MapId,
    pub(crate) blocks: u32,
    pub(crate) memory: Result<PeerMemory, String>,
}

/// Fetches creditors' memory, on threads that live for a second at most.
#[derive(Debug)]
pub(crate) struct Fetches {
    sender: mpsc::UnboundedSender<Fetched>,
    receiver: mpsc::UnboundedReceiver<Fetched>,
}

impl Fetches {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver }
    }

    /// Starts a fetch; one for each connection whose creditor offers memory.
    pub(crate) fn begin(&self, map: MapId, blocks: u32, memory: TransferArena) {
        let sender = self.sender.clone();
        let ask = move || {
            // The loop may have ended.
            let _ = sender.send(Fetched { map, blocks, memory: fetch(&memory) });
        };
        if let Err(error) = thread::Builder::new().name("lent memory".to_owned()).spawn(ask) {
            let _ = self.sender.send(Fetched { map, blocks, memory: Err(error.to_string()) });
        }
    }

    pub(crate) async fn next(&mut self) -> Option<Fetched> {
        self.receiver.recv().await
    }
}
