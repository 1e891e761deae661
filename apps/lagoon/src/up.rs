//! `lagoon up`: a whole pool on this machine behind one OpenAI endpoint.

use crate::api_client::ApiClient;
use crate::args::PassedArgs;
use crate::front_args::FrontArgs;
use crate::gateway::{DispatchArgs, Gateway};
use crate::hosts;
use crate::local::{ChildKeys, ChildNode, Common, EphemeralCa, LocalPool, Wanted, start_pool};
use crate::log;
use crate::metrics_table;
use crate::placement::{self, Chosen};
use crate::pool_client::{PoolClient, PoolRow, PoolState};
use crate::pool_watch::PoolWatch;
use crate::port::{self, PortArgs};
use crate::progress::{self, Unit};
use crate::serve::model_name;
use crate::up_choices::{Choices, Count};
use crate::{bundled, model};
use anyhow::Context;
use lagoon_transport::{NodeRole, Roles};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The fewest instances that lend to each other.
const INSTANCES_DEFAULT: u16 = 2;
/// Deadline for ready instances to register.
const REGISTER_DEADLINE: Duration = Duration::from_secs(10);

/// `lagoon up`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UpArgs {
    /// A model directory, GGUF file or hub name (org/name, org/name:Q4_K_M) [default: the bundled pass-key model].
    model: Option<String>,
    /// Instances to start [default: 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    instances: Option<u16>,
    /// Prefill workers to start, instead of --instances.
    #[arg(long, value_name = "N", requires = "decode", conflicts_with = "instances",
          value_parser = clap::value_parser!(u16).range(1..=32))]
    prefill: Option<u16>,
    /// Decode workers to start.
    #[arg(long, value_name = "N", requires = "prefill", value_parser = clap::value_parser!(u16).range(1..=32))]
    decode: Option<u16>,
    /// Change roles between --prefill and --decode when one side queues and the other has time to spare for a while, at
    /// the earliest so many seconds after the last change was done (30 if none are given).
    #[arg(long, requires = "prefill", value_name = "SECONDS", num_args = 0..=1, require_equals = true,
          default_missing_value = "30", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    auto_roles: Option<u64>,
    /// Port of the OpenAI endpoint.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    /// Host of the OpenAI endpoint.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", value_parser = hosts::host)]
    host: std::net::IpAddr,
    /// Clients must show this key (`Authorization: Bearer KEY`); /health stays open.
    #[arg(long, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The model's name in requests and responses; of several (repeatable or comma-separated) each is accepted, and responses have
    /// the one that was asked for [default: the directory's, file's or hub name].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = model_name)]
    served_model_name: Vec<String>,
    #[command(flatten)]
    guard: PortArgs,
    #[command(flatten)]
    front: FrontArgs,
    #[command(flatten)]
    dispatch: DispatchArgs,
    /// Allow `return_logits` in requests.
    #[arg(long)]
    expose_logits: bool,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
    #[command(flatten)]
    engine: PassedArgs,
}

impl UpArgs {
    /// The role of each instance.
    fn roles(&self) -> Vec<&'static str> {
        match (self.prefill, self.decode) {
            (Some(prefill), Some(decode)) => {
                [vec!["prefill"; usize::from(prefill)], vec!["decode"; usize::from(decode)]].concat()
            }
            _ => vec!["both"; usize::from(self.instances.unwrap_or(INSTANCES_DEFAULT))],
        }
    }

    /// What was chosen and why.
    fn choices<'a>(&self, model: &'a str, on: &[Chosen], pool: &'a LocalPool, devices: Vec<String>) -> Choices<'a> {
        let engine = &self.engine.args;
        Choices {
            model,
            backend: on.first().map_or("", |chosen| chosen.name()),
            backend_because: on
                .first()
                .map_or("", |chosen| placement::because(engine.backend, &engine.device, *chosen)),
            devices,
            kv_tokens: pool.instances.iter().map(ChildNode::kv_tokens).collect(),
            kv_because: pool.instances.first().map_or("", ChildNode::kv_because),
            count: match (self.prefill, self.decode, self.instances) {
                (Some(prefill), Some(decode), _) => Count::Workers { prefill, decode },
                (_, _, Some(_)) => Count::Given,
                (_, _, None) => Count::Default,
            },
        }
    }

    /// Keys of the instances' own ports. This process queries their status: it has a key for that, even if the pool's
    /// keys are in a file.
    fn child_keys(&self) -> ChildKeys {
        let made = self.guard.key_file.as_ref().map(|_| format!("{:032x}", rand::random::<u128>()));
        ChildKeys { api: self.api_key.clone(), admin: self.guard.admin_key.clone().or(made) }
    }

    /// The instances to start: they take `devices` in turn and share each.
    fn wanted(&self, devices: &[Chosen]) -> Vec<Wanted> {
        let roles = self.roles();
        let mut common = self.engine.flags.clone();
        common.extend(self.expose_logits.then(|| "--expose-logits".to_owned()));
        common.extend(self.guard.key_file.iter().map(|path| format!("--key-file={}", path.display())));
        let instance = |(index, role): (usize, &&'static str)| {
            let device = index % devices.len();
            let sharing = (roles.len() - device).div_ceil(devices.len());
            let percent = (self.engine.args.memory_percent as usize / sharing).max(1);
            let mut flags = common.clone();
            flags.extend(devices[device].to_flags());
            flags.push(format!("--memory-percent={percent}"));
            let cache = self.engine.args.cache_dir.as_ref().map(|dir| dir.join(format!("instance-{index}")));
            flags.extend(cache.map(|dir| format!("--cache-dir={}", dir.display())));
            Wanted { role, flags, device }
        };
        roles.iter().enumerate().map(instance).collect()
    }
}

