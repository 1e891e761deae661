//! `lagoon pull`: a model from the hub in the cache, complete and verified, before something serves it.

use crate::log::{notice, outln};
use crate::model::resolve;
use crate::progress::{self, Unit};
use anyhow::{Context, ensure};
use indicatif::HumanBytes;
use lagoon_model::{HubName, ModelError, Verified, verify};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Downloads of a file that turns out to be damaged.
const ATTEMPTS: u32 = 2;

/// `lagoon pull`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PullArgs {
    /// A hub name: org/name[@revision], org/name:Q4_K_M or org/name/FILE for a GGUF file.
    model: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Downloads what is missing, reads all of it, and prints where it is.
pub(crate) async fn run(args: PullArgs) -> anyhow::Result<()> {
    let PullArgs { model, json } = args;
    ensure!(
        !Path::new(&model).exists(),
        "{model} is a file or directory here\nhint: `lagoon serve {model}` serves it as it is"
    );
    ensure!(
        HubName::parse(&model).is_some(),
        "{model:?} is not a hub name\nhint: org/name, org/name@revision, org/name:Q4_K_M or org/name/FILE.gguf"
    );
    let pulling = model.clone();
    let (path, verified) = tokio::task::spawn_blocking(move || pull(&pulling)).await.context("pull the model")??;
    let Verified { files, bytes, unnamed } = verified;
    if json {
        outln!("{}", json!({ "model": model, "path": path, "files": files, "bytes": bytes, "unverified": unnamed }));
        return Ok(());
    }
    outln!("{}", path.display());
    outln!("verified {files} files, {}, by the hub's hashes", HumanBytes(bytes));
    if unnamed > 0 {
        outln!("{unnamed} files could not be verified: the cache has no hash of theirs");
    }
    Ok(())
}

fn pull(model: &str) -> anyhow::Result<(PathBuf, Verified)> {
    let mut attempts = 0;
    loop {
        let path = resolve(model)?;
        let bar = progress::bar("verifying", 0, Unit::Bytes);
        let verified = verify(&path, &mut |(done, total)| {
            bar.set_length(total);
            bar.set_position(done);
        });
        drop(bar);
        attempts += 1;
        match verified {
            Ok(verified) => return Ok((path, verified)),
            // It was removed from the cache.
            Err(error @ ModelError::Malformed { .. }) if attempts < ATTEMPTS => {
                notice(&format!(
                    "note: {}; it is downloaded again\n",
                    error.to_string().lines().next().unwrap_or_default()
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
