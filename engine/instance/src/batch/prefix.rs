//! The prefix cache: free blocks keep their KV, and a sequence with the same token prefix begins with them
//! (docs/adr/0016).
//!
//! Each own block gets its block hash, a chain over all tokens up to the block's end, in the step that writes its last
//! token. The pool (`lagoon_kv::BlockPool`) decides how long a hashed block stays cached after its last owner (a
//! request of this instance, a lease of a decode worker) frees it. A sequence that gets all its memory here looks its
//! prefix up; at least one token is computed, for the logits. A free hit becomes its own block; a hit in use is shared:
//! the same block, or, where the device maps memory, mapped at an address of its own. Running sequences with a common
//! prefix share blocks that one of them has computed when another reaches them.
//!
//! Invariants:
//! * only blocks that are sealed and whole have block hashes, and a block with a hash is never written;
//! * each owner moves, frees, lends or hands over a shared block for itself; it is free after the last owner;
//! * memory is mapped at a second address before the first one can be reused, and hashed there once mapped.

use super::pool_prefix::send_hashes;
use super::sequence::Sequence;
use super::{Batch, Others};
use crate::cx::Cx;
use crate::event::Effect;
use crate::outcome::Outcome;
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::{Adopted, Owner, Placement};
use lagoon_runner::{Command, ShareId};
use lagoon_types::{CachedTokens, PhysBlock, SeqId};

impl Batch {
    /// Computes the block hashes of a sequence's first `blocks` blocks; all their tokens must be known.
    pub(crate) fn hash_tokens(&mut self, cx: &Cx, id: SeqId, blocks: u32) {
        let (Some(root), Some(seq)) = (cx.memory.prefix.root(), self.seqs.get_mut(&id)) else { return };
        let (block_tokens, blocks) = (cx.config.block_tokens as usize, blocks as usize);
        // Only the first block needs the root.
        let salt: &str = if mutants::is(Mutant::SaltIgnored) { "" } else { &seq.options.cache_salt };
        let root = if seq.block_hashes.is_empty() { root.salted(salt) } else { root };
        for block in seq.block_hashes.len()..blocks {
            let tokens = &seq.tokens[block * block_tokens..(block + 1) * block_tokens];
            let tokens: &[u32] = if mutants::is(Mutant::TokensUnhashed) { &[] } else { tokens };
            let hash = seq.block_hashes.last().unwrap_or(&root).then(tokens);
            seq.block_hashes.push(hash);
        }
    }

    /// Registers the block hashes of own blocks that a step has filled; joins blocks that others computed meanwhile.
    pub(crate) fn register_hashes(&mut self, cx: &mut Cx, others: Others<'_>, id: SeqId) {
        let Some(seq) = self.seqs.get(&id).filter(|_| cx.memory.prefix.root().is_some()) else { return };
        let whole = seq.blocks.next_position() / cx.config.block_tokens;
        if whole <= seq.hashed {
            return;
        }
        self.hash_tokens(cx, id, whole);
        let joins = self.joins(others, id);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let first = std::mem::replace(&mut seq.hashed, whole);
        // In joint prefill each member hashes what it computes.
        if seq.joint.is_none() {
            send_hashes(cx, seq, first..whole);
        }
        for block in first..whole {
            let (Placement::Local(at), hash) =
                (seq.blocks.placements()[block as usize], &seq.block_hashes[block as usize])
            else {
                continue;
            };
            // Joins an equal block computed by others, unless memory mapped at several addresses is in use.
            let joins = joins && !cx.memory.rm.pool.is_shared(at);
            match joins.then(|| cx.memory.rm.pool.join(Owner::Own(id), at, hash, false)).flatten() {
                Some(joined) => {
                    seq.blocks.relocate(block, Placement::Local(joined.block));
                    cx.memory.prefix.note_shared(1);
                }
                None => cx.memory.rm.pool.set_hash(at, *hash, block),
            }
        }
    }

