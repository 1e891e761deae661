//! Made-up pools, for tests of planning: consistent in themselves, different for every seed.

use crate::perf::{LinkView, ModelShape};
use crate::planner::{InstanceView, PoolView, RemoteBlocks, RequestView};
use lagoon_protocol::{BatchPoint, Calibration, Load, MemoryTier, Role};
use lagoon_types::{InstanceId, SeqId};

/// What a made-up pool is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Synthetic {
    pub(crate) instances: u32,
    /// Requests of one instance at most.
    pub(crate) requests: u32,
    /// rBlocks of one instance at most.
    pub(crate) blocks: u32,
    /// One in so many instances holds one long request, and little else; 0: none does.
    pub(crate) long_every: u32,
    /// One in so many instances is a kv node in host memory; 0: none is.
    pub(crate) kv_every: u32,
    /// One in so many requests has blocks on another instance; 0: none has.
    pub(crate) remote_every: u32,
    pub(crate) seed: u64,
}

/// A small generator of its own, so that the library needs no random numbers (splitmix64).
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    /// One of `0..below`; 0 if that is empty.
    fn below(&mut self, below: u32) -> u32 {
        let n = self.next() >> 32;
        u32::try_from(n % u64::from(below.max(1))).unwrap_or(0)
    }

    fn one_in(&mut self, n: u32) -> bool {
        n > 0 && self.below(n) == 0
    }
}

impl Synthetic {
    /// The pool of this description.
    #[must_use]
    pub(crate) fn view(&self) -> PoolView {
        let mut dice = Dice(self.seed);
        let shape = ModelShape { layers: 32, block_tokens: 32, token_bytes: 131_072, row_bytes: 16_516 };
        let mut view = PoolView { now_ms: 1_000_000, shape, ..PoolView::default() };
        for i in 1..=self.instances {
            let instance = self.instance(&mut dice, i);
            view.instances.insert(InstanceId(i), instance);
        }
        if self.remote_every > 0 {
            self.lend(&mut view, &mut dice);
        }
        for id in 1..=self.instances {
            settle(&mut view, InstanceId(id));
        }
        view
    }

    fn instance(&self, dice: &mut Dice, i: u32) -> InstanceView {
        let kv = dice.one_in(self.kv_every);
        let speed = 1.0 + f64::from(dice.below(4));
        let batch = |batch: u32| BatchPoint { batch, step_us: speed * (8_000.0 + 25.0 * f64::from(batch)) };
        let calibration = Calibration {
            batches: if kv { Vec::new() } else { [1, 8, 32, 64, 256].map(batch).to_vec() },
            attention_us_per_ktoken: speed * if kv { 200.0 } else { 20.0 },
            prefill_us_per_token: speed * 50.0,
            copy_bytes_per_s: 5e9,
            prompt_attention_us_per_ktoken: 0.0,
        };
        let total = self.blocks / 2 + dice.below(self.blocks / 2 + 1);
        let mut view = InstanceView {
            role: if kv { Role::Kv } else { Role::Instance },
            tier: if kv { MemoryTier::Host } else { MemoryTier::Device },
            calibration: (!dice.one_in(20)).then_some(calibration),
            blocks_total: total,
            blocks_free: total,
            ..InstanceView::default()
        };
        // Links to near neighbours, some without a bulk rate yet.
        let near = (1..4).map(|d| (i + d - 1) % self.instances + 1).filter(|n| *n != i);
        for peer in near {
            let rtt_us = f64::from(20 + dice.below(400));
            let bytes_per_s = if dice.one_in(3) { 0.0 } else { 1e9 * f64::from(1 + dice.below(10)) };
            view.links.push((InstanceId(peer), LinkView { rtt_us, bytes_per_s }));
        }
        view.links.sort_by_key(|l| l.0);
        view.links.dedup_by_key(|l| l.0);
        if !kv {
            self.requests(dice, &mut view);
        }
        view
    }

    fn requests(&self, dice: &mut Dice, view: &mut InstanceView) {
        let long = dice.one_in(self.long_every);
        let count = if long { 1 + dice.below(3) } else { dice.below(self.requests + 1) };
        let share = (view.blocks_total / count.max(1)).max(1);
        for seq in 0..count {
            let want = if long && seq == 0 { view.blocks_total } else { 1 + dice.below(share) };
            let local = want.min(view.blocks_free);
            if local == 0 {
                break;
            }
            view.blocks_free -= local;
            let request = RequestView { local, local_sealed: local - 1, ..RequestView::default() };
            view.requests.insert(SeqId(u64::from(seq)), request);
        }
        for _ in 0..if view.blocks_free < view.blocks_total / 4 { dice.below(20) } else { 0 } {
            view.load.queue_blocks.push(1 + dice.below(40));
        }
    }

    /// Gives some requests blocks on instances with room; no creditor is a debtor.
    fn lend(&self, view: &mut PoolView, dice: &mut Dice) {
        for debtor in (1..=self.instances).step_by(2) {
            let seqs: Vec<SeqId> = view.instances[&InstanceId(debtor)].requests.keys().copied().collect();
            for seq in seqs {
                let creditor = InstanceId(2 * (1 + dice.below(self.instances / 2)));
                if creditor.0 > self.instances || !dice.one_in(self.remote_every) {
                    continue;
                }
                let lender = view.instances.get_mut(&creditor).expect("made before");
                let blocks = (1 + dice.below(30)).min(lender.blocks_free / 2);
                if blocks == 0 {
                    continue;
                }
                lender.blocks_free -= blocks;
                match lender.lent.iter_mut().find(|l| l.0 == InstanceId(debtor)) {
                    Some(lent) => lent.1 += blocks,
                    None => lender.lent.push((InstanceId(debtor), blocks)),
                }
                let instance = view.instances.get_mut(&InstanceId(debtor)).expect("made before");
                instance.borrowed += blocks;
                let request = instance.requests.get_mut(&seq).expect("listed before");
                request.remote.push(RemoteBlocks { creditor, blocks, sealed: blocks });
            }
        }
    }
}

/// Makes an instance's load what its requests and remote requests say.
fn settle(view: &mut PoolView, id: InstanceId) {
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(view.shape.block_tokens);
    let instance = view.instances.get_mut(&id).expect("made before");
    let local: u32 = instance.requests.values().map(|r| r.local).sum();
    let remote_requests: u32 = instance.lent.iter().map(|l| l.1).sum();
    let batch = u32::try_from(instance.requests.len()).unwrap_or(u32::MAX);
    instance.blocks_lendable = instance.blocks_free.saturating_sub(2);
    instance.load = Load {
        batch,
        context_tokens: tokens(local + instance.borrowed),
        remote_tokens: tokens(instance.borrowed),
        remote_request_tokens: tokens(remote_requests),
        queue_blocks: std::mem::take(&mut instance.load.queue_blocks),
        batch_max: 256,
        step_us: 0,
        head_waits_ms: 0,
        prefill_tokens: None,
        answer_tokens_max: None,
    };
}
