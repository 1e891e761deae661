//! `lagoon serve`: one instance (or kv node) with its OpenAI endpoint, alone or in a pool.

use crate::args::{EngineArgs, RemoteArg, StageMemoryArg, TlsArgs};
use crate::beside::{Tier, TierStatus};
use crate::cache_tiers;
use crate::capacity::{Beside, DefaultKv, default_kv_tokens};
use crate::device::{Devices, FETCH_TOKENS, Loading, Running, Sizes};
use crate::draft::DraftModel;
use crate::engine::NodeEngine;
use crate::front_args::FrontArgs;
use crate::health_port::{self, HealthArgs};
use crate::hosts::{self, HostPortArgs};
use crate::lent_memory;
use crate::log;
use crate::loop_thread::LoopThread;
use crate::metrics_table;
use crate::model::{OpenModel, defaults, embeddings, resolve, short_name, text};
use crate::node::{NodeLoop, Pool, Shared};
use crate::node_status::About;
use crate::parsers;
use crate::placement::{self, Chosen};
use crate::port::{self, PortArgs};
use crate::shutdown::{self, Ending};
use crate::tier_kind::TierKind;
use crate::transfer_addr::{self, InterfaceArg, Wanted};
use crate::transfers::{self, Transfers};
use anyhow::Context;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::future::join_all;
use lagoon_grammar::Grammars;
use lagoon_http::{Bodies, EmbeddingRules, Engine as _, EngineInfo, GenerationDefaults, Limits, ServerState, TextJobs};
use lagoon_instance::{Instance, InstanceConfig, JointConfig, LayerWindows, MovePace, RemotePolicy};
use lagoon_model::ModelSpec;
use lagoon_protocol::{MemoryTier, Role};
use lagoon_text::{ChatTemplate, Tokenizer};
use lagoon_transport::{Identity, NodeRole};
use lagoon_types::limits::HOST_NAME_BYTES_MAX;
use lagoon_types::{DType, ModelHash};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Role of this process in the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RoleArg {
    /// Runs requests, prompts and answers, and lends.
    #[default]
    #[value(name = "both", alias = "instance")]
    Instance,
    /// Computes prompts for decode workers, which read the KV from its memory; lends.
    Prefill,
    /// Takes requests and has their prompts computed by prefill workers; lends.
    Decode,
    /// Lends memory and micro attention only; needs the model's config.json, not its weights.
    Kv,
}

/// Memory tier of rBlocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TierArg {
    /// Memory of the device that computes attention there (the processor's own on the cpu backend).
    #[default]
    Device,
    /// The host's: large and slow, with attention on its processor.
    Host,
}

