//! Configurations with the fields of published models (`configs/`, with the factors of LongRoPE made up): none is refused for a
//! field that changes nothing, and a field that no family knows is.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::{FAMILIES, ModelError, ModelSpec, Rope};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn parse(config: &Value) -> Result<ModelSpec, ModelError> {
    ModelSpec::parse(Path::new("dir/config.json"), &config.to_string())
}

/// Names and configurations.
fn published() -> Vec<(String, Value)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
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

/// The kinds of rotary scaling of transformers 5, older names, and one that nobody has; `half` is the number of frequencies. The
/// last element tells whether Lagoon computes the kind.
fn rotary_kinds(half: usize) -> [(Value, bool); 12] {
    let original = json!(64);
    [
        (json!({"rope_type": "default"}), true),
        (json!({"rope_type": "linear", "factor": 2.0}), true),
        (json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": original}), true),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original}),
            true,
        ),
        (
            json!({"rope_type": "longrope", "short_factor": vec![1.5; half], "long_factor": vec![2.5; half],
                "original_max_position_embeddings": original}),
            true,
        ),
        (
            json!({"type": "su", "short_factor": vec![1.5; half], "long_factor": vec![2.5; half],
                "original_max_position_embeddings": original}),
            true,
        ),
        (json!({"rope_type": "dynamic", "factor": 2.0}), false),
        (json!({"rope_type": "dynamic", "alpha": 1000.0}), false),
        (json!({"rope_type": "proportional", "factor": 2.0}), false),
        (json!({"type": "mrope", "mrope_section": [16, 24, 24]}), false),
        (json!({"rope_type": "ntk", "factor": 2.0}), false),
        (json!({"rope_type": ""}), false),
    ]
}

#[test]
fn every_kind_of_rotary_scaling_is_computed_or_refused_by_name() {
    let (mut computed, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for (name, config) in published() {
        let mut plain = config.clone();
        plain.as_object_mut().unwrap().retain(|field, _| field != "rope_scaling" && field != "rope_parameters");
        let of = |scaling: &Value| {
            let mut config = plain.clone();
            config["rope_scaling"] = scaling.clone();
            parse(&config)
        };
        let Ok(unscaled) = of(&json!({"rope_type": "default"})) else {
            let error = of(&json!({"rope_type": "default"})).unwrap_err().to_string();
            assert!(error.contains("the field `rope_scaling` is {\"rope_type\":\"default\"}"), "{name}: {error}");
            refused.insert(config["model_type"].as_str().unwrap().to_owned());
            continue;
        };
        let rotated = unscaled.ropes[0].rotated;
        let table = |spec: &ModelSpec| Rope::new(&spec.ropes[0], spec.rope_dim());
        for (scaling, is_computed) in rotary_kinds(rotated / 2) {
            let field = if scaling["type"].is_null() { "rope_type" } else { "type" };
            let kind = &scaling[field];
            match of(&scaling) {
                Ok(spec) => {
                    assert!(is_computed, "{name} takes {scaling}");
                    assert_eq!(table(&spec) == table(&unscaled), kind == "default", "{name}: {kind}");
                    computed.insert((spec.family, kind.as_str().unwrap().to_owned()));
                }
                Err(error) => {
                    assert!(matches!(error, ModelError::Unsupported { .. }), "{name}: {error}");
                    let text = error.to_string();
                    // Phi-3 has LongRoPE only, and says so of the whole object.
                    let by_kind = text.contains(&format!("the field `rope_scaling.{field}` is {kind}, which Lagoon"));
                    let by_object = is_computed && text.contains("this family has \"longrope\" only");
                    assert!(by_kind || by_object, "{name}, {kind}: {text}");
                }
            }
        }
    }
    // All families compute six kinds, but for those that rotate nothing, and for Phi-3.
    assert_eq!(computed.len(), (FAMILIES.len() - 4) * 6 + 3, "{computed:?}");
    assert_eq!(refused.into_iter().collect::<Vec<_>>(), ["bloom", "gpt2", "mpt"], "these rotate nothing");
}

#[test]
fn a_field_that_a_kind_of_rotary_scaling_does_not_have_is_refused_by_name() {
    let (_, llama) = published().into_iter().find(|(name, _)| name == "SmolLM2-135M").unwrap();
    for (kind, field) in
        [("default", "factor"), ("linear", "beta_fast"), ("yarn", "low_freq_factor"), ("llama3", "mscale")]
    {
        let (mut scaling, _) = rotary_kinds(32).into_iter().find(|(scaling, _)| scaling["rope_type"] == kind).unwrap();
        scaling[field] = json!(1.5);
        let mut config = llama.clone();
        (config["rope_scaling"], config["rope_parameters"]) = (scaling, Value::Null);
        let text = parse(&config).unwrap_err().to_string();
        assert!(
            text.contains(&format!("the field `rope_scaling.{field}` is 1.5, which Lagoon does not")),
            "{kind}: {text}"
        );
    }
}
