//! Time of a planning round by the number of instances: `cargo run --release -p lagoon-cluster --example planning_round`.
//!
//! Columns: instances, requests, orders of the round, milliseconds (median of five, one core), memory of the view in MiB
//! per `size_of` (map nodes not counted).
#![allow(clippy::print_stdout, reason = "an example")]

use lagoon_cluster::planner::synthetic::Synthetic;
use lagoon_cluster::{InstanceView, Planner, PlannerConfig, RequestView};
use std::time::Instant;

fn main() {
    println!("instances,requests,orders,ms,view_mib");
    for instances in [10, 100, 1_000, 10_000] {
        let pool = Synthetic {
            instances,
            requests: 200,
            blocks: 20_000,
            long_every: 5,
            kv_every: 20,
            remote_every: 50,
            seed: 1,
        };
        let view = pool.view();
        let requests: usize = view.instances.values().map(|i| i.requests.len()).sum();
        let planner = Planner::new(PlannerConfig::default());
        let mut orders = 0;
        let mut times: Vec<f64> = (0..5)
            .map(|_| {
                let start = Instant::now();
                orders = planner.plan(&view).orders.len();
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let bytes = view.instances.len() * size_of::<InstanceView>() + requests * size_of::<RequestView>();
        println!("{instances},{requests},{orders},{:.3},{}", times[2], bytes >> 20);
    }
}
