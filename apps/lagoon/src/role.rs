//! `lagoon role`: gives an instance another role at run time; it finishes the work of only the old one first.

use crate::admin::{NewRole, Operator, Order, PoolArgs};
use crate::pool_client::{PoolRow, role_name};
use crate::watch::Watch;
use lagoon_types::limits;
use serde_json::json;

/// `lagoon role`.
#[derive(Debug, clap::Args)]
pub(crate) struct RoleArgs {
    /// Name or number of the instance (`lagoon status`).
    instance: String,
    /// The new role.
    role: NewRole,
    /// Wait until it has finished the work of its old role and has the new one.
    #[arg(long)]
    wait: bool,
    /// Seconds to wait at most.
    #[arg(long, value_name = "N", default_value_t = 600)]
    timeout_s: u64,
    #[command(flatten)]
    pool: PoolArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Orders the change and, with `--wait`, follows it to its end.
pub(crate) async fn run(args: RoleArgs) -> anyhow::Result<()> {
    let mut operator = Operator::new(&args.pool)?;
    let mut watch = Watch::new(args.json, args.timeout_s);
    let mut row = operator.find(&args.instance).await?;
    operator.order(Order::Role { instance: row.instance, role: args.role }).await?;
    let role = role_name(args.role.into());
    if !is_done(&row, role) {
        watch.say(&format!("{} ({}) changes from {} to {role}", row.name, row.instance, row.role));
    }
    if args.wait {
        row = follow(&mut watch, &mut operator, row, role).await?;
    }
    let done = is_done(&row, role);
    if done {
        watch.say(&format!("{} ({}) is {role}", row.name, row.instance));
    }
    let becoming = (!done).then_some(role);
    watch.answer(
        &json!({ "instance": row.instance, "name": row.name, "role": row.role, "becoming": becoming, "done": done }),
    );
    Ok(())
}

/// Whether it has the role, with no change ordered.
fn is_done(row: &PoolRow, role: &str) -> bool {
    row.role == role && row.becoming.is_none()
}

/// Work that it may be finishing.
fn left(row: &PoolRow) -> String {
    let jobs = row.prefill.map_or(0, |prefill| prefill.jobs);
    format!("{} requests run, {} wait, {jobs} prompts for others", row.requests_running, row.requests_waiting)
}

/// Why the order does not stand any more; `None` while it does.
fn lost(row: &PoolRow, role: &str) -> Option<String> {
    // Between its registration and its first heartbeat.
    let unknown = !row.alive || row.blocks_total == 0;
    match &row.becoming {
        _ if unknown || is_done(row, role) => None,
        Some(becoming) if becoming == role => None,
        Some(becoming) => Some(format!("it becomes {becoming} now: a later order replaced this one")),
        None => Some(format!(
            "it stays {}: this was taken back, or the gManager that was asked died before the instance had received it",
            row.role
        )),
    }
}

/// Waits until it has the role.
async fn follow(watch: &mut Watch, operator: &mut Operator, of: PoolRow, role: &str) -> anyhow::Result<PoolRow> {
    let before = if of.role == "instance" { "both" } else { &of.role };
    loop {
        let Some(row) = operator.rows().await?.into_iter().find(|row| row.instance == of.instance) else {
            anyhow::bail!(
                "{} is gone: its process ended, or it sent nothing for {} s; the order went with it\nhint: `lagoon \
                 status` shows who is there",
                of.name,
                limits::INSTANCE_FORGET_MS / 1000
            )
        };
        if row.alive && is_done(&row, role) {
            return Ok(row);
        }
        if let Some(why) = lost(&row, role) {
            anyhow::bail!("{} does not become {role}: {why}\nhint: `lagoon role` once more if it still shall", of.name);
        }
        let late = |when: &str| {
            format!(
                "{0} is not {role} {when}\nhint: it continues; `lagoon status` shows it, `lagoon role {0} {before}` takes \
                 it back",
                row.name
            )
        };
        let left = if row.alive { left(&row) } else { "it is silent; the order waits for it".to_owned() };
        watch.pause(left, late).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{Heartbeat, InstanceStatus, Role, RoleState};

    fn row(alive: bool, now: Role, becoming: Option<Role>) -> PoolRow {
        let state = RoleState { now: now.into(), becoming: becoming.map(Into::into), order_received: 0 };
        let heartbeat = Heartbeat { blocks_total: 8, role: Some(Box::new(state)), ..Heartbeat::default() };
        InstanceStatus { alive, role: now.into(), heartbeat: Some(heartbeat), ..InstanceStatus::default() }.into()
    }

    #[test]
    fn a_lost_order_is_distinguished_from_a_waiting_one() {
        let lost = |row| lost(&row, "decode");
        assert_eq!(lost(row(true, Role::Prefill, Some(Role::Decode))), None);
        assert_eq!(lost(row(true, Role::Decode, None)), None);
        // Cancelled and ordered again: the instance may still be changing to the role.
        assert_eq!(lost(row(true, Role::Decode, Some(Role::Decode))), None);
        assert!(lost(row(true, Role::Prefill, Some(Role::Instance))).is_some_and(|why| why.contains("a later order")));
        assert!(lost(row(true, Role::Prefill, None)).is_some_and(|why| why.contains("had received")));
        assert_eq!(lost(row(false, Role::Prefill, None)), None, "it is fenced, and gets the order again");
        let registered = InstanceStatus { alive: true, role: Role::Prefill.into(), ..InstanceStatus::default() };
        assert_eq!(lost(registered.into()), None);
    }
}
