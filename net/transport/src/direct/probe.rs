//! How fast a path is, measured when it is opened: bounded in bytes and in time.

use super::streams::{StreamsConfig, dial};
use crate::{Node, Subject, exports::ExportServer, open_direct::Opened};
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
/// Bytes of memory that are measured, and how often: less than a tenth of a second at memory's rate.
const MEMORY_BYTES: usize = 32 << 20;
const ROUNDS: usize = 3;
/// Bytes that are timed at once: few enough that most are copied without a pause on a machine that does other work, too.
const TIMED_BYTES: usize = 2 << 20;
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
    /// Expected rate of the path; 0 if unknown.
    pub expected_bytes_per_s: f64,
}

impl Probe {
    /// Whether the path is far under its expectation.
    #[must_use]
    pub fn is_slow(&self) -> bool {
        self.bytes_per_s < self.expected_bytes_per_s * SHARE_MIN
    }

    /// Measures the rate at which one thread copies shared memory of another process, and, in turns, memory of this one. The
    /// copies are discarded, so the other process may write meanwhile.
    ///
    /// # Errors
    /// When the memory cannot be read.
    #[cfg(target_os = "linux")]
    pub fn of_arena(arena: &lagoon_backend::ArenaView) -> Result<Self, String> {
        let copy = |offset: u64, target: &mut [u8]| arena.copy(offset, target, None).map_err(|error| error.to_string());
        Self::of_memory("same host", arena.bytes(), copy)
    }

    /// Measures the rate of device copies from another process's shared region to the own device, and within the own device.
    ///
    /// # Errors
    /// When there is no memory to measure with, or the device fails.
    #[cfg(target_os = "linux")]
    pub fn of_region(path: &'static str, region: &dyn lagoon_backend::PeerRegion) -> Result<Self, String> {
        let (bytes_per_s, expected_bytes_per_s) = region.rates().map_err(|error| error.to_string())?;
        Ok(Self { path, bytes_per_s, expected_bytes_per_s })
    }

    /// As [`Probe::of_arena`], of a writer's memory in this process, in pieces so small that its owner hardly waits.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub fn within(server: &ExportServer) -> Result<Self, String> {
        let region = server.regions().first().ok_or("the writer has no memory")?;
        let copy = |offset: u64, target: &mut [u8]| {
            for (offset, target) in (offset..).step_by(PIECE_BYTES).zip(target.chunks_mut(PIECE_BYTES)) {
                let mut rest = &mut target[..];
                let read = region.view(offset, rest.len(), &mut |part| {
                    let (now, later) = std::mem::take(&mut rest).split_at_mut(part.len());
                    now.copy_from_slice(part);
                    rest = later;
                });
                read.map_err(|error| error.to_string())?;
            }
            Ok(())
        };
        Self::of_memory("same process", usize::try_from(region.bytes()).unwrap_or(usize::MAX), copy)
    }

    /// The rate of `copy`, from offsets of a memory of `bytes` bytes, and in turns that of copies of the own memory: the
    /// medians of many short copies, so that other work on the machine slows both or neither.
    fn of_memory(
        path: &'static str,
        bytes: usize,
        mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), String>,
    ) -> Result<Self, String> {
        let bytes = bytes.min(MEMORY_BYTES);
        let (source, mut own, mut target) = (vec![1u8; bytes], vec![2u8; bytes], vec![2u8; bytes]);
        let (mut rates, mut expected) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let pairs = source.chunks(TIMED_BYTES).zip(own.chunks_mut(TIMED_BYTES));
            for ((offset, target), (source, own)) in
                (0..).step_by(TIMED_BYTES).zip(target.chunks_mut(TIMED_BYTES)).zip(pairs)
            {
                let start = Instant::now();
                copy(offset, target)?;
                black_box(&target);
                let copied = rate(target.len(), start);
                let start = Instant::now();
                own.copy_from_slice(black_box(source));
                black_box(&own);
                // The first round finds the pages.
                if round > 0 {
                    rates.push(copied);
                    expected.push(rate(own.len(), start));
                }
            }
        }
        Ok(Self { path, bytes_per_s: median(&mut rates), expected_bytes_per_s: median(&mut expected) })
    }
}

/// 0 of nothing.
fn median(rates: &mut [f64]) -> f64 {
    rates.sort_unstable_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
fn rate(bytes: usize, start: Instant) -> f64 {
    bytes as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

impl Node {
    /// Measures the QUIC path to a writer with `bytes` bytes (whole probes of 4 MiB) over one connection.
    /// `expected_bytes_per_s`: the link's nominal rate, or 0.
    ///
    /// # Errors
    /// When the writer cannot be reached, or does not answer in time.
    pub async fn probe_direct(
        &self,
        addr: SocketAddr,
        config: StreamsConfig,
        bytes: u64,
        expected_bytes_per_s: f64,
    ) -> Result<Probe, String> {
        let measured = tokio::time::timeout(DEADLINE, self.measure(addr, config, bytes)).await;
        let bytes_per_s = measured.map_err(|_elapsed| "a probe took too long".to_owned())??;
        Ok(Probe { path: "quic", bytes_per_s, expected_bytes_per_s })
    }

    async fn measure(&self, addr: SocketAddr, config: StreamsConfig, bytes: u64) -> Result<f64, String> {
        let (connection, mut send, mut recv, mut rest) = dial(self.shared(), addr, config).await?;
        let (subject, window) = (Subject::of_peer(&connection)?, self.shared().config.window_bytes);
        let entered = self.shared().enter_direct(&subject, Opened::Here, &connection, window);
        let _entry = entered.map_err(|(_code, reason)| reason)?;
        let count = bytes.div_ceil(PROBE_BYTES).max(1);
        let frames: Result<Vec<_>, _> =
            (0..count).map(|id| encode(&DirectFrame::Probe { id, bytes: PROBE_BYTES })).collect();
        let mut frames = frames.map_err(|error| error.to_string())?;
        let start = Instant::now();
        send.write_all_chunks(&mut frames).await.map_err(|error| error.to_string())?;
        let all = count.saturating_mul(PROBE_BYTES);
        let mut left = all;
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
        let rate = rate(usize::try_from(all).unwrap_or(usize::MAX), start);
        connection.close(quinn::VarInt::from_u32(crate::close::BYE), b"probed");
        Ok(rate)
    }
}
