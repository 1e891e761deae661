//! Throughput over time with DGFM on and off: four LLaMA2-13B tp2 instances, contexts of 1 to 480k (v1 §6.4, Figure 10).

use super::cluster::{Cluster, SETUPS};
use super::hardware::LLAMA2_13B;
use super::measure::{Job, Measured, run_all};
use super::run::Setting;
use super::traces::{Output, Workload, table_2};
use lagoon_plot::{Panel, Series};
use std::fmt::Write as _;

/// Dataset 10: 13B on 8 GPUs, 10 % of the requests long.
const DATASET: usize = 9;
/// Most generated tokens: enough for debts to outlive each other.
const OUTPUT_MAX: u32 = 512;

/// Results with and without DGFM.
#[derive(Clone, Debug, PartialEq)]
pub struct OverTime {
    pub with: Measured,
    pub without: Measured,
}

/// Offers `requests` requests at `rate` per second to the pool, with and without DGFM.
#[must_use]
pub fn over_time(requests: usize, rate: f64, seed: u64) -> OverTime {
    let workload: Workload = table_2()[DATASET];
    let setup = SETUPS[3];
    let cluster = Cluster::multi(LLAMA2_13B, setup.gpus, setup.tp);
    let job = |dgfm| Job {
        setting: Setting { dgfm, ..Setting::new(cluster, true, 256) },
        requests: workload.requests(requests, Output::AtMost(OUTPUT_MAX), rate, seed),
    };
    let mut measured = run_all(&[job(true), job(false)], &|_| ()).into_iter();
    OverTime { with: measured.next().unwrap_or_default(), without: measured.next().unwrap_or_default() }
}

impl OverTime {
    /// Throughput and borrowed blocks over time.
    #[must_use]
    pub fn panels(&self) -> [Panel; 2] {
        let of = |points: fn(&Measured) -> Vec<(f64, f64)>| {
            [("with DGFM", &self.with), ("without DGFM", &self.without)]
                .map(|(name, m)| Series { name: name.to_owned(), points: points(m) })
                .to_vec()
        };
        let panel = |title: &str, y_label: &str, series| Panel {
            title: title.to_owned(),
            x_label: "time, s".to_owned(),
            y_label: y_label.to_owned(),
            log_x: false,
            log_y: false,
            series,
        };
        [
            panel("throughput", "tokens/s", of(|m| m.over_time.clone())),
            panel("blocks that are borrowed", "rBlocks of 256 tokens", of(|m| m.borrowed.clone())),
        ]
    }

    /// Both runs as CSV.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let mut text = String::from("dgfm,time_s,tokens_per_s\n");
        for (name, m) in [("on", &self.with), ("off", &self.without)] {
            for (at, rate) in &m.over_time {
                let _ = writeln!(text, "{name},{at:.1},{rate:.2}");
            }
        }
        text
    }
}
