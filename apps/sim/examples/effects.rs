//! Prints a line of hashes of effects for each seed of the simulator, to compare two builds.
//!
//! `effects chaos A..B`, `effects roles A..B`, `effects paper`; `quiet` as last argument skips hashing, for timing.

use lagoon_sim::chaos::{Limits, Scenario, run};
use lagoon_sim::effects::{Hashes, record};
use lagoon_sim::paper::cluster::{Cluster, SETUPS, Setup};
use lagoon_sim::paper::hardware::LLAMA2_7B;
use lagoon_sim::paper::measure::{Job, System, run_one};
use lagoon_sim::paper::run::{Setting, Study};
use lagoon_sim::paper::traces::{Output, TABLE_1, table_2};
use std::ops::Range;

#[allow(clippy::print_stdout, reason = "a command's answer")]
fn line(name: &str, quiet: bool, run: impl FnOnce() -> bool) {
    if quiet {
        run();
        return;
    }
    let (well, Hashes { events, effects, requests }) = record(run);
    println!("{name} {events} {effects:016x} {requests:016x}{}", if well { "" } else { " failed" });
}

fn chaos(seeds: Range<u64>, roles: Option<bool>, quiet: bool) {
    for seed in seeds {
        let limits = Limits {
            nodes: 0,
            requests: 0,
            seconds: 0,
            steps: 0,
            roles,
            aim: None,
            faults: true,
            cache_tiers: false,
            hosts: false,
            joint: false,
        };
        line(&format!("seed {seed}"), quiet, || run(&Scenario::draw(seed, limits)).is_ok());
    }
}

fn papers(quiet: bool) {
    let mut jobs: Vec<(String, Job)> = Vec::new();
    for (trace, workload) in TABLE_1.iter().enumerate().take(3) {
        let setup = Setup { model: LLAMA2_7B, gpus: 4, tp: 1, trace, longest: workload.longest() };
        for (system, output) in [
            (System::Lagoon, Output::AtMost(256)),
            (System::Multi, Output::AtMost(256)),
            (System::Lagoon, Output::TwoThirds),
        ] {
            let job = Job { setting: system.setting(&setup, 32), requests: workload.requests(150, output, 1e6, 1) };
            jobs.push((format!("paper trace {trace} {system:?} {output:?}"), job));
        }
    }
    for setup in &SETUPS[..4] {
        let setting = System::Lagoon.setting(setup, 256);
        let requests = TABLE_1[setup.trace].requests(20, Output::AtMost(128), 1e6, 1);
        jobs.push((format!("paper long {}", setup.multi().name()), Job { setting, requests }));
    }
    let cluster = Cluster::multi(SETUPS[3].model, SETUPS[3].gpus, SETUPS[3].tp);
    for (dgfm, free_network) in [(true, false), (false, false), (true, true)] {
        let study = Study { free_network, ..Study::default() };
        let setting = Setting { dgfm, study, ..Setting::new(cluster, true, 256) };
        let requests = table_2()[9].requests(30, Output::AtMost(256), 2.0, 1);
        jobs.push((format!("paper dgfm {dgfm} {free_network}"), Job { setting, requests }));
    }
    for (name, job) in jobs {
        line(&name, quiet, || run_one(&job).failed == 0);
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let quiet = args.last().is_some_and(|arg| arg == "quiet");
    let seeds = || {
        let (a, b) = args[1].split_once("..").expect("seeds as A..B");
        a.parse().expect("a number")..b.parse().expect("a number")
    };
    match args.first().map(String::as_str) {
        Some("chaos") => chaos(seeds(), None, quiet),
        Some("roles") => chaos(seeds(), Some(true), quiet),
        Some("paper") => papers(quiet),
        _ => panic!("chaos A..B, roles A..B or paper"),
    }
}
