//! `lagoon gmanager`: the process around the sans-IO `GManager`.
//!
//! A `GManager` exists only while this process leads (`election.rs`), a new one in each term; a standby answers with
//! the leader's address.

use crate::args::TlsArgs;
use crate::election::{Election, ElectionArgs, Standing};
use crate::gmanager_metrics;
use crate::health_port::{self, HealthArgs};
use crate::hosts;
use crate::log;
use crate::metrics_table;
use crate::node_metrics::record_certificate;
use crate::port::PortArgs;
use crate::registry::Registry;
use anyhow::Context;
use lagoon_cluster::{BalancerConfig, DgfmConfig, GManager, GManagerConfig, PlannerConfig};
use lagoon_http::Front;
use lagoon_protocol::{AdminReply, ControlBody, NotLeader, Rejected};
use lagoon_transport::{Bound, Event, Frame, Node, NodeRole, PeerId, Subject, TransportConfig};
use metrics_exporter_prometheus::PrometheusHandle;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio_util::sync::CancellationToken;

/// Longest time between a standby's checks whether it leads.
const STANDING_MAX: Duration = Duration::from_millis(250);
/// Interval of metric updates.
const RECORD_EVERY: Duration = Duration::from_millis(500);

/// `lagoon gmanager`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GManagerArgs {
    /// Where instances connect (QUIC, UDP).
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7600", value_parser = hosts::address)]
    listen: SocketAddr,
    /// Address at which instances reach this gManager, if not the one listened on.
    #[arg(long, value_name = "ADDR", value_parser = hosts::address)]
    advertise: Option<SocketAddr>,
    /// Serve Prometheus metrics on this TCP port of the same address.
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    #[command(flatten)]
    port: PortArgs,
    /// Turn a prefill worker into a decode worker, or back, when one side queues and the other has time to spare for a while, at
    /// the earliest so many seconds after the last change was done (30 if none are given).
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "30",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    auto_roles: Option<u64>,
    #[command(flatten)]
    health: HealthArgs,
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

impl GManagerArgs {
    fn wants_metrics(&self) -> bool {
        self.metrics_port.is_some() || self.health.is_wanted()
    }
}

/// First instance id of a gManager: seconds since 2025. A replacement does not know instances that its predecessor
/// numbered and that have not registered again; starting later, it numbers from beyond its predecessor's ids, unless
/// more than one instance per second registered throughout that one's life.
fn first_instance_by_clock(now: SystemTime) -> u32 {
    const YEAR_2025: Duration = Duration::from_secs(1_735_689_600);
    let seconds = now.duration_since(UNIX_EPOCH + YEAR_2025).map_or(0, |age| age.as_secs());
    u32::try_from(seconds).unwrap_or(u32::MAX / 2).max(1)
}

/// Runs until Ctrl-C.
pub(crate) async fn run(args: GManagerArgs) -> anyhow::Result<()> {
    let stop = crate::shutdown::token(args.exit_with_stdin)?;
    let config = TransportConfig { advertise: args.advertise, ..TransportConfig::default() };
    let Bound { node, mut events, mut partials, mut bulk } =
        Node::bind(args.listen, &args.tls.identity(&[NodeRole::GManager])?, config)
            .with_context(|| format!("listen on {}\nhint: choose another address with --listen", args.listen))?;
    let addr = args.advertise.unwrap_or_else(|| node.local_addr());
    let handle = args.wants_metrics().then(|| lagoon_http::metrics::install(metrics_table::OF_GMANAGER)).transpose()?;
    let metrics = serve_metrics(&args, handle.clone(), stop.clone()).await?;
    let recorded = handle.is_some();
    let health = args.health.start(&args.port, || Ok(()), handle.as_ref().map(health_port::recorded), &stop)?;
    if args.json {
        let metrics = metrics.map(|addr| addr.to_string());
        let mut ready = serde_json::json!({ "ready": true, "quic": addr.to_string(), "metrics": metrics });
        if let Some(health) = health {
            ready["health"] = health.to_string().into();
        }
        log::announce(ready);
    } else {
        log::announce(format_args!("gManager on {addr}"));
        let scheme = args.port.scheme();
        metrics.iter().for_each(|addr| log::announce(format_args!("metrics on {scheme}://{addr}/metrics")));
        health.iter().for_each(|addr| log::announce(format_args!("probes on {scheme}://{addr}/ready")));
    }
    let election = Election::start(&args.election, addr, stop.clone())?;
    let GManagerArgs { first_instance, auto_roles, .. } = args;
    let peers = HashMap::new();
    let mut shell = Shell { node: node.clone(), peers, election, first_instance, auto_roles, leading: None };
    let mut record = tokio::time::interval(RECORD_EVERY);
    loop {
        let sleep = tokio::time::sleep(shell.sleep());
        tokio::select! {
            () = stop.cancelled() => break,
            Some(event) = events.recv() => shell.on_event(event),
            // Peers have no reason to send KV or partials here: dropped.
            Some(_) = partials.recv() => {}
            Some(_) = bulk.recv() => {}
            () = sleep => shell.on_tick(),
            _ = record.tick(), if recorded => shell.record(),
        }
        shell.flush();
    }
    shell.election.ended().await;
    node.close(Duration::from_millis(500)).await;
    Ok(())
}

