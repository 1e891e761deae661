//! Frames of released versions, as they were recorded then, still decode to what they meant.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use bytes::Bytes;
use lagoon_protocol::Control;
use lagoon_wire::{Class, Frame, FrameReader, encode, encode_preface};
use std::{collections::BTreeSet, fs, path::PathBuf};

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/v1")
}

#[test]
fn every_recorded_frame_decodes_to_its_sample() {
    let mut names = BTreeSet::from(["preface.bin".to_owned()]);
    for (name, frame) in support::samples() {
        let recorded = fs::read(dir().join(format!("{name}.bin"))).unwrap();
        let mut chunk = Bytes::from(recorded.clone());
        let decoded = FrameReader::new().next_frame(frame.class(), &mut chunk).unwrap().unwrap();
        assert_eq!(decoded, frame, "{name}");
        assert!(chunk.is_empty(), "{name}");
        // While version 1 is what this build writes, it writes the same bytes.
        assert_eq!(encode(&frame).unwrap().to_vec(), recorded, "{name}");
        names.insert(format!("{name}.bin"));
    }
    let on_disk: BTreeSet<_> =
        fs::read_dir(dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(on_disk, names);
}

/// Records the frames of new kinds; what was recorded stays as it is. Run it with `--ignored`, and look at the files.
#[test]
#[ignore = "writes files"]
fn record_frames_of_new_kinds() {
    for (name, frame) in support::samples() {
        let path = dir().join(format!("{name}.bin"));
        if !path.exists() {
            fs::write(path, encode(&frame).unwrap().to_vec()).unwrap();
        }
    }
}

#[test]
fn the_recorded_preface_decodes() {
    let recorded = fs::read(dir().join("preface.bin")).unwrap();
    let mut chunk = Bytes::from(recorded.clone());
    assert_eq!(FrameReader::new().next_preface(&mut chunk).unwrap().unwrap(), support::preface());
    assert_eq!(encode_preface(&support::preface()).unwrap().to_vec(), recorded);
}

#[test]
fn a_control_message_of_the_future_is_skipped_and_reported() {
    // Tag 1000, a message with one varint: 1000 << 3 | 2 as a varint is c2 3e.
    let body = [0xc2u8, 0x3e, 0x02, 0x08, 0x01];
    let mut bytes = b"LGON\x01\x01\x01\x00\x05\x00\x00\x00\x00\x00\x00\x00".to_vec();
    bytes.extend_from_slice(&body);
    let decoded = FrameReader::new().next_frame(Class::Control, &mut bytes.into()).unwrap().unwrap();
    assert_eq!(decoded, Frame::Control(Control { body: None }));
}

#[test]
fn an_unknown_field_of_a_known_message_is_skipped() {
    // Deregister { instance: 3 } (tag 8) with an additional field 15.
    let body = [0x42u8, 0x04, 0x08, 0x03, 0x78, 0x07];
    let mut bytes = b"LGON\x01\x01\x01\x00\x06\x00\x00\x00\x00\x00\x00\x00".to_vec();
    bytes.extend_from_slice(&body);
    let decoded = FrameReader::new().next_frame(Class::Control, &mut bytes.into()).unwrap().unwrap();
    let deregister = lagoon_protocol::Deregister { instance: 3 };
    assert_eq!(decoded, Frame::from(lagoon_protocol::ControlBody::Deregister(deregister)));
}
