//! Long-tail goodput in simulation: a trace of conversations on four instances of LLaMA2-7B on an A100 each, as a pool and on
//! their own (the experiment `e1` of `benches/benches/goodput`, at full scale).
//!
//! Prompts are computed, in chunks of at most 2,048 rows; prefixes are not kept.

use super::cluster::Cluster;
use super::conversation::{Entry, Scale, requests};
use super::device::Prefill;
use super::dispatch::Dispatch;
use super::goodput::{Found, Search, search};
use super::hardware::LLAMA2_7B;
use super::measure::{Job, Measured, run_all};
use super::run::{Setting, Study};
use super::traces::Request;
use std::fmt::Write as _;

const INSTANCES: u32 = 4;
const BLOCK_TOKENS: u32 = 64;
const CHUNK: u32 = 2_048;
/// Chunks of prompts are sized for it, as with `--target-tbt-ms`; the objective is 100 ms a token.
const TARGET_MS: u32 = 90;
/// Prompts longer than this are long, in tokens.
const LONG: u32 = 32_000;
/// Requests per second at which all come within a millisecond.
const AT_ONCE: f64 = 1e6;
/// Requests per second at which searches begin.
const START: f64 = 0.8;

/// The compared systems; the first is what the others are compared with: its goodput is their common rate.
#[must_use]
pub fn systems() -> Vec<(&'static str, Setting)> {
    let cluster = Cluster::multi(LLAMA2_7B, INSTANCES, 1);
    let setting = |pooled, dispatch, overtaking| Setting {
        dispatch,
        prefill: Prefill::Computed,
        step_rows: CHUNK,
        target_step_ms: Some(TARGET_MS),
        study: Study { overtaking, ..Study::default() },
        ..Setting::new(cluster, pooled, BLOCK_TOKENS)
    };
    let together = |overtaking| Setting { prefill_instances: 0, ..setting(true, Dispatch::Late, overtaking) };
    vec![
        ("alone, least predicted work", setting(false, Dispatch::LeastWork, false)),
        ("alone, most free memory less the last second's", setting(false, Dispatch::FreeLessRecent, false)),
        ("alone, most free memory", setting(false, Dispatch::FreeMemory, false)),
        ("alone, bound late", setting(false, Dispatch::Late, false)),
        ("pool, most free memory less the last second's", setting(true, Dispatch::FreeLessRecent, false)),
        ("pool, least predicted work", setting(true, Dispatch::LeastWork, false)),
        ("pool, bound late", setting(true, Dispatch::Late, false)),
        ("pool, bound late, long prompts together", together(false)),
        ("pool, bound late, peers' queries wait for no layer", setting(true, Dispatch::Late, true)),
        ("pool, bound late, long prompts together, peers' queries wait for no layer", together(true)),
    ]
}

