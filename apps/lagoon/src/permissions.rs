//! Permissions of peers by the roles in their certificates: other messages are dropped, and logged once per session.

use lagoon_protocol::{AdminBody, AdminQuery, BulkFrame, ControlBody, PartialsFrame, Role};
use lagoon_transport::{NodeRole, Roles};
use lagoon_types::InstanceId;
use std::fmt::{self, Write};

/// Checks that a peer with these roles, registered as `own`, may send this to the gManager.
///
/// # Errors
/// The reason of the refusal, for the peer's operator.
pub(crate) fn at_gmanager(roles: Roles, own: Option<InstanceId>, body: &ControlBody) -> Result<(), String> {
    use NodeRole::{Gateway, Instance, Kv, Operator};
    let needed: &[NodeRole] = match body {
        ControlBody::StatusQuery(query) if query.prefixes.is_some() => &[Gateway],
        ControlBody::StatusQuery(_) => &[Operator, Gateway],
        // A process that is being stopped requests its own drain.
        ControlBody::AdminQuery(AdminQuery { body: Some(AdminBody::Drain(drain)), .. })
            if own == Some(InstanceId(drain.instance)) =>
        {
            &[Operator, Instance, Kv]
        }
        ControlBody::AdminQuery(_) => &[Operator],
        ControlBody::Register(register) if register.role == Role::Kv as i32 => &[Instance, Kv],
        ControlBody::Heartbeat(_) | ControlBody::Deregister(_) => &[Instance, Kv],
        _ => &[Instance],
    };
    allow(roles, needed, body)
}

/// Checks that a peer with these roles may send this control message to an instance.
///
/// # Errors
/// The reason of the refusal.
pub(crate) fn at_instance(roles: Roles, body: &ControlBody) -> Result<(), String> {
    let lends = matches!(
        body,
        ControlBody::Hello(_)
            | ControlBody::Rejected(_)
            | ControlBody::LeaseGrant(_)
            | ControlBody::LeaseRefuse(_)
            | ControlBody::LeaseReleased(_)
            | ControlBody::LeaseRenewed(_)
            | ControlBody::LeaseSealed(_)
            | ControlBody::LeaseRevoked(_)
            | ControlBody::Recall(_)
    );
    allow(roles, if lends { &[NodeRole::Instance, NodeRole::Kv] } else { &[NodeRole::Instance] }, body)
}

/// As [`at_instance`], for the partials class.
pub(crate) fn partials(roles: Roles, frame: &PartialsFrame) -> bool {
    // A creditor that relays a debtor's queries passes them on; a member serves them only under the debtor's own ticket.
    let lends = matches!(
        frame,
        PartialsFrame::Partial { .. }
            | PartialsFrame::Refused { .. }
            | PartialsFrame::RelayedQuery { .. }
            | PartialsFrame::RelayedPartial { .. }
    );
    roles.has(NodeRole::Instance) || (lends && roles.has(NodeRole::Kv))
}

/// As [`at_instance`], for the bulk class.
pub(crate) fn bulk(roles: Roles, frame: &BulkFrame) -> bool {
    let lends = matches!(frame, BulkFrame::Data { .. } | BulkFrame::Refused { .. });
    roles.has(NodeRole::Instance) || (lends && roles.has(NodeRole::Kv))
}

fn allow(roles: Roles, needed: &[NodeRole], body: &ControlBody) -> Result<(), String> {
    if roles.has_any(needed) {
        return Ok(());
    }
    let what = name(body);
    let needed = needed.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ");
    Err(format!(
        "{what} is for role {needed}; the certificate is for {roles}\n\
         hint: `lagoon certs issue DIR NAME --role ...` says what a node may do"
    ))
}

/// The message's name. Its content, which may be millions of entries long, is not formatted.
fn name(body: &ControlBody) -> String {
    let mut name = Name::default();
    // The formatting ends with an error at the name's end.
    let _ = write!(name, "{body:?}");
    name.0
}

/// Keeps the first identifier that is written, and fails after it.
#[derive(Debug, Default)]
struct Name(String);

