//! Models on the Hugging Face hub: their names, and those that are cached.
//!
//! Downloaded models are kept in the Hugging Face cache, in its layout. A complete cached model is used without
//! asking the hub: all instances of a cluster run the same files, and a machine without a network works. To follow a
//! branch that moved, name the new commit (`org/name@commit`) or delete the cached one.

use crate::ModelError;
use crate::checkpoint::shards;
use crate::fields::read_bounded;
use crate::gguf::is_gguf;
use crate::hub_gguf::{FILE_BYTES_MAX, GgufModel, choose, files_of};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout of a download that makes no progress.
const STALL: Duration = Duration::from_secs(60);
/// Longest organisation or model name, in bytes.
const NAME_BYTES_MAX: usize = 96;

/// The tokenizer's file in the library's format.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Files that hold a tokenizer, the first that is there counts; a single `*.tiktoken` is the last choice.
const TOKENIZERS: [&str; 3] = [TOKENIZER, "tokenizer.model", "tiktoken.model"];

/// A model on the hub: `org/name`, or `org/name@revision` with a branch, tag or commit. A GGUF file of the model follows a colon, or
/// a slash if it is named in full: `org/name:Q4_K_M`, `org/name/file.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `org/name`.
    pub repo: String,
    /// `main` unless given.
    pub revision: String,
    /// A GGUF file, by its name or a tag of it, if one was asked for.
    pub gguf: Option<String>,
}

impl HubName {
    /// Parses a name; `None` if it cannot be one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let slash = || text.match_indices('/').nth(1).filter(|_| is_gguf(Path::new(text)));
        let (text, gguf) = match text.split_once(':') {
            Some((text, gguf)) => (text, Some(gguf)),
            None => slash().map_or((text, None), |(at, _)| (&text[..at], Some(&text[at + 1..]))),
        };
        let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (org, name) = repo.split_once('/')?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let part = |part: &str| {
            !part.is_empty() && part.len() <= NAME_BYTES_MAX && part.chars().all(plain) && !part.starts_with('.')
        };
        let file = |gguf: &str| !gguf.is_empty() && gguf.len() <= FILE_BYTES_MAX && !gguf.contains([':', '\\']);
        let valid = part(org) && part(name) && revision.split('/').all(part) && gguf.is_none_or(file);
        valid.then(|| Self { repo: repo.to_owned(), revision: revision.to_owned(), gguf: gguf.map(str::to_owned) })
    }
}

/// Source and cache of downloaded models.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Without a slash at the end.
    pub endpoint: String,
    /// The directory that holds `models--org--name`.
    pub cache: PathBuf,
    /// Never use the network.
    pub offline: bool,
    /// For gated and private models.
    pub token: Option<String>,
    /// Timeout of a download that makes no progress.
    pub stall: Duration,
}

/// Progress of a download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadProgress {
    pub file: String,
    pub done_bytes: u64,
    /// Size of this file in bytes.
    pub total_bytes: u64,
    /// Complete files, and all files.
    pub files_done: usize,
    pub files: usize,
}

impl Hub {
    /// The hub of the environment: `HF_ENDPOINT`, `HF_HUB_OFFLINE`, the cache in `HF_HUB_CACHE` or `HF_HOME` (default
    /// `~/.cache/huggingface`), the token in `HF_TOKEN` or in the file of `huggingface-cli login`.
    pub fn from_env() -> Result<Self, ModelError> {
        Self::from_vars(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// As [`Hub::from_env`], with the variables from `var`.
    pub fn from_vars(var: &dyn Fn(&str) -> Option<String>) -> Result<Self, ModelError> {
        let home = var("HF_HOME").map(PathBuf::from).or_else(|| {
            let user = || Some(PathBuf::from(var("HOME").or_else(|| var("USERPROFILE"))?).join(".cache"));
            Some(var("XDG_CACHE_HOME").map(PathBuf::from).or_else(user)?.join("huggingface"))
        });
        let cache = var("HF_HUB_CACHE").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.ok_or_else(|| ModelError::NotAModel {
            name: "a hub name".to_owned(),
            problem: "there is no place for downloads: none of HF_HUB_CACHE, HF_HOME and HOME is set".to_owned(),
            hint: "set HF_HOME, or pass a directory that holds the model".to_owned(),
        })?;
        let stored = || home.and_then(|home| std::fs::read_to_string(home.join("token")).ok());
        let token = var("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
        let offline = var("HF_HUB_OFFLINE").is_some_and(|value| {
            let truths = ["1", "on", "yes", "true"];
            truths.iter().any(|truth| value.eq_ignore_ascii_case(truth))
        });
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            offline,
            token: token.filter(|token| !token.is_empty()),
            stall: STALL,
        })
    }

    /// The directory of a model that is completely cached, or the GGUF file; else `None`. Without a name or tag of a file it is the
    /// safetensors' directory, or offline the one GGUF file that is cached.
    #[must_use]
    pub fn cached(&self, name: &HubName) -> Option<PathBuf> {
        let repo = self.cache.join(format!("models--{}", name.repo.replace('/', "--")));
        let commit = match std::fs::read_to_string(repo.join("refs").join(&name.revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_absent) => name.revision.clone(),
        };
        let snapshot = repo.join("snapshots").join(commit);
        if name.gguf.is_none() && is_whole(&snapshot) {
            return Some(snapshot);
        }
        if name.gguf.is_none() && !self.offline {
            // The repository may have safetensors that were never asked for.
            return None;
        }
        let files = files_of(&snapshot);
        let model = choose(&GgufModel::all(files.iter().map(String::as_str)), name.gguf.as_deref()).ok()?;
        Some(snapshot.join(&model.files[0]))
    }
}

/// Whether a snapshot has all files for serving. Weights are downloaded last, so an interrupted download has not.
fn is_whole(snapshot: &Path) -> bool {
    let has = |file: &str| snapshot.join(file).exists();
    let index = snapshot.join("model.safetensors.index.json");
    let weights = match read_bounded(&index) {
        Ok(bytes) => shards(&index, &bytes).is_ok_and(|shards| shards.keys().all(|shard| has(shard))),
        Err(_absent) => has("model.safetensors"),
    };
    weights && has("config.json") && has_tokenizer(snapshot)
}

fn has_tokenizer(snapshot: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(snapshot) else { return false };
    // A link to a file that is not there does not exist.
    let names = entries
        .flatten()
        .filter(|entry| entry.path().exists())
        .filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<String> = names.collect();
    tokenizer_file(&names.iter().map(String::as_str).collect::<Vec<_>>()).is_some()
}

/// The file that the tokenizer is read from, among the names of a model's files: `tokenizer.json`, else a SentencePiece model
/// or tiktoken ranks. This is the order of `lagoon_text::Tokenizer::open`.
pub(crate) fn tokenizer_file<'a>(files: &[&'a str]) -> Option<&'a str> {
    let named = TOKENIZERS.iter().find_map(|name| files.iter().find(|file| *file == name));
    named.copied().or_else(|| {
        let plain = |file: &str| Path::new(file).file_name().is_some_and(|base| base == file);
        let ranks = |file: &&str| plain(file) && Path::new(file).extension().is_some_and(|end| end == "tiktoken");
        let mut ranks = files.iter().copied().filter(ranks);
        ranks.next().filter(|_| ranks.next().is_none())
    })
}
