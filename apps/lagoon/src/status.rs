//! `lagoon status`: instances, blocks and requests of a pool or of one instance.

use crate::admin::{PoolArgs, state_json};
use crate::api_client::ApiClient;
use crate::pool_client::PoolClient;
use crate::table::Table;
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
#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<()> {
    let status = if args.pool.gmanager.is_empty() {
        let answer = ApiClient::new(&args.pool.url, args.pool.api_key)?.get("/lagoon/status").await?;
        if answer["instances"].is_array() { answer } else { json!({ "instances": [answer] }) }
    } else {
        let mut client = PoolClient::new(&args.pool.gmanager, &args.pool.tls.identity()?)?;
        state_json(&client.state().await?)
    };
    if args.json {
        println!("{status}");
        return Ok(());
    }
    let mut table = Table::new(&COLUMNS.map(|(_, title)| title));
    for row in status["instances"].as_array().into_iter().flatten() {
        table.row(COLUMNS.map(|(field, _)| cell(row, field)).into());
    }
    print!("{table}");
    if let Some(line) = gmanager_line(&status["gmanager"]) {
        println!("{line}");
    }
    Ok(())
}

/// Who leads, in which term, and who stands by as far as they were asked.
fn gmanager_line(gmanager: &Value) -> Option<String> {
    let addr = gmanager["addr"].as_str()?;
    let standbys: Vec<&str> = gmanager["standbys"].as_array()?.iter().filter_map(Value::as_str).collect();
    let others = if standbys.is_empty() { String::new() } else { format!("; standby: {}", standbys.join(", ")) };
    Some(format!("gManager {addr} leads, term {}{others}", gmanager["term"]))
}

/// One cell; what a single instance does not report is a dash.
fn cell(row: &Value, field: &str) -> String {
    if field == "requests" {
        let number = |names: [&str; 2]| names.iter().find_map(|n| row[*n].as_u64()).unwrap_or(0);
        return format!("{}/{}", number(["requests_running", "running"]), number(["requests_waiting", "waiting"]));
    }
    match field {
        "state" => return state(row).to_owned(),
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

/// `-` where nobody knows: a single instance is as alive as its answer.
fn state(row: &Value) -> &'static str {
    match (row["alive"].as_bool(), row["draining"].as_bool()) {
        (Some(false), _) => "gone",
        (_, Some(true)) => "draining",
        (Some(true), _) => "alive",
        (None, _) => "-",
    }
}

/// Moves under way, or rBlocks that moved for its requests since it started.
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
