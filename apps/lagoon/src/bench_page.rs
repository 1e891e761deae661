//! The report of `lagoon bench` as an HTML page: figures as inline SVG, no scripts, nothing from a network.

use crate::bench_report::{Report, Row, Summary};
use anyhow::Context;
use lagoon_plot::{Panel, Series, figure};
use std::fmt::Write as _;
use std::path::Path;

/// Points of a curve, at most: a page with a million requests is still small.
const POINTS_MAX: usize = 500;
/// Intervals of the throughput over time.
const INTERVALS: usize = 60;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;color:#222}\
    h1{font-size:1.4rem}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;\
    text-align:right}td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}pre{background:#f5f5f5;padding:.5rem;\
    overflow:auto}";

/// Writes the page.
pub(crate) fn write(path: &Path, report: &Report, rows: &[Row]) -> anyhow::Result<()> {
    let page = page(report, rows)?;
    std::fs::write(path, page).with_context(|| format!("write the report {}", path.display()))
}

fn page(report: &Report, rows: &[Row]) -> anyhow::Result<String> {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>lagoon bench: {model}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{model} at {url}</h1>\n",
        model = escape(&report.model),
        url = escape(&report.url),
    );
    let summary = report.table();
    let _ = writeln!(out, "<pre>{}</pre>", escape(&summary));
    let _ = writeln!(
        out,
        "<table><tr><th>milliseconds</th><th>mean</th><th>p50</th><th>p90</th><th>p99</th><th>max</th></tr>"
    );
    for (name, summary) in report.latencies() {
        let Summary { mean, p50, p90, p99, max, .. } = summary;
        let _ = write!(out, "<tr><td>{name}</td>");
        for ms in [mean, p50, p90, p99, max] {
            let _ = write!(out, "<td>{ms:.2}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table>\n");
    out.push_str(&figure("requests that succeeded", &panels(report, rows), 3)?);
    let _ = write!(
        out,
        "\n<h2>Settings and results</h2>\n<pre>{}</pre>\n</body></html>\n",
        escape(&serde_json::to_string_pretty(report)?)
    );
    Ok(out)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn panel(title: &str, x_label: &str, y_label: &str, series: Vec<Series>) -> Panel {
    let (title, x_label, y_label) = (title.to_owned(), x_label.to_owned(), y_label.to_owned());
    Panel { title, x_label, y_label, log_x: false, log_y: false, series }
}

fn panels(report: &Report, rows: &[Row]) -> Vec<Panel> {
    let ttft: Vec<f64> = rows.iter().map(|row| row.ttft_ms).collect();
    let tpot: Vec<f64> = rows.iter().filter_map(|row| row.tpot_ms).collect();
    let e2e: Vec<f64> = rows.iter().map(|row| row.e2e_ms).collect();
    let over_time = |name: &str, of: fn(&Row) -> Option<f64>| {
        let mut points: Vec<(f64, f64)> = rows.iter().filter_map(|row| Some((row.start_s, of(row)?))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: name.to_owned(), points: thinned(points) }
    };
    let by_prompt = {
        let mut points: Vec<(f64, f64)> = rows.iter().map(|row| (f64_of(row.prompt_tokens), row.ttft_ms)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: "time to first token".to_owned(), points: thinned(points) }
    };
    vec![
        panel(
            "time to first token",
            "ms",
            "share of requests",
            cumulative("time to first token", ttft, report.slo_ttft_ms),
        ),
        panel(
            "time per output token",
            "ms",
            "share of requests",
            cumulative("time per token", tpot, report.slo_tpot_ms),
        ),
        panel("end to end", "ms", "share of requests", cumulative("end to end", e2e, None)),
        panel("by start", "s", "ms", vec![over_time("time to first token", |row| Some(row.ttft_ms))]),
        panel("throughput", "s", "generated tokens/s", vec![throughput(rows)]),
        panel("by prompt length", "tokens", "ms", vec![by_prompt]),
    ]
}

/// The cumulative distribution, with a vertical line at the objective.
fn cumulative(name: &str, mut values: Vec<f64>, objective: Option<f64>) -> Vec<Series> {
    values.sort_by(f64::total_cmp);
    let share = |at: usize| f64_of(at as u64 + 1) / f64_of(values.len() as u64);
    let points = thinned(values.iter().enumerate().map(|(at, value)| (*value, share(at))).collect());
    let line = objective.map(|ms| Series { name: "objective".to_owned(), points: vec![(ms, 0.0), (ms, 1.0)] });
    std::iter::once(Series { name: name.to_owned(), points }).chain(line).collect()
}

/// Tokens by second, each counted when its request ended: spread evenly from its first token to its end.
fn throughput(rows: &[Row]) -> Series {
    let end = rows.iter().map(|row| row.start_s + row.e2e_ms / 1e3).fold(0.0, f64::max);
    let width = (end / INTERVALS as f64).max(f64::MIN_POSITIVE);
    let mut tokens = [0.0; INTERVALS];
    for row in rows {
        let (from, to) = (row.start_s + row.ttft_ms / 1e3, row.start_s + row.e2e_ms / 1e3);
        for (at, sum) in tokens.iter_mut().enumerate() {
            let (low, high) = (at as f64 * width, (at + 1) as f64 * width);
            let overlap = (to.min(high) - from.max(low)).max(0.0);
            let share = if to > from { overlap / (to - from) } else { f64::from(u8::from(from >= low && from < high)) };
            *sum += share * f64_of(row.completion_tokens);
        }
    }
    let points = tokens.iter().enumerate().map(|(at, sum)| ((at as f64 + 0.5) * width, sum / width)).collect();
    Series { name: "generated".to_owned(), points }
}

#[allow(clippy::cast_precision_loss, reason = "counts under 2^52 are exact in f64")]
fn f64_of(count: u64) -> f64 {
    count as f64
}

/// Every n-th point, and the last.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let every = points.len().div_ceil(POINTS_MAX).max(1);
    let last = points.len().saturating_sub(1);
    points.into_iter().enumerate().filter(|(at, _)| at % every == 0 || *at == last).map(|(_, point)| point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        (0..1000u32)
            .map(|n| Row {
                start_s: f64::from(n) / 10.0,
                ttft_ms: 100.0 + f64::from(n % 50),
                tpot_ms: Some(20.0),
                e2e_ms: 1000.0,
                prompt_tokens: u64::from(n),
                completion_tokens: 10,
            })
            .collect()
    }

    #[test]
    fn a_page_is_whole_and_loads_nothing() {
        let report = Report {
            model: "a<b".to_owned(),
            url: "http://h".to_owned(),
            slo_ttft_ms: Some(120.0),
            ..Report::default()
        };
        let page = page(&report, &rows()).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert!(
            page.contains("a&lt;b") && !page.contains("a<b") && page.contains("<svg") && page.contains("objective")
        );
        assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("href="));
        assert!(page.len() < 400_000, "{}", page.len());
    }

    #[test]
    fn nothing_measured_is_a_page_too() {
        assert!(page(&Report::default(), &[]).unwrap().contains("<svg"));
    }

    #[test]
    fn all_tokens_are_in_the_throughput() {
        let series = throughput(&rows());
        let width = series.points[1].0 - series.points[0].0;
        let sum: f64 = series.points.iter().map(|(_, rate)| rate * width).sum();
        assert!((sum - 10_000.0).abs() < 1.0, "{sum}");
    }

    #[test]
    fn a_distribution_ends_at_one() {
        let series = cumulative("x", (0..2000u32).map(f64::from).collect(), None);
        assert!(series[0].points.len() <= POINTS_MAX + 1);
        assert_eq!(series[0].points.last(), Some(&(1999.0, 1.0)));
    }
}
