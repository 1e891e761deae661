//! `lagoon-sim paper` and `lagoon-sim trace`: the papers' figures in simulation, and their workloads as files.

use anyhow::Context as _;
use lagoon_sim::paper::conversation::{self, Statistics};
use lagoon_sim::paper::suite::{self, Size};
use lagoon_sim::paper::traces::{Output, TABLE_1, Workload, table_2, to_csv};
use lagoon_sim::paper::{caching, longtail, report, serving};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time between two lines of progress.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Commands of `lagoon-sim` besides runs by seed.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Suite {
    /// The tables and figures of the Infinite-LLM papers, in simulation: CSV, SVG and Markdown.
    Paper(PaperArgs),
    /// The papers' workloads as files: arrival, prompt and output of every request.
    Trace(TraceArgs),
    /// Goodput of four instances on a trace of conversations, as a pool and alone: a Markdown table.
    Longtail(LongtailArgs),
    /// Hit rates of prefix caches on a trace of conversations, beside one cache as large as the pool: a Markdown table.
    Caching(CachingArgs),
    /// A trace of conversations with a production trace's statistics: JSON lines, and the statistics on stderr.
    Conversation(ConversationArgs),
}

/// `lagoon-sim longtail`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LongtailArgs {
    /// A trace of the form of Mooncake's [default: a synthetic one].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests of a part of the trace, and the first of each part.
    #[arg(long, value_name = "N", default_value_t = 800)]
    requests: usize,
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0,800,1600")]
    offsets: Vec<usize>,
    /// Only systems whose name contains one of these.
    #[arg(long, value_name = "TEXT", value_delimiter = ';')]
    only: Vec<String>,
    /// Requests per second, the same for all systems, instead of a search for each one's goodput.
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<f64>,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// `lagoon-sim caching`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CachingArgs {
    /// A trace of the form of Mooncake's [default: a synthetic one].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The first requests of the trace.
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    requests: usize,
    /// Requests per second.
    #[arg(long, value_name = "R", default_value = "1", value_parser = positive)]
    rate: f64,
    /// Tokens of KV that one instance holds [default: what the modelled device does].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1024..))]
    kv_tokens: Option<u64>,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// `lagoon-sim conversation`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConversationArgs {
    #[arg(long, value_name = "N", default_value_t = 12_031, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print the statistics of this trace instead.
    #[arg(long, value_name = "FILE")]
    statistics_of: Option<PathBuf>,
}

/// `lagoon-sim paper`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PaperArgs {
    /// Fewer requests: minutes on two cores instead of the better part of an hour.
    #[arg(long)]
    quick: bool,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Only panels whose figure and name contain this, as "v2 10a: trace 0" or "8xtp1"; they go to chosen.csv.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Goodput against vLLM-multi under both readings of dispatch instead, of the panels named by --only; to readings.md. On two cores and with
    /// --quick "trace 0, LLaMA2-7B, 4xtp1" takes two minutes and trace 1 seven; trace 2 takes more than an hour, and eight instances twice as long.
    #[arg(long)]
    readings: bool,
    /// Where the files go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// `lagoon-sim trace`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TraceArgs {
    /// 0 to 8: Infinite-LLM v2 Table 1. Without this or --dataset, everything.
    #[arg(long, value_name = "N", conflicts_with = "dataset", value_parser = clap::value_parser!(u32).range(0..=8))]
    id: Option<u32>,
    /// 1 to 18: Infinite-LLM v1 Table 2.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=18))]
    dataset: Option<u32>,
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Requests per second, Poisson.
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = positive)]
    rate: f64,
    /// Generated tokens of a request at most; two thirds of its context otherwise.
    #[arg(long, value_name = "TOKENS")]
    output_max: Option<u32>,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Where the files go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

fn positive(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok();
    rate.filter(|r| r.is_finite() && *r > 0.0).ok_or_else(|| "expected a positive number".to_owned())
}

