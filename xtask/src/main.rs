//! Developer commands: `cargo xtask CMD`. `cargo xtask test` is the test command of the README.
//!
//! All commands work on the checkout that they were built from, and need only Rust; a command that misses something
//! prints a `hint:`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "xtask is a command-line tool: printing is its purpose")]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod ci;
mod clients;
mod deny;
mod docs;
mod environment;
mod finding;
mod gpu_check;
mod gpu_rehearse;
mod jobs;
mod kernels;
mod libtest;
mod licence;
mod skips;
mod source;
mod test;
mod tidy;
mod times;
mod wgsl;
mod workspace;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Developer commands of Lagoon")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check layering, file and function sizes, module docs, unsafe, op parity, licences, the wire hash and the pages
    Tidy,
    /// Run every check and every test (the README's test command)
    Test {
        /// Run only the tests: no rustfmt, tidy or clippy
        #[arg(long)]
        no_lint: bool,
    },
    /// Validate every shader with tint, where it is installed
    Wgsl,
    /// Build the CUDA kernels' fatbin with a pinned NVRTC (pip installs it into the cache on first use), and hold the
    /// machine code against budget.toml and sass.toml
    Kernels {
        /// Build and hold the same, compare the fatbin with the committed one, and write nothing
        #[arg(long)]
        check: bool,
        /// Write what the kernels use now as their budget, too
        #[arg(long, conflicts_with = "check")]
        budget: bool,
    },
    /// Pack a check of the CUDA backend for a machine with a GPU and without Rust
    GpuCheck {
        /// Run it here afterwards: its report goes to benches/results
        #[arg(long)]
        run: bool,
    },
    /// Run the commands of docs/gpu.md over the fake driver, as they run where a GPU is lent
    GpuRehearse,
    /// Fill docs/gpu.md from the report in benches/results
    GpuPage,
    /// Write docs/reference from the program's own definitions
    Docs,
    /// Check licences, banned crates and sources with cargo-deny, where it is installed
    Deny,
    /// Rewrite the hash in WIRE.md after the protocol's page was brought up to date
    WireLock,
    /// Run clients from PyPI (openai, LangChain, anthropic, lm-eval) against a pool whose requests borrow; pip installs them
    /// below the target folder on first use
    Clients(clients::Options),
    /// What CI runs: `deny`, `wgsl`, `test` and beside it `gpu-rehearse` and `clients --sample`, then the demo
    Ci,
}

/// The repository's root.
fn root() -> PathBuf {
    // The checkout for which cargo runs it: several may share a target directory, and so this program.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = PathBuf::from(here);
    here.parent().map(PathBuf::from).unwrap_or(here)
}

fn run(command: &Command) -> Result<bool> {
    let root = root();
    match command {
        Command::Tidy => tidy::run(&root),
        Command::Test { no_lint } => test::run(&root, !no_lint),
        Command::Wgsl => wgsl::run(&root),
        Command::Kernels { check: true, .. } => kernels::run(&root, kernels::Task::Check),
        Command::Kernels { budget: true, .. } => kernels::run(&root, kernels::Task::WriteBudget),
        Command::Kernels { .. } => kernels::run(&root, kernels::Task::Write),
        Command::GpuCheck { run } => gpu_check::run(&root, *run),
        Command::GpuRehearse => gpu_rehearse::run(&root),
        Command::GpuPage => gpu_check::page(&root),
        Command::Docs => docs::run(&root),
        Command::Deny => deny::run(&root),
        Command::WireLock => tidy::wire::lock(&root),
        Command::Clients(options) => clients::run(&root, options),
        Command::Ci => ci::run(&root),
    }
}

fn main() -> ExitCode {
    match run(&Args::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
