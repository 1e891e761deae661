//! Downloading a model's files to the cache.
//!
//! The hub library has no read timeout, so it works on a thread of its own and this thread watches: without progress
//! for [`Hub::stall`] the download is aborted. The hub's thread ends with the file that it was reading; the partial file
//! is kept, and a later download resumes it. All files are of one commit, looked up at the beginning.

use crate::ModelError;
use crate::checkpoint::shards;
use crate::config::{ADAPTER_CONFIG, ADAPTER_HINT};
use crate::fields::read_bounded;
use crate::hub::{DownloadProgress, Hub, HubName, TOKENIZER, tokenizer_file};
use crate::hub_gguf::{GgufModel, choose};
use crate::pooling::{MODULES, POOLING};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Attempts at one file, each resuming the one before.
const ATTEMPTS: u32 = 4;
/// Time before the second attempt; it doubles with each.
const RETRY: Duration = Duration::from_millis(250);
/// Waits for another process that downloads the same file; the library waits some seconds each time.
const LOCK_WAITS: u32 = 120;
/// Least time between two reports of the same file.
const REPORT: Duration = Duration::from_millis(100);
/// Capacity of the report channel.
const REPORTS: usize = 64;

const CONFIG: &str = "config.json";
/// Files besides the weights that a model may lack.
const OPTIONAL: [&str; 5] =
    ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", MODULES, POOLING];
/// Files with special tokens, used only without a `tokenizer.json`.
const SPECIAL_TOKENS: [&str; 2] = ["special_tokens_map.json", "added_tokens.json"];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Hub {
    /// The directory of a model, or a GGUF file, downloaded unless cached. Files are `config.json`, the tokenizer's,
    /// `generation_config.json`, a chat template and the safetensors; or all parts of the GGUF file that the name picks, which is the
    /// only one where the model has no safetensors.
    pub fn get(&self, name: &HubName, progress: &mut dyn FnMut(&DownloadProgress)) -> Result<PathBuf, ModelError> {
        if let Some(dir) = self.cached(name) {
            return Ok(dir);
        }
        if self.offline {
            return Err(ModelError::Hub {
                name: name.repo.clone(),
                endpoint: self.endpoint.clone(),
                file: "the files".to_owned(),
                problem: format!("HF_HUB_OFFLINE is set and the model is not in {}", self.cache.display()),
                hint: "unset HF_HUB_OFFLINE once to download it, or pass a directory that holds the model".to_owned(),
            });
        }
        download(self, name, progress)
    }
}

/// Downloads `name` and returns its directory, or the GGUF file.
fn download(hub: &Hub, name: &HubName, progress: &mut dyn FnMut(&DownloadProgress)) -> Result<PathBuf, ModelError> {
    let (sender, receiver) = sync_channel(REPORTS);
    let job = Job { hub: hub.clone(), name: name.clone() };
    let worker = std::thread::Builder::new().name("lagoon-download".to_owned());
    let spawned = worker.spawn(move || {
        let result = job.run(&sender);
        // The receiver was dropped if the download was aborted.
        let _ = sender.send(Report::Finished(result));
    });
    let problem = match spawned {
        Ok(_handle) => match watch(&receiver, hub.stall, progress) {
            Ok(result) => return result,
            Err(problem) => problem,
        },
        Err(error) => error.to_string(),
    };
    Err(Job { hub: hub.clone(), name: name.clone() }.error("the files", problem, HINT_NETWORK))
}

const HINT_NETWORK: &str = "check the network and proxy; HF_ENDPOINT names another hub; a directory that holds the model \
                            needs none";
const HINT_NAME: &str = "check the spelling and the revision; gated and private models need HF_TOKEN, and acceptance on \
                         the model's page";

enum Report {
    Progress(DownloadProgress),
    /// Progress without bytes, such as waiting for another process.
    Alive,
    Finished(Result<PathBuf, ModelError>),
}

/// Passes reports on until the end, or returns why the download was aborted.
fn watch(
    reports: &Receiver<Report>,
    stall: Duration,
    progress: &mut dyn FnMut(&DownloadProgress),
) -> Result<Result<PathBuf, ModelError>, String> {
    loop {
        match reports.recv_timeout(stall) {
            Ok(Report::Progress(report)) => progress(&report),
            Ok(Report::Alive) => {}
            Ok(Report::Finished(result)) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => return Err(format!("nothing arrived for {} s", stall.as_secs_f32())),
            Err(RecvTimeoutError::Disconnected) => return Err("the download failed in an unexpected way".to_owned()),
        }
    }
}

struct Job {
    hub: Hub,
    name: HubName,
}

