//! `lagoon gmanager`: the coordinator's process around the sans-IO `GManager`.
//!
//! There is a `GManager` only while this process leads (`election.rs`), a new one in each term; whoever asks a standby is
//! told who leads.

use crate::args::TlsArgs;
use crate::election::{Election, ElectionArgs, Standing};
use crate::gmanager_metrics;
use crate::log;
use crate::metrics_table;
use crate::registry::Registry;
use anyhow::Context;
use axum::http::header;
use lagoon_cluster::{BalancerConfig, DgfmConfig, GManager, GManagerConfig, PlannerConfig};
use lagoon_protocol::{ControlBody, NotLeader};
use lagoon_transport::{Bound, Event, Frame, Node, PeerId, TransportConfig};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio_util::sync::CancellationToken;

/// How often a standby looks whether it leads, unless somebody asks.
const STANDING_MAX: Duration = Duration::from_millis(250);
/// How often metrics are set.
const RECORD_EVERY: Duration = Duration::from_millis(500);

/// `lagoon gmanager`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GManagerArgs {
    /// Where instances connect (QUIC, UDP).
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7600")]
    listen: SocketAddr,
    /// The address that instances are told, if it is not the one listened on.
    #[arg(long, value_name = "ADDR")]
    advertise: Option<SocketAddr>,
    /// Serve Prometheus metrics on this TCP port of the same address.
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// Turn a prefill worker into a decode worker, or back, when one side queues and the other has time to spare for a while, at
    /// the earliest so many seconds after the last change was done (30 if none are given).
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "30",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    auto_roles: Option<u64>,
    #[command(flatten)]
    election: ElectionArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
    /// Number of the first instance that registers [default: by the clock].
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    first_instance: Option<u32>,
}

/// Where a gManager starts to number: seconds since 2025. Whoever replaces a gManager knows nothing of the instances
/// that it numbered and that have not come back yet; by starting later it numbers from where the first one cannot have
/// got to, unless more than one instance a second registered throughout its life.
fn first_instance_by_clock(now: SystemTime) -> u32 {
    const YEAR_2025: Duration = Duration::from_secs(1_735_689_600);
    let seconds = now.duration_since(UNIX_EPOCH + YEAR_2025).map_or(0, |age| age.as_secs());
    u32::try_from(seconds).unwrap_or(u32::MAX / 2).max(1)
}

/// Runs until Ctrl-C.
pub(crate) async fn run(args: GManagerArgs) -> anyhow::Result<()> {
    let stop = crate::shutdown::token(args.exit_with_stdin);
    let config = TransportConfig { advertise: args.advertise, ..TransportConfig::default() };
    let Bound { node, mut events, mut partials, mut bulk } = Node::bind(args.listen, &args.tls.identity()?, config)
        .with_context(|| format!("listen on {}\nhint: choose another address with --listen", args.listen))?;
    let addr = args.advertise.unwrap_or_else(|| node.local_addr());
    let metrics = serve_metrics(&args, stop.clone()).await?;
    if args.json {
        let metrics = metrics.map(|addr| addr.to_string());
        log::announce(serde_json::json!({ "ready": true, "quic": addr.to_string(), "metrics": metrics }));
    } else {
        log::announce(format_args!("gManager on {addr}"));
        metrics.iter().for_each(|addr| log::announce(format_args!("metrics on http://{addr}/metrics")));
    }
    let election = Election::start(&args.election, addr, stop.clone())?;
    let GManagerArgs { first_instance, auto_roles, .. } = args;
    let mut shell = Shell { node: node.clone(), election, first_instance, auto_roles, leading: None };
    let mut record = tokio::time::interval(RECORD_EVERY);
    loop {
        let sleep = tokio::time::sleep(shell.sleep());
        tokio::select! {
            () = stop.cancelled() => break,
            Some(event) = events.recv() => shell.on_event(event),
            // Nobody has a reason to send KV or partials here: they are dropped.
            Some(_) = partials.recv() => {}
            Some(_) = bulk.recv() => {}
            () = sleep => shell.on_tick(),
            _ = record.tick(), if args.metrics_port.is_some() => shell.record(),
        }
        shell.flush();
    }
    shell.election.ended().await;
    node.close(Duration::from_millis(500)).await;
    Ok(())
}