/// `lagoon serve`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// A model directory (config.json, safetensors, a tokenizer), a GGUF file or a hub name (org/name[@revision],
    /// org/name:Q4_K_M or org/name/FILE for a GGUF file).
    model: String,
    /// Join the pool of this gManager (host:port of its QUIC endpoint); of several, comma-separated, the one that leads.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = hosts::address)]
    gmanager: Vec<SocketAddr>,
    #[arg(long, value_enum, default_value_t)]
    role: RoleArg,
    /// Which memory the pool counts a kv node's rBlocks as: `host` is used when device memory is full.
    #[arg(long, value_enum, default_value_t)]
    tier: TierArg,
    /// Where the OpenAI endpoint listens.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = hosts::address)]
    http: SocketAddr,
    #[command(flatten)]
    host_port: HostPortArgs,
    /// Where peers are accepted (QUIC, UDP).
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", value_parser = hosts::address)]
    quic: SocketAddr,
    /// Address at which peers reach this instance, if not the one listened on.
    #[arg(long, value_name = "ADDR", value_parser = hosts::address)]
    advertise: Option<SocketAddr>,
    /// Name of the host, the same for all instances on it: creditors on one other host are asked through one of them. For virtual
    /// machines and sandboxes that should count as one host, or that hide the kernel's boot id [default: the boot id].
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    host_name: Option<String>,
    /// Where peers reach the host memory tier (QUIC, UDP) [default: a free port beside --quic].
    #[arg(long, value_name = "ADDR", requires = "host_kv_tokens", value_parser = hosts::address)]
    host_quic: Option<SocketAddr>,
    /// Where peers reach the device memory of --lend-device-tokens (QUIC, UDP) [default: a free port beside --quic].
    #[arg(long, value_name = "ADDR", value_parser = hosts::address)]
    lend_quic: Option<SocketAddr>,
    /// Where decode workers read KV (QUIC, UDP) [default: a free port beside --quic].
    #[arg(long, value_name = "ADDR", value_parser = hosts::address)]
    transfer_quic: Option<SocketAddr>,
    /// The network interface by which KV is read and served: a name, `auto` (of several network cards the one next to the GPU) or
    /// `none` (whichever has the address of --transfer-quic or --quic).
    #[arg(long, value_name = "NAME", default_value = "auto", hide_default_value = true)]
    transfer_interface: InterfaceArg,
    /// Name of this instance, for people.
    #[arg(long, default_value = "lagoon")]
    name: String,
    /// The model's name in requests and responses; of several (repeatable or comma-separated) each is accepted, and responses have
    /// the one that was asked for [default: the directory's, file's or hub name].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = model_name)]
    served_model_name: Vec<String>,
    /// Clients must show this key (`Authorization: Bearer KEY`); /health stays open.
    #[arg(long, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    port: PortArgs,
    #[command(flatten)]
    front: FrontArgs,
    /// Allow `return_logits` in requests (for comparisons).
    #[arg(long)]
    expose_logits: bool,
    /// The model's identity in hexadecimal, for a kv node without weights (the others print it when they start).
    #[arg(long, value_name = "HEX", value_parser = parse_hash)]
    model_hash: Option<ModelHash>,
    /// Seconds that SIGTERM gives requests to finish and lent rBlocks to move away before the process stops.
    #[arg(long, value_name = "N", default_value_t = 25)]
    drain_timeout_s: u64,
    #[command(flatten)]
    health: HealthArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends, for a parent process.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

fn host_name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=HOST_NAME_BYTES_MAX => Ok(text.to_owned()),
        _ => Err(format!("expected 1 to {HOST_NAME_BYTES_MAX} bytes")),
    }
}

fn parse_hash(text: &str) -> Result<ModelHash, String> {
    let byte = |i: usize| text.get(2 * i..2 * i + 2).and_then(|b| u8::from_str_radix(b, 16).ok());
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    match bytes.and_then(|b| <[u8; 32]>::try_from(b).ok()) {
        Some(hash) if text.len() == 64 => Ok(ModelHash(hash)),
        _ => Err("a model's identity is 64 hexadecimal digits".to_owned()),
    }
}

fn open(args: &ServeArgs, dir: &Path) -> anyhow::Result<OpenModel> {
    let id = args.served_model_name.first().cloned().unwrap_or_else(|| short_name(&args.model));
    let (dtype, context) = (args.engine.dtype, args.engine.max_model_len);
    let mut model = match (args.role, args.model_hash) {
        (RoleArg::Kv, Some(hash)) => {
            // Without weights, their type only stands in for that of KV.
            let stated = args.engine.kv_dtype.map(|dtype| dtype.plain().unwrap_or(DType::F16));
            OpenModel::open_shape(dir, id, stated.or(dtype), context, hash)
        }
        (RoleArg::Kv, None) => {
            let mut model = OpenModel::open(dir, id, dtype, context)
                .context("a kv node without weights needs --model-hash (the others print it when they start)")?;
            model.checkpoint = None;
            Ok(model)
        }
        (RoleArg::Instance | RoleArg::Prefill | RoleArg::Decode, _) => OpenModel::open(dir, id, dtype, context),
    }?;
    if args.engine.kv_groups {
        anyhow::ensure!(
            args.engine.drafts() == 0,
            "--draft-tokens and --draft do not go with --kv-groups=on: the windowed KV of a draft that is rejected cannot be taken back\n\
             hint: --kv-groups=off"
        );
        model.config.split_kv()?;
    }
    Ok(model)
}

