//! E1, long-tail goodput: a production trace on four instances, with a pool, with one that computes long prompts together, and
//! without.

use crate::load::{Ran, Until, own_prompts, replay};
use crate::systems::{Kind, Started, System};
use crate::{Args, Setup, points, share_points};
use anyhow::{Context, Result, bail, ensure};
use lagoon_benches::cluster::Lagoon;
use lagoon_benches::measure::median;
use lagoon_plot::{Panel, Series};
use lagoon_sim::paper::conversation::{self, Entry, Scale, Statistics};
use lagoon_sim::paper::dispatch::Dispatch;
use lagoon_sim::paper::goodput::{SHARE, Slo, highest};
use lagoon_sim::paper::traces::Request;
use serde_json::{Value, json};

/// Prompts longer than this are long, in tokens of the trace.
const LONG: f64 = 32_000.0;
/// Requests per second, in the trace's time, at which a search begins.
const START: f64 = 0.8;

/// The compared systems: the pool, one that computes long prompts together, what both are compared with, and another baseline.
fn systems() -> [System; 4] {
    let alone = |name, dispatch| System { name, kind: Kind::Alone { processes: vec![(1, 1.0); 4], dispatch } };
    [
        System { name: "pool", kind: Kind::pool(4, None) },
        System { name: "pool, long prompts computed together", kind: Kind::pool(4, Some(LONG)) },
        alone("alone, least predicted work", Dispatch::LeastWork),
        alone("alone, most free memory", Dispatch::FreeLessRecent),
    ]
}

/// The part of the trace that an offset begins.
fn part(entries: &[Entry], offset: usize, requests: usize) -> Result<&[Entry]> {
    entries.get(offset..offset + requests).with_context(|| {
        format!("the trace has {} requests\nhint: no {requests} from number {offset} on", entries.len())
    })
}

/// A search and its runs.
struct Searched {
    goodput: Option<f64>,
    points: Vec<(f64, Ran)>,
}

struct Part<'a> {
    setup: &'a Setup,
    args: &'a Args,
    entries: &'a [Entry],
    offset: usize,
}

impl Part<'_> {
    /// The requests at a rate in the trace's time.
    fn requests(&self, rate: f64) -> Vec<Request> {
        let Setup { tokens, time, .. } = *self.setup;
        conversation::requests(self.entries, Scale { prompts: tokens, outputs: time, rate: rate * time })
    }

    fn run(&self, started: &Started, rate: f64, until: Until) -> Result<Ran> {
        replay(&self.requests(rate), &own_prompts(self.setup.next_run()), &started.route, until)
    }

    fn search(&self, started: &Started) -> Result<Searched> {
        let slo = self.setup.slo;
        let mut points = Vec::new();
        let goodput = highest(START, self.args.precision(), |rate| -> Result<bool> {
            let ran = self.run(started, rate, Until::Missed(slo))?;
            let good = !ran.is_cut && ran.met(&slo) >= SHARE;
            eprintln!(
                "    {rate:.3} requests/s: {:.1} % met{}",
                100.0 * ran.met(&slo),
                if ran.is_cut { ", cut" } else { "" }
            );
            points.push((rate, ran));
            Ok(good)
        })?;
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(Searched { goodput, points })
    }

    /// First tokens of long prompts in milliseconds of the trace's time; infinite where none came.
    fn long_first_ms(&self, ran: &Ran) -> Vec<f64> {
        let long = |(entry, _): &(&Entry, _)| f64::from(entry.input_length) > LONG;
        let first = |(_, answer): (_, &crate::load::Answer)| answer.first_s.unwrap_or(f64::INFINITY);
        self.entries.iter().zip(&ran.answers).filter(long).map(first).map(|s| s * 1e3 * self.setup.time).collect()
    }
}

/// What a system's processes counted in all of its runs.
struct Counted {
    late_share: f64,
    /// Prompts computed by several instances, and those for which none could help.
    joint_prompts: [f64; 2],
}

