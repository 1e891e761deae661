//! Packed formats against the elements that the Python package gguf gives for the same blocks (tools/gguf/vectors.py), and FP8
//! and INT4 against NumPy (tools/quantised/vectors.py).
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_backend::WeightFormat;
use lagoon_backend::formats::BLOCK_ELEMENTS_MAX;
use lagoon_types::DType;
use std::path::Path;

/// The packed bytes and the elements of a format's file.
fn vector(format: WeightFormat) -> (Vec<u8>, Vec<f32>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats");
    let bytes = std::fs::read(dir.join(format!("{format}.bin"))).unwrap();
    let (len, rest) = bytes.split_first_chunk::<4>().unwrap();
    let (packed, elements) = rest.split_at(u32::from_le_bytes(*len).try_into().unwrap());
    let mut expected = Vec::new();
    DType::F32.decode(elements, &mut expected);
    (packed.to_vec(), expected)
}

fn packed() -> impl Iterator<Item = WeightFormat> {
    WeightFormat::ALL.into_iter().filter(|format| format.plain().is_none())
}

#[test]
fn packed_elements_are_those_of_the_reference() {
    for format in packed() {
        let (blocks, expected) = vector(format);
        assert_eq!(format.bytes(expected.len()), Some(blocks.len()), "{format}");
        assert!(expected.len() >= 3 * format.block().elements, "{format}");
        let mut found = vec![7.0];
        format.decode(&blocks, &mut found);
        assert_eq!(found[0], 7.0, "elements are appended");
        for (i, (a, b)) in found[1..].iter().zip(&expected).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{format}, element {i}: {a} and {b}");
        }
        assert_eq!(found.len(), expected.len() + 1, "{format}");
    }
}

/// Whether rounding to `dtype` changes no element of the format's blocks.
fn is_exact(format: WeightFormat, dtype: DType) -> bool {
    let (blocks, _) = vector(format);
    let (mut elements, mut bytes, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
    // Not the block whose scale is below the least normal number.
    format.decode(&blocks[format.block().bytes..], &mut elements);
    dtype.encode(&elements, &mut bytes);
    dtype.decode(&bytes, &mut rounded);
    elements == rounded
}

#[test]
fn exactness_is_what_it_says() {
    for format in packed() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert_eq!(format.is_exact_in(dtype), is_exact(format, dtype), "{format} in {dtype}");
        }
    }
    assert!(WeightFormat::F16.is_exact_in(DType::F16) && !WeightFormat::F16.is_exact_in(DType::BF16));
}

#[test]
fn plain_formats_are_element_types() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let format = WeightFormat::from(dtype);
        assert_eq!((format.plain(), format.bytes(3)), (Some(dtype), Some(3 * dtype.size())));
        let (mut bytes, mut found) = (Vec::new(), Vec::new());
        dtype.encode(&[1.5, -2.0], &mut bytes);
        format.decode(&bytes, &mut found);
        assert_eq!(found, [1.5, -2.0]);
    }
}

#[test]
fn sizes_are_whole_blocks() {
    for format in WeightFormat::ALL {
        let block = format.block();
        assert!(block.elements <= BLOCK_ELEMENTS_MAX && BLOCK_ELEMENTS_MAX.is_multiple_of(block.elements));
        assert_eq!(format.bytes(2 * block.elements), Some(2 * block.bytes));
        if block.elements > 1 {
            assert_eq!(format.bytes(block.elements + 1), None, "{format}");
        }
        let most = usize::MAX / block.elements * block.elements;
        assert_eq!(format.bytes(most).is_some(), block.bytes <= block.elements, "{format}");
    }
}
