//! What others reach on this machine: a TCP stream, and quinn's own bulk stream with its default configuration.

use anyhow::{Context, Result};
use lagoon_transport::{ClusterCa, SERVER_NAME};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{RootCertStore, crypto::ring, server::WebPkiClientVerifier, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{net::SocketAddr, sync::Arc, time::Instant};
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

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Sends so many bytes as are asked for, again and again.
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

async fn start_quinn(far: &Runtime) -> Result<(Stream, [quinn::Endpoint; 2])> {
    let ca = ClusterCa::generate("bench")?;
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.cert_pem().as_bytes())?)?;
    let roots = Arc::new(roots);
    let issued = ca.issue("quinn")?;
    let chain = vec![CertificateDer::from_pem_slice(issued.cert_pem.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes())?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build()?;
    let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), key.clone_key())?;
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    let server = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?));
    let server = {
        let _far = far.enter();
        quinn::Endpoint::server(server, loopback())?
    };
    let (addr, accepting) = (server.local_addr()?, server.clone());
    far.spawn(async move {
        let connection = accepting.accept().await.context("a connection")?.await?;
        let (send, recv) = connection.accept_bi().await?;
        serve(recv, send).await
    });
    let endpoint = quinn::Endpoint::client(loopback())?;
    let client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?));
    let connection = endpoint.connect_with(client, addr, SERVER_NAME)?.await?;
    let (send, recv) = connection.open_bi().await?;
    Ok((Stream { recv: Box::new(recv), send: Box::new(send) }, [server, endpoint]))
}
