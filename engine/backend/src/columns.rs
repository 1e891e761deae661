//! Columns of a tensor out of its bytes, for devices that read from the first wanted element to the last at once.

use std::ops::Range;

/// Appends the elements of columns `cols` in `bytes`: f32 of a tensor with rows of `stride`, from its element `at` on.
pub fn take_columns(stride: usize, cols: &Range<usize>, mut at: usize, bytes: &[u8], out: &mut Vec<f32>) {
    let mut left = bytes.as_chunks::<4>().0;
    while !left.is_empty() {
        let column = at % stride;
        let (row, rest) = left.split_at(left.len().min(stride - column));
        let within = |end: usize| end.clamp(column, column + row.len()) - column;
        out.extend(row[within(cols.start)..within(cols.end)].iter().map(|b| f32::from_le_bytes(*b)));
        at += row.len();
        left = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wanted_columns_are_taken_from_pieces_of_any_size() {
        let stride = 5;
        for (rows, cols) in [(0..4, 0..5), (1..3, 0..2), (0..3, 2..4), (2..3, 4..5), (1..4, 1..5)] {
            let (first, end) = (rows.start * stride + cols.start, (rows.end - 1) * stride + cols.end);
            let element = |i: usize| f32::from_bits(0x4000_0000 + u32::try_from(i).unwrap());
            let bytes: Vec<u8> = (first..end).flat_map(|i| element(i).to_le_bytes()).collect();
            let row = |r: usize| cols.clone().map(move |c| element(r * stride + c));
            let wanted: Vec<f32> = rows.clone().flat_map(row).collect();
            for piece in [1, 2, 3, 7, 100] {
                let (mut out, mut at) = (Vec::new(), first);
                for bytes in bytes.chunks(4 * piece) {
                    take_columns(stride, &cols, at, bytes, &mut out);
                    at += bytes.len() / 4;
                }
                assert_eq!(out, wanted, "rows {rows:?}, columns {cols:?}, pieces of {piece}");
            }
        }
    }
}
