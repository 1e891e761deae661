//! Answers of creditors that a step did not ask for.

use crate::batch::freeze::tests::{PEER, Scene, config};
use crate::{Effect, Event, InstanceConfig, RemotePolicy};
use bytes::Bytes;
use lagoon_protocol::{BulkFrame, PartialsFrame, RefuseCode};
use lagoon_runner::{Command, Report};
use lagoon_types::{InstanceId, LeaseId, StepId};

fn partial(step: StepId, layer: u32) -> Event {
    let (out, lse, count) = (Bytes::new(), Bytes::new(), Bytes::new());
    Event::Partials { peer: PEER, frame: PartialsFrame::Partial { step, layer, rows: 1, out, lse, count } }
}

fn handed_on(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Runner(Command::Part { .. }))).count()
}

/// Such an answer would count as the one that is missing, and the step would wait for it without a deadline.
#[test]
fn a_partial_of_another_layer_answers_nothing() {
    let mut scene = Scene::with(config());
    let (step, _) = scene.step.expect("a token is computed");
    let frames = vec![(InstanceId(2), 1, Bytes::new())];
    scene.on(Event::Runner(Report::Queries { step, layer: 0, frames }));
    assert_eq!(handed_on(&scene.on(partial(step, 1))), 0, "nobody asked for it");
    assert_eq!(handed_on(&scene.on(partial(step, 0))), 1);
    assert_eq!(handed_on(&scene.on(partial(step, 0))), 0, "it is answered");
}

fn ends(effects: &[Effect], step: StepId) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Runner(Command::Abort { step: s }) if *s == step))
}

/// A step that reads, and the read's number.
fn reading() -> (Scene, StepId, u64) {
    let scene = Scene::with(InstanceConfig { remote: RemotePolicy::Fetch, fetch_tokens: 64, ..config() });
    let (step, _) = scene.step.expect("a token is computed");
    let read = scene.read.expect("it reads");
    (scene, step, read)
}

/// Nothing else answers it: the step would wait for ever.
#[test]
fn a_read_that_is_refused_is_lost_whatever_lease_is_named() {
    let (mut scene, step, id) = reading();
    let (code, detail) = (RefuseCode::UnknownLease, String::new());
    let frame = BulkFrame::Refused { id, lease: LeaseId(999), code, detail };
    let effects = scene.on(Event::Bulk { peer: PEER, frame });
    assert!(ends(&effects, step), "{effects:?}");
}

#[test]
fn a_read_that_is_answered_with_another_layer_is_lost() {
    let (mut scene, step, id) = reading();
    let frame = BulkFrame::Data { id, layer: 7, tokens: 16, kv: Bytes::new() };
    let effects = scene.on(Event::Bulk { peer: PEER, frame });
    assert!(ends(&effects, step), "{effects:?}");
}
