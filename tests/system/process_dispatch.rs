//! An instance, the gManager or a gateway is killed while requests are queued at gateways, bound to instances and handed back: each
//! request is answered once, with an undisturbed instance's tokens, and nothing is left behind.

use lagoon_tests::faults::{FaultPool, STEP, Undisturbed, Watched, number, passkey, prompt};
use lagoon_tests::partition::Place;
use lagoon_tests::process::{Client, Server, TIMEOUT};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VOCAB: u32 = 1024;
/// Tokens of an answer: longer in steps than an instance keeps a waiting request.
const ANSWER: u32 = 200;
const NAMES: [&str; 3] = ["i0", "i1", "i2"];

/// A number on a metrics page; 0 if it has none.
fn metric(client: &Client, name: &str) -> f64 {
    let page = client.get("/metrics").text;
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

fn waiting(gateway: &Server) -> f64 {
    metric(&gateway.client(), "lagoon_gateway_requests_waiting")
}

fn handed_back(gateway: &Server) -> f64 {
    metric(&gateway.client(), "lagoon_gateway_handed_back_total")
}

fn wait_until(what: &str, satisfied: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !satisfied() {
        assert!(Instant::now() < deadline, "not {what} within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Three instances that run one request at a time.
fn pool() -> (FaultPool, Undisturbed) {
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(STEP));
    pool.start(&NAMES.map(|name| (name, 80, Place::default().with("--max-running=1"))));
    let undisturbed = pool.undisturbed(160);
    (pool, undisturbed)
}

/// Requests of a gateway's clients.
fn ask(gateway: &Server, numbers: std::ops::Range<u64>) -> Vec<Watched> {
    let http = gateway.announced("http").parse().unwrap();
    numbers.map(|n| Watched::start(http, &prompt(n, 100, VOCAB), ANSWER, &json!({}))).collect()
}

/// Answers that the instances have finished, to the last token.
fn finished(pool: &FaultPool) -> f64 {
    let of = |name: &String| metric(&pool.client(name), "lagoon_sequences_total{outcome=\"length\"}");
    pool.names().iter().map(of).sum()
}

/// Sends requests to gateways whose view of the pool stands still, so that some wait at instances that have no place, and waits until
/// one was handed back while others run and wait. Returns each gateway's streams, and the place of one with a request handed back.
fn until_handed_back(pool: &FaultPool, gateways: &[Server], requests: u64) -> (Vec<Vec<Watched>>, usize) {
    let first = |at: u64| at * 100;
    let streams = (0..).zip(gateways).map(|(at, of)| ask(of, first(at)..first(at) + requests)).collect();
    let one = || gateways.iter().position(|gateway| handed_back(gateway) > 0.0);
    wait_until("handed back", || one().is_some());
    assert!(gateways.iter().any(|gateway| waiting(gateway) > 0.0), "none waits at a gateway");
    let runs = |name: &String| number(&pool.status(name), "running") > 0;
    assert!(pool.names().iter().any(runs), "none runs");
    (streams, one().unwrap())
}

/// All answers, each whole and once; nothing waits, and no memory is in use.
fn finish(what: &str, streams: Vec<Watched>, gateways: &[Server], (pool, undisturbed): (&FaultPool, &Undisturbed)) {
    for (n, stream) in streams.into_iter().enumerate() {
        stream.finish(&format!("{what}, request {n}"), undisturbed);
    }
    for gateway in gateways {
        wait_until("an empty queue", || waiting(gateway) == 0.0);
    }
    pool.wait_empty();
}

#[test]
fn requests_queued_bound_and_handed_back_outlive_a_killed_instance() {
    let (mut pool, undisturbed) = pool();
    let gateways = [pool.gateway()];
    pool.pause_gmanager();
    // A request of which the gateway does not know takes the place of one that it binds.
    let direct = pool.watch("i0", &prompt(900, 100, VOCAB), 2 * ANSWER);
    direct.wait_for(1);
    let (streams, _) = until_handed_back(&pool, &gateways, 7);
    pool.resume_gmanager();
    let runs = |name: &&&str| number(&pool.status(name), "running") > 0;
    let killed = *["i1", "i2"].iter().find(runs).expect("one of them runs");
    pool.kill(killed);
    finish("a killed instance", streams.into_iter().flatten().collect(), &gateways, (&pool, &undisturbed));
    direct.finish("the request at its neighbour", &undisturbed);
}

/// Two gateways whose gManager is killed: each goes on with its own view, and what both bind to one place is handed back.
#[test]
fn requests_queued_bound_and_handed_back_outlive_the_gmanager() {
    let (mut pool, undisturbed) = pool();
    let gateways = [pool.gateway(), pool.gateway()];
    pool.pause_gmanager();
    let (streams, _) = until_handed_back(&pool, &gateways, 5);
    pool.kill_gmanager();
    finish("a killed gManager", streams.into_iter().flatten().collect(), &gateways, (&pool, &undisturbed));
    assert_eq!(finished(&pool), 10.0, "each request ran to its end once");
    pool.start_gmanager();
    pool.wait_whole();
    let after = ask(&gateways[0], 300..303);
    finish("a new gManager", after, &gateways, (&pool, &undisturbed));
}

/// A client whose gateway is lost asks another one anew: what the lost one had is cancelled at the instances.
#[test]
fn requests_queued_bound_and_handed_back_outlive_a_killed_gateway() {
    let (pool, undisturbed) = pool();
    let mut gateways = vec![pool.gateway(), pool.gateway()];
    pool.pause_gmanager();
    let (mut streams, at) = until_handed_back(&pool, &gateways, 5);
    pool.resume_gmanager();
    let asked = streams.remove(at);
    // The last token of an answer may have left its instance, and not have arrived: it is killed when none is near its end.
    let is_near_its_end = |stream: &Watched| stream.tokens() > ANSWER as usize / 2 && !stream.is_over();
    wait_until("streams at their beginning", || !asked.iter().any(is_near_its_end));
    gateways.remove(at).kill();
    wait_until("broken connections", || asked.iter().all(Watched::is_over));
    let (whole, lost): (Vec<_>, Vec<_>) =
        (at as u64 * 100..).zip(asked).partition(|(_, stream)| stream.tokens() == ANSWER as usize);
    assert!(lost.len() > 1, "its clients lost nothing");
    let again = lost.iter().flat_map(|(n, _)| ask(&gateways[0], *n..*n + 1));
    let all = streams.into_iter().flatten().chain(whole.into_iter().map(|(_, stream)| stream)).chain(again).collect();
    finish("a killed gateway", all, &gateways, (&pool, &undisturbed));
    assert_eq!(finished(&pool), 10.0, "each request ran to its end once");
}

/// What one gateway has bound the other one sees in the gManager's view; without it each has its own requests alone.
#[test]
fn gateways_share_one_view_and_have_their_own_without_a_gmanager() {
    let (mut pool, undisturbed) = pool();
    let gateways = [pool.gateway(), pool.gateway()];
    let [one, two] = &gateways;
    let first = ask(one, 0..3);
    let rows = |status: &Value| status["instances"].as_array().cloned().unwrap_or_default();
    let runs_one = |row: &&Value| number(row, "requests_running") == 1;
    let all_run = |status: &Value| rows(status).iter().filter(runs_one).count() == NAMES.len();
    two.client().wait_until("/lagoon/status", "a view with all of them", all_run);
    let second = ask(two, 100..102);
    wait_until("a queue at the second gateway", || waiting(two) == 2.0);
    for name in NAMES {
        assert_eq!(number(&pool.status(name), "waiting"), 0, "{name} has a request that it cannot start");
    }
    assert_eq!(handed_back(two), 0.0);
    assert!(!first.iter().any(Watched::is_over), "they still ran");
    // The last view has the first gateway's requests for ever.
    pool.kill_gmanager();
    let all = first.into_iter().chain(second).chain(ask(one, 10..14)).collect();
    finish("two gateways alone", all, &gateways, (&pool, &undisturbed));
    assert_eq!(finished(&pool), 9.0, "each request ran to its end once");
}