    /// Whether blocks of a sequence may be replaced by equal ones: no transport, move or step uses their numbers.
    fn joins(&self, others: Others<'_>, id: SeqId) -> bool {
        !others.prefills.is_pushed(id) && !others.moves.is_moving(id) && !self.sched.in_step(id)
    }

    /// Shares blocks that others have computed since this sequence began, instead of computing them (or their rest).
    pub(crate) fn catch_up(&mut self, cx: &mut Cx, others: Others<'_>, id: SeqId) {
        let (tokens, map, row_us) = (cx.config.block_tokens, self.may_map(cx, id), self.row_us(cx));
        let Some(seq) = self.seqs.get(&id).filter(|_| cx.memory.prefix.root().is_some() && self.joins(others, id))
        else {
            return;
        };
        let (next, whole) = (seq.blocks.next_position(), (seq.len() - 1) / tokens);
        let (free, first) = (seq.may_change_memory(), next / tokens);
        let known = seq.blocks.lost().is_empty() && seq.blocks.lost_blocks() == 0 && seq.hashed == first;
        let (copies, left) = (seq.sharing.is_some() || seq.loading.is_some(), whole.min(seq.blocks.blocks()));
        if !free || !known || seq.needs_positions() || copies || first >= left {
            return;
        }
        self.hash_tokens(cx, id, whole);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let mut mapped = Vec::new();
        for block in first..left {
            let Placement::Local(at) = seq.blocks.placements()[block as usize] else { break };
            let Some(joined) = cx.memory.rm.pool.join(Owner::Own(id), at, &seq.block_hashes[block as usize], map)
            else {
                break;
            };
            let known = (block + 1) * tokens - seq.blocks.next_position();
            let advance = seq.blocks.join(block, joined.block);
            advance.mark(&mut cx.memory.rm.pool);
            self.sched.skip(id, known);
            let found = CachedTokens::on_device(known);
            cx.memory.prefix.note_found(found, f64::from(known) * row_us);
            let prompt = seq.prompt.as_mut().filter(|_| !seq.preempted);
            prompt.into_iter().for_each(|prompt| prompt.cached += found);
            cx.memory.prefix.note_shared(1);
            match joined.mapped {
                Some(from) => mapped.push((from, joined.block)),
                None => seq.hashed = block + 1,
            }
        }
        if !mapped.is_empty() {
            self.map_blocks(cx, id, &mapped, &[]);
        }
    }

    /// Computes the hashes of all blocks of a waiting sequence before its last token. Returns their number.
    pub(super) fn hash_wanted(&mut self, cx: &Cx, id: SeqId) -> usize {
        let hits = |seq: &Sequence| seq.blocks.blocks() == 0 && !seq.needs_positions();
        let waits = |seq: &&Sequence| cx.memory.prefix.root().is_some() && hits(seq);
        let Some(seq) = self.seqs.get(&id).filter(waits) else { return 0 };
        let whole = (seq.len() - 1) / cx.config.block_tokens;
        self.hash_tokens(cx, id, whole);
        whole as usize
    }

    /// Whether the device may map shared blocks at addresses of this sequence. Not where transports write into blocks
    /// themselves, unordered with mapping; KV from staging buffers the device copies in order.
    fn may_map(&self, cx: &Cx, id: SeqId) -> bool {
        !cx.reads_directly() && self.seqs.get(&id).is_some_and(|seq| !seq.maps_nothing)
    }

    /// Number of a waiting sequence's blocks that cost no memory here, being in use by others.
    pub(crate) fn shareable(&mut self, cx: &Cx, id: SeqId) -> u32 {
        let (map, wanted) = (self.may_map(cx, id), self.hash_wanted(cx, id));
        self.seqs.get(&id).map_or(0, |seq| cx.memory.rm.pool.shareable(&seq.block_hashes[..wanted], map))
    }

