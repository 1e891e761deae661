//! Models that are written and read back: every family that has a table gives its directory's logits, a served model quantised gives
//! nearly its own, and what cannot be written leaves no file.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::print_stdout, reason = "measured differences, for --nocapture")]

use lagoon_backend::{CpuDevice, WeightFormat};
use lagoon_model::export::{Kind, Role};
use lagoon_model::gguf::{Gguf, vocabulary};
use lagoon_model::{Checkpoint, FAMILIES, GenerationConfig, ModelSpec, Weights};
use lagoon_quantize::{Importance, Options, QuantizeError, Source, Summary, Target, calibrate};
use lagoon_runner::{Decoder, Model};
use lagoon_text::{ChatTemplate, Tokenizer};
use lagoon_types::DType;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn goldens() -> PathBuf {
    root().join("tests/goldens")
}

/// A copy of a model's directory. A model without a tokenizer gets one of three tokens.
fn copy(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let tokenizer = dir.path().join("tokenizer.json");
    if !tokenizer.exists() {
        let model = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"});
        let pre = json!({"type": "Whitespace"});
        std::fs::write(tokenizer, json!({"version": "1.0", "model": model, "pre_tokenizer": pre}).to_string()).unwrap();
    }
    dir
}

fn change(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

fn options(target: Target) -> Options<'static> {
    Options { target, importance: None, threads: 2, force: false }
}

fn write(model: &Path, out: &Path, options: Options<'_>) -> Result<Summary, QuantizeError> {
    Source::open(model, "a name")?.write(out, options, &mut |_| true)
}

fn logits(path: &Path, tokens: &[u32]) -> Vec<f32> {
    let (spec, checkpoint) = (ModelSpec::open(path).unwrap(), Checkpoint::open(path).unwrap());
    let mut device = CpuDevice::with_threads(1);
    let weights = Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {}).unwrap();
    Decoder::new(&Model::new(&spec, weights)).plain_logits(&mut device, DType::F32, tokens).unwrap()
}

/// The root mean square of differences, as a share of the deviation of the expected logits.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let mean = expected.iter().map(|x| f64::from(*x)).sum::<f64>() / expected.len() as f64;
    let square = |a: f64, b: f64| (a - b) * (a - b);
    let errors: f64 = found.iter().zip(expected).map(|(a, b)| square(f64::from(*a), f64::from(*b))).sum();
    let spread: f64 = expected.iter().map(|x| square(f64::from(*x), mean)).sum();
    (errors / spread).sqrt()
}

/// Configurations that files of the architecture cannot express are changed to one that they can.
fn expressible(name: &str, config: &mut Value) {
    match name {
        // The window is the family's own, which Llama's files have no key for.
        "mistral_window" => config["sliding_window"] = Value::Null,
        "qwen2_window" => config["use_sliding_window"] = false.into(),
        // The scale of the largest models, by other numbers of layers.
        "gemma2" | "gemma3" => config["query_pre_attn_scalar"] = config["head_dim"].clone(),
        "smollm3" => drop(config.as_object_mut().unwrap().remove("no_rope_layers")),
        _ => {}
    }
}

/// Goldens that are not written, and why: what files of their architecture have no name or key for.
const REFUSED: &[(&str, &str)] = &[
    ("deepseek_v2", "latent attention"),
    ("deepseek_v2_groups", "latent attention"),
    ("deepseek_v3", "latent attention"),
    ("glm4_moe", "its layers (their parts, activation or experts)"),
    ("gpt_neox", "layer_norm_epsilon` is missing"),
    ("mpt_f16", "its biases by distance"),
    ("qwen3_moe", "its layers (their parts, activation or experts)"),
];

