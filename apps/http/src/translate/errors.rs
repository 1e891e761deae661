//! Errors of translated endpoints: a chat's error with the names of the interface's own fields, and Anthropic's shape.

use crate::error::ApiError;
use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Bytes read of an error response.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// An error as OpenAI's interface writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ErrorBody {
    pub(super) message: String,
    pub(super) r#type: String,
    pub(super) param: Option<String>,
    pub(super) code: Option<String>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Envelope {
    error: ErrorBody,
}

/// Fields of a chat that have another name in an interface; the first that a path begins with counts.
pub(super) type Names = &'static [(&'static str, &'static str)];

impl ErrorBody {
    /// The error of a chat's stream that breaks off.
    pub(super) fn broken(why: &str) -> Self {
        let ApiError { message, kind, code, .. } = ApiError::unavailable(format!("the answer broke off: {why}"));
        Self { message, r#type: kind.to_owned(), param: None, code: code.map(str::to_owned) }
    }

    /// The status of an error inside of a stream.
    fn status(&self) -> StatusCode {
        match self.r#type.as_str() {
            "service_unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "rate_limit_error" => StatusCode::TOO_MANY_REQUESTS,
            "invalid_request_error" => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub(super) fn response(self) -> Response {
        let status = self.status();
        json_response(status, serde_json::to_string(&Envelope { error: self }).expect("strings serialise"))
    }

    /// The error with the interface's own name of the field at fault.
    fn renamed(mut self, names: Names) -> Self {
        if let Some(param) = self.param.take() {
            let own = own_name(&param, names);
            self.message = self.message.replace(&format!("`{param}`"), &format!("`{own}`"));
            self.param = Some(own);
        }
        self
    }
}

fn own_name(param: &str, names: Names) -> String {
    // The places of messages and of their parts differ.
    let list = |name: &str| names.iter().find(|(chat, _)| *chat == name).map_or(name, |(_, own)| *own).to_owned();
    if param.starts_with("messages") {
        return list("messages");
    }
    for (chat, own) in names {
        if let Some(rest) = param.strip_prefix(chat).filter(|rest| rest.is_empty() || rest.starts_with(['.', '['])) {
            return format!("{own}{rest}");
        }
    }
    // Definitions of tools have no `function` around them.
    let inner = names.iter().filter(|(chat, _)| chat.starts_with('.'));
    inner.fold(param.replace(".function", ""), |path, (chat, own)| path.replace(chat, own))
}

pub(super) fn json_response(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// A chat's refusal, with the interface's own names of fields.
pub(super) async fn renamed(response: Response, names: Names) -> Response {
    let (mut head, body) = response.into_parts();
    let bytes = to_bytes(body, ERROR_BYTES_MAX).await.unwrap_or_default();
    let body = match serde_json::from_slice::<Envelope>(&bytes) {
        Ok(Envelope { error }) => {
            let error = Envelope { error: error.renamed(names) };
            head.headers.remove(header::CONTENT_LENGTH);
            Body::from(serde_json::to_string(&error).expect("strings serialise"))
        }
        Err(_) => Body::from(bytes),
    };
    Response::from_parts(head, body)
}

/// Anthropic's name for errors of a status.
fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// The error in Anthropic's shape.
pub(super) fn anthropic(error: &ErrorBody, status: Option<StatusCode>) -> serde_json::Value {
    let kind = anthropic_type(status.unwrap_or_else(|| error.status()));
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

/// Has errors of `/v1/messages` in Anthropic's shape, those of keys and routes, too.
pub(crate) fn shape_errors(router: Router) -> Router {
    router.layer(middleware::from_fn(shape_error))
}

async fn shape_error(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let of_anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
    let response = next.run(request).await;
    if !of_anthropic || response.status().is_success() {
        return response;
    }
    let (mut head, body) = response.into_parts();
    let bytes = to_bytes(body, ERROR_BYTES_MAX).await.unwrap_or_default();
    let Envelope { error } = serde_json::from_slice(&bytes).unwrap_or_default();
    head.headers.remove(header::CONTENT_LENGTH);
    let body = anthropic(&error, Some(head.status)).to_string();
    Response::from_parts(head, Body::from(body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::translate::{anthropic, responses};

    /// A schema has no object of its own in the other interfaces.
    #[test]
    fn fields_of_a_chat_have_the_interfaces_own_names() {
        for (param, of_responses, of_anthropic) in [
            ("response_format", "text.format", "output_config.format"),
            ("response_format.type", "text.format.type", "output_config.format.type"),
            ("response_format.json_schema.schema", "text.format.schema", "output_config.format.schema"),
            ("response_format.json_schema", "text.format", "output_config.format"),
            ("messages[3].content", "input", "messages"),
            ("tools[0].function.name", "tools[0].name", "tools[0].name"),
            ("tools[0].function.parameters", "tools[0].parameters", "tools[0].input_schema"),
            ("seed", "seed", "seed"),
        ] {
            assert_eq!(own_name(param, responses::NAMES), of_responses);
            assert_eq!(own_name(param, anthropic::NAMES), of_anthropic);
        }
    }
}
