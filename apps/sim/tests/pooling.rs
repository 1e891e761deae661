//! A pool does not lose against no pool: the cluster of the throughput benchmark in simulated time, independent of
//! this machine's speed.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use lagoon_sim::paper::measure::{Job, Measured, System, run_all};
use lagoon_sim::paper::mixed::Mix;
use lagoon_sim::paper::run::Study;
use lagoon_sim::paper::traces::Request;

/// Results of each trace: without a pool, with one.
fn both(mixes: &[Mix], study: Study) -> Vec<[Measured; 2]> {
    let job = |mix: &Mix, system: System| {
        let mut setting = mix.setting(system);
        setting.study = study;
        Job { setting, requests: mix.trace() }
    };
    let jobs: Vec<Job> = mixes.iter().flat_map(|m| [System::Multi, System::Lagoon].map(|s| job(m, s))).collect();
    let mut measured = run_all(&jobs, &|_| ()).into_iter();
    mixes.iter().map(|_| [measured.next().unwrap(), measured.next().unwrap()]).collect()
}

/// Speed-up of the pool: mean over the seeds, and minimum.
fn gain(name: &str, study: Study, seeds: u64) -> (f64, f64) {
    let mixes: Vec<Mix> = (1..=seeds).map(|seed| Mix { seed, ..Mix::default() }).collect();
    let ratio = |pair: &[Measured; 2]| {
        let [off, on] = pair;
        assert_eq!((off.failed, on.failed, on.cut), (0, 0, 0), "everything fits");
        off.simulated_s / on.simulated_s
    };
    let ratios: Vec<f64> = both(&mixes, study).iter().map(ratio).collect();
    let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    println!("{name}: {mean:.3} in the mean, {least:.3} at least: {ratios:.3?}");
    (mean, least)
}

/// One seed proves little: it depends on which instance finishes last. Was 0.95 and 0.85 before admission by age and
/// micro-batches by useful work.
#[test]
fn a_pool_does_not_lose_on_a_trace_that_fits() {
    let (mean, least) = gain("overtaking", Study { overtaking: true, ..Study::default() }, 16);
    assert!(mean > 1.02 && least > 0.93, "{mean:.3}, {least:.3}");
}

/// As on the CPU backend. Was 0.93 and 0.74 before.
#[test]
fn nor_where_peers_wait_for_layers() {
    let (mean, least) = gain("layer borders", Study::default(), 16);
    assert!(mean > 0.98 && least > 0.90, "{mean:.3}, {least:.3}");
}

#[test]
fn what_one_instance_cannot_hold_the_pool_does() {
    let mix = Mix { long: (0.8, 1.6), requests: 80, ..Mix::default() };
    let [off, on] = &both(&[mix], Study::default())[0];
    assert!(off.failed >= 4, "{} of these requests are too long for one instance", off.failed);
    assert_eq!((on.failed, on.cut, on.finished), (0, 0, 80));
}

/// A request that needs both instances, and a stream of short ones that keeps the other instance full for over a
/// minute.
#[test]
fn a_request_that_needs_the_pool_does_not_starve_behind_younger_ones() {
    let mix = Mix { instances: 2, ..Mix::default() };
    let long = Request { arrival_us: 8_000_000, prompt_tokens: 2_800, output_tokens: 40 };
    let short = |n: u64| Request { arrival_us: 2_000_000 + n * 250_000, prompt_tokens: 150, output_tokens: 120 };
    let mut requests: Vec<Request> = (0..280).map(short).chain([long]).collect();
    requests.sort_by_key(|r| r.arrival_us);
    let at = requests.iter().position(|r| r.prompt_tokens == 2_800).unwrap();
    let measured = run_all(&[Job { setting: mix.setting(System::Lagoon), requests }], &|_| ()).remove(0);
    let ended_s = measured.ended_s[at].unwrap();
    println!("the long one ended after {ended_s:.1} s, the last after {:.1} s", measured.simulated_s);
    assert!(measured.simulated_s > 70.0, "the stream lasts");
    assert!(ended_s < 45.0, "{ended_s:.1} s");
    assert_eq!((measured.failed, measured.cut), (0, 0));
}