/// The ready line: addresses and names, for a parent or a script.
#[derive(Debug, serde::Serialize)]
struct Ready<'a> {
    ready: bool,
    http: String,
    quic: Option<String>,
    /// Address of the health port.
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<String>,
    /// Address at which readers of its KV are accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer: Option<String>,
    backend: &'a str,
    device: &'a str,
    model: &'a str,
    model_hash: String,
    kv_tokens: u64,
    /// Why so many.
    kv_because: &'a str,
}

/// Addresses of a node.
#[derive(Clone, Copy, Debug)]
struct Addrs {
    http: SocketAddr,
    quic: Option<SocketAddr>,
    transfer: Option<SocketAddr>,
    health: Option<SocketAddr>,
}

/// Refuses contradicting flags.
fn check(args: &ServeArgs) -> anyhow::Result<()> {
    args.front.front()?;
    args.engine.has_address_rows()?;
    anyhow::ensure!(
        args.tier == TierArg::Device || args.role == RoleArg::Kv,
        "--tier is for kv nodes\nhint: an instance gets host memory besides its own with --host-kv-tokens"
    );
    anyhow::ensure!(
        args.engine.host_kv_tokens.is_none() || !args.gmanager.is_empty(),
        "--host-kv-tokens adds memory to a pool, and this instance is in none\n\
         hint: name the pool's --gmanager, use `lagoon up`, or raise --kv-tokens"
    );
    anyhow::ensure!(
        args.engine.lend_device_tokens == 0 || !args.gmanager.is_empty(),
        "--lend-device-tokens lends memory to a pool, and this instance is in none\n\
         hint: name the pool's --gmanager, use `lagoon up`, or raise --kv-tokens"
    );
    anyhow::ensure!(
        args.engine.lend_device_tokens == 0 || args.advertise.is_none() || args.lend_quic.is_some(),
        "with --advertise the memory of --lend-device-tokens needs a port of its own that peers reach\n\
         hint: name it with --lend-quic"
    );
    anyhow::ensure!(
        !must_share(args.role) || !args.gmanager.is_empty(),
        "prefill and decode workers serve together, and this one is in no pool\n\
         hint: name the pool's --gmanager, or use `lagoon up --prefill 1 --decode 1`"
    );
    anyhow::ensure!(
        args.engine.host_kv_tokens.is_none() || args.advertise.is_none() || args.host_quic.is_some(),
        "with --advertise the host memory tier needs a port of its own that peers reach\nhint: name it with --host-quic"
    );
    Ok(())
}

/// Whether the role requires KV transfer.
fn must_share(role: RoleArg) -> bool {
    matches!(role, RoleArg::Prefill | RoleArg::Decode)
}

/// Whether its KV can be read by others: also in a pool where it may change its role, if that costs no memory, or
/// memory was configured for it.
fn shares_kv(args: &ServeArgs, chosen: Chosen) -> bool {
    let may = || args.role != RoleArg::Kv && !args.gmanager.is_empty();
    let cheap = || chosen == Chosen::Cpu || args.engine.stage_kv_tokens.is_some();
    must_share(args.role) || (may() && cheap() && transfers::is_possible())
}

/// Starts the endpoint and threads of KV transfer, if its KV is shared.
fn start_transfers(args: &ServeArgs, config: &InstanceConfig, running: &Running) -> anyhow::Result<Option<Transfers>> {
    if config.transfer.is_none() {
        return Ok(None);
    }
    anyhow::ensure!(
        !running.memory.is_empty(),
        "prefill and decode workers need memory that others can read, which Linux has\nhint: leave out --role"
    );
    let wanted = Wanted { quic: args.quic, advertise: args.advertise, transfer: args.transfer_quic };
    let endpoint = transfer_addr::choose(&args.transfer_interface, &wanted, running.info.pci)?;
    Transfers::start(config, &running.memory, &endpoint, &args.identity()?).map(Some)
}

