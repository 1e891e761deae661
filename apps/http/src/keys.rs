//! API keys with scopes and rate limits.
//!
//! [`guard`] is the one place that checks keys: it precedes a process's whole router, and so a request's body. A route
//! is open, for inference, or for administration ([`scope_of`]). Invariants:
//!
//! * Without any key for inference, inference is open. With one, every such request bears one.
//! * Administration takes a key of its scope. Where none is configured, and no key file, it is for clients on loopback only that
//!   name this machine (`Host`), with `--api-key` if there is one, and not for requests that a proxy passed on or a page of
//!   another host sends (`Origin`).
//! * A connection with a certificate of the pool is the gateway's, which has checked the key: it needs none for inference, nor to
//!   read metrics.
//! * Keys are kept as SHA-256 and compared in constant time. None is logged or part of an error.

use crate::{
    access::Record, client_addr::ClientAddr, error::ApiError, journal::HAND_BACK_HEADER, rate::RateLimit,
    reload::Reload, tls::PoolPeer,
};
use axum::{
    Router,
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use ring::digest;
use serde::Deserialize;
use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    fmt, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Instant,
};
use subtle::ConstantTimeEq as _;

/// Maximum of entries in a key file.
const KEYS_MAX: usize = 4096;
/// Longest name of a key, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// The name of a request's key, from the gateway that has checked the key.
pub const TENANT_HEADER: HeaderName = HeaderName::from_static("x-lagoon-tenant");
/// Header with the key of Anthropic's clients.
const API_KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");
/// Where every process shows its metrics.
pub const METRICS_PATH: &str = "/metrics";
/// Headers that a proxy adds: then the connection's address is not the client's.
const PROXY_HEADERS: [HeaderName; 3] = [header::FORWARDED, header::VIA, HeaderName::from_static("x-forwarded-for")];

/// The routes that a key is valid for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// The routes of OpenAI, vLLM and llama.cpp, `/version`, `/openapi.json`.
    Inference,
    /// `/lagoon/…` and `/metrics`.
    Admin,
}

/// The scope of a path; `None` for open routes.
#[must_use]
pub fn scope_of(path: &str) -> Option<Scope> {
    match path {
        "/health" => None,
        METRICS_PATH | "/lagoon" => Some(Scope::Admin),
        _ if path.starts_with("/lagoon/") => Some(Scope::Admin),
        _ => Some(Scope::Inference),
    }
}

/// Why a key file cannot be used. Messages contain names from the file, nothing else of it.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read the key file {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "line {line} of the key file {path} is not understood\n\
         hint: an entry is [[key]] with name, key or sha256 (64 hexadecimal digits), and optionally scopes, requests_per_minute, \
         tokens_per_minute"
    )]
    Parse { path: PathBuf, line: usize },
    #[error("the key `{name}` in {path}: {reason}")]
    Entry { path: PathBuf, name: String, reason: &'static str },
    #[error("the key file {path} has more than {KEYS_MAX} keys")]
    TooMany { path: PathBuf },
}

/// A key's properties and hash.
struct Entry {
    name: String,
    sha256: [u8; 32],
    scopes: Vec<Scope>,
    rate: Arc<RateLimit>,
}

impl Entry {
    fn has(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope)
    }
}

/// The keys of a process. See the module's documentation.
pub struct Keys {
    /// Keys of the command line.
    fixed: Vec<Entry>,
    file: Option<PathBuf>,
    /// Keys of the file as last read.
    listed: RwLock<Arc<Vec<Entry>>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fixed: Vec<&str> = self.fixed.iter().map(|entry| entry.name.as_str()).collect();
        f.debug_struct("Keys").field("fixed", &fixed).field("file", &self.file).finish_non_exhaustive()
    }
}

impl Keys {
    /// Keys from the command line: one for inference, one for administration, a file.
    ///
    /// # Errors
    /// When the file cannot be read or understood.
    pub fn new(api: Option<&str>, admin: Option<&str>, file: Option<PathBuf>) -> Result<Self, KeyFileError> {
        let fixed = |name: &str, key: Option<&str>, scope| {
            let entry = |key: &str| Entry {
                name: name.to_owned(),
                sha256: sha256(key),
                scopes: vec![scope],
                rate: Arc::default(),
            };
            key.map(entry)
        };
        let fixed = [fixed("--api-key", api, Scope::Inference), fixed("--admin-key", admin, Scope::Admin)];
        let listed = match &file {
            Some(path) => read(path)?,
            None => Vec::new(),
        };
        Ok(Self { fixed: fixed.into_iter().flatten().collect(), file, listed: RwLock::new(Arc::new(listed)) })
    }

