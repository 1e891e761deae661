//! Standby gManagers, with a real etcd server: one is killed, one is paused, etcd itself is stopped.

use crate::process_cluster::{TWO, certificates, equals_single, new_ca, wait_for_pool};
use crate::process_up::{golden_prompt, single};
use lagoon_tests::etcd::EtcdServer;
use lagoon_tests::process::{Ended, Server, TIMEOUT, completion, kill, run, signal, token_ids};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Duration of a leader's lease in this test, in seconds.
const LEASE_S: u64 = 2;

/// Two gManagers of one pool.
struct Pair {
    etcd: EtcdServer,
    ca: TempDir,
    gmanagers: [Server; 2],
    tls: [String; 3],
}

impl Pair {
    /// `None` without etcd; CI fails then.
    fn new(test: &str) -> Option<Self> {
        let etcd = match EtcdServer::start() {
            Ok(etcd) => etcd,
            Err(reason) => {
                lagoon_tests::skip(&format!("process_standby::{test}"), &reason);
                return None;
            }
        };
        let ca = new_ca();
        let gmanager = |name| {
            let [a, b, c] = certificates(&ca, name);
            let lease = format!("--etcd-lease-s={LEASE_S}");
            let flags = ["--etcd-prefix=/lagoon/tests", &etcd.flag(), &lease, "--listen=127.0.0.1:0"];
            Server::start(&[&["gmanager", &a, &b, &c], &flags[..]].concat())
        };
        let gmanagers = ["gm-0", "gm-1"].map(gmanager);
        let tls = certificates(&ca, "looker");
        Some(Self { etcd, ca, gmanagers, tls })
    }

    fn addr(&self, place: usize) -> String {
        self.gmanagers[place].announced("quic")
    }

    fn both(&self) -> String {
        format!("{},{}", self.addr(0), self.addr(1))
    }

    fn serve(&self, name: &str, model: &str) -> Server {
        let gmanager = format!("--gmanager={}", self.both());
        let [a, b, c] = certificates(&self.ca, name);
        let own = ["serve", model, &gmanager, &a, &b, &c, "--name", name, "--backend=cpu", "--threads=1"];
        let common = ["--http=127.0.0.1:0", "--block-tokens=8", "--kv-tokens=64", "--expose-logits"];
        Server::start(&[&own[..], &common[..]].concat())
    }

    fn ask(&self, gmanagers: &str) -> Ended {
        ask(&self.tls, gmanagers)
    }

    /// Waits for a leader; returns its place and term.
    fn leader(&self, gmanagers: &str) -> (usize, u64) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let ended = self.ask(gmanagers);
            if ended.code == Some(0) {
                let status: Value = serde_json::from_str(&ended.stdout).unwrap();
                let addr = status["gmanager"]["addr"].as_str().unwrap();
                let place = (0..2).find(|place| self.addr(*place) == addr).unwrap();
                return (place, status["gmanager"]["term"].as_u64().unwrap());
            }
            assert!(Instant::now() < deadline, "{ended:?}");
        }
    }
}

fn ask([ca, cert, key]: &[String; 3], gmanagers: &str) -> Ended {
    run(&["status", "--json", "--gmanager", gmanagers, ca, cert, key])
}

