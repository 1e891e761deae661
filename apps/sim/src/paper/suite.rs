//! All figures: runs, sizes, and output files.

use super::cluster::{Cluster, NODE_GPUS, SETUPS, Setup};
use super::hardware::LLAMA2_7B;
use super::measure::System;
use super::readings::Readings;
use super::run::{Setting, Study};
use super::serving::{Compared, Comparison};
use super::traces::{Output, TABLE_1, Workload, table_2};
use super::{context, dgfm, migration, model, readings, report, serving};
use lagoon_cluster::perf::ModelConfig;
use lagoon_plot::{Panel, Series};
use std::path::Path;
use std::time::Instant;

/// Most generated tokens of a long context.
const LONG_OUTPUT: u32 = 256;
/// Most generated tokens of a request of the S traces, if outputs are bounded.
const SHORT_OUTPUT: u32 = 512;
/// A rate above any system's maximum, in requests per second.
const FLOOD: f64 = 1e6;

/// Numbers of requests and points to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    pub seed: u64,
    /// Requests of an S trace for four instances, with bounded outputs and with outputs of two thirds of the context.
    pub short: usize,
    pub grown: usize,
    /// Number of leading panels that are run with grown outputs.
    pub grown_panels: usize,
    /// Requests of an L trace, and of a dataset of v1 Table 2.
    pub long: usize,
    pub dataset: usize,
    /// Rates of a curve, as shares of the best system's maximum.
    pub shares: &'static [f64],
    /// Most requests of one bar of the context figure.
    pub bar: usize,
    /// Requests of the run over time.
    pub over_time: usize,
    /// Seeds of searches for goodput on panels of v2 Figure 10 (a).
    pub goodput_seeds: &'static [u64],
    /// Factors on the requests of traces 0 to 2 there.
    pub goodput_factors: [usize; 3],
}

impl Size {
    /// The sizes of the published figures.
    #[must_use]
    pub const fn full(seed: u64) -> Self {
        let shares = &serving::SHARES;
        Self {
            seed,
            short: 4_000,
            grown: 1_600,
            grown_panels: 6,
            long: 100,
            dataset: 400,
            shares,
            bar: 4_000,
            over_time: 400,
            goodput_seeds: &[1, 2, 3],
            goodput_factors: [1, 3, 6],
        }
    }

    /// Fewer requests and rates: minutes on two cores.
    #[must_use]
    pub const fn quick(seed: u64) -> Self {
        let shares = &[0.4, 0.8, 1.1];
        Self {
            seed,
            short: 1_500,
            grown: 1_000,
            grown_panels: 1,
            long: 48,
            dataset: 120,
            shares,
            bar: 600,
            over_time: 120,
            goodput_seeds: &[1, 2, 3],
            goodput_factors: [1, 3, 6],
        }
    }

    /// A size for tests, whose figures mean little.
    #[must_use]
    pub const fn tiny(seed: u64) -> Self {
        Self {
            seed,
            short: 60,
            grown: 0,
            grown_panels: 0,
            long: 5,
            dataset: 6,
            shares: &[0.8],
            bar: 4,
            over_time: 8,
            goodput_seeds: &[1],
            goodput_factors: [1; 3],
        }
    }
}

