//! The requests of `lagoon bench` with their start times: from a trace file, or drawn with the seed.

use anyhow::{Context, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::path::Path;
use std::time::Duration;

/// Maximum of requests in a trace.
const REQUESTS_MAX: usize = 1_000_000;

/// What a request asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// So many tokens, drawn with the seed.
    Tokens(u32),
    Text(String),
}

/// One request of a run, with its start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    /// Start, from the beginning of the run.
    pub(crate) start: Duration,
    pub(crate) prompt: Prompt,
    /// Tokens to generate.
    pub(crate) output_tokens: u32,
}

/// Requests of one size; with a rate, with exponential gaps.
pub(crate) fn drawn(
    requests: u32,
    prompt_tokens: u32,
    output_tokens: u32,
    rate: Option<f64>,
    seed: u64,
) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut at = 0.0;
    let one = |_| {
        let start = Duration::from_secs_f64(at);
        if let Some(rate) = rate {
            // The uniform number is below 1, so the logarithm is finite.
            at += -(1.0 - random.random::<f64>()).ln() / rate;
        }
        Planned { start, prompt: Prompt::Tokens(prompt_tokens), output_tokens }
    };
    (0..requests).map(one).collect()
}

/// Reads a CSV file with a header that names at least `arrival_s`, `prompt_tokens` and `output_tokens`, as
/// `lagoon-sim trace` writes them. Times are divided by `speed`.
pub(crate) fn read(path: &Path, speed: f64) -> anyhow::Result<Vec<Planned>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read the trace {}", path.display()))?;
    let planned = parse(&text, speed).with_context(|| format!("parse the trace {}", path.display()))?;
    ensure!(!planned.is_empty(), "the trace {} has no requests", path.display());
    Ok(planned)
}

fn parse(text: &str, speed: f64) -> anyhow::Result<Vec<Planned>> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let (_, header) = lines.next().context("the file is empty")?;
    let names: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| {
        names.iter().position(|n| *n == name).with_context(|| format!("its header {header:?} has no column {name}"))
    };
    let (arrival, prompt, output) = (column("arrival_s")?, column("prompt_tokens")?, column("output_tokens")?);
    let mut planned = Vec::new();
    for (number, line) in lines {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |at: usize| fields.get(at).with_context(|| format!("line {} is too short", number + 1));
        let whole = |at: usize| -> anyhow::Result<u32> {
            let count = field(at)?.parse().with_context(|| format!("line {}, {}", number + 1, names[at]))?;
            ensure!(count > 0, "line {}: {} is 0", number + 1, names[at]);
            Ok(count)
        };
        let seconds: f64 = field(arrival)?.parse().with_context(|| format!("line {}, arrival_s", number + 1))?;
        ensure!((0.0..1e9).contains(&seconds), "line {}: arrival_s is {seconds}", number + 1);
        ensure!(planned.len() < REQUESTS_MAX, "it has more than {REQUESTS_MAX} requests");
        let start = Duration::from_secs_f64(seconds / speed);
        planned.push(Planned { start, prompt: Prompt::Tokens(whole(prompt)?), output_tokens: whole(output)? });
    }
    planned.sort_by_key(|p| p.start);
    Ok(planned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_by_the_names_of_its_columns() {
        let text = "# a comment\nid,output_tokens,arrival_s,prompt_tokens\n0, 5, 2.0, 100\n1,7,1.0,200\n";
        let planned = parse(text, 2.0).unwrap();
        let one = |ms, prompt_tokens, output_tokens| Planned {
            start: Duration::from_millis(ms),
            prompt: Prompt::Tokens(prompt_tokens),
            output_tokens,
        };
        assert_eq!(planned, [one(500, 200, 7), one(1000, 100, 5)]);
    }

    #[test]
    fn a_trace_that_cannot_be_says_where() {
        let error = |text| format!("{:#}", parse(text, 1.0).unwrap_err());
        assert!(error("arrival_s,prompt_tokens\n").contains("output_tokens"));
        assert!(error("arrival_s,prompt_tokens,output_tokens\n1,2\n").contains("line 2"));
        assert!(error("arrival_s,prompt_tokens,output_tokens\n-1,2,3\n").contains("arrival_s is -1"));
        assert!(error("arrival_s,prompt_tokens,output_tokens\n1,0,3\n").contains("prompt_tokens is 0"));
    }

    #[test]
    fn drawn_requests_have_the_mean_rate() {
        let planned = drawn(20_000, 8, 4, Some(50.0), 7);
        let rate = 20_000.0 / planned.last().unwrap().start.as_secs_f64();
        assert!((rate / 50.0 - 1.0).abs() < 0.05, "{rate}");
        assert!(drawn(3, 8, 4, None, 7).iter().all(|p| p.start == Duration::ZERO));
    }
}
