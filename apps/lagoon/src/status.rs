//! `lagoon status`: instances, blocks and requests of a pool or of one instance.

use crate::api_client::ApiClient;
use crate::args::TlsArgs;
use crate::pool_client::PoolClient;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// `lagoon status`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// The endpoint of `lagoon up` or `lagoon serve`.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    #[arg(long, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Ask this gManager instead (ip:port of its QUIC endpoint; needs a certificate).
    #[arg(long, value_name = "ADDR")]
    gmanager: Option<SocketAddr>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const COLUMNS: [(&str, &str); 10] = [
    ("instance", "ID"),
    ("name", "NAME"),
    ("role", "ROLE"),
    ("backend", "BACKEND"),
    ("alive", "ALIVE"),
    ("blocks_free", "FREE"),
    ("blocks_total", "BLOCKS"),
    ("blocks_lent", "LENT"),
    ("blocks_borrowed", "BORROWED"),
    ("requests", "RUN/WAIT"),
];

/// Prints one table or object.
#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<()> {
    let status = match args.gmanager {
        Some(gmanager) => {
            let rows = PoolClient::new(gmanager, &args.tls.identity()?)?.rows().await?;
            json!({ "instances": rows })
        }
        None => {
            let answer = ApiClient::new(&args.url, args.api_key)?.get("/lagoon/status").await?;
            if answer["instances"].is_array() { answer } else { json!({ "instances": [answer] }) }
        }
    };
    if args.json {
        println!("{status}");
        return Ok(());
    }
    let rows: Vec<Vec<String>> =
        status["instances"].as_array().into_iter().flatten().map(|r| COLUMNS.map(|(f, _)| cell(r, f)).into()).collect();
    let width = |c: usize| rows.iter().map(|r| r[c].len()).chain([COLUMNS[c].1.len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let padded = cells.iter().zip(&widths).map(|(text, width)| format!("{text:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    println!("{}", line(&COLUMNS.map(|(_, title)| title)));
    for row in &rows {
        println!("{}", line(&row.iter().map(String::as_str).collect::<Vec<_>>()));
    }
    Ok(())
}

/// One cell; what a single instance does not report is a dash.
fn cell(row: &Value, field: &str) -> String {
    if field == "requests" {
        let number = |names: [&str; 2]| names.iter().find_map(|n| row[*n].as_u64()).unwrap_or(0);
        return format!("{}/{}", number(["requests_running", "running"]), number(["requests_waiting", "waiting"]));
    }
    match &row[field] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).to_owned(),
        other => other.to_string(),
    }
}
