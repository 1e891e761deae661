//! Downloads from a hub on this machine: complete, broken off, refused, silent, offline.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{tensors, write, write_config, write_sharded};
use lagoon_model::{
    Checkpoint, DownloadProgress, Hub, HubName, ModelError, ModelSpec, Verified, resolve_model, verify,
};
use lagoon_types::DType;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The hub's fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Breaks the connection after so many bytes of the weights, so many times.
    BreakOff {
        bytes: usize,
        times: usize,
    },
    /// Answers nothing when the weights are asked for.
    Silence,
    /// Answers with this status.
    Status(u16),
}

/// A hub with the model `org/tiny` at one commit.
struct TestHub {
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
}

struct Served {
    files: BTreeMap<String, Vec<u8>>,
    fault: Mutex<Fault>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl TestHub {
    fn start(dir: &Path, fault: Fault) -> Self {
        let files = std::fs::read_dir(dir).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap())
        });
        let requests = Arc::new(Mutex::new(Vec::new()));
        let served = Arc::new(Served { files: files.collect(), fault: Mutex::new(fault), requests: requests.clone() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, served) = (stream.unwrap(), served.clone());
                std::thread::spawn(move || while served.answer(&stream).is_some() {});
            }
        });
        Self { endpoint, requests }
    }

    fn hub(&self, cache: &Path) -> Hub {
        let vars = |name: &str| match name {
            "HF_ENDPOINT" => Some(format!("{}/", self.endpoint)),
            "HF_HUB_CACHE" => Some(cache.display().to_string()),
            _ => None,
        };
        Hub { stall: Duration::from_secs(20), ..Hub::from_vars(&vars).unwrap() }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

impl Served {
    /// Answers one request; `None` ends the connection.
    fn answer(&self, mut stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        let mut range = None;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let header = header.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("range: bytes=") {
                let (from, to) = value.split_once('-')?;
                range = Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()));
            }
        }
        self.requests.lock().unwrap().push(format!("{path} {range:?}"));
        let fault = *self.fault.lock().unwrap();
        if let Fault::Status(status) = fault {
            return self.reply(stream, &format!("{status} Refused"), "", b"");
        }
        if path == "/api/models/org/tiny/revision/main" {
            let siblings: Vec<_> = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            let info = serde_json::json!({"siblings": siblings, "sha": COMMIT}).to_string();
            return self.reply(stream, "200 OK", "", info.as_bytes());
        }
        let file =
            path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")).and_then(|name| self.files.get_key_value(name));
        let Some((name, content)) = file else { return self.reply(stream, "404 Not Found", "", b"") };
        let (from, to) = range.unwrap_or((0, None));
        if from > 0 && from >= content.len() {
            return self.reply(stream, "416 Range Not Satisfiable", "", b"");
        }
        let part = &content[from..to.map_or(content.len(), |to| content.len().min(to + 1))];
        let headers = format!(
            "ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {from}-{}/{}\r\n",
            etag(name, content),
            from + part.len() - 1,
            content.len()
        );
        if part.len() > 1 && name == "model.safetensors" {
            match fault {
                Fault::Silence => {
                    std::thread::sleep(Duration::from_secs(30));
                    return None;
                }
                Fault::BreakOff { bytes, times } if times > 0 => {
                    *self.fault.lock().unwrap() = Fault::BreakOff { bytes, times: times - 1 };
                    write!(stream, "HTTP/1.1 206 Partial Content\r\n{headers}Content-Length: {}\r\n\r\n", part.len())
                        .ok()?;
                    stream.write_all(&part[..bytes.min(part.len())]).ok()?;
                    stream.flush().ok()?;
                    stream.shutdown(std::net::Shutdown::Both).ok()?;
                    return None;
                }
                _ => {}
            }
        }
        self.reply(stream, "206 Partial Content", &headers, part)
    }

    fn reply(&self, mut stream: &TcpStream, status: &str, headers: &str, body: &[u8]) -> Option<()> {
        write!(stream, "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", body.len()).ok()?;
        stream.write_all(body).ok()
    }
}