/// Sizes of its KV, in whole rBlocks, and the reason for people.
fn sizes(
    args: &ServeArgs,
    model: &OpenModel,
    draft: Option<&DraftModel>,
    chosen: Chosen,
) -> anyhow::Result<(Sizes, String)> {
    let kv_dtype = args.engine.kv_dtype.unwrap_or(model.dtype.into());
    let kv = model.config.kv_shape(kv_dtype);
    let shared = shares_kv(args, chosen);
    let DefaultKv { tokens: kv_tokens, because } = match args.engine.kv_tokens {
        Some(tokens) => DefaultKv { tokens, because: "as --kv-tokens says".to_owned() },
        None => {
            let weight_bytes = model.checkpoint.as_ref().map_or(0, |_| model.dtype.size() as u64);
            let beside = Beside {
                token_bytes: kv.token_bytes() as u64,
                ring_bytes: model.checkpoint.as_ref().map_or(0, |_| ring_bytes(&model.config, kv_dtype, args)),
                weight_bytes,
                step_rows: u64::from(args.engine.step_tokens),
                step_seqs: args.engine.max_running as u64,
                sampled_rows: args.engine.sampled_rows() as u64,
                stages: shared && args.engine.stage_memory == StageMemoryArg::Device,
                stage_tokens: args.engine.stage_kv_tokens.map(u64::from),
                lent_tokens: u64::from(args.engine.lend_device_tokens),
                draft_bytes: draft.map_or(0, |draft| draft.bytes(&args.engine)),
            };
            default_kv_tokens(chosen, &model.config, &beside, args.engine.memory_percent)?
        }
    };
    let block_tokens = args.engine.block_tokens;
    anyhow::ensure!(
        block_tokens > 0 && kv_tokens >= block_tokens,
        "--kv-tokens {kv_tokens} is less than one rBlock of {block_tokens} tokens\nhint: raise --kv-tokens or lower --block-tokens"
    );
    let blocks_total = kv_tokens / block_tokens;
    // Room for one prompt that is read while another one arrives.
    let enough = (2 * model.config.max_positions.div_ceil(block_tokens)).min(blocks_total);
    let stage_blocks = args.engine.stage_kv_tokens.map_or(enough, |tokens| tokens.div_ceil(block_tokens)).max(1);
    let stage_blocks = if shared { stage_blocks } else { 0 };
    Ok((Sizes { blocks_total, kv_dtype, shared, stage_blocks, lend: false }, because))
}

/// Bytes of the rings of windowed KV.
fn ring_bytes(config: &ModelSpec, dtype: lagoon_types::KvDType, args: &ServeArgs) -> u64 {
    let slots = u64::from(config.ring_slots(args.engine.step_tokens)) * args.engine.max_running as u64;
    config.windowed_shape(dtype).map_or(0, |shape| slots * shape.token_bytes() as u64)
}

impl ServeArgs {
    /// The node's certificate; a kv node's may be for that role only.
    fn identity(&self) -> anyhow::Result<Identity> {
        let kv = self.role == RoleArg::Kv;
        self.tls.identity(if kv { &[NodeRole::Kv, NodeRole::Instance] } else { &[NodeRole::Instance] })
    }
}

/// Opens the endpoint of additional memory.
fn join_beside(args: &ServeArgs, kind: TierKind) -> anyhow::Result<Pool> {
    let listen = match kind {
        TierKind::Host => args.host_quic,
        TierKind::Lent => args.lend_quic,
    };
    let listen = listen.unwrap_or(SocketAddr::new(args.quic.ip(), 0));
    let advertise = args.advertise.map(|addr| SocketAddr::new(addr.ip(), listen.port()));
    Pool::join(listen, advertise, &args.identity()?, &args.gmanager)
}

/// Starts the additional memory that the flags configure.
fn start_beside(
    args: &ServeArgs,
    chosen: Chosen,
    model: &OpenModel,
    of: &InstanceConfig,
    stop: &CancellationToken,
) -> anyhow::Result<Vec<Tier>> {
    let join = |kind| join_beside(args, kind);
    let start = |kind| Tier::start(kind, chosen, &args.engine, model, of, stop, || join(kind)).transpose();
    [TierKind::Host, TierKind::Lent].into_iter().filter_map(start).collect()
}

