//! docs/gpu.md from a report of `gpu-check`: tables beside the papers', and figures.
//!
//! The part between [`BEGIN`] and [`END`] is generated from a report; the rest of the page is written by hand.

use crate::gpu::{targets, torch_best};
use lagoon_plot::{DrawError, Panel, Series, figure};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Begin of the page's generated part.
pub const BEGIN: &str = "<!-- measured: begin -->";
/// The line below the measured part of docs/gpu.md.
pub const END: &str = "<!-- measured: end -->";

/// A page and its figures, by file name.
#[derive(Clone, Debug)]
pub struct Page {
    pub text: String,
    pub figures: Vec<(&'static str, String)>,
}

/// Reason why there is no page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageError {
    /// The report is of the fake driver or of tiny sizes: its numbers are no measurements.
    NotMeasured,
    /// The page lacks the lines [`BEGIN`] and [`END`].
    NoPlace,
    Draw(DrawError),
}

impl std::fmt::Display for PageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotMeasured => write!(f, "the report was not measured on a GPU (measured_on_gpu is false)"),
            Self::NoPlace => write!(f, "the page lacks {BEGIN} or {END}"),
            Self::Draw(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for PageError {}

impl From<DrawError> for PageError {
    fn from(error: DrawError) -> Self {
        Self::Draw(error)
    }
}

fn list<'a>(report: &'a Value, section: &str, name: &str) -> Vec<&'a Value> {
    report["sections"][section]["found"][name].as_array().into_iter().flatten().collect()
}

