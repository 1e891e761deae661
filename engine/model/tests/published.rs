//! Configurations with the fields of published models (`configs/`, with the factors of LongRoPE made up): none is refused for a
//! field that changes nothing, and a field that no family knows is.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::{FAMILIES, ModelError, ModelSpec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn parse(config: &Value) -> Result<ModelSpec, ModelError> {
    ModelSpec::parse(Path::new("dir/config.json"), &config.to_string())
}

/// Names and configurations without `quantization_config`, for which some are refused.
fn published() -> Vec<(String, Value)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        if config.get("quantization_config").is_some() {
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains("the field `quantization_config` is"), "{error}");
            config.as_object_mut().unwrap().remove("quantization_config");
        }
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), config)
    };
    files.into_iter().map(read).collect()
}

#[test]
fn published_configurations_are_read() {
    let mut families = BTreeSet::new();
    for (name, config) in published() {
        let spec = parse(&config).unwrap_or_else(|error| panic!("{name}: {error}"));
        let layers = ["num_hidden_layers", "n_layer", "n_layers"].iter().find_map(|field| config[field].as_u64());
        assert_eq!((spec.family, spec.layers.len() as u64), (config["model_type"].as_str().unwrap(), layers.unwrap()));
        families.insert(spec.family);
    }
    let missing: Vec<_> = FAMILIES.iter().filter(|family| !families.contains(family.model_type)).collect();
    assert!(missing.is_empty(), "{missing:?} have no configuration here");
}

#[test]
fn fields_that_nothing_knows_are_refused_by_name() {
    for (name, config) in published() {
        for value in [json!(true), json!(0), json!({"inner": 1})] {
            let mut other = config.clone();
            other["residual_multiplier"] = Value::Null;
            parse(&other).unwrap();
            other["residual_multiplier"] = value.clone();
            let error = parse(&other).unwrap_err();
            assert!(matches!(error, ModelError::Unsupported { .. }), "{name}: {error}");
            let expected =
                format!("dir/config.json: the field `residual_multiplier` is {value}, which Lagoon does not");
            let family = format!("of {:?} models", config["model_type"].as_str().unwrap());
            assert!(error.to_string().starts_with(&expected) && error.to_string().contains(&family), "{error}");
        }
        for object in ["rope_scaling", "attn_config"] {
            if config[object].is_object() {
                let mut other = config.clone();
                other[object]["unknown_field"] = json!(1.5);
                let error = parse(&other).unwrap_err().to_string();
                assert!(
                    error.contains(&format!("the field `{object}.unknown_field` is 1.5, which Lagoon does not")),
                    "{error}"
                );
            }
        }
    }
}