    /// No keys: inference is open, administration is for loopback.
    #[must_use]
    pub fn none() -> Arc<Self> {
        Arc::new(Self { fixed: Vec::new(), file: None, listed: RwLock::default() })
    }

    /// One key for inference.
    #[must_use]
    pub fn single(key: &str) -> Arc<Self> {
        Arc::new(Self::new(Some(key), None, None).expect("no file is read"))
    }

    /// Reads the file again when it changes, for as long as the keys are used. A bad file changes nothing, and is
    /// logged. Call inside a tokio runtime.
    pub fn watch(self: &Arc<Self>) {
        if let Some(path) = &self.file {
            Reload::new([path.clone()]).spawn(Arc::downgrade(self), |keys: &Self| keys.reload());
        }
    }

    fn reload(&self) {
        let Some(path) = &self.file else { return };
        match read(path) {
            Ok(mut entries) => {
                let mut listed = self.listed.write().unwrap_or_else(PoisonError::into_inner);
                let old: HashMap<&str, &Entry> = listed.iter().map(|entry| (entry.name.as_str(), entry)).collect();
                for entry in &mut entries {
                    // The rate limit keeps its level.
                    if let Some(old) = old.get(entry.name.as_str()).filter(|old| old.rate.same_limits(&entry.rate)) {
                        entry.rate = Arc::clone(&old.rate);
                    }
                }
                tracing::info!(keys = entries.len(), "the key file was read again");
                *listed = Arc::new(entries);
            }
            Err(error) => tracing::error!(%error, "the keys stay as they were"),
        }
    }

    /// Admits a request for `scope`; returns its tenant, with the rate limit to charge its tokens to.
    ///
    /// # Errors
    /// 401 without a key that is known, 403 for another scope or from another address, 429 over a rate limit.
    fn admit(&self, scope: Scope, client: &Client<'_>) -> Result<Caller, ApiError> {
        let free = Caller::passed_on(client.headers);
        if scope == Scope::Inference && client.of_pool {
            return Ok(free);
        }
        let listed = Arc::clone(&self.listed.read().unwrap_or_else(PoisonError::into_inner));
        let entries = || self.fixed.iter().chain(listed.iter());
        let guarded = self.file.is_some() || entries().any(|entry| entry.has(Scope::Inference));
        let administered = entries().any(|entry| entry.has(Scope::Admin));
        let needed = match scope {
            Scope::Inference if !guarded => return Ok(free),
            // A file's keys for inference are of tenants.
            Scope::Admin if !administered && self.file.is_some() => return Err(no_key_administers()),
            Scope::Admin if !administered && !client.is_local() => return Err(no_administration()),
            Scope::Admin if !administered && !guarded => return Ok(free),
            Scope::Admin if !administered => Scope::Inference,
            needed => needed,
        };
        let presented = bearer(client.headers).map(sha256).ok_or_else(unauthorized)?;
        // All are compared, so that the time reveals nothing. One key may be listed once for each scope.
        let same: Vec<&Entry> = entries().filter(|entry| bool::from(presented.ct_eq(&entry.sha256))).collect();
        let Some(entry) = same.iter().find(|entry| entry.has(needed)) else {
            return Err(if same.is_empty() { unauthorized() } else { wrong_scope(needed) });
        };
        if scope == Scope::Inference {
            entry.rate.request(Instant::now()).map_err(|over| over.error(&entry.name))?;
        }
        let rate = Some(Arc::clone(&entry.rate));
        Ok(Caller { rate, tenant: entry.name.as_str().into(), ..Caller::default() })
    }
}

/// The sender of a request.
struct Client<'a> {
    headers: &'a HeaderMap,
    addr: Option<ClientAddr>,
    /// Of the request's target, if that is a whole URL.
    authority: Option<&'a str>,
    /// Its connection has a certificate of the pool.
    of_pool: bool,
}

