//! Runs sections, each in processes of its own: watches them, restarts them behind a row that ended one, and kills
//! them with all their children. The report is on disk from the start and after every row.

use crate::child::{ANOTHER, RUNNING, has_failed_rows, merged, push};
use crate::sections::Section;
use crate::{Args, conclude, write_whole};
use anyhow::Context as _;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// How a section's process ended.
pub(crate) enum End {
    Exited(ExitStatus),
    /// It did not change its file for the time limit of a row.
    RowTooLong,
    /// The section's time was up.
    TooLong,
}

/// Time that a killed process gets to be gone: one whose kernel hangs may stay in the driver for ever.
const KILL_TIME_MAX: Duration = Duration::from_secs(5);

/// Ends a process and its children, which would keep the GPU's memory from the next one.
fn kill(child: &mut Child) -> anyhow::Result<()> {
    let group = format!("-{}", child.id());
    let mut kill = Command::new("kill");
    let killed = kill.args(["-KILL", "--", &group]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    if !killed.is_ok_and(|killed| killed.success()) {
        child.kill()?;
    }
    let until = Instant::now() + KILL_TIME_MAX;
    while child.try_wait()?.is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Contents of a process's findings file.
fn read(path: &Path) -> Value {
    std::fs::read_to_string(path).ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_else(|| json!({}))
}

/// Runs a command that writes its findings to `path` until it ends, until `until`, or until it has not written for `row` behind its
/// first write. Says what is new there.
pub(crate) fn watch(
    command: &mut Command,
    path: &Path,
    until: Instant,
    row: Duration,
    mut new: impl FnMut(&Value) -> anyhow::Result<()>,
) -> anyhow::Result<End> {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("run a section")?;
    let (mut changed, mut since): (Option<SystemTime>, _) = (None, Instant::now());
    let end = loop {
        let ended = child.try_wait()?;
        let now = std::fs::metadata(path).and_then(|file| file.modified()).ok();
        if now != changed {
            (changed, since) = (now, Instant::now());
            new(&read(path))?;
        }
        if let Some(status) = ended {
            break End::Exited(status);
        }
        if Instant::now() > until {
            break End::TooLong;
        }
        if changed.is_some() && since.elapsed() > row {
            break End::RowTooLong;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if !matches!(end, End::Exited(_)) {
        kill(&mut child)?;
    }
    Ok(end)
}

/// Marks the row in which a process died as failed with `why`; returns whether there was one.
pub(crate) fn settle(found: &mut Value, why: &str) -> bool {
    let Some(running) = found.as_object_mut().and_then(|found| found.remove(RUNNING)) else { return false };
    let list = running["list"].as_str().unwrap_or("rows").to_owned();
    push(found, &list, merged(&running["key"], json!({ "error": why })));
    true
}

/// Findings of an earlier run of a section, without failed and absent rows: these are measured again.
fn good_rows(found: &Value) -> Value {
    let mut kept = json!({});
    for (name, value) in found.as_object().into_iter().flatten() {
        let of_the_run = [RUNNING, "error", "ok", "absent", "release_errors"].contains(&name.as_str());
        match value {
            _ if of_the_run => {}
            Value::Array(rows) => {
                let good = |row: &&Value| row["absent"].is_null() && !has_failed_rows(&json!({ "rows": [row] }));
                kept[name] = rows.iter().filter(good).cloned().collect();
            }
            other => kept[name] = other.clone(),
        }
    }
    kept
}

fn command(args: &Args, section: &Section, path: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", section.name, "--out"]).arg(path).arg("--from").arg(&args.out);
    command.arg("--goldens").arg(&args.goldens);
    if let Some(lagoon) = &args.lagoon {
        command.arg("--lagoon").arg(lagoon);
    }
    command.args(args.case.iter().flat_map(|case| ["--case", case]));
    command.args(args.smoke.then_some("--smoke")).args(args.pip.then_some("--pip"));
    Ok(command)
}

/// A time limit; in a smoke run it is longer, because the fake driver's kernels run on a host that may be busy.
pub(crate) fn times(args: &Args, seconds: u64) -> Duration {
    Duration::from_secs(if args.smoke { 6 * seconds } else { seconds })
}

/// Runs a section until it has ended or `limit` is over, in as many processes as its rows need, and writes its entry
/// in the report.
pub(crate) fn run(args: &Args, section: &Section, limit: Duration, report: &mut Value) -> anyhow::Result<()> {
    let path: PathBuf = std::env::temp_dir().join(format!("gpu-check-{}-{}.json", std::process::id(), section.name));
    write_whole(&path, &good_rows(&report["sections"][section.name]["found"]))?;
    let (started, mut processes) = (Instant::now(), 0u32);
    let row = times(args, section.row_s);
    let mut found;
    let entry = |report: &mut Value, state: &str, how: &str, processes: u32, found: &Value| {
        report["sections"][section.name] = json!({
            "state": state,
            "seconds": started.elapsed().as_secs_f64(),
            "ended": how,
            "processes": processes,
            "label": args.label,
            "found": found,
        });
        conclude(report);
        write_whole(&args.out, report)
    };
    let (state, how) = loop {
        processes += 1;
        let until = started + limit;
        let show = |found: &Value| entry(report, "running", "not yet", processes, found);
        let end = watch(&mut command(args, section, &path)?, &path, until, row, show)?;
        found = read(&path);
        let how = match &end {
            End::Exited(status) => status.to_string(),
            End::RowTooLong => format!("killed: nothing new for {} s", row.as_secs()),
            End::TooLong => format!("killed after {} s", limit.as_secs()),
        };
        let another = matches!(&end, End::Exited(status) if status.code() == Some(ANOTHER.into()));
        if matches!(end, End::TooLong) {
            break ("timed out", how);
        }
        let died = settle(&mut found, &how);
        if !(another || died) {
            let good = matches!(&end, End::Exited(status) if status.success());
            let absent = good && !found["absent"].is_null();
            break (
                if absent {
                    "absent"
                } else if good {
                    "ok"
                } else {
                    "failed"
                },
                how,
            );
        }
        write_whole(&path, &found)?;
    };
    // Findings not written by now are dropped.
    let _gone = std::fs::remove_file(&path);
    entry(report, state, &how, processes, &found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a shell script that writes to `$0`, with 1 s a row and 10 s in all.
    fn watched(name: &str, script: &str) -> (End, Value, Vec<Value>) {
        let path = std::env::temp_dir().join(format!("gpu-check-watch-{}-{name}.json", std::process::id()));
        let (mut seen, until) = (Vec::new(), Instant::now() + Duration::from_secs(10));
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(&path);
        let new = |found: &Value| {
            seen.push(found.clone());
            Ok(())
        };
        let end = watch(&mut command, &path, until, Duration::from_secs(1), new).expect("it runs");
        let found = read(&path);
        let _gone = std::fs::remove_file(&path);
        (end, found, seen)
    }

    #[test]
    fn a_row_that_hangs_is_killed_and_noted() {
        let running = r#"{"rows":[{"n":1}],"running":{"list":"rows","key":{"n":2}}}"#;
        let (end, mut found, seen) = watched("hangs", &format!("echo '{running}' > \"$0\"; sleep 600"));
        assert!(matches!(end, End::RowTooLong) && seen.last() == Some(&found), "{seen:?}");
        assert!(settle(&mut found, "killed"));
        assert_eq!(found, json!({ "rows": [{ "n": 1 }, { "n": 2, "error": "killed" }] }));
        assert!(!settle(&mut found, "killed"), "no other row was begun");
    }

    #[test]
    fn rows_that_are_written_in_time_are_not_killed() {
        let script =
            "for n in 1 2 3 4; do sleep 0.4; echo \"{\\\"n\\\":$n}\" > \"$0.tmp\"; mv \"$0.tmp\" \"$0\"; done; exit 3";
        let (end, found, seen) = watched("writes", script);
        assert!(matches!(end, End::Exited(status) if status.code() == Some(3)));
        assert!(found == json!({ "n": 4 }) && seen.len() >= 4, "{seen:?}");
    }

    #[test]
    fn what_failed_is_not_gone_on_from() {
        let earlier = json!({
            "copy": 7.0, "error": "it broke", "ok": false, "release_errors": 1,
            "running": { "list": "rows", "key": { "n": 4 } },
            "rows": [{ "n": 1 }, { "n": 2, "error": "killed" }, { "n": 3, "ok": false }, { "n": 5, "absent": "no" }],
        });
        assert_eq!(good_rows(&earlier), json!({ "copy": 7.0, "rows": [{ "n": 1 }] }));
        assert_eq!(good_rows(&Value::Null), json!({}));
    }
}
