//! A section in its own process: its findings, written to disk after every row.
//!
//! The parent reads from the file which rows are done: a row is announced before it is measured ([`RUNNING`]) and
//! then replaced by its result. A row that loses the context ends the process with [`ANOTHER`]; the parent starts the
//! section again, which skips rows that are there. So one trap costs one row.

use crate::{Args, sections::SECTIONS, write_whole};
use anyhow::Context as _;
use lagoon_cuda::driver::Context;
use serde_json::{Map, Value, json};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code that requests another process for the remaining rows.
pub(crate) const ANOTHER: u8 = 75;

/// Field with the row being measured: `{ "list", "key" }`.
pub(crate) const RUNNING: &str = "running";

/// The driver lost the context; the row at fault is in the file.
#[derive(Debug)]
struct Lost;

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the context is lost")
    }
}

impl std::error::Error for Lost {}

/// The section's findings so far.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) path: PathBuf,
    pub(crate) found: Value,
}

/// The message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_else(|| "it panicked".to_owned())
}

/// The result of `f`, or its error or panic.
fn caught<T>(f: impl FnOnce() -> anyhow::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(panic) => Err(panic_text(panic.as_ref())),
    }
}

/// The driver's error if the context is lost.
fn lost() -> Option<String> {
    Context::open(0).and_then(|context| context.memory()).err().map(|error| error.to_string())
}

/// Whether `row` has all fields of `key`.
pub(crate) fn is_of(row: &Value, key: &Value) -> bool {
    key.as_object().is_some_and(|key| key.iter().all(|(name, value)| row[name] == *value))
}

/// Adds `row` to a list.
pub(crate) fn push(found: &mut Value, list: &str, row: Value) {
    match &mut found[list] {
        Value::Array(rows) => rows.push(row),
        other => *other = json!([row]),
    }
}

/// The key's fields and, behind them, those of `more`.
pub(crate) fn merged(key: &Value, more: Value) -> Value {
    let mut row: Map<String, Value> = key.as_object().cloned().unwrap_or_default();
    match more {
        Value::Object(more) => row.extend(more),
        other => drop(row.insert("found".to_owned(), other)),
    }
    Value::Object(row)
}

impl Out {
    /// Continues from the file, if it exists.
    fn new(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        Self { path, found: serde_json::from_str(&text).unwrap_or_else(|_| json!({})) }
    }

    /// Sets a finding.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) -> anyhow::Result<()> {
        self.found[key] = value.into();
        self.write()
    }

    /// Adds a finding to a list.
    pub(crate) fn push(&mut self, list: &str, row: Value) -> anyhow::Result<()> {
        push(&mut self.found, list, row);
        self.write()
    }

    /// The number `key`, measured unless an earlier process of the section has.
    pub(crate) fn number(&mut self, key: &str, f: impl FnOnce() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
        if let Some(known) = self.found[key].as_f64() {
            return Ok(known);
        }
        let number = f()?;
        self.set(key, number)?;
        Ok(number)
    }

    /// Measures the row of `list` with this key unless it exists, and writes it: the key's fields and those of `f`,
    /// or an `error`.
    ///
    /// # Errors
    /// The context is lost, so the section must end; or the file cannot be written.
    pub(crate) fn row(
        &mut self,
        list: &str,
        key: Value,
        f: impl FnOnce() -> anyhow::Result<Value>,
    ) -> anyhow::Result<()> {
        if self.found[list].as_array().is_some_and(|rows| rows.iter().any(|row| is_of(row, &key))) {
            return Ok(());
        }
        self.set(RUNNING, json!({ "list": list, "key": key }))?;
        let found = caught(f);
        let (row, broken) = match (found, lost()) {
            (Ok(found), None) => (found, false),
            (Ok(_), Some(why)) => (json!({ "error": format!("the context was lost: {why}") }), true),
            // A driver's error may show here first, and in its next call only.
            (Err(error), lost) => (json!({ "error": error }), lost.is_some() || error.contains("CUDA_ERROR_")),
        };
        push(&mut self.found, list, merged(&key, row));
        self.found.as_object_mut().map(|found| found.remove(RUNNING));
        self.write()?;
        if broken { Err(Lost.into()) } else { Ok(()) }
    }

    fn write(&self) -> anyhow::Result<()> {
        write_whole(&self.path, &self.found)
    }
}

/// Whether some row has failed.
pub(crate) fn has_failed_rows(found: &Value) -> bool {
    let lists = found.as_object().into_iter().flat_map(Map::values).filter_map(Value::as_array);
    lists.flatten().any(|row| !row["error"].is_null() || row["ok"] == json!(false))
}

/// Runs a section in this process.
pub(crate) fn run(args: &Args, name: &str) -> anyhow::Result<ExitCode> {
    let known = SECTIONS.iter().find(|s| s.name == name).map(|section| section.run);
    let hidden = || crate::head::section(name).or_else(|| crate::sanitizer::case_section(name));
    let run = known.or_else(hidden).with_context(|| format!("no section {name}"))?;
    crate::SMOKE.get_or_init(|| args.smoke);
    let mut out = Out::new(args.out.clone());
    // Held, so that the context is not made anew for each row. Without a device, the rows say why.
    let _held = Context::open(0);
    let result = catch_unwind(AssertUnwindSafe(|| run(args, &mut out)));
    let error = match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) if error.is::<Lost>() => return Ok(ExitCode::from(ANOTHER)),
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(panic) => Some(panic_text(panic.as_ref())),
    };
    let failed = error.is_some() || out.found["ok"] == json!(false) || has_failed_rows(&out.found);
    if let Some(error) = error {
        out.found["error"] = json!(error);
    }
    out.set("release_errors", lagoon_cuda::driver::release_errors())?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