/// Runs the command.
pub(crate) fn run(command: &Suite) -> anyhow::Result<()> {
    match command {
        Suite::Paper(args) => paper(args),
        Suite::Trace(args) => trace(args),
        Suite::Longtail(args) => longtail(args),
        Suite::Caching(args) => caching(args),
        Suite::Conversation(args) => written(args),
    }
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command's answer and its progress")]
fn paper(args: &PaperArgs) -> anyhow::Result<()> {
    let size = if args.quick { Size::quick(args.seed) } else { Size::full(args.seed) };
    let begun = Instant::now();
    let last = Mutex::new((String::new(), begun));
    let say = |what: &str, at: usize, of: usize| {
        let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if last.0 != what || at == of || last.1.elapsed() >= SAY_EVERY {
            eprintln!("{:5.0} s  {what}: {at} of {of}", begun.elapsed().as_secs_f64());
            *last = (what.to_owned(), Instant::now());
        }
    };
    if args.readings {
        let all = suite::run_readings(size, args.only.as_deref().unwrap_or_default(), &say);
        anyhow::ensure!(!all.is_empty(), "no panel's name contains {:?}", args.only.as_deref().unwrap_or_default());
        let mut text = String::new();
        report::readings(&mut text, &all);
        let path = args.out.join("readings.md");
        std::fs::create_dir_all(&args.out)
            .and_then(|()| std::fs::write(args.out.join("readings.csv"), report::readings_csv(&all)))
            .and_then(|()| std::fs::write(&path, text))
            .with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
        return Ok(());
    }
    if let Some(wanted) = &args.only {
        let chosen = suite::run_only(size, wanted, &say);
        anyhow::ensure!(!chosen.is_empty(), "no panel's figure and name contain {wanted:?}");
        let path = args.out.join("chosen.csv");
        std::fs::create_dir_all(&args.out)
            .and_then(|()| std::fs::write(&path, serving::to_csv(&chosen)))
            .with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
        return Ok(());
    }
    let results = suite::run(size, &say);
    suite::write(&results, &args.out).with_context(|| format!("write {}", args.out.display()))?;
    println!("{} after {:.0} s", args.out.join("tables.md").display(), results.seconds);
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a command's answer")]
fn trace(args: &TraceArgs) -> anyhow::Result<()> {
    let all: Vec<Workload> = TABLE_1.into_iter().chain(table_2()).collect();
    let wanted = |w: &&Workload| match (w, args.id, args.dataset) {
        (_, None, None) => true,
        (Workload::Trace { id, .. }, Some(wanted), _) | (Workload::Dataset { id, .. }, None, Some(wanted)) => {
            *id == wanted
        }
        _ => false,
    };
    std::fs::create_dir_all(&args.out).with_context(|| format!("make {}", args.out.display()))?;
    let output = args.output_max.map_or(Output::TwoThirds, Output::AtMost);
    for workload in all.iter().filter(wanted) {
        let requests = workload.requests(args.requests as usize, output, args.rate, args.seed);
        let path = args.out.join(format!("{}.csv", workload.name()));
        std::fs::write(&path, to_csv(&requests)).with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command's answer and its progress")]
fn longtail(args: &LongtailArgs) -> anyhow::Result<()> {
    let most = args.offsets.iter().max().copied().unwrap_or(0) + args.requests;
    let entries = match &args.trace {
        Some(path) => conversation::read(path)?,
        None => conversation::synthetic(most, args.seed),
    };
    let part = |at: &usize| {
        let part = entries.get(*at..*at + args.requests);
        part.with_context(|| format!("the trace has {} requests, fewer than {most}", entries.len()))
    };
    let parts = args.offsets.iter().map(part).collect::<anyhow::Result<Vec<_>>>()?;
    let begun = Instant::now();
    let mut systems = longtail::systems();
    systems.retain(|(name, _)| args.only.is_empty() || args.only.iter().any(|only| name.contains(only.as_str())));
    anyhow::ensure!(!systems.is_empty(), "no system's name contains one of {:?}", args.only);
    let rows = longtail::run(&parts, &systems, args.rate, &|at, of| {
        eprintln!("{:5.0} s  {} of {of}", begun.elapsed().as_secs_f64(), at + 1);
    });
    let names: Vec<String> = args.offsets.iter().map(|at| format!("from {at}")).collect();
    print!("{}", longtail::table(&rows, &names));
    Ok(())
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command's answer and its progress")]
fn caching(args: &CachingArgs) -> anyhow::Result<()> {
    let mut entries = match &args.trace {
        Some(path) => conversation::read(path)?,
        None => conversation::synthetic(args.requests, args.seed),
    };
    entries.truncate(args.requests);
    let begun = Instant::now();
    let rows = caching::run(&entries, args.rate, args.kv_tokens, &|at, of| {
        eprintln!("{:5.0} s  {} of {of}", begun.elapsed().as_secs_f64(), at + 1);
    })?;
    print!("{}", caching::table(&rows));
    Ok(())
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command's answer and what it says of it")]
fn written(args: &ConversationArgs) -> anyhow::Result<()> {
    let entries = match &args.statistics_of {
        Some(path) => conversation::read(path)?,
        None => conversation::synthetic(args.requests as usize, args.seed),
    };
    if args.statistics_of.is_none() {
        print!("{}", conversation::to_jsonl(&entries));
    }
    eprintln!("{}", serde_json::to_string(&Statistics::of(&entries)).context("encode the statistics")?);
    Ok(())
}
