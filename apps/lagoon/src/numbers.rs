//! Whose the numbers are that peers claim in their Hellos.
//!
//! A certificate names a node and not a number: the gManager numbers processes, anew at each start. So a claim is compared with what
//! this process knows of the number: who is connected under it, who was lately, and where the gManager says that the instance is.

use lagoon_protocol::{Hello, PoolShape};
use lagoon_transport::{PeerId, Subject};
use lagoon_types::limits::{
    CONNECT_DEADLINE_MS, HOST_NAME_BYTES_MAX, INSTANCE_FORGET_MS, INSTANCES_MAX, LAYERS_MAX, LEASE_TTL_MS,
    TRANSFER_REQUEST_MS,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a number stays its node's after the session: as long as the gManager remembers a silent instance.
const KEPT: Duration = Duration::from_millis(INSTANCE_FORGET_MS);
/// What an instance has here, ends before.
const _: () = assert!(LEASE_TTL_MS <= INSTANCE_FORGET_MS && TRANSFER_REQUEST_MS <= INSTANCE_FORGET_MS);
/// How long the node at the address that the gManager advised is awaited before others may claim its number.
const DIALLED: Duration = Duration::from_millis(CONNECT_DEADLINE_MS);
/// Numbers that are kept for one node, so that a node cannot keep many from others. And its Hellos that wait for one.
const KEPT_NODE_MAX: usize = 16;
/// Hellos that wait, of a few KiB each at most.
const WAITING_MAX: usize = 1024;

/// A peer's claim to a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim<'a> {
    pub(crate) number: u32,
    pub(crate) peer: PeerId,
    pub(crate) subject: &'a Subject,
    /// This process has itself reached the peer at the advised address.
    pub(crate) reached: bool,
}

#[derive(Debug)]
struct Holder {
    peer: PeerId,
    subject: Subject,
    /// It was reached where the gManager says that the instance is.
    proven: bool,
}

#[derive(Debug)]
struct Kept {
    subject: Subject,
    until: Instant,
}

#[derive(Debug)]
struct Advised {
    peer: PeerId,
    addr: SocketAddr,
    awaited: Instant,
}

/// See the module's documentation. Bounded by the sessions, [`KEPT_NODE_MAX`] for each node, and [`INSTANCES_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// Of connected peers.
    holders: BTreeMap<u32, Holder>,
    /// Of peers that are not connected any more.
    kept: BTreeMap<u32, Kept>,
    advised: BTreeMap<u32, Advised>,
    /// Hellos that were refused, of peers that are connected: their numbers may become free.
    waiting: BTreeMap<PeerId, (Arc<str>, Hello)>,
}

impl Numbers {
    /// Whom the number's session is with.
    pub(crate) fn holder(&self, number: u32) -> Option<&Subject> {
        self.holders.get(&number).map(|holder| &holder.subject)
    }

    /// Where the gManager says that the instance is.
    pub(crate) fn address(&self, number: u32) -> Option<SocketAddr> {
        self.advised.get(&number).map(|advised| advised.addr)
    }

    /// The gManager says that the instance is at an address, which is `peer`'s and is being dialled.
    pub(crate) fn advised(&mut self, number: u32, (peer, addr): (PeerId, SocketAddr), now: Instant) {
        let before = self.advised.get(&number).filter(|of| of.peer == peer && of.addr == addr);
        // Advice is repeated; the node is awaited once.
        let awaited = before.map_or(now + DIALLED, |of| of.awaited);
        self.advised.insert(number, Advised { peer, addr, awaited });
        if self.advised.len() > INSTANCES_MAX {
            // Numbers grow: the smallest is the oldest process.
            self.advised.pop_first();
        }
    }

    /// Gives the number to the peer, which has no other one then.
    ///
    /// # Errors
    /// Why it is another's.
    pub(crate) fn claim(&mut self, claim: Claim<'_>, now: Instant) -> Result<(), String> {
        let Claim { number, peer, subject, reached } = claim;
        self.waiting.remove(&peer);
        let advised = self.advised.get(&number);
        let proven = reached && advised.is_some_and(|advised| advised.peer == peer);
        let is_own = |of: &Subject| of == subject;
        if let Some(holder) = self.holders.get(&number).filter(|of| !is_own(&of.subject) && (of.proven || !proven)) {
            return Err(refusal(number, &format!("is of node {:?}", holder.subject.node)));
        }
        let kept = self.kept.get(&number).filter(|kept| kept.until > now);
        if let Some(kept) = kept.filter(|kept| !proven && !is_own(&kept.subject)) {
            return Err(refusal(number, &format!("was of node {:?} until lately", kept.subject.node)));
        }
        let known = kept.is_some() || self.holders.contains_key(&number);
        if advised.is_some_and(|advised| !known && advised.peer != peer && advised.awaited > now) {
            return Err(refusal(number, "the gManager says is at an address that is being dialled"));
        }
        self.keep(peer, now);
        self.kept.remove(&number);
        self.holders.insert(number, Holder { peer, subject: subject.clone(), proven });
        Ok(())
    }

