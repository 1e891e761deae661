//! How fast a path is, measured when it is opened: bounded in bytes and in time.

use super::lanes::{LanesConfig, dial};
use super::serve::ExportServer;
use crate::Node;
use lagoon_protocol::DirectFrame;
use lagoon_wire::direct::{DirectItem, DirectReader, encode};
use std::{
    hint::black_box,
    net::SocketAddr,
    time::{Duration, Instant},
};

/// A path below this share of its expectation is warned about.
const SHARE_MIN: f64 = 0.5;
/// Time that a measurement may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// Bytes of shared memory that are measured, and how often: less than a tenth of a second at memory's rate.
const SHARED_BYTES: usize = 32 << 20;
const ROUNDS: usize = 3;
/// Bytes of a memory of this process that are copied while its owner does not write them.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes of one probe.
const PROBE_BYTES: u64 = 4 << 20;

/// A measured path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// As [`super::Path::name`].
    pub path: &'static str,
    pub bytes_per_s: f64,
    /// What the path should reach; 0 where that is unknown.
    pub expected_bytes_per_s: f64,
}

impl Probe {
    /// Whether the path is far under its expectation.
    #[must_use]
    pub fn is_slow(&self) -> bool {
        self.bytes_per_s < self.expected_bytes_per_s * SHARE_MIN
    }

    /// Measures shared memory of another process: what one thread copies out of it, beside what it copies of this
    /// process's own memory at the same moment. What is copied is discarded, so that it does not matter who writes it.
    ///
    /// # Errors
    /// When the memory cannot be read.
    #[cfg(target_os = "linux")]
    pub fn of_arena(arena: &lagoon_backend::ArenaView) -> Result<Self, String> {
        let bytes = arena.bytes().min(SHARED_BYTES);
        let mut target = vec![2u8; bytes];
        let mut bytes_per_s = 0f64;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            arena.copy(0, &mut target, None).map_err(|error| error.to_string())?;
            black_box(&target);
            bytes_per_s = bytes_per_s.max(rate(u64::try_from(bytes).unwrap_or(0), start));
        }
        Ok(Self { path: "same host", bytes_per_s, expected_bytes_per_s: memcpy_bytes_per_s(bytes) })
    }

    /// As [`Probe::of_arena`], of a writer's memory in this process, in pieces so small that its owner hardly waits.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub fn within(server: &ExportServer) -> Result<Self, String> {
        let region = server.regions().first().ok_or("the writer has no memory")?;
        let bytes = usize::try_from(region.bytes()).unwrap_or(usize::MAX).min(SHARED_BYTES);
        let mut target = vec![2u8; bytes];
        let mut bytes_per_s = 0f64;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            for (offset, piece) in (0..).step_by(PIECE_BYTES).zip(target.chunks_mut(PIECE_BYTES)) {
                let mut rest = &mut piece[..];
                let read = region.view(offset, rest.len(), &mut |part| {
                    let (now, later) = std::mem::take(&mut rest).split_at_mut(part.len());
                    now.copy_from_slice(part);
                    rest = later;
                });
                read.map_err(|error| error.to_string())?;
            }
            black_box(&target);
            bytes_per_s = bytes_per_s.max(rate(u64::try_from(bytes).unwrap_or(0), start));
        }
        Ok(Self { path: "same process", bytes_per_s, expected_bytes_per_s: memcpy_bytes_per_s(bytes) })
    }
}

#[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
fn rate(bytes: u64, start: Instant) -> f64 {
    bytes as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

/// How fast one thread copies memory that is in no cache: what paths within a host are compared with.
#[must_use]
pub fn memcpy_bytes_per_s(bytes: usize) -> f64 {
    let (source, mut target) = (vec![1u8; bytes], vec![2u8; bytes]);
    let rates = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        target.copy_from_slice(black_box(&source));
        black_box(&target);
        rate(u64::try_from(bytes).unwrap_or(0), start)
    });
    rates.fold(0.0, f64::max)
}

impl Node {
    /// Measures the QUIC path to a writer with `bytes` bytes (whole probes of 4 MiB) over one connection.
    /// `expected_bytes_per_s` is what the link should carry, or 0.
    ///
    /// # Errors
    /// When the writer cannot be reached, or does not answer in time.
    pub async fn probe_direct(
        &self,
        addr: SocketAddr,
        config: LanesConfig,
        bytes: u64,
        expected_bytes_per_s: f64,
    ) -> Result<Probe, String> {
        let measured = tokio::time::timeout(DEADLINE, self.measure(addr, config, bytes)).await;
        let bytes_per_s = measured.map_err(|_elapsed| "a probe took too long".to_owned())??;
        Ok(Probe { path: "quic", bytes_per_s, expected_bytes_per_s })
    }

    async fn measure(&self, addr: SocketAddr, config: LanesConfig, bytes: u64) -> Result<f64, String> {
        let (connection, mut send, mut recv, mut rest) = dial(self.shared(), addr, config).await?;
        let count = bytes.div_ceil(PROBE_BYTES).max(1);
        let frames: Result<Vec<_>, _> =
            (0..count).map(|id| encode(&DirectFrame::Probe { id, bytes: PROBE_BYTES })).collect();
        let mut frames = frames.map_err(|error| error.to_string())?;
        let start = Instant::now();
        send.write_all_chunks(&mut frames).await.map_err(|error| error.to_string())?;
        let mut left = count.saturating_mul(PROBE_BYTES);
        let mut reader = DirectReader::new();
        while left > 0 {
            match reader.next_item(&mut rest).map_err(|error| error.to_string())? {
                Some(DirectItem::Bytes(part)) => {
                    left = left.saturating_sub(u64::try_from(part.len()).unwrap_or(u64::MAX));
                }
                Some(DirectItem::Frame(DirectFrame::Data { .. })) => {}
                Some(DirectItem::Frame(other)) => return Err(format!("a probe was answered with {other:?}")),
                None => match recv.read_chunk(usize::MAX, true).await.map_err(|error| error.to_string())? {
                    Some(chunk) => rest = chunk.bytes,
                    None => return Err("the writer ended the probe".to_owned()),
                },
            }
        }
        let rate = rate(count.saturating_mul(PROBE_BYTES), start);
        connection.close(quinn::VarInt::from_u32(crate::session::close::BYE), b"probed");
        Ok(rate)
    }
}
