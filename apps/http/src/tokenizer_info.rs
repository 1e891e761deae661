//! `GET /tokenizer_info`, as far as clients read vLLM's: lm-eval tokenises at a server that has it.

use crate::state::ServerState;
use axum::{Json, extract::State};
use lagoon_text::ChatTemplate;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The special tokens by their names in templates, and the chat template.
pub(crate) async fn tokenizer_info(State(state): State<Arc<ServerState>>) -> Json<Map<String, Value>> {
    let template = state.template.as_deref();
    let special = template.map_or(&[][..], ChatTemplate::special_tokens);
    let mut info: Map<String, Value> =
        special.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str()))).collect();
    let end = state.defaults.eos_ids.first().and_then(|id| state.tokenizer.token(*id));
    info.entry("eos_token").or_insert_with(|| end.into());
    info.insert("chat_template".to_owned(), template.map(ChatTemplate::text).into());
    Json(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{ScriptedEngine, state};
    use serde_json::json;

    #[tokio::test]
    async fn the_tokenizer_is_described_with_and_without_a_template() {
        let whole = state(ScriptedEngine::saying("ok"));
        let bare = ServerState { template: None, ..whole.clone() };
        let Json(info) = tokenizer_info(State(Arc::new(whole))).await;
        assert_eq!((&info["eos_token"], info.get("bos_token")), (&json!("<eos>"), None));
        assert!(info["chat_template"].as_str().is_some_and(|text| text.contains("messages")), "{info:?}");
        let Json(info) = tokenizer_info(State(Arc::new(bare))).await;
        assert_eq!(Value::Object(info), json!({ "eos_token": "<eos>", "chat_template": null }));
    }
}
