//! `lagoon kv cache`: what the prefix caches of a pool's instances have, and orders to empty them.

use crate::admin::{Operator, Order};
use crate::log::{out, outln};
use crate::pool_client::{CacheRow, PoolRow, TenantRow};
use crate::table::Table;
use crate::tenant::TenantArg;
use crate::watch::Watch;
use anyhow::Context;
use serde_json::{Value, json};

/// `lagoon kv cache`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum CacheCommand {
    /// Cached rBlocks of every instance: in free KV memory, and in the host and disk tiers beside it.
    #[command(visible_alias = "list")]
    Ls {
        /// Name or number of an instance: of this one only.
        instance: Option<String>,
        /// By tenant: fingerprints of the key's name and of `cache_salt`, of those with most rBlocks.
        #[arg(long)]
        tenants: bool,
    },
    /// Empty the prefix cache of one instance or of all: free KV memory and the tiers beside it, not what requests use.
    Drop {
        /// Name or number of the instance.
        #[arg(required_unless_present = "all")]
        instance: Option<String>,
        /// Of all instances.
        #[arg(long, conflicts_with = "instance")]
        all: bool,
        /// Of one tenant, as `ls --tenants` shows it.
        #[arg(long, value_name = "TENANT")]
        tenant: Option<TenantArg>,
        /// Of the API key of this name, whatever the `cache_salt`.
        #[arg(long, value_name = "NAME", conflicts_with = "tenant", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        key_name: Option<String>,
        /// Seconds to wait at most.
        #[arg(long, value_name = "N", default_value_t = 60)]
        timeout_s: u64,
    },
}

/// Sends the command to the pool and prints the reply.
pub(crate) async fn run(command: &CacheCommand, json: bool, operator: &mut Operator) -> anyhow::Result<()> {
    match command {
        CacheCommand::Ls { instance, tenants } => {
            let rows = match instance {
                Some(text) => vec![operator.find(text).await?],
                None => operator.rows().await?,
            };
            if *tenants && !json {
                show_tenants(&rows);
            } else {
                show(&rows, json);
            }
            Ok(())
        }
        CacheCommand::Drop { instance, timeout_s, tenant, key_name, .. } => {
            let instance = match instance {
                Some(text) => operator.find(text).await?.instance,
                None => 0,
            };
            let key = tenant.map(|of| of.key).or_else(|| key_name.as_deref().map(TenantArg::key_of));
            let salt = tenant.map(|of| of.salt);
            let mut watch = Watch::new(json, *timeout_s);
            let dropped = operator.order(Order::CacheDrop { instance, key, salt }).await?.dropped;
            let dropped = dropped.context("the gManager does not know the order\nhint: is it of this version?")?;
            follow(&mut watch, operator, &dropped.instances, dropped.number).await?;
            let n = dropped.instances.len();
            let of = if key.is_some() { " of the tenant's blocks" } else { "" };
            let are = if n == 1 { "cache is" } else { "caches are" };
            watch.say(&format!("the prefix {are} empty{of}, but for what is in use"));
            watch.answer(&json!({ "instances": dropped.instances, "dropped": true }));
            Ok(())
        }
    }
}

fn show(rows: &[PoolRow], json: bool) {
    if json {
        let rows: Vec<Value> = rows.iter().filter_map(row_json).collect();
        outln!("{}", json!({ "instances": rows }));
        return;
    }
    let mut table = Table::new(&[
        "INSTANCE", "NAME", "DEVICE", "HOST", "DISK", "TOKENS", "LEASED", "HITS", "FOUND", "SAVED", "EVICTED",
    ]);
    for (row, of) in rows.iter().filter_map(|row| Some((row, row.cache.as_ref()?))) {
        let hits = format!("{} of {}", of.hit_tokens, of.looked_up_tokens);
        let found = found(of).map(|n| n.to_string()).join("+");
        let saved = format!("{} s", of.saved_ms / 1000);
        let evicted = format!("{}+{}+{}", of.device_evicted_blocks, of.host_evicted_blocks, of.disk_evicted_blocks);
        let [device, host, disk] =
            [of.device_blocks.into(), of.host_blocks, of.disk_blocks].map(|n: u64| n.to_string());
        let tokens = tokens(of).map(|n| n.to_string()).join("+");
        let leased = of.leased_blocks.to_string();
        let number = row.instance.to_string();
        table.row(vec![number, row.name.clone(), device, host, disk, tokens, leased, hits, found, saved, evicted]);
    }
    out!("{table}");
}

