//! An HTTP/1.1 client, plain or over TLS: the gateway's to instances, and the commands' to servers.

use crate::tls::{ClientTls, Io};
use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, Request, StatusCode, Uri, response},
};
use futures::StreamExt as _;
use hyper_util::{
    client::legacy::{
        self,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo},
};
use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::timeout,
};

/// Why there is no response, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The connection failed; nothing was sent.
    #[error("{0}")]
    Connect(String),
    /// The connection broke; the server may have begun to process the request.
    #[error("{0}")]
    Broken(String),
}

/// Deadlines and connection pool of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// Deadline to connect, TLS included.
    pub connect: Duration,
    /// Longest silence of a server before the request fails.
    pub silence: Duration,
    /// Maximum of idle connections kept per server.
    pub idle_max: usize,
}

/// The client. Clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    inner: legacy::Client<Connector, Body>,
    silence: Duration,
}

impl Client {
    /// A client; `tls` is for https:// URLs, which fail without.
    #[must_use]
    pub fn new(config: ClientConfig, tls: Option<Arc<ClientTls>>) -> Self {
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        builder.pool_max_idle_per_host(config.idle_max).retry_canceled_requests(false);
        let inner = builder.build(Connector { tls, deadline: config.connect });
        Self { inner, silence: config.silence }
    }

    /// Sends a request to an absolute URL.
    ///
    /// # Errors
    /// If the server cannot be reached, or does not respond in time.
    pub async fn send(&self, request: Request<Body>) -> Result<Response, SendError> {
        let sent = timeout(self.silence, self.inner.request(request)).await;
        let answer = sent.map_err(|_elapsed| silent(self.silence))?.map_err(|error| {
            let connect = error.is_connect();
            let reason = reason(&error);
            if connect { SendError::Connect(reason) } else { SendError::Broken(reason) }
        })?;
        let (head, body) = answer.into_parts();
        Ok(Response { head, body: Body::new(body), silence: self.silence })
    }
}

fn silent(silence: Duration) -> SendError {
    SendError::Broken(format!("the server was silent for {} s", silence.as_secs()))
}

/// Text of the innermost cause, as outer errors have no details.
fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// A response whose body is still to come. Dropping it closes the connection.
#[derive(Debug)]
pub struct Response {
    head: response::Parts,
    body: Body,
    silence: Duration,
}

impl Response {
    /// The answer's status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.head.status
    }

    /// The answer's headers.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// The body's chunks as they arrive.
    pub fn chunks(self) -> impl futures::Stream<Item = Result<Bytes, SendError>> + Send + use<> {
        let silence = self.silence;
        futures::stream::unfold(Some(self.body.into_data_stream()), move |stream| async move {
            let mut stream = stream?;
            match timeout(silence, stream.next()).await {
                Ok(None) => None,
                Ok(Some(Ok(chunk))) => Some((Ok(chunk), Some(stream))),
                Ok(Some(Err(error))) => Some((Err(SendError::Broken(reason(&error))), None)),
                Err(_elapsed) => Some((Err(silent(silence)), None)),
            }
        })
    }

    /// The same response with its body read, of at most `bytes_max` bytes: its connection is free.
    ///
    /// # Errors
    /// If the body breaks off, is longer, or takes longer than `deadline`.
    pub async fn buffered(self, bytes_max: usize, deadline: Duration) -> Result<Self, SendError> {
        let Self { head, body, silence } = self;
        let rest = Self { head: head.clone(), body, silence };
        let read = timeout(deadline, rest.bytes(bytes_max)).await;
        let body = read.unwrap_or_else(|_elapsed| Err(silent(deadline)))?;
        Ok(Self { head, body: Body::from(body), silence })
    }

    /// Reads the whole body, of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// If it breaks off or is longer.
    pub async fn bytes(self, bytes_max: usize) -> Result<Vec<u8>, SendError> {
        let mut chunks = std::pin::pin!(self.chunks());
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if chunk.len() > bytes_max - bytes.len() {
                return Err(SendError::Broken(format!("the answer is longer than {bytes_max} bytes")));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }
}

#[derive(Clone, Debug)]
struct Connector {
    tls: Option<Arc<ClientTls>>,
    deadline: Duration,
}

impl Connector {
    async fn connect(self, uri: Uri) -> io::Result<TokioIo<Stream>> {
        let https = uri.scheme_str() == Some("https");
        // IPv6 addresses stand in brackets in a URL.
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await?;
        // Requests and tokens are small and must not wait for an acknowledgement.
        stream.set_nodelay(true)?;
        let io: Box<dyn Io> = match (https, &self.tls) {
            (false, _) => Box::new(stream),
            (true, Some(tls)) => tls.connect(host, stream).await?,
            (true, None) => return Err(io::Error::other("the server's certificate cannot be checked without a CA")),
        };
        Ok(TokioIo::new(Stream(io)))
    }
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connector, deadline) = (self.clone(), self.deadline);
        Box::pin(async move {
            let connected = timeout(deadline, connector.connect(uri)).await;
            connected.unwrap_or_else(|_elapsed| {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {} s", deadline.as_secs())))
            })
        })
    }
}

/// A connection of either kind.
struct Stream(Box<dyn Io>);

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
