//! Finds a model by the user's name for it: a directory, a GGUF file, or a name on the Hugging Face hub.

use crate::gguf::is_gguf;
use crate::{DownloadProgress, Hub, HubName, ModelError};
use std::path::{Path, PathBuf};

/// The directory or the GGUF file of the model that the user named: an existing one, or that of a hub name.
pub fn resolve_model(
    name: &str,
    hub: &Hub,
    progress: &mut dyn FnMut(&DownloadProgress),
) -> Result<PathBuf, ModelError> {
    let path = Path::new(name);
    let refuse = |problem: &str, hint: &str| {
        Err(ModelError::NotAModel { name: name.to_owned(), problem: problem.to_owned(), hint: hint.to_owned() })
    };
    if path.is_dir() || (is_gguf(path) && path.is_file()) {
        return Ok(path.to_owned());
    }
    if path.exists() {
        return refuse(
            "it is a file, and not named .gguf",
            "pass a GGUF file, or the directory that holds config.json and the safetensors",
        );
    }
    match HubName::parse(name) {
        // Repositories are not named as files.
        Some(name) if name.gguf.is_some() || !is_gguf(path) => hub.get(&name, progress).map_err(|mut error| {
            if let ModelError::Hub { hint, .. } = &mut error
                && is_gguf(path)
            {
                *hint = format!("there is no such file here, so that it was looked for on the hub; {hint}");
            }
            error
        }),
        _ if is_gguf(path) => {
            refuse("there is no such file", "pass the path of a GGUF file, or org/name/FILE for one on the hub")
        }
        _ => refuse(
            "there is no such directory, and it is not a hub name",
            "pass a directory that holds config.json and the safetensors, a GGUF file, or a hub name: org/name, \
             org/name@revision, org/name:Q4_K_M for a GGUF file",
        ),
    }
}
