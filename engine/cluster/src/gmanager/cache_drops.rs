//! Operators' orders to empty prefix caches, of one instance or of all, of some tenants' blocks or of all. An instance gets one order
//! after another: each is repeated with each heartbeat that does not confirm its number, also after a fence, and carried out once. A
//! restarted gManager does not know them.

use super::GManager;
use super::admin::{Refused, SEE_STATUS, refused};
use super::member::Member;
use lagoon_protocol::{AdminCacheDrop, CacheCounts, CacheDrop, CacheDropped, ControlBody};
use lagoon_types::InstanceId;
use lagoon_types::limits::CACHE_DROPS_MAX;

impl Member {
    fn cache_counts(&self) -> Option<&CacheCounts> {
        self.heartbeat.as_ref()?.cache.as_deref()
    }

    /// Forgets its first order if its heartbeat confirms the number.
    pub(super) fn confirm_drop(&mut self) {
        let done = self.cache_counts().map(|counts| counts.drop_done);
        if self.cache_drops.front().is_some_and(|order| Some(order.number) == done) {
            self.cache_drops.pop_front();
        }
    }
}

impl GManager {
    /// Handles an operator's order to empty prefix caches.
    pub(super) fn admin_cache_drop(&mut self, m: &AdminCacheDrop) -> Result<CacheDropped, Refused> {
        let id = InstanceId(m.instance);
        match self.members.get(&id) {
            None if m.instance == 0 => {}
            None => return refused(format!("there is no instance {}", m.instance), SEE_STATUS),
            Some(member) if !member.is_live(self.now_ms) => {
                return refused(format!("instance {} is not alive", m.instance), SEE_STATUS);
            }
            Some(member) if member.cache_counts().is_none() => {
                return refused(
                    format!("instance {} reports no prefix cache", m.instance),
                    "it runs with --prefix-cache=off, has an older version, or has just started",
                );
            }
            Some(_) => {}
        }
        let now_ms = self.now_ms;
        let asked = |(of, member): &(&InstanceId, &mut Member)| {
            (m.instance == 0 || **of == id) && member.is_live(now_ms) && member.cache_counts().is_some()
        };
        let mut asked: Vec<(&InstanceId, &mut Member)> = self.members.iter_mut().filter(asked).collect();
        if let Some((of, _)) = asked.iter().find(|(_, member)| member.cache_drops.len() >= CACHE_DROPS_MAX) {
            let why = format!("instance {} has not carried out {CACHE_DROPS_MAX} earlier orders", of.0);
            return refused(why, "wait until it has: `lagoon kv cache ls` shows what it caches");
        }
        self.cache_drops += 1;
        let order = CacheDrop { number: self.cache_drops, of: m.of };
        let first = asked.iter().filter(|(_, member)| member.cache_drops.is_empty());
        let first: Vec<InstanceId> = first.map(|(of, _)| **of).collect();
        asked.iter_mut().for_each(|(_, member)| member.cache_drops.push_back(order));
        let instances: Vec<u32> = asked.iter().map(|(of, _)| of.0).collect();
        tracing::warn!(?instances, "an operator empties prefix caches");
        first.into_iter().for_each(|of| self.send(of, ControlBody::CacheDrop(order)));
        Ok(CacheDropped { instances, number: order.number })
    }

    /// Sends an instance its oldest unconfirmed order, again or for the first time.
    pub(super) fn repeat_drop(&mut self, id: InstanceId) {
        if let Some(order) = self.members.get(&id).and_then(|member| member.cache_drops.front()) {
            self.send(id, ControlBody::CacheDrop(*order));
        }
    }
}
