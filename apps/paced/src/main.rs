//! `lagoon-paced`: the command line of `lagoon`, with a CPU backend that takes as long as a modelled device.
//!
//! For benchmarks and tests of a whole pool on one machine: see [`lagoon_pace`]. The environment variable
//! `LAGOON_PACE` names the profile, a JSON file of a [`PaceProfile`], so that instances started by `lagoon-paced up`
//! inherit it: `LAGOON_PACE=FILE lagoon-paced serve MODEL --backend=cpu …`. `/metrics` of an instance shows, in
//! microseconds, `lagoon_paced_modelled_us_total`, the modelled device's time, and `lagoon_paced_late_us_total`, how
//! far the arithmetic fell behind it.
#![forbid(unsafe_code)]

use anyhow::Context;
use lagoon::{Devices, Loading, Running};
use lagoon_pace::{PaceProfile, Paced};
use metrics::counter;
use std::cell::Cell;
use std::path::Path;
use std::process::ExitCode;

/// Environment variable with the profile's file.
const PROFILE: &str = "LAGOON_PACE";

fn main() -> ExitCode {
    lagoon::main(&PacedCpu)
}

/// The host CPU, at the pace of a modelled device.
#[derive(Clone, Copy, Debug)]
struct PacedCpu;

impl Devices for PacedCpu {
    fn start(&self, loading: Loading<'_>) -> anyhow::Result<Running> {
        let path = std::env::var_os(PROFILE).with_context(|| {
            format!("{PROFILE} is not set\nhint: it names the file of the modelled device's profile; else use lagoon")
        })?;
        let device = Paced::new(loading.cpu()?, profile(Path::new(&path))?);
        let lateness = device.lateness();
        let loading = loading.watched(move || {
            let (late_us, modelled_us) = lateness.micros();
            counter!("lagoon_paced_late_us_total").absolute(late_us);
            counter!("lagoon_paced_modelled_us_total").absolute(modelled_us);
        });
        // A modelled device's calibration must not be cached as this machine's.
        let device = Cell::new(Some(device));
        let open =
            |_: &Loading<'_>| device.take().context("a modelled device has no draft model\nhint: leave out --draft");
        loading.without_cache().start_on(open)
    }
}

fn profile(path: &Path) -> anyhow::Result<PaceProfile> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {PROFILE} {}", path.display()))?;
    let profile: PaceProfile = serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    profile.check().map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    Ok(profile)
}
