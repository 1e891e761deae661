//! Peers on this machine: a TCP stream, and quinn's own bulk stream.

use anyhow::{Context, Result};
use lagoon_benches::quic::{Pem, Tuning, loopback};
use lagoon_transport::ClusterCa;
use std::time::Instant;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};

const CHUNK: usize = 1 << 20;

struct Stream {
    recv: Box<dyn tokio::io::AsyncRead + Unpin + Send>,
    send: Box<dyn tokio::io::AsyncWrite + Unpin + Send>,
}

pub(crate) struct Peers {
    near: Runtime,
    _far: Runtime,
    tcp: Stream,
    quinn: Stream,
    _endpoints: [quinn::Endpoint; 2],
    bytes: u64,
    target: Vec<u8>,
}

/// Sends as many bytes as requested, in a loop.
async fn serve(mut recv: impl AsyncReadExt + Unpin, mut send: impl AsyncWriteExt + Unpin) -> Result<()> {
    let chunk = vec![3; CHUNK];
    loop {
        let mut left = recv.read_u64_le().await?;
        while left > 0 {
            let len = left.min(CHUNK as u64);
            send.write_all(chunk.get(..usize::try_from(len)?).context("a chunk")?).await?;
            left -= len;
        }
        send.flush().await?;
    }
}

impl Peers {
    pub(crate) fn start(bytes: u64) -> Result<Self> {
        let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (near, far) = (build()?, build()?);
        let tcp = near.block_on(start_tcp(&far))?;
        let (quinn, endpoints) = near.block_on(start_quinn(&far))?;
        let target = vec![0; usize::try_from(bytes)?];
        Ok(Self { near, _far: far, tcp, quinn, _endpoints: endpoints, bytes, target })
    }

    pub(crate) fn tcp(&mut self) -> Result<f64> {
        let (bytes, target) = (self.bytes, &mut self.target);
        self.near.block_on(fetch(&mut self.tcp, bytes, target))
    }

    pub(crate) fn quinn(&mut self) -> Result<f64> {
        let (bytes, target) = (self.bytes, &mut self.target);
        self.near.block_on(fetch(&mut self.quinn, bytes, target))
    }
}

/// Seconds in which all bytes arrive in memory.
async fn fetch(stream: &mut Stream, bytes: u64, target: &mut [u8]) -> Result<f64> {
    let start = Instant::now();
    stream.send.write_u64_le(bytes).await?;
    stream.send.flush().await?;
    stream.recv.read_exact(target).await?;
    Ok(start.elapsed().as_secs_f64())
}

async fn start_tcp(far: &Runtime) -> Result<Stream> {
    let listener = far.spawn(TcpListener::bind(loopback())).await??;
    let addr = listener.local_addr()?;
    far.spawn(async move {
        let (stream, _) = listener.accept().await?;
        let (recv, send) = stream.into_split();
        serve(recv, send).await
    });
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (recv, send) = stream.into_split();
    Ok(Stream { recv: Box::new(recv), send: Box::new(send) })
}

/// A quinn connection with the transport's own configuration, so that the difference is the transfer's overhead.
async fn start_quinn(far: &Runtime) -> Result<(Stream, [quinn::Endpoint; 2])> {
    let pem = Pem::issue(&ClusterCa::generate("bench")?, "quinn")?;
    let server = {
        let _far = far.enter();
        pem.listen(Tuning::Lagoon)?
    };
    let (addr, accepting) = (server.local_addr()?, server.clone());
    far.spawn(async move {
        let connection = accepting.accept().await.context("a connection")?.await?;
        let (send, recv) = connection.accept_bi().await?;
        serve(recv, send).await
    });
    let (endpoint, connection) = pem.connect(addr, Tuning::Lagoon).await?;
    let (send, recv) = connection.open_bi().await?;
    Ok((Stream { recv: Box::new(recv), send: Box::new(send) }, [server, endpoint]))
}
