//! The prefix cache: free blocks keep what they hold, and a sequence whose tokens begin alike begins with it
//! (docs/adr/0016).
//!
//! Each own block gets its name, a chain of hashes over all tokens up to its end, in the step in which its last token is
//! written. What becomes of a named block that is given back, whoever had it last (a request of this instance, a lease
//! of a decode worker), is the pool's matter (`lagoon_kv::BlockPool`). A sequence that gets all of its memory here looks
//! its prefix up; at least one of its tokens is computed, for the logits. What nobody has becomes its own; what somebody
//! has it shares, in the same block, or at an address of its own where the device maps memory. Sequences that begin alike
//! and run at one time share what one of them has computed when another one comes to it.
//!
//! Invariants:
//! * only blocks that are sealed and whole have names, and a block with a name is never written;
//! * what is shared is moved, freed, lent or handed over by each of its owners for itself, and is free after the last;
//! * memory is mapped at a second address before anybody can get the first one, and named there when it is.

use super::sequence::Sequence;
use crate::config::InstanceConfig;
use crate::cx::Cx;
use crate::event::Effect;
use crate::instance::Instance;
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::{Adopted, BlockIdentity, IdentityRoot, Placement};
use lagoon_runner::{Command, ShareId};
use lagoon_types::{PhysBlock, SeqId};
use serde::Serialize;

/// What the prefix cache has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixStatus {
    /// Tokens of sequences that got their memory here, and were looked up.
    pub looked_up_tokens: u64,
    /// Those of them whose KV was found, and was not computed again.
    pub hit_tokens: u64,
    /// rBlocks of these that others had at the time, and that were shared with them.
    pub shared_blocks: u64,
    /// rBlocks that sharing saves now: how many more there would be in use without it.
    pub saved_blocks: u32,
    /// Free rBlocks that keep what they hold.
    pub blocks: u32,
    /// rBlocks that were given to somebody else since the start, and with them what they kept.
    pub evicted_blocks: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct PrefixCounts {
    /// What names begin with; `None` where nothing is kept.
    root: Option<BlockIdentity>,
    looked_up_tokens: u64,
    hit_tokens: u64,
    shared_blocks: u64,
    next_share: u64,
    /// Mappings that were commanded and not made yet, whatever became of their sequences.
    under_way: u64,
}

impl PrefixCounts {
    /// Whether the device is still to map blocks.
    pub(crate) fn maps(&self) -> bool {
        self.under_way > 0
    }

    pub(crate) fn new(config: &InstanceConfig) -> Self {
        // The model's hash covers its rotary embedding, its window and its biases.
        let root = IdentityRoot {
            model: config.model_hash,
            adapter: b"",
            dtype: config.kv.dtype,
            rope: b"",
            block_tokens: config.block_tokens,
        };
        let root = config.prefix_cache.then(|| BlockIdentity::root(&root));
        Self { root, looked_up_tokens: 0, hit_tokens: 0, shared_blocks: 0, next_share: 0, under_way: 0 }
    }
}

impl super::Batch {
    /// Names of a sequence's first `blocks` blocks, all of whose tokens are known.
    pub(crate) fn name_tokens(&mut self, cx: &Cx, id: SeqId, blocks: u32) {
        let (Some(root), Some(seq)) = (cx.memory.prefix.root, self.seqs.get_mut(&id)) else { return };
        let (block_tokens, blocks) = (cx.config.block_tokens as usize, blocks as usize);
        for block in seq.names.len()..blocks {
            let tokens = &seq.tokens[block * block_tokens..(block + 1) * block_tokens];
            let tokens: &[u32] = if mutants::is(Mutant::TokensUnnamed) { &[] } else { tokens };
            let name = seq.names.last().unwrap_or(&root).then(tokens);
            seq.names.push(name);
        }
    }
}

