//! Operators' orders to empty prefix caches, of one instance or of all. An order is repeated with each heartbeat that does not
//! confirm its number, also after a fence; the instance carries it out once. A restarted gManager does not know it.

use super::GManager;
use super::admin::{Refused, SEE_STATUS, refused};
use super::member::Member;
use lagoon_protocol::{AdminCacheDrop, CacheCounts, CacheDrop, CacheDropped, ControlBody};
use lagoon_types::InstanceId;

impl Member {
    fn cache_counts(&self) -> Option<&CacheCounts> {
        self.heartbeat.as_ref()?.cache.as_deref()
    }

    /// Forgets its order if its heartbeat confirms the number.
    pub(super) fn confirm_drop(&mut self) {
        let done = self.cache_counts().map(|counts| counts.drop_done);
        self.cache_drop.take_if(|number| Some(*number) == done);
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
        self.cache_drops += 1;
        let (number, now_ms) = (self.cache_drops, self.now_ms);
        let asked = |(of, member): &(&InstanceId, &mut Member)| {
            (m.instance == 0 || **of == id) && member.is_live(now_ms) && member.cache_counts().is_some()
        };
        let mut instances = Vec::new();
        for (of, member) in self.members.iter_mut().filter(asked) {
            member.cache_drop = Some(number);
            instances.push(of.0);
        }
        tracing::warn!(?instances, "an operator empties prefix caches");
        instances.iter().for_each(|of| self.send(InstanceId(*of), ControlBody::CacheDrop(CacheDrop { number })));
        Ok(CacheDropped { instances, number })
    }

    /// Sends an instance's unconfirmed order again.
    pub(super) fn repeat_drop(&mut self, id: InstanceId) {
        if let Some(number) = self.members.get(&id).and_then(|member| member.cache_drop) {
            self.send(id, ControlBody::CacheDrop(CacheDrop { number }));
        }
    }
}