/// A name of the model.
pub(crate) fn model_name(text: &str) -> Result<String, String> {
    match text.is_empty() || text.len() > MODEL_NAME_BYTES_MAX || text.chars().any(char::is_control) {
        true => Err(format!("a name is a text of 1 to {MODEL_NAME_BYTES_MAX} bytes without control characters")),
        false => Ok(text.to_owned()),
    }
}

/// Longest name of a model, in bytes.
const MODEL_NAME_BYTES_MAX: usize = 256;

fn engine_info(args: &ServeArgs, model: &OpenModel) -> EngineInfo {
    let mut aliases: Vec<String> = Vec::new();
    for name in &args.served_model_name {
        if *name != model.id && !aliases.contains(name) {
            aliases.push(name.clone());
        }
    }
    EngineInfo {
        model_id: model.id.clone(),
        aliases: aliases.into(),
        max_model_tokens: model.config.max_positions,
        capacity_tokens: None,
        vocab_size: u32::try_from(model.config.vocab).unwrap_or(u32::MAX),
        slots: u32::try_from(args.engine.max_running).unwrap_or(u32::MAX),
        ready: true,
    }
}

/// Binds the HTTP port; returns the listener and its address.
async fn bind(addr: SocketAddr) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(addr)
        .await
        .with_context(|| format!("listen on {addr}\nhint: choose another address with --http, or --port"))?;
    let addr = listener.local_addr()?;
    Ok((listener, addr))
}

/// Refuses more sequences than a step's frames to peers hold, where those limit the step: the ones left over would wait for ever.
fn check_frames(config: &InstanceConfig, pooled: bool) -> anyhow::Result<()> {
    let (running, rows) = (config.sched.running, config.remote_rows());
    anyhow::ensure!(
        !pooled || rows == config.sched.step_rows || running <= rows as usize,
        "--max-running {running} is more than the {rows} rows whose queries fit a frame to a peer\n\
         hint: lower --max-running"
    );
    Ok(())
}

/// Opens the draft model of an instance that computes tokens, if there is one.
async fn open_draft(args: &ServeArgs, dir: &Path) -> anyhow::Result<Option<DraftModel>> {
    if args.role == RoleArg::Kv {
        return Ok(None);
    }
    let (engine, dir) = (args.engine.clone(), dir.to_owned());
    tokio::task::spawn_blocking(move || DraftModel::open(&engine, &dir)).await?
}

/// Opens the endpoint in the pool that the flags name, on the loop's thread.
fn join_pool(args: &ServeArgs, loop_thread: &LoopThread) -> anyhow::Result<Option<Pool>> {
    if args.gmanager.is_empty() {
        return Ok(None);
    }
    let _network = loop_thread.handle().enter();
    Pool::join(args.quic, args.advertise, &args.identity()?, &args.gmanager).map(Some)
}