impl Client<'_> {
    /// Whether it is on this machine: a loopback address, no proxy header, and no page of another host behind it.
    fn is_local(&self) -> bool {
        let proxied = PROXY_HEADERS.iter().any(|name| self.headers.contains_key(name));
        let address = self.addr.is_some_and(|addr| addr.0.is_loopback());
        address && !proxied && self.host_is_local() && self.origin_is_local()
    }

    /// A browser on this machine sends requests of pages from any host, and names the page's host (cross-site request forgery).
    fn origin_is_local(&self) -> bool {
        let host =
            |origin: &HeaderValue| origin.to_str().ok()?.split_once("://").map(|(_, host)| is_this_machine(host));
        self.headers.get_all(header::ORIGIN).iter().all(|origin| host(origin) == Some(true))
    }

    /// A page whose name leads to this machine (DNS rebinding) and a tunnel that adds no header ask for another host.
    fn host_is_local(&self) -> bool {
        let of_header = self.headers.get_all(header::HOST).iter().map(|value| value.to_str().unwrap_or_default());
        let mut hosts = of_header.chain(self.authority).peekable();
        hosts.peek().is_some() && hosts.all(is_this_machine)
    }
}

/// Whether a `Host`, with or without a port, is localhost or a loopback address.
fn is_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let addr = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name).parse::<IpAddr>();
    addr.map_or(name.eq_ignore_ascii_case("localhost"), |addr| addr.to_canonical().is_loopback())
}

/// The tenant of a request, by its key, and the rate limit that its tokens are charged to; none for keys without a limit. With the
/// request's record for the access log.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    rate: Option<Arc<RateLimit>>,
    tenant: Arc<str>,
    /// It is a gateway that takes the request back if that cannot start soon.
    takes_back: bool,
    record: Record,
}

impl Caller {
    /// The name of the request's key; empty where no key is needed.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Whether a gateway takes the request back if it cannot start soon.
    #[must_use]
    pub fn takes_back(&self) -> bool {
        self.takes_back
    }

    /// What is known of the request, for the access log.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The header that names the tenant to an instance behind a gateway that has checked the key.
    #[must_use]
    pub fn header(&self) -> Option<HeaderValue> {
        HeaderValue::from_bytes(self.tenant.as_bytes()).ok().filter(|name| !name.is_empty())
    }

    /// The tenant with this name, without a rate limit.
    #[must_use]
    pub fn of_tenant(name: &str) -> Self {
        Self { tenant: name.into(), ..Self::default() }
    }

    /// The tenant that the gateway names, of a request that needs no key here.
    fn passed_on(headers: &HeaderMap) -> Self {
        let name = headers.get(TENANT_HEADER).and_then(|name| std::str::from_utf8(name.as_bytes()).ok());
        let name = name.filter(|name| name.len() <= NAME_BYTES_MAX).unwrap_or_default();
        Self { takes_back: headers.contains_key(HAND_BACK_HEADER), ..Self::of_tenant(name) }
    }

    /// Counts tokens of the request, prompt or answer.
    pub fn charge(&self, tokens: u64) {
        if let Some(rate) = &self.rate {
            rate.tokens(tokens, Instant::now());
        }
    }

