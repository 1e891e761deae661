//! Mixtures of experts on a device.

use super::memory::word;
use super::work_stream::WorkStream;
use super::{CudaDevice, CudaTensor, CudaWeight};
use crate::driver::CudaError;
use crate::kernels::experts::{Grouped, Mixture, Stored};
use crate::kernels::packed::UNPACKED_BYTES;
use lagoon_backend::{DeviceError, ExpertBuffers, Experts};
use lagoon_types::DType;

impl CudaDevice {
    /// See [`lagoon_backend::Device::experts`].
    pub(super) fn mixture(
        &mut self,
        x: &CudaTensor,
        logits: &CudaTensor,
        experts: &Experts<'_, CudaWeight>,
        rows: usize,
        buffers: &ExpertBuffers<CudaTensor>,
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        check(x, logits, experts, rows, buffers, out);
        if rows == 0 {
            return Ok(());
        }
        let mixture = Mixture {
            rows: word(rows),
            hidden: word(x.cols),
            n: word(experts.down.cols),
            count: word(experts.count),
            routing: experts.routing,
            activation: experts.activation,
            up: experts.up.layout.of_experts(experts.count)?,
            up_bias: stored(experts.up_bias),
            down: experts.down.layout.of_experts(experts.count)?,
            down_bias: stored(experts.down_bias),
            choice_bias: stored(experts.choice_bias),
            x: x.address(),
            logits: logits.address(),
            results: buffers.hidden.address(),
            product: buffers.product.address(),
            act: buffers.act.address(),
            out: out.address(),
        };
        let precision = self.tuning.precision;
        let work_stream = self.work_stream();
        let bytes = usize::try_from(mixture.scratch_bytes()).expect("scratch fits");
        let launches = mixture.launches(work_stream.scratch(bytes)?, precision);
        work_stream.launch(&launches.route)?;
        work_stream.launch(&launches.sort)?;
        launches.up.iter().flatten().try_for_each(|product| grouped(work_stream, product))?;
        launches.activate.iter().try_for_each(|launch| work_stream.activate(launch))?;
        launches.down.iter().flatten().try_for_each(|product| grouped(work_stream, product))?;
        Ok(work_stream.launch(&launches.combine)?)
    }
}

fn grouped(work_stream: &mut WorkStream, product: &Grouped) -> Result<(), CudaError> {
    product.split.iter().try_for_each(|launch| work_stream.launch(launch))?;
    let bytes = product.batch_bytes(UNPACKED_BYTES);
    let elements = work_stream.elements(usize::try_from(bytes).expect("elements fit"))?;
    for batch in product.batches(elements, UNPACKED_BYTES) {
        batch.unpack.iter().try_for_each(|launch| work_stream.launch(launch))?;
        batch.products.iter().flatten().try_for_each(|launch| work_stream.launch(launch))?;
    }
    Ok(())
}

fn stored(weight: Option<&CudaWeight>) -> Stored {
    let (address, dtype) = weight.map_or((0, DType::F32), |weight| weight.layout.plain());
    Stored { address, dtype }
}

/// Asserts the shapes of a mixture.
fn check(
    x: &CudaTensor,
    logits: &CudaTensor,
    experts: &Experts<'_, CudaWeight>,
    rows: usize,
    buffers: &ExpertBuffers<CudaTensor>,
    out: &CudaTensor,
) {
    let Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing } = *experts;
    let (hidden, n) = (x.cols, down.cols);
    let columns = activation.inputs() * n;
    assert_eq!((up.rows, up.cols, down.rows), (count * columns, hidden, count * hidden), "shapes of experts");
    assert_eq!((logits.cols, out.cols), (count, hidden), "shapes of a mixture's tensors");
    assert!(rows <= x.rows.min(logits.rows).min(out.rows), "rows of a mixture");
    for (bias, shape) in [(up_bias, (count, columns)), (down_bias, (count, hidden)), (choice_bias, (1, count))] {
        assert!(bias.is_none_or(|bias| (bias.rows, bias.cols) == shape), "shapes of experts' biases");
    }
    for (buffer, cols) in [(&buffers.hidden, hidden), (&buffers.product, columns), (&buffers.act, n)] {
        assert!(buffer.cols == cols && rows * routing.top_k <= buffer.rows, "shapes of a mixture's buffers");
    }
    assert!((1..=routing.groups).contains(&routing.top_groups) && count.is_multiple_of(routing.groups), "groups");
    assert!((1..=count / routing.groups * routing.top_groups).contains(&routing.top_k), "experts of a token");
}