/// As on the hub: SHA-256 of large files, git's hash of others.
fn etag(name: &str, content: &[u8]) -> String {
    let hash = if name.ends_with(".safetensors") || name.ends_with(".gguf") {
        digest(&SHA256, content)
    } else {
        digest(&SHA1_FOR_LEGACY_USE_ONLY, &[format!("blob {}\0", content.len()).as_bytes(), content].concat())
    };
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A model with its tokenizer.
fn model(sharded: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    match sharded {
        true => write_sharded(dir.path(), &tensors(DType::F32, false), 3),
        false => write(dir.path(), "model.safetensors", &tensors(DType::F32, false)),
    }
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "pytorch_model.bin"] {
        std::fs::write(dir.path().join(file), format!("{{\"file\": \"{file}\"}}")).unwrap();
    }
    dir
}

fn get(hub: &Hub) -> Result<(PathBuf, Vec<DownloadProgress>), ModelError> {
    let mut seen = Vec::new();
    let dir = resolve_model("org/tiny", hub, &mut |progress| seen.push(progress.clone()))?;
    Ok((dir, seen))
}

fn assert_same(dir: &Path, source: &Path, file: &str) {
    assert_eq!(std::fs::read(dir.join(file)).unwrap(), std::fs::read(source.join(file)).unwrap(), "{file}");
}

#[test]
fn a_model_is_downloaded_once_and_then_used_offline() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::None);
    let hub = server.hub(cache.path());
    let (dir, seen) = get(&hub).unwrap();
    for file in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    {
        assert_same(&dir, source.path(), file);
    }
    assert!(!dir.join("pytorch_model.bin").exists());
    ModelSpec::open(&dir).unwrap();
    Checkpoint::open(&dir).unwrap();
    let last = seen.last().unwrap();
    let size = std::fs::metadata(source.path().join("model.safetensors")).unwrap().len();
    assert_eq!((last.file.as_str(), last.done_bytes, last.total_bytes), ("model.safetensors", size, size));
    assert_eq!((last.files_done, last.files), (5, 5));

    let before = server.requests().len();
    assert_eq!(get(&hub).unwrap(), (dir.clone(), vec![]));
    assert_eq!(get(&Hub { offline: true, ..hub.clone() }).unwrap().0, dir);
    let by_commit = HubName::parse(&format!("org/tiny@{COMMIT}")).unwrap();
    assert_eq!(hub.cached(&by_commit), Some(dir));
    assert_eq!(server.requests().len(), before);
}

#[test]
fn without_a_tokenizer_json_what_stands_in_for_it_is_downloaded() {
    const ALL: [&str; 6] = [
        "tokenizer.model",
        "tiktoken.model",
        "a.tiktoken",
        "special_tokens_map.json",
        "added_tokens.json",
        "b.tiktoken",
    ];
    let downloaded = |files: &[&str], removed: &[&str]| {
        let (source, cache) = (model(false), tempfile::tempdir().unwrap());
        files.iter().for_each(|file| std::fs::write(source.path().join(file), file).unwrap());
        removed.iter().for_each(|file| std::fs::remove_file(source.path().join(file)).unwrap());
        let server = TestHub::start(source.path(), Fault::None);
        let (dir, _) = get(&server.hub(cache.path())).map_err(|error| error.to_string())?;
        let name = HubName::parse("org/tiny").unwrap();
        assert_eq!(server.hub(cache.path()).cached(&name), Some(dir.clone()));
        let found: Vec<&str> = ALL.into_iter().filter(|file| dir.join(file).exists()).collect();
        found.iter().for_each(|file| assert_same(&dir, source.path(), file));
        // Without the file, the snapshot is not complete.
        let tokenizer = found.first().copied().unwrap_or("tokenizer.json");
        std::fs::remove_file(dir.join(tokenizer)).unwrap();
        assert_eq!(server.hub(cache.path()).cached(&name), None);
        Ok::<_, String>(found)
    };
    let json = ["tokenizer.json"];
    let beside = ["special_tokens_map.json", "added_tokens.json"];
    assert_eq!(downloaded(&ALL, &[]).unwrap(), [""; 0]);
    assert_eq!(downloaded(&ALL, &json).unwrap(), [&["tokenizer.model"], &beside[..]].concat());
    assert_eq!(downloaded(&["tiktoken.model", "a.tiktoken"], &json).unwrap(), ["tiktoken.model"]);
    assert_eq!(downloaded(&["a.tiktoken"], &json).unwrap(), ["a.tiktoken"]);
    let two = downloaded(&["a.tiktoken", "b.tiktoken"], &json).unwrap_err();
    assert!(two.contains("cannot get tokenizer.json of org/tiny") && two.contains("tiktoken.model"), "{two}");
}