#[test]
fn a_standby_takes_over_from_a_killed_leader() {
    let Some(pair) = Pair::new("a_standby_takes_over_from_a_killed_leader") else { return };
    let (model, prompt) = golden_prompt();
    let (place, term) = pair.leader(&pair.both());
    let instances = ["one", "two"].map(|name| pair.serve(name, &model));
    let [one, two] = [instances[0].client(), instances[1].client()];
    wait_for_pool(&one, TWO);
    wait_for_pool(&two, TWO);

    // An instance alone holds 64 of its 120 tokens: it goes on with its borrowed memory, and borrows more.
    let mut events = one.stream("/v1/completions", &completion(&prompt[..70], 50, &json!({"stream": true})));
    let mut tokens = token_ids(&serde_json::from_str(&events.next_data().unwrap()).unwrap());
    kill(pair.gmanagers[place].pid());
    let killed = Instant::now();
    let (other, later) = pair.leader(&pair.addr(1 - place));
    let took = killed.elapsed();
    println!("a standby led {took:?} after the leader's death (lease {LEASE_S} s)");
    assert!(other == 1 - place && later > term, "{other} {later} {term}");
    // The rest of the lease, etcd's half second of housekeeping, a poll, and a command's start on a busy machine.
    assert!(took < Duration::from_secs(LEASE_S + 4), "{took:?}");
    let (rest, done) = events.rest();
    assert!(done, "{rest:?}");
    tokens.extend(rest.iter().flat_map(token_ids));
    let reference = single(&model, "256");
    let expected = reference.client().complete(&prompt[..70], 50, &json!({})).json();
    assert_eq!(tokens, token_ids(&expected));

    // New loans, on either.
    for client in [&one, &two] {
        client.wait_until("/lagoon/status", "registered", |s| s["registered"] == true);
        wait_for_pool(client, TWO);
        equals_single(client, &model, &prompt);
    }
}

#[test]
fn a_leader_that_was_paused_does_not_lead_any_more() {
    let Some(pair) = Pair::new("a_leader_that_was_paused_does_not_lead_any_more") else { return };
    let (place, term) = pair.leader(&pair.both());
    signal(pair.gmanagers[place].pid(), "STOP");
    let (other, later) = pair.leader(&pair.addr(1 - place));
    assert!(other != place && later > term);
    // The paused gManager reads these questions before it can have learnt of the other leader.
    let (tls, addr) = (pair.tls.clone(), pair.addr(place));
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..4).map(|_| scope.spawn(|| ask(&tls, &addr))).collect();
        std::thread::sleep(Duration::from_millis(700));
        signal(pair.gmanagers[place].pid(), "CONT");
        for thread in asked {
            let ended = thread.join().unwrap();
            assert_eq!(ended.code, Some(0), "{ended:?}");
            let status: Value = serde_json::from_str(&ended.stdout).unwrap();
            assert_eq!(status["gmanager"]["term"].as_u64(), Some(later), "two lead: {status}");
            assert_eq!(status["gmanager"]["standbys"], json!([pair.addr(place)]), "{status}");
        }
    });
    assert_eq!(pair.leader(&pair.addr(place)), (other, later), "it names the one that leads");
}

#[test]
fn without_etcd_nobody_leads_and_requests_go_on() {
    let Some(mut pair) = Pair::new("without_etcd_nobody_leads_and_requests_go_on") else { return };
    let (model, prompt) = golden_prompt();
    let (_, term) = pair.leader(&pair.both());
    let instances = ["one", "two"].map(|name| pair.serve(name, &model));
    let client = instances[0].client();
    wait_for_pool(&client, TWO);
    pair.etcd.stop();
    let stopped = Instant::now();
    let refused = loop {
        let ended = pair.ask(&pair.both());
        if ended.code != Some(0) {
            break ended;
        }
        assert!(stopped.elapsed() < TIMEOUT, "it leads without a lease");
    };
    println!("nobody led {:?} after etcd's end (lease {LEASE_S} s)", stopped.elapsed());
    assert!(refused.stderr.contains("no gManager leads") && refused.stderr.contains("hint:"), "{refused:?}");
    client.wait_until("/lagoon/status", "without a gManager", |s| s["registered"] == false);
    // Requests that fit an instance are served; those that must borrow wait for a gManager.
    let answer = client.complete(&prompt[..40], 8, &json!({})).json();
    assert_eq!(token_ids(&answer).len(), 8);
    let other = instances[1].client();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| equals_single(&other, &model, &prompt));
        std::thread::sleep(Duration::from_millis(500));
        pair.etcd.restart();
        waiting.join().unwrap();
    });
    let (_, later) = pair.leader(&pair.both());
    assert!(later > term, "{later} {term}");
}
