//! The order of the queue: tenants by their share, and a tenant's requests by priority and age.
//!
//! Weighted fair queueing with equal weights: a tenant's work is charged when a request of it is started, corrected when that ends, and the
//! tenant with the least charged work is next. One that is new, or comes back, begins at the virtual time: what each waiting tenant has got
//! if all get the same. So its past is not saved, and tenants that are all new cannot starve one that was charged. Within a tenant a
//! lower `priority` stands further ahead by a fixed time, so that nobody is overtaken for ever.

use super::RequestId;
use crate::mutants::{self, Mutant};
use lagoon_types::limits::{DISPATCH_TENANTS_MAX, PRIORITY_MAX, PRIORITY_STEP_MS};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A request's place among its tenant's.
pub(super) type Turn = (i64, RequestId);

/// The turn of a request that arrived at `since_ms`.
pub(super) fn turn(since_ms: u64, priority: i32, id: RequestId) -> Turn {
    let priority = i64::from(priority.clamp(-PRIORITY_MAX, PRIORITY_MAX));
    (since_ms.cast_signed().saturating_add(priority * PRIORITY_STEP_MS.cast_signed()), id)
}

/// Work charged to a tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Charge(f64);

impl PartialEq for Charge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Charge {}

impl PartialOrd for Charge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Charge {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, Default)]
struct Tenant {
    charged: Charge,
    waiting: BTreeSet<Turn>,
    /// Bytes that its waiting requests hold.
    bytes: usize,
}

