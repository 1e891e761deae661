// Four f16 elements, two to a word, for adapters with f16 in shaders.
alias Quad = vec2<u32>;

fn widen(q: Quad) -> vec4<f32> {
    return vec4<f32>(vec2<f32>(bitcast<vec2<f16>>(q.x)), vec2<f32>(bitcast<vec2<f16>>(q.y)));
}
//#include round_f16
