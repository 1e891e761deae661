//! Flags shared by several commands.

use crate::cache_dir;
use crate::parsers::{self, ReasoningParser, ToolParser};
use crate::placement::{BackendArg, DeviceArg};
use anyhow::Context;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args as _, Command, FromArgMatches};
use lagoon_instance::SchedulerConfig;
use lagoon_transport::{Identity, NodeRole, Subject};
use lagoon_types::limits::{DEVICE_STUCK_MS, DRAFT_ROWS_MAX, JOINT_MEMBERS_MAX, JOINT_TOKENS_MIN};
use lagoon_types::{DType, KvDType};
use std::path::PathBuf;

/// How remote KV is attended to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RemoteArg {
    /// Whichever is predicted to delay a layer less, per sequence and chunk.
    #[default]
    Auto,
    /// Queries travel to the KV.
    Ship,
    /// KV travels to the queries.
    Fetch,
}

/// How a decode worker reads KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TransferPathArg {
    /// The first that is possible: device memory of the same GPU or a peer, shared memory on one host, QUIC.
    #[default]
    Auto,
    /// Over QUIC, also on one host: for benchmarks.
    Quic,
}

/// Where the staging buffer is, through which KV passes whose store other processes cannot read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StageMemoryArg {
    /// In CUDA device memory: workers on this host with the same GPU or a peer read it on the device. Other backends: as `host`.
    #[default]
    Device,
    /// In host memory, which all workers on this host share.
    Host,
}

/// Where a sequence's KV lies on a device with virtual memory (CUDA).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AddressRowsArg {
    /// As `on`, but as `off` with --prefill-instances.
    #[default]
    Auto,
    /// At consecutive virtual addresses, which attention reads without a block table.
    On,
    /// In rBlocks anywhere, which attention finds by a block table.
    Off,
}

/// When a decode worker gets the KV of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KvTransferArg {
    /// When it is computed and the decode worker has memory for it.
    #[default]
    Pull,
    /// Layer by layer while it is computed, into memory that is allocated first.
    Push,
}

/// Whether an instance measures itself at start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CalibrateArg {
    /// Once for each model, backend, device and element type, then from the cache.
    #[default]
    Auto,
    /// At every start.
    Always,
    /// Never: the planner assumes numbers.
    Off,
}

/// How activations enter the 16-bit tensor cores of a CUDA device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PrecisionArg {
    /// Rounded to the type of weights and KV, as most engines do.
    #[default]
    Fast,
    /// As sums of two 16-bit numbers: about as exact as f32, twice the products of prompts.
    Exact,
}

/// The node's certificate.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct TlsArgs {
    /// The cluster's CA (`lagoon certs init`).
    #[arg(long, global = true, value_name = "PEM", env = "LAGOON_TLS_CA")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// This node's certificate (`lagoon certs issue`).
    #[arg(long, global = true, value_name = "PEM", env = "LAGOON_TLS_CERT")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// This node's private key.
    #[arg(long, global = true, value_name = "PEM", env = "LAGOON_TLS_KEY")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The CA's revocation list (`lagoon certs revoke`).
    #[arg(long, global = true, value_name = "PEM", env = "LAGOON_TLS_CRL")]
    pub(crate) tls_crl: Option<PathBuf>,
}

impl TlsArgs {
    /// Reads the three files. The certificate must be for one of `roles`, as peers will ask for that.
    pub(crate) fn identity(&self, roles: &[NodeRole]) -> anyhow::Result<Identity> {
        let (Some(ca), Some(cert), Some(key)) = (&self.tls_ca, &self.tls_cert, &self.tls_key) else {
            anyhow::bail!(
                "a pool speaks mutual TLS: --tls-ca, --tls-cert and --tls-key are needed\n\
                 hint: `lagoon certs init DIR`, then `lagoon certs issue DIR NAME --role ROLE` for every node; \
                 `lagoon up` and `lagoon demo` make their own"
            );
        };
        let identity = Identity::load(ca, cert, key, self.tls_crl.as_deref()).context("load the node's certificate")?;
        let Subject { node, roles: has, .. } = identity.subject();
        let needed = roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ");
        anyhow::ensure!(
            has.has_any(roles),
            "the certificate of node {node:?} is for {has}, and {needed} is needed here\n\
             hint: lagoon certs issue DIR {node} --role {} --force",
            roles.first().map_or("instance", |role| role.name())
        );
        Ok(identity)
    }
}

