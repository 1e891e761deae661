//! `lagoon status`: instances, blocks and requests of a pool or of one instance.

use crate::admin::{PoolArgs, state_json};
use crate::log::{out, outln};
use crate::pool_client::PoolClient;
use crate::table::Table;
use lagoon_transport::NodeRole;
use serde_json::{Value, json};

/// `lagoon status`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pool: PoolArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const COLUMNS: [(&str, &str); 14] = [
    ("instance", "ID"),
    ("name", "NAME"),
    ("role", "ROLE"),
    ("backend", "BACKEND"),
    ("tier", "TIER"),
    ("state", "STATE"),
    ("blocks_free", "FREE"),
    ("blocks_total", "BLOCKS"),
    ("blocks_lent", "LENT"),
    ("blocks_borrowed", "BORROWED"),
    ("requests", "RUN/WAIT"),
    ("moving", "MOVES"),
    ("moved", "OUT/HOME/BETWEEN"),
    ("calibration", "STEP 1 / MAX"),
];

/// Prints one table or object.
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<()> {
    let status = if args.pool.gmanager.is_empty() {
        let answer = args.pool.client()?.get("/lagoon/status").await?;
        if answer["instances"].is_array() { answer } else { json!({ "instances": [answer] }) }
    } else {
        let mut client =
            PoolClient::new(&args.pool.gmanager, &args.pool.tls.identity(&[NodeRole::Operator, NodeRole::Gateway])?)?;
        state_json(&client.state().await?)
    };
    if args.json {
        outln!("{status}");
        return Ok(());
    }
    let mut table = Table::new(&COLUMNS.map(|(_, title)| title)).keyed(2);
    for row in status["instances"].as_array().into_iter().flatten() {
        table.row(COLUMNS.map(|(field, _)| cell(row, field)).into());
    }
    out!("{table}");
    if let Some(prefill) = prefill_table(&status) {
        out!("\n{prefill}");
    }
    if let Some(line) = gmanager_line(&status["gmanager"]) {
        outln!("{line}");
    }
    let rows = status["instances"].as_array().into_iter().flatten();
    rows.clone().filter_map(|row| memory_line(&row["memory"])).for_each(|line| outln!("{line}"));
    rows.clone().filter_map(|row| prefix_line(&row["prefix"])).for_each(|line| outln!("{line}"));
    rows.clone().flat_map(|row| cache_tier_lines(&row["cache_tiers"])).for_each(|line| outln!("{line}"));
    rows.flat_map(path_lines).for_each(|line| outln!("{line}"));
    Ok(())
}

const PREFILL_COLUMNS: [&str; 13] = [
    "NAME",
    "ROLE",
    "WORKERS",
    "AWAY",
    "JOBS/TOKENS",
    "PULLED/OWN",
    "MB READ",
    "GB/S",
    "MERGED",
    "QUEUE MS",
    "PREFILL MS",
    "DECODE QUEUE MS / TRANSFER MS",
    "DECODE MS",
];

/// Prompts computed by one instance for another: KV read, and the mean times of a request (KVDirect Fig. 14). `None` in
/// a pool without prefill workers.
fn prefill_table(status: &Value) -> Option<Table> {
    let rows = status["instances"].as_array().into_iter().flatten();
    let mut rows = rows.filter(|row| row["prefill"].is_object() && row["role"] != "instance").peekable();
    rows.peek()?;
    let mut table = Table::new(&PREFILL_COLUMNS);
    rows.for_each(|row| table.row(prefill_cells(row).into()));
    Some(table)
}

fn prefill_cells(row: &Value) -> [String; 13] {
    let prefill = &row["prefill"];
    let n = |field: &str| prefill[field].as_u64().unwrap_or(0);
    let per = |sum: Option<u64>, count: u64, scale: f64| match (sum, count) {
        (None, _) | (_, 0) => "-".to_owned(),
        #[allow(clippy::cast_precision_loss, reason = "for people")]
        (Some(sum), count) => format!("{:.2}", sum as f64 / count as f64 * scale),
    };
    let mean = |field: &str| per(prefill["times"][field].as_u64(), n("pulled"), 1.0);
    [
        cell(row, "name"),
        cell(row, "role"),
        n("workers").to_string(),
        n("away").to_string(),
        format!("{}/{}", n("jobs"), n("queued_tokens")),
        format!("{}/{}", n("pulled"), n("own")),
        (n("bytes") / 1_000_000).to_string(),
        // Bytes per microsecond are megabytes per second.
        per(Some(n("bytes")), n("reading_us"), 1e-3),
        per(Some(n("reads")), n("transactions"), 1.0),
        mean("queue_ms"),
        mean("prefill_ms"),
        format!("{} / {}", mean("decode_queue_ms"), mean("transfer_ms")),
        per(Some(n("decode_ms")), n("decoded"), 1.0),
    ]
}