fn described(part: &Part<'_>, system: &System, searched: &Searched, common: &Ran, counted: &Counted) -> Value {
    let slo = part.setup.slo;
    let long_first = |ran: &Ran| if ran.is_cut { None } else { finite(median(part.long_first_ms(ran))) };
    let point = |(rate, ran): &(f64, Ran)| json!({ "rate": rate, "met": ran.met(&slo), "cut": ran.is_cut, "seconds": ran.seconds, "failures": ran.failures(), "long_first_ms_median": long_first(ran) });
    let gaps: Vec<f64> = common.answers.iter().flat_map(|a| a.gaps_s.iter().map(|s| s * 1e3)).collect();
    let errors: std::collections::BTreeSet<&str> =
        common.answers.iter().filter_map(|a| a.error.as_deref()).map(|e| e.split(':').next().unwrap_or(e)).collect();
    json!({
        "offset": part.offset, "system": system.name, "goodput": searched.goodput,
        "points": searched.points.iter().map(point).collect::<Vec<_>>(), "devices_late_share": counted.late_share,
        "joint_prompts": counted.joint_prompts[0], "joint_prompts_alone": counted.joint_prompts[1],
        "common": {
            "met": common.met(&slo), "failures": common.failures(), "errors": errors,
            "long_prompts": part.long_first_ms(common).len(),
            "long_first_ms_median": finite(median(part.long_first_ms(common))),
            "tbt_ms_p99": finite(crate::percentile(gaps, 0.99)),
        },
    })
}

/// JSON has no infinity: null.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

/// The points of a system's line: from its search, or from its run at the common rate.
type Points<'a> = dyn Fn(&Searched, &Ran) -> Vec<(f64, f64)> + 'a;

/// One offset: every system's search, and its run at the goodput of the one that Lagoon is compared with.
fn offset(lagoon: &Lagoon, part: &Part<'_>, panels: &mut Vec<Panel>) -> Result<Vec<Value>> {
    let mut searches = Vec::new();
    let mut common_rate = None;
    // What the pool is compared with comes first: its goodput is the rate at which all are compared.
    let [pool, joint, least, free] = systems();
    let chosen = &part.args.systems;
    let names = systems().map(|system| system.name);
    if let Some(unknown) = chosen.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("e1 has no system {unknown:?}\nhint: one of {names:?}, with `;` between several");
    }
    let is_chosen = |system: &System| chosen.is_empty() || chosen.iter().any(|name| name == system.name);
    for system in std::iter::once(least).chain([free, pool, joint].into_iter().filter(is_chosen)) {
        eprintln!("  {} from request {}", system.name, part.offset);
        let started = system.start(lagoon, &part.setup.sizes)?;
        let searched = part.search(&started).with_context(|| system.name.to_owned())?;
        let rate = *common_rate.get_or_insert(searched.goodput.unwrap_or(START));
        let before = searched.points.iter().position(|(at, ran)| *at == rate && !ran.is_cut);
        let common = match before {
            Some(at) => searched.points[at].1.clone(),
            None => part.run(&started, rate, Until::End)?,
        };
        let counted = Counted { late_share: started.late_share()?, joint_prompts: started.joint_prompts()? };
        searches.push((system, searched, common, counted));
    }
    let title = |what: &str| format!("{what}, from request {}", part.offset);
    let series = |of: &Points<'_>| -> Vec<Series> {
        let one = |(system, searched, common, _): &(System, Searched, Ran, Counted)| Series {
            name: system.name.to_owned(),
            points: of(searched, common),
        };
        searches.iter().map(one).collect()
    };
    let slo = part.setup.slo;
    panels.push(crate::panel(
        &title("within the objective"),
        "requests/s",
        "share of requests",
        series(&|searched, _| {
            searched.points.iter().filter(|(_, ran)| !ran.is_cut).map(|(rate, ran)| (*rate, ran.met(&slo))).collect()
        }),
    ));
    panels.push(crate::panel(
        &title("first token of long prompts"),
        "ms",
        "share of them",
        series(&|_, common| share_points(part.long_first_ms(common))),
    ));
    panels.push(crate::panel(
        &title("time between tokens"),
        "ms",
        "share of tokens",
        series(&|_, common| {
            points(share_points(common.answers.iter().flat_map(|a| a.gaps_s.iter().map(|s| s * 1e3)).collect()))
        }),
    ));
    Ok(searches
        .iter()
        .map(|(system, searched, common, counted)| described(part, system, searched, common, counted))
        .collect())
}

