//! Queued execution if the device has it ([`Queued`]). Without it, all calls so far count as done, and reads wait.

use lagoon_backend::{Device, DeviceError, Queued};
use std::ops::Range;
use std::time::Duration;

/// See [`Queued::urgent`].
pub(crate) fn set_urgent<D: Device>(device: &mut D, urgent: bool) {
    if let Some(queue) = device.queued() {
        queue.urgent(urgent);
    }
}

/// See [`Queued::begin_repeatable`].
pub(crate) fn begin_repeatable<D: Device>(device: &mut D) -> Result<(), DeviceError> {
    device.queued().map_or(Ok(()), Queued::begin_repeatable)
}

/// See [`Queued::abort_step`].
pub(crate) fn abort_step<D: Device>(device: &mut D) -> Result<(), DeviceError> {
    device.queued().map_or(Ok(()), Queued::abort_step)
}

/// See [`Queued::mark`].
pub(crate) fn mark<D: Device>(device: &mut D, micro_batch: usize) -> Result<(), DeviceError> {
    device.queued().map_or(Ok(()), |queue| queue.mark(micro_batch))
}

/// See [`Queued::reached`].
pub(crate) fn reached<D: Device>(device: &mut D, micro_batch: usize) -> Result<Option<Duration>, DeviceError> {
    device.queued().map_or(Ok(None), |queue| queue.reached(micro_batch))
}

/// See [`Queued::read_ahead`].
pub(crate) fn read_ahead<D: Device>(
    device: &mut D,
    micro_batch: usize,
    tensor: &D::Tensor,
    rows: Range<usize>,
    cols: Range<usize>,
) -> Result<(), DeviceError> {
    device.queued().map_or(Ok(()), |queue| queue.read_ahead(micro_batch, tensor, rows, cols))
}

/// See [`Queued::read_staged`].
pub(crate) fn read_staged<D: Device>(
    device: &mut D,
    micro_batch: usize,
    tensor: &D::Tensor,
    rows: Range<usize>,
    cols: Range<usize>,
    out: &mut Vec<f32>,
) -> Result<(), DeviceError> {
    match device.queued() {
        Some(queue) => queue.read_staged(micro_batch, tensor, rows, cols, out),
        None => device.read(tensor, rows, cols, out),
    }
}
