//! Writes one encoded frame of every kind to a directory: `cargo run -p lagoon-wire --example record -- DIR`.
//! Run it once when a protocol version is released, never to make a failing test pass.
#![allow(clippy::unwrap_used, reason = "a developer's tool: it stops at the first failure")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{env, fs, path::PathBuf};

fn main() {
    let dir = PathBuf::from(env::args().nth(1).expect("usage: record DIR"));
    fs::create_dir_all(&dir).unwrap();
    for (name, frame) in support::samples() {
        fs::write(dir.join(format!("{name}.bin")), lagoon_wire::encode(&frame).unwrap().to_vec()).unwrap();
    }
    let preface = lagoon_wire::encode_preface(&support::preface()).unwrap();
    fs::write(dir.join("preface.bin"), preface.to_vec()).unwrap();
}