/// Flags that decide an instance's size and numerics.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EngineArgs {
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendArg,
    /// Which of the backend's devices: its number in `lagoon doctor` or a part of its name; `lagoon up` takes several,
    /// comma-separated, for its instances in turn [default: the first; `lagoon up` takes all of CUDA's].
    #[arg(long, value_name = "N|NAME", value_delimiter = ',')]
    pub(crate) device: Vec<DeviceArg>,
    /// Percent of a CUDA device's memory that weights, KV and buffers take without --kv-tokens; `lagoon up` divides it among the
    /// instances on a device.
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) memory_percent: u32,
    /// Convert weights on loading: f32, f16 or bf16 [default: as stored].
    #[arg(long, value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,
    /// Element type of the KV cache: f32, f16, bf16 or fp8, which halves the KV memory and the KV traffic of 16 bits and loses
    /// some accuracy. The same in the whole pool [default: that of the weights].
    #[arg(long, value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: Option<KvDType>,
    /// KV capacity of each instance, in tokens [default: by the memory there is].
    #[arg(long, value_name = "N")]
    pub(crate) kv_tokens: Option<u32>,
    /// Keep only the last window of KV in layers with a window (gpt-oss, Gemma), on the instance itself, for --max-running
    /// requests. A token takes less KV memory. After a prefix-cache hit or a loss of KV, some tokens are computed again. All
    /// instances of a pool need the same setting.
    #[arg(long, value_name = "on|off", default_value = "off", value_parser = parse_switch, action = clap::ArgAction::Set)]
    pub(crate) kv_groups: bool,
    /// Longest context that is served, prompt and answer, in tokens; at most config.json's. A model with LongRoPE (Phi-3,
    /// Phi-4-mini) gets the factors of short contexts if N is within its original one. Give all instances of a pool the same N:
    /// requests go to any of them, and one with other LongRoPE factors is refused [default: that of config.json].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_model_len: Option<u32>,
    /// Tokens of KV in host memory, added to each instance as a kv node of the pool [default: none].
    #[arg(long, value_name = "N")]
    pub(crate) host_kv_tokens: Option<u32>,
    /// Tokens of KV in CUDA device memory, added to each instance as a kv node of the pool: instances on this host with the same
    /// GPU or a peer map it and attend to it in place.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) lend_device_tokens: u32,
    /// Tokens of the staging buffer through which KV of prefill and decode workers passes on wgpu and CUDA [default: twice the
    /// longest sequence, at most the KV memory].
    #[arg(long, value_name = "N")]
    pub(crate) stage_kv_tokens: Option<u32>,
    /// Where the staging buffer is.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) stage_memory: StageMemoryArg,
    /// Tokens in an rBlock; the same in the whole pool.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::BLOCK_TOKENS_DEFAULT)]
    pub(crate) block_tokens: u32,
    /// Tokens that one step computes at most; prompts are prefilled in such chunks.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::STEP_ROWS_DEFAULT as u32)]
    pub(crate) step_tokens: u32,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::RUNNING_DEFAULT)]
    pub(crate) max_running: usize,
    /// Speculative decoding: tokens drafted for a sequence in one step, at most, by the model of --draft or by looking up what
    /// followed the newest tokens before; 0 for none. Answers stay the same, but for rounding. Without --draft it pays where text
    /// repeats; with either, most where KV is remote. Not with --kv-groups=on [default: 4 with --draft, else 0].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(DRAFT_ROWS_MAX)))]
    pub(crate) draft_tokens: Option<u32>,
    /// Draft model of speculative decoding: a small model with the same tokenizer (a directory, GGUF file or hub name), run on the
    /// same device.
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
    /// Tokens of KV for the draft model, beside --kv-tokens.
    #[arg(long, value_name = "N", default_value_t = 32_768, requires = "draft", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) draft_kv_tokens: u32,
    /// Requests that wait at most; more are refused with 429.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::QUEUE_DEFAULT)]
    pub(crate) max_queue: usize,
    /// Share of the KV capacity that may be lent, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) lend_percent: u32,
    /// Latency target of an instance's decode steps, in milliseconds: it lends only as much memory, and computes prompts beside them
    /// only in such chunks, as the target leaves time for [default: no limit].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub(crate) target_tbt_ms: Option<u32>,
    /// Instances that compute a long prompt together, this one included: auto for as many as pay, 1 for this one alone. Not for
    /// models with a sliding window in all layers, with --kv-groups=on or with --kv-address-rows=on.
    #[arg(long, value_name = "auto|N", default_value = "1", value_parser = parse_prefill_instances)]
    pub(crate) prefill_instances: u32,
    /// Tokens to compute from which on a prompt is computed by several instances: for tests and benchmarks.
    #[arg(long, value_name = "N", hide = true, default_value_t = JOINT_TOKENS_MIN)]
    pub(crate) prefill_instances_tokens: u32,
    /// Whether a sequence's KV has consecutive addresses on a device with virtual memory (CUDA).
    #[arg(long, value_enum, default_value_t)]
    pub(crate) kv_address_rows: AddressRowsArg,
    /// Keep KV in free memory and share it among requests with a common prefix. The time to first token then shows whether
    /// another client sent the same prefix before.
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    pub(crate) prefix_cache: bool,
    /// Tokens of KV that each instance keeps in host memory for prompts whose prefix was evicted from its KV memory; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) host_cache_tokens: u32,
    /// Directory in which each instance keeps KV on disk for prompts whose prefix was evicted, also for those of its next
    /// process. One process has a directory; `lagoon up` makes one in DIR for each instance. Who can read it can learn prompts.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Bytes that the cache directory takes, with K, M, G or T for powers of 1024.
    #[arg(long, value_name = "BYTES", default_value = "32G", requires = "cache_dir", value_parser = cache_dir::parse_bytes)]
    pub(crate) cache_dir_bytes: u64,
    /// Tokens from which on a prefix is loaded from host memory or disk [default: as measured]: for tests and benchmarks.
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) cache_load_tokens: Option<u32>,
    /// How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, openai, deepseek_v3, deepseek_v31, glm45 or
    /// none [default: as its chat template shows].
    #[arg(long, alias = "tool-call-parser", value_name = "NAME", value_parser = parsers::tool_parser)]
    pub(crate) tool_parser: Option<ToolParser>,
    /// How the model writes its reasoning: deepseek_r1, qwen3, glm45, openai_gptoss or none [default: as its chat template
    /// shows].
    #[arg(long, value_name = "NAME", value_parser = parsers::reasoning_parser)]
    pub(crate) reasoning_parser: Option<ReasoningParser>,
    /// At temperature 0, an answer is the same, bit by bit, whatever else runs on the instance, as long as it borrows no memory.
    /// The CPU backend only, and not with --kv-groups=on; packed weights are converted, and prompts computed more slowly.
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// Threads of the CPU backend [default: all cores].
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Seconds without a finished layer after which the device counts as hung: the process ends, and others take its
    /// requests.
    #[arg(long, value_name = "N", default_value_t = DEVICE_STUCK_MS / 1000, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) device_timeout_s: u64,
    /// Microseconds to poll for a peer's frame that is due before sleeping; about 1000 shortens the wait of each layer with remote
    /// KV where a core is free.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    pub(crate) poll_us: u64,
    /// Tokens of KV that move per step and decoding sequence [default: as measured]: for benchmarks.
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) move_tokens_per_step: Option<u32>,
    /// Whether steps go on while KV is copied, or wait for the copies: for benchmarks.
    #[arg(long, value_name = "on|off", hide = true, default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    pub(crate) move_overlap: bool,
    /// When a decode worker reads the KV of a prompt.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) kv_transfer: KvTransferArg,
    /// How a decode worker reads the KV that prefill workers computed.
    #[arg(long, value_enum, hide = true, default_value_t)]
    pub(crate) transfer_path: TransferPathArg,
    /// How KV on creditors is attended to.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) remote_attention: RemoteArg,
    /// Element type of queries and partials between instances.
    #[arg(long, value_parser = parse_dtype, default_value = "f32")]
    pub(crate) wire_dtype: DType,
    /// Measure this instance at start for the planner, in about a second; on CUDA also tune attention, in three more.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) calibrate: CalibrateArg,
    /// How activations enter the tensor cores of a CUDA device (all that are supported have such: compute capability 8.0 and
    /// newer); other backends compute in f32.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) cuda_precision: PrecisionArg,
}