impl Instance {
    /// Names the own blocks of a sequence that a step has filled.
    pub(crate) fn name_blocks(&mut self, id: SeqId) {
        let Some(seq) = self.batch.seqs.get(&id).filter(|_| self.cx.memory.prefix.root.is_some()) else { return };
        let whole = seq.blocks.next_position() / self.cx.config.block_tokens;
        if whole <= seq.named {
            return;
        }
        self.batch.name_tokens(&self.cx, id, whole);
        let joins = self.joins(id);
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        for block in std::mem::replace(&mut seq.named, whole)..whole {
            let (Placement::Local(at), name) = (seq.blocks.placements()[block as usize], &seq.names[block as usize])
            else {
                continue;
            };
            // Somebody else computed it at the same time. What is mapped behind addresses stays: it is in use.
            let joins = joins && !self.cx.memory.rm.pool().is_shared(at);
            match joins.then(|| self.cx.memory.rm.join(id, at, name, false)).flatten() {
                Some(joined) => {
                    seq.blocks.relocate(block, Placement::Local(joined.block));
                    self.cx.memory.prefix.shared_blocks += 1;
                }
                None => self.cx.memory.rm.name(at, *name, block),
            }
        }
    }

    /// Whether blocks of a sequence may be exchanged for others: nobody reads or moves them by their numbers.
    fn joins(&self, id: SeqId) -> bool {
        !self.prefill.is_pushed(id) && !self.moves.is_moving(id) && !self.batch.sched.in_step(id)
    }

    /// A sequence that is to compute (the rest of) a block that somebody has computed since it began shares that one.
    pub(crate) fn catch_up(&mut self, id: SeqId) {
        let (tokens, map) = (self.cx.config.block_tokens, self.may_map(id));
        let Some(seq) = self.batch.seqs.get(&id).filter(|_| self.cx.memory.prefix.root.is_some() && self.joins(id))
        else {
            return;
        };
        let (next, whole) = (seq.blocks.next_position(), (seq.len() - 1) / tokens);
        let (free, first) = (seq.may_change_memory(), next / tokens);
        let known = seq.blocks.lost().is_empty() && seq.blocks.lost_blocks() == 0 && seq.named == first;
        if !free || !known || seq.sharing.is_some() || first >= whole.min(seq.blocks.blocks()) {
            return;
        }
        self.batch.name_tokens(&self.cx, id, whole);
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let mut mapped = Vec::new();
        for block in first..whole.min(seq.blocks.blocks()) {
            let Placement::Local(at) = seq.blocks.placements()[block as usize] else { break };
            let Some(joined) = self.cx.memory.rm.join(id, at, &seq.names[block as usize], map) else { break };
            let known = (block + 1) * tokens - seq.blocks.next_position();
            let advance = seq.blocks.join(block, joined.block);
            self.cx.memory.rm.mark_written(&advance);
            self.batch.sched.skip(id, known);
            self.cx.memory.prefix.hit_tokens += u64::from(known);
            self.cx.memory.prefix.shared_blocks += 1;
            match joined.mapped {
                Some(from) => mapped.push((from, joined.block)),
                None => seq.named = block + 1,
            }
        }
        if !mapped.is_empty() {
            self.map_blocks(id, &mapped, &[]);
        }
    }

    /// Names all blocks of a waiting sequence that may be found, those before its last token. How many that is.
    fn name_wanted(&mut self, id: SeqId) -> usize {
        let waits = |seq: &&Sequence| self.cx.memory.prefix.root.is_some() && seq.blocks.blocks() == 0;
        let Some(seq) = self.batch.seqs.get(&id).filter(waits) else { return 0 };
        let whole = (seq.len() - 1) / self.cx.config.block_tokens;
        self.batch.name_tokens(&self.cx, id, whole);
        whole as usize
    }

    /// Whether the device may map what others have at addresses of this sequence. Where transports write into blocks by
    /// themselves, that is in no order with mapping; what passes through memory beside the store the device copies, in order.
    fn may_map(&self, id: SeqId) -> bool {
        !self.reads_directly() && self.batch.seqs.get(&id).is_some_and(|seq| !seq.maps_nothing)
    }

    /// How many blocks of a waiting sequence cost no memory here, as others have them.
    pub(crate) fn shareable(&mut self, id: SeqId) -> u32 {
        let (map, wanted) = (self.may_map(id), self.name_wanted(id));
        self.batch.seqs.get(&id).map_or(0, |seq| self.cx.memory.rm.pool().shareable(&seq.names[..wanted], map))
    }