impl Tenant {
    fn leave(&mut self, turn: Turn, bytes: usize) {
        self.bytes -= if self.waiting.remove(&turn) { bytes } else { 0 };
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Turns {
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Tenants with waiting requests: by charge, and then by the turn of the first of these.
    order: BTreeSet<(Charge, Turn, Arc<str>)>,
    /// The virtual time.
    floor: f64,
}

impl Turns {
    /// Changes a tenant, and with it its place in the order.
    fn change(&mut self, name: &Arc<str>, how: impl FnOnce(&mut Tenant)) {
        let Some(tenant) = self.tenants.get_mut(name) else { return };
        let key = |tenant: &Tenant| tenant.waiting.first().map(|turn| (tenant.charged, *turn, Arc::clone(name)));
        let before = key(tenant);
        how(tenant);
        let after = key(tenant);
        before.into_iter().for_each(|key| _ = self.order.remove(&key));
        after.into_iter().for_each(|key| _ = self.order.insert(key));
    }

    pub(super) fn add(&mut self, tenant: &Arc<str>, turn: Turn, bytes: usize) {
        // No newcomer stands behind all that wait: what they were charged was corrected since.
        let floor = self.order.last().map_or(self.floor, |(most, ..)| self.floor.min(most.0));
        self.tenants.entry(Arc::clone(tenant)).or_default();
        self.change(tenant, |tenant| {
            if tenant.waiting.is_empty() {
                tenant.charged = Charge(tenant.charged.0.max(floor));
            }
            tenant.waiting.insert(turn);
            tenant.bytes += bytes;
        });
    }

    /// Takes a request out without a charge: it left.
    pub(super) fn remove(&mut self, tenant: &Arc<str>, turn: Turn, bytes: usize) {
        self.change(tenant, |tenant| tenant.leave(turn, bytes));
        self.forget(tenant);
    }

    /// Takes a request out: it is started, and costs `work`.
    pub(super) fn start(&mut self, tenant: &Arc<str>, (turn, bytes): (Turn, usize), work: f64) {
        let charged = self.tenants.get(tenant).map_or(0.0, |tenant| tenant.charged.0);
        self.floor = self.floor.max(charged) + self.share(work);
        self.change(tenant, |tenant| {
            tenant.leave(turn, bytes);
            tenant.charged.0 += if mutants::is(Mutant::TenantUncharged) { 0.0 } else { work };
        });
        self.forget(tenant);
    }

    /// Adds what a request took beyond its charge; negative for one that took less, or did not run after all.
    pub(super) fn correct(&mut self, tenant: &Arc<str>, more: f64) {
        if more > 0.0 {
            // One that was dropped had the floor's charge.
            let charged = Charge(self.floor);
            self.tenants.entry(Arc::clone(tenant)).or_insert_with(|| Tenant { charged, ..Tenant::default() });
        }
        self.floor += self.share(more);
        self.change(tenant, |tenant| tenant.charged.0 += more);
        self.forget(tenant);
    }

    /// What each tenant has of some work if all that wait, and one more, get the same.
    fn share(&self, work: f64) -> f64 {
        work / crate::perf::as_f64(1 + self.order.len() as u64)
    }

    /// Drops a tenant that would begin at the floor anyway; of too many all such, and the least charged.
    fn forget(&mut self, name: &Arc<str>) {
        let floor = self.floor;
        let is_over = |tenant: &Tenant| tenant.waiting.is_empty() && tenant.charged.0 <= floor;
        if self.tenants.get(name).is_some_and(is_over) {
            self.tenants.remove(name);
        }
        if self.tenants.len() <= DISPATCH_TENANTS_MAX {
            return;
        }
        self.tenants.retain(|_, tenant| !tenant.waiting.is_empty() || tenant.charged.0 > floor);
        while self.tenants.len() > DISPATCH_TENANTS_MAX {
            let idle = self.tenants.iter().filter(|(_, tenant)| tenant.waiting.is_empty());
            let least = idle.min_by_key(|(_, tenant)| tenant.charged).map(|(name, _)| Arc::clone(name));
            let Some(least) = least else { return };
            self.tenants.remove(&least);
        }
    }

    /// Waiting requests of a tenant, and bytes that they hold.
    pub(super) fn waiting(&self, tenant: &Arc<str>) -> (usize, usize) {
        self.tenants.get(tenant).map_or((0, 0), |tenant| (tenant.waiting.len(), tenant.bytes))
    }

    /// The next request: of the least charged tenant, of equals the one with the earliest turn.
    pub(super) fn next(&self) -> Option<RequestId> {
        self.order.first().map(|(_, (_, id), _)| *id)
    }

    /// Up to `count` waiting requests, tenant by tenant in the order of their charges.
    pub(super) fn first(&self, count: usize) -> impl Iterator<Item = RequestId> {
        let share = count.div_ceil(self.order.len().max(1));
        let tenants = self.order.iter().filter_map(|(_, _, name)| self.tenants.get(name));
        tenants.flat_map(move |tenant| tenant.waiting.iter().take(share)).take(count).map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(turns: &mut Turns, all: &BTreeMap<RequestId, (Arc<str>, Turn, f64)>) -> Option<u64> {
        let id = turns.next()?;
        let (tenant, turn, work) = &all[&id];
        turns.start(tenant, (*turn, 1), *work);
        Some(id.0)
    }

    #[test]
    fn a_tenant_with_many_requests_does_not_shut_out_one_with_few() {
        let (mut turns, mut all) = (Turns::default(), BTreeMap::new());
        let (many, few): (Arc<str>, Arc<str>) = ("many".into(), "few".into());
        for n in 0..10 {
            let (tenant, at) = if n < 8 { (&many, n) } else { (&few, n) };
            let turn = turn(at, 0, RequestId(n));
            turns.add(tenant, turn, 1);
            all.insert(RequestId(n), (Arc::clone(tenant), turn, 10.0));
        }
        let order: Vec<u64> = std::iter::from_fn(|| started(&mut turns, &all)).collect();
        assert_eq!(order, [0, 8, 1, 9, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn the_past_is_neither_saved_nor_forgotten_while_it_counts() {
        let (mut turns, mut all) = (Turns::default(), BTreeMap::new());
        let (old, new): (Arc<str>, Arc<str>) = ("old".into(), "new".into());
        let mut add = |turns: &mut Turns, n: u64, tenant: &Arc<str>, work| {
            let turn = turn(n, 0, RequestId(n));
            turns.add(tenant, turn, 1);
            all.insert(RequestId(n), (Arc::clone(tenant), turn, work));
            all.clone()
        };
        for n in 0..4 {
            let all = add(&mut turns, n, &old, 100.0);
            assert_eq!(started(&mut turns, &all), Some(n));
        }
        // `old` was charged last, and is behind; `new` does not get what it missed.
        let _ = add(&mut turns, 4, &old, 1.0);
        let _ = add(&mut turns, 5, &new, 60.0);
        let all = add(&mut turns, 6, &new, 60.0);
        assert_eq!([started(&mut turns, &all), started(&mut turns, &all)], [Some(5), Some(4)]);
        let all = add(&mut turns, 7, &old, 1.0);
        assert_eq!(started(&mut turns, &all), Some(7));
        assert_eq!(started(&mut turns, &all), Some(6));
    }

    /// Whoever names a new tenant with each request would be first for ever: `cache_salt` is the client's word.
    #[test]
    fn tenants_that_are_all_new_do_not_starve_one_that_was_charged() {
        let (mut turns, mut all) = (Turns::default(), BTreeMap::new());
        let mut add = |turns: &mut Turns, n: u64, tenant: &str, work| {
            let (turn, tenant): (_, Arc<str>) = (turn(n, 0, RequestId(n)), tenant.into());
            turns.add(&tenant, turn, 1);
            all.insert(RequestId(n), (tenant, turn, work));
            all.clone()
        };
        let all = add(&mut turns, 0, "old", 100.0);
        assert_eq!(started(&mut turns, &all), Some(0));
        let _ = add(&mut turns, 1, "old", 100.0);
        // Four of them wait at a time.
        (2..6).for_each(|n| drop(add(&mut turns, n, &n.to_string(), 100.0)));
        let before = (6..99).take_while(|n| {
            let all = add(&mut turns, *n, &n.to_string(), 100.0);
            started(&mut turns, &all) != Some(1)
        });
        assert!((1..=12).contains(&before.count()));
    }

    #[test]
    fn what_a_request_took_counts_and_not_what_was_expected() {
        let (mut turns, mut all) = (Turns::default(), BTreeMap::new());
        let (long, short): (Arc<str>, Arc<str>) = ("long".into(), "short".into());
        for n in 0..8 {
            let (tenant, turn) = (if n % 2 == 0 { &long } else { &short }, turn(n, 0, RequestId(n)));
            turns.add(tenant, turn, 1);
            all.insert(RequestId(n), (Arc::clone(tenant), turn, 10.0));
        }
        assert_eq!([started(&mut turns, &all), started(&mut turns, &all)], [Some(0), Some(1)]);
        turns.correct(&long, 25.0);
        turns.correct(&short, -5.0);
        let order: Vec<u64> = std::iter::from_fn(|| started(&mut turns, &all)).collect();
        assert_eq!(order, [3, 5, 7, 2, 4, 6]);
        // Of one that has gone meanwhile it counts as well, if others wait.
        let gone: Arc<str> = "gone".into();
        turns.add(&short, turn(9, 0, RequestId(9)), 1);
        turns.correct(&gone, 1e3);
        turns.add(&gone, turn(8, 0, RequestId(8)), 1);
        assert_eq!(turns.next(), Some(RequestId(9)));
        turns.correct(&"never".into(), -1.0);
        assert!(!turns.tenants.contains_key("never"));
    }

    /// Prompts that were cached after all: two tenants' charges stay far below what was expected.
    #[test]
    fn a_newcomer_does_not_wait_for_what_was_charged_too_much() {
        let (mut turns, mut all) = (Turns::default(), BTreeMap::new());
        let mut add = |turns: &mut Turns, n: u64, tenant: &str| {
            let (turn, tenant): (_, Arc<str>) = (turn(n, 0, RequestId(n)), tenant.into());
            turns.add(&tenant, turn, 1);
            all.insert(RequestId(n), (tenant, turn, 700.0));
            all.clone()
        };
        for n in 0..200 {
            let _ = add(&mut turns, n, if n % 2 == 0 { "a" } else { "b" });
        }
        for _ in 0..100 {
            let all = add(&mut turns, 0, "a");
            let id = started(&mut turns, &all).unwrap();
            turns.correct(&all[&RequestId(id)].0, -400.0);
        }
        let all = add(&mut turns, 1_000, "c");
        let before = (0..99).take_while(|_| started(&mut turns, &all) != Some(1_000)).count();
        assert!(before <= 2, "{before}");
    }

    #[test]
    fn priorities_are_a_tenants_own_and_count_as_time() {
        let mut turns = Turns::default();
        let tenant: Arc<str> = "".into();
        turns.add(&tenant, turn(0, 0, RequestId(1)), 1);
        turns.add(&tenant, turn(10, -5, RequestId(2)), 1);
        turns.add(&tenant, turn(6_000, -5, RequestId(3)), 1);
        assert_eq!(turns.first(9).collect::<Vec<_>>(), [RequestId(2), RequestId(1), RequestId(3)]);
        assert_eq!(turn(5, i32::MIN, RequestId(0)).0, 5 - i64::from(PRIORITY_MAX) * PRIORITY_STEP_MS.cast_signed());
    }

    #[test]
    fn tenants_that_came_once_are_forgotten() {
        let mut turns = Turns::default();
        for n in 0..2 * DISPATCH_TENANTS_MAX as u64 {
            let tenant: Arc<str> = n.to_string().into();
            let turn = turn(n, 0, RequestId(n));
            turns.add(&tenant, turn, 1);
            turns.start(&tenant, (turn, 1), 1.0);
        }
        assert!(turns.tenants.len() <= DISPATCH_TENANTS_MAX);
        assert_eq!(turns.next(), None);
    }
}