impl Job {
    fn run(&self, reports: &SyncSender<Report>) -> Result<PathBuf, ModelError> {
        let api = self.api()?;
        let listed = Repo::with_revision(self.name.repo.clone(), RepoType::Model, self.name.revision.clone());
        let info = self.retry("the list of files", reports, || api.repo(listed.clone()).info())?;
        if info.sha.is_empty() || !info.sha.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(self.error("the list of files", format!("{:?} is not a commit", info.sha), HINT_NETWORK));
        }
        let there: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        let commit = Repo::with_revision(self.name.repo.clone(), RepoType::Model, info.sha.clone());
        let fetch = Fetch { job: self, repo: api.repo(commit.clone()), commit, reports };
        let gguf = self.gguf(&there)?;
        let files = match &gguf {
            Some(model) => model.files.clone(),
            None => [self.small_files(&there)?, fetch.weights(&there)?].concat(),
        };
        let mut first = None;
        for (done, file) in files.iter().enumerate() {
            let path = fetch.file(file, done, files.len())?;
            first.get_or_insert(path);
        }
        let cache = Cache::new(self.hub.cache.clone());
        cache
            .repo(listed)
            .create_ref(&info.sha)
            .map_err(|source| ModelError::Io { path: self.hub.cache.clone(), source })?;
        // config.json stands in the snapshot itself.
        let found = if gguf.is_some() { first } else { first.and_then(|path| path.parent().map(PathBuf::from)) };
        found.ok_or_else(|| self.error("the files", "there are none".to_owned(), HINT_NAME))
    }

    /// The GGUF file to download: the one that was asked for, or the only one of a model that has no safetensors.
    fn gguf(&self, there: &[&str]) -> Result<Option<GgufModel>, ModelError> {
        let (wanted, models) = (self.name.gguf.as_deref(), GgufModel::all(there.iter().copied()));
        let others = [SINGLE, INDEX, ADAPTER_CONFIG].iter().any(|file| there.contains(file));
        if wanted.is_none() && (others || models.is_empty()) {
            return Ok(None);
        }
        if models.is_empty() {
            let hint = "leave out what follows org/name to take its safetensors";
            return Err(self.error("a GGUF file", "the model has none".to_owned(), hint));
        }
        choose(&models, wanted).map(Some).map_err(|(problem, hint)| self.error("a GGUF file", problem, &hint))
    }

    /// The files besides the weights, of those that are `there`.
    fn small_files(&self, there: &[&str]) -> Result<Vec<String>, ModelError> {
        if there.contains(&ADAPTER_CONFIG) && !there.contains(&CONFIG) {
            return Err(self.error(CONFIG, format!("there is {ADAPTER_CONFIG}: it is an adapter"), ADAPTER_HINT));
        }
        let refuse = |file: &str, problem: &str| {
            let hint = "the model may be stored in another format than transformers'";
            Err(self.error(file, problem.to_owned(), hint))
        };
        if !there.contains(&CONFIG) {
            return refuse(CONFIG, "the model has no such file");
        }
        let Some(tokenizer) = tokenizer_file(there) else {
            return refuse(TOKENIZER, "the model has none, nor tokenizer.model, tiktoken.model or one *.tiktoken");
        };
        let special = if tokenizer == TOKENIZER { [].as_slice() } else { &SPECIAL_TOKENS };
        let optional = OPTIONAL.iter().chain(special).filter(|file| there.contains(file));
        Ok([CONFIG, tokenizer].into_iter().chain(optional.copied()).map(str::to_owned).collect())
    }

    fn api(&self) -> Result<Api, ModelError> {
        ApiBuilder::from_cache(Cache::new(self.hub.cache.clone()))
            .with_endpoint(self.hub.endpoint.clone())
            .with_token(self.hub.token.clone())
            .with_user_agent("lagoon", env!("CARGO_PKG_VERSION"))
            .with_progress(false)
            .build()
            .map_err(|error| self.explain("the files", &error))
    }

    /// Repeats attempts that failed for a temporary reason.
    fn retry<T>(
        &self,
        file: &str,
        reports: &SyncSender<Report>,
        mut attempt: impl FnMut() -> Result<T, ApiError>,
    ) -> Result<T, ModelError> {
        let (mut attempts, mut lock_waits) = (0, 0);
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(ApiError::LockAcquisition(_)) if lock_waits < LOCK_WAITS => lock_waits += 1,
                Err(error) => {
                    attempts += 1;
                    if attempts == ATTEMPTS || !is_transient(&error) {
                        return Err(self.explain(file, &error));
                    }
                    tracing::warn!(file, %error, "download interrupted, trying again");
                    std::thread::sleep(RETRY * 2u32.pow(attempts - 1));
                }
            }
            if reports.send(Report::Alive).is_err() {
                return Err(self.error(file, "the download was aborted".to_owned(), HINT_NETWORK));
            }
        }
    }

    fn explain(&self, file: &str, error: &ApiError) -> ModelError {
        let (problem, hint) = match error {
            ApiError::RequestError(request) => match request.as_ref() {
                ureq::Error::Status(404, _) => ("the hub has no such model, revision or file".to_owned(), HINT_NAME),
                ureq::Error::Status(status @ (401 | 403), _) => {
                    (format!("the hub refuses access, or has no such model (status {status})"), HINT_NAME)
                }
                ureq::Error::Status(status, response) => {
                    (format!("the hub answered with status {status} {}", response.status_text()), HINT_NETWORK)
                }
                ureq::Error::Transport(transport) => (transport.to_string(), HINT_NETWORK),
            },
            ApiError::MissingHeader(_) | ApiError::InvalidHeader(_) => {
                (format!("the server does not answer as a hub does: {error}"), HINT_NETWORK)
            }
            ApiError::IoError(io) => (io.to_string(), "check the network and the free space of the cache"),
            other => (other.to_string(), "delete the model from the cache and try again"),
        };
        self.error(file, problem, hint)
    }

    fn error(&self, file: &str, problem: String, hint: &str) -> ModelError {
        ModelError::Hub {
            name: self.name.repo.clone(),
            endpoint: self.hub.endpoint.clone(),
            file: file.to_owned(),
            problem,
            hint: hint.to_owned(),
        }
    }
}