impl Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric());
        self.0.push_str(&text[..end.unwrap_or(text.len())]);
        if end.is_some() { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{self as p, Register};

    fn roles(of: &[NodeRole]) -> Roles {
        of.iter().copied().collect()
    }

    fn drain(instance: u32) -> ControlBody {
        let drain = p::AdminDrain { instance, cancel: false, stop: true };
        ControlBody::AdminQuery(AdminQuery { query: 0, body: Some(AdminBody::Drain(drain)) })
    }

    /// What a kv node says, and what it does not.
    #[test]
    fn a_kv_node_lends_and_does_nothing_else() {
        let kv = roles(&[NodeRole::Kv]);
        let register =
            |role: Role| ControlBody::Register(Box::new(Register { role: role as i32, ..Register::default() }));
        for body in [register(Role::Kv), ControlBody::Heartbeat(Box::default()), drain(3)] {
            at_gmanager(kv, Some(InstanceId(3)), &body).unwrap();
        }
        for body in [
            register(Role::Instance),
            register(Role::Prefill),
            drain(4),
            ControlBody::BorrowQuery(p::BorrowQuery::default()),
            ControlBody::Refusal(p::Refusal::default()),
            ControlBody::MoveOutcome(p::MoveOutcome::default()),
            ControlBody::StatusQuery(p::StatusQuery::default()),
            ControlBody::AdminQuery(AdminQuery { query: 1, body: Some(AdminBody::Plan(p::AdminPlan {})) }),
        ] {
            let refused = at_gmanager(kv, Some(InstanceId(3)), &body).unwrap_err();
            assert!(refused.contains("the certificate is for kv") && refused.contains("hint:"), "{refused}");
        }
        at_instance(kv, &ControlBody::LeaseGrant(p::LeaseGrant::default())).unwrap();
        for body in [
            ControlBody::LeaseRequest(p::LeaseRequest::default()),
            ControlBody::PrefillRequest(Box::default()),
            ControlBody::TransferConnect(Box::default()),
            ControlBody::PrefillReady(Box::default()),
        ] {
            assert!(at_instance(kv, &body).is_err(), "{body:?}");
            at_instance(roles(&[NodeRole::Instance]), &body).unwrap();
        }
        let step = lagoon_types::StepId(1);
        let (cancel, detail) = (PartialsFrame::StepCancel { step }, String::new());
        let refused = PartialsFrame::Refused { step, code: p::RefuseCode::Device, detail };
        let (debtor, queries) = (InstanceId(3), bytes::Bytes::new());
        let relayed = PartialsFrame::RelayedQuery { debtor, step, layer: 0, rows: 1, queries: queries.clone() };
        let asked = PartialsFrame::Query { step, layer: 0, rows: 1, queries };
        assert!(partials(kv, &relayed) && !partials(kv, &asked));
        assert!(partials(kv, &refused) && !partials(kv, &cancel) && partials(roles(&[NodeRole::Instance]), &cancel));
    }

    /// Formatting a long body takes long: only its name is.
    #[test]
    fn a_messages_name_is_had_without_its_content() {
        let long = ControlBody::LeaseRenew(p::LeaseRenew { leases: vec![7; 8 << 20], seq: 0 });
        let start = std::time::Instant::now();
        let refused = at_instance(roles(&[NodeRole::Kv]), &long).unwrap_err();
        assert!(refused.starts_with("LeaseRenew is for role instance;"), "{refused}");
        at_instance(roles(&[NodeRole::Instance]), &long).unwrap();
        assert!(start.elapsed() < std::time::Duration::from_millis(100), "{:?}", start.elapsed());
    }

    #[test]
    fn gateways_ask_and_operators_order() {
        let status = ControlBody::StatusQuery(p::StatusQuery::default());
        let register = ControlBody::Register(Box::default());
        let (gateway, operator) = (roles(&[NodeRole::Gateway]), roles(&[NodeRole::Operator]));
        at_gmanager(gateway, None, &status).unwrap();
        at_gmanager(operator, None, &drain(1)).unwrap();
        assert!(at_gmanager(gateway, None, &drain(1)).is_err());
        let placed = ControlBody::StatusQuery(p::StatusQuery { query: 1, prefixes: Some(Box::default()) });
        at_gmanager(gateway, None, &placed).unwrap();
        assert!(at_gmanager(operator, None, &placed).is_err());
        for peer in [gateway, operator, roles(&[NodeRole::GManager])] {
            assert!(at_gmanager(peer, None, &register).is_err());
            assert!(at_instance(peer, &ControlBody::Hello(Box::default())).is_err());
        }
    }
}
