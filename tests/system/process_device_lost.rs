//! A lost device ends the real binary, over the fake driver: nothing works on it any more, so nobody should wait for it.

use crate::process_cuda_trial::Machine;
use lagoon_tests::process::{Server, completion};
use serde_json::json;
use std::ffi::OsStr;

#[test]
fn a_lost_device_ends_the_process() {
    let Some(machine) = Machine::new("a_lost_device_ends_the_process") else { return };
    let machine = machine.with("LAGOON_FAKE_TRAP", "rope_append");
    let model = lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned();
    let flags = ["--backend=cuda", "--http=127.0.0.1:0", "--block-tokens=32", "--kv-tokens=256", "--calibrate=off"];
    let variables: Vec<(&str, &OsStr)> =
        machine.variables.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    let mut server = Server::start_with(&[&["serve", &model], &flags[..]].concat(), &variables);
    let answer = server.client().post("/v1/completions", &completion(&[7; 20], 2, &json!({})));
    assert_eq!(answer.status, 503, "{}", answer.text);
    let ended = server.ended();
    assert_ne!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("the device was lost") && ended.stderr.contains("LAUNCH_FAILED"), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint: start the instance again"), "{}", ended.stderr);
}
