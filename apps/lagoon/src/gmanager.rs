//! `lagoon gmanager`: the coordinator's process around the sans-IO `GManager`.

use crate::args::TlsArgs;
use anyhow::Context;
use lagoon_cluster::GManager;
use lagoon_protocol::ControlBody;
use lagoon_transport::{Bound, Event, Frame, Node, PeerId, TransportConfig};
use lagoon_types::InstanceId;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
    let first = args.first_instance.unwrap_or_else(|| first_instance_by_clock(SystemTime::now()));
    let mut pool = Registry { gmanager: GManager::new(first), registered: HashMap::new(), started: Instant::now() };
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
            // The transport has logged what it refused.
            Event::Refused { .. } | Event::Up { .. } | Event::Unreachable { .. } | Event::Expired { .. } => {}
        }
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
