// Formats whose items are 32 elements in a row.
fn quad_of(i: u32, j: u32) -> u32 {
    return i * ITEM + j;
}