/// Measured paths to prefill workers' KV, and their traffic.
fn path_lines(row: &Value) -> Vec<String> {
    let line = |path: &Value| {
        Some(format!(
            "KV of prefill worker {}: {:.2} GB/s by {} when it was opened",
            path["worker"],
            path["bytes_per_s"].as_f64()? / 1e9,
            path["path"].as_str()?
        ))
    };
    let mut lines: Vec<String> = row["paths"].as_array().into_iter().flatten().filter_map(line).collect();
    let carried = row["carried"]["bytes"].as_object().into_iter().flatten();
    let carried = carried.filter_map(|(path, bytes)| Some(format!("{:.1} MB by {path}", bytes.as_f64()? / 1e6)));
    let carried = carried.collect::<Vec<_>>().join(", ");
    let refused = row["carried"]["regions_refused"].as_u64().filter(|times| *times > 0);
    let refused = refused.map_or(String::new(), |times| format!("; {times} times device memory could not be mapped"));
    lines.extend((!carried.is_empty()).then(|| format!("KV read: {carried}{refused}")));
    lines
}

/// Counters of mapped memory, of an instance on a device with virtual memory.
fn memory_line(memory: &Value) -> Option<String> {
    let n = |field: &str| memory[field].as_u64();
    Some(format!(
        "page groups: {} free, {} kept; mapped: {} in steps, {} ahead, {} for the next sequence, {} shared; {} found again, {} reclaimed",
        n("free")?,
        n("kept")?,
        n("in_step")?,
        n("ahead")?,
        n("eager")?,
        n("shared")?,
        n("reused")?,
        n("reclaimed")?
    ))
}

/// Counters of the prefix cache, of an instance queried directly.
fn prefix_line(prefix: &Value) -> Option<String> {
    let n = |field: &str| prefix[field].as_u64();
    let found = |place: &str| prefix["found"][place].as_u64();
    Some(format!(
        "prefix cache: {} of {} tokens found ({} in KV memory here, {} at other instances, {} in host memory, {} on disk), which \
         saved about {:.1} s; {} blocks kept, {} evicted, {} found with others; {} saved by sharing now; {} blocks leased to others",
        n("hit_tokens")?,
        n("looked_up_tokens")?,
        found("device")?,
        found("pool")?,
        found("host")?,
        found("disk")?,
        prefix["saved_ms"].as_f64()? / 1e3,
        n("blocks")?,
        n("evicted_blocks")?,
        n("shared_blocks")?,
        n("saved_blocks")?,
        n("lent_blocks")?
    ))
}

/// Counters of the prefix cache's tiers beside the KV memory, of an instance queried directly.
fn cache_tier_lines(tiers: &Value) -> Vec<String> {
    let line = |name: &str| {
        let n = |field: &str| tiers[name][field].as_u64();
        let mib = n("bytes")? >> 20;
        (n("saved_blocks")? + n("blocks")? > 0).then(|| {
            let blocks = n("blocks").unwrap_or_default();
            format!("prefix cache on {name}: {blocks} blocks, {mib} MiB")
        })
    };
    ["host", "disk"].into_iter().filter_map(line).collect()
}

/// The leader, its term, and the standbys asked.
fn gmanager_line(gmanager: &Value) -> Option<String> {
    let addr = gmanager["addr"].as_str()?;
    if let Some(silent_s) = gmanager["silent_s"].as_u64() {
        return Some(format!("no gManager has answered for {silent_s} s (the last was {addr}): the rows are as old"));
    }
    let standbys: Vec<&str> = gmanager["standbys"].as_array()?.iter().filter_map(Value::as_str).collect();
    let others = if standbys.is_empty() { String::new() } else { format!("; standby: {}", standbys.join(", ")) };
    Some(format!("gManager {addr} leads, term {}{others}", gmanager["term"]))
}