/// All results.
#[derive(Clone, Debug)]
pub struct Results {
    pub size: Size,
    pub seconds: f64,
    pub bars: Vec<context::Bar>,
    /// v2 Figure 10 (a), with bounded outputs (curves) and with grown ones (maxima).
    pub against_multi: Vec<Compared>,
    pub against_multi_grown: Vec<Compared>,
    /// v2 Figure 10 (b).
    pub against_single: Vec<Compared>,
    /// v1 Figure 8: maxima.
    pub datasets: Vec<Compared>,
    /// Cost of parts of the engine: maxima of a trace of either kind.
    pub studies: Vec<(&'static str, Vec<Compared>)>,
    pub migration: Vec<migration::Case>,
    pub figure_7: [Vec<model::CurvePoint>; 2],
    pub dgfm: dgfm::OverTime,
}

/// Both systems under both readings of dispatch.
const AGAINST_MULTI: [System; 4] = [System::Lagoon, System::Multi, System::LagoonFreeMemory, System::MultiFreeMemory];

fn against_multi(output: Output, requests: usize) -> Vec<Comparison> {
    let panels = [4_u32, 8].into_iter().flat_map(|gpus| (0..3).map(move |trace| (gpus, trace)));
    let comparison = |(gpus, trace): (u32, usize)| {
        let setup = Setup { model: LLAMA2_7B, gpus, tp: 1, trace, longest: TABLE_1[trace].longest() };
        Comparison {
            figure: "v2 10a",
            name: format!("trace {trace}, {}", setup.multi().name()),
            workload: TABLE_1[trace],
            systems: AGAINST_MULTI.map(|s| (s, s.setting(&setup, 32))).to_vec(),
            requests: requests * gpus as usize / 4,
            output,
            flood: FLOOD,
        }
    };
    panels.map(comparison).collect()
}

fn singles(setup: &Setup) -> Vec<(System, Setting)> {
    let block = context::block_tokens(setup);
    let mut systems = vec![System::Lagoon];
    if setup.gpus > NODE_GPUS {
        systems.push(System::LagoonOnceANode);
    }
    systems.push(System::Single);
    if Cluster::single(setup.model, setup.gpus, true).parallel.pp > 1 {
        systems.push(System::SingleUnpipelined);
    }
    systems.into_iter().map(|s| (s, s.setting(setup, block))).collect()
}

fn against_single(size: &Size) -> Vec<Comparison> {
    let comparison = |setup: &Setup| Comparison {
        figure: "v2 10b",
        name: format!("trace {}, {}", setup.trace, setup.multi().name()),
        workload: TABLE_1[setup.trace],
        systems: singles(setup),
        requests: size.long,
        output: Output::AtMost(LONG_OUTPUT),
        flood: FLOOD,
    };
    SETUPS.iter().map(comparison).collect()
}

fn datasets(size: &Size) -> Vec<Comparison> {
    let comparison = |(at, workload): (usize, Workload)| {
        let setup = SETUPS[at % SETUPS.len()];
        Comparison {
            figure: "v1 8",
            name: format!("dataset {}, {}", at + 1, setup.multi().name()),
            workload,
            systems: singles(&setup),
            requests: size.dataset,
            output: Output::AtMost(LONG_OUTPUT),
            flood: FLOOD,
        }
    };
    table_2().into_iter().enumerate().map(comparison).collect()
}

/// The panels for studies: one of either figure.
fn studied(size: &Size) -> Vec<Comparison> {
    let lagoon = |c: &Comparison| Comparison {
        systems: c.systems.iter().copied().filter(|(s, _)| *s == System::Lagoon).collect(),
        ..c.clone()
    };
    let multi = against_multi(Output::AtMost(SHORT_OUTPUT), size.short);
    let single = against_single(size);
    [&multi[3], &single[2], &single[3]].map(lagoon).to_vec()
}

const fn study(free_network: bool, one_batch: bool, overtaking: bool) -> Study {
    Study { free_network, one_batch, overtaking, once_a_node: false }
}

/// The studied departures from the modelled system.
pub const STUDIES: [(&str, Study); 4] = [
    ("no departure", study(false, false, false)),
    ("the two micro-batches read weights once", study(false, true, false)),
    ("peers' queries wait for no layer", study(false, false, true)),
    ("both, and a network without cost", study(true, true, true)),
];

/// Runs everything but the readings of dispatch ([`run_readings`]), which take hours. `say` reports progress.
#[must_use]
pub fn run(size: Size, say: &(dyn Fn(&str, usize, usize) + Sync)) -> Results {
    let begun = Instant::now();
    let seed = size.seed;
    let compare = |what: &str, comparisons: &[Comparison], shares: &[f64]| {
        serving::compare(comparisons, shares, seed, &|at, of| say(what, at + 1, of))
    };
    let bars = context::bars(size.bar, &|at, of| say("context lengths", at + 1, of));
    let bounded = against_multi(Output::AtMost(SHORT_OUTPUT), size.short);
    let mut grown = against_multi(Output::TwoThirds, size.grown);
    grown.truncate(size.grown_panels);
    let study = |(name, study): &(&'static str, Study)| {
        let with = |c: Comparison| Comparison {
            systems: c.systems.iter().map(|(s, setting)| (*s, Setting { study: *study, ..*setting })).collect(),
            ..c
        };
        let comparisons: Vec<Comparison> = studied(&size).into_iter().map(with).collect();
        (*name, compare("studies", &comparisons, &[]))
    };
    let curve = |config| model::curve(&model::figure_7(config), 5).unwrap_or_default();
    Results {
        size,
        against_multi: compare("against vLLM-multi", &bounded, size.shares),
        against_multi_grown: compare("against vLLM-multi, generated contexts", &grown, &[]),
        against_single: compare("against vLLM-single", &against_single(&size), size.shares),
        datasets: compare("datasets of v1", &datasets(&size), &[0.9]),
        studies: STUDIES.iter().map(study).collect(),
        migration: migration::cases(),
        figure_7: [curve(ModelConfig::paper()), curve(ModelConfig::default())],
        dgfm: dgfm::over_time(size.over_time, 1.0, seed),
        bars,
        seconds: begun.elapsed().as_secs_f64(),
    }
}

/// Runs only the readings of dispatch of the panels of v2 Figure 10 (a) whose name contains `wanted`.
#[must_use]
pub fn run_readings(size: Size, wanted: &str, say: &(dyn Fn(&str, usize, usize) + Sync)) -> Vec<Readings> {
    let mut panels = against_multi(Output::AtMost(SHORT_OUTPUT), size.short);
    // Traces 1 and 2 are served several times as fast: as many requests would be over before a queue has formed.
    for (at, panel) in panels.iter_mut().enumerate() {
        panel.requests *= size.goodput_factors[at % size.goodput_factors.len()];
    }
    panels.retain(|c| c.name.contains(wanted));
    readings::readings(&panels, size.goodput_seeds, &|at, of| say("goodput against vLLM-multi", at + 1, of))
}

/// Runs only the panels whose figure and name contain `wanted` (`v2 10a: trace 0, LLaMA2-7B, 8xtp1`), with the size's
/// rates.
#[must_use]
pub fn run_only(size: Size, wanted: &str, say: &(dyn Fn(&str, usize, usize) + Sync)) -> Vec<Compared> {
    let mut all = against_multi(Output::AtMost(SHORT_OUTPUT), size.short);
    let grown = against_multi(Output::TwoThirds, size.grown).into_iter();
    all.extend(grown.map(|c| Comparison { name: format!("{}, generated", c.name), ..c }));
    all.extend(against_single(&size));
    all.extend(datasets(&size));
    all.retain(|c| format!("{}: {}", c.figure, c.name).contains(wanted));
    serving::compare(&all, size.shares, size.seed, &|at, of| say("chosen panels", at + 1, of))
}

/// Writes the CSVs, the plots and the tables into a directory.
///
/// # Errors
/// Those of the file system.
pub fn write(results: &Results, out: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(out)?;
    let put = |name: &str, text: String| std::fs::write(out.join(name), text);
    let figure = |title: &str, panels: &[Panel], columns| {
        lagoon_plot::figure(title, panels, columns).map_err(std::io::Error::other)
    };
    put("contexts.csv", context::to_csv(&results.bars))?;
    put("contexts.svg", figure("Throughput by context length (v2 Figure 9)", &context_panels(results), 3)?)?;
    let panels = |all: &[Compared]| all.iter().map(serving::panel).collect::<Vec<Panel>>();
    let against_multi: Vec<Compared> =
        results.against_multi.iter().chain(&results.against_multi_grown).cloned().collect();
    put("against-multi.csv", serving::to_csv(&against_multi))?;
    put("against-multi.svg", figure("Lagoon and vLLM-multi (v2 Figure 10a)", &panels(&results.against_multi), 3)?)?;
    put("against-single.csv", serving::to_csv(&results.against_single))?;
    put("against-single.svg", figure("Lagoon and vLLM-single (v2 Figure 10b)", &panels(&results.against_single), 3)?)?;
    put("datasets.csv", serving::to_csv(&results.datasets))?;
    put("migration.csv", migration::to_csv(&results.migration))?;
    put("debtor-creditor.csv", report::figure_7_csv(results))?;
    put("debtor-creditor.svg", figure("Throughput against blocks moved (v2 Figure 7)", &figure_7_panels(results), 2)?)?;
    put("dgfm.csv", results.dgfm.to_csv())?;
    put("dgfm.svg", figure("DGFM on and off (v1 Figure 10)", &results.dgfm.panels(), 2)?)?;
    put("tables.md", report::tables(results))
}

fn context_panels(results: &Results) -> Vec<Panel> {
    let panel = |setup: &Setup| {
        let of = |system: System| {
            let bars = results.bars.iter().filter(|b| b.setup == *setup && b.system == system);
            let served = bars.filter(|b| b.measured.finished > 0);
            let points = served.map(|b| (f64::from(b.context_tokens), b.measured.tokens_per_s)).collect();
            Series { name: system.name().to_owned(), points }
        };
        Panel {
            title: setup.multi().name(),
            x_label: "context, tokens".to_owned(),
            y_label: "tokens/s".to_owned(),
            log_x: true,
            log_y: true,
            series: [System::Lagoon, System::Multi, System::Single].map(of).to_vec(),
        }
    };
    SETUPS.iter().map(panel).collect()
}

fn figure_7_panels(results: &Results) -> Vec<Panel> {
    let titles = ["the papers' engine (one batch)", "Lagoon's engine (two micro-batches)"];
    let panel = |(points, title): (&Vec<model::CurvePoint>, &str)| {
        let of = |name: &str, value: fn(&model::CurvePoint) -> f64| Series {
            name: name.to_owned(),
            points: points.iter().map(|p| (f64::from(p.blocks), value(p))).collect(),
        };
        Panel {
            title: title.to_owned(),
            x_label: "blocks of 256 tokens moved".to_owned(),
            y_label: "tokens/s".to_owned(),
            log_x: false,
            log_y: false,
            series: vec![
                of("total", model::CurvePoint::total),
                of("debtor", |p| p.debtor),
                of("creditor", |p| p.creditor),
            ],
        }
    };
    results.figure_7.iter().zip(titles).map(panel).collect()
}
