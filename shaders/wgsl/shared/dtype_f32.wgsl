// Four elements of an f32 weight or KV store.
alias Quad = vec4<f32>;

fn widen(q: Quad) -> vec4<f32> {
    return q;
}

fn narrow(v: vec4<f32>) -> Quad {
    return v;
}
