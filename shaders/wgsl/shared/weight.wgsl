// A weight of plain elements. The including file binds `weight: array<Quad>`.
//#include dtype
fn weight_quad(i: u32) -> vec4<f32> {
    return widen(weight[i]);
}

// An item is what a lane takes at once in a product of few rows: ITEM quads of a row, the first of whose items has the number of
// its first quad over ITEM. Quad j of item i is quad quad_of(i, j) of the row of x.
const ITEM = 1u;

struct Item {
    quad: Quad,
}

fn item(i: u32) -> Item {
    return Item(weight[i]);
}

fn quad_of(i: u32, j: u32) -> u32 {
    return i;
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    return dot(widen(own.quad), x[0]);
}
