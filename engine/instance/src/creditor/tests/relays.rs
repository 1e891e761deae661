//! Relays and members. Instance 2 is the debtor; instance 3 the other creditor.

use super::*;
use lagoon_runner::{RemoteMerge, Report};
use lagoon_types::InstanceId;
use lagoon_types::limits::RELAY_EARLY_MAX;

const DEBTOR: InstanceId = InstanceId(2);
const OTHER: InstanceId = InstanceId(3);

/// An instance whose lease to the debtor is written, in the first of so many layers.
fn scene_of(layers: u32) -> (Scene, (LeaseId, Epoch)) {
    let kv = KvShape { layers, ..config().kv };
    let mut scene = Scene::new(InstanceConfig { lend_blocks_max: 3, kv, ..config() });
    let lease = scene.lease(2, 1);
    scene.write(2, lease);
    (scene, lease)
}

fn scene() -> (Scene, (LeaseId, Epoch)) {
    scene_of(1)
}

fn row(scene: &Scene) -> Bytes {
    Bytes::from(vec![0; scene.config.geometry.q_dim() * DType::F32.size()])
}

/// A relayed query of the debtor's step.
fn relayed(scene: &mut Scene, from: u64, step: StepId, rows: u32) -> Vec<Effect> {
    let queries = Bytes::from(row(scene).repeat(rows as usize));
    scene.partials(from, PartialsFrame::RelayedQuery { debtor: DEBTOR, step, layer: 0, rows, queries })
}

/// Output, log-sum-exps and count of a row.
fn part(scene: &Scene, count: u32) -> (Bytes, Bytes, Bytes) {
    let lse = Bytes::from(vec![0; 4 * scene.config.geometry.heads as usize]);
    (row(scene), lse, Bytes::from(count.to_le_bytes().to_vec()))
}

/// Member 3 answers a layer.
fn answer(scene: &mut Scene, layer: u32, (out, lse, count): (Bytes, Bytes, Bytes)) -> Vec<Effect> {
    let frame = PartialsFrame::RelayedPartial { debtor: DEBTOR, step: STEP, layer, rows: 1, out, lse, count };
    scene.partials(3, frame)
}

/// The device answers the query of `effects`.
fn computed(scene: &mut Scene, effects: &[Effect], count: u32) -> Vec<Effect> {
    let tag = queries(effects)[0].tag;
    let (out, lse, count) = part(scene, count);
    scene.on(Event::Runner(Report::RemotePartial { tag, out, lse, count }))
}

fn merges(effects: &[Effect]) -> Vec<&RemoteMerge> {
    let mut merges = Vec::new();
    for effect in effects {
        if let Effect::Runner(Command::RemoteMerge(merge)) = effect {
            merges.push(merge);
        }
    }
    merges
}

/// Frames to a peer.
fn to(effects: &[Effect], peer: u64) -> Vec<&PartialsFrame> {
    let mut frames = Vec::new();
    for effect in effects {
        if let Effect::Partials { peer: to, frame } = effect
            && *to == PeerKey(peer)
        {
            frames.push(frame);
        }
    }
    frames
}

#[test]
fn a_relay_passes_queries_on_and_answers_with_one_partial() {
    let (mut scene, lease) = scene();
    assert_eq!(refused(&scene.routed(2, STEP, &[lease], 1, Route::Relay(vec![OTHER]))), []);
    let row = row(&scene);
    let asked = scene.query(2, 1, &row);
    assert!(matches!(to(&asked, 3)[..], [PartialsFrame::RelayedQuery { debtor: DEBTOR, step: STEP, layer: 0, .. }]));
    // Whichever comes first, the own part is merged first; a second answer of a member counts nothing.
    let theirs = part(&scene, 7);
    assert!(answer(&mut scene, 0, theirs.clone()).is_empty());
    let again = part(&scene, 9);
    assert!(answer(&mut scene, 0, again).is_empty());
    assert!(answer(&mut scene, 1, theirs).is_empty(), "another layer's");
    let effects = computed(&mut scene, &asked, 5);
    let [merge] = merges(&effects)[..] else { panic!("{effects:?}") };
    let counts: Vec<u8> = merge.parts.iter().map(|part| part.count[0]).collect();
    assert_eq!((counts, merge.parts[1].creditor, merge.rows), (vec![5, 7], OTHER, 1));
    let (out, lse, count) = part(&scene, 12);
    let answered = scene.on(Event::Runner(Report::RemotePartial { tag: merge.tag, out, lse, count }));
    assert!(matches!(to(&answered, 2)[..], [PartialsFrame::Partial { step: STEP, layer: 0, rows: 1, .. }]));
    assert_eq!(scene.instance.status().relays.merged_layers, 1);
    assert_eq!(scene.instance.status().remote_request_frames, 0);
}

#[test]
fn a_member_answers_its_relay_and_nobody_else() {
    let (mut scene, lease) = scene();
    assert_eq!(refused(&scene.routed(2, STEP, &[lease], 1, Route::Through(OTHER))), []);
    let asked = relayed(&mut scene, 3, STEP, 1);
    let answered = computed(&mut scene, &asked, 1);
    assert!(matches!(to(&answered, 3)[..], [PartialsFrame::RelayedPartial { debtor: DEBTOR, step: STEP, .. }]));
    // Without a route the ticket is the debtor's alone, and with one the relay's.
    scene.ticket(2, lease, 1);
    assert!(relayed(&mut scene, 3, STEP, 1).is_empty());
    scene.routed(2, STEP, &[lease], 1, Route::Through(OTHER));
    let row = row(&scene);
    assert_eq!(refused(&scene.query(2, 1, &row)), [RefuseCode::Malformed]);
}

