//! Incoming connections.

use crate::{
    Event,
    node::{Shared, read_preface},
    peer::Remote,
    session::{Verdict, Wires, close},
};
use bytes::Bytes;
use lagoon_wire::{DIRECT_CODE, Preface};
use quinn::{Connection, Incoming, RecvStream, SendStream, VarInt};
use std::sync::{Arc, PoisonError};
use tokio::sync::Semaphore;

/// Handshakes at once; more are turned away and come again with back-off.
const HANDSHAKES_MAX: usize = 256;

impl Shared {
    /// Accepts connections until the endpoint closes.
    pub(crate) async fn accept_all(self: Arc<Self>) {
        let room = Arc::new(Semaphore::new(HANDSHAKES_MAX));
        while let Some(incoming) = self.endpoint.accept().await {
            let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
                incoming.refuse();
                continue;
            };
            let shared = Arc::clone(&self);
            self.runtime.spawn(async move {
                let addr = incoming.remote_address();
                let deadline = shared.config.connect_deadline;
                let result = tokio::time::timeout(deadline, shared.accept_one(incoming)).await;
                let result = result.unwrap_or_else(|_elapsed| Err("the handshake took too long".to_owned()));
                if let Err(reason) = result {
                    tracing::warn!(%addr, reason, "an incoming connection was refused");
                    shared.events.mention(Event::Refused { addr, reason });
                }
                drop(place);
            });
        }
    }

    async fn accept_one(self: &Arc<Self>, incoming: Incoming) -> Result<(), String> {
        let config = self.server_config(incoming.remote_address());
        let connecting = incoming.accept_with(config).map_err(|error| error.to_string())?;
        let connection = connecting.await.map_err(|error| format!("the handshake failed: {error}"))?;
        let (mut send, mut recv) = connection.accept_bi().await.map_err(|error| format!("no stream: {error}"))?;
        let refuse = |code: u32, reason: &str| connection.close(VarInt::from_u32(code), reason.as_bytes());
        let (preface, rest) = match read_preface(&mut recv).await {
            Ok(read) => read,
            Err(reason) => {
                refuse(close::BAD_PREFACE, &reason);
                return Err(reason);
            }
        };
        if preface.class == u32::from(DIRECT_CODE) {
            return self.accept_direct(&preface, connection, (send, recv, rest)).await;
        }
        let class = lagoon_wire::Class::from_code(u8::try_from(preface.class).unwrap_or(0));
        let Some(class) = class else {
            let reason = format!("the preface names class {}, which does not exist", preface.class);
            refuse(close::BAD_PREFACE, &reason);
            return Err(reason);
        };
        let announced = match self.check_preface(&preface, &connection, class.code()) {
            Ok(announced) => announced,
            Err(reason) => {
                refuse(close::BAD_PREFACE, &reason);
                return Err(reason);
            }
        };
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
        self.adopt(&peer, &mut session, class, remote, false, Wires { connection, send, recv, rest }).await;
        drop(session);
        // The session before may have left classes that are wanted.
        self.ensure_dials(&peer);
        Ok(())
    }
    /// A connection that reads registered memory: no part of a session.
    async fn accept_direct(
        &self,
        preface: &Preface,
        connection: Connection,
        (mut send, recv, rest): (SendStream, RecvStream, Bytes),
    ) -> Result<(), String> {
        let refuse = |code: u32, reason: &str| connection.close(VarInt::from_u32(code), reason.as_bytes());
        if let Err(reason) = self.check_preface(preface, &connection, DIRECT_CODE) {
            refuse(close::BAD_PREFACE, &reason);
            return Err(reason);
        }
        let server = self.direct.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(server) = server.filter(|_| !self.is_closed()) else {
            refuse(close::LIMIT, "nothing is exported here");
            return Err("a direct connection, but nothing is exported here".to_owned());
        };
        let mut answer = self.preface_of(DIRECT_CODE, 0)?;
        send.write_all_chunks(&mut answer).await.map_err(|error| format!("answering a preface: {error}"))?;
        self.spawn_direct(server, connection, (send, recv, rest));
        Ok(())
    }
}
