//! Hysteresis: lasting evidence, one switch at a time, no side without an instance.

use super::*;
use proptest::prelude::*;

const LOOK_MS: u64 = 250;

fn view(id: u32, role: Role) -> RoleView {
    RoleView { id: InstanceId(id), role, becoming: None, changes: true, running: 0, jobs: 0, waiting: 0, taken: 0.0 }
}

/// A pool under a load: at each look every instance reports the load of its role. A role switch takes [`DRAIN_MS`].
struct Pool {
    balancer: Balancer,
    views: Vec<RoleView>,
    /// When a switch in flight ends.
    ends_ms: u64,
    now_ms: u64,
    switches: Vec<(u64, RoleSwitch)>,
}

/// What a pool is given: whether prompts, or requests that decode, are more than can be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Prompts,
    Answers,
    Little,
    Both,
}

const DRAIN_MS: u64 = 3_000;

impl Pool {
    fn new(roles: &[Role]) -> Self {
        let views = (1u32..).zip(roles).map(|(id, role)| view(id, *role)).collect();
        Self {
            balancer: Balancer::new(BalancerConfig::default(), 0),
            views,
            ends_ms: 0,
            now_ms: 0,
            switches: Vec::new(),
        }
    }

    fn run(&mut self, ms: u64, load: Load) {
        let end_ms = self.now_ms + ms;
        while self.now_ms < end_ms {
            self.now_ms += LOOK_MS;
            for view in &mut self.views {
                let (prompts, answers) = match load {
                    Load::Prompts => (true, false),
                    Load::Answers => (false, true),
                    Load::Little => (false, false),
                    Load::Both => (true, true),
                };
                view.jobs = if view.role == Prefill && prompts { 5 } else { 0 };
                view.running = view.jobs.min(1);
                let (waiting, taken) = if view.role == Decode && answers { (3, 1.0) } else { (0, 0.1) };
                (view.waiting, view.taken) = (waiting, taken);
                if self.now_ms >= self.ends_ms
                    && let Some(role) = view.becoming.take()
                {
                    view.role = role;
                }
            }
            if let Some(switch) = self.balancer.decide(&self.views, self.now_ms) {
                self.switches.push((self.now_ms, switch));
                self.ends_ms = self.now_ms + DRAIN_MS;
                let of = self.views.iter_mut().find(|view| view.id == switch.id).unwrap();
                assert_eq!(of.role, switch.from);
                of.becoming = Some(switch.to);
            }
        }
    }

    fn count(&self, role: Role) -> usize {
        self.views.iter().filter(|view| view.role == role).count()
    }
}

use Role::{Decode, Instance, Kv, Prefill};

const MINUTE: u64 = 60_000;

#[test]
fn sustained_load_switches_exactly_once_where_one_is_left_and_back_again() {
    let mut pool = Pool::new(&[Prefill, Prefill, Decode, Decode]);
    pool.run(MINUTE, Load::Little);
    assert_eq!(pool.switches, [], "nothing queues");
    pool.run(10 * MINUTE, Load::Answers);
    let expected = RoleSwitch { id: InstanceId(1), from: Prefill, to: Decode };
    assert_eq!(pool.switches.iter().map(|s| s.1).collect::<Vec<_>>(), [expected], "one prefill worker is left");
    let config = BalancerConfig::default();
    let waited = pool.switches[0].0 - MINUTE;
    assert!((config.sustain_ms..config.sustain_ms + 4 * config.window_ms).contains(&waited), "{waited} ms");
    // Back, and no further than one decode worker.
    pool.run(10 * MINUTE, Load::Prompts);
    let (prefill, decode) = (pool.count(Prefill), pool.count(Decode));
    assert_eq!((prefill, decode, pool.switches.len()), (3, 1, 3));
    assert!(pool.switches[1..].iter().all(|(_, s)| (s.from, s.to) == (Decode, Prefill)));
    pool.run(10 * MINUTE, Load::Both);
    assert_eq!(pool.switches.len(), 3, "both sides queue");
}

