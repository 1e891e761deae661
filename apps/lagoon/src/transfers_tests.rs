//! Two instances' transports in one process.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::local::EphemeralCa;
use lagoon_instance::{JointConfig, LayerWindows, RemotePolicy, SchedulerConfig};
use lagoon_protocol::{MemoryTier, Role};
use lagoon_transfer::{Reader, ReaderConfig, ReaderOutput};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvShape, ModelHash};

const WRITER: InstanceId = InstanceId(1);
const READER: InstanceId = InstanceId(2);
const BLOCK_TOKENS: u32 = 4;
const BLOCKS: u32 = 6;
const KV: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 8, dtype: KvDType::F32 };
/// No test takes so long.
const TIMEOUT: Duration = Duration::from_secs(60);

fn config(incarnation: u64) -> InstanceConfig {
    let geometry = AttentionGeometry { heads: 2, kv_heads: 2, head_dim: 8, latent: false };
    let model_hash = ModelHash([3; 32]);
    let transfer = TransferConfig::new(model_hash, KV, (BLOCKS, BLOCK_TOKENS), host_identity()).unwrap();
    InstanceConfig {
        name: String::new(),
        quic_addr: String::new(),
        http_addr: String::new(),
        host: String::new(),
        backend: "cpu".to_owned(),
        role: Role::Prefill,
        tier: MemoryTier::Device,
        calibration: None,
        incarnation,
        model_hash,
        geometry,
        kv: KV,
        window: None,
        windowed: None,
        layer_windows: LayerWindows::default(),
        attention_scale: 1.0,
        alibi: None,
        attention_softcap: None,
        max_positions: 64,
        vocab: 16,
        block_tokens: BLOCK_TOKENS,
        blocks_total: BLOCKS,
        lend_blocks_max: 0,
        lend_reserve_blocks: 0,
        sched: SchedulerConfig { queue: 1, running: 1, step_rows: 1, drafts: 0, draft_model: false },
        remote: RemotePolicy::Ship,
        wire: DType::F32,
        fetch_tokens: 1,
        link_bytes_per_s: 1e9,
        attention_flops: 1e9,
        transfer: Some(transfer),
        lent: None,
        peer_access: None,
        prefix_cache: false,
        joint: JointConfig::OFF,
        target_step_ms: None,
    }
}

fn arenas() -> Vec<KvArena> {
    let block_bytes = BLOCK_TOKENS as usize * KV.layer_token_bytes();
    (0..KV.layers).map(|_| KvArena::new(BLOCKS as usize * block_bytes, block_bytes).unwrap()).collect()
}

fn start(incarnation: u64, arenas: &[KvArena], ca: &EphemeralCa) -> Transfers {
    let listen = "127.0.0.1:0".parse().unwrap();
    let endpoint = Endpoint { listen, advertise: None, interface: None, reason: String::new() };
    let memory = KvMemory::Host(arenas.to_vec());
    Transfers::start(
        &config(incarnation),
        &memory,
        &endpoint,
        &ca.identity(lagoon_transport::NodeRole::Instance).unwrap(),
    )
    .unwrap()
}

fn tokens(arenas: &[KvArena], block: u32, tokens: u32) -> Vec<u8> {
    let at = u64::from(block * BLOCK_TOKENS) * KV.layer_token_bytes() as u64;
    let mut found = Vec::new();
    for arena in arenas {
        let bytes = tokens as usize * KV.layer_token_bytes();
        arena.view(at, bytes, &mut |part| found.extend_from_slice(part)).unwrap();
    }
    found
}

/// A decode worker's reader beside its transports, and those of the prefill worker.
struct Pair {
    writer: Transfers,
    own: Transfers,
    reader: Reader,
    path: Option<&'static str>,
    done: bool,
}

