//! Deliberate bugs (mutants) are found, each within a bounded number of seeds. Seeds without a bug pass: `chaos.rs` runs the first of
//! them. `cargo test -p lagoon-sim --features mutants --test mutants`.
#![allow(clippy::print_stdout, reason = "tests print what they found")]

use lagoon_cluster::mutants::{Mutant, choose};
use lagoon_kv::mutants as kv;
use lagoon_sim::chaos::{Aim, Failure, Limits, Scenario, run, shrink};
use lagoon_sim::dispatching::Outcome;
use lagoon_transfer::mutants as transfer;
use std::time::Duration;

/// Number of seeds in which a mutant must be found.
const SEEDS: u64 = 3_000;
/// Pools with prefill elsewhere.
const ROLES: Limits = Limits {
    nodes: 0,
    requests: 0,
    seconds: 0,
    faults: true,
    roles: Some(true),
    aim: None,
    steps: 0,
    cache_tiers: false,
    joint: false,
    hosts: false,
};

/// The first seed that finds a mutant, and its failure.
fn hunt(mutant: Mutant) -> (u64, Failure) {
    hunt_with(&format!("{mutant:?}"), Limits::default(), |on| choose(on.then_some(mutant)))
}

/// As [`hunt`], for a mutant of prefill elsewhere.
fn hunt_handed(mutant: Mutant) -> (u64, Failure) {
    hunt_with(&format!("{mutant:?}"), ROLES, |on| choose(on.then_some(mutant)))
}

/// As [`hunt`], for a mutant that only an aimed coincidence shows.
fn hunt_aimed(mutant: Mutant, aim: Aim) -> (u64, Failure) {
    let limits = Limits { aim: Some(aim), ..ROLES };
    hunt_with(&format!("{mutant:?}"), limits, |on| choose(on.then_some(mutant)))
}

/// As [`hunt`], for a mutant of the transfer's reader.
fn hunt_read(mutant: transfer::Mutant) -> (u64, Failure) {
    hunt_with(&format!("{mutant:?}"), ROLES, |on| transfer::choose(on.then_some(mutant)))
}

/// The shortest history found that fails as `failure`.
fn shortest(scenario: &Scenario, failure: &Failure) -> String {
    let shrunk = shrink(scenario, failure, Duration::from_secs(5));
    let ops: String = shrunk.ops.iter().map(|op| format!("  {op}\n")).collect();
    format!("the shortest history found, {} of {} lines:\n{ops}", shrunk.ops.len(), scenario.ops.len())
}

/// As [`hunt`], for a mutant that `choose` turns on.
fn hunt_with(mutant: &str, limits: Limits, choose: impl Fn(bool)) -> (u64, Failure) {
    for seed in 0..SEEDS {
        let scenario = Scenario::draw(seed, limits);
        choose(true);
        let result = run(&scenario);
        if let Err(failure) = result {
            println!("{mutant}: seed {seed}: {failure}");
            if std::env::var_os("LAGOON_SHRINK").is_some() {
                println!("{}", shortest(&scenario, &failure));
            }
            choose(false);
            assert_eq!(run(&scenario).err(), None, "seed {seed} fails without the mistake, too");
            return (seed, failure);
        }
    }
    choose(false);
    panic!("{mutant} was not found in {SEEDS} seeds");
}

#[test]
fn a_double_grant_is_found_and_its_history_shrunk() {
    let (seed, failure) = hunt(Mutant::DoubleGrant);
    let scenario = Scenario::draw(seed, Limits::default());
    choose(Some(Mutant::DoubleGrant));
    let shrunk = shrink(&scenario, &failure, Duration::from_secs(5));
    choose(None);
    assert!(shrunk.ops.len() < scenario.ops.len(), "all {} lines are kept", scenario.ops.len());
}

#[test]
fn a_lease_of_blocks_that_are_not_cached_is_found() {
    hunt(Mutant::CachedUnverified);
}

#[test]
fn an_eviction_under_a_lease_is_found() {
    hunt(Mutant::CachedUnowned);
}

