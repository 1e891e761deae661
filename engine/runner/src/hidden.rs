//! Sums of a prompt's hidden states after the final norm, for embeddings: as many rows at a time as one step samples, each part
//! added up before the next one is computed.

use crate::decoder::Decoder;
use crate::forward::{Forward, Shared};
use crate::queue;
use crate::work::{HiddenRows, HiddenSum, PassError};
use lagoon_backend::Device;

/// A step's rows whose hidden states are added up, and how far that is.
#[derive(Debug)]
pub(crate) struct HiddenSums {
    rows: Vec<HiddenRows>,
    /// Rows whose hidden states were added, and those whose hidden states are being computed behind them.
    done: usize,
    queued: usize,
    sums: Vec<HiddenSum>,
}

impl HiddenSums {
    pub(crate) fn new(rows: Vec<HiddenRows>) -> Self {
        let sum = |of: &HiddenRows| HiddenSum { seq: of.seq, positions: of.positions.clone(), sum: Vec::new() };
        let sums = rows.iter().map(sum).collect();
        Self { rows, done: 0, queued: 0, sums }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All sums, once.
    pub(crate) fn take(&mut self) -> Vec<HiddenSum> {
        self.rows.clear();
        std::mem::take(&mut self.sums)
    }

    /// Every row in order: its index among `rows`, and its row in the step.
    fn all(&self) -> impl Iterator<Item = (usize, u32)> {
        self.rows.iter().enumerate().flat_map(|(at, of)| of.rows().map(move |row| (at, row)))
    }

    /// Queues the next rows' hidden states. False if none are left.
    pub(crate) fn queue<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<bool, PassError> {
        let rows: Vec<u32> = self.all().map(|(_, row)| row).skip(self.done).take(shared.config.sampled_rows).collect();
        self.queued = rows.len();
        if rows.is_empty() {
            return Ok(false);
        }
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[micro_batch];
        Decoder::new(model).hidden(shared.device, &rows, activations)?;
        queue::read_ahead(shared.device, micro_batch, &activations.hidden, 0..rows.len(), 0..model.spec.hidden)?;
        Ok(true)
    }

    /// Adds the hidden states that were queued, if any.
    pub(crate) fn reduce<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<(), PassError> {
        let rows = std::mem::take(&mut self.queued);
        if rows == 0 {
            return Ok(());
        }
        let Forward { model, micro_batches, host, .. } = &mut *shared.forward;
        let columns = model.spec.hidden;
        host.clear();
        queue::read_staged(shared.device, micro_batch, &micro_batches[micro_batch].hidden, 0..rows, 0..columns, host)?;
        let of: Vec<usize> = self.all().map(|(at, _)| at).skip(self.done).take(rows).collect();
        for (at, hidden) in of.into_iter().zip(host.chunks_exact(columns)) {
            let sum = &mut self.sums[at].sum;
            sum.resize(columns, 0.0);
            sum.iter_mut().zip(hidden).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        self.done += rows;
        Ok(())
    }
}
