//! Memory of a device that debtors on this host map to attend to it where it lies: offered here, and got from creditors. A
//! descriptor is handed out over a unix socket, once to each debtor that connects; the loop waits for none.

use crate::scratch::Scratch;
use lagoon_protocol::{LentMemory, TransferArena};
use lagoon_runner::{KvRegion, MapId, PeerMemory};
use std::thread;
use tokio::sync::mpsc;

#[cfg(target_os = "linux")]
use lagoon_transport::direct::{ArenaServer, fetch_memory, host_identity};

/// Hands out what is lent, until it is dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    #[cfg(target_os = "linux")]
    _server: ArenaServer,
    _socket: Scratch,
}

/// What a debtor is told of the store of so many rBlocks that a window is, and what hands it out.
#[cfg(target_os = "linux")]
pub(crate) fn offer(window: &KvRegion, blocks: u32) -> anyhow::Result<(LentMemory, Offer)> {
    use anyhow::Context as _;
    let socket = Scratch::new("lent")?;
    let server =
        ArenaServer::of_region(&socket.path().join("arena"), window.as_ref()).context("offer device memory")?;
    let lent = LentMemory { memory: server.arenas().first().cloned(), host: host_identity(), blocks };
    Ok((lent, Offer { _server: server, _socket: socket }))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn offer(window: &KvRegion, _blocks: u32) -> anyhow::Result<(LentMemory, Offer)> {
    match *window {}
}

/// This host, as creditors name theirs, if what they lend can be got here.
#[cfg(target_os = "linux")]
pub(crate) fn host() -> Option<String> {
    Some(host_identity()).filter(|host| !host.is_empty())
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

/// What came of asking a creditor for its memory of so many rBlocks.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) map: MapId,
    pub(crate) blocks: u32,
    pub(crate) memory: Result<PeerMemory, String>,
}

/// Asks creditors for their memory, on threads that live for a second at most.
#[derive(Debug)]
pub(crate) struct Fetches {
    tell: mpsc::UnboundedSender<Fetched>,
    told: mpsc::UnboundedReceiver<Fetched>,
}

impl Fetches {
    pub(crate) fn new() -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        Self { tell, told }
    }

    /// Begins; one for each connection on which a creditor offers some.
    pub(crate) fn begin(&self, map: MapId, blocks: u32, memory: TransferArena) {
        let tell = self.tell.clone();
        let ask = move || {
            // The loop may be gone.
            let _ = tell.send(Fetched { map, blocks, memory: fetch(&memory) });
        };
        if let Err(error) = thread::Builder::new().name("lent memory".to_owned()).spawn(ask) {
            let _ = self.tell.send(Fetched { map, blocks, memory: Err(error.to_string()) });
        }
    }

    pub(crate) async fn next(&mut self) -> Option<Fetched> {
        self.told.recv().await
    }
}
