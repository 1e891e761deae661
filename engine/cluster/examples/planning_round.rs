//! Time of a planning round by the number of instances: `cargo run --release -p lagoon-cluster --example planning_round`.
//!
//! Two kinds of pools: `mixed` (batches of up to 270, one instance in five holds a long request), and `long` (every instance
//! holds one to three long requests and may be a debtor, the most work there is).
//!
//! Columns: pool, instances, requests, orders of the round, milliseconds (median of five, one core), memory of the view in MiB
//! per `size_of` (map nodes not counted).
#![allow(clippy::print_stdout, reason = "an example")]

use lagoon_cluster::planner::synthetic::Synthetic;
use lagoon_cluster::{InstanceView, Planner, PlannerConfig, RequestView};
use std::time::Instant;

fn main() {
    println!("pool,instances,requests,orders,ms,view_mib");
    for (name, long_every, instances) in
        ["mixed", "long"].into_iter().zip([5, 1]).flat_map(|(n, l)| [10, 100, 1_000, 10_000].map(|i| (n, l, i)))
    {
        let pool =
            Synthetic { instances, requests: 270, blocks: 20_000, long_every, kv_every: 20, remote_every: 50, seed: 1 };
        let mut view = pool.view();
        let requests: usize = view.instances.values().map(|i| i.requests.len()).sum();
        let planner = Planner::new(PlannerConfig::default());
        let mut orders = 0;
        let mut times: Vec<f64> = (0..5)
            .map(|round| {
                view.now_ms += round;
                let start = Instant::now();
                orders = planner.plan(&view).orders.len();
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let bytes = view.instances.len() * size_of::<InstanceView>() + requests * size_of::<RequestView>();
        println!("{name},{instances},{requests},{orders},{:.3},{}", times[2], bytes >> 20);
    }
}