fn is_transient(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(request) => match request.as_ref() {
            ureq::Error::Status(status, _) => *status >= 500 || *status == 429,
            ureq::Error::Transport(transport) => transport.kind() == ureq::ErrorKind::Io,
        },
        ApiError::IoError(_) => true,
        _ => false,
    }
}

/// Downloads files of one commit.
struct Fetch<'a> {
    job: &'a Job,
    repo: ApiRepo,
    commit: Repo,
    reports: &'a SyncSender<Report>,
}

impl Fetch<'_> {
    /// The files of the weights; a sharded model's index is fetched for their names.
    fn weights(&self, there: &[&str]) -> Result<Vec<String>, ModelError> {
        if !there.contains(&INDEX) {
            if there.contains(&SINGLE) {
                return Ok(vec![SINGLE.to_owned()]);
            }
            let hint = "Lagoon reads safetensors and GGUF; look for another version of the model that has them";
            return Err(self.job.error(SINGLE, "the model has no safetensors, and no GGUF file".to_owned(), hint));
        }
        let path = self.file(INDEX, 0, 1)?;
        let mut files: Vec<String> = shards(&path, &read_bounded(&path)?)?.into_keys().collect();
        if let Some(absent) = files.iter().find(|file| !there.contains(&file.as_str())) {
            return Err(self.job.error(
                absent,
                "the index names it, but the model has no such file".to_owned(),
                HINT_NAME,
            ));
        }
        // The index comes first: a snapshot with an index is complete only with its shards.
        files.insert(0, INDEX.to_owned());
        Ok(files)
    }

    fn file(&self, file: &str, files_done: usize, files: usize) -> Result<PathBuf, ModelError> {
        self.job.retry(file, self.reports, || self.attempt(file, files_done, files))
    }

    fn attempt(&self, file: &str, files_done: usize, files: usize) -> Result<PathBuf, ApiError> {
        let cached = Cache::new(self.job.hub.cache.clone());
        if let Some(path) = cached.repo(self.commit.clone()).get(file) {
            return Ok(path);
        }
        let mut total = 0;
        let meter = Meter {
            reports: self.reports,
            report: DownloadProgress { file: file.to_owned(), done_bytes: 0, total_bytes: 0, files_done, files },
            total: &mut total,
            last: None,
        };
        let path = self.repo.download_with_progress(file, meter)?;
        let length = std::fs::metadata(&path)?.len();
        if length != total {
            // The resumed part does not match the rest: start again without it.
            if let Ok(blob) = std::fs::canonicalize(&path) {
                std::fs::remove_file(blob)?;
            }
            std::fs::remove_file(&path).ok();
            let problem = format!("{file} has {length} bytes instead of {total}");
            return Err(ApiError::IoError(std::io::Error::other(problem)));
        }
        Ok(path)
    }
}

/// Reports the progress of one file.
struct Meter<'a> {
    reports: &'a SyncSender<Report>,
    report: DownloadProgress,
    total: &'a mut u64,
    last: Option<Instant>,
}

impl hf_hub::api::Progress for Meter<'_> {
    fn init(&mut self, size: usize, _file: &str) {
        *self.total = size as u64;
        self.report.total_bytes = size as u64;
        self.report.done_bytes = 0;
    }

    fn update(&mut self, size: usize) {
        self.report.done_bytes += size as u64;
        if self.last.is_none_or(|last| last.elapsed() >= REPORT) {
            self.last = Some(Instant::now());
            // The receiver was dropped if the download was aborted.
            let _ = self.reports.send(Report::Progress(self.report.clone()));
        }
    }

    fn finish(&mut self) {
        self.report.files_done += 1;
        let _ = self.reports.send(Report::Progress(self.report.clone()));
    }
}
