//! `GET /openapi.json`: OpenAPI 3.1, of the fields' tables and of the types of responses. Tests hold it against every route of the
//! router and every field that a handler asks for.

mod page;
mod tables;
#[cfg(test)]
mod tests;

use crate::{
    embeddings, error,
    fields::Neutral,
    llama_cpp, models, reply, tokens,
    translate::{ENDPOINTS, Field, Support},
};
use axum::Json;
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};
use tables::{Body, Of, body};

pub use page::page;

/// A route's response.
enum Response {
    /// JSON of a type.
    Json(fn(&mut SchemaGenerator) -> schemars::Schema),
    /// JSON of a type; with `stream`, server-sent events.
    Stream(fn(&mut SchemaGenerator) -> schemars::Schema),
    /// JSON without a type of its own, and text.
    Object,
    Text,
}

/// One route.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    response: Response,
}

const fn operation(method: &'static str, path: &'static str, response: Response, summary: &'static str) -> Operation {
    Operation { method, path, summary, response }
}

fn schema<T: JsonSchema>(schemas: &mut SchemaGenerator) -> schemars::Schema {
    schemas.subschema_for::<T>()
}

/// Every route of [`crate::server::router`].
const OPERATIONS: &[Operation] = &[
    operation("post", "/v1/chat/completions", Response::Stream(schema::<reply::Reply>), "Answers a chat."),
    operation(
        "post",
        "/v1/chat/completions/batch",
        Response::Json(schema::<reply::Reply>),
        "Answers several chats, a choice each (vLLM).",
    ),
    operation("post", "/v1/completions", Response::Stream(schema::<reply::Reply>), "Continues prompts."),
    operation("post", "/v1/embeddings", Response::Json(schema::<embeddings::EmbeddingList>), "Embeds texts."),
    operation("get", "/v1/models", Response::Json(schema::<models::ModelList>), "Lists the served model."),
    operation("get", "/v1/models/{id}", Response::Json(schema::<models::Model>), "Describes the served model."),
    operation("get", "/models", Response::Json(schema::<models::ModelList>), "Lists the served model (llama.cpp)."),
    operation("post", "/tokenize", Response::Json(schema::<tokens::Tokens>), "Tokenises a text or a chat."),
    operation("post", "/detokenize", Response::Json(schema::<tokens::Detokenized>), "The text of tokens."),
    operation("get", "/tokenizer_info", Response::Object, "Special tokens and chat template, as in vLLM."),
    operation(
        "post",
        "/completion",
        Response::Stream(schema::<llama_cpp::Completion>),
        "Continues prompts (llama.cpp).",
    ),
    operation(
        "post",
        "/completions",
        Response::Stream(schema::<llama_cpp::Completion>),
        "Continues prompts (llama.cpp).",
    ),
    operation(
        "post",
        "/apply-template",
        Response::Json(schema::<llama_cpp::Applied>),
        "The prompt of a chat (llama.cpp).",
    ),
    operation("get", "/props", Response::Json(schema::<llama_cpp::Props>), "The server's properties (llama.cpp)."),
    operation("get", "/slots", Response::Json(schema::<Vec<llama_cpp::Slot>>), "Places of the batch (llama.cpp)."),
    operation("get", "/health", Response::Object, "Whether requests are accepted."),
    operation("get", "/metrics", Response::Text, "Metrics in Prometheus' text format."),
    operation("get", "/version", Response::Object, "The program's version."),
    operation("get", "/openapi.json", Response::Object, "This description."),
];

/// What is translated to chat requests, with its own tables of fields: [`ENDPOINTS`].
const TRANSLATED: &[Operation] = &[
    operation("post", "/v1/messages", Response::Object, "Answers a chat (Anthropic)."),
    operation("post", "/v1/messages/count_tokens", Response::Object, "Tokens of a chat (Anthropic)."),
    operation("post", "/v1/responses", Response::Object, "Answers a chat, which is kept for the next one."),
    operation("get", "/v1/responses/{id}", Response::Object, "A kept answer."),
    operation("delete", "/v1/responses/{id}", Response::Object, "Drops a kept answer."),
];

/// `GET /openapi.json`.
pub(crate) async fn openapi() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut schemas = settings.into_generator();
    let error = schema::<error::Body<'static>>(&mut schemas);
    let mut paths = Map::new();
    for of in OPERATIONS.iter().chain(TRANSLATED) {
        let path = paths.entry(of.path).or_insert_with(|| json!({}));
        path[of.method] = describe(of, &error, &mut schemas);
    }
    let mut components: Map<String, Value> = schemas.take_definitions(true);
    for of in tables::BODIES {
        components.insert(request_name(of.path), request(of));
    }
    for (route, _) in ENDPOINTS {
        components.insert(request_name(route), translated(own_fields(route)));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Lagoon",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI-compatible inference, with vLLM's fields and llama.cpp's own endpoints.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } },
        },
        "security": [{ "key": [] }, {}],
    })
}

