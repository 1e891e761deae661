//! The front of an HTTP port, before its keys: request ids, the access log, and answers to browsers that ask for another origin.

use crate::access::{AccessLog, Pending, Record};
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
    middleware::{self, Next},
    response::Response,
};
use rand::Rng as _;
use std::{fmt, time::Duration};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Header with a request's id, in requests and in every response.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that a client may choose, in bytes.
const ID_BYTES_MAX: usize = 128;
/// Paths that probes ask for all the time: they are not logged.
const UNLOGGED: [&str; 3] = ["/health", "/ready", crate::keys::METRICS_PATH];
/// How long a browser may keep the answer to a preflight request.
const PREFLIGHT_LIFETIME: Duration = Duration::from_secs(600);

/// What a port does before it checks keys.
#[derive(Clone, Default)]
pub struct Front {
    /// `None`: requests are not logged.
    pub access_log: Option<AccessLog>,
    /// Origins whose pages may use the port from a browser.
    pub cors: Option<CorsOrigins>,
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("access_log", &self.access_log.is_some()).field("cors", &self.cors).finish()
    }
}

/// Origins of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorsOrigins {
    Any,
    These(Vec<HeaderValue>),
}

impl CorsOrigins {
    /// Checks a list of origins (`https://chat.example.org`, without a path) or `*`; `None` if it is empty.
    ///
    /// # Errors
    /// The text that is no origin.
    pub fn parse(texts: &[String]) -> Result<Option<Self>, String> {
        if texts.iter().any(|text| text == "*") {
            return Ok(Some(Self::Any));
        }
        let origin = |text: &String| {
            let value = HeaderValue::from_str(text).ok().filter(|_| is_origin(text));
            value.ok_or_else(|| {
                format!("{text:?} is no origin, as https://chat.example.org or http://localhost:3000 is")
            })
        };
        let origins: Vec<HeaderValue> = texts.iter().map(origin).collect::<Result<_, _>>()?;
        Ok((!origins.is_empty()).then_some(Self::These(origins)))
    }

    /// The layer that answers preflight requests and adds headers. Requests bear keys in a header, never cookies.
    fn layer(self) -> CorsLayer {
        let origins = match self {
            Self::Any => AllowOrigin::any(),
            Self::These(origins) => AllowOrigin::list(origins),
        };
        let exposed = [REQUEST_ID, HeaderName::from_static("x-lagoon-instance"), header::RETRY_AFTER];
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(exposed)
            .max_age(PREFLIGHT_LIFETIME)
    }
}

/// Whether a text is what browsers send as `Origin`: scheme and host, without a path.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let visible = |b: u8| b.is_ascii_graphic() && !b"/?#@\\,*".contains(&b) && !b.is_ascii_uppercase();
    let is_scheme = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b);
    !scheme.is_empty() && scheme.bytes().all(is_scheme) && !host.is_empty() && host.bytes().all(visible)
}

/// Puts the front before `router`.
pub(crate) fn before(router: Router, front: Front) -> Router {
    let Front { access_log, cors } = front;
    let router = match cors {
        Some(origins) => router.layer(origins.layer()),
        None => router,
    };
    router.layer(middleware::from_fn_with_state(access_log, identify))
}

/// Gives a request its id, and has its line logged.
async fn identify(State(log): State<Option<AccessLog>>, mut request: Request, next: Next) -> Response {
    let id = id_of(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let record = Record::new(id.to_str().unwrap_or_default(), request.method(), request.uri().path());
    let log = log.filter(|_| !UNLOGGED.contains(&request.uri().path()));
    let pending = log.map(|log| Pending::new(record.clone(), log));
    request.extensions_mut().insert(record);
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    match pending {
        Some(pending) => pending.answered(response),
        None => response,
    }
}

/// The id that the client chose, if it is a short word of letters, digits and few signs; else a new one.
fn id_of(headers: &HeaderMap) -> HeaderValue {
    let is_sane = |id: &&HeaderValue| {
        let sign = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(b);
        !id.is_empty() && id.len() <= ID_BYTES_MAX && id.as_bytes().iter().all(sign)
    };
    let made = || HeaderValue::from_str(&format!("req_{:032x}", rand::rng().random::<u128>()));
    headers.get(REQUEST_ID).filter(is_sane).cloned().unwrap_or_else(|| made().expect("letters and digits"))
}