/// Tokens that a draft model proposes at a time, by default.
const DRAFT_MODEL_TOKENS: u32 = 4;

impl EngineArgs {
    /// Whether sequences have address rows where the device has virtual memory. Joint prefill needs KV that a block table finds.
    ///
    /// # Errors
    /// If both were asked for.
    pub(crate) fn has_address_rows(&self) -> anyhow::Result<bool> {
        let joint = self.prefill_instances != 1;
        anyhow::ensure!(
            self.kv_address_rows != AddressRowsArg::On || !joint,
            "--prefill-instances needs KV that a block table finds, and --kv-address-rows=on asks for consecutive addresses\n\
             hint: leave out --kv-address-rows, or --prefill-instances=1"
        );
        Ok(match self.kv_address_rows {
            AddressRowsArg::Auto => !joint,
            AddressRowsArg::On => true,
            AddressRowsArg::Off => false,
        })
    }

    pub(crate) fn scheduler(&self) -> SchedulerConfig {
        let &Self { max_queue: queue, max_running: running, step_tokens: step_rows, .. } = self;
        SchedulerConfig { queue, running, step_rows, drafts: self.drafts(), draft_model: self.draft.is_some() }
    }

    /// Tokens drafted for a sequence in one step, at most.
    pub(crate) fn drafts(&self) -> u32 {
        self.draft_tokens.unwrap_or(if self.draft.is_some() { DRAFT_MODEL_TOKENS } else { 0 })
    }