#[test]
fn a_stripe_that_is_attended_to_before_it_is_computed_is_found() {
    let limits = Limits { joint: true, roles: Some(false), ..Limits::default() };
    let (_, failure) = hunt_with("StripeUnawaited", limits, |on| choose(on.then_some(Mutant::StripeUnawaited)));
    assert!(["answer", "coverage"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_member_that_a_relay_merges_twice_is_found() {
    let limits = Limits { hosts: true, roles: Some(false), ..Limits::default() };
    let (_, failure) = hunt_with("MemberMergedTwice", limits, |on| choose(on.then_some(Mutant::MemberMergedTwice)));
    assert_eq!(failure.checker, "coverage", "{failure}");
}

#[test]
fn a_dropped_ack_of_a_release_is_found() {
    let limits = Limits { aim: Some(Aim::Unreleased), faults: false, ..ROLES };
    let (seed, failure) =
        hunt_with("ReleaseUnconfirmed", limits, |on| choose(on.then_some(Mutant::ReleaseUnconfirmed)));
    assert_eq!(failure.checker, "leak");
    assert!(seed < 300, "it is aimed at: seed {seed}");
}

#[test]
fn a_skipped_epoch_check_is_found() {
    hunt(Mutant::EpochUnchecked);
}

#[test]
fn a_source_that_is_freed_before_the_switch_is_found() {
    let (_, failure) = hunt(Mutant::FreedBeforeSwitched);
    assert_eq!(failure.checker, "table");
}

#[test]
fn a_dropped_seal_is_found() {
    let (_, failure) = hunt(Mutant::SealUnreported);
    assert_eq!(failure.checker, "acknowledgement");
}

#[test]
fn a_switch_before_the_seal_is_found() {
    let (_, failure) = hunt(Mutant::SealUnawaited);
    assert_eq!(failure.checker, "table");
}

#[test]
fn a_block_hash_without_tokens_is_found() {
    let (_, failure) = hunt(Mutant::TokensUnhashed);
    // Salts are among what is not hashed.
    assert!(["answer", "coverage", "tenant"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_hash_without_its_tenants_salt_is_found() {
    let (_, failure) = hunt(Mutant::SaltIgnored);
    assert_eq!(failure.checker, "tenant", "{failure}");
}

#[test]
fn a_block_hash_that_outlives_its_block_is_found() {
    hunt_with("StaleHash", Limits::default(), |on| kv::choose(on.then_some(kv::Mutant::StaleHash)));
}

#[test]
fn a_shared_block_that_is_freed_while_another_uses_it_is_found() {
    let (_, failure) =
        hunt_with("SharedFreed", Limits::default(), |on| kv::choose(on.then_some(kv::Mutant::SharedFreed)));
    // A lease of cached blocks may be the first to notice.
    assert!(["table", "panic"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_shared_block_that_is_handed_over_as_if_owned_alone_is_found() {
    let (_, failure) =
        hunt_with("SharedHandedOver", ROLES, |on| kv::choose(on.then_some(kv::Mutant::SharedHandedOver)));
    assert!(["blocks", "table"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn what_is_freed_under_a_read_is_found() {
    let (_, failure) = hunt_handed(Mutant::PinIgnored);
    assert_eq!(failure.checker, "export");
}

#[test]
fn a_reply_that_is_sent_once_is_found() {
    let (_, failure) = hunt_aimed(Mutant::AnswerUnrepeated, Aim::Unacknowledged);
    assert!(["hang", "leak"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_life_that_takes_what_the_one_before_it_asked_for_is_found() {
    let (_, failure) = hunt_aimed(Mutant::AskedByTheDead, Aim::Fenced);
    assert_eq!(failure.checker, "leases");
}

#[test]
fn a_role_that_changes_before_the_old_one_is_done_is_found() {
    let (_, failure) = hunt_handed(Mutant::RoleUnfinished);
    assert_eq!(failure.checker, "role");
}

#[test]
fn a_last_one_that_leaves_is_found() {
    let (_, failure) = hunt_handed(Mutant::LastLeaves);
    assert_eq!(failure.checker, "role");
}

#[test]
fn a_switch_that_a_new_gmanager_forgets_is_found() {
    let (_, failure) = hunt_handed(Mutant::RoleForgotten);
    assert_eq!(failure.checker, "role");
}

#[test]
fn an_order_that_is_given_once_is_found() {
    let (_, failure) = hunt_handed(Mutant::RoleUnrepeated);
    assert_eq!(failure.checker, "role");
}

#[test]
fn an_order_that_dies_with_a_life_is_found() {
    let (_, failure) = hunt_aimed(Mutant::RoleFenced, Aim::Fenced);
    assert_eq!(failure.checker, "role");
}

#[test]
fn an_order_that_is_taken_for_acknowledged_is_found() {
    let (_, failure) = hunt_aimed(Mutant::RoleUnacknowledged, Aim::TakenBack);
    assert_eq!(failure.checker, "role");
}

#[test]
fn an_offer_before_its_copy_is_found() {
    hunt_handed(Mutant::StageUnawaited);
}

#[test]
fn a_staging_buffer_that_is_used_again_under_a_read_is_found() {
    let (_, failure) = hunt_handed(Mutant::StageReused);
    assert_eq!(failure.checker, "export");
}

#[test]
fn a_prompt_that_goes_on_before_its_copy_is_found() {
    hunt_handed(Mutant::LandedUnstored);
}

#[test]
fn a_read_before_late_writes_is_found() {
    let (_, failure) = hunt_aimed(Mutant::WritesUnawaited, Aim::LateWrites);
    assert!(["answer", "coverage"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_ring_that_is_filled_too_late_is_found() {
    let (_, failure) = hunt(Mutant::RingLate);
    assert_eq!(failure.checker, "answer", "{failure}");
}

#[test]
fn a_window_that_is_not_copied_to_its_ring_is_found() {
    let (_, failure) = hunt_handed(Mutant::WindowUnread);
    assert_eq!(failure.checker, "answer", "{failure}");
}

#[test]
fn drafts_that_are_sent_before_they_count_are_found() {
    let (_, failure) = hunt(Mutant::DraftsUnheld);
    assert!(["answer", "hash"].contains(&failure.checker.as_str()), "{failure}");
}

#[test]
fn a_draft_that_is_accepted_unchecked_is_found() {
    let (_, failure) = hunt(Mutant::DraftUnchecked);
    assert_eq!(failure.checker, "answer", "{failure}");
}

#[test]
fn a_completion_before_its_reads_is_found() {
    let (_, failure) = hunt_read(transfer::Mutant::CompleteBeforeLast);
    assert_eq!(failure.checker, "transfer");
}

#[test]
fn memory_that_is_given_back_under_a_read_is_found() {
    hunt_read(transfer::Mutant::ReleasedUnderReads);
}

/// The first seed whose dispatcher shows a mutant; the same seed passes without it.
fn hunt_dispatched(mutant: Mutant) -> String {
    hunt_dispatched_by(mutant, lagoon_sim::dispatching::run)
}

/// As [`hunt_dispatched`], with runs of another kind.
fn hunt_dispatched_by(mutant: Mutant, run: impl Fn(u64) -> Result<Outcome, String>) -> String {
    for seed in 0..SEEDS {
        choose(Some(mutant));
        let found = run(seed).err();
        choose(None);
        if let Some(why) = found {
            println!("{mutant:?}: seed {seed}: {why}");
            assert!(run(seed).is_ok(), "seed {seed} fails without the mistake, too");
            return why;
        }
    }
    panic!("{mutant:?} was not found in {SEEDS} seeds");
}

#[test]
fn a_lost_hand_back_is_found() {
    assert!(hunt_dispatched(Mutant::HandBackLost).contains("wait and"));
}

#[test]
fn a_double_binding_is_found() {
    let why = hunt_dispatched(Mutant::BoundTwice);
    assert!(why.contains("while it is") || why.contains("are bound, not"), "{why}");
}

#[test]
fn a_tenant_that_is_not_charged_is_found() {
    let why = hunt_dispatched_by(Mutant::TenantUncharged, lagoon_sim::dispatching::run_flooded);
    assert!(why.contains("started before"), "{why}");
}

#[test]
fn an_answer_that_begins_anew_is_found() {
    assert!(hunt_dispatched(Mutant::ReplayedFromStart).contains("goes on after"));
}

#[test]
fn a_request_that_may_kill_all_instances_is_found() {
    assert!(hunt_dispatched(Mutant::LossesUncounted).contains("killed them"));
}

#[test]
fn a_starved_head_is_found() {
    assert!(hunt_dispatched(Mutant::HeadStarved).contains("passed the head"));
}
