//! One simulated instance: an rManager, the sequences that use it, and a store in which every slot knows whose token
//! it holds, so that a read of anybody else's is seen.

use crate::{BorrowId, Output, PlacementReport, RManager, RManagerConfig};
use lagoon_kv::{Freed, LeaseHasher, Owner, Segment, SeqBlocks};
use lagoon_protocol::{Heartbeat, PlacementEntry, RefuseCode, TierRequest};
use lagoon_types::{Epoch, InstanceId, KvDType, KvRun, KvShape, LeaseId, LeaseRun, SeqId};
use std::collections::BTreeMap;

pub(super) const BLOCK_TOKENS: u32 = 4;
pub(super) const BLOCKS: u32 = 40;
pub(super) const RESERVE: u32 = 3;
pub(super) const TTL_MS: u64 = lagoon_types::limits::LEASE_TTL_MS;
pub(super) const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 1, head_dim: 2, dtype: KvDType::F16 };

/// A token of one sequence of one process: what a slot holds.
pub(super) type Token = (u64, u32);

/// The bytes that stand for a token's KV in a layer.
fn kv_bytes(uid: u64, positions: std::ops::Range<u32>, layer: u32, out: &mut Vec<u8>) {
    for pos in positions {
        let word = uid.wrapping_mul(31).wrapping_add(u64::from(pos * 2 + layer));
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// A write to a lease, a seal, or a read that attention would do.
#[derive(Clone, Debug)]
pub(super) enum Data {
    Write {
        lease: LeaseId,
        epoch: Epoch,
        layer: u32,
        offset: u32,
        tokens: u32,
        uid: u64,
        pos: u32,
    },
    Seal {
        lease: LeaseId,
        epoch: Epoch,
        entry: u32,
        hash: [u8; 32],
    },
    Read {
        run: LeaseRun,
        uid: u64,
    },
    /// `read_offset` is the first token of a refused read.
    Refused {
        lease: LeaseId,
        code: RefuseCode,
        read_offset: Option<u32>,
    },
}

#[derive(Debug)]
pub(super) struct Seq {
    pub(super) uid: u64,
    pub(super) table: SeqBlocks,
    pub(super) window: Option<u32>,
    /// The borrow in flight, and when it began.
    pub(super) borrow: Option<(BorrowId, u64)>,
    hashers: BTreeMap<LeaseId, LeaseHasher>,
}

impl Seq {
    pub(super) fn window_start(&self) -> u32 {
        self.window.map_or(0, |w| (self.table.written() + 1).saturating_sub(w).min(self.table.written()))
    }
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) rm: RManager,
    pub(super) report: PlacementReport,
    pub(super) incarnation: u64,
    pub(super) instance: Option<InstanceId>,
    /// The number to ask for at registration.
    pub(super) remembers: Option<InstanceId>,
    pub(super) seqs: BTreeMap<SeqId, Seq>,
    pub(super) store: Vec<Option<Token>>,
    pub(super) next_tick_ms: u64,
    pub(super) next_heartbeat_ms: u64,
    pub(super) next_register_ms: u64,
    issued: u64,
}

impl Node {
    pub(super) fn new(incarnation: u64) -> Self {
        let config = RManagerConfig {
            blocks_total: BLOCKS,
            block_tokens: BLOCK_TOKENS,
            shape: SHAPE,
            lend_blocks_max: BLOCKS - 8,
            lend_reserve_blocks: RESERVE,
            lease_ttl_ms: TTL_MS,
            incarnation,
            host: 0,
        };
        Self {
            rm: RManager::new(config).unwrap(),
            report: PlacementReport::default(),
            incarnation,
            instance: None,
            remembers: None,
            seqs: BTreeMap::new(),
            store: vec![None; (BLOCKS * BLOCK_TOKENS) as usize],
            next_tick_ms: 0,
            next_heartbeat_ms: 0,
            next_register_ms: 0,
            issued: 0,
        }
    }

    /// Its rows of the request placement map, as an instance makes them.
    pub(super) fn rows(&self) -> Vec<PlacementEntry> {
        let debtor = self.instance.map_or(0, |i| i.0);
        let own = self.seqs.iter().map(|(seq, s)| {
            let blocks = s.table.local_blocks();
            PlacementEntry { debtor, seq: seq.0, blocks, blocks_sealed: 0 }
        });
        own.filter(|r| r.blocks > 0).chain(self.rm.creditor.rows(&self.rm.pool)).collect()
    }

    pub(super) fn heartbeat(&mut self) -> Heartbeat {
        let mut heartbeat = self.rm.heartbeat(0, 0, Vec::new());
        let rows = self.rows();
        self.report.fill(&mut heartbeat, rows.into_iter());
        heartbeat
    }

    /// Starts a sequence of `blocks` blocks: `local` of them here (fewer if there are fewer), the rest borrowed.
    pub(super) fn start(&mut self, blocks: u32, local: u32, window: Option<u32>, now_ms: u64) {
        self.issued += 1;
        let id = SeqId(self.issued);
        let uid = self.incarnation.wrapping_add(self.issued);
        let table = SeqBlocks::new(BLOCK_TOKENS);
        self.seqs.insert(id, Seq { uid, table, window, borrow: None, hashers: BTreeMap::new() });
        self.grow(id, blocks, local, now_ms);
    }

    /// Adds blocks to a sequence that is not waiting for any.
    pub(super) fn grow(&mut self, id: SeqId, blocks: u32, local: u32, now_ms: u64) {
        let seq = self.seqs.get_mut(&id).unwrap();
        assert!(seq.borrow.is_none());
        let local = local.min(blocks).min(self.rm.available());
        let got = self
            .rm
            .pool
            .allocate_for(id, seq.table.blocks()..seq.table.blocks() + local, seq.table.last_local())
            .unwrap();
        seq.table.push_local(&got);
        if blocks > local {
            seq.borrow = Some((self.rm.debtor.borrow(id, blocks - local, TierRequest::Any, None, now_ms), now_ms));
        }
    }

    /// Ends a sequence, whatever it is doing.
    pub(super) fn finish(&mut self, id: SeqId, now_ms: u64) {
        let Some(mut seq) = self.seqs.remove(&id) else { return };
        if let Some((borrow, _)) = seq.borrow {
            assert!(self.rm.debtor.cancel(borrow, now_ms), "outputs are polled after every call");
        }
        let freed = seq.table.clear();
        self.give_back(id, &freed, now_ms);
    }

    fn give_back(&mut self, id: SeqId, freed: &Freed, now_ms: u64) {
        self.rm.pool.free(Owner::Own(id), &freed.local);
        freed.remote.iter().for_each(|entries| self.rm.debtor.held.release(entries, now_ms));
    }

    /// Writes the next `tokens` tokens of a sequence: here at once, to creditors by the returned messages.
    pub(super) fn write(&mut self, id: SeqId, tokens: u32, now_ms: u64) -> Vec<(InstanceId, Data)> {
        let seq = self.seqs.get_mut(&id).unwrap();
        let mut sends = Vec::new();
        let from = seq.table.written();
        let mut pieces = Vec::new();
        seq.table.segments(from..from + tokens, &mut pieces);
        assert_eq!(pieces.iter().map(Segment::tokens).sum::<u32>(), tokens);
        let mut whole = Vec::new();
        for piece in &pieces {
            let pos = piece.first_pos();
            match piece {
                Segment::Local(run) => {
                    (0..run.len).for_each(|i| self.store[(run.base + i) as usize] = Some((seq.uid, pos + i)));
                }
                Segment::Remote { creditor, run } => {
                    let hasher = seq.hashers.entry(run.lease).or_insert_with(|| {
                        LeaseHasher::new(SHAPE.layers as usize, BLOCK_TOKENS, SHAPE.layer_token_bytes())
                    });
                    let &LeaseRun { lease, epoch, offset, len, .. } = run;
                    for layer in 0..SHAPE.layers {
                        let mut bytes = Vec::new();
                        kv_bytes(seq.uid, pos..pos + len, layer, &mut bytes);
                        let mut entries = Vec::new();
                        hasher.write(layer as usize, &bytes, &mut entries);
                        whole.extend(entries.into_iter().map(|(entry, hash)| (*creditor, lease, entry, hash)));
                        sends.push((
                            *creditor,
                            Data::Write { lease, epoch, layer, offset, tokens: len, uid: seq.uid, pos },
                        ));
                    }
                }
            }
        }
        let advance = seq.table.advance(tokens);
        advance.mark(&mut self.rm.pool);
        let sealed: Vec<_> = advance.sealed_remote.iter().map(|b| (b.creditor, b.lease, b.entry)).collect();
        assert_eq!(sealed, whole.iter().map(|w| (w.0, w.1, w.2)).collect::<Vec<_>>(), "sealed blocks are whole ones");
        for (block, (_, _, _, hash)) in advance.sealed_remote.iter().zip(whole) {
            let (lease, epoch, entry) = (block.lease, block.epoch, block.entry);
            sends.push((block.creditor, Data::Seal { lease, epoch, entry, hash }));
        }
        if let Some(window) = seq.window {
            let freed = seq.table.free_behind_window(seq.table.written(), window);
            self.give_back(id, &freed, now_ms);
        }
        sends
    }

    /// What attention of the next token would read of creditors. Asserts that it reads its own tokens here.
    pub(super) fn read(&self, id: SeqId) -> Vec<(InstanceId, Data)> {
        let seq = &self.seqs[&id];
        let mut local = Vec::new();
        seq.table.local_runs(seq.table.written(), seq.window_start(), &mut local);
        for run in &local {
            self.assert_holds(run, seq.uid);
        }
        let remote = seq.table.remote_runs(seq.table.written(), seq.window_start());
        let of = |(creditor, runs): (InstanceId, Vec<LeaseRun>)| {
            runs.into_iter().map(move |run| (creditor, Data::Read { run, uid: seq.uid }))
        };
        remote.into_iter().flat_map(of).collect()
    }

    fn assert_holds(&self, run: &KvRun, uid: u64) {
        for i in 0..run.len {
            let holds = self.store[(run.base + i) as usize];
            assert_eq!(holds, Some((uid, run.first_pos + i)), "attention reads somebody else's KV");
        }
    }

    /// The creditor's side of data messages. The answer goes back.
    pub(super) fn on_data(&mut self, from: InstanceId, data: &Data, now_ms: u64) -> Option<Data> {
        let mut read_offset = None;
        let (lease, result) = match *data {
            Data::Write { lease, epoch, layer, offset, tokens, uid, pos } => {
                let pieces = self.rm.creditor.begin_write(from, (lease, epoch), layer, offset, tokens);
                let done = pieces.map(|pieces| {
                    let mut bytes = Vec::new();
                    kv_bytes(uid, pos..pos + tokens, layer, &mut bytes);
                    self.rm.commit_write(lease, layer, &bytes, now_ms);
                    for p in pieces {
                        let token = |i| Some((uid, pos + p.token0 + i));
                        (0..p.tokens).for_each(|i| self.store[(p.slot0 + i) as usize] = token(i));
                    }
                });
                (lease, done)
            }
            Data::Seal { lease, epoch, entry, hash } => {
                (lease, self.rm.creditor.seal(from, (lease, epoch), entry, &hash, &mut self.rm.pool).map(drop))
            }
            Data::Read { run, uid } => {
                read_offset = Some(run.offset);
                let mut runs = Vec::new();
                let result = self.rm.creditor.resolve(from, &run, &mut runs);
                let written = |l| self.rm.creditor.written(from, (run.lease, run.epoch), l).unwrap_or(0);
                if result.is_ok() && (0..SHAPE.layers).all(|l| written(l) >= run.offset + run.len) {
                    runs.iter().for_each(|r| self.assert_holds(r, uid));
                }
                (run.lease, result)
            }
            Data::Refused { .. } => return None,
        };
        result.err().map(|code| Data::Refused { lease, code, read_offset })
    }

    /// Ends the sequences that have KV on `creditor`, or in one of its leases: messages in flight to it are lost.
    pub(super) fn lose_creditor(&mut self, creditor: InstanceId, lease: Option<LeaseId>, now_ms: u64) {
        let hit = |s: &Seq| s.table.leases().any(|l| l.creditor == creditor && lease.is_none_or(|id| id == l.lease));
        let lost: Vec<SeqId> = self.seqs.iter().filter(|(_, s)| hit(s)).map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.finish(id, now_ms));
    }

    /// Takes outputs that concern sequences; others are returned.
    pub(super) fn on_output(&mut self, output: Output, now_ms: u64, ended: &mut Vec<&'static str>) -> Option<Output> {
        match output {
            Output::Borrowed { borrow, seq: id, leases } => {
                let seq = self.seqs.get_mut(&id).expect("a cancelled borrow says nothing");
                assert_eq!(seq.borrow.take().map(|b| b.0), Some(borrow));
                leases.iter().for_each(|l| seq.table.push_remote(&l.grant()));
                ended.push("borrowed");
                None
            }
            Output::BorrowFailed { borrow, seq: id, reason } => {
                let seq = self.seqs.get_mut(&id).expect("a cancelled borrow says nothing");
                assert_eq!(seq.borrow.take().map(|b| b.0), Some(borrow));
                ended.push(match reason {
                    crate::BorrowFailure::NoCreditors => "no creditors",
                    crate::BorrowFailure::Refused => "refused",
                    crate::BorrowFailure::Deadline => "deadline",
                    crate::BorrowFailure::PoolTooSmall { .. } => "pool too small",
                });
                self.finish(id, now_ms);
                None
            }
            Output::LeaseLost { seq, .. } => {
                ended.push("lease lost");
                self.finish(seq, now_ms);
                None
            }
            other => Some(other),
        }
    }
}
