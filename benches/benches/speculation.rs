//! Speculative decoding (`--draft-tokens`) where KV is remote: a request whose KV is mostly at a creditor, behind a relay that
//! delays every datagram. A step then waits for a round trip a layer; drafts share it.
//!
//! Two real processes of one thread each with the bundled model, real arithmetic and real QUIC. Drafts are looked up, or proposed by a
//! draft model: the bundled one with weights in 4 bits (`lagoon quantize`), which is as slow and mostly agrees. Three texts: one that
//! repeats itself, and tokens that do not, continued greedily and with drawn tokens. Printed are the tokens per second of decoding
//! without drafts, and with them in turn.
//!
//! `cargo build --release -p lagoon && cargo bench -p lagoon-benches --bench speculation -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, Process, number, request, status, wait_for_others};
use lagoon_benches::measure::{commit, device, median};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::BufRead;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Round trips between the instances, in milliseconds.
    #[arg(long, value_delimiter = ',', default_value = "0,1,5,20")]
    rtt_ms: Vec<u64>,
    /// Drafted tokens of a step, at most.
    #[arg(long, default_value_t = 8)]
    drafts: u32,
    /// Tokens of the prompts.
    #[arg(long, default_value_t = 2048)]
    context: usize,
    /// Decoded tokens.
    #[arg(long, default_value_t = 96)]
    tokens: u32,
    /// Runs of each; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens of KV at the debtor: the rest of a prompt, and what is decoded, is at the creditor.
const LOCAL_TOKENS: usize = 512;
const TEXT: &str = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";

/// Passes datagrams on to `behind` and back, each `delay` late. Returns its own address.
fn relay(behind: SocketAddr, delay: Duration) -> Result<SocketAddr> {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0")?);
    let address = front.local_addr()?;
    let back = delayed(Arc::clone(&front), delay);
    thread::spawn(move || {
        let mut clients: BTreeMap<SocketAddr, (Arc<UdpSocket>, Sender<Datagram>)> = BTreeMap::new();
        let mut buffer = vec![0; 1 << 16];
        while let Ok((bytes, client)) = front.recv_from(&mut buffer) {
            let (_, forth) = clients.entry(client).or_insert_with(|| {
                let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").expect("a free port"));
                answers(Arc::clone(&socket), client, back.clone());
                (Arc::clone(&socket), delayed(socket, delay))
            });
            let datagram = (Instant::now(), buffer[..bytes].to_vec(), behind);
            if forth.send(datagram).is_err() {
                return;
            }
        }
    });
    Ok(address)
}

/// When it came, its bytes, and where it goes.
type Datagram = (Instant, Vec<u8>, SocketAddr);

/// Sends datagrams `delay` after they came.
fn delayed(socket: Arc<UdpSocket>, delay: Duration) -> Sender<Datagram> {
    let (sender, receiver) = mpsc::channel::<Datagram>();
    thread::spawn(move || {
        for (came, bytes, to) in receiver {
            thread::sleep((came + delay).saturating_duration_since(Instant::now()));
            // What cannot be sent is lost, as on any network.
            let _ = socket.send_to(&bytes, to);
        }
    });
    sender
}

/// Passes what comes back on to the client.
fn answers(socket: Arc<UdpSocket>, client: SocketAddr, back: Sender<Datagram>) {
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok((bytes, _)) = socket.recv_from(&mut buffer) {
            if back.send((Instant::now(), buffer[..bytes].to_vec(), client)).is_err() {
                return;
            }
        }
    });
}

/// A free UDP port of the loopback interface.
fn free_port() -> Result<SocketAddr> {
    Ok(UdpSocket::bind("127.0.0.1:0")?.local_addr()?)
}

struct Pool {
    _gmanager: Process,
    _creditor: Process,
    debtor: Process,
}

impl Pool {
    fn new(lagoon: &Lagoon, rtt: Duration, (drafts, model): (u32, Option<&Path>), context: usize) -> Result<Self> {
        let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
        let quic = gmanager.announced("quic")?;
        let start = |name: &str, kv_tokens: usize| -> Result<Process> {
            let behind = free_port()?;
            // Half of a round trip each way, at the side that is asked.
            let front = if rtt.is_zero() { behind } else { relay(behind, rtt / 2)? };
            let mut own = vec![
                "serve".to_owned(),
                lagoon.model.display().to_string(),
                format!("--gmanager={quic}"),
                format!("--name={name}"),
                format!("--quic={behind}"),
                format!("--advertise={front}"),
                format!("--kv-tokens={kv_tokens}"),
                format!("--draft-tokens={drafts}"),
                "--http=127.0.0.1:0".to_owned(),
                "--backend=cpu".to_owned(),
                "--threads=1".to_owned(),
                "--remote-attention=ship".to_owned(),
                "--prefix-cache=off".to_owned(),
                "--calibrate=off".to_owned(),
            ];
            own.extend(model.map(|model| format!("--draft={}", model.display())));
            lagoon.start(name, &own)
        };
        let creditor = start("creditor", 2 * context + 4096)?;
        let debtor = start("debtor", LOCAL_TOKENS)?;
        wait_for_others(debtor.announced("http")?)?;
        Ok(Self { _gmanager: gmanager, _creditor: creditor, debtor })
    }

