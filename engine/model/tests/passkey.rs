//! The bundled model opens, and its identity does not depend on where it lies.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::{Checkpoint, GenerationConfig, ModelSpec, RopeScaling, RopeSpec, model_hash};
use lagoon_types::{AttentionGeometry, DType};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

fn passkey() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/passkey"))
}

#[test]
fn the_bundled_model_opens() {
    let config = ModelSpec::open(passkey()).unwrap();
    assert_eq!(config.family, "llama");
    assert_eq!(config.geometry, AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false });
    assert_eq!((config.hidden, config.widest(), config.layers.len(), config.vocab), (256, 2 * 512, 4, 1024));
    assert_eq!(config.ropes, [RopeSpec { theta: 1e8, scaling: RopeScaling::None, rotated: 64 }]);
    assert_eq!((config.window(), config.max_positions, config.dtype), (None, 65_536, Some(DType::F16)));
    assert!(config.head.is_none());
    assert_eq!(config.attention_scale, 0.125);

    let generation = GenerationConfig::open(passkey(), &config).unwrap();
    assert_eq!(generation.eos_ids, [1023]);
    assert_eq!((generation.bos_id, generation.do_sample), (Some(1022), Some(false)));

    let checkpoint = Checkpoint::open(passkey()).unwrap();
    assert_eq!(checkpoint.dtype(), Some(DType::F16));
    let stored: u64 = checkpoint.tensors().map(|(_, info)| info.len() as u64).sum();
    assert_eq!(stored, config.parameters() * 2);
}

#[test]
fn the_identity_is_the_same_elsewhere_and_differs_with_content() {
    let hash_of = |dir: &Path| {
        let config = ModelSpec::open(dir).unwrap();
        model_hash(&config, &Checkpoint::open(dir).unwrap(), None)
    };
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(passkey().join(file), copy.path().join(file)).unwrap();
    }
    let original = hash_of(passkey());
    assert_eq!(original, hash_of(copy.path()));

    let config = ModelSpec::open(passkey()).unwrap();
    let checkpoint = Checkpoint::open(passkey()).unwrap();
    assert_ne!(original, model_hash(&config, &checkpoint, Some(DType::F32)));

    let weights = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::remove_file(&weights).unwrap();
    std::fs::write(&weights, bytes).unwrap();
    assert_ne!(original, hash_of(copy.path()));

    let json = std::fs::read_to_string(passkey().join("config.json")).unwrap();
    let other = ModelSpec::parse(Path::new("config.json"), &json.replace("1e-05", "1e-06")).unwrap();
    assert_ne!(original, model_hash(&other, &checkpoint, None));
}

#[test]
fn the_content_of_large_files_is_sampled_as_documented() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let elements: u64 = 70 << 20;
    let header = format!(r#"{{"a":{{"dtype":"F16","shape":[{elements}],"data_offsets":[0,{}]}}}}"#, 2 * elements);
    let data_start = 8 + header.len() as u64;
    let config = ModelSpec::open(passkey()).unwrap();
    // A sparse file of 140 MiB of zeros but for one byte at `at` in its data.
    let hash = |at: u64| {
        let _ = std::fs::remove_file(&path);
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(data_start + 2 * elements).unwrap();
        file.seek(SeekFrom::Start(data_start + at)).unwrap();
        file.write_all(&[1]).unwrap();
        model_hash(&config, &Checkpoint::open(dir.path()).unwrap(), None)
    };
    let (mib, kib) = (1u64 << 20, 1u64 << 10);
    // Between samples: not seen.
    let unseen = hash(64 * kib);
    assert_eq!(unseen, hash(32 * mib));
    assert_eq!(unseen, hash(2 * elements - 64 * kib - 1));
    for seen in
        [0, 64 * kib - 1, 64 * mib, 64 * mib + 64 * kib - 1, 128 * mib, 2 * elements - 64 * kib, 2 * elements - 1]
    {
        assert_ne!(unseen, hash(seen), "{seen}");
    }
}
