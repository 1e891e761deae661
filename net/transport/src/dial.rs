//! Connecting to peers, with back-off.

use crate::{
    Event, Subject, close,
    link::Link,
    node::{Shared, read_preface},
    peer::{Peer, Remote},
    session::{Verdict, Wires},
};
use lagoon_wire::Class;
use quinn::{ConnectionError, VarInt};
use rand::Rng;
use std::{sync::Arc, time::Duration};

/// How an attempt to connect ended, if not with an error.
enum Outcome {
    Live,
    /// Try again: the other side's dial goes first, or the session changed meanwhile.
    Again,
    /// Never: the address leads to this node itself, or to a peer that is known by another address.
    Hopeless(String),
}

impl Shared {
    /// Starts the dial tasks that are needed.
    pub(crate) fn ensure_dials(self: &Arc<Self>, peer: &Arc<Peer>) {
        for class in Class::ALL {
            if peer.link(class).claim_dial() {
                self.spawn_dial(peer, class);
            }
        }
    }

    /// Runs the dial task; the caller has claimed it.
    pub(crate) fn spawn_dial(self: &Arc<Self>, peer: &Arc<Peer>, class: Class) {
        let (shared, peer) = (Arc::clone(self), Arc::clone(peer));
        self.runtime.spawn(async move { shared.dial(&peer, class).await });
    }

    async fn dial(self: &Arc<Self>, peer: &Arc<Peer>, class: Class) {
        let link = peer.link(class);
        let mut failures = peer.session.lock().await.failures;
        if failures > 0 {
            self.pause(link, failures).await;
        }
        while !link.dial_may_end() {
            let deadline = self.config.connect_deadline;
            let attempt = tokio::time::timeout(deadline, self.attempt(peer, class)).await;
            let attempt =
                attempt.unwrap_or_else(|_elapsed| Err(format!("no answer within {} ms", deadline.as_millis())));
            peer.session.lock().await.set_attempting(class, false);
            match attempt {
                Ok(Outcome::Live) => continue,
                Ok(Outcome::Again) => {}
                Ok(Outcome::Hopeless(reason)) => {
                    link.want(false);
                    self.unreachable(peer, reason).await;
                    self.expire(peer, link, Duration::ZERO).await;
                    continue;
                }
                Err(reason) => {
                    failures = failures.saturating_add(1);
                    self.unreachable(peer, reason).await;
                }
            }
            self.expire(peer, link, self.config.queue_deadline).await;
            self.pause(link, failures).await;
        }
    }

    async fn expire(&self, peer: &Peer, link: &Link, deadline: Duration) {
        let frames = link.expire(deadline);
        if frames > 0 {
            self.events.report(Event::Expired { peer: peer.id, class: link.class, frames }).await;
        }
    }

    async fn unreachable(&self, peer: &Peer, reason: String) {
        let mut session = peer.session.lock().await;
        if session.is_up() || session.unreachable_reported {
            tracing::debug!(peer = %peer.addr, reason, "an attempt to connect failed");
            return;
        }
        session.unreachable_reported = true;
        self.events.report(Event::Unreachable { peer: peer.id, addr: peer.addr, reason }).await;
    }

    /// Back-off: doubled by each failure up to the longest pause, then 50 to 100 % of it at random, so that two nodes
    /// do not meet again and again. Ends early when a connection appears.
    async fn pause(&self, link: &Link, failures: u32) {
        let factor = 1u32.checked_shl(failures.min(16)).unwrap_or(1);
        let longest = self.config.backoff_min.saturating_mul(factor).min(self.config.backoff_max);
        let pause = longest.mul_f64(rand::rng().random_range(0.5..1.0));
        let changed = link.changed.notified();
        if !link.is_live() {
            // Either end of the wait leads to another look at the link.
            drop(tokio::time::timeout(pause, changed).await);
        }
    }

    async fn attempt(self: &Arc<Self>, peer: &Arc<Peer>, class: Class) -> Result<Outcome, String> {
        let generation = {
            let mut session = peer.session.lock().await;
            if session.slot(class).is_some() {
                return Ok(Outcome::Live);
            }
            session.set_attempting(class, true);
            session.generation
        };
        let client = self.client_config(peer.addr);
        let connecting = self.endpoint.connect_with(client, peer.addr, crate::SERVER_NAME);
        let connection = connecting.map_err(|error| error.to_string())?.await.map_err(|error| refused(&error))?;
        let not_wanted = |reason: &str| connection.close(VarInt::from_u32(close::IDENTITY), reason.as_bytes());
        let subject = Subject::of_peer(&connection).inspect_err(|reason| not_wanted(reason))?;
        let (mut send, mut recv) = connection.open_bi().await.map_err(|error| refused(&error))?;
        let mut hello = self.preface(class, generation)?;
        send.write_all_chunks(&mut hello).await.map_err(|error| error.to_string())?;
        let (preface, rest) = match read_preface(&mut recv).await {
            Ok(answer) => answer,
            Err(reason) => {
                return match connection.close_reason() {
                    Some(ConnectionError::ApplicationClosed(closed)) if is_race(closed.error_code) => {
                        Ok(Outcome::Again)
                    }
                    Some(error) => Err(refused(&error)),
                    None => Err(reason),
                };
            }
        };
        let announced = self.check_preface(&preface, &connection, class.code())?;
        if preface.incarnation == self.incarnation {
            return Ok(Outcome::Hopeless("that address leads back to this node".to_owned()));
        }
        let remote = Remote { incarnation: preface.incarnation, generation: preface.generation };
        let mut session = peer.session.lock().await;
        self.may_enter(peer, &session, &subject).inspect_err(|reason| not_wanted(reason))?;
        // The session may have changed while we waited: the preface sent to the acceptor must still hold.
        let stale = session.generation != generation || self.judge(&session, class, remote) == Verdict::Stale;
        if stale || self.is_closed() {
            connection.close(VarInt::from_u32(close::STALE), b"the session changed while connecting");
            return Ok(Outcome::Again);
        }
        self.make_way(peer, &mut session, class, remote).await;
        if announced != peer.addr && !self.alias(announced, peer) {
            let reason = format!("that process is already a peer as {announced}; hint: dial that address");
            connection.close(VarInt::from_u32(close::DUPLICATE), reason.as_bytes());
            return Ok(Outcome::Hopeless(reason));
        }
        let wires = Wires { connection, subject, send, recv, rest, place: None };
        self.adopt(peer, &mut session, class, remote, true, wires).await;
        session.set_attempting(class, false);
        Ok(Outcome::Live)
    }
}

fn is_race(code: VarInt) -> bool {
    [close::DUPLICATE, close::STALE, close::SESSION_OVER].map(VarInt::from_u32).contains(&code)
}

/// Names the usual causes of a refused handshake in words.
fn refused(error: &ConnectionError) -> String {
    let text = error.to_string();
    let hint = if text.contains("UnknownIssuer") || text.contains("unknown ca") || text.contains("UnknownCA") {
        "; hint: the two nodes' certificates come from different CAs"
    } else if text.contains("CertificateRequired") || text.contains("certificate required") {
        "; hint: the peer demands a certificate of its cluster's CA"
    } else {
        ""
    };
    format!("connecting: {text}{hint}")
}