    /// Keeps a Hello that was refused, without the memory that it lends.
    pub(crate) fn wait(&mut self, peer: PeerId, subject: &Subject, hello: &Hello) {
        let own = self.waiting.values().filter(|(node, _)| *node == subject.node).count();
        let is_short = hello.host.len() <= HOST_NAME_BYTES_MAX && hello.shape.as_ref().is_none_or(is_small);
        if own < KEPT_NODE_MAX && self.waiting.len() < WAITING_MAX && is_short {
            let Hello { version_min, version_max, instance, incarnation, shape, lent: _, host } = hello;
            let (shape, host, lent) = (shape.clone(), host.clone(), None);
            let [version_min, version_max, instance] = [*version_min, *version_max, *instance];
            let hello = Hello { version_min, version_max, instance, incarnation: *incarnation, shape, lent, host };
            self.waiting.insert(peer, (Arc::clone(&subject.node), hello));
        }
    }

    /// Takes the Hellos that wait, but for those whose number another session of their node has.
    pub(crate) fn waiting(&mut self) -> impl Iterator<Item = (PeerId, Hello)> + use<> {
        let waiting = std::mem::take(&mut self.waiting);
        let (held, free) = waiting.into_iter().partition(|(_, (node, hello))| {
            self.holders.get(&hello.instance).is_some_and(|of| of.subject.node == *node)
        });
        self.waiting = held;
        let free: BTreeMap<_, (_, Hello)> = free;
        free.into_iter().map(|(peer, (_, hello))| (peer, hello))
    }

    /// The peer's session is over: its number is kept for its node.
    pub(crate) fn down(&mut self, peer: PeerId, now: Instant) {
        self.waiting.remove(&peer);
        self.keep(peer, now);
    }

    /// Keeps the number of a peer that has it no more for its node.
    fn keep(&mut self, peer: PeerId, now: Instant) {
        self.kept.retain(|_, kept| kept.until > now);
        let ended: Vec<u32> =
            self.holders.iter().filter(|(_, of)| of.peer == peer).map(|(number, _)| *number).collect();
        for number in ended {
            let Some(Holder { subject, .. }) = self.holders.remove(&number) else { continue };
            let own = |kept: &Kept| kept.subject.node == subject.node;
            if self.kept.values().filter(|kept| own(kept)).count() >= KEPT_NODE_MAX {
                self.forget(own);
            }
            if self.kept.len() >= INSTANCES_MAX {
                self.forget(|_| true);
            }
            self.kept.insert(number, Kept { subject, until: now + KEPT });
        }
    }

    /// Forgets the one of these that is kept the longest.
    fn forget(&mut self, of: impl Fn(&Kept) -> bool) {
        let oldest = self.kept.iter().filter(|(_, kept)| of(kept)).min_by_key(|(_, kept)| kept.until);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.kept.remove(&number);
        }
    }
}

/// Whether no list in it is longer than a pool's.
fn is_small(shape: &PoolShape) -> bool {
    let windows = shape.windows.len().max(shape.unpooled_windows.len());
    windows <= LAYERS_MAX as usize && shape.model_hash.len() <= 32
}

