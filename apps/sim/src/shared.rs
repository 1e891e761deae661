//! Code shared by all single-threaded pools, on modelled devices (this crate) and on real ones (the system tests):
//! registrations at the gManager, frames as events, device failures, the check of block counts.

use crate::place::Place;
use lagoon_backend::DeviceError;
use lagoon_cluster::{GManager, GManagerOutput};
use lagoon_instance::{Event, Instance, PeerKey};
use lagoon_protocol::{Control, ControlBody};
use lagoon_runner::Report;
use lagoon_types::InstanceId;
use lagoon_wire::Frame;
use std::collections::BTreeMap;

/// Registered instances by their connection to the gManager.
#[derive(Debug, Default)]
pub struct Registrations(BTreeMap<Place, InstanceId>);

impl Registrations {
    /// Passes a message from `from`'s connection to the gManager; returns the reply.
    pub fn receive(
        &mut self,
        gmanager: &mut GManager,
        from: Place,
        body: &ControlBody,
        now_ms: u64,
    ) -> Option<ControlBody> {
        let reply = gmanager.on_control(self.0.get(&from).copied(), body, now_ms);
        if let Some(ControlBody::Registered(registered)) = &reply {
            self.0.insert(from, InstanceId(registered.instance));
        }
        reply
    }

    /// The gManager's next unsolicited message and its destination (`None` if that instance is not connected).
    pub fn next_order(&self, gmanager: &mut GManager) -> Option<(Option<Place>, ControlBody)> {
        let GManagerOutput::Send { to, body } = gmanager.poll()?;
        let place = self.0.iter().find(|(_, id)| **id == to).map(|(place, _)| *place);
        Some((place, body))
    }

    /// Forgets the connection of `place`.
    pub fn lose(&mut self, place: Place) {
        self.0.remove(&place);
    }
}

/// A frame as an event of its receiver; `from` is `None` for the gManager. `None` for a message of a later version.
#[must_use]
pub fn event(from: Option<PeerKey>, frame: Frame) -> Option<Event> {
    Some(match (frame, from) {
        (Frame::Control(Control { body }), None) => Event::GManager(body?),
        (Frame::Control(Control { body }), Some(peer)) => Event::Control { peer, body: body? },
        (Frame::Partials(frame), peer) => Event::Partials { peer: peer?, frame },
        (Frame::Bulk(frame), peer) => Event::Bulk { peer: peer?, frame },
    })
}

/// A planned failure of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// In an own step.
    Step,
    /// In a peer's query.
    RemoteRequest,
}

impl DeviceFault {
    /// The failure report in place of `report`, if that is of the planned kind.
    #[must_use]
    pub fn strike(self, report: &Report) -> Option<Report> {
        let error = DeviceError::Failed("pulled out".to_owned());
        Some(match (self, report) {
            (Self::Step, Report::Done { step, micro_batch, .. }) => {
                Report::Failed { step: *step, micro_batch: *micro_batch, error: error.into() }
            }
            (Self::RemoteRequest, Report::RemotePartial { tag, .. } | Report::RemoteKv { tag, .. }) => {
                Report::RemoteFailed { tag: *tag, error }
            }
            (Self::RemoteRequest, Report::Shared { share, .. }) => Report::Shared { share: *share, error: Some(error) },
            (Self::RemoteRequest, Report::Staged { stage, .. }) => Report::Staged { stage: *stage, error: Some(error) },
            _ => return None,
        })
    }
}

/// Checks that an instance's blocks add up: each has a user, and a shared one as many as its reference count.
///
/// # Errors
/// A description of the mismatch.
pub fn blocks(instance: &Instance) -> Result<(), String> {
    let (rm, status) = (instance.rmanager(), instance.status());
    rm.pool.check();
    let counts = rm.pool.counts();
    if counts.free + counts.own + counts.lent != counts.total + counts.shared {
        return Err(format!("{counts:?} do not add up"));
    }
    let settling = u32::try_from(status.prefill.blocks_settling).unwrap_or(u32::MAX);
    let own = status.sequences.iter().map(|s| s.local_blocks + s.reserved_blocks).sum::<u32>() + settling;
    let lent = rm.creditor.iter().map(|(_, _, _, first, end)| end - first).sum::<u32>() + rm.creditor.held_back();
    if (counts.own, counts.lent) != (own, lent) {
        return Err(format!("{counts:?}, but {own} are used here and {lent} are in leases"));
    }
    // Only a swap around a frozen cycle may use the reserve that is never lent otherwise. KV prefilled for other
    // instances is not counted.
    let config = rm.config();
    let most = config.lend_blocks_max + rm.creditor.lent_for_swaps().min(config.lend_reserve_blocks);
    if counts.lent - rm.creditor.handed_over() > most {
        return Err(format!("it lends {} of at most {most}", counts.lent));
    }
    // A sequence with frozen debts stays until the thaw, in no queue.
    if status.running + status.waiting > status.sequences.len() {
        return Err(format!("{status:?}"));
    }
    Ok(())
}
