//! `cargo xtask gpu-rehearse`: runs the commands of docs/gpu.md, word for word, over the fake driver.
//!
//! Each command gets a fresh folder with only the archive, the earlier command's report and, of the checkout, the golden
//! models; only files in its output folder are kept. At the end the report must be complete. Times and outputs are held against the loan's limits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::gpu_check::{ARCHIVE, FOLDER, GOLDENS, QUICK, SENT_BYTES_MAX, build_pack};
use crate::workspace;

/// Begin of the commands in docs/gpu.md.
const BEGIN: &str = "<!-- commands: begin -->";
const END: &str = "<!-- commands: end -->";

/// Limits of a loan: seconds of a command and of all, length of a command's text, and files of its output folder.
const COMMAND_S_MAX: u64 = 540;
const ALL_S_MAX: u64 = 1000;
const COMMAND_CHARS_MAX: usize = 2000;
const FILES_MAX: usize = 8;
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Sections that may be absent without a GPU, with a reason. All others must be measured.
const MAY_BE_ABSENT: [&str; 4] = ["torch", "wgpu", "dist", "demo_mixed"];

/// A command of docs/gpu.md, and its seconds.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    seconds: u64,
    text: String,
}

/// The commands of the page: a line `# SECONDS s: what` before each.
fn steps(page: &str) -> Result<Vec<Step>> {
    let (_, rest) = page.split_once(BEGIN).with_context(|| format!("docs/gpu.md lacks {BEGIN}"))?;
    let (block, _) = rest.split_once(END).with_context(|| format!("docs/gpu.md lacks {END}"))?;
    let (mut steps, mut seconds) = (Vec::new(), None);
    for line in block.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("```")) {
        if let Some(about) = line.strip_prefix("# ") {
            seconds = about.split_once(" s: ").and_then(|(number, _)| number.parse().ok());
        } else {
            let seconds = seconds.take().with_context(|| format!("no `# SECONDS s: ` before {line}"))?;
            steps.push(Step { seconds, text: line.to_owned() });
        }
    }
    check_limits(&steps)?;
    Ok(steps)
}

fn check_limits(steps: &[Step]) -> Result<()> {
    ensure!(!steps.is_empty(), "docs/gpu.md has no command");
    for step in steps {
        let chars = step.text.chars().count();
        ensure!(chars <= COMMAND_CHARS_MAX, "a command of {chars} characters, at most {COMMAND_CHARS_MAX}");
        ensure!(step.seconds <= COMMAND_S_MAX, "a command of {} s, at most {COMMAND_S_MAX}", step.seconds);
    }
    let all: u64 = steps.iter().map(|step| step.seconds).sum();
    ensure!(all <= ALL_S_MAX, "commands of {all} s together, at most {ALL_S_MAX}");
    Ok(())
}

/// The fakes in place of NVIDIA's driver and library.
struct Fakes {
    driver: PathBuf,
    blas: PathBuf,
    kernels: PathBuf,
}

/// Has the tests' helpers build the fakes, and reads their paths.
fn fakes(root: &Path) -> Result<Fakes> {
    let target = workspace::target(root);
    let list = target.join("tmp/gpu-check-fakes");
    // It may be of other sources.
    let _gone = fs::remove_file(&list);
    let test = ["--test", "gpu_check", "the_fakes_are_built", "--", "--exact"];
    let mut command = workspace::cargo();
    command.args(["test", "--locked", "--release", "--quiet", "--workspace"]).args(test).current_dir(root);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status().context("run cargo")?;
    ensure!(status.success(), "the fakes do not build");
    let text = fs::read_to_string(&list).context("the fakes were not built\nhint: g++ is needed")?;
    let [driver, blas, kernels] =
        text.lines().map(PathBuf::from).collect::<Vec<_>>().try_into().ok().context("three paths")?;
    Ok(Fakes { driver, blas, kernels })
}

/// Stand-ins for programs of the lent machine, in a folder for PATH: a compute-sanitizer that runs its arguments.
fn tools(folder: &Path) -> Result<PathBuf> {
    let bin = folder.join("tools");
    fs::create_dir_all(&bin)?;
    let program = bin.join("compute-sanitizer");
    let text = "#!/bin/sh\n\
        while [ \"${1#--}\" != \"$1\" ]; do [ \"$1\" != --log-file ] || log=$2; shift 2; done\n\
        echo '========= ERROR SUMMARY: 0 errors' > \"$log\"\n\
        exec \"$@\"\n";
    fs::write(&program, text)?;
    #[cfg(unix)]
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(bin)
}

