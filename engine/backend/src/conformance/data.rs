//! Random inputs from fixed seeds.

use crate::formats::{INT4_ZERO_MAX, WeightFormat, int4_header};
use crate::{Device, WeightPart, WeightSource};
use bytes::Bytes;
use half::{bf16, f16};
use lagoon_types::{DType, KvShape};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// All element types.
pub(super) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A seeded source of inputs.
#[derive(Debug)]
pub struct Data {
    rng: ChaCha8Rng,
}

impl Data {
    /// Random data that a seed determines.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Values with a variance of about one: the sum of three uniforms, so tails are bounded by 3.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (0..3).map(|_| self.rng.random_range(-1.0f32..1.0)).sum()).collect()
    }

    /// A random number in `range`.
    pub fn number(&mut self, range: Range<u32>) -> u32 {
        self.rng.random_range(range)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.number(0..n) == 0
    }

    /// The numbers of `0..n` in random order.
    pub fn permutation(&mut self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in (1..order.len()).rev() {
            let j = self.rng.random_range(0..=i);
            order.swap(i, j);
        }
        order
    }

    /// Random values in `dtype`: the bytes, and their widened values.
    pub fn stored(&mut self, dtype: DType, n: usize) -> (Vec<u8>, Vec<f32>) {
        let (mut bytes, mut exact) = (Vec::new(), Vec::new());
        dtype.encode(&self.values(n), &mut bytes);
        dtype.decode(&bytes, &mut exact);
        (bytes, exact)
    }

    /// Random tokens of one layer: the bytes, and their widened values. Rows of KV in 8 bits differ in their scales.
    pub fn stored_kv(&mut self, shape: KvShape, tokens: usize) -> (Vec<u8>, Vec<f32>) {
        let (row, mut bytes, mut exact) = (shape.head_dim as usize, Vec::new(), Vec::new());
        let mut values = self.values(tokens * 2 * shape.kv_heads as usize * row);
        if shape.dtype.plain().is_none() {
            for row in values.chunks_exact_mut(row) {
                let factor = self.rng.random_range(0.3..1.5);
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
        shape.encode(&values, &mut bytes);
        shape.decode(&bytes, &mut exact);
        (bytes, exact)
    }

    /// Random blocks of a packed format with scales about one over its largest code, and their elements.
    ///
    /// # Panics
    /// If the format is plain, or `n` elements are no whole blocks.
    pub fn packed(&mut self, format: WeightFormat, n: usize) -> (Vec<u8>, Vec<f32>) {
        use WeightFormat::{
            BF16, F16, F32, Fp8, Int4G32, Int4G64, Int4G128, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0,
            Q5_1, Q5K, Q6K, Q8_0,
        };
        // Where a block has its 16-bit numbers, and the largest that its elements are of such a number.
        let (numbers, largest): (&[usize], f32) = match format {
            Q8_0 | Iq4Nl => (&[0], 127.0),
            Q4_0 => (&[0], 8.0),
            Q5_0 => (&[0], 16.0),
            Q4_1 => (&[0, 2], 16.0),
            Q5_1 => (&[0, 2], 32.0),
            Q2K => (&[80, 82], 45.0),
            Q3K => (&[108], 128.0),
            Q4K => (&[0, 2], 63.0 * 15.0),
            Q5K => (&[0, 2], 63.0 * 31.0),
            Q6K => (&[208], 32.0 * 127.0),
            Iq4Xs => (&[0], 32.0 * 127.0),
            Mxfp4 | Fp8 | Int4G32 | Int4G64 | Int4G128 => (&[], 0.0),
            F32 | F16 | BF16 => panic!("{format} is plain"),
        };
        let mut bytes = vec![0; format.bytes(n).expect("whole blocks")];
        for block in bytes.chunks_exact_mut(format.block().bytes) {
            self.rng.fill(block);
            for at in numbers {
                let number = f16::from_f32(self.rng.random_range(0.5..2.0) / largest);
                block[*at..at + 2].copy_from_slice(&number.to_le_bytes());
            }
            match format {
                Mxfp4 => block[0] = self.rng.random_range(123..127),
                Fp8 => self.scale_fp8(block),
                Int4G32 | Int4G64 | Int4G128 => {
                    let scale = bf16::from_f32(self.rng.random_range(0.5..2.0) / 8.0).to_f32();
                    let zero = self.rng.random_range(0..=INT4_ZERO_MAX);
                    block[..4].copy_from_slice(&int4_header(scale, zero).expect("a scale of 8 bits").to_le_bytes());
                }
                _ => {}
            }
        }
        let mut exact = Vec::new();
        format.decode(&bytes, &mut exact);
        (bytes, exact)
    }

    /// Gives a block of random FP8 codes a scale, and another code to each NaN.
    fn scale_fp8(&mut self, block: &mut [u8]) {
        let (scale, codes) = block.split_at_mut(4);
        scale.copy_from_slice(&(self.rng.random_range(0.5f32..2.0) / 64.0).to_le_bytes());
        codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code &= 0x87);
    }

    /// A weight `[rows][cols]` of random blocks in two parts, and its elements.
    pub fn packed_weight<D: Device>(
        &mut self,
        device: &mut D,
        format: WeightFormat,
        (rows, cols): (usize, usize),
    ) -> (D::Weight, Vec<f32>) {
        let (bytes, exact) = self.packed(format, rows * cols);
        let bytes = Bytes::from(bytes);
        let cut = bytes.len() / rows * (rows / 3);
        let parts = vec![
            WeightPart { rows: rows / 3, format, bytes: bytes.slice(..cut) },
            WeightPart { rows: rows - rows / 3, format, bytes: bytes.slice(cut..) },
        ];
        (device.weight(WeightSource { cols, parts }).expect("weight"), exact)
    }

    /// A random weight `[rows][cols]` of one part, and its values.
    pub fn weight<D: Device>(
        &mut self,
        device: &mut D,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> (D::Weight, Vec<f32>) {
        let (bytes, exact) = self.stored(dtype, rows * cols);
        let source = WeightSource::plain(dtype, cols, vec![(rows, Bytes::from(bytes))]);
        (device.weight(source).expect("weight"), exact)
    }

    /// A tensor of random values, and the values.
    pub fn tensor<D: Device>(&mut self, device: &mut D, rows: usize, cols: usize) -> (D::Tensor, Vec<f32>) {
        let values = self.values(rows * cols);
        (tensor(device, cols, &values), values)
    }
}

/// A tensor that holds `values`.
pub(super) fn tensor<D: Device>(device: &mut D, cols: usize, values: &[f32]) -> D::Tensor {
    let mut tensor = device.tensor(values.len() / cols, cols).expect("tensor");
    device.write(&mut tensor, 0, values).expect("write");
    tensor
}

/// The first `rows` rows of a tensor.
pub(super) fn read<D: Device>(device: &mut D, tensor: &D::Tensor, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::new();
    device.read(tensor, 0..rows, 0..cols, &mut out).expect("read");
    assert_eq!(out.len(), rows * cols, "elements read");
    out
}
