// Four f16 elements, two to a word.
alias Quad = vec2<u32>;

fn widen(q: Quad) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(q.x), unpack2x16float(q.y));
}
//#include round_f16
