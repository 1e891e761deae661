// Appends rows of KV whose elements are stored as they are.
const SCALE_QUADS = 0u;

fn scale_of(largest: u32) -> u32 {
    return 0u;
}

fn narrow_scaled(v: vec4<f32>, scale: u32) -> Quad {
    return narrow(v);
}

fn scale_quad(scale: u32) -> Quad {
    return Quad();
}