/// The folder or file of the model, and its name.
async fn find_model(model: Option<&String>, ca: &EphemeralCa) -> anyhow::Result<(PathBuf, String)> {
    let Some(model) = model.cloned() else {
        let dir = ca.dir().join(bundled::NAME);
        bundled::extract(&dir)?;
        return Ok((dir, bundled::NAME.to_owned()));
    };
    let name = model::short_name(&model);
    Ok((tokio::task::spawn_blocking(move || model::resolve(&model)).await??, name))
}

/// Runs until Ctrl-C.
pub(crate) async fn run(args: UpArgs) -> anyhow::Result<()> {
    let front = args.front.front()?;
    let stop = crate::shutdown::token(args.exit_with_stdin)?;
    let devices = placement::spread(args.engine.args.backend, &args.engine.args.device)?;
    let wanted = args.wanted(&devices);
    let ca = EphemeralCa::new()?;
    let (dir, name) = tokio::select! {
        found = find_model(args.model.as_ref(), &ca) => found?,
        // The download ends with the process.
        () = stop.cancelled() => return Ok(()),
    };
    let names = if args.served_model_name.is_empty() { name } else { args.served_model_name.join(",") };
    // Bound before the instances start, so that a port in use fails at once.
    let address = SocketAddr::new(args.host, args.port);
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| {
        format!("listen on {address}\nhint: another program may use the port; --port names another")
    })?;
    let (count, keys) = (wanted.len(), args.child_keys());
    // Before the port, whose certificate is a metric.
    let metrics = lagoon_http::metrics::install(metrics_table::OF_GATEWAY)?;
    let port = args.guard.port(listener, args.api_key.as_deref(), None, front)?;
    let bar = progress::bar("starting", count as u64, Unit::Instances);
    let common = Common {
        ca: &ca,
        model: &dir.to_string_lossy(),
        served_name: &names,
        keys: &keys,
        auto_roles: args.auto_roles,
    };
    let pool = tokio::select! {
        pool = start_pool(common, &wanted, |n| bar.set_position(n as u64)) => pool?,
        () = stop.cancelled() => return Ok(()),
    };
    bar.finish_and_clear();

    let own: Roles = [NodeRole::Gateway, NodeRole::Operator].into_iter().collect();
    // One key for both: a node has one key while it has a session.
    let identity = ca.identity(own)?;
    let mut client = PoolClient::new(&[pool.gmanager], &identity)?;
    let acquainted = async {
        let state = wait_registered(&mut client, count).await?;
        wait_acquainted(&pool, &state.instances, keys.admin.or(keys.api)).await?;
        anyhow::Ok(state)
    };
    let state = tokio::select! {
        state = acquainted => state?,
        () = stop.cancelled() => return Ok(()),
    };
    let watch = PoolWatch::start(client, state, args.engine.args.block_tokens, stop.clone());
    let gateway = Gateway::new(
        Arc::new(watch.clone()),
        metrics,
        port::pool_client(Some(ca.files("gateway", NodeRole::Gateway, port::is_instance)?))?,
        args.dispatch,
    )
    .with_compat(args.front.compat());
    let operator = PoolClient::new(&[pool.gmanager], &identity)?;
    let router = watch.router(operator).fallback_service(gateway.router());
    let name = names.split(',').next().unwrap_or(&names);
    let choices = args.choices(name, &devices, &pool, devices_of(&pool, &wanted));
    announce(&args, &choices, port.listener.local_addr()?, &pool)?;
    tokio::select! {
        served = lagoon_http::serve(port, router, stop.cancelled_owned()) => served.context("serve HTTP"),
        ended = pool.watch() => ended,
    }
}

