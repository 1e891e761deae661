// INT4, four blocks of RUNS * 32 elements in 1 + 4 * RUNS quads: their headers, an f32 whose low 8 bits are the zero point and the
// others the scale, then the blocks' codes in runs of 32 elements. Byte j of a run's has element j in its low half and element
// j + 16 in its high half.
//#include bytes
//#include runs
const RUNS = ${RUNS}u;
const GROUP = 1u + 4u * RUNS;

struct Item {
    codes: vec4<u32>,
    scale: f32,
    zero: f32,
}

fn item(i: u32) -> Item {
    let base = i / (4u * RUNS) * GROUP;
    let header = weight[base][i / RUNS % 4u];
    return Item(weight[base + 1u + i % (4u * RUNS)], bitcast<f32>(header & 0xffffff00u), f32(header & 255u));
}

fn item_dot(own: Item, x: array<vec4<f32>, ITEM>) -> f32 {
    return own.scale * nibbles_dot(own.codes, own.zero, x);
}

fn weight_quad(i: u32) -> vec4<f32> {
    let run = item(i / 8u);
    return run.scale * codes_of(run.codes[i % 4u], i / 4u % 2u * 4u, 15u, run.zero);
}
