//! The commands of `lagoon`: they parse their arguments, wire libraries together and print; all logic is in the
//! libraries.
//!
//! A binary calls [`main`] with the devices for `lagoon serve`: `lagoon` with [`OwnDevices`], `lagoon-paced`
//! (apps/paced) with a modelled device for benchmarks.
#![forbid(unsafe_code)]

mod admin;
mod api_client;
mod args;
mod asked;
mod backends;
mod bench;
mod bench_dataset;
mod bench_page;
mod bench_report;
mod bench_trace;
mod beside;
mod bundled;
mod cache_dir;
mod cache_file;
mod cache_tiers;
mod calibrate;
mod calibration_cache;
mod capacity;
mod certs;
mod chat;
mod chat_input;
mod chat_screen;
mod command_line;
mod config_file;
mod cuda_trial;
mod cuda_tuning;
mod demo;
mod device;
mod dispatch_queue;
mod doctor;
mod draft;
mod drain;
mod election;
mod engine;
mod etcd;
mod file_limit;
mod foreign_flags;
mod front_args;
mod gateway;
mod gateway_counts;
mod gmanager;
mod gmanager_metrics;
mod health_port;
mod hosts;
mod interfaces;
mod jitter;
mod kv;
mod kv_cache;
mod leader;
mod lent_memory;
mod local;
mod log;
mod loop_thread;
mod markdown;
mod metrics_table;
mod model;
mod model_size;
mod moment;
mod next_input;
mod node;
mod node_metrics;
mod node_status;
mod numbers;
mod parsers;
mod partial_waits;
mod path_probe;
mod permissions;
mod placement;
mod pool_client;
mod pool_metrics;
mod pool_watch;
mod pools;
mod port;
mod progress;
mod pull;
mod quantize;
mod quiet;
mod reference;
mod registry;
mod replay;
mod retry_budget;
mod role;
mod scratch;
#[cfg(test)]
#[path = "../../http/src/scripted.rs"]
mod scripted;
mod serve;
mod shared_prefixes;
mod shell;
mod shutdown;
mod status;
mod table;
mod tenant;
mod tier_kind;
mod transfer_addr;
#[cfg(target_os = "linux")]
mod transfers;
#[cfg(not(target_os = "linux"))]
#[path = "transfers_none.rs"]
mod transfers;
#[cfg(test)]
mod translated_tests;
mod turn;
mod up;
mod up_choices;
mod upstreams;
mod watch;
#[cfg(target_os = "linux")]
mod writers_here;

pub use device::{Devices, Loading, OwnDevices, Running};

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Time for background threads when a command has ended.
const BACKGROUND_WAIT: Duration = Duration::from_millis(500);

/// Serve long-context LLMs from a pool of instances that lend each other KV cache.
#[derive(Debug, Parser)]
#[command(name = "lagoon", version, propagate_version = true, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log filter (tracing syntax), on standard error.
    #[arg(long, global = true, default_value = "warn", env = "LAGOON_LOG")]
    log: String,
    /// Read flags from this TOML file, which has a table for each command; the command line and the environment win over it.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A request larger than any instance, served by a pool on this machine: no arguments, no downloads.
    Demo(demo::DemoArgs),
    /// A whole pool on this machine behind one OpenAI endpoint.
    Up(Box<up::UpArgs>),
    /// One instance with its OpenAI endpoint, alone or in a pool.
    Serve(Box<serve::ServeArgs>),
    /// The pool's coordinator.
    Gmanager(gmanager::GManagerArgs),
    /// One OpenAI endpoint over several servers.
    Gateway(gateway::GatewayArgs),
    /// Chat in the terminal with any OpenAI endpoint.
    Chat(chat::ChatArgs),
    /// Load an OpenAI endpoint and print latencies and throughput.
    Bench(bench::BenchArgs),
    /// Instances, blocks and requests of a pool.
    Status(status::StatusArgs),
    /// Move everything away from an instance, to stop it without losing a request.
    Drain(drain::DrainArgs),
    /// Give an instance another role (prefill, decode, both) while it serves.
    Role(role::RoleArgs),
    /// List requests' rBlocks and move them by hand.
    Kv(kv::KvArgs),
    /// Download a model from the hub, or what is missing of it, and verify it.
    Pull(pull::PullArgs),
    /// Write a model as a GGUF file with packed weights.
    Quantize(quantize::QuantizeArgs),
    /// The cluster's certificates.
    Certs(certs::CertsArgs),
    /// Print this machine's adapters, UDP buffers, ports, versions.
    Doctor(doctor::DoctorArgs),
    /// Print completions for a shell.
    Completions(shell::CompletionsArgs),
    /// Write manual pages, one for each command.
    Man(shell::ManArgs),
    /// Trial of a CUDA device's kernels for `serve`, in a process of its own, as it may crash.
    #[command(hide = true)]
    CudaTrial(cuda_trial::CudaTrialArgs),
    /// Print a reference page of docs/reference in Markdown.
    #[command(hide = true)]
    Reference(reference::ReferenceArgs),
}

