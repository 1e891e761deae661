//! What members' prefix caches have, by their summaries, and who may cache runs of a prompt: soft state. A run that is not
//! there any more costs its debtor a refusal, and the creditor verifies every use.

use super::GManager;
use crate::cached::numbers;
use lagoon_protocol::{BorrowAdvice, BorrowQuery, CachedRun};
use lagoon_types::{InstanceId, limits};
use lagoon_view::Flags;
use std::cmp::Reverse;

impl GManager {
    /// Answers a debtor's query about a prompt's cached blocks: the longest runs of it that others may cache.
    pub(super) fn cached_runs(&self, query: &BorrowQuery, advice: BorrowAdvice) -> BorrowAdvice {
        // In a large pool a long prompt's first blocks only: one query must not hold up the others.
        let most = (limits::SEARCH_LOOKS_MAX / self.members.len().max(1)).min(limits::SEARCH_HASHES_MAX);
        let prompt = numbers(&query.prefix, most);
        let exclude = &query.exclude[..query.exclude.len().min(limits::EXCLUDE_MAX)];
        let mut found = Vec::new();
        for (&InstanceId(instance), member) in &self.members {
            let excluded = instance == query.debtor || exclude.contains(&instance);
            if excluded || member.cached.is_empty() || member.flags().has(Flags::BARRED) {
                continue;
            }
            found.extend(member.cached.runs(&prompt).into_iter().map(|run| (run, instance)));
            let order = |((first, blocks, _), instance): &((u32, u32, u32), u32)| (Reverse(*blocks), *first, *instance);
            found.sort_unstable_by_key(order);
            found.truncate(limits::CACHED_RUNS_MAX);
        }
        let address = |instance| self.members.get(&InstanceId(instance)).map(|of| of.registration.quic_addr.clone());
        let run = |((first, blocks, before), instance)| {
            let quic_addr = address(instance).unwrap_or_default();
            CachedRun { instance, quic_addr, first, blocks, before }
        };
        BorrowAdvice { candidates: Vec::new(), cached: found.into_iter().map(run).collect(), ..advice }
    }
}