fn describe(of: &Operation, error: &schemars::Schema, schemas: &mut SchemaGenerator) -> Value {
    let content = match &of.response {
        Response::Json(schema) => json!({ "application/json": { "schema": schema(schemas) } }),
        Response::Stream(schema) => json!({
            "application/json": { "schema": schema(schemas) },
            "text/event-stream": { "schema": { "type": "string" } },
        }),
        Response::Object => json!({ "application/json": { "schema": { "type": "object" } } }),
        Response::Text => json!({ "text/plain": { "schema": { "type": "string" } } }),
    };
    let mut shown = json!({
        "summary": of.summary,
        "operationId": format!("{}{}", of.method, name(of.path)),
        "responses": {
            "200": { "description": "The answer.", "content": content },
            "default": {
                "description": "An error: `code` tells its kind.",
                "content": { "application/json": { "schema": error } },
            },
        },
    });
    if of.path.contains("{id}") {
        shown["parameters"] = json!([{ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }]);
    }
    if body(of.path).is_some() || ENDPOINTS.iter().any(|(route, _)| *route == of.path) {
        let schema = json!({ "$ref": format!("#/components/schemas/{}", request_name(of.path)) });
        shown["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    shown
}

/// A path as part of a name: `/v1/models` is `V1Models`.
fn name(path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

fn request_name(path: &str) -> String {
    format!("{}Request", name(path))
}

/// The schema of a route's requests. Every field may be null, which means the default.
fn request(of: &Body) -> Value {
    let mut properties = Map::new();
    for field in of.supported() {
        let mut schema = if of.required.contains(&field.name) { values(&field.of) } else { or_null(values(&field.of)) };
        schema["description"] = field.note.into();
        properties.entry(field.name).or_insert(schema);
    }
    for (name, neutral) in of.neutral() {
        properties.entry(name).or_insert_with(|| unsupported(neutral, ""));
    }
    json!({ "type": "object", "properties": properties, "required": of.required, "additionalProperties": false })
}

/// The fields of a translated request itself.
fn own_fields(route: &str) -> impl Iterator<Item = &'static Field> {
    let objects = ENDPOINTS.iter().filter(move |(known, _)| *known == route).flat_map(|(_, objects)| *objects);
    objects.filter(|(path, _)| path.is_empty()).flat_map(|(_, fields)| *fields)
}

/// The schema of a translated request.
fn translated(fields: impl Iterator<Item = &'static Field>) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for Field { name, support, note } in fields {
        let schema = match support {
            Support::Required | Support::Supported => json!({ "description": note }),
            Support::WithoutEffect => unsupported(Neutral::Any, note),
            Support::Refused(neutral) => unsupported(*neutral, note),
        };
        properties.insert((*name).to_owned(), schema);
        required.extend(matches!(support, Support::Required).then_some(*name));
    }
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

/// The schema of a field that changes no answer.
fn unsupported(neutral: Neutral, note: &str) -> Value {
    let mut schema = or_null(neutral_values(neutral));
    let what = match neutral {
        Neutral::Any => "Accepted without effect.",
        _ => "Not supported: only the value that changes nothing is accepted.",
    };
    schema["description"] = if note.is_empty() { what.into() } else { format!("{what} {note}").into() };
    schema
}

/// A schema that takes null, too.
fn or_null(mut schema: Value) -> Value {
    match schema.get("type").and_then(Value::as_str) {
        Some("null") => schema,
        Some(kind) if schema.get("enum").is_none() => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        // A schema without a rule takes all.
        None if schema == json!({}) => schema,
        _ => json!({ "anyOf": [schema, { "type": "null" }] }),
    }
}

fn values(of: &Of) -> Value {
    let id = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let list = |of: Value| json!({ "type": "array", "items": of });
    let text = json!({ "type": "string" });
    match of {
        Of::Bool => json!({ "type": "boolean" }),
        Of::Integer(low, high) => json!({ "type": "integer", "minimum": low, "maximum": high }),
        Of::Number(low, high) => json!({ "type": "number", "minimum": low, "maximum": high }),
        Of::Text => text,
        Of::Choice(of) => json!({ "type": "string", "enum": of }),
        Of::Texts => json!({ "anyOf": [text, list(text.clone())] }),
        Of::TextList => list(text),
        Of::Ids => list(id),
        Of::Object => json!({ "type": "object" }),
        Of::ObjectList => list(json!({ "type": "object" })),
        Of::Chats => list(list(json!({ "type": "object" }))),
        Of::Prompt => json!({ "anyOf": [text, list(text.clone()), list(id.clone()), list(list(id))] }),
        Of::Any => json!({}),
    }
}

fn neutral_values(neutral: Neutral) -> Value {
    match neutral {
        Neutral::Null => json!({ "type": "null" }),
        Neutral::Any => json!({}),
        Neutral::Number(number) => json!({ "const": number }),
        Neutral::Bool(flag) => json!({ "const": flag }),
        Neutral::Text(of) => json!({ "enum": of }),
        Neutral::Empty => json!({ "enum": ["", [], {}] }),
        Neutral::TextModality => json!({ "const": ["text"] }),
    }
}
