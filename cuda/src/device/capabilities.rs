//! [`CudaDevice`]'s capabilities: queues, sampling, virtual memory, shared regions, peer access.

use super::memory::{CudaKv, CudaTensor, word};
use super::span::{STAGED_BYTES_MAX, Span, Staged};
use super::{CudaDevice, WorkStream};
use crate::driver::{Buffer, Pinned, copy_to_host};
use crate::kernels::sample::{self, SampleParams};
use lagoon_backend::{
    Device, DeviceError, KvCounters, LaunchCounters, Queued, SampleRow, SampledRow, Sampling, VirtualMemory,
};
#[cfg(target_os = "linux")]
use lagoon_backend::{KvPiece, LentKv, OwnRegion, PeerAccess, PeerMemory, RegionId, SharedRegions};
use lagoon_types::{KvShape, KvSpace};
use std::ops::Range;
use std::time::Duration;

impl Queued for CudaDevice {
    type Tensor = CudaTensor;

    fn urgent(&mut self, urgent: bool) {
        self.at = usize::from(urgent);
    }

    fn begin_repeatable(&mut self) -> Result<(), DeviceError> {
        if self.at == 0 && !self.options.no_graphs {
            self.work_stream().begin_step()?;
        }
        Ok(())
    }

    fn launches(&mut self) -> Option<LaunchCounters> {
        (!self.options.no_graphs).then(|| self.graphs().0)
    }

    fn abort_step(&mut self) -> Result<(), DeviceError> {
        // The recorded step must not run after its memory has another owner.
        self.work_streams.iter_mut().try_for_each(WorkStream::settle)?;
        self.released.0.record(&self.work_streams[0].stream)?;
        self.released.1 = true;
        Ok(())
    }

    fn mark(&mut self, micro_batch: usize) -> Result<(), DeviceError> {
        // An event would end the recorded step, and its graph: it is recorded when the mark is first asked for.
        self.noted[micro_batch] = self.work_streams[self.at].listed_step().is_some();
        if self.noted[micro_batch] {
            return Ok(());
        }
        Ok(self.marks[micro_batch].record(&self.work_streams[self.at].stream)?)
    }

    fn reached(&mut self, micro_batch: usize) -> Result<Option<Duration>, DeviceError> {
        if std::mem::take(&mut self.noted[micro_batch]) {
            // A recorded step has not begun.
            self.work_streams[0].settle()?;
            self.marks[micro_batch].record(&self.work_streams[0].stream)?;
        }
        // Poll again at once: kernels take microseconds.
        Ok((!self.marks[micro_batch].happened()?).then_some(Duration::ZERO))
    }

    fn read_ahead(
        &mut self,
        micro_batch: usize,
        tensor: &CudaTensor,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<(), DeviceError> {
        assert!(rows.end <= tensor.rows && cols.end <= tensor.cols, "a range beyond the tensor");
        let span = Span::of(tensor, &rows, &cols);
        let staged = &mut self.staged[micro_batch];
        staged.bytes = 0;
        if (1..=STAGED_BYTES_MAX).contains(&span.bytes()) {
            if staged.pinned.as_ref().is_none_or(|p| p.as_slice().len() < span.bytes()) {
                staged.pinned = Some(Pinned::new(&self.context, "staged reads", span.bytes().next_power_of_two())?);
            }
            if let Some(pinned) = &mut staged.pinned {
                self.work_streams[self.at].settle()?;
                copy_to_host(&self.work_streams[self.at].stream, pinned, 0, span.address(tensor), span.bytes())?;
                staged.bytes = span.bytes();
            }
        }
        self.mark(micro_batch)
    }

    fn read_staged(
        &mut self,
        micro_batch: usize,
        tensor: &CudaTensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let span = Span::of(tensor, &rows, &cols);
        match &self.staged[micro_batch] {
            Staged { pinned: Some(pinned), bytes, .. } if *bytes > 0 && *bytes == span.bytes() => {
                out.reserve(rows.len() * cols.len());
                span.take(span.first, &pinned.as_slice()[..*bytes], out);
                Ok(())
            }
            _ => self.read(tensor, rows, cols, out),
        }
    }
}

impl Sampling for CudaDevice {
    type Tensor = CudaTensor;

    fn sample_ahead(
        &mut self,
        micro_batch: usize,
        logits: &mut CudaTensor,
        rows: &[SampleRow],
        masks: &[u32],
    ) -> Result<(), DeviceError> {
        assert!(rows.len() <= logits.rows, "a row for each draw");
        let staged = &mut self.staged[micro_batch];
        staged.bytes = size_of_val(rows) / size_of::<SampleRow>() * size_of::<SampledRow>();
        if rows.is_empty() {
            return self.mark(micro_batch);
        }
        let room = (logits.rows * size_of::<SampledRow>()).next_power_of_two();
        if staged.drawn.as_ref().is_none_or(|b| b.bytes() < room) {
            // The recorded step has not used it; earlier uses are complete before this frees it.
            staged.drawn = Some(Buffer::new(&self.context, "sampled tokens", room)?);
        }
        if staged.pinned.as_ref().is_none_or(|p| p.as_slice().len() < staged.bytes) {
            staged.pinned = Some(Pinned::new(&self.context, "staged reads", room)?);
        }
        let (Some(drawn), Some(pinned)) = (&staged.drawn, &mut staged.pinned) else { unreachable!("made above") };
        let own = &mut self.work_streams[self.at];
        // In one upload: a second one might take the first one's place.
        staged.rules.clear();
        staged.rules.extend_from_slice(bytemuck::cast_slice(rows));
        staged.rules.extend_from_slice(bytemuck::cast_slice(masks));
        let at = own.upload(&staged.rules)?;
        let params = SampleParams {
            logits: logits.buffer.address(),
            rows: at,
            out: drawn.address(),
            masks: at + size_of_val(rows) as u64,
            vocab: word(logits.cols),
            stride: word(logits.cols),
        };
        own.launch(&sample::sample(word(rows.len()), params))?;
        own.settle()?;
        copy_to_host(&own.stream, pinned, 0, drawn.address(), staged.bytes)?;
        self.mark(micro_batch)
    }