/// The trace, where it comes from, and its offsets.
fn trace(args: &Args) -> Result<(Vec<Entry>, String, Vec<usize>)> {
    let offsets = if args.quick { &args.offsets[..1] } else { &args.offsets[..] };
    match &args.trace {
        Some(path) => Ok((
            conversation::read(path)?,
            path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            offsets.to_vec(),
        )),
        None => {
            let most = offsets.iter().max().copied().unwrap_or(0) + args.requests();
            Ok((conversation::synthetic(most, args.seed), format!("synthetic, seed {}", args.seed), offsets.to_vec()))
        }
    }
}

/// Geometric mean.
fn mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp()
}

/// The pools' goodput over the others', and their median first token of long prompts under theirs.
fn ratios(runs: &[Value]) -> Vec<Value> {
    let [pool, joint, alone @ ..] = systems();
    let of = |name: &str, pointer: &str| -> Vec<f64> {
        let runs = runs.iter().filter(|run| run["system"] == name);
        runs.map(|run| run.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN)).collect()
    };
    let ratio = |(system, over): (&System, &System)| {
        let each = |pointer: &str| -> Vec<f64> {
            of(system.name, pointer).iter().zip(of(over.name, pointer)).map(|(a, b)| a / b).collect()
        };
        let goodput = each("/goodput");
        let first = each("/common/long_first_ms_median");
        json!({ "of": system.name, "over": over.name, "goodput": goodput, "goodput_mean": finite(mean(&goodput)),
            "long_first": first, "long_first_mean": finite(mean(&first)) })
    };
    let over_alone = |system| alone.iter().map(move |over| (system, over));
    let has_run = |(system, over): &(&System, &System)| {
        [system, over].iter().all(|s| runs.iter().any(|run| run["system"] == s.name))
    };
    over_alone(&pool).chain(over_alone(&joint)).filter(has_run).map(ratio).collect()
}

/// Runs E1: its result and its plot's panels.
pub(crate) fn run(lagoon: &Lagoon, setup: &Setup, args: &Args) -> Result<(Value, Vec<Panel>)> {
    let (entries, name, offsets) = trace(args)?;
    ensure!(!offsets.is_empty(), "no offsets");
    let (mut runs, mut panels) = (Vec::new(), Vec::new());
    for at in offsets {
        let entries = part(&entries, at, args.requests())?;
        let part = Part { setup, args, entries, offset: at };
        runs.extend(offset(lagoon, &part, &mut panels)?);
    }
    let Slo { first_token_s, token_s } = setup.slo;
    let result = json!({
        "experiment": "e1", "trace": name, "statistics": Statistics::of(&entries), "requests": args.requests(),
        "slo": { "first_token_s": first_token_s, "token_s": token_s }, "ratios": ratios(&runs), "runs": runs,
    });
    Ok((result, panels))
}

pub(crate) fn print(result: &Value) {
    let columns = ["offset", "goodput", "met", "failed", "long first ms", "TBT p99 ms", "late"];
    println!("{:<40}{}", "system", columns.map(|c| format!("{c:>14}")).concat());
    for run in result["runs"].as_array().into_iter().flatten() {
        let number = |pointer: &str| run.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN);
        let values = ["/goodput", "/common/met"].map(|p| format!("{:>14.3}", number(p))).concat();
        let rest =
            ["/common/long_first_ms_median", "/common/tbt_ms_p99"].map(|p| format!("{:>14.1}", number(p))).concat();
        let (offset, failed, late) = (number("/offset"), number("/common/failures"), number("/devices_late_share"));
        println!(
            "{:<40}{offset:>14.0}{values}{failed:>14.0}{rest}{late:>14.3}",
            run["system"].as_str().unwrap_or_default()
        );
    }
    for ratio in result["ratios"].as_array().into_iter().flatten() {
        let number = |name: &str| ratio[name].as_f64().unwrap_or(f64::NAN);
        println!(
            "{} over {}: goodput {:.2} {}, median first token of long prompts {:.2} {}",
            ratio["of"].as_str().unwrap_or_default(),
            ratio["over"].as_str().unwrap_or_default(),
            number("goodput_mean"),
            ratio["goodput"],
            number("long_first_mean"),
            ratio["long_first"]
        );
    }
}
