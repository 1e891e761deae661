//! Prompts and lengths of `lagoon bench` from a file of conversations, and lengths with a long tail.

use crate::api_client::ApiClient;
use crate::bench_trace::{Planned, Prompt};
use crate::progress::{self, Unit};
use anyhow::{Context, ensure};
use rand::seq::SliceRandom as _;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::Path;

/// Largest file, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// Fewest tokens of a prompt and of an answer that are used; shorter ones say nothing about a server.
const TOKENS_MIN: u32 = 4;
/// Spread of lengths with a long tail: one in a hundred is more than ten times the median.
const SIGMA: f64 = 1.0;
/// Largest length, in medians.
const MEDIANS_MAX: f64 = 32.0;

/// How lengths are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Lengths {
    /// All as --prompt-tokens and --max-tokens say.
    #[default]
    Fixed,
    /// Log-normal, with those as medians: one in a hundred is more than ten times as long, none more than 32 times.
    LongTail,
}

/// A length with a long tail.
fn long_tail(median: u32, random: &mut StdRng) -> u32 {
    // A normal deviate (Box and Muller); the uniform number is below 1, so the logarithm is finite.
    let (a, b): (f64, f64) = (random.random(), random.random());
    let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    let factor = (SIGMA * normal).exp().min(MEDIANS_MAX);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive; `as` saturates")]
    let length = (f64::from(median) * factor).round() as u32;
    length.max(1)
}

/// Gives planned requests lengths with a long tail, within a context of `context` tokens.
pub(crate) fn stretch(planned: &mut [Planned], context: Option<u32>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed ^ 0x6c6f_6e67);
    let context = context.unwrap_or(u32::MAX).max(2);
    for of in planned {
        of.output_tokens = long_tail(of.output_tokens, &mut random).min(context - 1);
        if let Prompt::Tokens(tokens) = &mut of.prompt {
            *tokens = long_tail(*tokens, &mut random).min(context - of.output_tokens);
        }
    }
}

/// A prompt with the answer that somebody gave.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    prompt: String,
    answer: String,
}

/// Replaces the prompts and lengths of planned requests by those of conversations in a file, drawn with the seed.
///
/// # Errors
/// If the file is not one of conversations, or none of them fits `context` tokens.
pub(crate) async fn fill(
    planned: &mut [Planned],
    path: &Path,
    (client, model): (&ApiClient, &str),
    (context, answer_max): (Option<u32>, Option<u32>),
    seed: u64,
) -> anyhow::Result<()> {
    let mut pairs = read(path).with_context(|| format!("read the conversations in {}", path.display()))?;
    pairs.shuffle(&mut StdRng::seed_from_u64(seed));
    let bar = progress::bar("tokenizing", planned.len() as u64, Unit::Requests);
    let mut drawn = Vec::new();
    for Pair { prompt, answer } in pairs {
        let (prompt_tokens, tokens) = (count(client, model, &prompt).await?, count(client, model, &answer).await?);
        let tokens = tokens.min(answer_max.unwrap_or(u32::MAX));
        let fits = context.is_none_or(|context| prompt_tokens.saturating_add(tokens) <= context);
        if prompt_tokens >= TOKENS_MIN && tokens >= TOKENS_MIN && fits {
            drawn.push((prompt, tokens));
            bar.inc(1);
        }
        if drawn.len() == planned.len() {
            break;
        }
    }
    ensure!(!drawn.is_empty(), "no conversation in {} fits the model's context", path.display());
    // A file with fewer of them is used again.
    for (of, (prompt, tokens)) in planned.iter_mut().zip(drawn.iter().cycle()) {
        (of.prompt, of.output_tokens) = (Prompt::Text(prompt.clone()), *tokens);
    }
    Ok(())
}

/// Tokens of a text, as the server counts them.
async fn count(client: &ApiClient, model: &str, text: &str) -> anyhow::Result<u32> {
    let reply = client.post("/tokenize", &json!({ "model": model, "prompt": text })).await.context(
        "ask the server for the length of a text\nhint: this needs POST /tokenize, which Lagoon and vLLM have",
    )?;
    let counted = reply["count"].as_u64().or_else(|| reply["tokens"].as_array().map(|tokens| tokens.len() as u64));
    Ok(u32::try_from(counted.context("the server's /tokenize gave no count")?).unwrap_or(u32::MAX))
}