/// Runs one command as the machine would: in a fresh folder with the sent files, of which only the output folder is
/// kept.
fn rehearse(
    root: &Path,
    step: &Step,
    folder: &Path,
    archive: &Path,
    last: Option<&Path>,
    fakes: &Fakes,
) -> Result<PathBuf> {
    let (machine, out) = (folder.join("machine"), folder.join("out"));
    for fresh in [&machine, &out] {
        if fresh.exists() {
            fs::remove_dir_all(fresh)?;
        }
    }
    let sent = machine.join(FOLDER);
    fs::create_dir_all(&sent)?;
    fs::create_dir_all(&out)?;
    fs::copy(archive, sent.join(ARCHIVE))?;
    if let Some(last) = last {
        fs::copy(last, sent.join("report.json"))?;
    }
    let goldens = machine.join(GOLDENS);
    fs::create_dir_all(goldens.parent().context("a folder")?)?;
    #[cfg(unix)]
    std::os::unix::fs::symlink(root.join(GOLDENS), goldens).context("link the golden models")?;
    let bytes: u64 = fs::read_dir(&sent)?.map(|file| Ok(file?.metadata()?.len())).sum::<std::io::Result<u64>>()?;
    ensure!(bytes <= SENT_BYTES_MAX, "{bytes} bytes are sent, at most {SENT_BYTES_MAX}");
    let path = std::env::var("PATH").unwrap_or_default();
    let temporary = machine.join("tmp");
    fs::create_dir_all(&temporary)?;
    let started = Instant::now();
    let status = Command::new("sh")
        .args(["-c", &step.text])
        .current_dir(&machine)
        .env("OUT", &out)
        .env("TMPDIR", &temporary)
        .env("PATH", format!("{}:{path}", tools(folder)?.display()))
        .env("LD_LIBRARY_PATH", fakes.driver.parent().context("a folder")?)
        .env("LAGOON_FAKE_KERNELS", &fakes.kernels)
        .env("LAGOON_FAKE_CAPABILITY", "9.0")
        .env("LAGOON_CUBLASLT", &fakes.blas)
        .env("GPU_CHECK_SMOKE", "1")
        .stdin(Stdio::null())
        .status()
        .context("run sh")?;
    let seconds = started.elapsed().as_secs();
    println!("{} ({seconds} s, {status})", step.text);
    check_files(&out)?;
    let report = folder.join("report.json");
    fs::copy(out.join("report.json"), &report).context("the command left no report")?;
    fs::remove_dir_all(&machine)?;
    Ok(report)
}

/// Checks the returned files: few, none of them large.
fn check_files(out: &Path) -> Result<()> {
    let files: Vec<_> = fs::read_dir(out)?.collect::<std::io::Result<_>>()?;
    ensure!(files.len() <= FILES_MAX, "{} files in the output folder, at most {FILES_MAX}", files.len());
    for file in files {
        let (bytes, name) = (file.metadata()?.len(), file.file_name());
        ensure!(file.file_type()?.is_file(), "{} is no file", name.display());
        ensure!(bytes <= FILE_BYTES_MAX, "{} has {bytes} bytes, at most {FILE_BYTES_MAX}", name.display());
    }
    Ok(())
}

/// Checks that every section of the three parts was measured, or says why not.
fn check_report(report: &Value, sections: &[String]) -> Result<()> {
    ensure!(report["smoke"] == true && report["measured_on_gpu"] == false, "a report of the fake driver says so");
    for name in sections {
        let entry = &report["sections"][name];
        match entry["state"].as_str() {
            Some("ok") => ensure!(entry["found"].as_object().is_some_and(|o| o.len() > 1), "{name} has found nothing"),
            Some("absent") if MAY_BE_ABSENT.contains(&name.as_str()) => {
                ensure!(entry["found"]["absent"].as_str().is_some_and(|why| why.len() > 10), "{name} does not say why")
            }
            state => bail!("{name} is {}: {entry:#}", state.unwrap_or("not in the report")),
        }
    }
    ensure!(report["release_errors"] == 0, "{} releases failed", report["release_errors"]);
    if sections.iter().any(|name| name == "demo") {
        check_demo(&report["sections"]["demo"]["found"]["report"])?;
    }
    Ok(())
}

/// Checks that the demo's pool gave the same tokens as one instance, on CUDA in its default precision, with the
/// bundled model's 16-bit weights: that precision rounds activations, so logits differ, within the demo's tolerance.
fn check_demo(demo: &Value) -> Result<()> {
    for field in ["ok", "tokens_equal"] {
        ensure!(demo[field] == true, "the demo's `{field}` is {}", demo[field]);
    }
    ensure!(demo["backend"] == "cuda", "the demo ran on {}", demo["backend"]);
    ensure!(demo["remote_rblocks"].as_u64() > Some(0), "the demo's KV was on one instance");
    let (differ, tolerance) = (demo["max_abs_logit_diff"].as_f64(), demo["tolerance"].as_f64());
    let (differ, tolerance) = differ.zip(tolerance).context("the demo compared no logits")?;
    ensure!(differ <= tolerance, "the demo's logits differ by {differ}, at most {tolerance} is right");
    println!("the demo's logits differ by {differ:.1e}, at most {tolerance:.1e} is right");
    Ok(())
}

