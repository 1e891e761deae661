//! The results as Markdown tables, beside the papers' values.

use super::cluster::SETUPS;
use super::context::contexts;
use super::measure::System;
use super::migration::{PUBLISHED, PUBLISHED_OVERHEADS};
use super::model::{CurvePoint, FIGURE_7_BEST, FIGURE_7_START};
use super::readings::Readings;
use super::serving::Compared;
use super::suite::Results;
use std::fmt::Write as _;

/// v2 §7.3.
const AGAINST_MULTI: &str = "1.35 to 1.73";
const AGAINST_SINGLE: &str = "1.4 to 3.4";
/// v1 §6.2, by share of long requests.
const DATASETS: [(&str, &str); 3] = [("1 %", "1.4 to 2.4"), ("10 %", "1.1 to 1.4"), ("30 %", "1.03 to 1.3")];

/// All tables.
#[must_use]
pub fn tables(results: &Results) -> String {
    let mut text = String::new();
    let size = &results.size;
    let _ = writeln!(
        text,
        "Seed {}; {} requests of an S trace ({} with generated contexts) per four instances, {} of an L trace, {} of a \
         dataset; {:.0} s in all.\n",
        size.seed, size.short, size.grown, size.long, size.dataset, results.seconds
    );
    longest(&mut text);
    ratios(&mut text, "Lagoon over vLLM-multi, outputs of at most 512 tokens", AGAINST_MULTI, &results.against_multi);
    ratios(
        &mut text,
        "Lagoon over vLLM-multi, two thirds of a context generated",
        AGAINST_MULTI,
        &results.against_multi_grown,
    );
    ratios(&mut text, "Lagoon over vLLM-single", AGAINST_SINGLE, &results.against_single);
    for ((long, published), part) in DATASETS.iter().zip(results.datasets.chunks(SETUPS.len())) {
        ratios(&mut text, &format!("Lagoon over vLLM-single, {long} long requests (v1)"), published, part);
    }
    studies(&mut text, results);
    bars(&mut text, results);
    migrations(&mut text, results);
    figure_7(&mut text, results);
    over_time(&mut text, results);
    text
}

fn longest(text: &mut String) {
    let _ = writeln!(text, "### Longest context, in tokens (published: 2x to 19x)\n");
    let _ = writeln!(text, "| setup | one instance | Lagoon | gain | vLLM-single |\n|---|---:|---:|---:|---:|");
    for setup in SETUPS {
        let c = contexts(setup);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.1}x | {} |",
            setup.multi().name(),
            c.multi_tokens,
            c.lagoon_tokens,
            c.gain(),
            c.single_tokens
        );
    }
    text.push('\n');
}

fn ratios(text: &mut String, title: &str, published: &str, all: &[Compared]) {
    let _ = writeln!(text, "### {title} (published: {published})\n");
    let _ = writeln!(
        text,
        "| workload | system | max tokens/s | Lagoon / it | mean batch | memory used | device busy | failed |\n\
         |---|---|---:|---:|---:|---:|---:|---:|"
    );
    for compared in all {
        for (system, _) in &compared.curves {
            let Some(best) = compared.best(*system) else { continue };
            let ratio = match (*system, compared.ratio(*system)) {
                (System::Lagoon, _) | (_, None) => String::new(),
                (_, Some(ratio)) => format!("{ratio:.2}"),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} | {ratio} | {:.0} | {:.0} % | {:.0} % | {} |",
                compared.comparison.name,
                system.name(),
                best.tokens_per_s,
                best.batch,
                100.0 * best.memory_used,
                100.0 * best.busy,
                best.failed + best.cut,
            );
        }
    }
    text.push('\n');
}

/// What is compared under each reading of dispatch.
const READINGS: [(&str, System, System); 3] = [
    ("as the papers wrote it, for both", System::LagoonFreeMemory, System::MultiFreeMemory),
    ("ours over the papers' vLLM-multi", System::Lagoon, System::MultiFreeMemory),
    ("ours, for both", System::Lagoon, System::Multi),
];

/// Their mean, and each in brackets if there are several.
fn mean_of(ratios: &[f64]) -> String {
    let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp();
    match ratios {
        [_] => format!("{mean:.2}"),
        _ => format!("{mean:.2} ({})", ratios.iter().map(|r| format!("{r:.2}")).collect::<Vec<_>>().join(", ")),
    }
}

