//! Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` with the matching HTTP status.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use lagoon_types::RequestError;
use schemars::JsonSchema;
use serde::Serialize;

/// Header with the code of an error response: a gateway need not parse the body.
pub const ERROR_HEADER: HeaderName = HeaderName::from_static("x-lagoon-error");
/// Error code of a request beyond its key's rate; no sign of the server's load.
pub const RATE_LIMIT_EXCEEDED: &str = "rate_limit_exceeded";
/// Error code of a request to an instance whose queue is full.
pub const QUEUE_FULL: &str = "queue_full";
/// Error code of a request to an instance that takes none now.
pub const NOT_SERVING: &str = "not_serving";
/// Error code of a request that an instance gives back to the gateway that offered to take it. No client sees it.
pub const HANDED_BACK: &str = "handed_back";

/// One refused or failed request. Clients tell errors apart by `status` and `code`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    /// OpenAI's `type`: a coarse class.
    pub kind: &'static str,
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds for the `Retry-After` header.
    pub retry_after_s: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub(crate) struct Body<'a> {
    error: Detail<'a>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ErrorDetail")]
struct Detail<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    /// An error of any status; the class follows from the status.
    #[must_use]
    pub fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let kind = match status.as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            502..=504 => "service_unavailable",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        Self { status, kind, message: message.into(), param: None, code, retry_after_s: None }
    }

    /// 400 that names the field at fault.
    #[must_use]
    pub fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, Some(code), message) }
    }

    /// A 503 with a message.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("unavailable"), message)
    }

    /// A 500, for a bug of ours: the message is sent, details are only logged.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error"), message)
    }

    /// The HTTP error for an engine's error. `retry_after_s`: sent for a full queue.
    #[must_use]
    pub fn from_request_error(error: &RequestError, retry_after_s: u32) -> Self {
        let message = error.to_string();
        match error {
            RequestError::Invalid(_) => Self::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message),
            RequestError::TooLong { .. } => {
                Self::new(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message)
            }
            RequestError::QueueFull { .. } => Self {
                retry_after_s: Some(retry_after_s),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, Some(QUEUE_FULL), message)
            },
            RequestError::Unavailable(_) => Self::unavailable(message),
            RequestError::NotServing(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, Some(NOT_SERVING), message),
            RequestError::HandedBack => Self::new(StatusCode::SERVICE_UNAVAILABLE, Some(HANDED_BACK), message),
            RequestError::Internal(_) => Self::internal(message),
        }
    }

    /// The JSON body, also used as the last frame of a stream that fails.
    #[must_use]
    pub fn body(&self) -> String {
        let error = Detail { message: &self.message, r#type: self.kind, param: self.param.as_deref(), code: self.code };
        serde_json::to_string(&Body { error }).expect("strings serialise")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(status = self.status.as_u16(), message = %self.message, "request failed");
        }
        let mut response = (self.status, self.body()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(code) = self.code {
            headers.insert(ERROR_HEADER, HeaderValue::from_static(code));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_its_code_in_a_header() {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some(RATE_LIMIT_EXCEEDED), "over");
        let headers = ApiError { retry_after_s: Some(7), ..error }.into_response().headers().clone();
        assert_eq!(headers[ERROR_HEADER], "rate_limit_exceeded");
        assert_eq!(headers[header::RETRY_AFTER], "7");
    }
}
