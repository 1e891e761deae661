//! Additional memory of an instance in the pool: kv nodes in the same process.
//!
//! * **Host memory** (`--host-kv-tokens`), on the CPU backend with tier `host`: micro attention over its rBlocks runs
//!   on the host's processor, or the KV is fetched, as each debtor's cost model decides.
//! * **Lent device memory** (`--lend-device-tokens`), on the instance's own device: debtors on this host map it and
//!   attend to it in place (ADR 19); others use it like any kv node's.
//!
//! Each has its own loop thread, device thread, QUIC endpoint and id, and registers as `NAME-host` or `NAME-lent`. So
//! everything about kv nodes holds for it (leases, moves, drains, failures), for its own instance as for others.

use crate::args::EngineArgs;
use crate::device::{Devices as _, Loading, OwnDevices, Sizes};
use crate::engine::node_status;
use crate::lent_memory::{self, Offer};
use crate::loop_thread::LoopThread;
use crate::model::OpenModel;
use crate::node::{Input, NodeLoop, Pool, Shared};
use crate::node_status::{About, NodeStatus};
use crate::placement::Chosen;
use crate::tier_kind::TierKind;
use anyhow::Context;
use lagoon_instance::{Instance, InstanceConfig};
use lagoon_protocol::{MemoryTier, Role};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Maximum of waiting status queries.
const INPUTS_MAX: usize = 64;

/// A kv node in this process, ready to run.
#[derive(Debug)]
pub(crate) struct Tier {
    kind: TierKind,
    pub(crate) thread: LoopThread,
    pub(crate) node: NodeLoop,
    /// The offer of its memory for mapping, if lent.
    pub(crate) offer: Option<Offer>,
    inputs: mpsc::Sender<Input>,
}

/// Handle to query the status of a running one.
#[derive(Clone, Debug)]
pub(crate) struct TierStatus(TierKind, mpsc::Sender<Input>);

impl TierStatus {
    /// Name of its kind.
    pub(crate) fn name(&self) -> &'static str {
        self.0.name()
    }

    pub(crate) async fn get(&self) -> Option<NodeStatus> {
        node_status(&self.1).await
    }
}

impl Tier {
    /// Starts the memory of this kind that `args` request for the instance `of`, which runs on `chosen`. `join` opens
    /// its endpoint in the pool.
    pub(crate) fn start(
        kind: TierKind,
        chosen: Chosen,
        args: &EngineArgs,
        model: &OpenModel,
        of: &InstanceConfig,
        stop: &CancellationToken,
        join: impl FnOnce() -> anyhow::Result<Pool>,
    ) -> anyhow::Result<Option<Self>> {
        let (flag, Some(tokens)) = (kind.flag(), kind.tokens(args)) else { return Ok(None) };
        anyhow::ensure!(
            tokens >= args.block_tokens,
            "{flag} {tokens} is less than one rBlock of {} tokens\nhint: raise it, or leave it out",
            args.block_tokens
        );
        let (blocks, lend) = (tokens / args.block_tokens, kind == TierKind::Lent);
        anyhow::ensure!(
            !lend || matches!(chosen, Chosen::Cuda { .. }),
            "{flag} lends memory of a CUDA device, and this instance is on {}\n\
             hint: leave it out; whatever --kv-tokens holds is lent in any case",
            chosen.name()
        );
        let sizes = Sizes { blocks_total: blocks, kv_dtype: of.kv.dtype, shared: false, stage_blocks: 0, lend };
        let (report, reports) = mpsc::unbounded_channel();
        let chosen = if lend { chosen } else { Chosen::Cpu };
        let shape = model.shape();
        // On this machine's own device, even if the instance runs on another.
        let running = OwnDevices.start(Loading::new(chosen, args, &shape, sizes, move |r| {
            // The loop may have ended.
            let _ = report.send(r);
        }));
        let running = running
            .with_context(|| format!("allocate the memory of {flag}\nhint: choose a smaller one, or leave it out"))?;
        let offered = running.lent.as_ref().map(|region| lent_memory::offer(region, blocks)).transpose()?;
        let (lent, offer) = offered.unzip();
        let thread = LoopThread::spawn(stop.clone())?;
        let pool = {
            let _network = thread.handle().enter();
            join()?
        };
        let config = InstanceConfig {
            name: format!("{}-{}", of.name, kind.name()),
            quic_addr: pool.addr().to_string(),
            http_addr: String::new(),
            backend: running.info.backend.to_owned(),
            role: Role::Kv,
            tier: if lend { MemoryTier::Device } else { MemoryTier::Host },
            calibration: running.calibration,
            incarnation: rand::random(),
            blocks_total: blocks,
            lend_blocks_max: blocks,
            lend_reserve_blocks: 0,
            transfer: None,
            lent,
            peer_access: None,
            ..of.clone()
        };
        let about = About::new(&config);
        let instance = Instance::new(config)?;
        let shared = Arc::new(Shared::new(&instance));
        let (inputs, receiver) = mpsc::channel(INPUTS_MAX);
        let node = NodeLoop::new(about, instance, running.thread, reports, receiver, Some(pool), shared)
            .beside(kind)
            .with_device_timeout(Duration::from_secs(args.device_timeout_s));
        Ok(Some(Self { kind, thread, node, offer, inputs }))
    }

    /// A handle for status queries.
    pub(crate) fn status(&self) -> TierStatus {
        TierStatus(self.kind, self.inputs.clone())
    }
}