fn announce(args: &UpArgs, choices: &Choices<'_>, http: SocketAddr, pool: &LocalPool) -> anyhow::Result<()> {
    let Choices { model, devices, .. } = choices;
    if args.json {
        let pids: Vec<Option<u32>> = pool.instances.iter().map(ChildNode::pid).collect();
        let ready = serde_json::json!({
            "ready": true, "http": http.to_string(), "model": model, "instances": pool.instances.len(),
            "device": devices.first(), "devices": devices, "gmanager": pool.gmanager.to_string(), "pids": pids,
            "gmanager_pid": pool.gmanager_pid(),
        });
        log::announce(ready);
    } else {
        let scheme = args.guard.scheme();
        choices.lines().iter().for_each(log::announce);
        log::announce(format_args!("OpenAI endpoint {scheme}://{http}/v1"));
        log::announce(format_args!(
            "try: lagoon chat --url {scheme}://{http}    lagoon status --url {scheme}://{http}"
        ));
    }
    Ok(())
}

/// The instances' devices, each once.
fn devices_of(pool: &LocalPool, wanted: &[Wanted]) -> Vec<String> {
    let each: BTreeMap<usize, &str> =
        wanted.iter().map(|w| w.device).zip(pool.instances.iter().map(ChildNode::device)).collect();
    each.into_values().map(str::to_owned).collect()
}

async fn wait_registered(client: &mut PoolClient, count: usize) -> anyhow::Result<PoolState> {
    let deadline = tokio::time::Instant::now() + REGISTER_DEADLINE;
    loop {
        let state = client.state().await?;
        let alive = state.instances.iter().filter(|r| r.alive).count();
        if alive >= count {
            return Ok(state);
        }
        anyhow::ensure!(
            tokio::time::Instant::now() < deadline,
            "only {alive} of {count} instances registered within {} s",
            REGISTER_DEADLINE.as_secs()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until every instance knows the pool's size: before that it refuses requests larger than itself.
async fn wait_acquainted(pool: &LocalPool, rows: &[PoolRow], key: Option<String>) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + REGISTER_DEADLINE;
    for instance in &pool.instances {
        let http = instance.http()?.to_string();
        let share = |row: &PoolRow| if row.http_addr == http { row.blocks_total } else { row.blocks_lend_max };
        let whole: u64 = rows.iter().map(|row| u64::from(share(row))).sum();
        let client = ApiClient::new(&format!("http://{http}"), key.clone(), None)?;
        while client.get("/lagoon/status").await?["pool_blocks_total"].as_u64() < Some(whole) {
            anyhow::ensure!(
                tokio::time::Instant::now() < deadline,
                "an instance did not learn of the others within {} s",
                REGISTER_DEADLINE.as_secs()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        up: UpArgs,
    }

    #[test]
    fn instances_get_the_flags_that_were_given_and_no_others() {
        let given = ["--kv-tokens=64", "--max-model-len=48", "--prefix-cache=off", "--kv-dtype=f16", "--calibrate=off"];
        let own = ["up", "--backend=cpu", "--memory-percent=50"];
        let up = Cli::parse_from(own.iter().chain(&given)).up;
        let mut reported = up.wanted(&[Chosen::Cpu])[0].flags.clone();
        reported.sort();
        let mut expected = [&given[..], &["--backend=cpu", "--memory-percent=25"]].concat();
        expected.sort_unstable();
        assert_eq!(reported, expected);
    }

    #[test]
    fn instances_take_devices_in_turn_and_divide_their_memory() {
        let devices = [0, 1].map(|ordinal| Chosen::Cuda { ordinal, memory_bytes: 1 << 30 });
        let up = Cli::parse_from(["up", "--instances", "3", "--backend", "cuda"]).up;
        let reported = |wanted: &Wanted| {
            let flag = |name: &str| wanted.flags.iter().filter_map(|f| f.strip_prefix(name)).collect::<String>();
            (wanted.device, flag("--device="), flag("--memory-percent="))
        };
        let reported: Vec<_> = up.wanted(&devices).iter().map(reported).collect();
        let expected = [(0, "0", "45"), (1, "1", "90"), (0, "0", "45")];
        assert_eq!(reported, expected.map(|(device, number, percent)| (device, number.to_owned(), percent.to_owned())));
        let up = Cli::parse_from(["up", "--prefill", "1", "--decode", "1", "--memory-percent", "50"]).up;
        let wanted = up.wanted(&[Chosen::Cpu]);
        assert_eq!(wanted.iter().map(|w| w.role).collect::<Vec<_>>(), ["prefill", "decode"]);
        assert!(wanted.iter().all(|w| w.flags.contains(&"--memory-percent=25".to_owned())));
    }
}
