//! The command line: the demo, help texts, and errors that name the problem and the remedy.

use crate::process_up::golden_prompt;
use lagoon_tests::process::run;
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

#[test]
fn the_demo_agrees_with_one_instance() {
    let demo = run(&["demo", "--json", "--backend", "cpu"]);
    assert_eq!(demo.code, Some(0), "{demo:?}");
    let answer: Value = serde_json::from_str(&demo.stdout).unwrap();
    for flag in ["ok", "tokens_equal"] {
        assert_eq!(answer[flag], true, "{flag}: {answer}");
    }
    assert_eq!((&answer["backend"], &answer["answer"]), (&"cpu".into(), &answer["expected"]));
    let number = |field: &str| answer[field].as_f64().unwrap_or_else(|| panic!("{field}: {answer}"));
    assert!(number("instances") == 3.0 && number("prompt_tokens") > 2.0 * number("kv_tokens_per_instance"), "{answer}");
    assert!(number("remote_rblocks") * 32.0 >= number("prompt_tokens") - number("kv_tokens_per_instance"), "{answer}");
    for field in ["wire_bytes", "tokens_per_s", "logit_std"] {
        assert!(number(field) > 0.0, "{field}: {answer}");
    }
    // The stated tolerance is 0.5 % of the logits' spread; f32 partials lose nothing.
    assert!(number("max_abs_logit_diff") <= 0.005 * number("logit_std"), "{answer}");
}

#[test]
fn helps_name_every_command_and_flag() {
    let help = run(&["--help"]);
    assert_eq!(help.code, Some(0));
    let commands = [
        "demo",
        "up",
        "serve",
        "gmanager",
        "gateway",
        "chat",
        "bench",
        "status",
        "drain",
        "role",
        "kv",
        "pull",
        "quantize",
        "certs",
        "doctor",
        "completions",
        "man",
    ];
    for command in commands {
        assert!(help.stdout.lines().any(|l| l.trim_start().starts_with(command)), "{command}: {}", help.stdout);
        let own = run(&[command, "--help"]);
        assert_eq!(own.code, Some(0));
        let hidden = own.stdout.lines().find(|line| line.trim_start().starts_with("--exit-with-stdin"));
        assert_eq!(hidden, None, "{command} shows what is for its parent only");
    }
    let flags: [(&str, &[&str]); 4] = [
        ("demo", &["--backend", "--instances", "--kv-tokens", "--json"]),
        ("up", &["--instances", "--kv-tokens", "--port", "--backend", "--dtype", "--api-key"]),
        ("serve", &["--gmanager", "--role", "--http", "--quic", "--tls-ca", "--model-hash"]),
        ("gmanager", &["--listen", "--advertise", "--tls-ca"]),
    ];
    for (command, flags) in flags {
        let own = run(&[command, "--help"]).stdout;
        for flag in flags {
            assert!(own.contains(flag), "{command} {flag}: {own}");
        }
    }
}

#[test]
fn the_doctor_looks_at_everything() {
    let doctor = run(&["doctor", "--json"]);
    assert_eq!(doctor.code, Some(0), "{doctor:?}");
    let found: Value = serde_json::from_str(&doctor.stdout).unwrap();
    let checks = found["checks"].as_array().unwrap();
    for name in ["version", "cpu", "cuda", "wgpu", "udp", "gso", "ports", "quic"] {
        let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}: {found}"));
        assert!(check["ok"].is_boolean() && check["finding"].is_string(), "{check}");
    }
    assert!(!doctor.stderr.contains("XDG_RUNTIME_DIR"), "{}", doctor.stderr);
}