/// The check's own list: the seconds of each part, and the sections in parts.
fn listed(pack: &Path) -> Result<(Vec<u64>, Vec<String>)> {
    let output =
        Command::new(pack.join("gpu-check")).args(["--goldens", ".", "--list"]).output().context("run the check")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (mut parts, mut sections) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["part", _, seconds, "s"] => parts.push(seconds.parse().context("a part's seconds")?),
            ["0", ..] => {}
            [_, name, ..] => sections.push(name.to_owned()),
            _ => bail!("a line of the list: {line}"),
        }
    }
    ensure!(sections.len() > 10, "the check lists no sections: {text}");
    Ok((parts, sections))
}

/// Builds the archive and the fakes, holds the page's seconds against the check's, and runs the commands; returns whether the
/// report is complete.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let steps = steps(&fs::read_to_string(root.join("docs/gpu.md")).context("read docs/gpu.md")?)?;
    let (archive, pack) = build_pack(root, QUICK)?;
    let (parts, sections) = listed(&pack)?;
    let page: Vec<u64> = steps.iter().map(|step| step.seconds).collect();
    ensure!(page == parts, "docs/gpu.md has commands of {page:?} s, the check's parts have {parts:?}");
    let fakes = fakes(root)?;
    let folder = std::env::temp_dir().join(format!("gpu-rehearse-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let mut last = None;
    for step in &steps {
        last = Some(rehearse(root, step, &folder, &archive, last.as_deref(), &fakes)?);
    }
    let text = fs::read_to_string(last.context("a report")?)?;
    let report: Value = serde_json::from_str(&text).context("parse the report")?;
    let checked = check_report(&report, &sections);
    if let Err(error) = &checked {
        println!("error: {error:#}\nthe folder is kept: {}", folder.display());
        return Ok(false);
    }
    println!("gpu-rehearse: ok, {} commands, a report of {} KiB", steps.len(), text.len() >> 10);
    fs::remove_dir_all(&folder)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn page(commands: &str) -> String {
        format!("before\n{BEGIN}\n```\n{commands}\n```\n{END}\nafter")
    }

    #[test]
    fn commands_are_read_with_their_seconds() {
        let found = steps(&page("# 500 s: one\nsh a --part 1\n\n# 480 s: two\nsh b")).unwrap();
        let step = |seconds, text: &str| Step { seconds, text: text.into() };
        assert_eq!(found, [step(500, "sh a --part 1"), step(480, "sh b")]);
    }

    #[test]
    fn commands_beyond_the_loan_are_refused() {
        for commands in [
            "",
            "sh a",
            "# 5 s: one\nsh a\nsh b",
            "# 541 s: long\nsh a",
            "# 500 s: a\nsh a\n# 500 s: b\nsh b\n# 330 s: c\nsh c",
            &format!("# 5 s: wide\nsh {}", "a".repeat(COMMAND_CHARS_MAX)),
        ] {
            assert!(steps(&page(commands)).is_err(), "{commands:.60}");
        }
        assert!(steps("no block").is_err());
    }

    #[test]
    fn a_report_with_a_gap_is_refused() {
        let entry = |state: &str, found: Value| json!({ "state": state, "found": found });
        let rows = json!({ "rows": [1], "release_errors": 0 });
        let report = |decode: Value, torch: Value| {
            json!({ "smoke": true, "measured_on_gpu": false, "release_errors": 0,
                "sections": { "decode": decode, "torch": torch } })
        };
        let names = ["decode".to_owned(), "torch".to_owned()];
        let absent = || entry("absent", json!({ "absent": "python3 is not installed" }));
        let good = report(entry("ok", rows.clone()), absent());
        check_report(&good, &names).unwrap();
        for bad in [
            report(Value::Null, absent()),
            report(entry("failed", rows.clone()), absent()),
            report(entry("running", rows.clone()), absent()),
            report(absent(), absent()),
            report(entry("ok", json!({ "release_errors": 0 })), absent()),
            report(entry("ok", rows.clone()), entry("absent", json!({}))),
        ] {
            assert!(check_report(&bad, &names).is_err(), "{bad}");
        }
        let mut leaks = good;
        leaks["release_errors"] = json!(1);
        assert!(check_report(&leaks, &names).is_err());
    }

    #[test]
    fn a_demo_that_disagrees_is_refused() {
        let good = json!({ "ok": true, "tokens_equal": true, "backend": "cuda", "remote_rblocks": 5,
            "max_abs_logit_diff": 0.002, "tolerance": 0.015 });
        let report = |demo: Value| {
            let demo = json!({ "state": "ok", "found": { "report": demo, "release_errors": 0 } });
            json!({ "smoke": true, "measured_on_gpu": false, "release_errors": 0, "sections": { "demo": demo } })
        };
        let check = |demo: Value| check_report(&report(demo), &["demo".to_owned()]);
        check(good.clone()).unwrap();
        for (field, value) in [
            ("ok", json!(false)),
            ("tokens_equal", json!(false)),
            ("backend", json!("cpu")),
            ("remote_rblocks", json!(0)),
            ("max_abs_logit_diff", json!(0.016)),
            ("max_abs_logit_diff", Value::Null),
            ("tolerance", Value::Null),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            assert!(check(bad.clone()).is_err(), "{bad}");
        }
        assert!(check(Value::Null).is_err());
    }
}
