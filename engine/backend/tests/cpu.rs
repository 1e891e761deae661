//! The host backend against the conformance suite, with every instruction set that this processor has.

#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_backend::conformance::Data;
use lagoon_backend::cpu::Isa;
use lagoon_backend::{CpuDevice, Device, Mode, WeightFormat};
use lagoon_types::DType;

fn device(isa: Isa) -> Result<CpuDevice, String> {
    CpuDevice::new().with_isa(isa).map_err(|e| e.to_string())
}

mod avx512_vnni {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx512Vnni));
}

mod avx512 {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx512));
    lagoon_backend::conformance_large_weight!(|| super::device(super::Isa::Avx512));
}

mod avx2 {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx2));
}

mod avx2_vnni {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx2Vnni));
}

mod portable {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Portable));
}

mod three_threads {
    lagoon_backend::conformance_suite!(|| Ok::<_, String>(super::CpuDevice::with_threads(3)));
    lagoon_backend::conformance_latent_wide!(|| Ok::<_, String>(super::CpuDevice::with_threads(3)));
}

mod batch_invariant {
    lagoon_backend::conformance_suite!(|| Ok::<_, String>(super::CpuDevice::with_threads(3).batch_invariant()));
}

/// A row's products are the same bits, whatever rows are computed with it, in every plain type and instruction set.
#[test]
fn a_row_of_an_invariant_product_is_the_same_alone() {
    let (rows, k, n) = (61, 333, 70);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut device = CpuDevice::with_threads(2).with_isa(isa).unwrap().batch_invariant();
            let mut data = Data::new(44);
            let (weight, _) = data.weight(&mut device, dtype, n, k);
            let (x, values) = data.tensor(&mut device, rows, k);
            let product = |device: &mut CpuDevice, x: &_, rows: usize| {
                let (mut out, mut got) = (device.tensor(rows, n).unwrap(), Vec::new());
                device.matmul(x, &weight, rows, Mode::Set, &mut out).unwrap();
                device.read(&out, 0..rows, 0..n, &mut got).unwrap();
                got.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let all = product(&mut device, &x, rows);
            for (first, count) in [(0, 1), (60, 1), (3, 2), (17, 3), (30, 25), (1, 60)] {
                let mut part = device.tensor(count, k).unwrap();
                device.write(&mut part, 0, &values[first * k..(first + count) * k]).unwrap();
                let part = product(&mut device, &part, count);
                assert_eq!(part, all[first * n..(first + count) * n], "{isa} {dtype:?}: {count} rows from {first}");
            }
        }
    }
}

/// An infinity or NaN of a row makes the row's products with packed weights no numbers, and no other row's.
#[test]
fn what_is_no_number_stays_none_beside_packed_weights() {
    let devices = Isa::ALL.into_iter().filter_map(|isa| device(isa).ok());
    let (rows, k, n) = (3, 512, 5);
    for mut device in devices {
        for format in WeightFormat::ALL.into_iter().filter(|format| format.plain().is_none()) {
            if !device.takes(format) {
                continue;
            }
            let mut data = Data::new(43);
            let (weight, _) = data.packed_weight(&mut device, format, (n, k));
            let (mut x, mut out) = (device.tensor(rows, k).unwrap(), device.tensor(rows, n).unwrap());
            for (at, poison) in [(0, f32::NAN), (k - 1, f32::NAN), (70, f32::INFINITY), (31, f32::NEG_INFINITY)] {
                let mut values = data.values(rows * k);
                values[k + at] = poison;
                // With an infinity, a NaN in the same lane of a later vector.
                if poison == f32::INFINITY {
                    values[k + at + 8..][..9].fill(f32::NAN);
                }
                device.write(&mut x, 0, &values).unwrap();
                device.matmul(&x, &weight, rows, Mode::Set, &mut out).unwrap();
                let mut got = Vec::new();
                device.read(&out, 0..rows, 0..n, &mut got).unwrap();
                for (i, value) in got.iter().enumerate() {
                    assert_eq!(value.is_finite(), i / n != 1, "{format}: {poison} at {at} gave {value} at {i}");
                }
            }
        }
    }
}