#[test]
fn a_relayed_query_waits_for_its_ticket_and_for_no_other() {
    let (mut scene, lease) = scene();
    assert!(relayed(&mut scene, 3, STEP, 1).is_empty());
    assert!(relayed(&mut scene, 3, StepId(STEP.0 + 1), 1).is_empty());
    assert_eq!(scene.instance.status().remote_request_frames, 2);
    assert_eq!(queries(&scene.routed(2, STEP, &[lease], 1, Route::Through(OTHER))).len(), 1);
    // The debtor is past the next step: its query waits no more, and a late one not at all.
    scene.partials(2, PartialsFrame::StepCancel { step: StepId(STEP.0 + 2) });
    assert!(relayed(&mut scene, 3, StepId(STEP.0 + 1), 1).is_empty());
    assert_eq!(scene.instance.status().remote_request_frames, 1, "the one on the device");
    // One that does not fit its ticket ends the step, without a loss.
    scene.routed(2, StepId(20), &[lease], 1, Route::Through(OTHER));
    let effects = relayed(&mut scene, 3, StepId(20), 2);
    assert_eq!((refused(&effects), to(&effects, 2).len()), (vec![RefuseCode::NotRelayed], 1));
}

/// Queries without a ticket take no more than a peer's places.
#[test]
fn relayed_queries_wait_in_bounded_number() {
    let (mut scene, _) = scene();
    // Nobody vouches for them: the debtor hears nothing of those beyond.
    for step in 0..2 * RELAY_EARLY_MAX as u64 {
        assert_eq!(refused(&relayed(&mut scene, 3, StepId(100 + step), 1)), []);
    }
    assert_eq!(scene.instance.status().remote_request_frames, RELAY_EARLY_MAX);
    scene.on(Event::PeerDown { peer: PeerKey(3) });
    assert_eq!(scene.instance.status().remote_request_frames, 0);
}

#[test]
fn a_route_over_nobody_is_refused_without_a_loss() {
    let (mut scene, lease) = scene();
    let stranger = InstanceId(9);
    let mut code = |route| refused(&scene.routed(2, STEP, &[lease], 1, route));
    assert_eq!(code(Route::Through(stranger)), [RefuseCode::NotRelayed]);
    assert_eq!(code(Route::Relay(vec![OTHER, stranger])), [RefuseCode::NotRelayed]);
    for members in [vec![OTHER, OTHER], vec![InstanceId(1)], vec![DEBTOR]] {
        assert_eq!(code(Route::Relay(members)), [RefuseCode::Malformed]);
    }
    assert_eq!(code(Route::Through(DEBTOR)), [RefuseCode::Malformed]);
}

/// A member that leaves, sends nonsense or is late: the debtor asks directly.
#[test]
fn a_layer_that_cannot_be_merged_is_not_relayed() {
    type Fault = fn(&mut Scene) -> Vec<Effect>;
    let leaves: Fault = |scene| scene.on(Event::PeerDown { peer: PeerKey(3) });
    let cannot_be_sent_to: Fault = |scene| scene.on(Event::SendFailed { peer: PeerKey(3) });
    let is_short: Fault = |scene| {
        let (out, lse, count) = part(scene, 1);
        answer(scene, 0, (out.slice(4..), lse, count))
    };
    let counts_too_much: Fault = |scene| {
        let part = part(scene, u32::MAX);
        answer(scene, 0, part)
    };
    let is_late: Fault = |scene| {
        let mut effects = scene.instance.handle(Event::Tick, 10_500);
        effects.retain(|effect| matches!(effect, Effect::Partials { .. }));
        effects
    };
    for fault in [leaves, cannot_be_sent_to, is_short, counts_too_much, is_late] {
        let (mut scene, lease) = scene();
        scene.routed(2, STEP, &[lease], 1, Route::Relay(vec![OTHER]));
        let row = row(&scene);
        let asked = scene.query(2, 1, &row);
        let effects = fault(&mut scene);
        assert_eq!((refused(&effects), to(&effects, 2).len()), (vec![RefuseCode::NotRelayed], 1));
        // What the device computes meanwhile is for nobody.
        assert!(computed(&mut scene, &asked, 5).is_empty());
        assert_eq!(scene.instance.status().remote_request_frames, 0);
    }
}

/// A debtor that cancels takes its layer back.
#[test]
fn a_cancelled_layer_is_not_merged() {
    let (mut scene, lease) = scene_of(2);
    scene.routed(2, STEP, &[lease], 1, Route::Relay(vec![OTHER]));
    let row = row(&scene);
    let asked = scene.query(2, 1, &row);
    assert_eq!(refused(&scene.query(2, 1, &row)), [RefuseCode::Malformed], "the layer before is not answered");
    scene.routed(2, STEP, &[lease], 1, Route::Relay(vec![OTHER]));
    let again = scene.query(2, 1, &row);
    let theirs = part(&scene, 7);
    answer(&mut scene, 0, theirs);
    assert!(computed(&mut scene, &asked, 5).is_empty(), "of the ticket before");
    assert_eq!(merges(&computed(&mut scene, &again, 5)).len(), 1);
    scene.routed(2, StepId(9), &[lease], 1, Route::Relay(vec![OTHER]));
    scene.partials(2, PartialsFrame::StepCancel { step: StepId(9) });
    assert_eq!(scene.instance.status().remote_steps, 1, "the step before has a layer to come");
}
