// Quad `i` of a weight of plain elements. The including file binds `weight: array<Quad>`.
//#include dtype
fn weight_quad(i: u32) -> vec4<f32> {
    return widen(weight[i]);
}
