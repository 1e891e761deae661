//! `lagoon gmanager`: the coordinator's process around the sans-IO `GManager`.
//!
//! There is a `GManager` only while this process leads (`election.rs`), a new one in each term; whoever asks a standby is
//! told who leads.

use crate::args::TlsArgs;
use crate::election::{Election, ElectionArgs, Standing};
use crate::registry::Registry;
use anyhow::Context;
use lagoon_cluster::{DgfmConfig, GManager, GManagerConfig, PlannerConfig};
use lagoon_protocol::{ControlBody, NotLeader};
use lagoon_transport::{Bound, Event, Frame, Node, PeerId, TransportConfig};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
    let election = Election::start(&args.election, addr, stop.clone())?;
    let mut shell = Shell { node: node.clone(), election, first_instance: args.first_instance, leading: None };
    loop {
        let sleep = tokio::time::sleep(shell.sleep());
        tokio::select! {
            () = stop.cancelled() => break,
            Some(event) = events.recv() => shell.on_event(event),
            // Nobody has a reason to send KV or partials here: they are dropped.
            Some(_) = partials.recv() => {}
            Some(_) = bulk.recv() => {}
            () = sleep => shell.on_tick(),
        }
        shell.send_orders();
    }
    shell.election.ended().await;
    node.close(Duration::from_millis(500)).await;
    Ok(())
}

struct Shell {
    node: Node,
    election: Election,
    first_instance: Option<u32>,
    leading: Option<Leading>,
}

/// The pool as it is known in one term.
struct Leading {
    term: u64,
    registry: Registry,
}

/// How often a standby looks whether it leads.
const STANDBY_TICK: Duration = Duration::from_secs(1);

impl Shell {
    /// The pool, if this process leads now; else the address of who does. What was known in another term is forgotten:
    /// instances tell a new leader everything.
    fn leading(&mut self) -> Result<&mut Leading, String> {
        match self.election.standing() {
            Standing::Follows { leader } => {
                if self.leading.take().is_some() {
                    self.node.answer_control(None);
                }
                Err(leader)
            }
            Standing::Leads { term } => {
                let current = self.leading.take().filter(|leading| leading.term == term);
                let leading = current.unwrap_or_else(|| self.lead(term));
                Ok(self.leading.insert(leading))
            }
        }
    }

    /// Begins a term with an empty pool.
    fn lead(&self, term: u64) -> Leading {
        let gmanager = GManager::with_config(GManagerConfig {
            first_instance: self.first_instance.unwrap_or_else(|| first_instance_by_clock(SystemTime::now())),
            term,
            planner: Some(PlannerConfig::default()),
            dgfm: Some(DgfmConfig::default()),
            ..GManagerConfig::default()
        });
        let registry = Registry::new(gmanager);
        registry.serve_queries(&self.node);
        Leading { term, registry }
    }

    /// How long until something is to be done if nothing happens.
    fn sleep(&self) -> Duration {
        self.leading.as_ref().map_or(STANDBY_TICK, |leading| leading.registry.sleep())
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Control { peer, message, .. } => {
                let Some(body) = message.body else { return };
                let answer = match self.leading() {
                    Ok(leading) => leading.registry.on_control(peer, &body),
                    Err(leader_addr) => Some(ControlBody::NotLeader(NotLeader { leader_addr })),
                };
                if let Some(answer) = answer {
                    self.send(peer, answer);
                }
            }
            Event::Down { peer, .. } => {
                if let Some(leading) = &mut self.leading {
                    leading.registry.on_down(peer);
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

    fn on_tick(&mut self) {
        if let Ok(leading) = self.leading() {
            leading.registry.on_tick();
        }
    }

    /// Sends what the gManager wants sent to others than an asker.
    fn send_orders(&mut self) {
        while let Some((peer, body)) = self.leading.as_mut().and_then(|leading| leading.registry.poll()) {
            self.send(peer, body);
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