#[test]
fn shards_are_downloaded() {
    let (source, cache) = (model(true), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::None);
    let (dir, _) = get(&server.hub(cache.path())).unwrap();
    for shard in 1..=3 {
        assert_same(&dir, source.path(), &format!("model-{shard:05}-of-00003.safetensors"));
    }
    Checkpoint::open(&dir).unwrap();
    // A snapshot that lacks a shard is not complete.
    std::fs::remove_file(dir.join("model-00002-of-00003.safetensors")).unwrap();
    let name = HubName::parse("org/tiny").unwrap();
    assert_eq!(server.hub(cache.path()).cached(&name), None);
    get(&server.hub(cache.path())).unwrap();
    assert_eq!(server.hub(cache.path()).cached(&name), Some(dir));
}

#[test]
fn a_download_that_breaks_off_is_resumed() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::BreakOff { bytes: 1000, times: 2 });
    let (dir, _) = get(&server.hub(cache.path())).unwrap();
    assert_same(&dir, source.path(), "model.safetensors");
    let resumed = format!("/org/tiny/resolve/{COMMIT}/model.safetensors Some((2000, None))");
    assert!(server.requests().contains(&resumed), "{:?}", server.requests());
}

#[test]
fn what_was_downloaded_is_verified_by_its_hashes() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::BreakOff { bytes: 1000, times: 2 });
    let (dir, _) = get(&server.hub(cache.path())).unwrap();
    let mut last = (0, 0);
    let verified = verify(&dir, &mut |reading| last = reading).unwrap();
    // The configuration, three files of the tokenizer and generation, the weights.
    assert_eq!((verified.files, verified.unnamed, last), (5, 0, (verified.bytes, verified.bytes)));
    assert!(verified.bytes > std::fs::metadata(dir.join("model.safetensors")).unwrap().len());
    // One bit of any file; the next download gets only that file and the configuration.
    for file in ["model.safetensors", "generation_config.json", "config.json"] {
        let blob = std::fs::canonicalize(dir.join(file)).unwrap();
        let mut bytes = std::fs::read(&blob).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&blob, bytes).unwrap();
        let error = verify(&dir, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains("\nhint: `lagoon pull`"), "{error}");
        let before = server.requests().len();
        let (again, _) = get(&server.hub(cache.path())).unwrap();
        assert_same(&again, source.path(), file);
        assert_eq!(verify(&again, &mut |_| {}).unwrap(), verified);
        let tokenizer = format!("resolve/{COMMIT}/tokenizer.json");
        assert!(server.requests()[before..].iter().all(|request| !request.contains(&tokenizer)));
    }
    // What is no link into the cache has no hash to compare with.
    assert_eq!(verify(source.path(), &mut |_| {}).unwrap(), Verified { unnamed: 6, ..Verified::default() });
}

