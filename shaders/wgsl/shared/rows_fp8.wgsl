// Rows of KV (a token's key or value of one head) in 8 bits: E4M3 codes, and behind them a quad with the row's scale.
const SCALE_QUADS = 1u;

// Quad `quad` of the rows that begin at `at`: of the second one, if it lies beyond the first one (latent attention).
fn widen_row(at: u32, quad: u32) -> vec4<f32> {
    let second = quad >= params.code_quads;
    let row = at + select(0u, params.code_quads + 1u, second);
    let scale = bitcast<f32>(kv[row + params.code_quads]);
    return widen(kv[row + select(quad, quad - params.code_quads, second)]) * scale;
}
