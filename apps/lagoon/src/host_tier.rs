//! Host memory of an instance as part of the pool: a kv node on the CPU backend in the same process.
//!
//! It has its own loop thread, QUIC endpoint and number, and registers as `NAME-host` with tier `host`; so whatever holds
//! for kv nodes holds for it (leases, moves, drains, failures), for its own instance as for others. Micro attention over
//! its rBlocks runs on the host's processor, or the KV is fetched, as each debtor's cost model decides.

use crate::args::EngineArgs;
use crate::device::{self, Sizes};
use crate::engine::node_status;
use crate::loop_thread::LoopThread;
use crate::model::OpenModel;
use crate::node::{About, Input, NodeLoop, NodeStatus, Pool, Shared};
use crate::placement::Chosen;
use anyhow::Context;
use lagoon_instance::{Instance, InstanceConfig};
use lagoon_protocol::{MemoryTier, Role};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Questions about its state that wait at most.
const INPUTS_MAX: usize = 64;

/// A host tier that is ready to run.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) thread: LoopThread,
    pub(crate) node: NodeLoop,
    inputs: mpsc::Sender<Input>,
}

/// Asks a host tier that runs for its state.
#[derive(Clone, Debug)]
pub(crate) struct HostStatus(mpsc::Sender<Input>);

impl HostStatus {
    pub(crate) async fn get(&self) -> Option<NodeStatus> {
        node_status(&self.0).await
    }
}

impl HostTier {
    /// The host tier that `args` ask for beside the instance `of`. `join` opens its endpoint in the pool.
    pub(crate) fn start(
        args: &EngineArgs,
        model: &OpenModel,
        of: &InstanceConfig,
        stop: &CancellationToken,
        join: impl FnOnce() -> anyhow::Result<Pool>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(tokens) = args.host_kv_tokens else { return Ok(None) };
        anyhow::ensure!(
            tokens >= args.block_tokens,
            "--host-kv-tokens {tokens} is less than one rBlock of {} tokens\nhint: raise it, or leave it out",
            args.block_tokens
        );
        let blocks_total = tokens / args.block_tokens;
        let sizes = Sizes { blocks_total, kv_dtype: of.kv.dtype, shared: false, stage_blocks: 0 };
        let (report, reports) = mpsc::unbounded_channel();
        // A profile paces the instance's device, not the host.
        let own = EngineArgs { pace: None, ..args.clone() };
        let running = device::start(Chosen::Cpu, &own, &model.shape(), sizes, move |r| {
            // As for the instance itself.
            let _ = report.send(r);
        })
        .context("allocate the host memory tier\nhint: choose a smaller --host-kv-tokens")?;
        let thread = LoopThread::spawn(stop.clone())?;
        let pool = {
            let _network = thread.handle().enter();
            join()?
        };
        let config = InstanceConfig {
            name: format!("{}-host", of.name),
            quic_addr: pool.addr().to_string(),
            http_addr: String::new(),
            backend: running.info.backend.to_owned(),
            role: Role::Kv,
            tier: MemoryTier::Host,
            calibration: running.calibration,
            incarnation: rand::random(),
            blocks_total: sizes.blocks_total,
            lend_blocks_max: sizes.blocks_total,
            lend_reserve_blocks: 0,
            transfer: None,
            ..of.clone()
        };
        let about = About::new(&config);
        let instance = Instance::new(config)?;
        let shared = Arc::new(Shared::new(&instance));
        let (inputs, receiver) = mpsc::channel(INPUTS_MAX);
        let node = NodeLoop::new(about, instance, running.thread, reports, receiver, Some(pool), shared);
        Ok(Some(Self { thread, node, inputs }))
    }

    /// To ask it once it runs.
    pub(crate) fn status(&self) -> HostStatus {
        HostStatus(self.inputs.clone())
    }
}
