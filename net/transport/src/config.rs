//! Tunables of the transport, and the QUIC configuration made of them.

use crate::{BindError, socket};
use lagoon_types::limits;
use quinn::{
    AckFrequencyConfig, Endpoint, EndpointConfig, IdleTimeout, MtuDiscoveryConfig, ServerConfig, TokioRuntime, VarInt,
    congestion,
};
use std::{net::SocketAddr, sync::Arc, time::Duration};

/// How a node behaves. The defaults suit one machine or one data centre.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// The address at which peers reach this node. `None`: the bound one; an unspecified ip there
    /// (`0.0.0.0`) stands for the ip that the peer sees.
    pub advertise: Option<SocketAddr>,
    /// A peer that is silent for this long is lost. At least three times `keep_alive`.
    pub idle_timeout: Duration,
    /// Silence is broken this often.
    pub keep_alive: Duration,
    /// One attempt to connect, preface included.
    pub connect_deadline: Duration,
    /// A frame that waits for a connection for this long is dropped and reported by [`crate::Event::Expired`].
    pub queue_deadline: Duration,
    /// Pause after the first failed attempt to connect; doubled by each further one, with jitter.
    pub backoff_min: Duration,
    /// Longest pause between attempts.
    pub backoff_max: Duration,
    /// Frames that wait for one peer and class.
    pub queue_frames_max: usize,
    /// Bytes that wait for one peer and class. One frame may always wait, whatever its size.
    pub queue_bytes_max: usize,
    /// Bytes that wait for all connections of one node (certificate). One frame may always wait, whatever its size.
    pub node_queue_bytes_max: usize,
    /// Received frames of one class that wait for the reader of the inbox.
    pub inbox_frames_max: usize,
    /// Received bytes of one class that wait for the reader of the inbox.
    pub inbox_bytes_max: usize,
    /// Bytes in flight or unread on one connection and direction.
    pub window_bytes: u32,
    /// Received bytes that the connections of one node (certificate) may hold unread together, beyond
    /// [`FIRST_WINDOW_BYTES`] each. The next connection's window is at most an eighth of what is left.
    pub node_window_bytes: u32,
    /// Congestion window at the start, in bytes.
    pub initial_window_bytes: u64,
    /// UDP socket buffers, in bytes; the kernel may cap them.
    pub socket_buffer_bytes: usize,
    /// Largest datagram that is tried on paths off this machine, in bytes of UDP payload.
    pub mtu_max: u16,
    /// Datagram size on loopback, in bytes of UDP payload.
    pub mtu_loopback: u16,
    /// Peers that are remembered; idle ones are forgotten first.
    pub peers_max: usize,
    /// Incoming handshakes at once; more are turned away and come again with back-off.
    pub handshakes_max: usize,
    /// Incoming handshakes at once above which a source address is validated first (QUIC Retry).
    pub handshakes_unproven_max: usize,
    /// Incoming handshakes at once from one IPv4 address or /64 network of IPv6. Above `handshakes_unproven_max`, so that forged addresses do not use
    /// up another's.
    pub handshakes_address_max: usize,
    /// Accepted connections from one IPv4 address or /64 network of IPv6.
    pub connections_address_max: usize,
    /// Accepted direct connections of one node (certificate).
    pub direct_node_max: usize,
}

impl Default for TransportConfig {
    fn default() -> Self {
        Self {
            advertise: None,
            idle_timeout: Duration::from_millis(limits::PEER_SILENCE_MS),
            keep_alive: Duration::from_millis(limits::PEER_KEEP_ALIVE_MS),
            connect_deadline: Duration::from_millis(limits::CONNECT_ATTEMPT_MS),
            queue_deadline: Duration::from_millis(limits::CONNECT_DEADLINE_MS),
            backoff_min: Duration::from_millis(limits::CONNECT_PAUSE_MS),
            backoff_max: Duration::from_millis(limits::CONNECT_PAUSE_MS_MAX),
            queue_frames_max: limits::PEER_QUEUE_FRAMES_MAX,
            queue_bytes_max: limits::PEER_QUEUE_BYTES_MAX,
            node_queue_bytes_max: limits::NODE_QUEUE_BYTES_MAX,
            inbox_frames_max: limits::PEER_QUEUE_FRAMES_MAX,
            inbox_bytes_max: limits::PEER_QUEUE_BYTES_MAX,
            window_bytes: limits::CONNECTION_UNREAD_BYTES_MAX,
            node_window_bytes: limits::NODE_UNREAD_BYTES_MAX,
            initial_window_bytes: 1 << 20,
            socket_buffer_bytes: 8 << 20,
            mtu_max: MTU_MAX,
            mtu_loopback: MTU_MAX,
            peers_max: limits::INSTANCES_MAX * 4,
            handshakes_max: 256,
            handshakes_unproven_max: 32,
            handshakes_address_max: 64,
            connections_address_max: limits::PEER_ADDRESS_CONNECTIONS_MAX,
            direct_node_max: limits::DIRECT_CONNECTIONS_NODE_MAX,
        }
    }
}

