//! A host device with simulated virtual memory: it has no more KV memory than rBlocks, knows which addresses are held
//! and which share memory, overwrites released memory, and panics if the engine uses unheld memory or writes to
//! shared memory.

use lagoon_backend::cpu::CpuDevice;
use lagoon_backend::{
    AttnBatch, Device, DeviceError, KvCounters, KvPiece, LatentRow, Partials, VirtualMemory, forward, without,
};
use lagoon_types::{AttentionGeometry, KvShape, KvSpace};
use std::collections::BTreeSet;
use std::ops::Range;

type Inner = CpuDevice;
type Tensor = <Inner as Device>::Tensor;
type Weight = <Inner as Device>::Weight;

/// A host device with simulated virtual memory; see the module's documentation.
#[derive(Debug)]
pub(super) struct MappedDevice(Inner);

/// A store, and its held rBlocks.
#[derive(Debug)]
pub(super) struct MappedKv {
    inner: <Inner as Device>::Kv,
    shape: KvShape,
    space: KvSpace,
    /// By rBlock: number of the memory behind it, 0 for none.
    held: Vec<u64>,
    holds: u64,
    shared: u64,
}

impl MappedKv {
    fn blocks(&self, slots: &Range<u32>) -> Range<u32> {
        slots.start / self.space.block_tokens..slots.end.div_ceil(self.space.block_tokens)
    }

    #[track_caller]
    fn assert_held(&self, what: &str, slots: Range<u32>) {
        if self.space.rows > 0 {
            let missing = self.blocks(&slots).find(|block| self.held[*block as usize] == 0);
            assert_eq!(missing, None, "{what}: slots {slots:?} have no memory");
        }
    }

    #[track_caller]
    fn assert_own(&self, what: &str, slots: Range<u32>) {
        self.assert_held(what, slots.clone());
        for block in self.blocks(&slots).filter(|_| self.space.rows > 0) {
            let memory = self.held[block as usize];
            let places = self.held.iter().filter(|held| **held == memory).count();
            assert_eq!(places, 1, "{what}: slots {slots:?} are somebody else's, too");
        }
    }

    /// Number of rBlocks of memory in use.
    fn count(&self) -> u32 {
        self.held.iter().filter(|held| **held > 0).collect::<BTreeSet<_>>().len() as u32
    }
}

impl MappedDevice {
    #[must_use]
    pub(super) fn new(inner: CpuDevice) -> Self {
        Self(inner)
    }
}

impl VirtualMemory for MappedDevice {
    type Kv = MappedKv;

    fn kv_space(&self, _: KvShape, requested: KvSpace) -> KvSpace {
        requested
    }

    fn kv_in(&mut self, shape: KvShape, space: &KvSpace) -> Result<MappedKv, DeviceError> {
        let inner = self.0.kv(shape, space.slots())?;
        Ok(MappedKv {
            inner,
            shape,
            space: *space,
            held: vec![0; space.addresses().unwrap() as usize],
            holds: 0,
            shared: 0,
        })
    }

    fn kv_hold(&mut self, kv: &mut MappedKv, slots: &[Range<u32>]) -> Result<(), DeviceError> {
        let blocks: Vec<u32> = slots.iter().flat_map(|slots| kv.blocks(slots)).collect();
        for block in blocks.into_iter().map(|block| block as usize) {
            if kv.held[block] == 0 {
                kv.holds += 1;
                kv.held[block] = kv.holds;
            }
        }
        assert!(kv.count() <= kv.space.blocks, "{} rBlocks are held, there are {}", kv.count(), kv.space.blocks);
        Ok(())
    }

    fn kv_release(&mut self, kv: &mut MappedKv, slots: Range<u32>) -> Result<(), DeviceError> {
        for block in kv.blocks(&slots).filter(|_| kv.space.rows > 0) {
            if std::mem::take(&mut kv.held[block as usize]) > 0 {
                let spoiled = vec![0xff; kv.space.block_tokens as usize * kv.shape.layer_token_bytes()];
                for layer in 0..kv.shape.layers as usize {
                    self.0.kv_write(&mut kv.inner, layer, block * kv.space.block_tokens, &spoiled)?;
                }
            }
        }
        Ok(())
    }

