//! The weights that one decode step of a model with experts reads: those of the experts that its router chooses, and no
//! others.
//!
//! A weight that is not a number makes every sum that it is in not a number, even with a share of zero. So an expert
//! whose weights are replaced by NaN while all logits keep their bits was not read.

use crate::cuda::driver;
use half::{bf16, f16};
use lagoon_backend::{Device, cpu::CpuDevice};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers};
use lagoon_model::spec::Mlp;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{Decoder, Model};
use lagoon_tests::golden::{Golden, models};
use lagoon_types::DType;
use safetensors::{SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// One expert's part of a stored tensor: the tensor's name, and bytes in it.
type Part = (String, Range<usize>);

/// A golden whose weights can be damaged.
struct Damaged {
    golden: Golden,
    spec: ModelSpec,
    bytes: Vec<u8>,
    folder: tempfile::TempDir,
}

impl Damaged {
    /// `None` if the model has no experts.
    fn open(name: &str) -> Option<Self> {
        let golden = Golden::load(name);
        let spec = ModelSpec::open(&golden.dir).unwrap();
        spec.layers.iter().find(|layer| matches!(layer.mlp, Mlp::Experts(_)))?;
        let bytes = std::fs::read(golden.dir.join("model.safetensors")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(golden.dir.join("config.json"), folder.path().join("config.json")).unwrap();
        Some(Self { golden, spec, bytes, folder })
    }

    /// The parts of each expert, by its layer's name and its number.
    fn experts(&self) -> BTreeMap<(String, usize), Vec<Part>> {
        let mut experts: BTreeMap<_, Vec<Part>> = BTreeMap::new();
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        for (name, tensor) in tensors.iter() {
            let Some((layer, rest)) = name.split_once(".experts.") else { continue };
            let number = rest.split('.').next().and_then(|text| text.parse::<usize>().ok());
            let bytes = tensor.data().len();
            let (first, count) = number.map_or((0, tensor.shape()[0]), |number| (number, 1));
            for at in 0..count {
                let part = (name.to_owned(), at * bytes / count..(at + 1) * bytes / count);
                experts.entry((layer.to_owned(), first + at)).or_default().push(part);
            }
        }
        experts
    }

    /// Logits of a decode step, as bits: one token, with these parts of the weights replaced by NaN.
    fn logits<D: Device>(&self, device: &mut D, parts: &[Part]) -> Vec<u32> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let mut all: BTreeMap<&str, (safetensors::Dtype, Vec<usize>, Vec<u8>)> =
            tensors.iter().map(|(name, of)| (name, (of.dtype(), of.shape().to_vec(), of.data().to_vec()))).collect();
        for (name, range) in parts {
            let (dtype, _, data) = all.get_mut(name.as_str()).unwrap();
            let nan = match dtype {
                safetensors::Dtype::F32 => f32::NAN.to_le_bytes().to_vec(),
                safetensors::Dtype::F16 => f16::NAN.to_le_bytes().to_vec(),
                safetensors::Dtype::BF16 => bf16::NAN.to_le_bytes().to_vec(),
                other => panic!("{name} is in {other:?}"),
            };
            data[range.clone()].chunks_exact_mut(nan.len()).for_each(|number| number.copy_from_slice(&nan));
        }
        let views = all
            .iter()
            .map(|(name, (dtype, shape, data))| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        safetensors::serialize_to_file(views, None, &self.folder.path().join("model.safetensors")).unwrap();
        step(device, self.folder.path(), self.golden.description.tokens[1])
    }
}

/// Logits of one token, as bits.
fn step<D: Device>(device: &mut D, dir: &Path, token: u32) -> Vec<u32> {
    let spec = ModelSpec::open(dir).unwrap();
    let weights = Weights::load(device, &Checkpoint::open(dir).unwrap(), &spec, None, &mut |_, _| {}).unwrap();
    let logits = Decoder::new(&Model::new(&spec, weights)).plain_logits(device, DType::F32, &[token]).unwrap();
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn len(parts: &[Part]) -> u64 {
    parts.iter().map(|(_, range)| range.len() as u64).sum()
}

/// The parts of the experts that a decode step does not read.
fn unread(of: &Damaged) -> Vec<Part> {
    let mut device = CpuDevice::new();
    let whole = of.logits(&mut device, &[]);
    assert!(whole.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    let experts = of.experts().into_values();
    experts.filter(|parts| of.logits(&mut device, parts) == whole).flatten().collect()
}

/// Bytes of a whole step, by counting: all weights but those of experts that are not read. It is what
/// [`ModelSpec::active_parameters`] says, from which `lagoon doctor MODEL` takes it.
#[test]
fn a_decode_step_reads_the_experts_that_it_chooses() {
    let mut seen = 0;
    for of in models().filter_map(Damaged::open) {
        let size = Checkpoint::open(&of.golden.dir).unwrap().dtype().unwrap().size() as u64;
        let (all, active) = (of.spec.parameters() * size, of.spec.active_parameters() * size);
        let read = all - len(&unread(&of));
        println!("{}: a decode step reads {read} of {all} bytes of weights", of.golden.name);
        assert_eq!(read, active, "{}", of.golden.name);
        assert!(read < all, "{}: it reads all experts", of.golden.name);
        seen += 1;
    }
    assert!(seen >= 8, "{seen} goldens have experts");
}

/// The same experts are left alone by the other backends: softmax and sigmoid routers, with and without groups.
#[test]
fn other_backends_read_no_other_experts() {
    const TEST: &str = "other_backends_read_no_other_experts";
    for (seed, name) in (140..).zip(["mixtral", "deepseek_v3", "gpt_oss"]) {
        let of = Damaged::open(name).unwrap();
        let unread = unread(&of);
        match lagoon_tests::wgpu() {
            Ok(mut device) => assert_eq!(of.logits(&mut device, &unread), of.logits(&mut device, &[]), "{name}"),
            Err(reason) => lagoon_tests::skip(TEST, &reason),
        }
        let Some(fake) = driver(TEST, seed) else { return };
        let options = CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() };
        let mut device = CudaDevice::open(lagoon_cuda::kernels::FATBIN, options).unwrap();
        assert_eq!(of.logits(&mut device, &unread), of.logits(&mut device, &[]), "{name}");
        drop(device);
        fake.finish();
    }
}