/// Runs until Ctrl-C, SIGTERM, or with --exit-with-stdin the end of standard input.
pub(crate) async fn run(args: ServeArgs, devices: &dyn Devices) -> anyhow::Result<()> {
    check(&args)?;
    let front = args.front.front()?;
    let ending = shutdown::graceful(args.exit_with_stdin, Duration::from_secs(args.drain_timeout_s))?;
    let stop = ending.stop.clone();
    let name = args.model.clone();
    let dir = tokio::task::spawn_blocking(move || resolve(&name)).await??;
    let model = open(&args, &dir)?;
    let chosen = placement::choose(args.engine.backend, &args.engine.device)?;
    let draft = open_draft(&args, &dir).await?;
    let (sizes, kv_because) = sizes(&args, &model, draft.as_ref(), chosen)?;
    let texts = (args.role != RoleArg::Kv).then(|| Texts::open(&dir, &model)).transpose()?;
    let (report, reports) = mpsc::unbounded_channel();
    let loading = Loading::new(chosen, &args.engine, &model, sizes, move |r| {
        // The loop ends before the device thread; later reports are not needed.
        let _ = report.send(r);
    });
    let loading = loading.drafting(draft.as_ref()).with_grammars(texts.as_ref().map(|texts| texts.grammars.clone()));
    let running = devices.start(loading)?;
    let (listener, http_addr) = bind(args.host_port.at(args.http)).await?;
    let loop_thread = LoopThread::spawn(stop.clone())?;
    let pool = join_pool(&args, &loop_thread)?;
    let quic_addr = pool.as_ref().map(Pool::addr);
    let config = InstanceConfig {
        calibration: running.calibration.clone(),
        ..instance_config(&args, &model, sizes, running.info.backend, http_addr, quic_addr)
    };
    check_frames(&config, pool.is_some())?;
    let transfer = sizes.shared.then(|| transfers::config(&config, running.stage_blocks, &args.engine)).transpose()?;
    let peer_access = lent_memory::host().filter(|_| running.peer_access && args.role != RoleArg::Kv);
    let config = InstanceConfig { transfer, peer_access, ..config };
    let transfers = start_transfers(&args, &config, &running)?;
    let beside = start_beside(&args, chosen, &model, &config, &stop)?;
    let transfer_addr = transfers.as_ref().map(Transfers::addr);
    let about = About::new(&config);
    let mut instance = Instance::new(config)?;
    if running.space.rows > 0 {
        instance.address_kv(running.space)?;
    }
    let cache_dir = cache_tiers::start(&args.engine, args.role == RoleArg::Kv, &mut instance)?;
    let EngineArgs { move_tokens_per_step: tokens_per_step, move_overlap: overlap, .. } = args.engine;
    instance.set_move_pace(MovePace { tokens_per_step, overlap });
    let shared = Arc::new(Shared::new(&instance));
    let (input, inputs) = mpsc::channel(args.engine.max_queue.max(64) * 2);
    let engine = Arc::new(NodeEngine::new(input, shared.clone(), engine_info(&args, &model)));
    let node = NodeLoop::new(about, instance, running.thread, reports, inputs, pool, shared)
        .polling(Duration::from_micros(args.engine.poll_us))
        .with_device_timeout(Duration::from_secs(args.engine.device_timeout_s))
        .transferring(transfers.map(|transfers| transfers.announcing(!args.json)))
        .caching_in(cache_dir)
        .draining_on(ending.drain.clone());
    let source = StatusSource { engine, beside: beside.iter().map(Tier::status).collect() };
    let (router, health) = router(&args, texts, source, &stop)?;
    ending.serves();
    announce(
        &args,
        &model,
        &running.info,
        (sizes, &kv_because),
        Addrs { http: http_addr, quic: quic_addr, transfer: transfer_addr, health },
    )?;
    let of_pool = port::pool_files(&args.tls, port::is_gateway).filter(|_| !args.gmanager.is_empty());
    let port = args.port.port(listener, args.api_key.as_deref(), of_pool, front)?;
    let server = lagoon_http::serve(port, router, stop.cancelled_owned());
    let (served, looped) = tokio::join!(server, run_loops((loop_thread, node), beside, ending));
    served.context("serve HTTP")?;
    looped
}

/// Runs the loops of the instance and of its additional memory to their ends.
async fn run_loops(own: (LoopThread, NodeLoop), beside: Vec<Tier>, ending: Ending) -> anyhow::Result<()> {
    let ending = &ending;
    let beside = beside.into_iter().map(async |of| {
        let (name, _offer) = (of.status().name(), of.offer);
        let ran = run_loop(of.thread, of.node.draining_on(ending.drain.clone()), ending).await;
        ran.with_context(|| format!("the memory beside it ({name})"))
    });
    let (own, beside) = tokio::join!(run_loop(own.0, own.1, ending), join_all(beside));
    ending.stop.cancel();
    beside.into_iter().fold(own, Result::and)
}

/// Runs one loop. A loop that fails ends the process; one that is drained drains the others.
async fn run_loop(thread: LoopThread, node: NodeLoop, ending: &Ending) -> anyhow::Result<()> {
    let result = thread.run(node).await;
    match &result {
        Ok(()) => ending.drain.cancel(),
        Err(_) => ending.stop.cancel(),
    }
    result
}

