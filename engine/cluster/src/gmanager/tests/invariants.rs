//! Whatever instances and operators do, in whatever order: the books agree with themselves.

use super::super::member::Life;
use super::*;
use lagoon_protocol::{AdminBody, AdminDrain, AdminMove, AdminQuery, MoveOutcome};
use proptest::prelude::*;

impl GManager {
    /// Everything that is kept twice is the same twice.
    fn check_books(&self) {
        let count = |life| self.members.values().filter(|m| m.life == life).count();
        assert_eq!((self.live, self.silent), (count(Life::Live), count(Life::Silent)));
        let live: Vec<_> = self.members.iter().filter(|(_, m)| m.life == Life::Live).map(|(id, _)| *id).collect();
        assert_eq!(self.pool.instances.keys().copied().collect::<Vec<_>>(), live);
        let checks: BTreeSet<_> = self.members.iter().map(|(id, m)| (m.check_ms, *id)).collect();
        assert_eq!(self.checks, checks);
        let by_incarnation: BTreeMap<_, _> =
            self.members.iter().map(|(id, m)| (m.registration.incarnation, *id)).collect();
        assert_eq!(self.by_incarnation, by_incarnation);
        assert_eq!(self.by_addr.len(), self.members.len());
        let caps: u64 = live.iter().map(|id| u64::from(self.members[id].cap())).sum();
        assert_eq!(self.sorted.caps(), caps);
        let mut remote_requests: BTreeMap<InstanceId, BTreeMap<InstanceId, usize>> = BTreeMap::new();
        for (holder, member) in &self.members {
            assert_eq!(self.sorted.writer.flags(member.slot), member.flags(), "{holder}");
            assert!(!member.is_fenced() || member.rows.is_empty());
            for (debtor, _) in member.rows.keys().filter(|(debtor, _)| debtor != holder) {
                *remote_requests.entry(*debtor).or_default().entry(*holder).or_default() += 1;
            }
        }
        assert_eq!(self.remote_requests, remote_requests);
        self.check_requests();
    }

    /// The planner's requests are the rows.
    fn check_requests(&self) {
        let mut of_rows = BTreeSet::new();
        for (holder, member) in &self.members {
            for ((debtor, seq), row) in &member.rows {
                if self.members.get(debtor).is_some_and(|d| !d.is_fenced()) {
                    of_rows.insert((*debtor, *seq, *holder, row.blocks, row.sealed));
                }
            }
        }
        let mut of_requests = BTreeSet::new();
        for (id, member) in &self.members {
            let Some(view) = self.pool.instances.get(id).or(member.withheld.as_deref()) else { continue };
            for (seq, request) in &view.requests {
                assert_eq!(request.moving, self.orders.rests(*id, *seq), "{id} {seq}");
                if request.local > 0 {
                    of_requests.insert((*id, *seq, *id, request.local, request.local_sealed));
                }
                of_requests.extend(request.remote.iter().map(|r| (*id, *seq, r.creditor, r.blocks, r.sealed)));
            }
        }
        assert_eq!(of_requests, of_rows);
    }
}

#[derive(Clone, Debug)]
enum Act {
    Register { at: u64, life: u64, number: u32 },
    Heartbeat { at: u32, life: u64, full: bool, rows: Vec<(u32, u64, u32)>, lendable: u32, draining: bool },
    Refusal(u32),
    Deregister(u32),
    Pass(u64),
    Move(AdminMove),
    Drain { instance: u32, cancel: bool },
    Outcome { order: u64, from: u32, moved: u32 },
}