/// Sizes and contexts of a model, with and without windowed KV kept apart, none longer than config.json allows.
#[test]
fn the_doctor_says_how_long_a_context_fits() {
    let golden = |name: &str| lagoon_tests::root().join("tests/goldens").join(name).to_string_lossy().into_owned();
    let hybrid = golden("gemma3");
    let json = run(&["doctor", &hybrid, "--memory-gib=1", "--json"]);
    assert_eq!(json.code, Some(0), "{json:?}");
    let size: Value = serde_json::from_str(&json.stdout).unwrap();
    let contexts = size["contexts"].as_array().unwrap();
    assert_eq!(contexts.len(), 4, "{size}");
    let of = |at: &Value| (at["kv_tokens"].as_u64().unwrap(), at["context_tokens"].as_u64().unwrap());
    for context in contexts {
        let (whole, split) = (of(context), of(&context["split"]));
        // One layer of three is pooled, and rings take little of a GiB; config.json allows 256 tokens.
        assert!(split.0 > 2 * whole.0 && split.0 < 3 * whole.0, "{context}");
        assert_eq!((whole.1, split.1), (256, 256), "{context}");
    }
    let text = run(&["doctor", &hybrid, "--memory-gib=1"]);
    assert_eq!(text.code, Some(0), "{text:?}");
    let (whole, split) = (of(&contexts[0]), of(&contexts[0]["split"]));
    assert!(text.stdout.contains(&format!("{} tokens of KV, a context of {}", whole.0, whole.1)), "{text:?}");
    assert!(text.stdout.contains(&format!("{} and {} with --kv-groups=on", split.0, split.1)), "{text:?}");
    let plain = run(&["doctor", &golden("qwen3"), "--memory-gib=1"]);
    assert!(plain.code == Some(0) && !plain.stdout.contains("--kv-groups"), "{plain:?}");
}

/// A copy of a golden model, to be damaged.
fn copy_of_model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(Path::new(&golden_prompt().0).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

/// Asserts that `serve` ends with an error that contains all of `words`.
fn refused(model: &Path, extra: &[&str], words: &[&str]) {
    let model = model.to_string_lossy();
    let ended = run(&[&["serve", &model, "--backend=cpu", "--http=127.0.0.1:0"], extra].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("error: "), "{ended:?}");
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} in {}", ended.stderr);
    }
}

fn edit_config(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn what_cannot_be_served_is_named() {
    refused(Path::new("/no/such/model"), &[], &["/no/such/model", "hint:"]);
    let whole = copy_of_model();
    refused(whole.path(), &["--kv-tokens=4"], &["--kv-tokens 4", "32", "hint:"]);
    refused(
        whole.path(),
        &["--max-model-len=2000000"],
        &["a context of 2000000 tokens", "hint: lower --max-model-len"],
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let http = format!("--http={}", taken.local_addr().unwrap());
    let ended = run(&["serve", &whole.path().to_string_lossy(), "--backend=cpu", &http]);
    assert!(ended.code == Some(1) && ended.stderr.contains("hint:") && ended.stderr.contains("--http"), "{ended:?}");

    let file = |dir: &TempDir| dir.path().join("model.safetensors");
    let bytes = std::fs::read(file(&whole)).unwrap();
    let cut = copy_of_model();
    std::fs::write(file(&cut), &bytes[..bytes.len() - 100]).unwrap();
    refused(cut.path(), &[], &["model.safetensors", "truncated or corrupt"]);
    std::fs::write(file(&cut), [0xff; 64]).unwrap();
    refused(cut.path(), &[], &["model.safetensors", "truncated or corrupt"]);
    std::fs::remove_file(file(&cut)).unwrap();
    refused(cut.path(), &[], &["safetensors", "hint:"]);

    let config = copy_of_model();
    edit_config(&config, |c| c["hidden_act"] = "gelu".into());
    refused(config.path(), &[], &["hidden_act", "gelu", "hint:"]);
    let config = copy_of_model();
    edit_config(&config, |c| drop(c.as_object_mut().unwrap().remove("hidden_size")));
    refused(config.path(), &[], &["hidden_size", "missing", "hint:"]);
    let config = copy_of_model();
    edit_config(&config, |c| c["num_hidden_layers"] = 3.into());
    refused(config.path(), &[], &["model.layers.2"]);
    let text = copy_of_model();
    std::fs::remove_file(text.path().join("tokenizer.json")).unwrap();
    refused(text.path(), &[], &["tokenizer.json", "hint:"]);
}