#[test]
fn a_download_that_keeps_breaking_off_fails_and_continues_later() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::BreakOff { bytes: 500, times: 4 });
    let error = get(&server.hub(cache.path())).unwrap_err().to_string();
    assert!(error.starts_with("cannot get model.safetensors of org/tiny from http://127.0.0.1:"), "{error}");
    assert!(error.contains("\nhint: "), "{error}");
    assert_eq!(server.hub(cache.path()).cached(&HubName::parse("org/tiny").unwrap()), None);
    let (dir, _) = get(&server.hub(cache.path())).unwrap();
    assert_same(&dir, source.path(), "model.safetensors");
}

#[test]
fn a_silent_server_times_out() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let server = TestHub::start(source.path(), Fault::Silence);
    let hub = Hub { stall: Duration::from_millis(700), ..server.hub(cache.path()) };
    let start = Instant::now();
    let error = get(&hub).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(error.contains("nothing arrived for 0.7 s\nhint: "), "{error}");
}

#[test]
fn refusals_are_explained() {
    let (source, cache) = (model(false), tempfile::tempdir().unwrap());
    let fails = |fault: Fault, name: &str| {
        let server = TestHub::start(source.path(), fault);
        resolve_model(name, &server.hub(cache.path()), &mut |_| {}).unwrap_err().to_string()
    };
    let unknown = fails(Fault::None, "org/other");
    assert!(unknown.contains("the hub has no such model, revision or file\nhint: check the spelling"), "{unknown}");
    let revision = fails(Fault::None, "org/tiny@v2");
    assert!(revision.contains("no such model, revision or file"), "{revision}");
    let gated = fails(Fault::Status(401), "org/tiny");
    assert!(gated.contains("refuses access") && gated.contains("HF_TOKEN"), "{gated}");
    let broken = fails(Fault::Status(503), "org/tiny");
    assert!(broken.contains("status 503"), "{broken}");

    let lacks = |file: &str| {
        let source = model(false);
        std::fs::remove_file(source.path().join(file)).unwrap();
        let server = TestHub::start(source.path(), Fault::None);
        get(&server.hub(tempfile::tempdir().unwrap().path())).unwrap_err().to_string()
    };
    assert!(lacks("config.json").contains("cannot get config.json of org/tiny"));
    let adapter = model(false);
    std::fs::rename(adapter.path().join("config.json"), adapter.path().join("adapter_config.json")).unwrap();
    let server = TestHub::start(adapter.path(), Fault::None);
    let refused = get(&server.hub(tempfile::tempdir().unwrap().path())).unwrap_err().to_string();
    assert!(refused.contains("it is an adapter\nhint: adapters such as LoRA"), "{refused}");
    assert!(lacks("tokenizer.json").contains("cannot get tokenizer.json of org/tiny"));
    assert!(lacks("model.safetensors").contains("the model has no safetensors, and no GGUF file"));
}

/// A repository of GGUF files, two of which are parts of one, as quantised models are published.
fn gguf_model(config: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let files = [
        "README.md",
        "mmproj-tiny.gguf",
        "tiny-Q4_K_M.gguf",
        "tiny-Q8_0.gguf",
        "tiny-F16-00001-of-00002.gguf",
        "tiny-F16-00002-of-00002.gguf",
    ];
    files.iter().for_each(|file| std::fs::write(dir.path().join(file), format!("the file {file}")).unwrap());
    if config {
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    }
    dir
}