    /// Begins a waiting sequence, which gets all of its memory here, with what is found of it. Says how many blocks of its
    /// table that is, and the last of them.
    pub(crate) fn adopt_prefix(&mut self, id: SeqId) -> (u32, Option<PhysBlock>) {
        let (blocks, named) = self.take_prefix(id);
        let Some(seq) = self.batch.seqs.get_mut(&id).filter(|_| !blocks.is_empty()) else { return (0, None) };
        let known = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        seq.blocks.push_local(&blocks);
        let advance = seq.blocks.advance(known * self.cx.config.block_tokens);
        seq.named = named;
        self.cx.memory.rm.mark_written(&advance);
        (known, blocks.last().copied())
    }

    /// What is found of a sequence that has nothing here and gets all of its memory here: its first blocks, and how many of them
    /// have names. What is to be mapped is commanded at once: whoever gets the sources' addresses later writes there later.
    pub(crate) fn take_prefix(&mut self, id: SeqId) -> (Vec<PhysBlock>, u32) {
        let (tokens, map) = (self.cx.config.block_tokens, self.may_map(id));
        let wanted = self.name_wanted(id);
        let Some(seq) =
            self.batch.seqs.get(&id).filter(|seq| seq.blocks.blocks() == 0 && self.cx.memory.prefix.root.is_some())
        else {
            return (Vec::new(), 0);
        };
        let len = seq.len();
        let Adopted { blocks, shared, mapped, left } = self.cx.memory.rm.adopt(id, &seq.names[..wanted], map);
        let known = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        // What is to be mapped has its names when it is.
        let first = mapped.first().and_then(|(_, to)| blocks.iter().position(|block| block == to));
        let named = first.map_or(known, |first| u32::try_from(first).unwrap_or(known));
        self.cx.memory.prefix.looked_up_tokens += u64::from(len);
        self.cx.memory.prefix.hit_tokens += u64::from(known * tokens);
        self.cx.memory.prefix.shared_blocks += u64::from(shared);
        if !mapped.is_empty() {
            self.map_blocks(id, &mapped, &left);
        }
        (blocks, named)
    }

    /// Has the device map memory behind blocks of a sequence, and behind `left` no more.
    fn map_blocks(&mut self, id: SeqId, mapped: &[(PhysBlock, PhysBlock)], left: &[PhysBlock]) {
        let tokens = self.cx.config.block_tokens;
        self.cx.memory.prefix.next_share += 1;
        self.cx.memory.prefix.under_way += 1;
        let share = ShareId(self.cx.memory.prefix.next_share);
        if let Some(seq) = self.batch.seqs.get_mut(&id) {
            seq.sharing = Some(share);
        }
        let slots = mapped.iter().map(|(from, to)| (from.0 * tokens, to.0 * tokens)).collect();
        self.cx.release_freed();
        self.cx.effects.push(Effect::Runner(Command::Share { share, tokens, slots }));
        self.cx.release_blocks(left.to_vec());
    }

    /// Memory is mapped, and has names like where it is else; or it is not, and the sequence is computed without.
    pub(crate) fn on_shared(&mut self, share: ShareId, error: Option<&DeviceError>) {
        self.cx.memory.prefix.under_way = self.cx.memory.prefix.under_way.saturating_sub(1);
        let Some(seq) = self.batch.seqs.values_mut().find(|s| s.sharing == Some(share)) else { return };
        let id = seq.id;
        seq.sharing = None;
        let Some(error) = error else { return self.name_blocks(id) };
        tracing::warn!(%error, seq = %id, "blocks could not be mapped");
        seq.maps_nothing = true;
        if self.prefill.is_away(id) {
            self.redo(id, "blocks could not be mapped");
        } else if self.batch.is_running(id) {
            self.preempt(id);
        } else {
            self.release_memory(id);
        }
    }

    pub(crate) fn prefix_status(&self) -> PrefixStatus {
        let PrefixCounts { looked_up_tokens, hit_tokens, shared_blocks, .. } = self.cx.memory.prefix;
        let pool = self.cx.memory.rm.pool();
        PrefixStatus {
            looked_up_tokens,
            hit_tokens,
            shared_blocks,
            saved_blocks: pool.counts().shared,
            blocks: pool.kept(),
            evicted_blocks: pool.dropped(),
        }
    }
}