fn show_tenants(rows: &[PoolRow]) {
    let mut table = Table::new(&["INSTANCE", "NAME", "TENANT", "DEVICE", "HOST", "DISK"]);
    for (row, of) in rows.iter().filter_map(|row| Some((row, row.cache.as_ref()?))) {
        for TenantRow { tenant, device_blocks, host_blocks, disk_blocks } in &of.tenants {
            let blocks = [u64::from(*device_blocks), *host_blocks, *disk_blocks].map(|n| n.to_string());
            table.row([vec![row.instance.to_string(), row.name.clone(), tenant.to_string()], blocks.to_vec()].concat());
        }
    }
    out!("{table}");
}

/// Cached tokens in KV memory, in the host tier and on disk.
fn tokens(of: &CacheRow) -> [u64; 3] {
    let blocks = [of.device_blocks.into(), of.host_blocks, of.disk_blocks];
    blocks.map(|blocks: u64| blocks.saturating_mul(of.block_tokens.into()))
}

/// Hits in KV memory, at other instances, in the host tier and on disk, in tokens.
fn found(of: &CacheRow) -> [u64; 4] {
    let others = [of.pool_hit_tokens, of.host_hit_tokens, of.disk_hit_tokens];
    let device = others.into_iter().fold(of.hit_tokens, u64::saturating_sub);
    [device, others[0], others[1], others[2]]
}

/// An instance's row with its tokens; `None` for one that has no prefix cache or none that it reported.
fn row_json(row: &PoolRow) -> Option<Value> {
    let of = row.cache.as_ref()?;
    let [device, host, disk] = tokens(of);
    let mut shown = serde_json::to_value(of).ok()?;
    let about = json!({
        "instance": row.instance, "name": row.name, "alive": row.alive,
        "device_tokens": device, "host_tokens": host, "disk_tokens": disk, "device_hit_tokens": found(of)[0],
    });
    shown.as_object_mut()?.extend(about.as_object()?.clone());
    Some(shown)
}

/// Waits until all instances have carried the order `number` out. Those that left the pool have nothing any more.
async fn follow(watch: &mut Watch, operator: &mut Operator, instances: &[u32], number: u64) -> anyhow::Result<()> {
    loop {
        let rows = operator.rows().await?;
        let is_done = |row: &PoolRow| row.cache.as_ref().is_some_and(|of| of.drop_done >= number);
        let waits = rows.iter().filter(|row| instances.contains(&row.instance) && !is_done(row));
        let waits: Vec<&str> = waits.map(|row| row.name.as_str()).collect();
        if waits.is_empty() {
            return Ok(());
        }
        let left = format!("waiting for {}", waits.join(", "));
        let late = |when: &str| {
            format!("not all caches are empty {when}\nhint: it continues; `lagoon kv cache ls` shows them")
        };
        watch.pause(left, late).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{CacheCounts, Heartbeat, InstanceStatus};

    #[test]
    fn rows_have_tokens_by_tier_and_instances_without_a_cache_none() {
        let counts = CacheCounts {
            block_tokens: 16,
            device_blocks: 3,
            disk_blocks: 100,
            leased_blocks: 2,
            hit_tokens: 100,
            pool_hit_tokens: 30,
            host_hit_tokens: 20,
            ..Default::default()
        };
        let row = |cache| {
            let heartbeat = Heartbeat { cache, ..Heartbeat::default() };
            PoolRow::from(InstanceStatus { instance: 7, heartbeat: Some(heartbeat), ..InstanceStatus::default() })
        };
        let shown = row_json(&row(Some(Box::new(counts)))).unwrap();
        assert_eq!(
            (&shown["device_tokens"], &shown["host_tokens"], &shown["disk_tokens"]),
            (&json!(48), &json!(0), &json!(1600))
        );
        assert_eq!((&shown["device_hit_tokens"], &shown["pool_hit_tokens"]), (&json!(50), &json!(30)));
        assert_eq!((&shown["instance"], &shown["leased_blocks"]), (&json!(7), &json!(2)));
        assert_eq!(row_json(&row(None)), None);
    }
}
