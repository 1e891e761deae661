//! How a weight lies in device memory ([`WeightLayout`]).
//!
//! Invariants: a weight is a list of segments by rows, each in one encoding; consecutive parts of one format share a segment, and
//! segments lie one behind the other. Rows begin at multiples of 16 bytes: plain ones with zeros between ([`weight_ld`]), packed
//! ones in planes ([`super::packed`]). Vectors are plain.

use super::experts::{ExpertRows, ExpertWeight};
use super::packed::{Encoding, PackedRows};
use super::weight_ld;
use lagoon_backend::{DeviceError, WeightFormat, WeightSource};
use lagoon_types::DType;

/// Consecutive rows of a weight in one encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub row0: usize,
    pub rows: usize,
    pub encoding: Encoding,
    /// Of the first row.
    pub address: u64,
    pub row_bytes: usize,
}

impl Segment {
    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }
}

/// Segments of a weight.
#[derive(Clone, Debug)]
pub struct WeightLayout {
    segments: Vec<Segment>,
    cols: usize,
    /// See [`PackedRows::factor`].
    factor: f32,
}

impl WeightLayout {
    /// The layout of a weight at address 0.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a format without kernels, and for rows that are no whole blocks.
    pub fn new(source: &WeightSource) -> Result<Self, DeviceError> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut row0 = 0;
        for part in source.parts.iter().filter(|part| part.rows > 0) {
            let unsupported = |why: &str| DeviceError::Unsupported(format!("a weight in {}{why}", part.format));
            let encoding = Encoding::of(part.format).ok_or_else(|| unsupported(""))?;
            let row_bytes = encoding.row_bytes(source.cols);
            let row_bytes = row_bytes
                .ok_or_else(|| unsupported(&format!(": rows of {} elements are no whole blocks", source.cols)))?;
            match segments.last_mut().filter(|last| last.encoding == encoding) {
                Some(last) => last.rows += part.rows,
                None => segments.push(Segment { row0, rows: part.rows, encoding, address: 0, row_bytes }),
            }
            row0 += part.rows;
        }
        let mut layout = Self { segments, cols: source.cols, factor: 1.0 };
        layout.place(0);
        Ok(layout)
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(Segment::bytes).sum()
    }

    /// Moves the weight to this address.
    pub fn place(&mut self, address: u64) {
        let mut at = address;
        for segment in &mut self.segments {
            segment.address = at;
            at += segment.bytes() as u64;
        }
    }

    /// Sets the divisor of packed elements in f16; see [`super::packed::factor_of`].
    pub fn set_factor(&mut self, factor: f32) {
        self.factor = factor;
    }

    /// Its segments, in the order of their rows.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The rows of a segment, if they are packed.
    #[must_use]
    pub fn packed(&self, segment: &Segment) -> Option<PackedRows> {
        let Encoding::Packed(packed) = segment.encoding else { return None };
        Some(PackedRows::flat(packed, segment.address, number(segment.rows), number(self.cols), self.factor))
    }

    /// The only segment: of a vector, of a table, of heads' matrices.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for rows of several formats.
    pub fn only(&self) -> Result<&Segment, DeviceError> {
        match &self.segments[..] {
            [segment] => Ok(segment),
            _ => Err(DeviceError::Unsupported("a table, or matrices of heads, in several formats".to_owned())),
        }
    }

    /// Address and type of vectors.
    ///
    /// # Panics
    /// If they are packed: only matrices are.
    #[must_use]
    pub fn plain(&self) -> (u64, DType) {
        match &self.segments[..] {
            [Segment { encoding: Encoding::Plain(dtype), address, .. }] => (*address, *dtype),
            segments => panic!("vectors are stored element by element, not as {segments:?}"),
        }
    }

    /// The weight as that of `count` experts.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where experts differ in their formats.
    pub fn of_experts(&self, count: usize) -> Result<ExpertWeight, DeviceError> {
        // One segment has all experts; several are those of each expert in turn.
        let (each, share) = match self.segments.len() {
            1 => (1, count),
            several => (several / count, 1),
        };
        let alike = |all: &[Segment]| {
            let of = |segment: &Segment| (segment.rows, segment.encoding);
            all.len() == each && all.iter().map(of).eq(self.segments[..each].iter().map(of))
        };
        if !(1..=2).contains(&each) || !self.segments.chunks(each).all(alike) {
            return Err(DeviceError::Unsupported("experts of one layer in different formats".to_owned()));
        }
        let first = &self.segments[..each];
        let expert_bytes: usize = first.iter().map(|segment| segment.bytes() / share).sum();
        let of = |segment: &Segment| ExpertRows {
            address: segment.address,
            encoding: segment.encoding,
            rows: number(segment.rows / share),
            expert_bytes: expert_bytes as u64,
            factor: if matches!(segment.encoding, Encoding::Packed(_)) { self.factor } else { 1.0 },
        };
        Ok([first.first().map(of), first.get(1).map(of)])
    }
}

