//! A mixture of experts: rows are routed, sorted by expert and multiplied in groups, all of it on the device.
//!
//! The host knows how many choices there are, not whose: grids are as large as any routing may need, and workgroups find their
//! rows by the first places of the experts.

use crate::activation::activate;
use crate::gpu::{Buf, Gpu};
use crate::kernel::{Encoding, Kernel, MatvecRows};
use crate::memory::{WgpuTensor, quads, word};
use crate::params;
use crate::weight::WgpuWeight;
use lagoon_backend::{DeviceError, ExpertBuffers, Experts, Routing, Scoring};
use lagoon_types::limits::{EXPERTS_MAX, EXPERTS_PER_TOKEN_MAX};

// The literals of wgsl/experts/route.wgsl.
const _: () = assert!(EXPERTS_MAX == 1024 && EXPERTS_PER_TOKEN_MAX == 32);

/// Choices up to which each is multiplied alone: sorting them would take longer than it saves.
const ALONE_MAX: usize = 32;
/// Choices an expert, on average, from which tiles pay.
const TILED_MIN: usize = 8;

/// The choices of a call, in the sections of `shared/choices.wgsl`; kept for the next one's.
#[derive(Debug)]
pub(crate) struct Routes {
    words: Buf,
    capacity: usize,
}

impl Routes {
    pub(crate) fn new(gpu: &mut Gpu) -> Result<Self, DeviceError> {
        Ok(Self { words: gpu.buffer("choices of experts", 16)?, capacity: 4 })
    }

    fn grow(&mut self, gpu: &mut Gpu, words: usize) -> Result<(), DeviceError> {
        if words > self.capacity {
            let capacity = words.next_power_of_two();
            self.words = gpu.buffer("choices of experts", capacity as u64 * 4)?;
            self.capacity = capacity;
        }
        Ok(())
    }
}

/// One call's choices.
struct Mixture<'a> {
    gpu: &'a mut Gpu,
    words: &'a Buf,
    count: usize,
    choices: usize,
    top_k: usize,
}

impl Mixture<'_> {
    fn route(
        &mut self,
        logits: &WgpuTensor,
        bias: Option<&WgpuWeight>,
        rows: usize,
        routing: Routing,
    ) -> Result<(), DeviceError> {
        let Routing { top_k, scoring, normalised, scale, groups, top_groups, .. } = routing;
        let params = params::Route {
            rows: word(rows),
            choices: word(self.choices),
            count: word(self.count),
            stride: word(logits.stride()),
            top_k: word(top_k),
            groups: word(groups),
            top_groups: word(top_groups),
            sigmoid: u32::from(scoring == Scoring::Sigmoid),
            normalised: u32::from(normalised),
            biased: u32::from(bias.is_some()),
            scale,
            two_best: u32::from(routing.adds_scores()),
        };
        // Without a bias the kernel reads none.
        let (encoding, bias) = match bias {
            Some(bias) => (bias.vector().encoding, &bias.vector().buf),
            None => (Encoding::F32, &logits.buf),
        };
        let buffers = [Some(&logits.buf), Some(bias), Some(self.words)];
        self.gpu.dispatch(Kernel::Route(encoding), &params, &buffers, params.rows, 1)?;
        if self.choices > ALONE_MAX {
            self.gpu.dispatch(Kernel::Sort, &params, &[Some(self.words)], params.count + 1, 1)?;
        }
        Ok(())
    }

    /// Copies rows of `x` to the places of their choices.
    fn gather(&mut self, x: &WgpuTensor, out: &WgpuTensor) -> Result<(), DeviceError> {
        let params = self.rows_of(x);
        let groups = (params.choices * params.quads).div_ceil(64);
        let buffers = [Some(self.words), Some(&x.buf), Some(&out.buf)];
        self.gpu.dispatch(Kernel::GatherChoices, &params, &buffers, groups, 1)
    }

    fn rows_of(&self, x: &WgpuTensor) -> params::Experts {
        params::Experts {
            choices: word(self.choices),
            top_k: word(self.top_k),
            quads: word(quads(x.cols)),
            ..Default::default()
        }
    }

    /// The product of each place's row with its expert's weight. Rows of `x` are those of `shared_by` choices.
    fn product(
        &mut self,
        (x, shared_by): (&WgpuTensor, usize),
        weight: &WgpuWeight,
        out: &WgpuTensor,
    ) -> Result<(), DeviceError> {
        let choices = self.choices;
        for shard in &weight.shards {
            // There may be more shards than dispatches in a batch: the parts of each expert may differ in format.
            self.gpu.begin()?;
            // Stretches of rows: one more for each expert, which may start within one.
            let few = self.gpu.matvec_outputs();
            let (kernel, outputs, depth) = if choices <= ALONE_MAX {
                (Kernel::GroupedMatvec(shard.encoding, MatvecRows::One), few, choices)
            } else if choices < TILED_MIN * self.count {
                (Kernel::GroupedMatvec(shard.encoding, MatvecRows::Four), few, choices / 4 + self.count)
            } else {
                (Kernel::GroupedTiled(shard.encoding), 64, choices / 64 + self.count)
            };
            let params = params::Grouped {
                choices: word(choices),
                count: word(self.count),
                quads: word(quads(x.cols)),
                n: word(out.cols),
                out_stride: word(out.stride()),
                shard_row0: word(shard.row0),
                shard_rows: word(shard.rows),
                shared_by: word(shared_by),
            };
            let buffers = [Some(self.words), Some(&x.buf), Some(&shard.buf), Some(&out.buf)];
            self.gpu.dispatch(kernel, &params, &buffers, params.n.div_ceil(word(outputs)), word(depth))?;
        }
        Ok(())
    }

    /// Adds its expert's bias, if there are biases, to the row of each place.
    fn add_biases(&mut self, biases: Option<&WgpuWeight>, x: &WgpuTensor) -> Result<(), DeviceError> {
        let Some(biases) = biases else { return Ok(()) };
        for shard in &biases.shards {
            let params =
                params::Experts { shard_row0: word(shard.row0), shard_rows: word(shard.rows), ..self.rows_of(x) };
            assert!(!Encoding::PACKED.contains(&shard.encoding), "biases are plain");
            let groups = (params.choices * params.quads).div_ceil(64);
            let buffers = [Some(self.words), Some(&shard.buf), Some(&x.buf)];
            self.gpu.dispatch(Kernel::AddBiases(shard.encoding), &params, &buffers, groups, 1)?;
        }
        Ok(())
    }

    /// Adds the weighted results of its choices to each row.
    fn combine(&mut self, results: &WgpuTensor, out: &WgpuTensor) -> Result<(), DeviceError> {
        let params = self.rows_of(results);
        let groups = (params.choices / params.top_k * params.quads).div_ceil(64);
        let buffers = [Some(self.words), Some(&results.buf), Some(&out.buf)];
        self.gpu.dispatch(Kernel::Combine, &params, &buffers, groups, 1)
    }
}

