//! E2, a drifting mix against static splits of the same hardware: three phases with 0, 3 and 0 % of requests that need
//! more than one instance.

use crate::load::{Answer, Ran, Until, own_prompts, replay};
use crate::systems::{Kind, System};
use crate::{Args, Setup, points, share_points};
use anyhow::{Context, Result};
use lagoon_benches::cluster::Lagoon;
use lagoon_plot::{Panel, Series};
use lagoon_sim::paper::conversation::{self, Scale};
use lagoon_sim::paper::dispatch::{Dispatch, work_us};
use lagoon_sim::paper::goodput::Slo;
use lagoon_sim::paper::hardware::StepShape;
use lagoon_sim::paper::traces::Request;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// Instances' worth of hardware of every system.
const INSTANCES: u32 = 4;
/// Share of long requests by phase, and instances that a long one needs.
const LONG_SHARES: [f64; 3] = [0.0, 0.03, 0.0];
const LONG: (f64, f64) = (1.2, 2.5);
/// Predicted work of the short requests over what the instances can do.
const LOAD: f64 = 0.7;
/// Longest prompt of a short request, in tokens of the trace.
const SHORT_MAX: u32 = 32_000;
/// A long request's first token may take the objective's time and so many times its own prompt's on one instance.
const LONG_FIRST_FACTOR: f64 = 3.0;
/// What parallelism leaves of a pair's and of a pipeline's rates: 0.87 by the simulator's model of LLaMA2-7B on two A100s
/// with NVLink at a batch of 16; a pipeline is assumed to be full for 0.8 of the time. A pipeline passes a sequence's token
/// from stage to stage; here the one process does all of it at four times the rate, which favours it.
const PAIR: f64 = 0.87;
const PIPELINE: f64 = 0.8;

/// The compared systems; the first two are Lagoon's, the third the same instances on their own.
fn systems() -> [System; 6] {
    let alone = |name, processes: &[(u32, f64)]| System {
        name,
        kind: Kind::Alone { processes: processes.to_vec(), dispatch: Dispatch::LeastWork },
    };
    [
        System { name: "pool", kind: Kind::pool(INSTANCES, None) },
        System {
            name: "pool, long prompts computed together",
            kind: Kind::pool(INSTANCES, Some(f64::from(SHORT_MAX))),
        },
        alone("4x1", &[(1, 1.0); 4]),
        alone("two pairs", &[(2, PAIR); 2]),
        alone("a pair and two singles", &[(2, PAIR), (1, 1.0), (1, 1.0)]),
        alone("pipeline of four", &[(4, PIPELINE)]),
    ]
}

/// A request, its phase, and whether it is long.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    request: Request,
    phase: usize,
    is_long: bool,
}

fn draw(setup: &Setup, args: &Args) -> Vec<Drawn> {
    let (timing, kv_tokens) = (setup.sizes.timing(), u64::from(setup.sizes.pace.kv_tokens));
    let wanted = args.requests() / LONG_SHARES.len() * LONG_SHARES.len();
    let mut entries = conversation::synthetic(2 * wanted, args.seed);
    entries.retain(|entry| entry.input_length <= SHORT_MAX);
    entries.truncate(wanted);
    let scale = Scale { prompts: setup.tokens, outputs: setup.time, rate: 1.0 };
    let shorts = conversation::requests(&entries, scale);
    let mean_us = shorts.iter().map(|r| work_us(&timing, kv_tokens, r, 0, true)).sum::<f64>() / shorts.len() as f64;
    let rate = LOAD * f64::from(INSTANCES) * 1e6 / mean_us;
    let mut random = ChaCha8Rng::seed_from_u64(args.seed);
    let mut at_s = 0.0;
    // A small run has one, too.
    let mut owed: f64 = 0.5;
    let mut out = Vec::new();
    for (at, short) in shorts.iter().enumerate() {
        at_s += -(1.0 - random.random::<f64>()).ln() / rate;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
        let arrival_us = (at_s * 1e6) as u64;
        let phase = at * LONG_SHARES.len() / shorts.len();
        let drawn = |request, is_long| Drawn { request, phase, is_long };
        out.push(drawn(Request { arrival_us, ..*short }, false));
        owed += LONG_SHARES[phase] / (1.0 - LONG_SHARES[phase]);
        if owed >= 1.0 {
            owed -= 1.0;
            let share = random.random_range(LONG.0..LONG.1);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
            let prompt_tokens = (share * kv_tokens as f64) as u32 - short.output_tokens;
            out.push(drawn(Request { arrival_us, prompt_tokens, ..*short }, true));
        }
    }
    out
}

