//! Incoming connections.

use crate::{
    Event, NodeRole, Subject, close,
    incoming::{Entry, Place},
    node::{Shared, read_preface},
    open_direct::Opened,
    peer::Remote,
    session::{Verdict, Wires},
};
use lagoon_wire::{DIRECT_CODE, Preface};
use quinn::{Incoming, VarInt};
use std::sync::{Arc, PoisonError};

/// Bytes of reads that a direct connection may have waiting here: each is small.
const READS_WINDOW_BYTES: u32 = 256 << 10;

impl Shared {
    /// Accepts connections until the endpoint closes.
    pub(crate) async fn accept_all(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            let addr = incoming.remote_address();
            let address = (incoming.remote_address_validated(), incoming.may_retry());
            let place = match self.door.knock(addr.ip(), address, &self.config) {
                Entry::Enter(place) => place,
                Entry::Retry => {
                    if let Err(error) = incoming.retry() {
                        error.into_incoming().refuse();
                    }
                    continue;
                }
                Entry::TurnAway => {
                    incoming.refuse();
                    continue;
                }
            };
            let shared = Arc::clone(&self);
            self.runtime.spawn(async move {
                let deadline = shared.config.connect_deadline;
                let result = tokio::time::timeout(deadline, shared.accept_one(incoming, place)).await;
                let result = result.unwrap_or_else(|_elapsed| Err("the handshake took too long".to_owned()));
                if let Err(reason) = result {
                    tracing::warn!(%addr, reason, "an incoming connection was refused");
                    shared.events.mention(Event::Refused { addr, reason });
                }
            });
        }
    }

    async fn accept_one(self: &Arc<Self>, incoming: Incoming, mut place: Place) -> Result<(), String> {
        let config = self.server_config(incoming.remote_address());
        let connecting = incoming.accept_with(config).map_err(|error| error.to_string())?;
        let connection = connecting.await.map_err(|error| format!("the handshake failed: {error}"))?;
        let subject = match Subject::of_peer(&connection) {
            Ok(subject) => subject,
            Err(reason) => {
                connection.close(VarInt::from_u32(close::IDENTITY), reason.as_bytes());
                return Err(reason);
            }
        };
        let (mut send, mut recv) = connection.accept_bi().await.map_err(|error| format!("no stream: {error}"))?;
        let refuse = |code: u32, reason: &str| connection.close(VarInt::from_u32(code), reason.as_bytes());
        let read = read_preface(&mut recv).await;
        let (preface, rest) = read.inspect_err(|reason| refuse(close::BAD_PREFACE, reason))?;
        place.connect();
        if preface.class == u32::from(DIRECT_CODE) {
            let wires = Wires { connection, subject, send, recv, rest, place: Some(place) };
            return self.accept_direct(&preface, wires).await;
        }
        let class = lagoon_wire::Class::from_code(u8::try_from(preface.class).unwrap_or(0));
        let Some(class) = class else {
            let reason = format!("the preface names class {}, which does not exist", preface.class);
            refuse(close::BAD_PREFACE, &reason);
            return Err(reason);
        };
        let announced = self.check_preface(&preface, &connection, class.code());
        let announced = announced.inspect_err(|reason| refuse(close::BAD_PREFACE, reason))?;
        if preface.incarnation == self.incarnation {
            // Our own dial: it answers itself, reads our incarnation and gives up.
            let mut answer = self.preface(class, 0)?;
            send.write_all_chunks(&mut answer).await.map_err(|error| error.to_string())?;
            connection.closed().await;
            return Ok(());
        }
        let Some(peer) = self.peer_at(announced) else {
            refuse(close::LIMIT, "too many peers");
            return Err("too many peers".to_owned());
        };
        let remote = Remote { incarnation: preface.incarnation, generation: preface.generation };
        let mut session = peer.session.lock().await;
        if let Err(reason) = self.may_enter(&peer, &session, &subject) {
            refuse(close::IDENTITY, &reason);
            return Err(reason);
        }
        match self.judge(&session, class, remote) {
            Verdict::Accept => {}
            Verdict::Duplicate => {
                refuse(close::DUPLICATE, "the other dial wins");
                return Ok(());
            }
            Verdict::Stale => {
                refuse(close::STALE, "that session is over");
                return Ok(());
            }
        }
        if self.is_closed() {
            refuse(close::BYE, "closing");
            return Ok(());
        }
        self.make_way(&peer, &mut session, class, remote).await;
        let mut answer = self.preface(class, session.generation)?;
        send.write_all_chunks(&mut answer).await.map_err(|error| format!("answering a preface: {error}"))?;
        let wires = Wires { connection, subject, send, recv, rest, place: Some(place) };
        self.adopt(&peer, &mut session, class, remote, false, wires).await;
        drop(session);
        // The session before may have left classes that are wanted.
        self.ensure_dials(&peer);
        Ok(())
    }

    /// A connection that reads registered memory: no part of a session.
    async fn accept_direct(
        &self,
        preface: &Preface,
        Wires { connection, subject, mut send, recv, rest, place }: Wires,
    ) -> Result<(), String> {
        let refuse = |code: u32, reason: &str| connection.close(VarInt::from_u32(code), reason.as_bytes());
        if !subject.roles.has(NodeRole::Instance) {
            let reason = format!("node {:?} is no instance ({}): it reads no KV", subject.node, subject.roles);
            refuse(close::IDENTITY, &reason);
            return Err(reason);
        }
        if let Err(reason) = self.check_preface(preface, &connection, DIRECT_CODE) {
            refuse(close::BAD_PREFACE, &reason);
            return Err(reason);
        }
        let server = self.direct.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(server) = server.filter(|_| !self.is_closed()) else {
            refuse(close::LIMIT, "nothing is exported here");
            return Err("a direct connection, but nothing is exported here".to_owned());
        };
        let entered = self.enter_direct(&subject, Opened::There, &connection, READS_WINDOW_BYTES);
        let entry = entered.map_err(|(code, reason)| {
            refuse(code, &reason);
            reason
        })?;
        let mut answer = self.preface_of(DIRECT_CODE, 0)?;
        send.write_all_chunks(&mut answer).await.map_err(|error| format!("answering a preface: {error}"))?;
        self.spawn_direct(server, (place, entry), (subject, connection), (send, recv, rest));
        Ok(())
    }
}