/// Free rBlocks that an instance of `blocks_total` never lends.
pub(crate) fn lend_reserve_blocks(blocks_total: u32) -> u32 {
    (blocks_total / 64).clamp(1, 16)
}

fn layer_windows(spec: &ModelSpec) -> LayerWindows {
    let (pooled, unpooled) = spec.layer_windows();
    LayerWindows { pooled, unpooled }
}

fn instance_config(
    args: &ServeArgs,
    model: &OpenModel,
    sizes: Sizes,
    backend: &str,
    http_addr: SocketAddr,
    quic_addr: Option<SocketAddr>,
) -> InstanceConfig {
    let engine = &args.engine;
    let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let lend_blocks_max = u64::from(sizes.blocks_total) * u64::from(engine.lend_percent) / 100;
    InstanceConfig {
        name: args.name.clone(),
        quic_addr: quic_addr.map(|a| a.to_string()).unwrap_or_default(),
        http_addr: match args.role {
            RoleArg::Instance | RoleArg::Prefill | RoleArg::Decode => http_addr.to_string(),
            RoleArg::Kv => String::new(),
        },
        host: args.host_name.clone().or_else(lent_memory::boot_id).unwrap_or_default(),
        backend: backend.to_owned(),
        role: match args.role {
            RoleArg::Instance => Role::Instance,
            RoleArg::Prefill => Role::Prefill,
            RoleArg::Decode => Role::Decode,
            RoleArg::Kv => Role::Kv,
        },
        tier: match args.tier {
            TierArg::Device => MemoryTier::Device,
            TierArg::Host => MemoryTier::Host,
        },
        calibration: None,
        incarnation: rand::random(),
        model_hash: model.hash,
        geometry: model.config.geometry,
        kv: model.config.kv_shape(sizes.kv_dtype),
        window: model.config.window(),
        windowed: model.config.window_shape(),
        layer_windows: layer_windows(&model.config),
        attention_scale: model.config.attention_scale,
        alibi: model.config.alibi,
        attention_softcap: model.config.attention_softcap,
        max_positions: model.config.max_positions,
        vocab: as_u32(model.config.vocab),
        block_tokens: engine.block_tokens,
        blocks_total: sizes.blocks_total,
        lend_blocks_max: u32::try_from(lend_blocks_max).unwrap_or(u32::MAX),
        // A kv node borrows nothing, so no swap cycle starts at it.
        lend_reserve_blocks: match args.role {
            RoleArg::Kv => 0,
            _ => lend_reserve_blocks(sizes.blocks_total),
        },
        sched: engine.scheduler(),
        remote: match engine.remote_attention {
            RemoteArg::Auto => RemotePolicy::Auto,
            RemoteArg::Ship => RemotePolicy::Ship,
            RemoteArg::Fetch => RemotePolicy::Fetch,
        },
        wire: engine.wire_dtype,
        fetch_tokens: FETCH_TOKENS,
        link_bytes_per_s: LINK_BYTES_PER_S,
        attention_flops: ATTENTION_FLOPS,
        prefix_cache: engine.prefix_cache,
        joint: JointConfig { instances: engine.prefill_instances, tokens_min: engine.prefill_instances_tokens },
        target_step_ms: engine.target_tbt_ms,
        transfer: None,
        lent: None,
        peer_access: None,
    }
}

/// Bandwidth to peers, in bytes per second, that the choice between shipping and fetching assumes until measured.
const LINK_BYTES_PER_S: f64 = 1e9;
/// As [`LINK_BYTES_PER_S`], for attention operations per second on this instance.
const ATTENTION_FLOPS: f64 = 5e10;

/// The sources of `/lagoon/status`.
#[derive(Clone, Debug)]
struct StatusSource {
    engine: Arc<NodeEngine>,
    beside: Vec<TierStatus>,
}

/// The parts of a model that make texts of its tokens.
struct Texts {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    grammars: Grammars,
    defaults: GenerationDefaults,
    embeddings: EmbeddingRules,
}

