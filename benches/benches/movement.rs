//! Cost of moving KV for a decoding sequence, by tokens moved in a step, with the copy overlapped with decoding (as
//! shipped) and with steps that wait for their copy (Infinite-LLM v2 §7.4, Figure 12a).
//!
//! Two real processes with the bundled model, real arithmetic and real QUIC. Each device is *paced*
//! (`lagoon_pace::Paced`), so that the two do not compete for this machine's cores: a step reads its weights in 10
//! ms, a token of KV has 0.5 MiB, and KV is copied at 25 GB/s, about LLaMA2-7B on an A100. The network carries the
//! small model's bytes: only the copies at both ends take the modelled time. `--real` leaves pacing out.
//!
//! A request decodes on one instance with a few rBlocks at the other; then more rBlocks are ordered there, at the
//! given pace. Printed is the mean time between tokens during the move, over the mean before and after it in the same
//! run. The status is polled at the same rate in all three parts.
//!
//! `cargo build --release -p lagoon -p lagoon-paced && cargo bench -p lagoon-benches --bench movement -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, Process, TIMEOUT, Times, late_share, listen, number, status, wait_for_others};
use lagoon_benches::measure::{mean, median};
use lagoon_pace::PaceProfile;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens that move in a step.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,4,8,16,32,64")]
    tokens: Vec<u32>,
    /// Context of the request, in tokens.
    #[arg(long, default_value_t = 4096)]
    context: u32,
    /// Steps of each of the three parts of a run: before, while rBlocks move, after.
    #[arg(long, default_value_t = 48)]
    steps: u32,
    /// Runs of each; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// Leave the devices as fast as they are.
    #[arg(long)]
    real: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One run; times in milliseconds.
#[derive(Clone, Debug, Serialize)]
struct Run {
    tokens_per_step: u32,
    overlap: bool,
    /// Mean time of a step before and after the move.
    still_ms: f64,
    /// Mean time of a step during the move, and the number of steps.
    moving_ms: f64,
    moving_steps: usize,
    /// `moving_ms` over `still_ms`.
    ratio: f64,
    /// Tokens that were moved.
    moved_tokens: u64,
    /// Lateness of the devices, as a share of the modelled time.
    late_share: f64,
}

const BLOCK_TOKENS: u32 = 16;
/// rBlocks at the other instance before the measurement: the sequence's layers wait for partials in every part.
const FIRST_BLOCKS: u32 = 2;
/// Steps left out around a change.
const MARGIN: usize = 2;
const WEIGHTS_S: f64 = 10e-3;
/// A token of KV of the bundled model: 4 layers, 2 KV heads of 64, K and V, f16.
const TOKEN_BYTES: f64 = 4.0 * 2.0 * 2.0 * 64.0 * 2.0;

fn profile(model: &Path) -> Result<PaceProfile> {
    let bytes = std::fs::metadata(model.join("model.safetensors"))?.len() as f64;
    let weight_scale = WEIGHTS_S * 1e12 / bytes;
    Ok(PaceProfile {
        bytes_per_s: 1e12,
        // Products of 150 rows take as long as reading the weights.
        flops: 150.0 * bytes * weight_scale / WEIGHTS_S,
        copy_bytes_per_s: 25e9,
        launch_us: 3.0,
        weight_scale,
        kv_scale: f64::from(512 * 1024) / TOKEN_BYTES,
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    })
}

struct Bench {
    lagoon: Lagoon,
}

impl Bench {
    /// An instance that moves KV at a fixed pace.
    fn instance(&self, name: &str, gmanager: &str, kv_tokens: u32, pace: (u32, bool)) -> Result<Process> {
        let (tokens, overlap) = pace;
        let own = [
            "serve".to_owned(),
            self.lagoon.model.display().to_string(),
            format!("--gmanager={gmanager}"),
            format!("--name={name}"),
            format!("--kv-tokens={kv_tokens}"),
            format!("--block-tokens={BLOCK_TOKENS}"),
            format!("--move-tokens-per-step={tokens}"),
            format!("--move-overlap={}", if overlap { "on" } else { "off" }),
            "--http=127.0.0.1:0".to_owned(),
            "--backend=cpu".to_owned(),
            "--threads=1".to_owned(),
            "--kv-dtype=f16".to_owned(),
            "--remote-attention=ship".to_owned(),
            "--calibrate=off".to_owned(),
        ];
        self.lagoon.start(name, &own)
    }

    /// Orders a move of `blocks` of the debtor's only request to the other instance.
    fn order(&self, gmanager: &str, request: &str, blocks: u32) -> Result<()> {
        let blocks = format!("--blocks={blocks}");
        let order = ["kv", "move", request, &blocks, "--from=debtor", "--to=other"];
        self.lagoon.operate(&order, gmanager)
    }
}

/// Observation of one run: the stream, and the debtor's status every few milliseconds.
struct Watch<'a> {
    http: &'a str,
    times: &'a Times,
}

impl Watch<'_> {
    fn received(&self) -> Result<usize> {
        let recorded = self.times.lock().expect("nobody panics with it");
        if let Some(error) = &recorded.1 {
            bail!("the stream failed: {error}");
        }
        Ok(recorded.0.len())
    }

    /// Waits until the status is as wanted; returns the number of tokens received by then.
    fn wait_until(&self, what: &str, wanted: impl Fn(&Value) -> Result<bool>) -> Result<usize> {
        let since = Instant::now();
        loop {
            let status = status(self.http)?;
            let received = self.received()?;
            if wanted(&status)? {
                return Ok(received);
            }
            ensure!(since.elapsed() < TIMEOUT, "not {what} after {TIMEOUT:?}: {status}");
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Waits for `steps` more tokens; returns the number of tokens before.
    fn steps(&self, steps: usize) -> Result<usize> {
        let first = self.received()?;
        self.wait_until("received", |_| Ok(self.received()? >= first + steps))?;
        Ok(first)
    }

    /// Gaps between the tokens of a range, in milliseconds, the ends left out.
    fn gaps(&self, first: usize, end: usize) -> Vec<f64> {
        let times = self.times.lock().expect("nobody panics with it").0.clone();
        let range = times.get(first + MARGIN..end.saturating_sub(MARGIN).max(first + MARGIN)).unwrap_or_default();
        range.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() * 1e3).collect()
    }
}

