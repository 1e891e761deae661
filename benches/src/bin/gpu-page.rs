//! Fills docs/gpu.md and its figures from a report of `gpu-check`; `cargo xtask gpu-page` runs it on the repository's
//! report.

use anyhow::Context;
use clap::Parser;
use std::path::PathBuf;

/// Fills the page about GPUs from a report.
#[derive(Debug, Parser)]
struct Args {
    /// The report of gpu-check; without one the page gets empty cells.
    report: Option<PathBuf>,
    /// The folder with gpu.md and plots/.
    #[arg(long)]
    docs: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let read = |path: &PathBuf| std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    let at = args.docs.join("gpu.md");
    let template = read(&at)?;
    let Some(report) = &args.report else {
        let text = lagoon_benches::gpu_page::blank(&template)?;
        return std::fs::write(&at, text).with_context(|| format!("write {}", at.display()));
    };
    let report = serde_json::from_str(&read(report)?).context("parse the report")?;
    let page = lagoon_benches::gpu_page::page(&template, &report)?;
    std::fs::write(&at, page.text).with_context(|| format!("write {}", at.display()))?;
    for (name, svg) in page.figures {
        let path = args.docs.join("plots").join(name);
        std::fs::write(&path, svg).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
