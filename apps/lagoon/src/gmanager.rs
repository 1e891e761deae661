//! `lagoon gmanager`: the coordinator's process around the sans-IO `GManager`.

use crate::args::TlsArgs;
use anyhow::Context;
use lagoon_cluster::GManager;
use lagoon_protocol::ControlBody;
use lagoon_transport::{Bound, Event, Frame, Node, PeerId, TransportConfig};
use lagoon_types::InstanceId;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// `lagoon gmanager`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GManagerArgs {
    /// Where instances connect (QUIC, UDP).
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7600")]
    listen: SocketAddr,
    /// The address that instances are told, if it is not the one listened on.
    #[arg(long, value_name = "ADDR")]
    advertise: Option<SocketAddr>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

/// Runs until Ctrl-C.
#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
pub(crate) async fn run(args: GManagerArgs) -> anyhow::Result<()> {
    let stop = crate::shutdown::token(args.exit_with_stdin);
    let config = TransportConfig { advertise: args.advertise, ..TransportConfig::default() };
    let Bound { node, mut events, mut partials, mut bulk } = Node::bind(args.listen, &args.tls.identity()?, config)
        .with_context(|| format!("listen on {}\nhint: choose another address with --listen", args.listen))?;
    let addr = args.advertise.unwrap_or_else(|| node.local_addr());
    if args.json {
        println!("{}", serde_json::json!({ "ready": true, "quic": addr.to_string() }));
    } else {
        println!("gManager on {addr}");
    }
    let mut pool = Registry { gmanager: GManager::new(1), registered: HashMap::new(), started: Instant::now() };
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(event) = events.recv() => pool.on_event(&node, event),
            // Nobody has a reason to send KV or partials here: they are dropped.
            Some(_) = partials.recv() => {}
            Some(_) = bulk.recv() => {}
            _ = tick.tick() => {
                let now = pool.now_ms();
                for instance in pool.gmanager.tick(now) {
                    tracing::warn!(%instance, "forgotten after a long silence");
                }
            }
        }
    }
    node.close(Duration::from_millis(500)).await;
    Ok(())
}

struct Registry {
    gmanager: GManager,
    /// Who registered on which connection.
    registered: HashMap<PeerId, InstanceId>,
    started: Instant,
}

impl Registry {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn on_event(&mut self, node: &Node, event: Event) {
        match event {
            Event::Control { peer, message, .. } => {
                let Some(body) = message.body else { return };
                let now = self.now_ms();
                let answer = self.gmanager.on_control(self.registered.get(&peer).copied(), &body, now);
                let Some(answer) = answer else { return };
                match &answer {
                    ControlBody::Registered(r) => {
                        tracing::info!(instance = r.instance, "registered");
                        self.registered.insert(peer, InstanceId(r.instance));
                    }
                    ControlBody::Rejected(r) => tracing::warn!(reason = r.reason, "refused a registration"),
                    _ => {}
                }
                if let Err(error) = node.try_send(peer, &Frame::Control(answer.into())) {
                    tracing::debug!(%peer, %error, "an answer was not sent");
                }
            }
            Event::Down { peer, .. } => {
                self.registered.remove(&peer);
            }
            Event::Refused { addr, reason } => tracing::warn!(%addr, reason, "refused a connection"),
            Event::Up { .. } | Event::Unreachable { .. } | Event::Expired { .. } => {}
        }
    }
}
