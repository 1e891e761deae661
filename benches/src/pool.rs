//! A pool of equal instances for benchmarks: a gManager and `lagoon serve` processes that know each other.

use crate::cluster::{Lagoon, Process, TIMEOUT, get, number, request, status};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::io::Read as _;
use std::time::{Duration, Instant};

/// Tokens of an rBlock.
pub const BLOCK_TOKENS: u32 = 32;

/// The processes; they end when it is dropped.
#[derive(Debug)]
pub struct Pool {
    pub instances: Vec<Process>,
    _gmanager: Process,
}

/// A prompt's answer.
#[derive(Debug)]
pub struct Reply {
    /// From the request's first byte to the answer's last.
    pub ms: f64,
    pub text: String,
    pub cached_tokens: u64,
}

impl Pool {
    /// Starts `count` instances of one thread on the host, each with memory for `kv_tokens` and with `flags`, and waits until each knows
    /// the memory of all.
    ///
    /// # Errors
    /// If one does not start or the pool does not form in time.
    pub fn start(lagoon: &Lagoon, count: usize, kv_tokens: u32, flags: &[String]) -> Result<Self> {
        let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
        let quic = gmanager.announced("quic")?.to_owned();
        let instance = |n: usize| {
            let name = format!("i{n}");
            let own = [
                "serve".to_owned(),
                lagoon.model.display().to_string(),
                format!("--gmanager={quic}"),
                format!("--name={name}"),
                format!("--kv-tokens={kv_tokens}"),
                format!("--block-tokens={BLOCK_TOKENS}"),
            ];
            let rest = ["--http=127.0.0.1:0", "--backend=cpu", "--threads=1", "--calibrate=off"];
            lagoon.start(&name, &[&own[..], &rest.map(str::to_owned), flags].concat())
        };
        let instances = (0..count).map(instance).collect::<Result<Vec<_>>>()?;
        let pool = Self { instances, _gmanager: gmanager };
        let others = u64::from(kv_tokens / BLOCK_TOKENS) * (count as u64 - 1);
        for at in 0..count {
            let since = Instant::now();
            while number(&pool.status(at)?, "/pool_blocks_total")? <= others {
                ensure!(since.elapsed() < TIMEOUT, "the pool does not form");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(pool)
    }

    /// The address of an instance's HTTP server.
    ///
    /// # Errors
    /// If it announced none.
    pub fn http(&self, at: usize) -> Result<&str> {
        self.instances[at].announced("http")
    }

    /// The status of an instance.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn status(&self, at: usize) -> Result<Value> {
        status(self.http(at)?)
    }

    /// The sum over `living` instances and all labels of a metric, named as in the page.
    ///
    /// # Errors
    /// If one does not answer.
    pub fn sum(&self, metric: &str, living: impl IntoIterator<Item = usize>) -> Result<f64> {
        let mut sum = 0.0;
        for at in living {
            let text = get(self.http(at)?, "/metrics")?;
            let lines = text.lines().filter_map(|line| line.strip_prefix(metric));
            let lines = lines.filter(|rest| rest.starts_with(['{', ' ']));
            sum += lines.filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
        }
        Ok(sum)
    }

    /// Bytes of frames and KV that `living` instances have sent, in MiB.
    ///
    /// # Errors
    /// See [`Self::sum`].
    pub fn sent_mib(&self, living: impl IntoIterator<Item = usize>) -> Result<f64> {
        Ok(self.sum("lagoon_wire_bytes_sent_total", living)? / f64::from(1 << 20))
    }

    /// Has an instance answer a prompt with `max_tokens` tokens.
    ///
    /// # Errors
    /// If it answers with an error, or not in time.
    pub fn ask(&self, at: usize, prompt: &[u32], max_tokens: u32) -> Result<Reply> {
        let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true });
        let begun = Instant::now();
        let mut text = String::new();
        request(self.http(at)?, "POST /v1/completions", &body.to_string())?.read_to_string(&mut text)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
        let reply: Value = serde_json::from_str(body).with_context(|| format!("an answer: {body:?}"))?;
        let text = reply["choices"][0]["text"].as_str().with_context(|| format!("no answer: {reply}"))?.to_owned();
        let cached_tokens = number(&reply, "/usage/prompt_tokens_details/cached_tokens")?;
        Ok(Reply { ms, text, cached_tokens })
    }
}

/// Token ids that a seed determines, none of them special.
pub fn tokens(count: u32, seed: u32) -> Vec<u32> {
    let token = |i: u32| 5 + (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503).wrapping_add(i >> 3)) % 1_000;
    (0..count).map(token).collect()
}
