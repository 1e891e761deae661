//! Crossover between shipping queries and moving KV. (v1 §4.6 argues for shipping; over a slow link moving is cheaper for
//! long generations.)

use super::{LinkView, ModelShape};

/// Cost of one sequence with remote KV, by shipping queries and by moving the KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crossover {
    /// Time per generated token with the KV at the creditor: a round trip and a row per layer, and micro attention.
    pub ship_us: f64,
    /// Time per generated token with the KV at the debtor.
    pub local_us: f64,
    /// Time of moving the KV to the debtor, once.
    pub move_us: f64,
    /// Generated tokens after which moving is cheaper; `None`: never.
    pub tokens: Option<f64>,
}

/// Compares shipping queries to `remote_tokens` tokens of KV with moving these. `creditor_us` and `debtor_us` are
/// attention times per token of context (`Rates::attention_us`). Overlap is ignored on both sides.
#[must_use]
pub fn crossover(
    shape: &ModelShape,
    link: LinkView,
    remote_tokens: u64,
    creditor_us: f64,
    debtor_us: f64,
) -> Crossover {
    let (layers, tokens) = (f64::from(shape.layers), as_f64(remote_tokens));
    let row = link.rtt_us + link.transfer_us(as_f64(shape.row_bytes));
    let ship_us = layers * row + tokens * creditor_us;
    let local_us = tokens * debtor_us;
    let move_us = link.rtt_us + link.transfer_us(tokens * as_f64(shape.token_bytes));
    let saved = ship_us - local_us;
    Crossover { ship_us, local_us, move_us, tokens: (saved > 0.0).then(|| move_us / saved) }
}

/// `n` as f64, exact up to 2^53, more than any count here.
pub(crate) fn as_f64(n: u64) -> f64 {
    let (high, low) = (u32::try_from(n >> 32).unwrap_or(u32::MAX), n & u64::from(u32::MAX));
    f64::from(high) * 4_294_967_296.0 + f64::from(u32::try_from(low).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_8B: ModelShape =
        ModelShape { layers: 32, block_tokens: 32, token_bytes: 131_072, row_bytes: 2 * 4096 * 2 + 132 };

    #[test]
    fn near_links_ship_and_far_links_move() {
        let nvlink = LinkView { rtt_us: 10.0, bytes_per_s: 3e11 };
        let ethernet = LinkView { rtt_us: 200.0, bytes_per_s: 1.25e8 };
        let tokens = |link| crossover(&LLAMA_8B, link, 10_000, 0.09, 0.09).tokens.unwrap();
        // Over NVLink the copy itself is cheap, over Ethernet it is not, and neither is a round trip per layer.
        assert!((tokens(nvlink) - (10.0 + 1_310_720_000.0 / 3e5) / (320.0 + 16_516.0 * 32.0 / 3e5)).abs() < 1e-9);
        assert!(tokens(ethernet) > 500.0);
        let far = LinkView { rtt_us: 20_000.0, ..ethernet };
        assert!(tokens(far) < tokens(ethernet) / 10.0, "a long round trip is paid per layer and token");
    }

    #[test]
    fn a_faster_creditor_may_keep_the_kv_for_ever() {
        let link = LinkView { rtt_us: 100.0, bytes_per_s: 1e9 };
        let c = crossover(&LLAMA_8B, link, 100_000, 0.01, 10.0);
        assert_eq!(c.tokens, None);
        assert!(c.ship_us < c.local_us);
    }

    #[test]
    fn counts_are_exact() {
        for n in [0, 1, u64::from(u32::MAX), 1 << 40, (1 << 53) - 1] {
            assert_eq!(format!("{:.0}", as_f64(n)), n.to_string());
        }
    }
}