    fn sampled(&mut self, micro_batch: usize, out: &mut Vec<SampledRow>) -> Result<(), DeviceError> {
        self.marks[micro_batch].synchronize()?;
        if let Staged { pinned: Some(pinned), bytes, .. } = &self.staged[micro_batch] {
            let rows = pinned.as_slice()[..*bytes].chunks_exact(size_of::<SampledRow>());
            out.extend(rows.map(bytemuck::pod_read_unaligned::<SampledRow>));
        }
        Ok(())
    }
}

impl VirtualMemory for CudaDevice {
    type Kv = CudaKv;

    fn kv_space(&self, shape: KvShape, requested: KvSpace) -> KvSpace {
        match self.why_flat(shape, &requested) {
            None => requested,
            Some(_) => KvSpace::flat(requested.blocks, requested.block_tokens),
        }
    }

    fn kv_in(&mut self, shape: KvShape, space: &KvSpace) -> Result<CudaKv, DeviceError> {
        if space.rows == 0 {
            return self.kv(shape, space.slots());
        }
        // A flat store would have memory for every address, which is more than the pool counts.
        let layout = self.rows_layout(shape, space).map_err(|why| {
            let hint = "VirtualMemory::kv_space returns an address space that the device has";
            DeviceError::Unsupported(format!("KV in address rows: {why}\nhint: {hint}"))
        })?;
        CudaKv::with_rows(&self.context, shape, space, layout)
    }

    fn kv_hold(&mut self, kv: &mut CudaKv, slots: &[Range<u32>]) -> Result<(), DeviceError> {
        // An aborted step may still write to memory that it held when that was released.
        if kv.hold(slots)? && self.at == 1 && std::mem::take(&mut self.released.1) {
            self.work_streams[1].stream.wait(&self.released.0)?;
        }
        Ok(())
    }

    fn kv_release(&mut self, kv: &mut CudaKv, slots: Range<u32>) -> Result<(), DeviceError> {
        self.abort_step()?;
        kv.release(slots)
    }

    fn kv_share(&mut self, kv: &mut CudaKv, from: u32, to: u32, tokens: u32) -> Result<(), DeviceError> {
        self.work_streams.iter_mut().try_for_each(WorkStream::settle)?;
        kv.share(from..from + tokens, to)
    }

    fn kv_expect(&mut self, kv: &mut CudaKv, next: &[u32], row: Option<u32>) {
        kv.expect(next, row);
    }

    fn kv_counters(&self, kv: &CudaKv) -> Option<KvCounters> {
        kv.counters()
    }
}

#[cfg(target_os = "linux")]
impl SharedRegions for CudaDevice {
    type Kv = CudaKv;

    fn region(&mut self, bytes: usize) -> Result<OwnRegion, DeviceError> {
        self.make_region(bytes)
    }

    fn kv_to_region(&mut self, kv: &CudaKv, pieces: &[KvPiece], to: RegionId, at: usize) -> Result<(), DeviceError> {
        self.kv_through("kv_pack", kv, pieces, to, at)
    }

    fn kv_from_region(
        &mut self,
        kv: &mut CudaKv,
        pieces: &[KvPiece],
        from: RegionId,
        at: usize,
    ) -> Result<(), DeviceError> {
        self.unpack_region(kv, pieces, from, at)
    }
}

#[cfg(target_os = "linux")]
impl PeerAccess for CudaDevice {
    type Kv = CudaKv;

    fn kv_lent(&mut self, shape: KvShape, blocks: u32, block_tokens: u32) -> Result<LentKv<CudaKv>, DeviceError> {
        self.make_lent(shape, blocks, block_tokens)
    }

    fn kv_seal(&mut self, kv: &mut CudaKv, block: u32, tag: u64) -> Result<(), DeviceError> {
        self.seal(kv, block, tag)
    }

    fn kv_map(
        &mut self,
        shape: KvShape,
        blocks: u32,
        block_tokens: u32,
        memory: PeerMemory,
    ) -> Result<CudaKv, DeviceError> {
        self.map_peer(shape, (blocks, block_tokens), &memory)
    }

    fn kv_seal_tags(&mut self, kv: &CudaKv, blocks: &[u32], out: &mut Vec<u64>) -> Result<(), DeviceError> {
        self.seal_tags(kv, blocks, out)
    }
}