    /// Rows of one step whose logits are wanted.
    pub(crate) fn sampled_rows(&self) -> usize {
        let drafts = if self.drafts() > 0 { DRAFT_ROWS_MAX as usize } else { 0 };
        (self.max_running + drafts).min(self.step_tokens as usize)
    }
}

/// [`EngineArgs`] of a command that starts instances as child processes.
#[derive(Clone, Debug)]
pub(crate) struct PassedArgs {
    pub(crate) args: EngineArgs,
    /// The flags as given: a child with these has the same configuration. Its device and its share of the device are
    /// set separately.
    pub(crate) flags: Vec<String>,
}

/// Fields of [`EngineArgs`] that differ between children.
const OF_ONE_CHILD: [&str; 4] = ["backend", "device", "memory_percent", "cache_dir"];

impl clap::Args for PassedArgs {
    fn augment_args(command: Command) -> Command {
        EngineArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        EngineArgs::augment_args_for_update(command)
    }
}

impl FromArgMatches for PassedArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let command = EngineArgs::augment_args(Command::new("serve"));
        let given = |arg: &&Arg| {
            let id = arg.get_id().as_str();
            !OF_ONE_CHILD.contains(&id) && matches.value_source(id) == Some(ValueSource::CommandLine)
        };
        let flag = |arg: &Arg| {
            let (long, values) = (arg.get_long()?.to_owned(), matches.get_raw(arg.get_id().as_str())?);
            Some(values.map(move |value| format!("--{long}={}", value.to_string_lossy())))
        };
        let flags = command.get_arguments().filter(given).filter_map(flag).flatten().collect();
        Ok(Self { args: EngineArgs::from_arg_matches(matches)?, flags })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// `--prefill-instances`; 0 for as many as pay.
fn parse_prefill_instances(text: &str) -> Result<u32, String> {
    let most = u32::try_from(JOINT_MEMBERS_MAX).unwrap_or(u32::MAX);
    match text {
        "auto" => Ok(0),
        _ => text.parse().ok().filter(|n| (1..=most).contains(n)).ok_or(format!("expected auto or 1 to {most}")),
    }
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is neither on nor off")),
    }
}

fn parse_kv_dtype(text: &str) -> Result<KvDType, String> {
    text.parse::<KvDType>().map_err(|e| e.to_string())
}

pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    text.parse::<DType>().map_err(|e| e.to_string())
}
