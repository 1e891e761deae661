//! KV stores of a device: creation, addresses, and ordering between its two streams.

use super::CudaDevice;
use super::memory::{ADDRESS_BYTES_MAX, CudaKv, layout_for, least_block_tokens, word};
use crate::kernels::pointwise as p;
use crate::virtual_kv::{VirtualKv, VirtualKvError};
use lagoon_backend::DeviceError;
use lagoon_kv::vmm::{VmmConfig, VmmLayout};
use lagoon_types::{KvShape, KvSpace};
use std::sync::Arc;

impl CudaDevice {
    /// KV memory on this device whose rows the caller maps and unmaps.
    ///
    /// # Errors
    /// As [`VirtualKv::new`].
    pub fn virtual_kv(&self, layout: VmmLayout, config: VmmConfig) -> Result<Arc<VirtualKv>, VirtualKvError> {
        VirtualKv::new(&self.context, layout, config).map(Arc::new)
    }

    /// A store over such memory, for operations. Only mapped slots may be used, and fresh memory is not zero.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for memory of another shape.
    pub fn kv_over(&self, shape: KvShape, memory: Arc<VirtualKv>) -> Result<CudaKv, DeviceError> {
        CudaKv::over(shape, memory)
    }

    /// Reason why a store with these rBlocks would be flat, so that a sequence is contiguous only if the block pool
    /// finds consecutive blocks; `None` if it has address rows.
    #[must_use]
    pub fn why_flat(&self, shape: KvShape, requested: &KvSpace) -> Option<String> {
        self.rows_layout(shape, requested).err()
    }

    /// The layout of a store with address rows.
    ///
    /// # Errors
    /// As [`CudaDevice::why_flat`].
    pub(super) fn rows_layout(&self, shape: KvShape, requested: &KvSpace) -> Result<VmmLayout, String> {
        let layers = self.options.layers_per_group;
        let Some(layout) = layout_for(&self.context, shape, requested.block_tokens, layers) else {
            let tokens = least_block_tokens(&self.context, shape, layers);
            let hint =
                tokens.map_or(String::new(), |n| format!("; --block-tokens {n} or a multiple are, in the whole pool"));
            return Err(format!("rBlocks of {} tokens are not whole page groups{hint}", requested.block_tokens));
        };
        let ratio = u64::from(requested.block_tokens / layout.block_tokens()) * u64::from(layout.block_stripes());
        let bytes = |blocks: u32| u64::from(blocks).saturating_mul(ratio).saturating_mul(layout.stripe_bytes());
        match requested.addresses().map(bytes) {
            Some(bytes) if bytes <= ADDRESS_BYTES_MAX => Ok(layout),
            _ => Err(format!(
                "{} sequences of {} tokens need more addresses than there are; fewer (--max-running) fit",
                requested.rows,
                u64::from(requested.row_blocks) * u64::from(requested.block_tokens)
            )),
        }
    }

    /// Maps memory behind the slots before `end`, for the current stream's next operation.
    pub(super) fn kv_ensure(&mut self, kv: &mut CudaKv, end: u32) -> Result<(), DeviceError> {
        // The other stream may have zeroed or written these slots.
        self.kv_used()?;
        if kv.ensure(&self.work_streams[self.at], end)? {
            self.kv_written()?;
        }
        Ok(())
    }

    /// Notes a copy of the current stream into a store.
    pub(super) fn kv_written(&mut self) -> Result<(), DeviceError> {
        self.copied[self.at].record(&self.work_streams[self.at].stream)?;
        self.unseen[self.at] = true;
        Ok(())
    }

    /// Makes the current stream wait for the other stream's copies, before it uses a store.
    pub(super) fn kv_used(&mut self) -> Result<(), DeviceError> {
        let other = 1 - self.at;
        if std::mem::take(&mut self.unseen[other]) {
            self.work_streams[self.at].stream.wait(&self.copied[other])?;
        }
        Ok(())
    }

    pub(super) fn kv_copy(
        &mut self,
        name: &'static str,
        kv: &CudaKv,
        layer: usize,
        slot0: u32,
        at: u64,
        tokens: usize,
    ) -> Result<(), DeviceError> {
        let element_bytes = word(kv.shape.dtype.element_bytes());
        let params = p::KvCopyParams {
            kv: kv.view(layer),
            packed: at,
            slot0,
            kv_heads: kv.shape.kv_heads,
            head_bytes: word(kv.shape.row_bytes()),
            element_bytes,
        };
        self.per_row(name, tokens, params)
    }
}