    /// Returns `tokens` of the charged ones: the request did not use them.
    pub fn give_back(&self, tokens: u64) {
        if let Some(rate) = &self.rate {
            rate.give_back(tokens, Instant::now());
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let caller = parts.extensions.get::<Self>().cloned().unwrap_or_default();
        let record = parts.extensions.get::<Record>().cloned().unwrap_or_default();
        record.of_key(&caller.tenant);
        Ok(Self { record, ..caller })
    }
}

/// Checks every request to `router` against `keys` first.
pub fn guard(router: Router, keys: Arc<Keys>) -> Router {
    router.layer(middleware::from_fn_with_state(keys, check))
}

async fn check(State(keys): State<Arc<Keys>>, mut request: Request, next: Next) -> Response {
    let reads_metrics = request.uri().path() == METRICS_PATH && request.extensions().get::<PoolPeer>().is_some();
    if let Some(scope) = scope_of(request.uri().path()).filter(|_| !reads_metrics) {
        let extensions = request.extensions();
        let client = Client {
            headers: request.headers(),
            addr: extensions.get::<ClientAddr>().copied(),
            authority: request.uri().authority().map(Authority::as_str),
            of_pool: extensions.get::<PoolPeer>().is_some(),
        };
        match keys.admit(scope, &client) {
            Ok(caller) => {
                extensions.get::<Record>().into_iter().for_each(|record| record.of_key(caller.tenant()));
                drop(request.extensions_mut().insert(caller));
            }
            Err(error) => return error.into_response(),
        }
    }
    next.run(request).await
}

/// The token of `Authorization: Bearer TOKEN`, or that of `x-api-key`, where Anthropic's clients send it.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    if !headers.contains_key(header::AUTHORIZATION) {
        return headers.get(API_KEY_HEADER)?.to_str().ok().map(str::trim);
    }
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn sha256(key: &str) -> [u8; 32] {
    digest::digest(&digest::SHA256, key.as_bytes()).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// The 401 for a request without a valid key.
#[must_use]
pub fn unauthorized() -> ApiError {
    let message = "a valid API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
    ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
}

fn wrong_scope(needed: Scope) -> ApiError {
    let message = match needed {
        Scope::Inference => "this key is not for inference",
        Scope::Admin => "this key is not for administration; --admin-key or a key file names one that is",
    };
    ApiError::new(StatusCode::FORBIDDEN, Some("wrong_scope"), message)
}

fn no_administration() -> ApiError {
    let message = "administration is for this machine only, under the name localhost or a loopback address\n\
                   hint: start the server with --admin-key, or with a key of scope admin in --key-file";
    ApiError::new(StatusCode::FORBIDDEN, Some("administration_off"), message)
}

fn no_key_administers() -> ApiError {
    let message = "no key of scope admin is configured, and with a key file administration takes one\n\
                   hint: add one to --key-file, or start the server with --admin-key";
    ApiError::new(StatusCode::FORBIDDEN, Some("administration_off"), message)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    key: Vec<Listed>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    name: String,
    key: Option<String>,
    sha256: Option<String>,
    scopes: Option<Vec<Scope>>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
}

fn read(path: &Path) -> Result<Vec<Entry>, KeyFileError> {
    let text = crate::reload::read_text(path);
    let text = text.map_err(|source| KeyFileError::Read { path: path.to_owned(), source })?;
    parse(path, &text)
}

fn parse(path: &Path, text: &str) -> Result<Vec<Entry>, KeyFileError> {
    let file: KeyFile = toml::from_str(text).map_err(|error| {
        // The parser's message may quote the file.
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        KeyFileError::Parse { path: path.to_owned(), line: text.as_bytes()[..at].split(|byte| *byte == b'\n').count() }
    })?;
    if file.key.len() > KEYS_MAX {
        return Err(KeyFileError::TooMany { path: path.to_owned() });
    }
    let mut names = HashSet::new();
    let entry = |listed: Listed| {
        let name = listed.name.clone();
        let made = if names.insert(name.clone()) { listed.entry() } else { Err("the name is used twice") };
        made.map_err(|reason| KeyFileError::Entry { path: path.to_owned(), name, reason })
    };
    file.key.into_iter().map(entry).collect()
}

impl Listed {
    fn entry(self) -> Result<Entry, &'static str> {
        let sha256 = match (self.key, self.sha256) {
            (Some(key), None) if !key.is_empty() => sha256(&key),
            (None, Some(hex)) => unhex(&hex).ok_or("sha256 is not 64 hexadecimal digits")?,
            _ => return Err("it needs one of `key` and `sha256`"),
        };
        if self.name.len() > NAME_BYTES_MAX || self.name.chars().any(char::is_control) {
            return Err("the name is longer than 128 bytes or has control characters");
        }
        let scopes = self.scopes.unwrap_or_else(|| vec![Scope::Inference]);
        if scopes.is_empty() || self.requests_per_minute == Some(0) || self.tokens_per_minute == Some(0) {
            return Err("it is good for nothing: `scopes` is empty, or a rate is 0");
        }
        let rate = RateLimit::new(self.requests_per_minute, self.tokens_per_minute, Instant::now());
        Ok(Entry { name: self.name, sha256, scopes, rate: Arc::new(rate) })
    }
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u8>> = text.bytes().map(|b| char::from(b).to_digit(16)?.try_into().ok()).collect();
    let bytes: Vec<u8> = digits?.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).unwrap_or(&0)).collect();
    (text.len() == 64).then(|| bytes.try_into().ok()).flatten()
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
