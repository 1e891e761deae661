//! Weights in device memory, in the formats of their file.

use super::memory::word;
use super::work_stream::WorkStream;
use crate::driver::{Buffer, Context};
use crate::kernels::packed::{UNPACKED_BYTES, factor_of};
use crate::kernels::weight::{WeightLayout, arrange};
use lagoon_backend::{DeviceError, WeightPart, WeightSource};
use std::sync::Arc;

/// Bytes of a weight that are arranged and staged at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A weight `[rows][cols]`.
#[derive(Debug)]
pub struct CudaWeight {
    buffer: Buffer,
    pub(super) layout: WeightLayout,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl CudaWeight {
    pub(super) fn new(
        context: &Arc<Context>,
        work_stream: &mut WorkStream,
        source: &WeightSource,
    ) -> Result<Self, DeviceError> {
        let mut layout = WeightLayout::new(source)?;
        let buffer = Buffer::new(context, "a weight", layout.bytes())?;
        layout.place(buffer.address());
        let mut weight = Self { buffer, layout, rows: source.rows(), cols: source.cols };
        weight.fill(work_stream, source)?;
        if let Some(largest) = weight.largest(work_stream)? {
            weight.layout.set_factor(factor_of(largest));
        }
        // Another stream may use it first.
        work_stream.stream.synchronize()?;
        Ok(weight)
    }

    /// Copies the parts to the buffer, arranged for kernels.
    fn fill(&self, work_stream: &mut WorkStream, source: &WeightSource) -> Result<(), DeviceError> {
        let (mut at, mut stored) = (0, Vec::new());
        for WeightPart { rows, format, bytes } in &source.parts {
            let given = format.bytes(source.cols).unwrap_or(0);
            assert_eq!(bytes.len(), rows * given, "a part's bytes match its shape");
            for piece in bytes.chunks((PIECE_BYTES / given.max(1)).max(1) * given.max(1)) {
                let piece = if format.plain().is_some() && given.is_multiple_of(16) {
                    piece
                } else {
                    stored.clear();
                    arrange(*format, source.cols, piece, &mut stored);
                    &stored
                };
                work_stream.copy(self.buffer.range(at, piece.len()), piece)?;
                at += piece.len();
            }
        }
        Ok(())
    }

    /// The largest magnitude of packed rows; `None` if there are none. Reserves memory for their elements, while there is some.
    fn largest(&self, work_stream: &mut WorkStream) -> Result<Option<f32>, DeviceError> {
        let mut largest: Option<f32> = None;
        for segment in self.layout.segments() {
            let Some(rows) = self.layout.packed(segment) else { continue };
            let found = work_stream.scratch(segment.rows * 4)?;
            work_stream.launch(&rows.largest(word(segment.rows), found))?;
            work_stream.read(found, segment.rows * 4, |bytes| {
                let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                largest = values.fold(largest, |most, x| Some(most.map_or(x, |most| most.max(x))));
            })?;
            // Two terms of each.
            let elements = UNPACKED_BYTES.min((segment.rows * self.cols * 4) as u64);
            work_stream.elements(usize::try_from(elements).expect("far below"))?;
        }
        Ok(largest)
    }
}
