//! A sequence on its debtor: its tokens, where its KV is, and what it waits for.

use lagoon_cluster::BorrowId;
use lagoon_kv::hash::ContentHash;
use lagoon_kv::{BlockIdentity, LeaseHasher, RemoteEntries, SeqBlocks};
use lagoon_runner::ShareId;
use lagoon_transfer::Check;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, RECOVERIES_MAX, RECOVERIES_WINDOW_MS};
use lagoon_types::{FinishReason, GenerateRequest, InstanceId, LeaseId, PhysBlock, SamplingParams, SeqId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// rBlocks borrowed for a sequence under one lease.
#[derive(Debug)]
pub(crate) struct HeldLease {
    /// Blocks of the table that lie there.
    pub(crate) blocks: u32,
    /// Content of what steps write there, for the seals. `None` where a move wrote it.
    pub(crate) hasher: Option<LeaseHasher>,
    /// Hashes of whole entries: what comes back is compared with them.
    pub(crate) hashes: BTreeMap<u32, ContentHash>,
    /// Of whole entries that the creditor computed, and nobody here: what it said of their content, by layers, all of
    /// them.
    pub(crate) checks: BTreeMap<u32, LayerChecks>,
}

/// Checks of an entry's content, each in some layers.
pub(crate) type LayerChecks = Vec<(Range<u32>, Check)>;

impl HeldLease {
    /// A lease that steps will write.
    pub(crate) fn new(blocks: u32, hasher: LeaseHasher) -> Self {
        Self { blocks, hasher: Some(hasher), hashes: BTreeMap::new(), checks: BTreeMap::new() }
    }

    /// A lease of what its creditor computed.
    pub(crate) fn handed(blocks: u32, checks: BTreeMap<u32, LayerChecks>) -> Self {
        Self { blocks, checks, ..Self::for_move() }
    }

    /// Whether it is known what an entry holds.
    pub(crate) fn is_whole(&self, entry: u32) -> bool {
        self.hashes.contains_key(&entry) || self.checks.contains_key(&entry)
    }

    /// A lease that a move wrote; nothing was switched to it yet.
    pub(crate) fn for_move() -> Self {
        Self { blocks: 0, hasher: None, hashes: BTreeMap::new(), checks: BTreeMap::new() }
    }
}

/// What a sequence lacks to be admitted or to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Nothing, or it was not looked for yet.
    Met,
    /// It negotiates with creditors for blocks.
    Borrowing(BorrowId),
    /// There was no memory; tried again at this time.
    RetryAt(u64),
}

/// Where a sequence is in its life. The batch alone changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its prompt is a prefill worker's matter: it is in no queue and no batch. If it comes back before it has memory, that is
    /// looked for at this time.
    Away { retry_at_ms: Option<u64> },
    /// In the queue.
    Waiting(Need),
    /// In the batch.
    Running(Need),
    /// In the batch and in no further step: its blocks move to host memory.
    SwappingOut,
    /// In the batch and in no step: its KV is in host memory until there is room.
    SwappedOut,
    /// In the batch, in its last step: the client is gone.
    Leaving,
    /// Over, and in no batch: DGFM's freeze keeps its memory until the thaw.
    Frozen,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SeqId,
    /// When it came.
    pub(crate) since_ms: u64,
    /// Prompt, then what was generated.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: u32,
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Arc<SamplingParams>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) return_logits: bool,
    pub(crate) blocks: SeqBlocks,
    pub(crate) leases: BTreeMap<(InstanceId, LeaseId), HeldLease>,
    /// Blocks of others are being mapped at its addresses; it takes part in no step before.
    pub(crate) sharing: Option<ShareId>,
    /// That failed: it has none mapped any more.
    pub(crate) maps_nothing: bool,
    /// What its first blocks hold, as far as that was asked.
    pub(crate) names: Vec<BlockIdentity>,
    /// Blocks of the table that were looked at for names, from the first on.
    pub(crate) named: u32,
    /// Own blocks for the newest tokens (or lost blocks), until the older ones are borrowed and the table can be built in order.
    pub(crate) aside: Vec<PhysBlock>,
    pub(super) life: Life,
    /// Times that there was no memory since there last was.
    pub(crate) misses: u32,
    /// Growth failed: it asks for what it needs and no more.
    pub(crate) frugal: bool,
    /// When it lost KV, within the time that counts; ascending.
    pub(crate) recoveries: Vec<u64>,
    /// Until then it looks for memory for what it lost; then it is computed again as a whole.
    pub(crate) restore_by_ms: Option<u64>,
    /// It is not swapped out before.
    pub(crate) swap_after_ms: u64,
    /// When it must have been admitted.
    pub(crate) admit_by_ms: u64,
    /// When the KV of its prompt had been read from whoever computed it.
    pub(crate) pulled_ms: Option<u64>,
}