impl Pair {
    /// Does what the reader wants.
    fn pump(&mut self) {
        loop {
            self.reader.pump();
            let Some(output) = self.reader.poll() else { return };
            match output {
                ReaderOutput::Send { body, .. } => {
                    self.writer.carry_out(TransferEffect::ToWriter { from: READER, body })
                }
                ReaderOutput::Open { conn, writer, epoch, layout, arenas, addr } => {
                    let open = TransferEffect::Open { conn, reader: READER, writer, addr, epoch, layout, arenas };
                    self.own.carry_out(open);
                }
                ReaderOutput::Offered(offer) => {
                    self.reader.pull(offer.conn, offer.export, vec![0, 4], 0, 0).unwrap();
                }
                ReaderOutput::Read { conn, read, transaction, .. } => {
                    let of = |part: &lagoon_transfer::TransactionPart| {
                        let pull = self.reader.pull_of(lagoon_transfer::PullId(part.request)).cloned();
                        (part.request, pull.unwrap())
                    };
                    let pulls = transaction.parts.iter().map(of).collect();
                    self.own.carry_out(TransferEffect::Read { conn, read, transaction, pulls });
                }
                ReaderOutput::Check { pull, piece } => {
                    let of = Arc::clone(self.reader.pull_of(pull).unwrap());
                    self.own.carry_out(TransferEffect::Check { pull, piece, of });
                }
                ReaderOutput::Done { .. } => self.done = true,
                other => panic!("{other:?}"),
            }
        }
    }

    fn on_completion(&mut self, reported: Completion) {
        let opened = match &reported {
            Completion::Opened { path: Ok(path), .. } => Some(path.name()),
            _ => None,
        };
        match self.own.on_completion(reported) {
            Some(TransferEvent::Read { conn, read, result }) => self.reader.on_read(conn, read, result, 0),
            Some(TransferEvent::Checked { pull, piece, check }) => self.reader.on_checked(pull, piece, check, 0),
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        if opened.is_some() {
            self.path = opened;
            let part = Span { first_token: 0, tokens: 7, layers: None };
            let blocks = vec![5, 2];
            let export = TransferEffect::Export { job: SeqId(9), reader: READER, request: 3, part, blocks };
            self.writer.carry_out(export);
        }
    }

    fn on_writer_reported(&mut self, reported: Completion) {
        match self.writer.on_completion(reported) {
            Some(TransferEvent::FromWriter { body, .. }) => self.reader.on_control(WRITER, &body, 0),
            Some(TransferEvent::Exported { export, .. }) => assert!(export.is_ok(), "{export:?}"),
            Some(TransferEvent::Freed { .. }) | None => {}
            Some(other) => panic!("{other:?}"),
        }
    }
}

/// Reads two blocks; how they came, and how the path was measured.
async fn read(host: String) -> (&'static str, Option<&'static str>) {
    let (ca, theirs, ours) = (EphemeralCa::new().unwrap(), arenas(), arenas());
    for arena in &theirs {
        let mut n = 0u8;
        let fill = &mut |bytes: &mut [u8]| {
            bytes.iter_mut().for_each(|byte| (*byte, n) = (n, n.wrapping_mul(5).wrapping_add(7)))
        };
        arena.fill(0, arena.bytes(), fill).unwrap();
    }
    let (writer, own) = (start(1, &theirs, &ca), start(2, &ours, &ca));
    let layout = config(2).transfer.unwrap().layout;
    let mut reader = Reader::new(layout, ReaderConfig { incarnation: 2, host, ..ReaderConfig::default() });
    reader.connect(WRITER, 0).unwrap();
    let mut pair = Pair { writer, own, reader, path: None, done: false };
    let until = tokio::time::Instant::now() + TIMEOUT;
    while !pair.done || pair.own.measured().is_empty() {
        pair.pump();
        let reported = async {
            tokio::select! {
                reported = pair.own.next() => (true, reported.unwrap()),
                reported = pair.writer.next() => (false, reported.unwrap()),
            }
        };
        match tokio::time::timeout_at(until, reported).await {
            Ok((true, reported)) => pair.on_completion(reported),
            Ok((false, reported)) => pair.on_writer_reported(reported),
            Err(_elapsed) => panic!("{:?}, done: {}", pair.path, pair.done),
        }
    }
    assert_eq!(tokens(&ours, 0, 4), tokens(&theirs, 5, 4));
    assert_eq!(tokens(&ours, 4, 3), tokens(&theirs, 2, 3));
    (pair.path.unwrap(), pair.own.measured().first().map(|row| row.path))
}

/// A writer in this process is read without a socket; the same one by a reader that shares no host with it is not.
#[tokio::test]
async fn a_writer_in_the_same_process_is_read_there() {
    assert_eq!(read(host_identity()).await, ("same process", Some("same process")));
    assert_eq!(read(String::new()).await, ("quic", Some("quic")));
}