impl Texts {
    fn open(dir: &Path, model: &OpenModel) -> anyhow::Result<Self> {
        let (tokenizer, template) = text(dir)?;
        let (tokenizer, defaults) = (Arc::new(tokenizer), defaults(dir, &model.config)?);
        let vocab = u32::try_from(model.config.vocab).unwrap_or(u32::MAX);
        let grammars = Grammars::new(Arc::clone(&tokenizer), vocab, &defaults.eos_ids);
        let embeddings = embeddings(dir, model);
        Ok(Self { tokenizer, template, grammars, defaults, embeddings })
    }
}

fn router(
    args: &ServeArgs,
    texts: Option<Texts>,
    source: StatusSource,
    stop: &CancellationToken,
) -> anyhow::Result<(axum::Router, Option<SocketAddr>)> {
    let engine = source.engine.clone();
    let probed = engine.clone();
    let ready = move || if probed.info().ready { Ok(()) } else { Err("it is drained or has ended".to_owned()) };
    let status = axum::routing::get(status).with_state(source);
    let Some(Texts { tokenizer, template, grammars, defaults, embeddings }) = texts else {
        let health = axum::routing::get(|| async { "ok" });
        let router = axum::Router::new().route("/health", health).route("/lagoon/status", status);
        return Ok((router, args.health.start(&args.port, ready, None, stop)?));
    };
    let metrics = lagoon_http::metrics::install(metrics_table::INSTANCE)?;
    let health = args.health.start(&args.port, ready, Some(health_port::recorded(&metrics)), stop)?;
    let state = ServerState {
        engine,
        tokenizer,
        grammars,
        formats: parsers::formats((args.engine.tool_parser, args.engine.reasoning_parser), template.as_ref())?,
        template: template.map(Arc::new),
        defaults,
        embeddings,
        limits: Limits::default(),
        bodies: Bodies::default(),
        text_jobs: TextJobs::default(),
        expose_logits: args.expose_logits,
        metrics,
        compat: args.front.compat(),
        created: lagoon_http::unix_seconds(),
    };
    let router = axum::Router::new().route("/lagoon/status", status).fallback_service(lagoon_http::router(state));
    Ok((router, health))
}

/// The instance's own status, and that of its additional memory, under `host` and `lent`.
async fn status(State(source): State<StatusSource>) -> Response {
    let Some(status) = source.engine.status().await else { return StatusCode::SERVICE_UNAVAILABLE.into_response() };
    let Ok(mut shown) = serde_json::to_value(status) else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    for beside in &source.beside {
        if let Some(status) = beside.get().await {
            shown[beside.name()] = serde_json::to_value(status).unwrap_or_default();
        }
    }
    Json(shown).into_response()
}

fn announce(
    args: &ServeArgs,
    model: &OpenModel,
    info: &lagoon_backend::DeviceInfo,
    (sizes, kv_because): (Sizes, &str),
    addrs: Addrs,
) -> anyhow::Result<()> {
    let ready = Ready {
        ready: true,
        http: addrs.http.to_string(),
        quic: addrs.quic.map(|a| a.to_string()),
        health: addrs.health.map(|a| a.to_string()),
        transfer: addrs.transfer.map(|a| a.to_string()),
        backend: info.backend,
        device: &info.name,
        model: &model.id,
        model_hash: model.hash.0.iter().map(|b| format!("{b:02x}")).collect(),
        kv_tokens: u64::from(sizes.blocks_total) * u64::from(args.engine.block_tokens),
        kv_because,
    };
    if args.json {
        log::announce(serde_json::to_string(&ready)?);
    } else {
        log::announce(format_args!(
            "{} on {} ({}), {} KV tokens",
            ready.model, ready.backend, ready.device, ready.kv_tokens
        ));
        log::announce(format_args!("model identity {}", ready.model_hash));
        if matches!(args.role, RoleArg::Instance | RoleArg::Decode) {
            log::announce(format_args!("OpenAI endpoint {}://{}/v1", args.port.scheme(), ready.http));
        }
        if let Some(health) = &ready.health {
            log::announce(format_args!("probes on {}://{health}/ready", args.port.scheme()));
        }
        if let Some(quic) = &ready.quic {
            log::announce(format_args!("peers on {quic}"));
        }
    }
    Ok(())
}