/// Serves `/metrics`, if configured, at the address on which instances connect.
async fn serve_metrics(
    args: &GManagerArgs,
    handle: Option<PrometheusHandle>,
    stop: CancellationToken,
) -> anyhow::Result<Option<SocketAddr>> {
    let (Some(port), Some(handle)) = (args.metrics_port, handle) else { return Ok(None) };
    let addr = SocketAddr::new(args.listen.ip(), port);
    let listener = tokio::net::TcpListener::bind(addr)
        .await
        .with_context(|| format!("listen on {addr}\nhint: choose another port with --metrics-port"))?;
    let served = listener.local_addr()?;
    let text = axum::routing::get(move || async move {
        lagoon_http::metrics::response(lagoon_http::metrics::render(&handle, None))
    });
    let router = axum::Router::new().route("/metrics", text);
    let port = args.port.port(listener, None, None, Front::default())?;
    tokio::spawn(async move {
        if let Err(error) = lagoon_http::serve(port, router, stop.cancelled_owned()).await {
            tracing::error!(%error, "metrics are not served any more");
        }
    });
    Ok(Some(served))
}

/// A connected peer: its certificate's subject, the address at which it accepts, and whether a refusal was reported to it.
struct Peer {
    subject: Subject,
    addr: SocketAddr,
    reported: bool,
}

struct Shell {
    node: Node,
    peers: HashMap<PeerId, Peer>,
    election: Election,
    first_instance: Option<u32>,
    auto_roles: Option<u64>,
    /// The pool in the present term.
    leading: Option<Registry>,
}

impl Shell {
    /// The pool, if this process leads now; else the leader's address. The state of another term is dropped: instances
    /// report everything to a new leader.
    fn leading(&mut self) -> Result<&mut Registry, String> {
        match self.election.standing() {
            Standing::Follows { leader } => {
                if let Some(registry) = self.leading.take() {
                    self.node.answer_control(None);
                    self.send_on(&registry, &leader);
                }
                Err(leader)
            }
            Standing::Leads { term } => {
                let registry = match self.leading.take() {
                    Some(registry) if registry.term() == term => registry,
                    before => {
                        before.iter().for_each(|before| self.send_on(before, ""));
                        self.begin(term)
                    }
                };
                Ok(self.leading.insert(registry))
            }
        }
    }

    /// Redirects the peers whose registrations wait in a dropped registry to the present leader.
    fn send_on(&self, registry: &Registry, leader: &str) {
        for peer in registry.waiting() {
            self.send(peer, ControlBody::NotLeader(NotLeader { leader_addr: leader.to_owned() }));
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
            Event::Up { peer, subject, addr, .. } => {
                drop(self.peers.insert(peer, Peer { subject, addr, reported: false }))
            }
            Event::Control { peer, message, .. } => {
                let Some(body) = message.body else { return };
                let Some((subject, addr)) = self.peers.get(&peer).map(|of| (of.subject.clone(), of.addr)) else {
                    return;
                };
                let answer = match self.leading() {
                    Ok(registry) => match registry.on_control(peer, (&subject, addr), &body) {
                        Ok(answer) => answer,
                        Err(reason) => self.refuse(peer, &body, reason),
                    },
                    Err(leader_addr) => Some(ControlBody::NotLeader(NotLeader { leader_addr })),
                };
                if let Some(answer) = answer {
                    self.send(peer, answer);
                }
            }
            Event::Down { peer, .. } => {
                self.peers.remove(&peer);
                if let Some(registry) = &mut self.leading {
                    registry.on_down(peer);
                }
            }
            // The transport has logged it.
            Event::Refused { .. } | Event::Unreachable { .. } | Event::Expired { .. } => {}
        }
    }

    /// Refuses a message that the peer's certificate does not allow; logged once per session.
    fn refuse(&mut self, peer: PeerId, body: &ControlBody, reason: String) -> Option<ControlBody> {
        if let Some(Peer { subject, reported, .. }) = self.peers.get_mut(&peer)
            && !std::mem::replace(reported, true)
        {
            tracing::warn!(%peer, node = %subject.node, reason, "a message was refused");
        }
        match body {
            ControlBody::AdminQuery(query) => {
                let (error, hint) = reason.split_once("\nhint: ").unwrap_or((&reason, ""));
                let (query, error, hint) = (query.query, error.to_owned(), hint.to_owned());
                Some(ControlBody::AdminReply(Box::new(AdminReply { query, error, hint, ..AdminReply::default() })))
            }
            ControlBody::Register(_) | ControlBody::StatusQuery(_) => Some(ControlBody::Rejected(Rejected { reason })),
            _ => None,
        }
    }

    fn send(&self, peer: PeerId, body: ControlBody) {
        if let Err(error) = self.node.try_send(peer, &Frame::Control(body.into())) {
            tracing::debug!(%peer, %error, "a message was not sent");
        }
    }

    /// Sends the gManager's messages, if it still leads.
    fn flush(&mut self) {
        while let Some((peer, body)) = self.leading().ok().and_then(Registry::poll) {
            self.send(peer, body);
        }
    }

    /// Time until the next tick.
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
        record_certificate(&self.node);
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