/// Matrices are rounded to f16 and everything else is as it was: logits differ by the former only, by far less than if a tensor, a
/// row or a key were at the wrong place.
#[test]
fn every_family_is_read_back() {
    let (mut written, mut refused) = (0, Vec::new());
    for family in FAMILIES.iter().filter(|family| family.gguf_architecture().is_some()) {
        for name in family.goldens {
            let dir = copy(&goldens().join(name));
            change(dir.path(), |config| expressible(name, config));
            let out = dir.path().join("out.gguf");
            if let Err(error) = write(dir.path(), &out, options(Target::F16)) {
                println!("{name}: {error}");
                refused.push((*name, error.to_string()));
                continue;
            }
            let tokens: Vec<u32> = (3..60).map(|i| i * 37 % 100).collect();
            let found = distance(&logits(&out, &tokens), &logits(dir.path(), &tokens));
            println!("{name}: {found:.6}");
            assert!(found < 5e-3, "{name}: {found}");
            written += 1;
        }
    }
    assert_eq!(refused.len(), REFUSED.len(), "{refused:?}");
    for ((name, error), (expected, why)) in refused.iter().zip(REFUSED) {
        assert!(name == expected && error.contains(why), "{expected}, {why}: {name}, {error}");
    }
    assert!(written >= 20, "{written}");
}