impl Sequence {
    pub(crate) fn new(id: SeqId, request: GenerateRequest, block_tokens: u32, since_ms: u64) -> Self {
        Self {
            id,
            since_ms,
            prompt_len: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX).saturating_sub(request.answered),
            tokens: request.prompt,
            max_tokens: request.max_tokens,
            sampling: Arc::new(request.sampling),
            stop_ids: request.stop_ids,
            return_logits: request.return_logits,
            blocks: SeqBlocks::new(block_tokens),
            leases: BTreeMap::new(),
            sharing: None,
            maps_nothing: false,
            names: Vec::new(),
            named: 0,
            aside: Vec::new(),
            life: Life::Waiting(Need::Met),
            misses: 0,
            frugal: false,
            recoveries: Vec::new(),
            restore_by_ms: None,
            swap_after_ms: 0,
            admit_by_ms: since_ms + ADMISSION_DEADLINE_MS,
            pulled_ms: None,
        }
    }

    /// Tokens known so far.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn generated(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// In the batch, in a step or not.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.life, Life::Running(_) | Life::SwappingOut | Life::SwappedOut | Life::Leaving)
    }

    /// Removed when its step or the freeze of its memory ends.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.life, Life::Leaving | Life::Frozen)
    }

    /// Its KV is in host memory.
    pub(crate) fn is_swapped_out(&self) -> bool {
        self.life == Life::SwappedOut
    }

    /// What it lacks, if it is in the queue or the batch and its memory is not being swapped.
    pub(super) fn need(&self) -> Option<Need> {
        match self.life {
            Life::Waiting(need) | Life::Running(need) => Some(need),
            Life::Away { .. } | Life::SwappingOut | Life::SwappedOut | Life::Leaving | Life::Frozen => None,
        }
    }

    /// Sets what it lacks, where that matters; what is being swapped is in the batch again.
    pub(super) fn set_need(&mut self, need: Need) {
        self.life = match self.life {
            Life::Waiting(_) => Life::Waiting(need),
            Life::Running(_) | Life::SwappingOut | Life::SwappedOut => Life::Running(need),
            Life::Away { .. } => {
                Life::Away { retry_at_ms: if let Need::RetryAt(at_ms) = need { Some(at_ms) } else { None } }
            }
            life @ (Life::Leaving | Life::Frozen) => life,
        };
    }

    /// It waits in the queue again: nobody else computes its prompt.
    pub(super) fn come_back(&mut self) {
        let retry_at_ms = if let Life::Away { retry_at_ms } = self.life { retry_at_ms } else { None };
        self.life = Life::Waiting(retry_at_ms.map_or(Need::Met, Need::RetryAt));
    }

    /// Neither negotiates for blocks nor has them swapped.
    pub(super) fn may_change_memory(&self) -> bool {
        matches!(self.need(), Some(Need::Met | Need::RetryAt(_)))
    }

    /// May take part in a step.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_placed() && self.sharing.is_none()
    }

    /// Has places for every known token and negotiates for nothing.
    pub(crate) fn is_placed(&self) -> bool {
        self.need() == Some(Need::Met) && self.blocks.lost_blocks() == 0 && self.blocks.capacity_tokens() >= self.len()
    }

    /// Notes that it lost KV. Losses at the same moment are one. Says whether it was one too many.
    pub(crate) fn note_recovery(&mut self, now_ms: u64) -> bool {
        if self.recoveries.last() != Some(&now_ms) {
            self.recoveries.retain(|at| at + RECOVERIES_WINDOW_MS > now_ms);
            self.recoveries.push(now_ms);
        }
        self.recoveries.len() > RECOVERIES_MAX
    }

    /// Entries left the table.
    pub(crate) fn forget_entries(&mut self, entries: &RemoteEntries) {
        let key = (entries.creditor, entries.lease);
        let Some(held) = self.leases.get_mut(&key) else { return };
        held.blocks -= entries.entries - entries.first;
        let range = entries.first..entries.entries;
        held.hashes.retain(|entry, _| !range.contains(entry));
        held.checks.retain(|entry, _| !range.contains(entry));
        if held.blocks == 0 {
            self.leases.remove(&key);
        }
    }

    /// Takes a generated token; says whether it is the last.
    pub(crate) fn push(&mut self, token: u32, max_positions: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.generated() >= self.max_tokens || self.len() >= max_positions {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence() -> Sequence {
        let request = GenerateRequest {
            prompt: vec![1, 2, 3],
            answered: 0,
            max_tokens: 4,
            sampling: SamplingParams::default(),
            stop_ids: Vec::new(),
            return_logits: false,
        };
        Sequence::new(SeqId(1), request, 4, 0)
    }

    #[test]
    fn losses_are_bounded_per_time_and_not_in_a_life() {
        let mut seq = sequence();
        let hour_ms = 3_600_000;
        assert!((1..100).all(|hour| !seq.note_recovery(hour * hour_ms)), "one in an hour, for ever");
        assert_eq!(seq.recoveries.len(), 1);
        // Leases of one creditor that are lost at the same moment are one loss.
        let now = 100 * hour_ms;
        assert!((0..50).all(|_| !seq.note_recovery(now)));
        let times: Vec<bool> = (1..=RECOVERIES_MAX as u64).map(|i| seq.note_recovery(now + i * 100)).collect();
        assert_eq!(times.iter().position(|over| *over), Some(RECOVERIES_MAX - 1));
        assert!(!seq.note_recovery(now + RECOVERIES_WINDOW_MS + 60 * 1000));
    }

    #[test]
    fn one_that_comes_back_from_a_worker_looks_for_memory_when_it_was_to() {
        let mut seq = sequence();
        seq.life = Life::Away { retry_at_ms: None };
        seq.set_need(Need::RetryAt(70));
        assert_eq!(seq.need(), None, "it waits for no memory here");
        seq.come_back();
        assert_eq!(seq.need(), Some(Need::RetryAt(70)));
        seq.life = Life::Away { retry_at_ms: Some(70) };
        seq.set_need(Need::Met);
        seq.come_back();
        assert_eq!(seq.need(), Some(Need::Met));
    }

    #[test]
    fn an_answer_that_was_begun_elsewhere_goes_on_at_its_place() {
        let request = GenerateRequest {
            prompt: vec![1, 2, 3, 8, 9],
            answered: 2,
            max_tokens: 4,
            sampling: SamplingParams::default(),
            stop_ids: Vec::new(),
            return_logits: false,
        };
        let mut seq = Sequence::new(SeqId(1), request, 4, 0);
        assert_eq!((seq.prompt_len, seq.generated(), seq.len()), (3, 2, 5));
        assert_eq!(seq.push(7, 100), None);
        assert_eq!((seq.push(7, 100), seq.generated()), (Some(FinishReason::Length), 4));
    }
}