/// The tables of v2 Figure 10 (a) under both readings of dispatch.
pub fn readings(text: &mut String, all: &[Readings]) {
    let _ = writeln!(text, "### Lagoon over vLLM-multi by dispatch (published: {AGAINST_MULTI})\n");
    let _ = writeln!(text, "| workload | dispatch | goodput | throughput under load |\n|---|---|---:|---:|");
    for panel in all {
        for (name, over, under) in READINGS {
            let goodput = mean_of(&panel.goodput_ratios(over, under));
            let throughput = mean_of(&panel.throughput_ratios(over, under));
            let _ = writeln!(text, "| {} | {name} | {goodput} | {throughput} |", panel.name);
        }
    }
    let _ = writeln!(text, "\n| workload | system | goodput, requests/s | tokens/s under load | met there | failed |");
    let _ = writeln!(text, "|---|---|---:|---:|---:|---:|");
    let join = |values: Vec<String>| values.join(" / ");
    for panel in all {
        for ((system, found), (_, loaded)) in panel.found.iter().zip(&panel.loaded) {
            let rates = join(found.iter().map(|f| format!("{:.2}", f.rate)).collect());
            let tokens = join(loaded.iter().map(|m| format!("{:.0}", m.tokens_per_s)).collect());
            let met = join(loaded.iter().map(|m| format!("{:.0} %", 100.0 * m.met)).collect());
            let failed: usize = loaded.iter().map(|m| m.failed + m.cut).sum();
            let _ = writeln!(text, "| {} | {} | {rates} | {tokens} | {met} | {failed} |", panel.name, system.name());
        }
    }
    text.push('\n');
}

/// Every search and loaded run as CSV.
#[must_use]
pub fn readings_csv(all: &[Readings]) -> String {
    let mut text = String::from(
        "workload,system,seed_number,goodput_requests_per_s,first_token_s_there,loaded_tokens_per_s,loaded_met,\
         loaded_preemptions,loaded_moved_blocks,loaded_busy,loaded_memory_used\n",
    );
    for panel in all {
        for ((system, found), (_, loaded)) in panel.found.iter().zip(&panel.loaded) {
            for (at, (f, m)) in found.iter().zip(loaded).enumerate() {
                let _ = writeln!(
                    text,
                    "\"{}\",\"{}\",{},{:.4},{:.3},{:.2},{:.4},{},{},{:.3},{:.3}",
                    panel.name,
                    system.name(),
                    at + 1,
                    f.rate,
                    f.at.first_token_s,
                    m.tokens_per_s,
                    m.met,
                    m.preemptions,
                    m.moved_blocks,
                    m.busy,
                    m.memory_used
                );
            }
        }
    }
    text
}

fn studies(text: &mut String, results: &Results) {
    let _ = writeln!(text, "### What parts of the engine cost: maximum tokens/s with departures from it\n");
    let names: Vec<&str> = results
        .studies
        .first()
        .map(|(_, all)| all.iter().map(|c| c.comparison.name.as_str()).collect())
        .unwrap_or_default();
    let _ = writeln!(text, "| departure | {} |\n|---|{}", names.join(" | "), "---:|".repeat(names.len()));
    for (name, all) in &results.studies {
        let values: Vec<String> =
            all.iter().map(|c| format!("{:.0}", c.max_tokens_per_s(System::Lagoon).unwrap_or(0.0))).collect();
        let _ = writeln!(text, "| {name} | {} |", values.join(" | "));
    }
    text.push('\n');
}

fn bars(text: &mut String, results: &Results) {
    let _ =
        writeln!(text, "### Throughput of the largest batch of one length, tokens/s (published: 1.4x to 5.3x at 1k)\n");
    let _ = writeln!(text, "| setup | context | Lagoon | vLLM-multi | vLLM-single | Lagoon / single |");
    let _ = writeln!(text, "|---|---:|---:|---:|---:|---:|");
    for bars in results.bars.chunks(3) {
        let value = |system| bars.iter().find(|b| b.system == system).map(|b| &b.measured).filter(|m| m.finished > 0);
        let show = |system| value(system).map_or("too long".to_owned(), |m| format!("{:.0}", m.tokens_per_s));
        let (Some(lagoon), Some(single)) = (value(System::Lagoon), value(System::Single)) else { continue };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.2} |",
            bars[0].setup.multi().name(),
            bars[0].context_tokens,
            show(System::Lagoon),
            show(System::Multi),
            show(System::Single),
            lagoon.tokens_per_s / single.tokens_per_s
        );
    }
    text.push('\n');
}

