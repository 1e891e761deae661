//! The reference: a bare quinn echo between the same two processes, on their own runtimes, over one bidirectional
//! stream, with quinn's default tunables, the same certificates and the same kind of encryption.

use anyhow::{Context, Result};
use lagoon_benches::quic::{Pem, Tuning};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Replies to messages of `out` bytes, whose first eight bytes give `out` and `back`, with `back` bytes each,
/// forever.
pub(crate) fn serve(pem: &Pem) -> Result<SocketAddr> {
    let endpoint = pem.listen(Tuning::Stock)?;
    let addr = endpoint.local_addr()?;
    tokio::spawn(async move {
        let connection = endpoint.accept().await.context("a connection")?.await?;
        let (mut send, mut recv) = connection.accept_bi().await?;
        let mut buffer = Vec::new();
        loop {
            let mut head = [0; 8];
            recv.read_exact(&mut head).await?;
            let [out, back] = [&head[..4], &head[4..]].map(|b| <[u8; 4]>::try_from(b).map(u32::from_le_bytes));
            let (out, back) = (usize::try_from(out?)?, usize::try_from(back?)?);
            buffer.resize(out.max(back), 0);
            recv.read_exact(&mut buffer[..out - head.len()]).await?;
            send.write_all(&buffer[..back]).await?;
        }
        #[allow(unreachable_code, reason = "gives the task its type")]
        anyhow::Ok(())
    });
    Ok(addr)
}

/// The requesting side of the echo.
pub(crate) struct Echo {
    _endpoint: quinn::Endpoint,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Echo {
    /// Connects for round trips of `out` bytes there and `back` bytes back.
    pub(crate) async fn connect(pem: &Pem, addr: SocketAddr, out: usize, back: usize) -> Result<Self> {
        let (endpoint, connection) = pem.connect(addr, Tuning::Stock).await?;
        let (send, recv) = connection.open_bi().await?;
        let mut request = vec![7; out];
        request[..4].copy_from_slice(&u32::try_from(out)?.to_le_bytes());
        request[4..8].copy_from_slice(&u32::try_from(back)?.to_le_bytes());
        Ok(Self { _endpoint: endpoint, send, recv, request, reply: vec![0; back] })
    }

    pub(crate) async fn trip(&mut self) -> Result<Duration> {
        let start = Instant::now();
        self.send.write_all(&self.request).await?;
        self.recv.read_exact(&mut self.reply).await?;
        Ok(start.elapsed())
    }
}
