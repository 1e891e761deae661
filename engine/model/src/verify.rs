//! Verification of downloaded files: their content against the hash that the hub names it by.
//!
//! The Hugging Face cache keeps the content of a file in `blobs/ETAG`, to which the file in the snapshot is a link. The ETag of a large
//! file (LFS) is its SHA-256, that of a small one its hash as a blob of git (SHA-1).

use crate::ModelError;
use crate::hub_gguf::{GgufModel, files_of};
use ring::digest::{Context, Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// What was verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    pub files: usize,
    pub bytes: u64,
    /// Files whose content has no hash as its name: copies, or of a hub with other ETags.
    pub unnamed: usize,
}

/// The bytes read so far, and all of them.
pub type Reading = (u64, u64);

/// Reads the files of a model that [`crate::Hub::get`] found (a snapshot, or a GGUF file with its other parts), and compares their hashes.
///
/// # Errors
/// If a file cannot be read, or is damaged: then it is removed, so that the next download gets it again.
pub fn verify(model: &Path, progress: &mut dyn FnMut(Reading)) -> Result<Verified, ModelError> {
    let files = named(model);
    let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let total = files.iter().map(size).sum();
    let mut verified = Verified::default();
    for path in files {
        let io = |source| ModelError::Io { path: path.clone(), source };
        let Some((expected, by)) = name(&path) else {
            verified.unnamed += 1;
            continue;
        };
        let begun = verified.bytes;
        let (digest, bytes) = hash(&path, by, &mut |done| progress((begun + done, total))).map_err(io)?;
        let found: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if found != expected {
            remove(model, &path).map_err(io)?;
            let problem = format!(
                "its hash is {found}, and that of the hub's file {expected}; it was removed from the cache\n\
                 hint: `lagoon pull` downloads it again"
            );
            return Err(ModelError::Malformed { path, problem });
        }
        verified = Verified { files: verified.files + 1, bytes: begun + bytes, ..verified };
    }
    Ok(verified)
}

/// The files of a snapshot, or all parts of a GGUF file.
fn named(model: &Path) -> Vec<PathBuf> {
    if model.is_dir() {
        let entries = std::fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut files: Vec<PathBuf> = entries.filter(|path| path.is_file()).collect();
        files.sort_unstable();
        return files;
    }
    let (Some(dir), Some(file)) = (model.parent(), model.file_name().and_then(|name| name.to_str())) else {
        return vec![model.to_owned()];
    };
    let models = GgufModel::all(files_of(dir).iter().map(String::as_str).collect::<Vec<_>>());
    let of = models.into_iter().find(|of| of.files.iter().any(|part| part == file));
    of.map_or_else(|| vec![model.to_owned()], |of| of.files.iter().map(|part| dir.join(part)).collect())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sha256,
    GitBlob,
}

/// The hash that a file's content is named by.
fn name(path: &Path) -> Option<(String, Kind)> {
    let blob = std::fs::read_link(path).ok()?;
    let name = blob.file_name()?.to_str()?.to_ascii_lowercase();
    let kind = match name.len() {
        64 => Kind::Sha256,
        40 => Kind::GitBlob,
        _ => return None,
    };
    name.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some((name, kind))
}

fn hash(path: &Path, by: Kind, progress: &mut dyn FnMut(u64)) -> std::io::Result<(Digest, u64)> {
    let mut file = File::open(path)?;
    let mut context = match by {
        Kind::Sha256 => Context::new(&SHA256),
        Kind::GitBlob => {
            let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            context.update(format!("blob {}\0", file.metadata()?.len()).as_bytes());
            context
        }
    };
    let (mut buffer, mut bytes) = (vec![0; CHUNK], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((context.finish(), bytes)),
            read => {
                context.update(&buffer[..read]);
                bytes += read as u64;
                progress(bytes);
            }
        }
    }
}

/// Removes a damaged file. A snapshot without its configuration is not whole, and downloaded again: only what is missing.
fn remove(model: &Path, path: &Path) -> std::io::Result<()> {
    std::fs::remove_file(std::fs::canonicalize(path)?)?;
    std::fs::remove_file(path)?;
    let config = model.join("config.json");
    if config.is_symlink() { std::fs::remove_file(config) } else { Ok(()) }
}