/// A number with three places at most.
fn short(x: f64) -> String {
    let text = format!("{x:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn text(value: &Value) -> String {
    match value {
        Value::Number(n) => n.as_f64().filter(|_| !n.is_u64()).map_or_else(|| n.to_string(), short),
        Value::String(s) => s.clone(),
        Value::Bool(b) => if *b { "yes" } else { "no" }.to_owned(),
        Value::Array(both) => both.iter().map(text).collect::<Vec<_>>().join(" to "),
        _ => "not measured".to_owned(),
    }
}

/// A table of some fields of some rows.
fn table(out: &mut String, title: &str, columns: &[(&str, &str)], rows: &[&Value]) {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let _infallible = write!(out, "\n### {title}\n\n");
    if rows.is_empty() {
        out.push_str("Not in this report.\n");
        return;
    }
    out.push_str(&line(columns.iter().map(|(head, _)| (*head).to_owned()).collect()));
    out.push_str(&line(columns.iter().map(|_| "---".to_owned()).collect()));
    for row in rows {
        out.push_str(&line(
            columns.iter().map(|(_, field)| text(row.pointer(field).unwrap_or(&Value::Null))).collect(),
        ));
    }
}

/// Points of two fields of the rows that `of` takes.
fn series(name: impl Into<String>, rows: &[&Value], of: impl Fn(&Value) -> bool, x: &str, y: &str) -> Series {
    let mut points: Vec<(f64, f64)> =
        rows.iter().filter(|row| of(row)).filter_map(|row| Some((row[x].as_f64()?, row[y].as_f64()?))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Series { name: name.into(), points }
}

fn panel(title: &str, x: &str, y: &str, log_x: bool, series: Vec<Series>) -> Panel {
    Panel { title: title.into(), x_label: x.into(), y_label: y.into(), log_x, log_y: false, series }
}

fn attention(report: &Value) -> Result<String, DrawError> {
    let rows = list(report, "decode", "rows");
    let copy = report["sections"]["decode"]["found"]["copy_gb_per_s"].as_f64();
    let of = |batch: u64| {
        move |row: &Value| {
            row["batch"] == json!(batch) && row["dtype"] == json!("bf16") && row["layers_per_group"] == json!(1)
        }
    };
    let mut lines: Vec<Series> =
        [1, 16].map(|batch| series(format!("batch {batch}"), &rows, of(batch), "context", "gb_per_s")).into();
    lines.push(Series {
        name: "copy".into(),
        points: copy.into_iter().flat_map(|copy| [(8192.0, copy), (131_072.0, copy)]).collect(),
    });
    let prompts = list(report, "prefill", "rows");
    let prompts: Vec<&Value> = prompts.into_iter().chain(list(report, "warpgroups", "rows")).collect();
    let mut kernels: Vec<Series> = ["exact", "fast", "wgmma"]
        .map(|kernel| series(kernel, &prompts, |row| row["kernel"] == json!(kernel), "tokens", "ms"))
        .into();
    let torch = [4096u32, 16_384, 65_536].into_iter();
    let best = torch.filter_map(|t| Some((f64::from(t), torch_best(report, "prefill", 1, u64::from(t))? / 1e3)));
    kernels.push(Series { name: "torch's best".into(), points: best.collect() });
    let panels = [
        panel("Decode attention, bf16", "keys", "GB/s", true, lines),
        Panel { log_y: true, ..panel("Prefill attention, bf16", "tokens", "ms", true, kernels) },
    ];
    figure("Attention at Llama-3-8B's shape", &panels, 2)
}

fn memory(report: &Value) -> Result<String, DrawError> {
    let steps = list(report, "vmm", "decode_steps_of_figure_12");
    let line = |group: u64, overlapped: bool| {
        let row =
            steps.iter().find(|row| row["layers_per_group"] == json!(group) && row["overlapped"] == json!(overlapped));
        let values = row.and_then(|row| row["each_step_us"].as_array()).into_iter().flatten().filter_map(Value::as_f64);
        let points = (0u32..).map(f64::from).zip(values).collect();
        Series { name: if overlapped { "overlapped" } else { "waiting" }.into(), points }
    };
    let panels = [1, 32].map(|group| {
        let title = format!("{group} layers a page group");
        panel(&title, "step", "wait, us", false, vec![line(group, false), line(group, true)])
    });
    figure("Waiting for memory in each decoding step (vAttention, Figure 12)", &panels, 2)
}

fn work(report: &Value) -> Result<String, DrawError> {
    let rows = list(report, "linear", "rows");
    let by = |library: bool, exact: bool| {
        move |row: &Value| {
            row["kind"] == json!(if library { "cuBLASLt" } else { "own kernels" }) && row["exact"] == json!(exact)
        }
    };
    let lines = [
        ("own, two terms", false, true),
        ("own", false, false),
        ("cuBLASLt, two terms", true, true),
        ("cuBLASLt", true, false),
    ]
    .map(|(name, library, exact)| series(name, &rows, by(library, exact), "rows", "tflop_per_s"));
    let steps = list(report, "steps", "rows");
    let of = |graphs: bool, alone: bool| {
        let row = json!({ "graphs": graphs, "no_dependent_launch": alone, "batch": 1 });
        move |found: &Value| ["graphs", "no_dependent_launch", "batch"].iter().all(|key| found[*key] == row[*key])
    };
    let shares = [
        ("graphs", true, false),
        ("launched", false, false),
        ("graphs, no dependents", true, true),
        ("launched, no dependents", false, true),
    ]
    .map(|(name, graphs, alone)| series(name, &steps, of(graphs, alone), "context", "of_roofline"));
    let panels = [
        panel("Linear layer 4096 to 14336, bf16", "rows", "TFLOP/s", true, lines.into()),
        panel("8B's shape, batch 1", "keys", "of roofline", true, shares.into()),
    ];
    figure("Linear layers and whole steps", &panels, 2)
}

/// Expected, required and found values; cells of targets not measured are empty.
fn expectations(report: &Value) -> String {
    let mut out = String::from(
        "\n### Expected and found\n\n| H200 | expected | wanted | found | met |\n| --- | --- | --- | --- | --- |\n",
    );
    let cell = |value: &Value| if value.is_null() { String::new() } else { text(value) };
    for target in targets(report) {
        let cells = ["name", "expected", "at_least", "found", "met"].map(|key| cell(&target[key]));
        let _infallible = writeln!(out, "| {} |", cells.join(" | "));
    }
    out
}

fn tables(report: &Value) -> String {
    let mut out = expectations(report);
    let calls = list(report, "vmm", "calls").first().map_or(Value::Null, |row| (*row).clone());
    let calls = &calls;
    let row = |name: &str, key: &str, paper: &Value| json!({ "name": name, "ours": calls[key], "paper": paper });
    let paper = &calls["paper_table_3_us"];
    // The paper times mapping and access separately, which are one call of ours.
    let both = json!(paper["map"].as_f64().unwrap_or(0.0) + paper["set_access"].as_f64().unwrap_or(0.0));
    let rows = [
        row("reserve", "cuMemAddressReserve_us", &paper["reserve"]),
        row("create", "cuMemCreate_us", &paper["create"]),
        row("map and set access", "cuMemMap_and_cuMemSetAccess_us", &both),
        row("unmap", "cuMemUnmap_us", &paper["unmap"]),
        row("release", "cuMemRelease_us", &paper["release"]),
        row("free addresses", "cuMemAddressFree_us", &paper["free"]),
    ];
    let rows: Vec<&Value> = if calls.is_null() { Vec::new() } else { rows.iter().collect() };
    let columns = [("call", "/name"), ("here, us", "/ours"), ("paper's A100, us", "/paper")];
    table(&mut out, "Calls of virtual memory (vAttention, Table 3)", &columns, &rows);
    let columns = [("bytes of a group", "/group_bytes"), ("GB/s", "/gb_per_s")];
    table(
        &mut out,
        "Allocation (Table 9; the paper has 35.17 GB/s at 2 MB)",
        &columns,
        &list(report, "vmm", "allocation"),
    );
    let columns = [
        ("layers a group", "/layers_per_group"),
        ("tokens", "/tokens"),
        ("mapped, us", "/mapped_us"),
        ("reused, us", "/reused_us"),
    ];
    table(&mut out, "A prompt's wait for memory (Figure 13)", &columns, &list(report, "vmm", "prompts_of_figure_13"));
    let columns = [
        ("tokens", "/tokens"),
        ("page groups", "/groups"),
        ("mapped, us", "/mapped_us"),
        ("through the host, us", "/through_host_us"),
    ];
    let title = "A block of a prefix that another sequence has";
    table(&mut out, title, &columns, &list(report, "vmm", "prefixes"));
    let columns = [("tokens", "/tokens"), ("chunk", "/chunk"), ("ms", "/ms"), ("linear layers", "/linear_layers")];
    let title = "The whole prefill that it adds to, 8B's shape, attention on mma.sync";
    table(&mut out, title, &columns, &list(report, "steps", "prompts"));
    let columns = [("batch", "/batch"), ("keys", "/context"), ("block", "/block"), ("32 layers, ms", "/layers_32_ms")];
    let title =
        "Decode attention, contiguous and in blocks (Table 7: 11.8 and 11.9 ms at batch 16, 25.3 and 25.4 at 32)";
    table(&mut out, title, &columns, &list(report, "paged", "decode_of_table_7"));
    let columns = [("tokens", "/tokens"), ("block", "/block"), ("32 layers, s", "/layers_32_s")];
    let title = "Prefill attention, contiguous and in blocks (Table 6: 2.7 and 3.4 s at 64K)";
    table(&mut out, title, &columns, &list(report, "paged", "prefill_of_table_6"));
    let columns = [
        ("batch", "/batch"),
        ("keys", "/context"),
        ("graphs", "/graphs"),
        ("no dependents", "/no_dependent_launch"),
        ("step, us", "/step_us"),
        ("roofline, us", "/roofline_us"),
        ("share", "/of_roofline"),
    ];
    table(&mut out, "Decoding at Llama-3.1-8B's shape", &columns, &list(report, "steps", "rows"));
    more_tables(report, &mut out);
    let columns = [("work", "/work"), ("wgpu, us", "/wgpu_us"), ("CUDA, us", "/cuda_us"), ("times", "/times")];
    table(&mut out, "wgpu over Vulkan beside CUDA", &columns, &list(report, "wgpu", "rows"));
    out
}

/// Packed weights, and attention by kernel.
fn more_tables(report: &Value, out: &mut String) {
    let columns = [
        ("weights", "/format"),
        ("batch", "/batch"),
        ("keys", "/context"),
        ("step, us", "/step_us"),
        ("roofline, us", "/roofline_us"),
        ("share", "/of_roofline"),
    ];
    table(out, "Decoding with packed weights", &columns, &list(report, "steps", "packed"));
    let columns = [("weights", "/format"), ("tokens", "/tokens"), ("chunk", "/chunk"), ("ms", "/ms")];
    let title = "The whole prefill with attention on warpgroup products";
    table(out, title, &columns, &list(report, "warpgroups", "prompts"));
    let columns = [
        ("KV", "/dtype"),
        ("batch", "/batch"),
        ("keys", "/context"),
        ("layers a group", "/layers_per_group"),
        ("us", "/us"),
        ("of copy bandwidth", "/of_copy_bandwidth"),
    ];
    table(out, "Decode attention", &columns, &list(report, "decode", "rows"));
    let columns = [
        ("weights", "/format"),
        ("n", "/n"),
        ("rows", "/rows"),
        ("kernel", "/kernel"),
        ("us", "/us"),
        ("stored bytes of copy bandwidth", "/weight_bytes_of_copy_bandwidth"),
        ("TFLOP/s", "/tflop_per_s"),
    ];
    let title = "Linear layers of 4096 columns and n rows, packed weights";
    table(out, title, &columns, &list(report, "packed", "rows"));
}

/// The rows of a section that failed, each with its reason.
fn failures(section: &Value) -> Vec<String> {
    let lists = section["found"].as_object().into_iter().flat_map(serde_json::Map::iter);
    let rows = lists.filter_map(|(name, list)| Some((name, list.as_array()?)));
    let failed = |row: &Value| row["error"].is_string() || row["ok"] == json!(false);
    let line = |name: &str, row: &Value| {
        let fields = row.as_object().into_iter().flatten();
        let key: Vec<String> = fields
            .filter(|(_, v)| v.is_string() || v.is_u64() || v.is_boolean())
            .map(|(k, v)| format!("{k} {}", text(v)))
            .collect();
        format!("`{name}`: {}", key.join(", "))
    };
    rows.flat_map(|(name, list)| list.iter().filter(|row| failed(row)).map(move |row| line(name, row))).collect()
}

/// A page whose generated part has the expectations and empty cells.
///
/// # Errors
/// [`PageError::NoPlace`].
pub fn blank(template: &str) -> Result<String, PageError> {
    let (before, rest) = template.split_once(BEGIN).ok_or(PageError::NoPlace)?;
    let (_, after) = rest.split_once(END).ok_or(PageError::NoPlace)?;
    let middle = expectations(&Value::Null);
    Ok(format!("{before}{BEGIN}\n\nNothing was measured on a GPU yet.\n{middle}\n{END}{after}"))
}

/// Fills the page's generated part from a report.
///
/// # Errors
/// [`PageError`].
pub fn page(template: &str, report: &Value) -> Result<Page, PageError> {
    if report["measured_on_gpu"] != json!(true) {
        return Err(PageError::NotMeasured);
    }
    let (before, rest) = template.split_once(BEGIN).ok_or(PageError::NoPlace)?;
    let (_, after) = rest.split_once(END).ok_or(PageError::NoPlace)?;
    let figures = vec![
        ("gpu-attention.svg", attention(report)?),
        ("gpu-memory.svg", memory(report)?),
        ("gpu-work.svg", work(report)?),
    ];
    let mut middle = format!(
        "\n\nMeasured on {}, {}, at {} (kernels: {}).\n\n",
        text(&report["device"]["name"]),
        text(&report["driver"]),
        text(&report["label"]),
        text(&report["kernels"]),
    );
    let sections = report["sections"].as_object().cloned().unwrap_or_default();
    for (name, section) in sections.iter().filter(|(_, section)| section["state"] != json!("ok")) {
        let why =
            if section["found"]["absent"].is_null() { &section["found"]["error"] } else { &section["found"]["absent"] };
        let _infallible = write!(middle, "- `{name}`: {}", text(&section["state"]));
        if why.is_string() {
            let _infallible = write!(middle, ": {}", text(why));
        }
        middle.push('\n');
        for failure in failures(section) {
            let _infallible = writeln!(middle, "  - {failure}");
        }
    }
    for (file, _) in &figures {
        let _infallible = write!(middle, "\n![{file}](plots/{file})\n");
    }
    middle.push_str(&tables(report));
    Ok(Page { text: format!("{before}{BEGIN}{middle}\n{END}{after}"), figures })
}
