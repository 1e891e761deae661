//! A QUIC client that sends arbitrary bytes, for tests of hostile peers.

use super::support::{CA, loopback};
use lagoon_transport::{Issued, Roles, SERVER_NAME};
use lagoon_wire::{Preface, encode_preface};
use quinn::{ClientConfig, Connection, Endpoint, RecvStream, SendStream, crypto::rustls::QuicClientConfig};
use rustls::{RootCertStore, crypto::ring, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{
    net::SocketAddr,
    sync::{Arc, LazyLock},
};

/// With which [`connect`] shows itself.
pub(crate) static ISSUED: LazyLock<Issued> = LazyLock::new(|| CA.issue("raw", Roles::all()).unwrap());

/// Connects with a certificate of the tests' CA, or with none.
pub(crate) async fn connect(addr: SocketAddr, certificate: bool) -> Result<Connection, quinn::ConnectionError> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CA.cert_pem().as_bytes()).unwrap()).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut tls = if certificate {
        let issued = &*ISSUED;
        let chain = vec![CertificateDer::from_pem_slice(issued.cert_pem.as_bytes()).unwrap()];
        builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap()).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    tls.alpn_protocols = vec![b"lagoon/1".to_vec()];
    let config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let endpoint = Endpoint::client(loopback()).unwrap();
    endpoint.connect_with(config, addr, SERVER_NAME).unwrap().await
}

/// A preface that the node accepts, for class `class`.
pub(crate) fn preface(class: u32) -> Preface {
    Preface {
        version_min: lagoon_protocol::VERSION_MIN,
        version_max: lagoon_protocol::VERSION_MAX,
        incarnation: 77,
        generation: 0,
        listen_addr: "127.0.0.1:9".to_owned(),
        class,
    }
}

/// Connects and gets as far as an accepted preface.
pub(crate) async fn greeted(addr: SocketAddr, class: u32) -> (Connection, SendStream, RecvStream) {
    greeted_with(addr, &preface(class)).await
}

/// As [`greeted`], with a preface of the test's choice.
pub(crate) async fn greeted_with(addr: SocketAddr, preface: &Preface) -> (Connection, SendStream, RecvStream) {
    let connection = connect(addr, true).await.unwrap();
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&encode_preface(preface).unwrap().to_vec()).await.unwrap();
    recv.read_chunk(1024, true).await.unwrap().expect("the node answers the preface");
    (connection, send, recv)
}
