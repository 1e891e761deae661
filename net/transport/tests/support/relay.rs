//! A UDP relay between one dialer and one node: loses, delays and cuts.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};
use tokio::net::UdpSocket;

/// A path to a node with faults.
pub(crate) struct Relay {
    pub(crate) addr: SocketAddr,
    /// Nothing passes while set.
    pub(crate) cut: Arc<AtomicBool>,
    /// Datagrams that were lost by chance.
    pub(crate) lost: Arc<AtomicU64>,
}

/// Relays to `node`, losing `loss_percent` of the datagrams each way.
pub(crate) async fn start(node: SocketAddr, loss_percent: u64) -> Relay {
    let (near, far) =
        (UdpSocket::bind(super::support::loopback()).await, UdpSocket::bind(super::support::loopback()).await);
    let (near, far) = (near.unwrap(), far.unwrap());
    let addr = near.local_addr().unwrap();
    let (cut, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let relay = Relay { addr, cut: Arc::clone(&cut), lost: Arc::clone(&lost) };
    tokio::spawn(async move {
        let mut dialer = None;
        let (mut out, mut back) = (vec![0; 65_536], vec![0; 65_536]);
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        loop {
            let (bytes, to, socket) = tokio::select! {
                Ok((count, from)) = near.recv_from(&mut out) => {
                    dialer = Some(from);
                    (&out[..count], node, &far)
                }
                Ok((count, _)) = far.recv_from(&mut back) => {
                    let Some(dialer) = dialer else { continue };
                    (&back[..count], dialer, &near)
                }
            };
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if cut.load(Relaxed) {
                continue;
            }
            if state % 100 < loss_percent {
                lost.fetch_add(1, Relaxed);
                continue;
            }
            // The kernel may refuse a datagram; that is one more lost.
            let _ = socket.send_to(bytes, to).await;
        }
    });
    relay
}
