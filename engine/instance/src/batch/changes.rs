//! Changes of a sequence that other machines report: steps that have computed chunks or sent KV, prompts read from a
//! prefill worker, blocks that moved. Each is one method, so that no other machine writes a sequence's fields.

use super::sequence::{HeldLease, LayerChecks, Sequence, Window};
use super::{Batch, Others};
use crate::cx::Cx;
use bytes::Bytes;
use lagoon_cluster::BorrowedLease;
use lagoon_kv::hash::ContentHash;
use lagoon_kv::{Placement, RemoteEntries, RemoteGrant};
use lagoon_runner::WriteSegment;
use lagoon_types::{CachedTokens, Chunk, FinishReason, PhysBlock, PromptLogprob, SeqId, TokenEvent};
use std::collections::BTreeMap;

/// A layer's KV that goes to a creditor, and the entries that it completes.
pub(crate) struct Written {
    /// Offset within the lease, in tokens.
    pub(crate) offset: u32,
    pub(crate) tokens: u32,
    pub(crate) kv: Bytes,
    /// Entries that are whole now, with their content hashes.
    pub(crate) complete: Vec<(u32, ContentHash)>,
}

/// A prompt whose KV was read from a prefill worker.
pub(crate) struct Pulled {
    pub(crate) tokens: u32,
    /// Leading rBlocks that stay with the worker, under its lease, and the checks of their content.
    pub(crate) left: (u32, BorrowedLease, BTreeMap<u32, LayerChecks>),
    /// The other rBlocks, here.
    pub(crate) blocks: Vec<PhysBlock>,
    /// Blocks whose hashes are registered with the pool.
    pub(crate) hashed: u32,
    pub(crate) window: Option<Window>,
}

impl Batch {
    /// Hashes a layer's new KV under a lease. Returns the tokens to send, without those that an aborted step has sent already.
    /// `None` if none are left, the lease has ended, or the lease is a move's.
    pub(crate) fn hash_written(
        &mut self,
        id: SeqId,
        write: &WriteSegment,
        (layer, token_bytes): (u32, usize),
        kv: &Bytes,
    ) -> Option<Written> {
        let held = self.seqs.get_mut(&id)?.leases.get_mut(&(write.creditor, write.lease))?;
        let hasher = held.hasher.as_mut()?;
        let skip = hasher.written(layer as usize).saturating_sub(write.offset).min(write.rows);
        let (offset, tokens) = (write.offset + skip, write.rows - skip);
        if tokens == 0 {
            return None;
        }
        let kv = kv.slice(skip as usize * token_bytes..);
        let mut complete = Vec::new();
        hasher.write(layer as usize, &kv, &mut complete);
        held.hashes.extend(complete.iter().copied());
        Some(Written { offset, tokens, kv, complete })
    }

    /// A step has computed a chunk: its KV is written. False if there is no such sequence.
    pub(crate) fn note_computed(&mut self, cx: &mut Cx, others: Others<'_>, chunk: &Chunk) -> bool {
        let Some(seq) = self.seqs.get_mut(&chunk.seq) else { return false };
        let again = seq.joint.is_none() && chunk.start < seq.blocks.written();
        let first = if again { seq.note_first(chunk.start..chunk.start + chunk.len) } else { 0 };
        let advance = seq.blocks.write(chunk.start, chunk.len);
        self.counts.recomputed_tokens += if again { u64::from(chunk.len - first) } else { 0 };
        advance.mark(&mut cx.memory.rm.pool);
        self.complete(chunk, chunk.last);
        self.free_loaded(cx, chunk.seq);
        self.register_hashes(cx, others, chunk.seq);
        true
    }

    /// The event about a sequence's prompt, before its first token.
    pub(crate) fn report_prompt(&mut self, id: SeqId) -> Option<TokenEvent> {
        self.seqs.get_mut(&id).and_then(Sequence::report_prompt)
    }

    /// [`Batch::report_prompt`] of a prompt that a worker computed, which had found `cached`.
    pub(crate) fn report_prompt_of(&mut self, id: SeqId, cached: CachedTokens) -> Option<TokenEvent> {
        let prompt = self.seqs.get_mut(&id).and_then(|seq| seq.prompt.as_mut());
        prompt.into_iter().for_each(|prompt| prompt.cached = cached);
        self.report_prompt(id)
    }

    /// Adds log-probabilities of a prompt's tokens, from the one at position `first` on.
    pub(crate) fn add_scores(&mut self, id: SeqId, first: u32, scores: Vec<PromptLogprob>) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let Some(prompt) = &mut seq.prompt else { return };
        assert_eq!(prompt.next_row() + 1, first, "{id}: every position once, in order");
        prompt.logprobs.extend(scores);
    }

    /// Appends a generated token. Returns why the sequence ends, if that token is the last.
    pub(crate) fn push_token(&mut self, cx: &Cx, id: SeqId, token: u32) -> Option<FinishReason> {
        self.seqs.get_mut(&id).and_then(|seq| seq.push(token, cx.config.max_positions))
    }

    /// A sequence no longer waits for the mapping of shared blocks: it has given them up.
    pub(crate) fn forget_mapping(&mut self, id: SeqId) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.sharing = None;
        }
    }

    /// Gives a sequence the KV of its prompt that was read from a prefill worker.
    pub(crate) fn take_pulled(&mut self, cx: &mut Cx, id: SeqId, pulled: Pulled) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let (left, BorrowedLease { creditor, lease, epoch, .. }, checks) = pulled.left;
        if left > 0 {
            seq.blocks.push_remote(&RemoteGrant { creditor, lease, epoch, blocks: left });
            seq.leases.insert((creditor, lease), HeldLease::handed(left, checks));
        }
        seq.blocks.push_local(&pulled.blocks);
        let advance = seq.blocks.advance(pulled.tokens);
        (seq.misses, seq.pulled_ms, seq.hashed) = (0, Some(cx.now_ms), pulled.hashed);
        seq.window = pulled.window;
        advance.mark(&mut cx.memory.rm.pool);
    }

    /// Switches a block of a sequence in no step to its verified copy. `hash`: the copy's content hash, at a creditor.
    ///
    /// # Panics
    /// If the block is not at `from`.
    pub(crate) fn switch_block(
        &mut self,
        id: SeqId,
        block: u32,
        (from, to): (Placement, Placement),
        hash: Option<ContentHash>,
    ) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let old = seq.blocks.relocate(block, to);
        assert_eq!(old, from, "a block that moves stays where it is until the switch");
        if let Placement::Remote(b) = to {
            let held = seq.leases.entry((b.creditor, b.lease)).or_insert_with(HeldLease::for_move);
            held.blocks += 1;
            held.hashes.insert(b.entry, hash.expect("verified by it"));
        }
        if let Placement::Remote(b) = old {
            seq.forget_entries(&RemoteEntries::one(&b));
        }
    }
}