/// Rows of 256 columns: packed as asked for. Bounds are about twice what was measured.
#[test]
fn a_quantised_model_is_near_its_own() {
    let passkey = root().join("models/passkey");
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(passkey.join("document.txt")).unwrap();
    let tokenizer = Tokenizer::open(&passkey).unwrap();
    let tokens = tokenizer.encode(&text[..2000], true).unwrap();
    let expected = logits(&passkey, &tokens);
    let targets = [
        (Target::F16, 1e-6),
        (Target::Q8_0, 1e-2),
        (Target::Q6K, 3e-2),
        (Target::Q5K, 5e-2),
        (Target::Q4K, 1e-1),
        (Target::Q4_0, 1.3e-1),
        (Target::Mxfp4, 1.8e-1),
    ];
    for (target, bound) in targets {
        let out = dir.path().join(format!("{target:?}.gguf"));
        let summary = write(&passkey, &out, options(target)).unwrap();
        let found = distance(&logits(&out, &tokens), &expected);
        println!("{target:?}: logits {found:.5}, weights {:.5}, {:.2} bits", summary.relative_rms, summary.bits);
        assert!(found < bound, "{target:?}: {found}");
        let formats: Vec<WeightFormat> =
            Checkpoint::open(&out).unwrap().formats().into_iter().map(|(f, _)| f).collect();
        assert!(formats.contains(&target.format()), "{target:?}: {formats:?}");
        let (spec, own) = (ModelSpec::open(&out).unwrap(), ModelSpec::open(&passkey).unwrap());
        assert_eq!((spec.max_positions, spec.parameters()), (own.max_positions, own.parameters()));
    }
    let file = Gguf::open(&dir.path().join("Q4K.gguf")).unwrap();
    assert_eq!(file.metadata().text("general.name").unwrap(), Some("a name"));
    let vocabulary = vocabulary(file.metadata()).unwrap();
    let again = Tokenizer::from_gguf(&vocabulary).unwrap();
    for special in [false, true] {
        assert_eq!(again.encode(&text, special).unwrap(), tokenizer.encode(&text, special).unwrap());
    }
    let message = serde_json::from_str(r#"{"role": "user", "content": "hi"}"#).unwrap();
    let messages = [message];
    let rendered = |template: ChatTemplate| template.render(&messages, true, std::time::UNIX_EPOCH).unwrap();
    let own = ChatTemplate::open(&passkey).unwrap().unwrap();
    assert_eq!(rendered(ChatTemplate::from_gguf(&vocabulary).unwrap().unwrap()), rendered(own));
    let ends = |path: &Path| GenerationConfig::open(path, &ModelSpec::open(path).unwrap()).unwrap().eos_ids;
    assert_eq!(ends(&dir.path().join("Q4K.gguf")), ends(&passkey));
}

/// A file in f16 keeps its keys, its vocabulary and its vectors.
#[test]
fn a_file_is_quantised_as_a_directory_is() {
    let model = goldens().join("gguf/llama-f16.gguf");
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (3..90).map(|i| i * 37 % 500).collect();
    let expected = logits(&model, &tokens);
    for (target, bound) in [(Target::F16, 1e-6), (Target::Q8_0, 5e-2), (Target::Q4K, 5e-1)] {
        let out = dir.path().join(format!("{target:?}.gguf"));
        write(&model, &out, options(target)).unwrap();
        let found = distance(&logits(&out, &tokens), &expected);
        println!("{target:?}: {found:.6}");
        assert!(found < bound, "{target:?}: {found}");
        let of = |path: &Path| vocabulary(Gguf::open(path).unwrap().metadata()).unwrap();
        let (found, expected) = (of(&out), of(&model));
        assert_eq!((found.tokens, found.scores, found.kinds), (expected.tokens, expected.scores, expected.kinds));
        assert_eq!(found.chat_template, expected.chat_template);
    }
    let error = write(&dir.path().join("Q4K.gguf"), &dir.path().join("x.gguf"), options(Target::Q8_0)).unwrap_err();
    assert!(error.to_string().contains("hint: pass a model in F32, F16 or BF16"), "{error}");
}

/// Elements of a tensor.
fn elements(path: &Path, name: &str) -> (usize, Vec<f32>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let shape = checkpoint.info(name).unwrap().shape.clone();
    let (tensor, mut out) = (checkpoint.tensor(name, &shape).unwrap(), Vec::new());
    tensor.format.decode(&tensor.bytes, &mut out);
    (*shape.last().unwrap(), out)
}

/// The mean square error of a layer's down projection over rows whose columns have the squares of `importance`, as a share of the
/// products' own.
fn product_error(model: &Path, packed: &Path, layer: usize, importance: &Importance) -> f64 {
    let (cols, exact) = elements(model, &format!("model.layers.{layer}.mlp.down_proj.weight"));
    let (_, found) = elements(packed, &format!("blk.{layer}.ffn_down.weight"));
    let squares = importance.of(Role::Matrix { layer, kind: Kind::Down }, cols).unwrap();
    let (mut errors, mut all) = (0.0, 0.0);
    for (i, (exact, found)) in exact.iter().zip(&found).enumerate() {
        let (exact, found, square) = (f64::from(*exact), f64::from(*found), f64::from(squares[i % cols]));
        errors += square * (exact - found) * (exact - found);
        all += square * exact * exact;
    }
    errors / all
}

/// Weighed by a text, errors are smaller where that text has its energy.
#[test]
fn a_text_lessens_errors_of_products() {
    let passkey = root().join("models/passkey");
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&passkey, "passkey").unwrap();
    let mut steps = 0;
    let text = passkey.join("document.txt");
    let importance = calibrate(&source, &text, (4096, 2), &mut |done, all| {
        steps += 1;
        assert!(done <= all);
        true
    });
    let importance = importance.unwrap();
    assert_eq!((importance.tokens(), steps), (4096, 9));
    let measured = |name: &str, of: Option<&Importance>| {
        let out = dir.path().join(name);
        source.write(&out, Options { importance: of, ..options(Target::Q4K) }, &mut |_| true).unwrap();
        (0..4).map(|layer| product_error(&passkey, &out, layer, &importance)).sum::<f64>()
    };
    let (even, weighed) = (measured("even.gguf", None), measured("weighed.gguf", Some(&importance)));
    println!("errors of products: {even:.5} with equal weights, {weighed:.5} weighed");
    assert!(weighed < 0.99 * even, "{weighed} of {even}");
    let stopped = calibrate(&source, &text, (2048, 2), &mut |_, _| false).unwrap_err();
    assert!(matches!(stopped, QuantizeError::Stopped), "{stopped}");
    std::fs::write(dir.path().join("short.txt"), "a b c").unwrap();
    let short = calibrate(&source, &dir.path().join("short.txt"), (2048, 2), &mut |_, _| true).unwrap_err();
    assert!(short.to_string().contains("fewer than 64"), "{short}");
}

