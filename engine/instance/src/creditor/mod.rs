//! The creditor's side: remote attention requests of peers, KV that they write and read, lending and its threshold, and
//! recall.
//!
//! It owns step tickets, waiting frames and reads of peers; the rManager owns the leases. Every event goes through
//! [`Creditor::handle`]; it touches only itself and [`Cx`], and reports work for other machines as [`Outcome`]s.

mod recall;
mod requests;
mod seals;
#[cfg(test)]
mod tests;
mod threshold;

use crate::config::InstanceConfig;
use crate::cx::Cx;
use crate::event::{Effect, PeerKey};
use crate::outcome::Outcomes;
use bytes::Bytes;
use lagoon_backend::DeviceError;
use lagoon_cluster::LeaseEnded;
use lagoon_protocol::{BulkFrame, LeaseRelease, PartialsFrame, RefuseCode};
use lagoon_runner::RemoteTag;
use lagoon_types::{InstanceId, LeaseId};
use requests::Requests;
use seals::Seals;
use threshold::Threshold;

/// The creditor machine. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Creditor {
    requests: Requests,
    threshold: Option<Threshold>,
    seals: Seals,
    /// Own recalls that debtors did not meet in time, and blocks revoked after them.
    recalls_missed: u64,
    blocks_revoked: u64,
}

/// Events of this instance as creditor.
#[derive(Debug)]
pub(crate) enum CreditorEvent {
    /// A frame of the partials class.
    Partials {
        peer: PeerKey,
        from: InstanceId,
        frame: PartialsFrame,
    },
    /// A frame of the bulk class.
    Bulk {
        peer: PeerKey,
        from: InstanceId,
        frame: BulkFrame,
    },
    /// A debtor releases entries of a lease; it has ended the steps that attend to them.
    Released {
        from: InstanceId,
        release: LeaseRelease,
    },
    /// Leases have ended: peers' steps that attend to them end, and the peers are informed.
    Ended(Vec<LeaseEnded>),
    /// A debtor is connected.
    PeerUp {
        peer: PeerKey,
        instance: InstanceId,
    },
    /// The connection to a peer was lost.
    PeerDown(InstanceId),
    /// A frame to a peer was dropped: the peer's steps and waiting reads end, with a refusal.
    SendFailed {
        peer: PeerKey,
        instance: InstanceId,
    },
    /// The device answered a query.
    Partial {
        tag: RemoteTag,
        out: Bytes,
        lse: Bytes,
        count: Bytes,
    },
    /// The device answered a read.
    Kv {
        tag: RemoteTag,
        kv: Bytes,
    },
    /// The device failed a query or a read.
    Failed {
        tag: RemoteTag,
        error: DeviceError,
    },
    /// The device sealed an rBlock, or failed to.
    Sealed {
        tag: RemoteTag,
        sealed: bool,
    },
    /// An own decode-only step of the local micro-batch took `ms`; estimated time of remote requests before it, since
    /// the start.
    OwnStep {
        ms: u64,
        remote_requests_us: f64,
    },
    /// Own sequences need lent blocks back; with `take`, blocks not returned in time are revoked.
    WantBack {
        blocks: u32,
        take: bool,
    },
    /// Own sequences still need blocks that a debtor did not return: revoke them.
    Revoke {
        debtor: InstanceId,
        blocks: u32,
    },
    /// Own steps have appended KV that leases read (joint prefill).
    Appended,
    Tick,
}

impl Creditor {
    pub(crate) fn new(config: &InstanceConfig) -> Self {
        Self {
            requests: Requests::default(),
            threshold: Threshold::of(config),
            seals: Seals::default(),
            recalls_missed: 0,
            blocks_revoked: 0,
        }
    }

