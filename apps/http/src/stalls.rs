//! A deadline for clients that do not read their response.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A connection whose writes fail after `deadline` without progress: the client reads nothing. The server then drops
/// the connection and with it the request.
#[derive(Debug)]
pub(crate) struct Stalls<T> {
    inner: T,
    deadline: Duration,
    /// Set while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<T> Stalls<T> {
    pub(crate) fn new(inner: T, deadline: Duration) -> Self {
        Self { inner, deadline, timer: None }
    }

    /// The result of a write, or an error if writes have waited for too long.
    fn within_deadline(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.deadline)));
        ready!(timer.as_mut().poll(cx));
        let message = format!("the client has read nothing for {} s", self.deadline.as_secs());
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Stalls<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, into)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Stalls<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.within_deadline(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.within_deadline(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    // No deadline: a socket buffers nothing, so flushing does not wait.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    #[tokio::test]
    async fn a_client_that_reads_nothing_times_out_and_a_slow_one_does_not() {
        let (client, server) = duplex(64);
        let mut server = Stalls::new(server, Duration::from_millis(20));
        let error = server.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(client);

        let (mut client, server) = duplex(64);
        let reading = tokio::spawn(async move {
            let mut read = [0; 64];
            let mut bytes = 0;
            while let Ok(more @ 1..) = client.read(&mut read).await {
                bytes += more;
                tokio::task::yield_now().await;
            }
            bytes
        });
        let mut server = Stalls::new(server, Duration::from_secs(60));
        server.write_all(&[0; 100_000]).await.unwrap();
        drop(server);
        assert_eq!(reading.await.unwrap(), 100_000);
    }
}
