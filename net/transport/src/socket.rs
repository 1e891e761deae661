//! The UDP socket under the endpoint.

use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Once,
};

/// Opens a UDP socket with buffers of `buffer_bytes` each way. The kernel may cap them; that is logged once, because
/// small buffers drop datagrams under load and cost throughput.
pub(crate) fn open(addr: SocketAddr, buffer_bytes: usize) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // A refusal to grow is no error: the socket works with what it has, and the check below reports it.
    let grown = socket.set_recv_buffer_size(buffer_bytes).and_then(|()| socket.set_send_buffer_size(buffer_bytes));
    if let Err(error) = grown {
        tracing::debug!(%error, "the kernel refused to size the UDP buffers");
    }
    let received = socket.recv_buffer_size()?;
    if received < buffer_bytes {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                wanted_bytes = buffer_bytes,
                got_bytes = received,
                "the kernel caps UDP buffers; hint: sysctl -w net.core.rmem_max={buffer_bytes} net.core.wmem_max={buffer_bytes}"
            );
        });
    }
    socket.bind(&addr.into())?;
    Ok(socket.into())
}