/// Serves `/metrics`, if asked to, beside the address on which instances connect.
async fn serve_metrics(args: &GManagerArgs, stop: CancellationToken) -> anyhow::Result<Option<SocketAddr>> {
    let Some(port) = args.metrics_port else { return Ok(None) };
    let handle = lagoon_http::metrics::install(&[metrics_table::GMANAGER])?;
    let addr = SocketAddr::new(args.listen.ip(), port);
    let listener = tokio::net::TcpListener::bind(addr)
        .await
        .with_context(|| format!("listen on {addr}\nhint: choose another port with --metrics-port"))?;
    let served = listener.local_addr()?;
    let text = axum::routing::get(move || async move {
        ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render())
    });
    let router = axum::Router::new().route("/metrics", text);
    tokio::spawn(async move {
        if let Err(error) = lagoon_http::serve(listener, router, stop.cancelled_owned()).await {
            tracing::error!(%error, "metrics are not served any more");
        }
    });
    Ok(Some(served))
}

struct Shell {
    node: Node,
    election: Election,
    first_instance: Option<u32>,
    auto_roles: Option<u64>,
    /// The pool as it is known in the term that goes on.
    leading: Option<Registry>,
}

impl Shell {
    /// The pool, if this process leads now; else the address of who does. What was known in another term is forgotten:
    /// instances tell a new leader everything.
    fn leading(&mut self) -> Result<&mut Registry, String> {
        match self.election.standing() {
            Standing::Follows { leader } => {
                if self.leading.take().is_some() {
                    self.node.answer_control(None);
                }
                Err(leader)
            }
            Standing::Leads { term } => {
                let current = self.leading.take().filter(|registry| registry.term() == term);
                let registry = current.unwrap_or_else(|| self.begin(term));
                Ok(self.leading.insert(registry))
            }
        }
    }

    fn begin(&self, term: u64) -> Registry {
        let first_instance = self.first_instance.unwrap_or_else(|| first_instance_by_clock(SystemTime::now()));
        let registry = Registry::new(GManager::with_config(GManagerConfig {
            first_instance,
            term,
            planner: Some(PlannerConfig::default()),
            dgfm: Some(DgfmConfig::default()),
            balancer: self
                .auto_roles
                .map(|rest_s| BalancerConfig { dwell_ms: rest_s * 1_000, ..BalancerConfig::default() }),
            ..GManagerConfig::default()
        }));
        registry.serve_queries(&self.node, self.election.mandate(term));
        registry
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Control { peer, message, .. } => {
                let Some(body) = message.body else { return };
                let answer = match self.leading() {
                    Ok(registry) => registry.on_control(peer, &body),
                    Err(leader_addr) => Some(ControlBody::NotLeader(NotLeader { leader_addr })),
                };
                if let Some(answer) = answer {
                    self.send(peer, answer);
                }
            }
            Event::Down { peer, .. } => {
                if let Some(registry) = &mut self.leading {
                    registry.on_down(peer);
                }
            }
            // The transport has logged what it refused.
            Event::Refused { .. } | Event::Up { .. } | Event::Unreachable { .. } | Event::Expired { .. } => {}
        }
    }

    fn send(&self, peer: PeerId, body: ControlBody) {
        if let Err(error) = self.node.try_send(peer, &Frame::Control(body.into())) {
            tracing::debug!(%peer, %error, "a message was not sent");
        }
    }

    /// Sends what the gManager wants sent, if it still leads.
    fn flush(&mut self) {
        while let Some((peer, body)) = self.leading().ok().and_then(Registry::poll) {
            self.send(peer, body);
        }
    }

    /// Until the next tick.
    fn sleep(&self) -> Duration {
        self.leading.as_ref().map_or(STANDING_MAX, Registry::sleep)
    }

    fn on_tick(&mut self) {
        if let Ok(registry) = self.leading() {
            registry.on_tick();
        }
    }

    fn record(&mut self) {
        let term = self.leading().ok().map(|registry| {
            registry.record();
            registry.term()
        });
        gmanager_metrics::record_standing(term);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_gmanager_numbers_from_further_on() {
        let at = |seconds| first_instance_by_clock(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), 1);
        assert_eq!(at(1_735_689_600 + 7), 7);
        assert_eq!(at(1_795_000_060) - at(1_795_000_000), 60);
    }
}
