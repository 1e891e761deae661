// Rows of KV (a token's key or value of one head) whose elements are stored as they are.
const SCALE_QUADS = 0u;

// Quad `quad` of the rows that begin at `at`.
fn widen_row(at: u32, quad: u32) -> vec4<f32> {
    return widen(kv[at + quad]);
}