/// The contract of the shapes.
fn check(
    (x, logits): (&WgpuTensor, &WgpuTensor),
    experts: &Experts<'_, WgpuWeight>,
    rows: usize,
    buffers: &ExpertBuffers<WgpuTensor>,
    out: &WgpuTensor,
) {
    let Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing } = *experts;
    let Routing { top_k, groups, top_groups, .. } = routing;
    assert!((1..=EXPERTS_MAX as usize).contains(&count), "experts of a mixture");
    assert!((1..=groups).contains(&top_groups) && count.is_multiple_of(groups), "groups of experts");
    let most = (count / groups * top_groups).min(EXPERTS_PER_TOKEN_MAX as usize);
    assert!((1..=most).contains(&top_k), "experts of a token");
    let (hidden, n) = (x.cols, down.cols);
    let columns = activation.inputs() * n;
    assert_eq!((up.rows, up.cols, down.rows), (count * columns, hidden, count * hidden), "shapes of experts");
    assert_eq!((logits.cols, out.cols, buffers.hidden.cols), (count, hidden, hidden), "shapes of a mixture's tensors");
    assert_eq!((buffers.product.cols, buffers.act.cols), (columns, n), "shapes of a mixture's buffers");
    assert!(rows <= x.rows.min(logits.rows).min(out.rows), "rows of a mixture");
    let room = buffers.hidden.rows.min(buffers.product.rows).min(buffers.act.rows);
    assert!(rows * top_k <= room, "rows of a mixture's buffers");
    let shape = |bias: Option<&WgpuWeight>, shape| assert!(bias.is_none_or(|b| (b.rows, b.cols) == shape), "biases");
    shape(up_bias, (count, columns));
    shape(down_bias, (count, hidden));
    shape(choice_bias, (1, count));
}

/// See [`lagoon_backend::Device::experts`].
pub(crate) fn experts(
    gpu: &mut Gpu,
    routes: &mut Routes,
    (x, logits): (&WgpuTensor, &WgpuTensor),
    experts: &Experts<'_, WgpuWeight>,
    rows: usize,
    buffers: &ExpertBuffers<WgpuTensor>,
    out: &WgpuTensor,
) -> Result<(), DeviceError> {
    check((x, logits), experts, rows, buffers, out);
    if rows == 0 {
        return Ok(());
    }
    let Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing } = *experts;
    let choices = rows * routing.top_k;
    gpu.begin()?;
    routes.grow(gpu, 4 * choices + count + 1)?;
    let mut mixture = Mixture { gpu, words: &routes.words, count, choices, top_k: routing.top_k };
    mixture.route(logits, choice_bias, rows, routing)?;
    let source = if choices > ALONE_MAX {
        mixture.gather(x, &buffers.hidden)?;
        (&buffers.hidden, 1)
    } else {
        (x, routing.top_k)
    };
    mixture.product(source, up, &buffers.product)?;
    mixture.add_biases(up_bias, &buffers.product)?;
    activate(mixture.gpu, &buffers.product, choices, activation, &buffers.act)?;
    mixture.product((&buffers.act, 1), down, &buffers.hidden)?;
    mixture.add_biases(down_bias, &buffers.hidden)?;
    mixture.combine(&buffers.hidden, out)
}