/// The objective of a request.
fn objective(setup: &Setup, drawn: &Drawn) -> Slo {
    if !drawn.is_long {
        return setup.slo;
    }
    let timing = setup.sizes.timing();
    let rows = f64::from(drawn.request.prompt_tokens);
    let alone = timing.step(&StepShape { rows, prompt_rows: rows, ..StepShape::default() }).linear_us
        + timing.attention_us(0.0, rows * rows / 2.0);
    Slo { first_token_s: setup.slo.first_token_s + LONG_FIRST_FACTOR * alone / 1e6, ..setup.slo }
}

fn is_met(setup: &Setup, (drawn, answer): (&Drawn, &Answer)) -> bool {
    answer.is_met(&objective(setup, drawn))
}

fn described(setup: &Setup, system: &System, drawn: &[Drawn], ran: &Ran, late: f64) -> Value {
    let all = || drawn.iter().zip(&ran.answers);
    let met = |phase: Option<usize>| {
        all().filter(|(d, _)| phase.is_none_or(|p| p == d.phase)).filter(|both| is_met(setup, *both)).count()
    };
    // The trace's time, not a straggler's: what was met later than it should counts as missed anyway.
    let seconds = drawn.last().map_or(1.0, |d| d.request.arrival_us as f64 / 1e6) * setup.time;
    let longs = all().filter(|(d, _)| d.is_long);
    let by_phase = [0, 1, 2].map(|phase| met(Some(phase)));
    let gaps = all().filter(|(d, _)| !d.is_long).flat_map(|(_, a)| a.gaps_s.iter().map(|s| s * 1e3)).collect();
    json!({
        "system": system.name, "goodput": met(None) as f64 / seconds, "met": met(None),
        "met_by_phase": by_phase, "failures": ran.failures(),
        "long_requests": longs.clone().count(), "long_served": longs.clone().filter(|(_, a)| a.end_s.is_some()).count(),
        "long_met": longs.filter(|both| is_met(setup, *both)).count(),
        "short_tbt_ms_p99": crate::percentile(gaps, 0.99), "seconds": ran.seconds, "devices_late_share": late,
    })
}

fn series(name: &str, points: Vec<(f64, f64)>) -> Series {
    Series { name: name.to_owned(), points }
}

/// Met requests over time, by start.
fn met_over_time(setup: &Setup, drawn: &[Drawn], ran: &Ran) -> Vec<(f64, f64)> {
    let mut sum = 0.0;
    let at = |both: (&Drawn, &Answer)| {
        sum += f64::from(u8::from(is_met(setup, both)));
        (both.1.start_s * setup.time, sum)
    };
    points(drawn.iter().zip(&ran.answers).map(at).collect())
}

/// Goodput of one of Lagoon's systems over each split's, and over the best one's, and what it keeps of the same instances' on their own
/// where no request is long.
fn ratios(runs: &[Value], pool: &System) -> Value {
    let [_, _, singles, splits @ ..] = systems();
    let of = |name: &str, pointer: &str| {
        let run = runs.iter().find(|run| run["system"] == name);
        run.and_then(|run| run.pointer(pointer)).and_then(Value::as_f64).unwrap_or(f64::NAN)
    };
    let goodput = |name| of(name, "/goodput");
    let best = splits.iter().chain([&singles]).map(|s| goodput(s.name)).fold(0.0, f64::max);
    let without = |name| of(name, "/met_by_phase/0") + of(name, "/met_by_phase/2");
    json!({
        "system": pool.name,
        "over": splits.iter().chain([&singles]).map(|s| json!({ "system": s.name, "goodput": goodput(pool.name) / goodput(s.name) })).collect::<Vec<_>>(),
        "over_best": goodput(pool.name) / best, "of_4x1_without_long": without(pool.name) / without(singles.name),
    })
}

