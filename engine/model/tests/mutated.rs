//! Damaged configurations and indexes are errors, never panics: mutations of the goldens' files, from seeds.
//!
//! A sample runs with the other tests; `LAGOON_MUTATIONS=100000 cargo test -p lagoon-model --test mutated` runs more.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::{Checkpoint, ModelSpec, fuzz};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Mutations of each golden in an ordinary run.
const MUTATIONS: u64 = 400;

fn mutations() -> u64 {
    std::env::var("LAGOON_MUTATIONS").ok().map_or(MUTATIONS, |text| text.parse().unwrap())
}

fn goldens() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    dirs.retain(|dir| dir.join("config.json").exists());
    dirs.sort();
    dirs
}

/// A value that some field does not expect.
fn odd_value(rng: &mut SmallRng) -> Value {
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(3),
        json!(7),
        json!(1024),
        json!(65_536),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(0.5),
        json!(1e-300),
        json!(1e300),
        json!(""),
        json!("default"),
        json!("yarn"),
        json!([]),
        json!([0, 1, 2]),
        json!({}),
        json!({"rope_type": "yarn", "factor": 2.0}),
        json!({"rope_type": "linear", "factor": 1e-40}),
    ];
    values.choose(rng).unwrap().clone()
}

/// Changes, removes or moves fields of an object, or of one inside of it.
fn mutate(map: &mut Map<String, Value>, rng: &mut SmallRng) {
    let names: Vec<String> = map.keys().cloned().collect();
    let Some(name) = names.choose(rng) else { return };
    if let Some(Value::Object(inner)) = map.get_mut(name).filter(|_| rng.random_bool(0.7)) {
        return mutate(inner, rng);
    }
    match rng.random_range(0..4) {
        0 => drop(map.remove(name)),
        1 => {
            let other = map[names.choose(rng).unwrap()].clone();
            map.insert(name.clone(), other);
        }
        _ => drop(map.insert(name.clone(), odd_value(rng))),
    }
}

#[test]
fn damaged_configurations_are_errors() {
    let (mut good, mut bad) = (0, 0);
    for dir in goldens() {
        let whole: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        for seed in 0..mutations() {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut config = whole.as_object().unwrap().clone();
            (0..rng.random_range(1..4)).for_each(|_| mutate(&mut config, &mut rng));
            match fuzz::config(Value::Object(config).to_string().as_bytes()) {
                true => good += 1,
                false => bad += 1,
            }
        }
    }
    assert!(good > 100 && bad > 100, "{good} parsed, {bad} did not");
}

#[test]
fn damaged_text_is_an_error() {
    for dir in goldens() {
        let whole = std::fs::read(dir.join("config.json")).unwrap();
        for seed in 0..mutations() / 4 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut text = whole.clone();
            text.truncate(rng.random_range(0..text.len()));
            let at = rng.random_range(0..text.len().max(1));
            if let Some(byte) = text.get_mut(at) {
                *byte = rng.random();
            }
            let text = String::from_utf8_lossy(&text).into_owned();
            // Without its last line feed it is as good as before.
            if serde_json::from_str::<Value>(&text).is_ok() {
                continue;
            }
            assert!(ModelSpec::parse(Path::new("config.json"), &text).is_err(), "{text}");
        }
    }
}

/// The header of a safetensors file, and the index of shards.
#[test]
fn damaged_checkpoints_are_errors() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/sharded");
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&golden).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let index = dir.path().join("model.safetensors.index.json");
    let shard = dir.path().join("model-00002-of-00003.safetensors");
    let (whole_index, whole_shard) = (std::fs::read(&index).unwrap(), std::fs::read(&shard).unwrap());
    let mut refused = 0;
    for seed in 0..mutations() / 2 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut map: Value = serde_json::from_slice(&whole_index).unwrap();
        mutate(map.as_object_mut().unwrap(), &mut rng);
        std::fs::write(&index, map.to_string()).unwrap();
        refused += u64::from(Checkpoint::open(dir.path()).is_err());
        std::fs::write(&index, &whole_index).unwrap();

        // A new file each time: the old one may be mapped.
        let mut bytes = whole_shard.clone();
        let header = rng.random_range(0..600.min(bytes.len()));
        bytes[header] = rng.random();
        bytes.truncate(if rng.random_bool(0.3) { rng.random_range(0..bytes.len()) } else { bytes.len() });
        std::fs::remove_file(&shard).unwrap();
        std::fs::write(&shard, bytes).unwrap();
        refused += u64::from(Checkpoint::open(dir.path()).is_err());
        std::fs::remove_file(&shard).unwrap();
        std::fs::write(&shard, &whole_shard).unwrap();
    }
    assert!(refused > mutations() / 4, "{refused} of {} were refused", mutations());
    Checkpoint::open(dir.path()).unwrap();
}