/// Smallest datagram that QUIC allows, in bytes.
const MTU_MIN: u16 = 1_200;
/// Largest datagram, in bytes. quinn hands the kernel batches of up to ten, and a batch over 65,507 bytes is dropped
/// by the kernel as a whole, silently.
const MTU_MAX: u16 = 6_500;
const _: () = assert!(MTU_MAX as u32 * 10 <= 65_507);
/// Bytes that a connection may have unread before its node is known and has given it a share of
/// [`TransportConfig::node_window_bytes`], and without one: more than any preface.
pub const FIRST_WINDOW_BYTES: u32 = 16 << 10;
const _: () = assert!(FIRST_WINDOW_BYTES as usize > 4 * limits::PREFACE_BYTES_MAX);
/// First guess of a round trip: a lost first datagram is repeated after about three of these.
const INITIAL_RTT: Duration = Duration::from_millis(30);

impl TransportConfig {
    pub(crate) fn check(&self) -> Result<(), BindError> {
        if self.keep_alive.saturating_mul(3) > self.idle_timeout {
            return Err(BindError::Config("idle_timeout must be at least three times keep_alive"));
        }
        if ![self.mtu_max, self.mtu_loopback].iter().all(|mtu| (MTU_MIN..=MTU_MAX).contains(mtu)) {
            return Err(BindError::Config("datagrams have 1200 to 6500 bytes"));
        }
        if self.queue_frames_max == 0 || self.inbox_frames_max == 0 || self.inbox_bytes_max < 1024 {
            return Err(BindError::Config("queues must hold at least one frame"));
        }
        if self.window_bytes < FIRST_WINDOW_BYTES {
            return Err(BindError::Config("window_bytes must be at least 16 KiB"));
        }
        if self.backoff_min.is_zero() || self.backoff_min > self.backoff_max {
            return Err(BindError::Config("backoff_min must be above 0 and not over backoff_max"));
        }
        Ok(())
    }

    /// An endpoint on `addr` with this configuration's socket and datagrams, which accepts with `server`. Call it within
    /// a tokio runtime. [`crate::Node::bind`] makes one; others are for comparisons.
    ///
    /// # Errors
    /// When the configuration contradicts itself, or the system refuses the socket.
    pub fn endpoint(&self, addr: SocketAddr, server: Option<ServerConfig>) -> Result<Endpoint, BindError> {
        let mut config = EndpointConfig::default();
        let largest = self.mtu_max.max(self.mtu_loopback);
        config
            .max_udp_payload_size(largest)
            .map_err(|_out_of_bounds| BindError::Config("mtu_max and mtu_loopback are out of range"))?;
        let socket = socket::open(addr, self.socket_buffer_bytes);
        socket
            .and_then(|socket| Endpoint::new(config, server, socket, Arc::new(TokioRuntime)))
            .map_err(|source| BindError::Socket { addr, source })
    }

    /// QUIC's own tunables for a path to `remote`.
    ///
    /// # Errors
    /// When the configuration contradicts itself.
    pub fn quic(&self, remote: SocketAddr) -> Result<Arc<quinn::TransportConfig>, BindError> {
        self.quic_with(remote, self.window_bytes).map(Arc::new)
    }

    /// As [`TransportConfig::quic`], with connections that begin with a receive window of `window` bytes.
    pub(crate) fn quic_with(&self, remote: SocketAddr, window: u32) -> Result<quinn::TransportConfig, BindError> {
        let idle = IdleTimeout::try_from(self.idle_timeout)
            .map_err(|_out_of_bounds| BindError::Config("idle_timeout is too long"))?;
        let mut cubic = congestion::CubicConfig::default();
        cubic.initial_window(self.initial_window_bytes);
        let mut acks = AckFrequencyConfig::default();
        // Acknowledging every tenth packet saves the receiver work; the delay bound keeps round-trip estimates fresh.
        acks.ack_eliciting_threshold(VarInt::from_u32(10)).max_ack_delay(Some(Duration::from_millis(5)));
        let mut mtu = MtuDiscoveryConfig::default();
        let mut quic = quinn::TransportConfig::default();
        if remote.ip().is_loopback() {
            quic.initial_mtu(self.mtu_loopback);
            mtu.upper_bound(self.mtu_loopback);
        } else {
            mtu.upper_bound(self.mtu_max);
        }
        quic.mtu_discovery_config(Some(mtu))
            .max_idle_timeout(Some(idle))
            .keep_alive_interval(Some(self.keep_alive))
            .initial_rtt(INITIAL_RTT)
            .stream_receive_window(VarInt::from_u32(self.window_bytes))
            .receive_window(VarInt::from_u32(window))
            .send_window(u64::from(self.window_bytes))
            .max_concurrent_bidi_streams(VarInt::from_u32(1))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .ack_frequency_config(Some(acks))
            .congestion_controller_factory(Arc::new(cubic));
        Ok(quic)
    }
}
