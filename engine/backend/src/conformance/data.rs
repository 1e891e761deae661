//! Random inputs from fixed seeds.

use crate::{Device, WeightSource};
use bytes::Bytes;
use lagoon_types::DType;
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

    /// A random weight `[rows][cols]` of one part, and its values.
    pub fn weight<D: Device>(
        &mut self,
        device: &mut D,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> (D::Weight, Vec<f32>) {
        let (bytes, exact) = self.stored(dtype, rows * cols);
        let source = WeightSource { dtype, cols, parts: vec![(rows, Bytes::from(bytes))] };
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