    /// Puts cached and shared prefix blocks at the start of a waiting sequence's table. Returns their number and the
    /// last one.
    pub(crate) fn adopt_prefix(&mut self, cx: &mut Cx, id: SeqId) -> (u32, Option<PhysBlock>) {
        let (blocks, hashed) = self.take_prefix(cx, id);
        let Some(seq) = self.seqs.get_mut(&id).filter(|_| !blocks.is_empty()) else { return (0, None) };
        let known = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        seq.blocks.push_local(&blocks);
        let advance = seq.blocks.advance(known * cx.config.block_tokens);
        seq.hashed = hashed;
        advance.mark(&mut cx.memory.rm.pool);
        (known, blocks.last().copied())
    }

    /// Takes cached and shared prefix blocks for a sequence that has none and gets all its memory here: its first
    /// blocks, and how many have hashes now. Commands mappings at once, ahead of later writes to the sources'
    /// addresses.
    pub(crate) fn take_prefix(&mut self, cx: &mut Cx, id: SeqId) -> (Vec<PhysBlock>, u32) {
        let (tokens, map) = (cx.config.block_tokens, self.may_map(cx, id));
        let wanted = self.hash_wanted(cx, id);
        let Some(seq) = self.seqs.get(&id).filter(|seq| seq.blocks.blocks() == 0 && cx.memory.prefix.root().is_some())
        else {
            return (Vec::new(), 0);
        };
        let len = seq.len();
        let Adopted { blocks, shared, mapped, left } = cx.memory.rm.pool.adopt(id, &seq.block_hashes[..wanted], map);
        let known = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        // Blocks to be mapped get their hashes when mapped.
        let first = mapped.first().and_then(|(_, to)| blocks.iter().position(|block| block == to));
        let hashed = first.map_or(known, |first| u32::try_from(first).unwrap_or(known));
        cx.memory.prefix.note_lookup(len);
        let found = CachedTokens::on_device(known * tokens);
        cx.memory.prefix.note_found(found, f64::from(known * tokens) * self.row_us(cx));
        cx.memory.prefix.note_shared(shared);
        // A preempted sequence finds its own blocks.
        let prompt = self.seqs.get_mut(&id).filter(|seq| seq.began_ms.is_none()).and_then(|seq| seq.prompt.as_mut());
        prompt.into_iter().for_each(|prompt| prompt.cached = found);
        if !mapped.is_empty() {
            self.map_blocks(cx, id, &mapped, &left);
        }
        (blocks, hashed)
    }

    /// Has the device map memory behind `mapped` blocks of a sequence, and unmap it behind `left`.
    fn map_blocks(&mut self, cx: &mut Cx, id: SeqId, mapped: &[(PhysBlock, PhysBlock)], left: &[PhysBlock]) {
        let tokens = cx.config.block_tokens;
        let share = cx.memory.prefix.begin_mapping();
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.sharing = Some(share);
        }
        let slots = mapped.iter().map(|(from, to)| (from.0 * tokens, to.0 * tokens)).collect();
        cx.release_freed();
        cx.effects.push(Effect::Runner(Command::Share { share, tokens, slots }));
        cx.release_blocks(left.to_vec());
    }

    /// Ends a mapping: its blocks get their hashes, or on an error the sequence is recomputed without mapped blocks.
    pub(crate) fn on_shared(&mut self, cx: &mut Cx, others: Others<'_>, share: ShareId, error: Option<&DeviceError>) {
        cx.memory.prefix.end_mapping();
        let Some(seq) = self.seqs.values_mut().find(|s| s.sharing == Some(share)) else { return };
        let id = seq.id;
        seq.sharing = None;
        let Some(error) = error else { return self.register_hashes(cx, others, id) };
        tracing::warn!(%error, seq = %id, "blocks could not be mapped");
        seq.maps_nothing = true;
        if seq.is_away() {
            cx.emit(Outcome::Redo { seq: id, why: "blocks could not be mapped" });
        } else if self.is_running(id) {
            self.preempt(cx, others.prefills, id);
        } else {
            self.release_memory(cx, others.prefills, id);
        }
    }
}