fn refusal(number: u32, why: &str) -> String {
    format!("it says that it is instance {number}, which {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_transport::{ClusterCa, NodeRole};

    fn subjects<const N: usize>(nodes: [&str; N]) -> [Subject; N] {
        let ca = ClusterCa::generate("test").unwrap();
        nodes.map(|node| ca.identity(node, NodeRole::Instance).unwrap().subject().clone())
    }

    fn claim(number: u32, peer: u64, subject: &Subject) -> Claim<'_> {
        Claim { number, peer: PeerId(peer), subject, reached: false }
    }

    /// Whoever came first after a node's session had its number, and with it the node's leases here.
    #[test]
    fn a_number_is_kept_for_its_node_after_the_session() {
        let [a, b] = subjects(["a", "b"]);
        let (mut numbers, now) = (Numbers::default(), Instant::now());
        numbers.claim(claim(7, 1, &a), now).unwrap();
        let refused = numbers.claim(claim(7, 2, &b), now).unwrap_err();
        assert!(refused.contains("instance 7, which is of node \"a\""), "{refused}");
        numbers.down(PeerId(1), now);
        assert_eq!(numbers.holder(7), None);
        let refused = numbers.claim(claim(7, 2, &b), now).unwrap_err();
        assert!(refused.contains("was of node \"a\" until lately"), "{refused}");
        numbers.claim(claim(7, 3, &a), now).unwrap();
        assert_eq!(numbers.holder(7), Some(&a));
        numbers.down(PeerId(3), now);
        numbers.claim(claim(7, 2, &b), now + KEPT).unwrap();
        // A peer has one number.
        numbers.claim(claim(8, 2, &b), now + KEPT).unwrap();
        assert_eq!((numbers.holder(7), numbers.holder(8)), (None, Some(&b)));
    }

    #[test]
    fn a_node_keeps_few_numbers_from_others() {
        let [a, b] = subjects(["a", "b"]);
        let (mut numbers, mut now) = (Numbers::default(), Instant::now());
        for number in 0..100 {
            now += Duration::from_millis(1);
            numbers.claim(claim(number, 1, &a), now).unwrap();
            numbers.down(PeerId(1), now);
        }
        let refused = (0..100).filter(|number| numbers.claim(claim(*number, 2, &b), now).is_err()).count();
        assert_eq!(refused, KEPT_NODE_MAX);
        assert!(numbers.claim(claim(99, 2, &b), now).is_err(), "the latest");
    }

    #[test]
    fn refused_hellos_wait_in_bounds() {
        let [a, b] = subjects(["a", "b"]);
        let mut numbers = Numbers::default();
        let hello = Hello { instance: 7, ..Hello::default() };
        (0..100).for_each(|peer| numbers.wait(PeerId(peer), &a, &hello));
        let windows = vec![1; LAYERS_MAX as usize + 1];
        let large = Hello { shape: Some(PoolShape { windows, ..PoolShape::default() }), ..hello.clone() };
        numbers.wait(PeerId(200), &b, &large);
        numbers.wait(PeerId(201), &b, &hello);
        numbers.down(PeerId(0), Instant::now());
        let waiting: Vec<_> = numbers.waiting().collect();
        assert_eq!((waiting.len(), waiting.last()), (KEPT_NODE_MAX, Some(&(PeerId(201), hello))));
        assert_eq!(numbers.waiting().count(), 0);
    }

    /// Numbers are easily guessed: a claim before the node is there kept it out for good.
    #[test]
    fn the_node_at_the_advised_address_has_the_number() {
        let [a, b] = subjects(["a", "b"]);
        let (mut numbers, now) = (Numbers::default(), Instant::now());
        let addr = "127.0.0.1:7".parse().unwrap();
        numbers.claim(claim(7, 2, &b), now).unwrap();
        numbers.advised(7, (PeerId(1), addr), now);
        assert!(numbers.claim(claim(7, 1, &a), now).is_err(), "it announces the address, and was not reached there");
        numbers.claim(Claim { reached: true, ..claim(7, 1, &a) }, now).unwrap();
        assert_eq!(numbers.holder(7), Some(&a));
        assert!(numbers.claim(Claim { reached: true, ..claim(7, 2, &b) }, now).is_err(), "reached elsewhere");

        numbers.advised(9, (PeerId(1), addr), now);
        let refused = numbers.claim(claim(9, 2, &b), now).unwrap_err();
        assert!(refused.contains("being dialled"), "{refused}");
        numbers.advised(9, (PeerId(1), addr), now + DIALLED);
        numbers.claim(claim(9, 2, &b), now + DIALLED).unwrap();
        // Of a node that connects from another address as well.
        numbers.advised(10, (PeerId(1), addr), now);
        numbers.claim(claim(10, 1, &a), now).unwrap();
        numbers.claim(claim(10, 4, &a), now).unwrap();
        // A Hello of an older session does not take the number from a newer one of its node.
        numbers.wait(PeerId(5), &a, &Hello { instance: 10, ..Hello::default() });
        assert_eq!(numbers.waiting().count(), 0);
        numbers.down(PeerId(4), now);
        assert_eq!(numbers.waiting().count(), 1);
    }
}
