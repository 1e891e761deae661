//! `--metrics-compat vllm`: an instance's metrics also under the names that vLLM gives them, for dashboards and autoscalers.

use crate::exposition::{Exposition, Family, FamilyKind, Sample};

/// Metrics that vLLM has under another name: ours, vLLM's, and its help.
const RENAMED: &[(&str, &str, &str)] = &[
    ("lagoon_requests_running", "vllm:num_requests_running", "Sequences in the batch."),
    ("lagoon_requests_waiting", "vllm:num_requests_waiting", "Sequences that wait to be processed."),
    ("lagoon_prompt_tokens_total", "vllm:prompt_tokens_total", "Prompt tokens of accepted requests."),
    ("lagoon_generation_tokens_total", "vllm:generation_tokens_total", "Generated tokens."),
    ("lagoon_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "Time to first token in seconds."),
    ("lagoon_time_between_tokens_seconds", "vllm:inter_token_latency_seconds", "Time between tokens in seconds."),
    ("lagoon_time_between_tokens_seconds", "vllm:time_per_output_token_seconds", "Time between tokens in seconds."),
    (
        "lagoon_sequence_seconds",
        "vllm:e2e_request_latency_seconds",
        "Time from submission to the last token in seconds.",
    ),
];

/// Adds vLLM's names to the metrics of one instance, each with the label `model_name`. Nothing is added to metrics that name no
/// model, or that have vLLM's names already.
pub fn add(to: &mut Exposition) {
    let model = to
        .families
        .get("lagoon_model_info")
        .and_then(|family| family.samples.first()?.label("model").map(str::to_owned));
    let Some(model) = model.filter(|_| !to.families.contains_key(RENAMED[0].1)) else { return };
    let labelled = |mut sample: Sample| {
        sample.labels.insert(0, ("model_name".to_owned(), model.clone()));
        sample
    };
    let derived = [gauges(to), counters(to)].concat();
    for (name, kind, help, samples) in derived {
        to.insert(name, kind, help, samples.into_iter().map(labelled).collect());
    }
    for (ours, theirs, help) in RENAMED {
        let Some(Family { kind, samples, .. }) = to.families.get(*ours).cloned() else { continue };
        to.insert(theirs, kind, help, samples.into_iter().map(labelled).collect());
    }
}

type Derived = (&'static str, FamilyKind, &'static str, Vec<Sample>);

fn samples<'a>(of: &'a Exposition, name: &str) -> impl Iterator<Item = &'a Sample> {
    of.families.get(name).into_iter().flat_map(|family| &family.samples)
}

/// The share of KV memory in use.
fn gauges(of: &Exposition) -> Vec<Derived> {
    let one = |name| samples(of, name).next().map(Sample::number);
    let used = one("lagoon_kv_blocks_free").zip(one("lagoon_kv_blocks")).map(|(free, all)| 1.0 - free / all.max(1.0));
    let used = used.map(|share| Sample::new(Vec::new(), share)).into_iter().collect();
    vec![("vllm:kv_cache_usage_perc", FamilyKind::Gauge, "KV-cache usage. 1 means 100 percent usage.", used)]
}

fn counters(of: &Exposition) -> Vec<Derived> {
    // Our outcomes by vLLM's reasons.
    let reasons = [
        ("stop", &["stop"][..]),
        ("length", &["length", "kv_capacity"]),
        ("abort", &["cancelled"]),
        ("error", &["failed"]),
    ];
    let ended = |outcomes: &[&str]| -> f64 {
        let is_of = |sample: &&Sample| sample.label("outcome").is_some_and(|outcome| outcomes.contains(&outcome));
        samples(of, "lagoon_sequences_total").filter(is_of).map(Sample::number).fold(0.0, |sum, count| sum + count)
    };
    let ended = reasons.map(|(reason, outcomes)| {
        Sample::new(vec![("finished_reason".to_owned(), reason.to_owned())], ended(outcomes))
    });
    let preemptions: Vec<f64> = samples(of, "lagoon_preemptions_total").map(Sample::number).collect();
    let preemptions = (!preemptions.is_empty()).then(|| Sample::new(Vec::new(), preemptions.iter().sum::<f64>()));
    let prefix = |state: &str| {
        let tokens = samples(of, "lagoon_prefix_cache_tokens_total");
        tokens
            .filter(|sample| sample.label("state") == Some(state))
            .map(|s| Sample::new(Vec::new(), &s.value))
            .collect()
    };
    vec![
        ("vllm:request_success_total", FamilyKind::Counter, "Sequences that have ended, by reason.", ended.into()),
        ("vllm:num_preemptions_total", FamilyKind::Counter, "Preemptions.", preemptions.into_iter().collect()),
        (
            "vllm:prefix_cache_queries_total",
            FamilyKind::Counter,
            "Prompt tokens looked up in the prefix cache.",
            prefix("looked_up"),
        ),
        (
            "vllm:prefix_cache_hits_total",
            FamilyKind::Counter,
            "Prompt tokens found in the prefix cache.",
            prefix("hit"),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllms_names_have_our_values_and_the_model() {
        let ours = "# TYPE lagoon_model_info gauge\nlagoon_model_info{model=\"m\"} 1\n\
            # TYPE lagoon_kv_blocks gauge\nlagoon_kv_blocks 8\n# TYPE lagoon_kv_blocks_free gauge\nlagoon_kv_blocks_free 6\n\
            # TYPE lagoon_requests_running gauge\nlagoon_requests_running 3\n\
            # TYPE lagoon_preemptions_total counter\nlagoon_preemptions_total{kind=\"swap\"} 2\n\
            lagoon_preemptions_total{kind=\"recompute\"} 3\n\
            # TYPE lagoon_sequences_total counter\nlagoon_sequences_total{outcome=\"length\"} 4\n\
            lagoon_sequences_total{outcome=\"kv_capacity\"} 1\nlagoon_sequences_total{outcome=\"cancelled\"} 7\n\
            # TYPE lagoon_prefix_cache_tokens_total counter\nlagoon_prefix_cache_tokens_total{state=\"hit\"} 16\n\
            # TYPE lagoon_sequence_seconds histogram\nlagoon_sequence_seconds_bucket{le=\"+Inf\"} 2\n\
            lagoon_sequence_seconds_sum 0.5\nlagoon_sequence_seconds_count 2\n";
        let mut all = Exposition::parse(ours).unwrap();
        add(&mut all);
        let text = all.text();
        for line in [
            "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25",
            "vllm:num_requests_running{model_name=\"m\"} 3",
            "vllm:num_preemptions_total{model_name=\"m\"} 5",
            "vllm:request_success_total{model_name=\"m\",finished_reason=\"length\"} 5",
            "vllm:request_success_total{model_name=\"m\",finished_reason=\"abort\"} 7",
            "vllm:request_success_total{model_name=\"m\",finished_reason=\"stop\"} 0",
            "vllm:prefix_cache_hits_total{model_name=\"m\"} 16",
            "vllm:e2e_request_latency_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 2",
            "# TYPE vllm:e2e_request_latency_seconds histogram",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert_eq!(Exposition::parse(&text).unwrap().text(), text);
        let before = all.clone();
        add(&mut all);
        assert_eq!(all, before, "names that are there already stay");
        let mut none = Exposition::parse("# TYPE lagoon_requests_running gauge\nlagoon_requests_running 3\n").unwrap();
        add(&mut none);
        assert_eq!(none.families.len(), 1);
    }
}