fn act() -> impl Strategy<Value = Act> {
    let row = (1u32..7, 0u64..4, 0u32..5);
    prop_oneof![
        2 => (1u64..7, 0u64..3, 0u32..8).prop_map(|(at, life, number)| Act::Register { at, life, number }),
        8 => (1u32..7, 0u64..3, any::<bool>(), proptest::collection::vec(row, 0..6), 0u32..90, 0u8..8).prop_map(
            |(at, life, full, rows, lendable, drains)| {
                Act::Heartbeat { at, life, full, rows, lendable, draining: drains == 0 }
            }
        ),
        1 => (1u32..7).prop_map(Act::Refusal),
        1 => (1u32..7).prop_map(Act::Deregister),
        3 => (1u64..900).prop_map(Act::Pass),
        1 => (2_000u64..20_000).prop_map(Act::Pass),
        2 => (1u32..7, 0u64..4, 0u32..3, 0u32..7, 0u32..7).prop_map(|(debtor, seq, blocks, source, target)| {
            Act::Move(AdminMove { debtor, seq, blocks, source, target, dry_run: false, first: None })
        }),
        1 => (1u32..7, any::<bool>()).prop_map(|(instance, cancel)| Act::Drain { instance, cancel }),
        2 => (1u64..6, 1u32..7, 0u32..3).prop_map(|(order, from, moved)| Act::Outcome { order, from, moved }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_books_agree(acts in proptest::collection::vec(act(), 1..120)) {
        let mut gm = GManager::with_config(GManagerConfig { instances_max: 16, ..GManagerConfig::default() });
        let (mut now, mut seq) = (0, 0);
        for act in acts {
            seq += 1;
            match act {
                // The process at an address is one of three lives.
                Act::Register { at, life, number } => {
                    let m = Register { incarnation: at + 100 * life, instance: number, ..register(at) };
                    gm.on_register(&m, now).unwrap();
                }
                Act::Heartbeat { at, life, full, rows, lendable, draining } => {
                    let entry = |(debtor, seq, blocks): &(u32, u64, u32)| PlacementEntry {
                        debtor: *debtor, seq: *seq, blocks: *blocks, blocks_sealed: *blocks / 2,
                    };
                    let incarnation = u64::from(at) + 100 * life;
                    // Under whichever number that process has.
                    let number = gm.by_incarnation.get(&incarnation).map_or(at, |id| id.0);
                    let placements = rows.iter().map(entry).collect();
                    gm.on_heartbeat(&Heartbeat {
                        incarnation, placements, placements_full: full, draining, ..heartbeat(number, seq, lendable)
                    }, now);
                }
                Act::Refusal(creditor) => gm.on_refusal(&Refusal { creditor, blocks_lendable: 3 }),
                Act::Deregister(instance) => gm.on_deregister(InstanceId(instance)),
                Act::Pass(ms) => {
                    now += ms;
                    gm.tick(now);
                }
                Act::Move(m) => drop(gm.on_admin(&AdminQuery { query: 1, body: Some(AdminBody::Move(m)) }, now)),
                Act::Drain { instance, cancel } => {
                    let drain = AdminDrain { instance, cancel, stop: false };
                    gm.on_admin(&AdminQuery { query: 1, body: Some(AdminBody::Drain(drain)) }, now);
                }
                Act::Outcome { order, from, moved } => {
                    let outcome = MoveOutcome { order, moved, target_lendable: Some(1), ..Default::default() };
                    gm.on_move_outcome(InstanceId(from), &outcome, now);
                }
            }
            gm.check_books();
            let advice = gm.on_borrow_query(&BorrowQuery { debtor: 1, blocks: 3, ..Default::default() }, now);
            for candidate in advice.candidates {
                let member = &gm.members[&InstanceId(candidate.instance)];
                prop_assert!(member.is_live(now) && !member.paused && !member.is_draining());
                prop_assert_eq!(candidate.quic_addr, member.registration.quic_addr.clone());
            }
        }
        // In the end no instance reports: all of the gManager's state expires.
        now += 1;
        for _ in 0..200 {
            gm.tick(now);
            now += 500;
        }
        prop_assert!(gm.members.is_empty());
        prop_assert!(gm.remote_requests.is_empty() && gm.pool.instances.is_empty() && gm.orders.is_idle());
        prop_assert_eq!(gm.sorted.caps(), 0);
    }
}