    /// Decodes after a prompt: tokens per second, and the tokens.
    fn decode(&self, (prompt, temperature): &Prompt, tokens: u32) -> Result<(f64, Vec<u64>)> {
        let body = json!({
            "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 1, "ignore_eos": true, "stream": true,
            "return_token_ids": true,
        });
        let answer = request(self.debtor.announced("http")?, "POST /v1/completions", &body.to_string())?;
        let (mut times, mut ids) = (Vec::new(), Vec::new());
        for line in answer.lines() {
            let line = line?;
            let Some(event) = line.strip_prefix("data: {") else { continue };
            let event: Value = serde_json::from_str(&format!("{{{event}"))?;
            ensure!(event.get("error").is_none(), "the stream failed: {event}");
            let new = event.pointer("/choices/0/token_ids").and_then(Value::as_array);
            for id in new.into_iter().flatten() {
                times.push(Instant::now());
                ids.push(id.as_u64().context("a token id")?);
            }
        }
        let (Some(first), Some(last)) = (times.first(), times.last()) else { anyhow::bail!("no token came") };
        Ok(((times.len() - 1) as f64 / (*last - *first).as_secs_f64(), ids))
    }

    /// Drafted tokens, and those of them that were sampled.
    fn drafted(&self) -> Result<(u64, u64)> {
        let status = status(self.debtor.announced("http")?)?;
        Ok((number(&status, "/drafted_tokens")?, number(&status, "/accepted_tokens")?))
    }
}

/// A text and the temperature at which it is continued.
type Prompt = (Value, f64);

fn measure(lagoon: &Lagoon, args: &Args, rtt_ms: u64, (name, prompt): (&str, &Prompt), draft: &Path) -> Result<Value> {
    let kinds = [("plain", (0, None)), ("lookup", (args.drafts, None)), ("model", (args.drafts, Some(draft)))];
    let (mut rates, mut drafted, mut same) = ([const { Vec::new() }; 3], [(0, 0); 3], 0);
    for _ in 0..args.repeats {
        let mut answers = Vec::new();
        for (at, (_, drafts)) in kinds.iter().enumerate() {
            let pool = Pool::new(lagoon, Duration::from_millis(rtt_ms), *drafts, args.context)?;
            let (rate, ids) = pool.decode(prompt, args.tokens)?;
            rates[at].push(rate);
            answers.push(ids);
            drafted[at] = pool.drafted()?;
        }
        same += u32::from(answers.iter().all(|answer| *answer == answers[0]));
    }
    let [plain, lookup, model] = rates.map(median);
    Ok(json!({
        "prompt": name, "rtt_ms": rtt_ms, "tokens_per_s": plain, "with_drafts_tokens_per_s": lookup,
        "ratio": lookup / plain, "drafted": drafted[1].0, "accepted": drafted[1].1,
        "with_draft_model_tokens_per_s": model, "model_ratio": model / plain, "model_drafted": drafted[2].0,
        "model_accepted": drafted[2].1, "equal_answers": same, "runs": args.repeats,
    }))
}

fn print(row: &Value) {
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    println!(
        "{:8} {:>3} ms: {:>7.1} tokens/s; looked up {:>7.1} ({:.2}, {} of {} accepted); draft model {:>7.1} ({:.2}, {} of {} accepted)",
        row["prompt"].as_str().unwrap_or(""),
        row["rtt_ms"],
        number("tokens_per_s"),
        number("with_drafts_tokens_per_s"),
        number("ratio"),
        row["accepted"],
        row["drafted"],
        number("with_draft_model_tokens_per_s"),
        number("model_ratio"),
        row["model_accepted"],
        row["model_drafted"],
    );
}

fn main() -> Result<()> {
    let args = Args::parse();
    let lagoon = Lagoon::new("speculation")?;
    let text = TEXT.repeat(args.context / 20);
    let mixed: Vec<usize> = (0..args.context).map(|i| 5 + (i * i * 37 + i / 7) % 1000).collect();
    let prompts =
        [("repeats", (json!(text), 0.0)), ("mixed", (json!(mixed.clone()), 0.0)), ("drawn", (json!(mixed), 1.0))];
    let draft = lagoon.dir.join("draft.gguf");
    let (from, to) = (lagoon.model.display().to_string(), draft.display().to_string());
    lagoon.run_to_end(&["quantize", &from, &to, "--format", "q4_k"])?;
    let mut rows = Vec::new();
    for rtt_ms in &args.rtt_ms {
        for (name, prompt) in &prompts {
            let row = measure(&lagoon, &args, *rtt_ms, (name, prompt), &draft)?;
            if !args.json {
                print(&row);
            }
            rows.push(row);
        }
    }
    if args.json {
        let report = json!({
            "benchmark": "speculation", "device": device(), "commit": commit(), "drafts": args.drafts,
            "context": args.context, "local_tokens": LOCAL_TOKENS, "results": rows,
        });
        println!("{report:#}");
    }
    Ok(())
}