    pub(crate) fn handle(&mut self, cx: &mut Cx, event: CreditorEvent) -> Outcomes {
        match event {
            CreditorEvent::Partials { peer, from, frame } => self.on_remote_partials(cx, peer, from, frame),
            CreditorEvent::Bulk { peer, from, frame } => self.on_remote_bulk(cx, peer, from, frame),
            CreditorEvent::Released { from, release } => self.on_released(cx, from, &release),
            CreditorEvent::Ended(ended) => self.on_ended(cx, &ended),
            CreditorEvent::PeerUp { peer, instance } => recall::repeat_revoked(cx, peer, instance),
            CreditorEvent::PeerDown(instance) => {
                self.requests.forget(instance);
                self.end_routes(cx, instance);
            }
            CreditorEvent::SendFailed { peer, instance } => {
                self.refuse_remote_request(cx, peer, instance, "a frame could not be sent");
                self.end_routes(cx, instance);
            }
            CreditorEvent::Partial { tag, out, lse, count } => self.on_remote_partial(cx, tag, out, lse, count),
            CreditorEvent::Kv { tag, kv } => self.on_remote_kv(cx, tag, kv),
            CreditorEvent::Failed { tag, error } => self.on_remote_failed(cx, tag, &error),
            CreditorEvent::Sealed { tag, sealed } => self.on_remote_sealed(cx, tag, sealed),
            CreditorEvent::OwnStep { ms, remote_requests_us } => self.own_step_took(cx, ms, remote_requests_us),
            CreditorEvent::WantBack { blocks, take } => recall::want_back(cx, blocks, take),
            CreditorEvent::Revoke { debtor, blocks } => self.revoke(cx, debtor, blocks),
            CreditorEvent::Appended => self.serve_waiting(cx),
            CreditorEvent::Tick => {
                self.expire_threshold(cx);
                let outcomes = self.expire_recalls(cx);
                self.expire_remote_requests(cx);
                return outcomes;
            }
        }
        Outcomes::new()
    }

    fn on_released(&mut self, cx: &Cx, from: InstanceId, release: &LeaseRelease) {
        let tokens = |entries: u32| entries.saturating_mul(cx.config.block_tokens);
        let freed = tokens(release.first)..tokens(release.entries);
        self.requests.forget_lease(from, LeaseId(release.lease), &freed);
    }

    fn on_ended(&mut self, cx: &mut Cx, ended: &[LeaseEnded]) {
        for lease in ended {
            let steps = self.requests.forget_lease(lease.debtor, lease.lease, &(0..u32::MAX));
            let Some(peer) = cx.peers.key(lease.debtor) else { continue };
            for step in steps {
                let (code, detail) = (RefuseCode::UnknownLease, format!("{} ended", lease.lease));
                cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
            }
        }
    }

    /// Whether more queries of a peer's step are due.
    pub(crate) fn expects_queries(&self) -> bool {
        self.requests.expects_queries()
    }

    /// Number of peers' frames that wait or are on the device.
    pub(crate) fn load(&self) -> usize {
        self.requests.load()
    }

    /// Steps of peers with a ticket.
    pub(crate) fn open_steps(&self) -> usize {
        self.requests.open_steps()
    }

    /// Whether a latency target bounds peers' work.
    pub(crate) fn has_target(&self) -> bool {
        self.threshold.is_some()
    }

    /// Estimated time of remote attention requests since the start, in microseconds; 0 without a latency target.
    pub(crate) fn remote_requests_us(&self) -> f64 {
        self.threshold.as_ref().map_or(0.0, Threshold::remote_requests_us)
    }

    /// Peers' steps refused for the latency target.
    pub(crate) fn shed_steps(&self) -> u64 {
        self.threshold.as_ref().map_or(0, Threshold::shed)
    }

    /// rBlocks sealed for debtors to map.
    pub(crate) fn sealed(&self) -> u64 {
        self.seals.sealed()
    }

    /// Recalls not met in time, and blocks revoked after them.
    pub(crate) fn missed(&self) -> (u64, u64) {
        (self.recalls_missed, self.blocks_revoked)
    }
}