fn measure(bench: &Bench, args: &Args, tokens: u32, overlap: bool) -> Result<Run> {
    // The move takes as many steps as each of the other parts.
    let blocks = (args.steps * tokens).div_ceil(BLOCK_TOKENS);
    ensure!(blocks * BLOCK_TOKENS + 256 < args.context, "--context is too small for {tokens} tokens a step");
    let length = args.steps * 8 + FIRST_BLOCKS * BLOCK_TOKENS + 64;
    let gmanager = bench.lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
    let quic = gmanager.announced("quic")?;
    let debtor = bench.instance("debtor", quic, args.context + length + 512, (tokens, overlap))?;
    let _other = bench.instance("other", quic, args.context, (tokens, overlap))?;
    let http = debtor.announced("http")?;
    let since = Instant::now();
    wait_for_others(http)?;
    let times = listen(http, args.context, length)?;
    let watch = Watch { http, times: &times };
    watch.wait_until("decoding", |_| Ok(watch.received()? > 2))?;
    let status_now = status(http)?;
    let request = format!("{}/{}", number(&status_now, "/instance")?, number(&status_now, "/sequences/0/seq")?);
    let moved = |s: &Value| number(s, "/moves/blocks_out");
    let still = |s: &Value| Ok(number(s, "/moves/in_progress")? == 0);
    if tokens > 0 {
        order_when_known(bench, quic, &request, FIRST_BLOCKS, since)?;
        watch.wait_until("at the other", |s| Ok(still(s)? && moved(s)? >= u64::from(FIRST_BLOCKS)))?;
    }
    let before = watch.steps(args.steps as usize)?;
    let until = watch.received()?;
    let (begun, ended) = if tokens > 0 {
        order_when_known(bench, quic, &request, blocks, Instant::now())?;
        let begun = watch.wait_until("moving", |s| Ok(!still(s)? || moved(s)? > u64::from(FIRST_BLOCKS)))?;
        (begun, watch.wait_until("moved", still)?)
    } else {
        let begun = watch.steps(args.steps as usize)?;
        (begun, watch.received()?)
    };
    let after = watch.steps(args.steps as usize)?;
    let gaps = [watch.gaps(before, until), watch.gaps(after, watch.received()?)];
    let moving = watch.gaps(begun, ended);
    ensure!(!moving.is_empty(), "{blocks} rBlocks moved within fewer than {} steps", 2 * MARGIN + 2);
    let (still_ms, moving_ms) = ((mean(&gaps[0]) + mean(&gaps[1])) / 2.0, mean(&moving));
    let blocks_moved = moved(&status(http)?)?.saturating_sub(if tokens > 0 { FIRST_BLOCKS.into() } else { 0 });
    Ok(Run {
        tokens_per_step: tokens,
        overlap,
        still_ms,
        moving_ms,
        moving_steps: moving.len(),
        ratio: moving_ms / still_ms,
        moved_tokens: blocks_moved * u64::from(BLOCK_TOKENS),
        late_share: late_share(http)?,
    })
}

/// Orders the move once the gManager knows the request's rBlocks from heartbeats.
fn order_when_known(bench: &Bench, quic: &str, request: &str, blocks: u32, since: Instant) -> Result<()> {
    loop {
        match bench.order(quic, request, blocks) {
            Err(_) if since.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(50)),
            ended => return ended,
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let lagoon = Lagoon::new("movement")?;
    let profile = profile(&lagoon.model)?;
    let lagoon = if args.real { lagoon } else { lagoon.paced(&profile)? };
    let bench = Bench { lagoon };
    let mut runs: Vec<Run> = Vec::new();
    for _ in 0..args.repeats {
        for tokens in &args.tokens {
            for overlap in [true, false] {
                let what = || format!("{tokens} tokens a step, overlap {overlap}");
                runs.push(measure(&bench, &args, *tokens, overlap).with_context(what)?);
            }
        }
    }
    let of = |tokens: u32, overlap: bool, f: fn(&Run) -> f64| {
        median(runs.iter().filter(|r| (r.tokens_per_step, r.overlap) == (tokens, overlap)).map(f).collect())
    };
    if args.json {
        let points = args.tokens.iter().map(|tokens| {
            let [on, off] = [true, false].map(|overlap| of(*tokens, overlap, |r| r.ratio));
            json!({ "tokens_per_step": tokens, "overlapped": on, "waiting": off })
        });
        let result = json!({
            "context": args.context, "steps": args.steps, "block_tokens": BLOCK_TOKENS,
            "profile": (!args.real).then_some(profile), "step_time_over_still": points.collect::<Vec<_>>(), "runs": runs,
        });
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let columns = ["tokens/step", "still ms", "overlapped", "waiting", "late"];
    println!("{}", columns.map(|c| format!("{c:>13}")).concat());
    for tokens in &args.tokens {
        let still = of(*tokens, true, |r| r.still_ms);
        let [on, off] = [true, false].map(|overlap| of(*tokens, overlap, |r| r.ratio));
        let late = of(*tokens, true, |r| r.late_share);
        println!("{tokens:>13}{still:>13.2}{on:>13.3}{off:>13.3}{late:>13.3}");
    }
    Ok(())
}