/// Appends rows of `cols` elements to `out`, as the device has them.
///
/// # Panics
/// If the format has no kernels, or `rows` are no whole rows.
pub fn arrange(format: WeightFormat, cols: usize, rows: &[u8], out: &mut Vec<u8>) {
    let given = format.bytes(cols).expect("whole blocks");
    match Encoding::of(format).expect("a format with kernels") {
        Encoding::Packed(packed) => packed.arrange(rows, given, out),
        Encoding::Plain(dtype) => {
            let stored = weight_ld(cols, dtype.size()) * dtype.size();
            for row in rows.chunks_exact(given) {
                out.extend_from_slice(row);
                out.resize(out.len() + stored - given, 0);
            }
        }
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("shapes fit u32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_backend::WeightPart;

    fn layout(parts: &[(usize, WeightFormat)]) -> WeightLayout {
        let part = |(rows, format): &(usize, WeightFormat)| WeightPart {
            rows: *rows,
            format: *format,
            bytes: Vec::new().into(),
        };
        WeightLayout::new(&WeightSource { cols: 256, parts: parts.iter().map(part).collect() }).unwrap()
    }

    #[test]
    fn parts_of_one_format_share_a_segment() {
        use WeightFormat::{F16, Q4K, Q6K};
        let mut layout = layout(&[(3, Q4K), (0, F16), (2, Q4K), (1, F16), (4, Q6K)]);
        layout.place(1024);
        let found: Vec<_> = layout.segments().iter().map(|s| (s.row0, s.rows, s.address, s.row_bytes)).collect();
        assert_eq!(found, [(0, 5, 1024, 144), (5, 1, 1744, 512), (6, 4, 2256, 224)]);
        assert_eq!(layout.bytes(), 5 * 144 + 512 + 4 * 224);
        assert!(layout.only().is_err());
        assert_eq!(layout.packed(&layout.segments()[1]), None);
    }

    #[test]
    fn experts_are_alike_or_refused() {
        use WeightFormat::{Q4K, Q6K};
        let one = layout(&[(2, Q4K), (2, Q4K), (2, Q4K), (2, Q4K)]).of_experts(2).unwrap();
        assert_eq!((one[0].unwrap().rows, one[0].unwrap().expert_bytes, one[1]), (4, 4 * 144, None));
        let two = layout(&[(2, Q4K), (3, Q6K), (2, Q4K), (3, Q6K)]).of_experts(2).unwrap();
        let bytes = 2 * 144 + 3 * 224;
        let found = two.map(|rows| rows.map(|rows| (rows.address, rows.rows, rows.expert_bytes)));
        assert_eq!(found, [Some((0, 2, bytes)), Some((288, 3, bytes))]);
        for parts in [[(2, Q4K), (3, Q6K), (2, Q4K), (2, Q6K)], [(2, Q4K), (2, Q4K), (2, Q4K), (2, Q6K)]] {
            assert!(matches!(layout(&parts).of_experts(2), Err(DeviceError::Unsupported(_))));
        }
    }
}