#[test]
fn a_load_that_swings_moves_nothing() {
    for half_ms in [1_000, 2_000, 4_500] {
        let mut pool = Pool::new(&[Prefill, Prefill, Decode, Decode]);
        for _ in 0..200 {
            pool.run(half_ms, Load::Prompts);
            pool.run(half_ms, Load::Answers);
        }
        assert_eq!(pool.switches, [], "half a swing of {half_ms} ms");
    }
    // A slow one is followed, with a rest after each step.
    let mut pool = Pool::new(&[Prefill, Prefill, Decode, Decode]);
    pool.run(MINUTE, Load::Little);
    for _ in 0..5 {
        pool.run(MINUTE, Load::Prompts);
        pool.run(MINUTE, Load::Answers);
    }
    let config = BalancerConfig::default();
    let rests = |pair: &[(u64, RoleSwitch)]| pair[1].0 - pair[0].0 >= config.dwell_ms + config.sustain_ms;
    assert!(pool.switches.len() > 5 && pool.switches.windows(2).all(rests), "{:?}", pool.switches);
}

#[test]
fn a_side_with_work_to_do_gives_nobody() {
    // Three decode workers, each with a little more than half of its place taken, are needed.
    let mut pool = Pool::new(&[Prefill, Decode, Decode, Decode]);
    for (taken, moves) in [(0.55, false), (0.3, true)] {
        pool.balancer = Balancer::new(BalancerConfig::default(), pool.now_ms);
        let mut found = None;
        for _ in 0..1_000 {
            pool.now_ms += LOOK_MS;
            (pool.views[0].running, pool.views[0].jobs) = (1, 4);
            pool.views[1..].iter_mut().for_each(|view| view.taken = taken);
            found = found.or(pool.balancer.decide(&pool.views, pool.now_ms));
        }
        assert_eq!(found.is_some(), moves, "{taken} of each");
    }
}

/// Decode workers that are full make prompts wait for memory at prefill workers: that is no want of prefill workers.
#[test]
fn prompts_that_wait_for_decode_workers_count_for_those() {
    let mut pool = Pool::new(&[Prefill, Prefill, Decode]);
    let mut found = None;
    for n in 0..1_000u64 {
        pool.now_ms += LOOK_MS;
        // Now and then there is room for one.
        pool.views[..2].iter_mut().for_each(|view| (view.running, view.jobs) = (u32::from(n % 6 == 0), 6));
        (pool.views[2].waiting, pool.views[2].taken) = (9, 1.0);
        found = found.or(pool.balancer.decide(&pool.views, pool.now_ms));
    }
    assert_eq!(found.map(|switch| switch.to), Some(Decode));
}

#[test]
fn the_idlest_that_may_change_does() {
    let mut pool = Pool::new(&[Prefill, Decode, Decode, Decode, Kv, Instance]);
    (pool.views[2].changes, pool.views[1].taken, pool.views[3].taken) = (false, 0.4, 0.2);
    (pool.views[0].running, pool.views[0].jobs) = (2, 2);
    let switch = (1..1_000).find_map(|n| pool.balancer.decide(&pool.views, n * LOOK_MS));
    assert_eq!(switch, Some(RoleSwitch { id: InstanceId(4), from: Decode, to: Prefill }));
}

#[test]
fn a_switch_by_hand_is_rested_after_and_not_interrupted() {
    let mut pool = Pool::new(&[Prefill, Prefill, Prefill, Decode, Decode]);
    let config = BalancerConfig::default();
    pool.run(config.dwell_ms, Load::Answers);
    // An operator changes one, which takes long.
    pool.views[4].becoming = Some(Prefill);
    pool.ends_ms = pool.now_ms + 3 * MINUTE;
    pool.run(3 * MINUTE, Load::Answers);
    assert_eq!(pool.switches, []);
    let done_ms = pool.now_ms;
    pool.run(5 * MINUTE, Load::Answers);
    assert!(pool.switches[0].0 >= done_ms + config.dwell_ms - LOOK_MS, "{:?} after {done_ms}", pool.switches);
}

fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![3 => Just(Prefill), 3 => Just(Decode), 1 => Just(Instance), 1 => Just(Kv)]
}

/// What an instance shows in one look.
fn any_look() -> impl Strategy<Value = (u32, u32, u32, f64)> {
    (0u32..2, 0u32..4, 0u32..3, 0.0..1.0f64)
}

proptest! {
    /// Whatever is seen: a switch follows lasting evidence and a rest, is one that may be, and leaves both sides somebody.
    #[test]
    fn switches_are_rare_and_leave_both_sides_somebody(
        roles in prop::collection::vec((any_role(), any::<bool>()), 1..7),
        looks in prop::collection::vec((prop::collection::vec(any_look(), 7), 1u32..40, prop::option::of((0usize..7, any_role()))), 1..40),
        drain_looks in 1u32..20,
    ) {
        let config = BalancerConfig { sustain_ms: 1_000, dwell_ms: 3_000, window_ms: 1_000, spare_load: 0.5 };
        let mut balancer = Balancer::new(config.clone(), 0);
        let mut views: Vec<RoleView> =
            (1u32..).zip(&roles).map(|(id, (role, changes))| RoleView { changes: *changes, ..view(id, *role) }).collect();
        let (mut now_ms, mut quiet_ms, mut left) = (0, 0, 0u32);
        // Since when each side had something that waits, at all of its own.
        let mut queued: [Option<u64>; 2] = [None; 2];
        for (shown, times, by_hand) in looks {
            for (view, (running, jobs, waiting, taken)) in views.iter_mut().zip(shown) {
                (view.running, view.jobs, view.waiting, view.taken) = (running, jobs, waiting, taken);
            }
            if let Some((at, role)) = by_hand.filter(|(at, role)| *at < views.len() && role.runs() && left == 0)
                && views[at].role.runs()
                && views[at].role != role
            {
                (views[at].becoming, left) = (Some(role), drain_looks);
            }
            for _ in 0..times {
                now_ms += LOOK_MS;
                for (since, side) in queued.iter_mut().zip(Side::BOTH) {
                    *since = Balancer::queues(&views, side).then(|| since.unwrap_or(now_ms));
                }
                let switch = balancer.decide(&views, now_ms);
                if views.iter().any(|view| view.becoming.is_some()) {
                    prop_assert_eq!(switch, None);
                    quiet_ms = now_ms;
                }
                if let Some(RoleSwitch { id, from, to }) = switch {
                    prop_assert!(now_ms >= quiet_ms + config.dwell_ms + config.sustain_ms, "{} ms", now_ms - quiet_ms);
                    let side = Side::BOTH.into_iter().position(|side| side.role() == to).unwrap();
                    prop_assert!(queued[side].is_some_and(|since| now_ms >= since + config.sustain_ms));
                    let view = views.iter_mut().find(|view| view.id == id).unwrap();
                    prop_assert!(view.role == from && view.changes && from != to);
                    (view.becoming, left, quiet_ms) = (Some(to), drain_looks, now_ms);
                    for side in Side::BOTH {
                        let does = |view: &RoleView| side.has(view.role) && (view.changes || (side, from) != (Side::Prefill, Prefill));
                        let stays = |view: &RoleView| does(view) && view.becoming.is_none_or(|role| side.has(role));
                        prop_assert!(views.iter().any(stays), "{side:?} has nobody");
                    }
                }
                left = left.saturating_sub(1);
                for view in views.iter_mut().filter(|_| left == 0) {
                    view.role = view.becoming.take().unwrap_or(view.role);
                }
            }
        }
    }
}