/// Files of a directory, hidden ones included.
fn listed(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn what_is_not_finished_leaves_no_file() {
    let passkey = root().join("models/passkey");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.gguf");
    let source = Source::open(&passkey, "passkey").unwrap();
    let mut left = 3;
    let stopped = source.write(&out, options(Target::Q8_0), &mut |progress| {
        assert!(progress.done <= progress.total);
        assert_eq!(listed(dir.path()).len(), 1, "a temporary file");
        left -= 1;
        left > 0
    });
    assert!(matches!(stopped, Err(QuantizeError::Stopped)));
    assert_eq!(listed(dir.path()), [""; 0]);
    std::fs::write(&out, "mine").unwrap();
    let error = write(&passkey, &out, options(Target::Q8_0)).unwrap_err();
    assert!(error.to_string().contains("hint: --force replaces it"), "{error}");
    // A file that appears meanwhile is not replaced either.
    std::fs::remove_file(&out).unwrap();
    let error = source.write(&out, options(Target::Q8_0), &mut |_| std::fs::write(&out, "mine").is_ok()).unwrap_err();
    assert!(matches!(error, QuantizeError::Exists { .. }), "{error}");
    assert_eq!((listed(dir.path()), std::fs::read(&out).unwrap()), (vec!["out.gguf".to_owned()], b"mine".to_vec()));
    write(&passkey, &out, Options { force: true, ..options(Target::Q8_0) }).unwrap();
    ModelSpec::open(&out).unwrap();
    let error = write(&passkey, &dir.path().join("out.bin"), options(Target::Q8_0)).unwrap_err();
    assert!(error.to_string().contains("must end in .gguf"), "{error}");
    assert_eq!(listed(dir.path()), ["out.gguf"]);
}

/// Replaces the first element of a tensor in f32.
fn damage(dir: &Path, tensor: &str, value: f32) {
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let head = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&bytes[8..8 + head]).unwrap();
    let start = usize::try_from(header[tensor]["data_offsets"][0].as_u64().unwrap()).unwrap();
    bytes[8 + head + start..][..4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    let error = |name: &str, of: &dyn Fn(&mut Value), value: Option<f32>| {
        let dir = copy(&goldens().join(name));
        change(dir.path(), of);
        if let Some(value) = value {
            damage(dir.path(), "model.layers.1.mlp.up_proj.weight", value);
        }
        let out = dir.path().join("out.gguf");
        let error = write(dir.path(), &out, options(Target::Q8_0)).unwrap_err().to_string();
        assert!(!listed(dir.path()).iter().any(|name| name.contains("gguf") || name.contains("partial")), "{error}");
        error
    };
    let as_it_is = |_: &mut Value| {};
    for (value, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let refused = error("llama2_mha", &as_it_is, Some(value));
        assert!(refused.contains("`blk.1.ffn_up.weight`") && refused.contains(shown), "{refused}");
    }
    let large = error("llama2_mha", &as_it_is, Some(1e9));
    assert!(large.contains("`blk.1.ffn_up.weight`") && large.contains("cannot hold"), "{large}");
    let family = error("kimi_k2", &as_it_is, None);
    assert!(
        family.contains("\"kimi_k2\"") && family.contains("hint: families that are:") && family.contains("llama"),
        "{family}"
    );
    let quantised = write(&goldens().join("quantised/awq"), &scratch.path().join("out.gguf"), options(Target::Q8_0));
    let quantised = quantised.unwrap_err().to_string();
    assert!(quantised.contains("hint: pass a model in F32, F16 or BF16"), "{quantised}");
    let dense = error("qwen3_moe", &as_it_is, None);
    assert!(dense.contains("architecture \"qwen3moe\""), "{dense}");
    let scale = error("gemma2", &|config| config["query_pre_attn_scalar"] = 5.into(), None);
    assert!(scale.contains("scale of attention"), "{scale}");
    let none = error("tied_sentencepiece", &|config| config["vocab_size"] = 300.into(), None);
    assert!(none.contains("300"), "{none}");
}