#[test]
fn a_gguf_file_is_picked_by_its_tag_or_name() {
    for config in [false, true] {
        let (source, cache) = (gguf_model(config), tempfile::tempdir().unwrap());
        let server = TestHub::start(source.path(), Fault::None);
        let hub = server.hub(cache.path());
        let resolve = |hub: &Hub, name: &str| resolve_model(name, hub, &mut |_| {});
        let file = resolve(&hub, "org/tiny:Q4_K_M").unwrap();
        assert_eq!(file.file_name().unwrap(), "tiny-Q4_K_M.gguf");
        let dir = file.parent().unwrap();
        assert_same(dir, source.path(), "tiny-Q4_K_M.gguf");
        assert!(!dir.join("tiny-Q8_0.gguf").exists() && !dir.join("config.json").exists());
        // Again, offline, by its name, and as the only one that is cached.
        let before = server.requests().len();
        let offline = Hub { offline: true, ..hub.clone() };
        for name in ["org/tiny:q4_k_m", "org/tiny/tiny-Q4_K_M.gguf", "org/tiny:tiny-Q4_K_M.gguf", "org/tiny"] {
            assert_eq!(resolve(&offline, name).unwrap(), file, "{name}");
        }
        assert_eq!(server.requests().len(), before);
        let other = resolve(&offline, "org/tiny:Q8_0").unwrap_err().to_string();
        assert!(other.contains("HF_HUB_OFFLINE is set"), "{other}");
        // All parts, of which the first is the model.
        let split = resolve(&hub, "org/tiny:F16").unwrap();
        assert_eq!(split.file_name().unwrap(), "tiny-F16-00001-of-00002.gguf");
        assert_same(dir, source.path(), "tiny-F16-00002-of-00002.gguf");
        std::fs::remove_file(dir.join("tiny-F16-00002-of-00002.gguf")).unwrap();
        assert!(resolve(&offline, "org/tiny:F16").is_err(), "a part is missing");
    }
}

#[test]
fn what_picks_no_gguf_file_or_several_lists_them() {
    let source = gguf_model(false);
    let fails = |source: &Path, name: &str| {
        let (server, cache) = (TestHub::start(source, Fault::None), tempfile::tempdir().unwrap());
        resolve_model(name, &server.hub(cache.path()), &mut |_| {}).unwrap_err().to_string()
    };
    let several = fails(source.path(), "org/tiny");
    assert!(several.contains("cannot get a GGUF file of org/tiny"), "{several}");
    assert!(several.contains("it has 3 GGUF files") && several.contains("\n  tiny-Q4_K_M.gguf"), "{several}");
    assert!(several.contains("tiny-F16-00001-of-00002.gguf (2 files)") && !several.contains("mmproj"), "{several}");
    let none = fails(source.path(), "org/tiny:Q5_K_M");
    assert!(none.contains("no GGUF file is named Q5_K_M") && none.contains("tiny-Q8_0.gguf"), "{none}");
    let safetensors = model(false);
    let none = fails(safetensors.path(), "org/tiny:Q4_K_M");
    assert!(none.contains("the model has none") && none.contains("safetensors"), "{none}");
    // The only one needs no tag.
    std::fs::remove_file(safetensors.path().join("model.safetensors")).unwrap();
    std::fs::write(safetensors.path().join("tiny-Q8_0.gguf"), "the only one").unwrap();
    let (server, cache) = (TestHub::start(safetensors.path(), Fault::None), tempfile::tempdir().unwrap());
    let only = resolve_model("org/tiny", &server.hub(cache.path()), &mut |_| {}).unwrap();
    assert_eq!(only.file_name().unwrap(), "tiny-Q8_0.gguf");
}

#[test]
fn without_a_network_it_says_so() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub {
        // Nothing listens on the port that was just given back.
        endpoint: format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()),
        cache: cache.path().to_owned(),
        offline: false,
        token: None,
        stall: Duration::from_secs(20),
    };
    let error = get(&hub).unwrap_err().to_string();
    assert!(error.contains("onnection refused") && error.contains("\nhint: check the network"), "{error}");
    let error = get(&Hub { offline: true, ..hub }).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE is set and the model is not in "), "{error}");
}

#[test]
fn https_speaks_tls() {
    // The server sees the first bytes of a TLS handshake: a record of type 22, version 3.x.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    let seen = std::thread::spawn(move || {
        let mut first = [0; 2];
        listener.accept().unwrap().0.read_exact(&mut first).unwrap();
        first
    });
    let cache = tempfile::tempdir().unwrap();
    let stall = Duration::from_secs(20);
    let hub = Hub { endpoint, cache: cache.path().to_owned(), offline: false, token: None, stall };
    get(&hub).unwrap_err();
    assert_eq!(seen.join().unwrap(), [22, 3]);
}