fn read(path: &Path) -> anyhow::Result<Vec<Pair>> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= FILE_BYTES_MAX, "it is longer than {FILE_BYTES_MAX} bytes");
    parse(&text)
}

/// The first question and answer of each conversation: of ShareGPT (`conversations` of `from` and `value`) or OpenAI (`messages` of
/// `role` and `content`), as a JSON array or one object a line.
fn parse(text: &str) -> anyhow::Result<Vec<Pair>> {
    let hint = "hint: a JSON array, or one object a line, with `conversations` ({from, value}) or `messages` ({role, content})";
    let all: Vec<Value> = if text.trim_start().starts_with('[') {
        serde_json::from_str(text).context(hint)?
    } else {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        lines.map(serde_json::from_str).collect::<Result<_, _>>().context(hint)?
    };
    let pairs: Vec<Pair> = all.iter().filter_map(pair).collect();
    ensure!(!pairs.is_empty(), "none of its {} entries has a question and an answer\n{hint}", all.len());
    Ok(pairs)
}

fn pair(entry: &Value) -> Option<Pair> {
    let turns = entry["conversations"].as_array().or_else(|| entry["messages"].as_array())?;
    let text = |turn: &Value, speakers: &[&str]| {
        let speaker = turn["from"].as_str().or_else(|| turn["role"].as_str())?;
        let content = turn["value"].as_str().or_else(|| turn["content"].as_str())?;
        speakers.contains(&speaker).then(|| content.to_owned())
    };
    let asked = turns.iter().position(|turn| text(turn, &["human", "user"]).is_some())?;
    let prompt = text(&turns[asked], &["human", "user"])?;
    let answer = text(turns.get(asked + 1)?, &["gpt", "assistant", "chatgpt", "bing", "bard"])?;
    (!prompt.is_empty() && !answer.is_empty()).then_some(Pair { prompt, answer })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn conversations_are_read_in_both_shapes() {
        let pair = |prompt: &str, answer: &str| Pair { prompt: prompt.to_owned(), answer: answer.to_owned() };
        let sharegpt = r#"[{"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"}, {"from": "human", "value": "q2"}]}, {"conversations": [{"from": "gpt", "value": "a"}]}]"#;
        assert_eq!(parse(sharegpt).unwrap(), [pair("q", "a")]);
        let lines = "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}\n\n";
        assert_eq!(parse(&lines.repeat(2)).unwrap(), [pair("q", "a"), pair("q", "a")]);
        for wrong in ["[{}]", "[", "{\"messages\": []}", "x"] {
            assert!(format!("{:#}", parse(wrong).unwrap_err()).contains("hint: a JSON array"), "{wrong}");
        }
    }

    #[test]
    fn a_long_tail_has_the_median_and_the_tail() {
        let one = Planned { start: Duration::ZERO, prompt: Prompt::Tokens(100), output_tokens: 10 };
        let mut planned = vec![one; 20_000];
        stretch(&mut planned, Some(4000), 7);
        let mut prompts: Vec<u32> = planned
            .iter()
            .map(|of| match of.prompt {
                Prompt::Tokens(tokens) => tokens,
                Prompt::Text(_) => panic!("a text"),
            })
            .collect();
        assert!(
            planned.iter().zip(&prompts).all(|(of, prompt)| prompt + of.output_tokens <= 4000 && of.output_tokens > 0)
        );
        prompts.sort_unstable();
        let (median, high) = (prompts[10_000], prompts[19_800]);
        assert!((90..110).contains(&median) && (850..1250).contains(&high), "{median}, {high}");
        assert!(*prompts.last().unwrap() <= 3200);
        let mut again = vec![Planned { start: Duration::ZERO, prompt: Prompt::Tokens(100), output_tokens: 10 }; 20_000];
        stretch(&mut again, Some(4000), 7);
        assert_eq!(planned, again);
    }
}
