//! The report's head: the driver, the device and the programs of others. It is found in a process of its own, because the first
//! calls of a driver or of cuBLASLt may crash or hang.

use crate::parent::{End, times, watch};
use crate::sections::Section;
use crate::{Args, Out, external, open, read_json, write_whole};
use lagoon_backend::Device;
use lagoon_cuda::kernels::attention::Precision;
use lagoon_cuda::{CudaProbe, kernels};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

/// The hidden section that finds the head.
const HEAD: &str = "head";

/// Seconds for it. A driver's first start of a device may take several.
const HEAD_S: u64 = 30;

type Run = fn(&Args, &mut Out) -> anyhow::Result<()>;

/// The head as a section, for its process.
pub(crate) fn section(name: &str) -> Option<Run> {
    (name == HEAD).then_some(find as Run)
}

fn find(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let probe = lagoon_cuda::probe();
    out.set("driver", probe.to_string())?;
    if !matches!(probe, CudaProbe::Present { .. }) {
        return Ok(());
    }
    out.set("nvidia_smi", json!(external::nvidia_smi()))?;
    let mut real = false;
    let device = match open(Precision::Fast) {
        Ok(device) => {
            let (info, a) = (device.info(), device.attributes());
            real = a.name != "Fake device";
            json!({
                "name": info.name,
                "compute_capability": format!("{}.{}", a.compute_capability.0, a.compute_capability.1),
                "multiprocessors": a.multiprocessors,
                "l2_bytes": a.l2_bytes,
                "memory_bytes": a.memory_bytes,
                "free_bytes": info.memory_bytes,
                "shared_bytes_per_block": a.shared_bytes_per_block,
                "linear_layers": device.linear_layers(),
                "warpgroup_kernels": device.has_warpgroups(),
            })
        }
        Err(error) => json!({ "error": format!("{error:#}") }),
    };
    out.set("device", device)?;
    // Numbers of the fake driver or of tiny sizes measure nothing.
    out.set("measured_on_gpu", real && !args.smoke)
}

/// Findings of the head's process, and how it ended if it failed.
fn found(args: &Args) -> anyhow::Result<(Value, Option<String>)> {
    let path = std::env::temp_dir().join(format!("gpu-check-{}-{HEAD}.json", std::process::id()));
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", HEAD, "--out"]).arg(&path).arg("--goldens").arg(&args.goldens);
    command.args(args.smoke.then_some("--smoke"));
    let limit = times(args, HEAD_S);
    let end = watch(&mut command, &path, Instant::now() + limit, Duration::MAX, |_| Ok(()))?;
    let found = read_json(&path).unwrap_or_else(|| json!({}));
    // Leftovers in the temporary folder are harmless.
    let _gone = std::fs::remove_file(&path);
    let broken = match end {
        End::Exited(status) if status.success() => None,
        End::Exited(status) => Some(status.to_string()),
        End::TooLong | End::RowTooLong => Some(format!("killed after {} s", limit.as_secs())),
    };
    Ok((found, broken))
}

/// Whether sections are worth a try: the driver is there, or asking for it ended the process.
pub(crate) fn may_be_present(report: &Value) -> bool {
    report["driver"].as_str().is_none_or(|driver| driver.starts_with("CUDA"))
}

/// The report with its head and the sections of an earlier one, if that is of the same driver and sizes. It is on disk from the first
/// moment, as the earlier one.
pub(crate) fn begin(args: &Args, sections: &[&Section]) -> anyhow::Result<Value> {
    let earlier = read_json(args.from.as_ref().unwrap_or(&args.out));
    let fresh = json!({ "smoke": args.smoke, "sections": {}, "ok": false, "measured_on_gpu": false });
    write_whole(&args.out, earlier.as_ref().unwrap_or(&fresh))?;
    let (mut found, broken) = found(args)?;
    if let (Some(how), Some(earlier)) = (&broken, &earlier) {
        // Of the same machine's earlier command, most likely: sections that ran there are not lost.
        for key in ["driver", "device", "nvidia_smi", "measured_on_gpu"] {
            if found[key].is_null() {
                found[key] = earlier[key].clone();
            }
        }
        found["head_error"] = json!(how);
    } else if let Some(how) = &broken {
        found["head_error"] = json!(how);
    }
    let mut report = json!({
        "label": args.label,
        "kernels": kernels::FATBIN_SOURCE,
        "smoke": args.smoke,
        "sections": {},
        "measured_on_gpu": false,
    });
    for key in ["driver", "device", "nvidia_smi", "measured_on_gpu", "head_error", "error"] {
        if !found[key].is_null() {
            report[key] = found[key].take();
        }
    }
    if let Some(mut earlier) = earlier
        && ["smoke", "driver"].iter().all(|key| earlier[*key] == report[*key])
    {
        if let Some(entries) = earlier["sections"].as_object_mut().filter(|_| args.fresh) {
            sections.iter().for_each(|section| drop(entries.remove(section.name)));
        }
        report["sections"] = earlier["sections"].take();
    }
    Ok(report)
}