/// One cell; a dash for values that a single instance does not report.
fn cell(row: &Value, field: &str) -> String {
    if field == "requests" {
        let number = |names: [&str; 2]| names.iter().find_map(|n| row[*n].as_u64()).unwrap_or(0);
        return format!("{}/{}", number(["requests_running", "running"]), number(["requests_waiting", "waiting"]));
    }
    match field {
        "state" => return state(row).to_owned(),
        "role" => return role(row),
        "moving" => return moves(row, &["in_progress"]),
        "moved" => return moves(row, &["blocks_out", "blocks_home", "blocks_between"]),
        "calibration" => return steps(&row["calibration"]).unwrap_or_else(|| "-".to_owned()),
        _ => {}
    }
    match &row[field] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).to_owned(),
        other => other.to_string(),
    }
}

/// The role, and the role that it changes to.
fn role(row: &Value) -> String {
    let role = row["role"].as_str().unwrap_or("-");
    row["becoming"].as_str().map_or_else(|| role.to_owned(), |to| format!("{role}>{to}"))
}

/// `-` if unknown: a single instance is alive if it answers.
fn state(row: &Value) -> &'static str {
    match (row["alive"].as_bool(), row["draining"].as_bool()) {
        (Some(false), _) => "gone",
        (_, Some(true)) => "draining",
        (Some(true), _) => "alive",
        (None, _) => "-",
    }
}

/// Moves in flight, or rBlocks that moved for its requests since it started.
fn moves(row: &Value, fields: &[&str]) -> String {
    let numbers: Option<Vec<String>> = fields.iter().map(|f| Some(row["moves"][*f].as_u64()?.to_string())).collect();
    numbers.map_or_else(|| "-".to_owned(), |n| n.join("/"))
}

/// Time of a decode step without attention, of one sequence and of the largest batch measured.
fn steps(calibration: &Value) -> Option<String> {
    let batches = calibration["step_us"].as_object()?;
    let mut points: Vec<(u32, f64)> =
        batches.iter().filter_map(|(batch, us)| Some((batch.parse().ok()?, us.as_f64()?))).collect();
    points.sort_by_key(|(batch, _)| *batch);
    let (first, last) = (points.first()?, points.last()?);
    Some(format!("{:.2} / {:.2} ms", first.1 / 1e3, last.1 / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_shown_with_what_it_becomes() {
        assert_eq!(cell(&json!({"role": "prefill"}), "role"), "prefill");
        assert_eq!(cell(&json!({"role": "prefill", "becoming": "decode"}), "role"), "prefill>decode");
        assert_eq!(cell(&json!({"name": "i"}), "role"), "-");
    }

    #[test]
    fn times_and_rates_of_prefills_are_a_section_of_their_own() {
        let none = json!({"instances": [{"name": "i", "role": "instance"}]});
        assert!(prefill_table(&none).is_none());
        let prefill = json!({"workers": 1, "away": 2, "jobs": 0, "queued_tokens": 7, "pulled": 4, "own": 1,
            "bytes": 3_000_000_000_u64, "reading_us": 500_000, "reads": 90, "transactions": 30, "decoded": 0, "decode_ms": 0,
            "times": {"queue_ms": 10, "prefill_ms": 400, "decode_queue_ms": 0, "transfer_ms": 6}});
        let status = json!({"instances": [{"name": "d0", "role": "decode", "prefill": prefill}, {"name": "i", "role": "instance",
            "prefill": prefill}]});
        let cells = prefill_cells(&status["instances"][0]);
        let expected =
            ["d0", "decode", "1", "2", "0/7", "4/1", "3000", "6.00", "3.00", "2.50", "100.00", "0.00 / 1.50", "-"];
        assert_eq!(cells, expected);
        let shown = prefill_table(&status).unwrap().to_string();
        assert_eq!(shown.lines().count(), 2, "{shown}");
        assert!(shown.contains("GB/S") && shown.contains("6.00"), "{shown}");
    }

    #[test]
    fn paths_say_what_they_carried() {
        let path = json!({"worker": 3, "path": "same device", "bytes_per_s": 2e9});
        let carried = json!({"bytes": {"quic": 400_000, "same device": 12_300_000}, "regions_refused": 2});
        let lines = path_lines(&json!({"paths": [path], "carried": carried}));
        assert_eq!(lines[0], "KV of prefill worker 3: 2.00 GB/s by same device when it was opened");
        let output = "KV read: 0.4 MB by quic, 12.3 MB by same device; 2 times device memory could not be mapped";
        assert_eq!(lines[1], output);
        assert!(path_lines(&json!({"carried": {"bytes": {}}})).is_empty());
    }
}