#[test]
fn names_and_directories_are_distinguished() {
    let cache = tempfile::tempdir().unwrap();
    let vars = |name: &str| (name == "HF_HOME").then(|| cache.path().display().to_string());
    let hub = Hub { offline: true, ..Hub::from_vars(&vars).unwrap() };
    let resolve = |name: &str| resolve_model(name, &hub, &mut |_| {});
    assert_eq!(resolve(cache.path().to_str().unwrap()).unwrap(), cache.path());
    let file = cache.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(resolve(file.to_str().unwrap()).unwrap_err().to_string().contains("it is a file"));
    for bad in [
        "",
        "tiny",
        "./missing",
        "/no/where",
        "a/b/c",
        "org/..",
        "../x",
        "org/na me",
        "org/x@",
        "org/x@../y",
        "org/x:",
        "x.gguf",
        "a/x.gguf",
        "./a/x.gguf",
        "/a/b/x.gguf",
        "org/x:a:b",
    ] {
        let error = resolve(bad).unwrap_err();
        assert!(matches!(error, ModelError::NotAModel { .. }), "{bad}: {error}");
    }
    assert!(matches!(resolve("org/tiny"), Err(ModelError::Hub { .. })));
    let absent = resolve("org/tiny/x.gguf").unwrap_err().to_string();
    assert!(absent.contains("hint: there is no such file here, so that it was looked for on the hub"), "{absent}");
    let name = HubName::parse("meta-llama/Llama-3.1-8B@refs/pr/1").unwrap();
    assert_eq!((name.repo.as_str(), name.revision.as_str()), ("meta-llama/Llama-3.1-8B", "refs/pr/1"));
    for (text, revision, file) in [
        ("org/tiny:Q4_K_M", "main", "Q4_K_M"),
        ("org/tiny@v2:Q4_K_M", "v2", "Q4_K_M"),
        ("org/tiny/tiny-Q4_K_M.gguf", "main", "tiny-Q4_K_M.gguf"),
        ("org/tiny/Q8_0/tiny.gguf", "main", "Q8_0/tiny.gguf"),
    ] {
        let name = HubName::parse(text).unwrap();
        assert_eq!(
            (name.repo.as_str(), name.revision.as_str(), name.gguf.as_deref()),
            ("org/tiny", revision, Some(file))
        );
    }
}

#[test]
fn the_environment_is_honoured() {
    let from = |vars: &[(&str, &str)]| {
        let vars: BTreeMap<String, String> = vars.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Hub::from_vars(&|name| vars.get(name).cloned())
    };
    let hub = from(&[("HOME", "/h")]).unwrap();
    assert_eq!((hub.endpoint.as_str(), hub.offline), ("https://huggingface.co", false));
    assert_eq!(hub.cache, Path::new("/h/.cache/huggingface/hub"));
    assert_eq!(from(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).unwrap().cache, Path::new("/x/huggingface/hub"));
    assert_eq!(from(&[("HOME", "/h"), ("HF_HOME", "/f")]).unwrap().cache, Path::new("/f/hub"));
    let hub =
        from(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c"), ("HF_HUB_OFFLINE", "1"), ("HF_TOKEN", " t\n")]).unwrap();
    assert_eq!((hub.cache.as_path(), hub.offline, hub.token.as_deref()), (Path::new("/c"), true, Some("t")));
    assert!(!from(&[("HF_HOME", "/f"), ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    assert!(from(&[]).unwrap_err().to_string().contains("HF_HOME"));
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("token"), "stored\n").unwrap();
    let hub = from(&[("HF_HOME", home.path().to_str().unwrap())]).unwrap();
    assert_eq!(hub.token.as_deref(), Some("stored"));
}
