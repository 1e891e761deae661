//! `lagoon-paced`: the command line of `lagoon` with instances whose CPU takes as long as a modelled device.
//!
//! For benchmarks and tests of a whole pool on one machine: see [`lagoon_backend::paced`]. The environment names the profile, a
//! JSON file of a [`PaceProfile`], so that the instances which `lagoon-paced up` starts have it, too:
//! `LAGOON_PACE=FILE lagoon-paced serve MODEL --backend=cpu …`. `/metrics` of an instance shows, in microseconds,
//! `lagoon_paced_modelled_us_total`, the time that the modelled device would have taken, and `lagoon_paced_late_us_total`, by how
//! much the arithmetic fell behind it.
#![forbid(unsafe_code)]

use anyhow::Context;
use lagoon::{Devices, Loading, Running};
use lagoon_backend::{PaceProfile, Paced};
use metrics::counter;
use std::path::Path;
use std::process::ExitCode;

/// The variable that names the profile's file.
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
        // A modelled device's calibration is not that of this machine's processor.
        loading.without_cache().start_on(device)
    }
}

fn profile(path: &Path) -> anyhow::Result<PaceProfile> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {PROFILE} {}", path.display()))?;
    let profile: PaceProfile = serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    profile.check().map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    Ok(profile)
}