/// A system's results on one part of the trace.
#[derive(Clone, Debug)]
pub struct Row {
    pub part: usize,
    pub system: &'static str,
    pub found: Found,
    /// All requests at the common rate.
    pub common: Measured,
    /// Median time to the first token of the long prompts there; infinite if most got none.
    pub long_first_s: f64,
    /// Finished requests per second, over the time until all have ended, if all come at once. A gateway refuses those that wait too long.
    pub at_once: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Measures systems on each part; `rate` is the common rate, and all that is measured, instead of the goodput of the first.
#[must_use]
pub fn run(
    parts: &[&[Entry]],
    systems: &[(&'static str, Setting)],
    rate: Option<f64>,
    done: &(dyn Fn(usize, usize) + Sync),
) -> Vec<Row> {
    let at = |part: usize| move |rate| requests(parts[part], Scale { prompts: 1.0, outputs: 1.0, rate });
    let at: Vec<_> = (0..parts.len()).map(at).collect();
    let all = || (0..parts.len()).flat_map(|part| systems.iter().map(move |(name, setting)| (part, *name, *setting)));
    let searches: Vec<Search<'_>> =
        all().map(|(part, _, setting)| Search { setting, requests: &at[part], start: START }).collect();
    let found = match rate {
        Some(rate) => vec![Found { rate, ..Found::default() }; searches.len()],
        None => search(&searches, &|n| done(n, 2 * searches.len())),
    };
    let common = |part: usize| found[part * systems.len()].rate;
    let rates = |part: usize| [common(part), AT_ONCE];
    let job =
        |(part, _, setting): (usize, _, Setting)| rates(part).map(|rate| Job { setting, requests: at[part](rate) });
    let jobs: Vec<Job> = all().flat_map(job).collect();
    let measured = run_all(&jobs, &|n| done(searches.len() + n / 2, 2 * searches.len()));
    let row = |(at, ((part, system, _), found)): (usize, ((usize, &'static str, Setting), Found))| {
        let [(job, common), (_, all)] = [2 * at, 2 * at + 1].map(|at| (&jobs[at], measured[at].clone()));
        let at_once = all.finished as f64 / all.makespan_s;
        let long = |(request, _): &(&Request, _)| request.prompt_tokens > LONG;
        let first = |(_, first): (_, &Option<f64>)| first.unwrap_or(f64::INFINITY);
        let long_first_s = median(job.requests.iter().zip(&common.first_tokens_s).filter(long).map(first).collect());
        Row { part, system, found, common, long_first_s, at_once }
    };
    all().zip(found).enumerate().map(row).collect()
}

/// The rows as a Markdown table; `parts` names the parts.
#[must_use]
pub fn table(rows: &[Row], parts: &[String]) -> String {
    let mut text = String::from(
        "| part | system | goodput, requests/s | over the first | all at once, requests/s | met at its rate | first token late, others late | \
         long prompts' first token there, s | together | failed |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for row in rows {
        let base = rows.iter().find(|other| other.part == row.part).map_or(f64::NAN, |other| other.found.rate);
        let _ = writeln!(
            text,
            "| {} | {} | {:.2} | {:.2} | {:.2} | {:.1} % | {:.1} %, {:.1} % | {:.1} | {} | {} |",
            parts[row.part],
            row.system,
            row.found.rate,
            row.found.rate / base,
            row.at_once,
            100.0 * row.common.met,
            100.0 * row.common.late[0],
            100.0 * row.common.late[1],
            row.long_first_s,
            row.common.joint[1],
            row.common.failed + row.common.cut
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::conversation::synthetic;
    use crate::paper::measure::run_one;

    /// A lone prompt, as processes on modelled devices compute it (`cargo bench -p lagoon-benches --bench joint`): 0.52 of one
    /// instance's time with two, 0.28 with four.
    #[test]
    fn a_lone_prompt_is_computed_together_in_its_share_of_the_time() {
        let first_s = |instances, prefill_instances| {
            let cluster = Cluster::multi(LLAMA2_7B, instances, 1);
            let setting = Setting {
                dispatch: Dispatch::Late,
                prefill: Prefill::Computed,
                step_rows: CHUNK,
                prefill_instances,
                ..Setting::new(cluster, true, BLOCK_TOKENS)
            };
            let request = Request { arrival_us: 0, prompt_tokens: 100_000, output_tokens: 2 };
            let measured = run_one(&Job { setting, requests: vec![request] });
            assert_eq!(measured.joint[1], u64::from(prefill_instances != 1), "{measured:?}");
            measured.first_tokens_s[0].unwrap()
        };
        let alone = first_s(4, 1);
        let shares = [2, 4].map(|n| first_s(n, 0) / alone);
        assert!((0.5..0.58).contains(&shares[0]) && (0.25..0.35).contains(&shares[1]), "{shares:?} of {alone} s");
    }

    /// Eight answers beside a prompt of 90,000 tokens on one instance: within 100 ms a token where chunks are sized for 90.
    #[test]
    fn a_very_long_prompt_keeps_others_within_the_target() {
        let late = |target_step_ms| {
            let setting = Setting {
                prefill: Prefill::Computed,
                step_rows: CHUNK,
                target_step_ms,
                ..Setting::new(Cluster::multi(LLAMA2_7B, 1, 1), false, BLOCK_TOKENS)
            };
            let long = Request { arrival_us: 200_000, prompt_tokens: 90_000, output_tokens: 2 };
            let short = Request { arrival_us: 0, prompt_tokens: 128, output_tokens: 160 };
            let requests = [vec![short; 8], vec![long]].concat();
            let measured = run_one(&Job { setting, requests });
            assert_eq!(measured.finished, 9, "{measured:?}");
            9.0 * measured.late[1]
        };
        let (with, without) = (late(Some(TARGET_MS)), late(None));
        assert!(with < 0.5 && without > 7.5, "{with} and {without} answers were late");
    }

    #[test]
    fn every_system_gets_the_same_requests_and_the_pool_refuses_none() {
        let mut entries = synthetic(40, 3);
        // No instance holds it.
        entries[20].input_length = 124_000;
        let rows = run(&[&entries], &systems(), None, &|_, _| ());
        assert_eq!(rows.len(), systems().len());
        for row in &rows {
            let alone = row.system.starts_with("alone");
            assert_eq!(row.common.failed, usize::from(alone), "{}: {:?}", row.system, row.common);
            assert!(row.found.rate > 0.1, "{}: {}", row.system, row.found.rate);
            assert!(row.at_once > 0.1, "{}: {}", row.system, row.at_once);
        }
        let text = table(&rows, &["all".to_owned()]);
        assert_eq!(text.lines().count(), 2 + rows.len());
    }
}