impl Command {
    /// Whether it may make temporary folders: then it first removes what such commands left that were killed.
    fn has_scratch(&self) -> bool {
        matches!(self, Self::Demo(_) | Self::Up(_) | Self::Serve(_) | Self::Doctor(_))
    }
}

/// Runs this process's command line; instances run on `devices`.
pub fn main(devices: &'static dyn Devices) -> ExitCode {
    let cli = command_line::parse();
    quiet::restart_without_display_probe();
    // Dropped last: flushes the command's log lines.
    let _logging = log::start(&cli.log);
    file_limit::raise();
    if cli.command.has_scratch() {
        scratch::sweep_all();
    }
    dispatch(cli.command, devices).unwrap_or_else(|error| {
        log::notice(&in_words(&error));
        ExitCode::FAILURE
    })
}

fn dispatch(command: Command, devices: &'static dyn Devices) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let done = |()| ExitCode::SUCCESS;
    let run = async {
        match command {
            Command::Demo(args) => shutdown::unless_stopped(demo::run(args)).await,
            Command::Up(args) => up::run(*args).await.map(done),
            Command::Serve(args) => serve::run(*args, devices).await.map(done),
            Command::Gmanager(args) => gmanager::run(args).await.map(done),
            Command::Gateway(args) => gateway::run(args).await.map(done),
            Command::Chat(args) => chat::run(args).await.map(done),
            Command::Bench(args) => bench::run(args).await.map(done),
            Command::Status(args) => status::run(args).await.map(done),
            Command::Drain(args) => drain::run(args).await.map(done),
            Command::Role(args) => role::run(args).await.map(done),
            Command::Kv(args) => kv::run(args).await.map(done),
            Command::Pull(args) => pull::run(args).await.map(done),
            Command::Quantize(args) => quantize::run(args).await.map(done),
            Command::Certs(args) => certs::run(args).map(done),
            Command::Doctor(args) => shutdown::unless_stopped(doctor::run(args)).await.map(done),
            Command::Completions(args) => {
                shell::completions(&args);
                Ok(ExitCode::SUCCESS)
            }
            Command::Man(args) => shell::man(&args).map(done),
            Command::CudaTrial(args) => cuda_trial::run(&args).map(done),
            Command::Reference(args) => {
                reference::run(&args);
                Ok(ExitCode::SUCCESS)
            }
        }
    };
    let result = runtime.block_on(async {
        tokio::select! {
            biased;
            result = run => result,
            // `lagoon demo | head -1`: the reader has enough. Dropping the command ends its processes and removes its files.
            () = log::closed() => Ok(ExitCode::SUCCESS),
        }
    });
    // Work on other threads (tokenising a long prompt) is not waited for.
    runtime.shutdown_timeout(BACKGROUND_WAIT);
    result
}

/// `error: what: why`, then the hints of all causes on their own lines.
fn in_words(error: &anyhow::Error) -> String {
    let (mut text, mut hints) = (String::new(), String::new());
    for cause in error.chain().map(ToString::to_string) {
        let (own, message): (Vec<&str>, Vec<&str>) =
            cause.lines().map(str::trim).partition(|line| line.starts_with("hint:"));
        let message = message.join("\n");
        // Many errors end with their cause's text already.
        if !text.ends_with(&message) {
            text = if text.is_empty() { message } else { format!("{text}: {message}") };
        }
        for hint in own {
            if !hints.contains(hint) {
                hints.push_str(hint);
                hints.push('\n');
            }
        }
    }
    format!("error: {text}\n{hints}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_come_after_all_causes_once() {
        let cause = anyhow::anyhow!("address in use\nhint: look with ss");
        let error = cause.context("listen on 1.2.3.4\nhint: --http names another");
        assert_eq!(
            in_words(&error),
            "error: listen on 1.2.3.4: address in use\nhint: --http names another\nhint: look with ss\n"
        );
        let output = anyhow::anyhow!("gone").context("cannot read x: gone");
        assert_eq!(in_words(&output), "error: cannot read x: gone\n");
    }
}