fn migrations(text: &mut String, results: &Results) {
    let _ = writeln!(text, "### Live migration (v1 Figure 9)\n");
    let _ = writeln!(
        text,
        "| prompt + output | Lagoon, s | of it waiting for the network, s | frames on it, s | migration: computing, s | overhead, s | times faster | \
         published | overheads' ratio |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    for (case, published) in results.migration.iter().zip(PUBLISHED) {
        let _ = writeln!(
            text,
            "| {}k + {}k | {:.0} | {:.2} | {:.2} | {:.0} | {:.0} | {:.2} | {published} | {:.0} (published: \
             {PUBLISHED_OVERHEADS}) |",
            case.prompt / 1000,
            case.output / 1000,
            case.lagoon_s,
            case.waiting_s,
            case.communication_s,
            case.compute_s,
            case.migration_s,
            case.speedup(),
            case.migration_s / case.communication_s
        );
    }
    text.push('\n');
}

fn figure_7(text: &mut String, results: &Results) {
    let _ = writeln!(text, "### Throughput against blocks moved, tokens/s (v2 Figure 7)\n");
    let _ = writeln!(text, "| model | nothing moved | best | blocks at the best |\n|---|---:|---:|---:|");
    let _ = writeln!(text, "| published | {FIGURE_7_START:.0} | {:.0} | {} |", FIGURE_7_BEST.1, FIGURE_7_BEST.0);
    for (name, points) in ["one batch (the papers' engine)", "two micro-batches (Lagoon)"].iter().zip(&results.figure_7)
    {
        let best = points.iter().max_by(|a, b| a.total().total_cmp(&b.total()));
        let (Some(first), Some(best)) = (points.first(), best) else { continue };
        let _ = writeln!(text, "| {name} | {:.0} | {:.0} | {} |", first.total(), best.total(), best.blocks);
    }
    text.push('\n');
}

/// The curves of Figure 7 as CSV.
#[must_use]
pub fn figure_7_csv(results: &Results) -> String {
    let mut text =
        String::from("engine,blocks,debtor_tokens_per_s,creditor_tokens_per_s,total,debtor_batch,creditor_batch\n");
    for (name, points) in ["one batch", "two micro-batches"].iter().zip(&results.figure_7) {
        for p in points {
            let CurvePoint { blocks, debtor, creditor, debtor_batch, creditor_batch } = p;
            let _ = writeln!(
                text,
                "{name},{blocks},{debtor:.1},{creditor:.1},{:.1},{debtor_batch},{creditor_batch}",
                p.total()
            );
        }
    }
    text
}

fn over_time(text: &mut String, results: &Results) {
    let _ = writeln!(text, "### DGFM (v1 Figure 10)\n");
    let _ = writeln!(text, "| DGFM | tokens/s | most blocks borrowed | mean time per token, s | failed |");
    let _ = writeln!(text, "|---|---:|---:|---:|---:|");
    for (name, m) in [("on", &results.dgfm.with), ("off", &results.dgfm.without)] {
        let _ = writeln!(
            text,
            "| {name} | {:.0} | {} | {:.2} | {} |",
            m.tokens_per_s,
            m.borrowed_max,
            m.latency_s_per_token,
            m.failed + m.cut
        );
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use crate::paper::dgfm;
    use crate::paper::suite::{self, Size};

    #[test]
    fn a_small_suite_gives_every_file() {
        let results = suite::run(Size::tiny(1), &|_, _, _| ());
        let dir = std::env::temp_dir().join(format!("lagoon-paper-{}", std::process::id()));
        suite::write(&results, &dir).unwrap();
        let readings = suite::run_readings(Size::tiny(1), "trace 0, LLaMA2-7B, 4xtp1", &|_, _, _| ());
        let mut text = String::new();
        super::readings(&mut text, &readings);
        assert!(text.matches("LLaMA2-7B, 4xtp1").count() == 7 && !text.contains("NaN"), "{text}");
        assert_eq!(super::readings_csv(&readings).lines().count(), 5);
        for name in ["contexts", "against-multi", "against-single", "debtor-creditor", "dgfm"] {
            for ext in ["csv", "svg"] {
                let text = std::fs::read_to_string(dir.join(format!("{name}.{ext}"))).unwrap();
                assert!(text.lines().count() > 3, "{name}.{ext}: {text}");
            }
        }
        let tables = std::fs::read_to_string(dir.join("tables.md")).unwrap();
        assert!(
            tables.contains("LLaMA2-7B, 32xtp1") && tables.contains("LLaMA2-70B") && !tables.contains("NaN"),
            "{tables}"
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_seed_repeats_a_run() {
        let run = || dgfm::over_time(12, 4.0, 3);
        let first = run();
        assert_eq!(first, run());
        assert!(first.with.finished == 12 && first.with.borrowed_max > 0, "{:?}", first.with);
    }
}