/// Runs E2: its result and its plot's panels.
pub(crate) fn run(lagoon: &Lagoon, setup: &Setup, args: &Args) -> Result<(Value, Vec<Panel>)> {
    let drawn = draw(setup, args);
    let requests: Vec<Request> = drawn.iter().map(|d| d.request).collect();
    let (mut runs, mut met, mut gaps) = (Vec::new(), Vec::new(), Vec::new());
    for system in systems() {
        eprintln!("  {}", system.name);
        let started = system.start(lagoon, &setup.sizes)?;
        let ran = replay(&requests, &own_prompts(setup.next_run()), &started.route, Until::End)
            .with_context(|| system.name.to_owned())?;
        met.push(series(system.name, met_over_time(setup, &drawn, &ran)));
        let short = drawn.iter().zip(&ran.answers).filter(|(d, _)| !d.is_long);
        let short = share_points(short.flat_map(|(_, a)| a.gaps_s.iter().map(|s| s * 1e3)).collect());
        gaps.push(series(system.name, points(short)));
        runs.push(described(setup, &system, &drawn, &ran, started.late_share()?));
    }
    let panels = vec![
        crate::panel("within the objective", "s", "requests", met),
        crate::panel("time between tokens of short requests", "ms", "share of tokens", gaps),
    ];
    let offered = requests.len() as f64 / requests.last().map_or(1.0, |r| r.arrival_us as f64 / 1e6) / setup.time;
    let result = json!({
        "experiment": "e2", "requests": requests.len(), "offered_requests_per_s": offered, "seed": args.seed,
        "efficiency": { "pair": PAIR, "pipeline": PIPELINE }, "ratios": systems()[..2].iter().map(|pool| ratios(&runs, pool)).collect::<Vec<_>>(), "runs": runs,
    });
    Ok((result, panels))
}

pub(crate) fn print(result: &Value) {
    let columns = ["goodput", "met", "by phase", "long served", "long met", "failed", "TBT p99 ms", "late"];
    println!("{:<40}{}", "system", columns.map(|c| format!("{c:>15}")).concat());
    for run in result["runs"].as_array().into_iter().flatten() {
        let number = |name: &str| run[name].as_f64().unwrap_or(f64::NAN);
        let (met, served) = (number("met"), format!("{} of {}", run["long_served"], run["long_requests"]));
        println!(
            "{:<40}{:>15.3}{met:>15.0}{:>15}{served:>15}{:>15.0}{:>15.0}{:>15.1}{:>15.3}",
            run["system"].as_str().unwrap_or_default(),
            number("goodput"),
            run["met_by_phase"].to_string(),
            number("long_met"),
            number("failures"),
            number("short_tbt_ms_p99"),
            number("devices_late_share")
        );
    }
    for ratios in result["ratios"].as_array().into_iter().flatten() {
        let (system, number) =
            (ratios["system"].as_str().unwrap_or_default(), |name: &str| ratios[name].as_f64().unwrap_or(f64::NAN));
        for over in ratios["over"].as_array().into_iter().flatten() {
            let other = over["system"].as_str().unwrap_or_default();
            println!("{system} over {other}: {:.2}", over["goodput"].as_f64().unwrap_or(f64::NAN));
        }
        println!(
            "{system} over the best split: {:.2}; of 4x1 in the phases without long requests: {:.3}",
            number("over_best"),
            number("of_4x1_without_long")
        );
    }
}
