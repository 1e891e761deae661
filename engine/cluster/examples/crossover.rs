//! From how many generated tokens on it is cheaper to have moved the KV than to ship queries to it, for an 8B model:
//! `cargo run --release -p lagoon-cluster --example crossover`.
#![allow(clippy::print_stdout, reason = "an example")]

use lagoon_cluster::perf::{LinkView, ModelShape, crossover};

fn main() {
    let shape = ModelShape { layers: 32, block_tokens: 32, token_bytes: 131_072, row_bytes: 2 * 4_096 * 2 + 132 };
    // Attention on an A100: 128 KiB of KV a token at 1.5 TB/s.
    let attention_us = 131_072.0 / 1.5e6;
    let links = [
        ("NVLink", 10.0, 3e11),
        ("InfiniBand 200G", 5.0, 2.4e10),
        ("Ethernet 10G", 50.0, 1.2e9),
        ("Ethernet 1G", 200.0, 1.2e8),
        ("another region", 30_000.0, 1.2e8),
    ];
    println!("link,remote_tokens,ship_us_per_token,local_us_per_token,move_ms,crossover_tokens");
    for (name, rtt_us, bytes_per_s) in links {
        for tokens in [1_000, 10_000, 100_000] {
            let c = crossover(&shape, LinkView { rtt_us, bytes_per_s }, tokens, attention_us, attention_us);
            let at = c.tokens.map_or_else(|| "never".to_owned(), |t| format!("{t:.0}"));
            println!("{name},{tokens},{:.0},{:.0},{:.1},{at}", c.ship_us, c.local_us, c.move_us / 1e3);
        }
    }
}
