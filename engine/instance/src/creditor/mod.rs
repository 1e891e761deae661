//! The creditor's side: remote attention requests of peers, KV that they write and read, lending and its threshold, and
//! recall.
//!
//! It owns what peers may still ask for; the leases themselves are the rManager's. Every event of it goes through
//! [`Creditor::handle`]; it touches nothing but itself and [`Cx`], and what others have to do is an [`Outcome`].

mod recall;
mod requests;
mod seals;
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

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Creditor {
    requests: Requests,
    threshold: Option<Threshold>,
    seals: Seals,
    /// Own recalls that debtors did not meet in time, and blocks that were taken then.
    recalls_missed: u64,
    blocks_revoked: u64,
}

/// What concerns this instance as creditor.
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
    /// A debtor gives entries of a lease back; it has ended the steps that attend to them.
    Released {
        from: InstanceId,
        release: LeaseRelease,
    },
    /// Leases are not lent any more: steps of peers that attend to them end, and the peers are told.
    Ended(Vec<LeaseEnded>),
    /// A debtor is connected.
    PeerUp {
        peer: PeerKey,
        instance: InstanceId,
    },
    /// The connection to a peer is gone.
    PeerDown(InstanceId),
    /// A frame to a peer was dropped: its steps and waiting reads end, and it is told.
    SendFailed {
        peer: PeerKey,
        instance: InstanceId,
    },
    /// The device took KV that was queued.
    Written {
        bytes: usize,
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
    /// An own step of the local micro-batch that only decoded took `ms`; peers' work had taken `remote_requests_us` before it.
    OwnStep {
        ms: u64,
        remote_requests_us: f64,
    },
    /// Own sequences need lent blocks back; with `take`, those that do not come are taken.
    WantBack {
        blocks: u32,
        take: bool,
    },
    /// Own sequences still need blocks that a debtor did not return.
    Revoke {
        debtor: InstanceId,
        blocks: u32,
    },
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
            CreditorEvent::PeerDown(instance) => self.requests.forget(instance),
            CreditorEvent::SendFailed { peer, instance } => {
                self.refuse_remote_request(cx, peer, instance, "a frame could not be sent");
            }
            CreditorEvent::Written { bytes } => self.requests.on_written(bytes),
            CreditorEvent::Partial { tag, out, lse, count } => self.on_remote_partial(cx, tag, out, lse, count),
            CreditorEvent::Kv { tag, kv } => self.on_remote_kv(cx, tag, kv),
            CreditorEvent::Failed { tag, error } => self.on_remote_failed(cx, tag, &error),
            CreditorEvent::Sealed { tag, sealed } => self.on_remote_sealed(cx, tag, sealed),
            CreditorEvent::OwnStep { ms, remote_requests_us } => self.own_step_took(cx, ms, remote_requests_us),
            CreditorEvent::WantBack { blocks, take } => recall::want_back(cx, blocks, take),
            CreditorEvent::Revoke { debtor, blocks } => self.revoke(cx, debtor, blocks),
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

    /// KV goes to the device beside peers' writes.
    pub(crate) fn queue_write(&mut self, bytes: usize) {
        self.requests.queue_write(bytes);
    }

    /// The writes that are queued now, as [`Creditor::has_written`] takes it.
    pub(crate) fn queued_writes(&self) -> u64 {
        self.requests.queued_writes()
    }

    /// Whether all writes that were queued at a moment have left the queue.
    pub(crate) fn has_written(&self, queued: u64) -> bool {
        self.requests.has_written(queued)
    }

    /// Whether a peer's step goes on with queries that are not here yet.
    pub(crate) fn expects_queries(&self) -> bool {
        self.requests.expects_queries()
    }

    /// Whether the shell should hand in more bulk frames now: see [`Requests::takes_bulk`].
    pub(crate) fn takes_bulk(&self) -> bool {
        self.requests.takes_bulk()
    }

    /// Frames of peers that wait or are on the device.
    pub(crate) fn load(&self) -> usize {
        self.requests.load()
    }

    /// Whether peers' work is bounded by a latency target.
    pub(crate) fn has_target(&self) -> bool {
        self.threshold.is_some()
    }

    /// Estimated time of remote attention requests since the start, in microseconds; 0 without a latency target.
    pub(crate) fn remote_requests_us(&self) -> f64 {
        self.threshold.as_ref().map_or(0.0, Threshold::remote_requests_us)
    }

    /// Steps that were refused for the latency target.
    pub(crate) fn shed_steps(&self) -> u64 {
        self.threshold.as_ref().map_or(0, Threshold::shed)
    }

    /// rBlocks that were sealed for debtors to map.
    pub(crate) fn sealed(&self) -> u64 {
        self.seals.sealed()
    }

    /// Recalls that were not met in time, and blocks that were taken back then.
    pub(crate) fn missed(&self) -> (u64, u64) {
        (self.recalls_missed, self.blocks_revoked)
    }
}