    fn kv_share(&mut self, kv: &mut MappedKv, from: u32, to: u32, tokens: u32) -> Result<(), DeviceError> {
        assert!(kv.space.rows > 0 && tokens == kv.space.block_tokens, "whole rBlocks of rows");
        kv.assert_held("a prefix", from..from + tokens);
        let (source, target) = ((from / tokens) as usize, (to / tokens) as usize);
        assert_eq!(kv.held[target], 0, "slot {to} is in use");
        kv.held[target] = kv.held[source];
        kv.shared += 1;
        let mut bytes = Vec::new();
        for layer in 0..kv.shape.layers as usize {
            bytes.clear();
            self.0.kv_read(&kv.inner, layer, from, tokens, &mut bytes)?;
            self.0.kv_write(&mut kv.inner, layer, to, &bytes)?;
        }
        Ok(())
    }

    /// Maps nothing ahead of a step.
    fn kv_expect(&mut self, _: &mut MappedKv, _: &[u32], _: Option<u32>) {}

    fn kv_counters(&self, kv: &MappedKv) -> Option<KvCounters> {
        let free = u64::from(kv.space.blocks - kv.count());
        Some(KvCounters { groups_per_block: 1, free, in_step: kv.holds, shared: kv.shared, ..KvCounters::default() })
    }
}

impl Device for MappedDevice {
    type Tensor = Tensor;
    type Weight = Weight;
    type Kv = MappedKv;

    forward!(
        0: info, takes, tensor, weight, write, read, sync, embed, embed_add, rms_norm, layer_norm, matmul,
        matmul_activated, activate, add, scale, softcap, add_bias, head_norm, experts, head_matmul, merge,
        sink, gather_rows
    );

    fn virtual_memory(&mut self) -> Option<&mut (impl VirtualMemory<Kv = MappedKv> + ?Sized)> {
        Some(self)
    }

    // Stores in address rows have no arenas: transports use staging buffers, as on a device with virtual memory.
    without!(queued, sampling, shared_arenas, shared_regions, peer_access);

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<MappedKv, DeviceError> {
        self.kv_in(shape, &KvSpace::flat(slots as u32, 1))
    }

    fn kv_shape(&self, kv: &MappedKv) -> KvShape {
        kv.shape
    }

    fn kv_write(&mut self, kv: &mut MappedKv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        kv.assert_own("a write", slot0..slot0 + (bytes.len() / kv.shape.layer_token_bytes()) as u32);
        self.0.kv_write(&mut kv.inner, layer, slot0, bytes)
    }

    fn kv_read(
        &mut self,
        kv: &MappedKv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        kv.assert_held("a read", slot0..slot0 + tokens);
        self.0.kv_read(&kv.inner, layer, slot0, tokens, out)
    }

    fn kv_read_pieces(&mut self, kv: &MappedKv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        pieces.iter().try_for_each(|p| self.kv_read(kv, p.layer as usize, p.slot0, p.tokens, out))
    }

    fn rope_append(
        &mut self,
        qkv: &mut Tensor,
        rope: &Tensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut MappedKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        slots.iter().filter(|slot| **slot != u32::MAX).for_each(|slot| kv.assert_own("a step", *slot..*slot + 1));
        self.0.rope_append(qkv, rope, geometry, slots, &mut kv.inner, layer)
    }

    fn latent_append(
        &mut self,
        qkv: &mut Tensor,
        row: LatentRow<'_, Tensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut MappedKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        slots.iter().filter(|slot| **slot != u32::MAX).for_each(|slot| kv.assert_own("a step", *slot..*slot + 1));
        self.0.latent_append(qkv, row, geometry, slots, &mut kv.inner, layer)
    }

    fn attention(
        &mut self,
        q: &Tensor,
        batch: &AttnBatch<'_>,
        kv: &MappedKv,
        layer: usize,
        out: &mut Partials<Tensor>,
    ) -> Result<(), DeviceError> {
        batch.runs.iter().for_each(|run| kv.assert_held("attention", run.base..run.base + run.len));
        self.0.attention(q, batch, &kv.inner, layer, out)
    }
}
