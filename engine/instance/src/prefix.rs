//! The prefix cache: free blocks keep what they hold, and a sequence whose tokens begin alike begins with it
//! (docs/adr/0016).
//!
//! Each own block gets its name, a chain of hashes over all tokens up to its end, in the step in which its last token is
//! written. What becomes of a named block that is given back, whoever had it last (a request of this instance, a lease
//! of a decode worker), is the pool's matter (`lagoon_kv::BlockPool`). A sequence that gets all of its memory here looks
//! its prefix up; at least one of its tokens is computed, for the logits. What nobody has becomes its own; what somebody
//! has is copied, or mapped at the copy's addresses where the device maps memory.
//!
//! Invariants:
//! * only blocks that are sealed and whole have names, and a block with a name is never written;
//! * what a sequence begins with is its alone: nobody attends to it, moves it or frees it but its owner;
//! * a copy is commanded before anybody can get its source's memory, and named when it is made.

use crate::config::InstanceConfig;
use crate::event::Effect;
use crate::instance::Instance;
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::{BlockIdentity, IdentityRoot, Placement};
use lagoon_runner::{Command, CopyId};
use lagoon_types::{PhysBlock, SeqId};
use serde::Serialize;

/// What the prefix cache has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixStatus {
    /// Tokens of sequences that got their memory here, and were looked up.
    pub looked_up_tokens: u64,
    /// Those of them whose KV was found, and was not computed again.
    pub hit_tokens: u64,
    /// rBlocks of these that were copied or mapped once more, as others had them at the time.
    pub copied_blocks: u64,
    /// Free rBlocks that keep what they hold.
    pub blocks: u32,
    /// rBlocks that were given to somebody else since the start, and with them what they kept.
    pub evicted_blocks: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Prefixes {
    /// What names begin with; `None` where nothing is kept.
    root: Option<BlockIdentity>,
    looked_up_tokens: u64,
    hit_tokens: u64,
    copied_blocks: u64,
    next_copy: u64,
    /// Copies that were commanded and not made yet, whatever became of their sequences.
    under_way: u64,
}

impl Prefixes {
    /// Whether the device is still to copy blocks.
    pub(crate) fn copies(&self) -> bool {
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
        Self { root, looked_up_tokens: 0, hit_tokens: 0, copied_blocks: 0, next_copy: 0, under_way: 0 }
    }
}

impl Instance {
    /// Names of a sequence's first `blocks` blocks, all of whose tokens are known.
    pub(crate) fn name_tokens(&mut self, id: SeqId, blocks: u32) {
        let (Some(root), Some(seq)) = (self.prefixes.root, self.seqs.get_mut(&id)) else { return };
        let (block_tokens, blocks) = (self.config.block_tokens as usize, blocks as usize);
        for block in seq.names.len()..blocks {
            let tokens = &seq.tokens[block * block_tokens..(block + 1) * block_tokens];
            let tokens: &[u32] = if mutants::is(Mutant::TokensUnnamed) { &[] } else { tokens };
            let name = seq.names.last().unwrap_or(&root).then(tokens);
            seq.names.push(name);
        }
    }

    /// Names the own blocks of a sequence that a step has filled.
    pub(crate) fn name_blocks(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get(&id).filter(|_| self.prefixes.root.is_some()) else { return };
        let whole = seq.blocks.next_position() / self.config.block_tokens;
        if whole <= seq.named {
            return;
        }
        self.name_tokens(id, whole);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        for block in std::mem::replace(&mut seq.named, whole)..whole {
            if let Placement::Local(at) = seq.blocks.placements()[block as usize] {
                self.rm.name(at, seq.names[block as usize], block);
            }
        }
    }

    /// Begins a waiting sequence, which gets all of its memory here, with what free blocks keep of it. Says how many blocks
    /// of its table that is, the last of them, and which blocks hold what follows and are somebody's.
    pub(crate) fn adopt_prefix(&mut self, id: SeqId) -> (u32, Option<PhysBlock>, Vec<PhysBlock>) {
        let (block_tokens, nothing) = (self.config.block_tokens, (0, None, Vec::new()));
        let Some(seq) = self.seqs.get(&id).filter(|s| s.blocks.blocks() == 0) else { return nothing };
        if self.prefixes.root.is_none() {
            return nothing;
        }
        let (len, whole) = (seq.len(), (seq.len() - 1) / block_tokens);
        self.name_tokens(id, whole);
        let Some(seq) = self.seqs.get_mut(&id) else { return nothing };
        let blocks = self.rm.adopt(id, &seq.names[..whole as usize]);
        // Transports write into a decode worker's blocks by themselves, in no order with copies.
        let copies = !self.roles.reads() && !seq.copies_nothing;
        let rest = if copies { &seq.names[blocks.len()..whole as usize] } else { &[] };
        let sources = self.rm.held_prefix(rest);
        let known = as_u32(blocks.len());
        seq.blocks.push_local(&blocks);
        let advance = seq.blocks.advance(known * block_tokens);
        seq.named = known;
        self.rm.mark_written(&advance);
        self.prefixes.looked_up_tokens += u64::from(len);
        self.prefixes.hit_tokens += u64::from(known * block_tokens);
        (known, blocks.last().copied(), sources)
    }

    /// Has a sequence that was just placed begin with copies of `sources`, which are others', in the first of its new
    /// `blocks`. Whoever gets the sources' memory later writes it later: commands are executed in order.
    pub(crate) fn copy_prefix(&mut self, id: SeqId, sources: &[PhysBlock], blocks: &[PhysBlock]) {
        let Some(seq) = self.seqs.get_mut(&id).filter(|_| !sources.is_empty()) else { return };
        let (n, tokens) = (as_u32(sources.len()), self.config.block_tokens);
        let advance = seq.blocks.advance(n * tokens);
        self.prefixes.next_copy += 1;
        self.prefixes.under_way += 1;
        let copy = CopyId(self.prefixes.next_copy);
        seq.copying = Some(copy);
        self.rm.mark_written(&advance);
        self.prefixes.hit_tokens += u64::from(n * tokens);
        self.prefixes.copied_blocks += u64::from(n);
        let slots = sources.iter().zip(blocks).map(|(from, to)| (from.0 * tokens, to.0 * tokens)).collect();
        self.release_freed();
        self.effects.push(Effect::Runner(Command::Copy { copy, tokens, slots }));
    }

    /// A copy is made, and has names like what it was made of; or it was not, and the sequence is computed without.
    pub(crate) fn on_copied(&mut self, copy: CopyId, error: Option<&DeviceError>) {
        self.prefixes.under_way = self.prefixes.under_way.saturating_sub(1);
        let Some(seq) = self.seqs.values_mut().find(|s| s.copying == Some(copy)) else { return };
        let id = seq.id;
        seq.copying = None;
        let Some(error) = error else { return self.name_blocks(id) };
        tracing::warn!(%error, seq = %id, "blocks could not be copied");
        seq.copies_nothing = true;
        if self.sched.is_running(id) {
            self.preempt(id);
        } else {
            self.release_memory(id);
        }
    }

    pub(crate) fn prefix_status(&self) -> PrefixStatus {
        let Prefixes { looked_up_tokens, hit_tokens, copied_blocks, .. } = self.prefixes;
        let pool = self.rm.pool();
        PrefixStatus {
            looked_up_tokens,
            hit_tokens,
            copied_blocks,
            blocks: pool.kept(),
            evicted_blocks: pool.dropped(),
        }
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
