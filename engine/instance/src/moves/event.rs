//! Events of the moves machine, and their dispatch.

use super::Moves;
use crate::batch::Batch;
use crate::cx::Cx;
use crate::cx::tags::ReadId;
use crate::outcome::Outcomes;
use bytes::Bytes;
use lagoon_cluster::{BorrowId, BorrowedLease};
use lagoon_protocol::{MoveKvCache, Recall, RefuseCode};
use lagoon_runner::RemoteTag;
use lagoon_types::{InstanceId, LeaseId, SeqId};

/// Events of moves.
#[derive(Debug)]
pub(crate) enum MoveEvent {
    /// A move order of the gManager.
    Order(MoveKvCache),
    /// A creditor recalls blocks.
    Recall {
        creditor: InstanceId,
        recall: Recall,
    },
    /// KV that a move read from a creditor.
    Data {
        from: InstanceId,
        read: ReadId,
        layer: u32,
        kv: Bytes,
    },
    /// A creditor refused a move's read, or a write or seal under this lease (`read` is `None`).
    Refused {
        creditor: InstanceId,
        read: Option<ReadId>,
        lease: LeaseId,
        code: RefuseCode,
        detail: String,
    },
    /// The device read, stored, or failed to.
    Read {
        tag: RemoteTag,
        kv: Bytes,
    },
    Stored(RemoteTag),
    Failed {
        tag: RemoteTag,
        error: String,
    },
    /// The target reserved blocks, or has too few.
    Reserved {
        borrow: BorrowId,
        lease: BorrowedLease,
    },
    NotReserved {
        borrow: BorrowId,
        lendable: Option<u32>,
    },
    /// The target has verified entries.
    Sealed {
        creditor: InstanceId,
        lease: LeaseId,
        entries: Vec<u32>,
    },
    /// A lease that a move writes to has ended; with `keep`, verified blocks are still switched to.
    TargetGone {
        creditor: InstanceId,
        lease: LeaseId,
        reason: &'static str,
        keep: bool,
    },
    /// A creditor is lost, as source or target: of one sequence, or of all (`None`).
    CreditorGone {
        creditor: InstanceId,
        seq: Option<SeqId>,
    },
    /// A sequence freed its memory.
    Released(SeqId),
    /// The oldest blocks of a sequence fell behind its window.
    BehindWindow(SeqId),
    /// Growth needs blocks reserved for moves home.
    RoomNeeded,
    /// Swap out: move a sequence's whole blocks to host memory.
    SwapOut {
        seq: SeqId,
        blocks: u32,
    },
    /// A step ended in which `growing` sequences grew and `other_rows` rows were of prompts or accepted drafts.
    Step {
        growing: u32,
        other_rows: u32,
        ms: u64,
    },
    /// Steps may have ended: switch sequences to verified copies.
    Switch,
    /// Copy more; `busy` while the runner works on a step.
    Pump {
        busy: bool,
    },
    Tick,
}

impl Moves {
    pub(crate) fn handle(&mut self, cx: &mut Cx, batch: &mut Batch, event: MoveEvent) -> Outcomes {
        match event {
            MoveEvent::Order(order) => self.on_move_order(cx, batch, &order),
            MoveEvent::Recall { creditor, recall } => self.on_recall(cx, batch, creditor, &recall),
            MoveEvent::Data { from, read, layer, kv } => self.on_move_data(cx, batch, (from, read), layer, kv),
            MoveEvent::Refused { creditor, read, lease, code, detail } => {
                self.on_refused(cx, batch, (creditor, lease), read, (code, &detail));
            }
            MoveEvent::Read { tag, kv } => self.on_move_kv(cx, batch, tag, kv),
            MoveEvent::Stored(tag) => self.on_move_stored(cx, tag),
            MoveEvent::Failed { tag, error } => self.on_move_failed(cx, batch, tag, &error),
            MoveEvent::Reserved { borrow, lease } => self.on_reserved(cx, batch, borrow, &lease),
            MoveEvent::NotReserved { borrow, lendable } => self.on_not_reserved(cx, batch, borrow, lendable),
            MoveEvent::Sealed { creditor, lease, entries } => self.on_sealed(cx, creditor, lease, &entries),
            MoveEvent::TargetGone { creditor, lease, reason, keep } => {
                _ = self.end_move_to(cx, batch, creditor, lease, reason, keep);
            }
            MoveEvent::CreditorGone { creditor, seq } => self.end_moves_with(cx, batch, creditor, seq),
            MoveEvent::Released(seq) => self.end_moves_of(cx, batch, seq),
            MoveEvent::BehindWindow(seq) => self.end_moves_behind_window(cx, batch, seq),
            MoveEvent::RoomNeeded => self.end_a_move_home(cx, batch),
            MoveEvent::SwapOut { seq, blocks } => self.start_swap_out(cx, batch, seq, blocks),
            MoveEvent::Step { growing, other_rows, ms } => self.pace.on_step(growing, other_rows, ms),
            MoveEvent::Switch => self.switch_moves(cx, batch),
            MoveEvent::Pump { busy } => self.pump_moves(cx, batch, busy),
            MoveEvent::Tick => self.expire_moves(cx, batch),
        }
        cx.take_outcomes()
    }
}
