//! The pool's model: the bundled pass-key model, of whose ten digits two are spelt as the begin and the end of a tool call.
//!
//! It copies a pass key out of its prompt, wherever that is. So it can be asked for a call, too, which it copies like any
//! other key, and its chat template has tools, in Hermes's format. Weights are not changed.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Tokens that change their text: tests/clients/pool.py has the texts, too. Without spaces a text is spelt the same in the
/// vocabulary and in a prompt.
const RENAMED: [(&str, &str); 2] =
    [("8", r#""}}</tool_call>"#), ("9", r#"<tool_call>{"name":"open_gate","arguments":{"key":""#)];

/// The bundled model's template, with tools.
const TEMPLATE: &str = r#"{{ bos_token }}{% if tools %}{{ 'Tools:' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\nA call is written within <tool_call></tool_call>.\n' }}{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}{{ ' ' + (message.content or '') | trim }}{% for call in message.tool_calls or [] %}{{ '<tool_call>{"name":"' + call.function.name + '","arguments":' + (call.function.arguments | tojson | replace(': ', ':') | replace(', ', ',')) + '}</tool_call>' }}{% endfor %}{{ '\n' + eos_token }}{% else %}{{ message.content | trim }}{{ '\nAnswer:' if message.role == 'user' else '\n' }}{% endif %}{% endfor %}"#;

/// Writes the model of `source` with these changes to the new folder `dir`.
pub(super) fn write(source: &Path, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(source.join(name), dir.join(name)).with_context(|| format!("copy {name}"))?;
    }
    for (name, change) in
        [("tokenizer.json", rename as fn(&mut Value) -> Result<()>), ("tokenizer_config.json", retell)]
    {
        let text = std::fs::read(source.join(name)).with_context(|| format!("read {name}"))?;
        let mut value = serde_json::from_slice(&text).with_context(|| format!("parse {name}"))?;
        change(&mut value).context(name)?;
        std::fs::write(dir.join(name), value.to_string()).with_context(|| format!("write {name}"))?;
    }
    Ok(())
}

/// Renames the tokens in the vocabulary, and lists them as added ones, so that prompts' texts are found whole.
fn rename(tokenizer: &mut Value) -> Result<()> {
    let mut added = Vec::new();
    for (old, new) in RENAMED {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().context("a vocabulary")?;
        let id = vocab.remove(old).with_context(|| format!("no token {old:?}"))?;
        vocab.insert(new.to_owned(), id.clone());
        added.push(json!({
            "id": id, "content": new, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": false,
        }));
    }
    let list = tokenizer["added_tokens"].as_array_mut().context("added tokens")?;
    list.splice(0..0, added);
    Ok(())
}

fn retell(config: &mut Value) -> Result<()> {
    config["chat_template"] = TEMPLATE.into();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_know_the_texts() {
        let pool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/pool.py");
        let text = std::fs::read_to_string(pool).unwrap();
        for (_, new) in RENAMED {
            assert!(text.contains(&format!("'{new}'\n")), "{new}");
        }
    }

    #[test]
    fn two_tokens_are_renamed_and_added() {
        let mut tokenizer = json!({ "model": { "vocab": { "7": 1, "8": 2, "9": 3 } }, "added_tokens": [{ "id": 4 }] });
        rename(&mut tokenizer).unwrap();
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        assert_eq!((vocab.len(), &vocab["7"], &vocab[RENAMED[0].1]), (3, &json!(1), &json!(2)));
        let ids: Vec<u64> =
            tokenizer["added_tokens"].as_array().unwrap().iter().filter_map(|t| t["id"].as_u64()).collect();
        assert_eq!(ids, [2, 3, 4]);
        assert!(rename(&mut tokenizer).is_err(), "they are gone");
    }
}
