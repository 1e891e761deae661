//! Sums of a prompt's hidden states after the final norm, for embeddings: as many rows at a time as one step samples, each part
//! added up before the next one is computed.

use crate::decoder::Decoder;
use crate::forward::{Forward, Shared};
use crate::queue;
use crate::row_parts::RowParts;
use crate::work::{HiddenRows, HiddenSum, PassError};
use lagoon_backend::Device;

/// A step's rows whose hidden states are added up, and how far that is.
#[derive(Debug)]
pub(crate) struct HiddenSums {
    parts: RowParts,
    /// Of each row: its index among `sums`.
    of: Vec<usize>,
    sums: Vec<HiddenSum>,
}

impl HiddenSums {
    pub(crate) fn new(rows: Vec<HiddenRows>) -> Self {
        let sum = |of: &HiddenRows| HiddenSum { seq: of.seq, positions: of.positions.clone(), sum: Vec::new() };
        let sums = rows.iter().map(sum).collect();
        let of = rows.iter().enumerate().flat_map(|(at, of)| of.rows().map(move |_| at)).collect();
        Self { parts: RowParts::new(rows.iter().flat_map(HiddenRows::rows).collect()), of, sums }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// All sums, once.
    pub(crate) fn take(&mut self) -> Vec<HiddenSum> {
        self.parts.clear();
        std::mem::take(&mut self.sums)
    }

    /// Queues the next rows' hidden states. False if none are left.
    pub(crate) fn queue<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<bool, PassError> {
        let rows = self.parts.queue(shared.config.sampled_rows);
        if rows.is_empty() {
            return Ok(false);
        }
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[micro_batch];
        Decoder::new(model).hidden(shared.device, rows, activations)?;
        queue::read_ahead(shared.device, micro_batch, &activations.hidden, 0..rows.len(), 0..model.spec.hidden)?;
        Ok(true)
    }

    /// Adds the hidden states that were queued, if any.
    pub(crate) fn reduce<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<(), PassError> {
        let part = self.parts.finish();
        if part.is_empty() {
            return Ok(());
        }
        let Forward { model, micro_batches, host, .. } = &mut *shared.forward;
        let columns = model.spec.hidden;
        host.clear();
        queue::read_staged(
            shared.device,
            micro_batch,
            &micro_batches[micro_batch].hidden,
            0..part.len(),
            0..columns,
            host,
        )?;
        for (at, hidden) in self.of[part].iter().zip(host.chunks_exact(columns)) {
            let sum = &mut self.sums[*at].sum;
            sum.resize(columns, 0.0);
            sum.iter_mut().zip(hidden).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        Ok(())
    }
}
