//! Tensors and KV stores return the written bytes.

use super::Tolerance;
use super::data::{Data, read};
use crate::{Device, KvPiece, Queued};
use lagoon_types::{KvDType, KvShape};

/// Tensors start zeroed; writes cover whole rows; reads append any rectangle.
pub fn tensors_round_trip<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(1);
    for (rows, cols) in [(1, 1), (3, 40), (17, 172), (65, 5)] {
        let mut tensor = device.tensor(rows, cols).expect("tensor");
        assert!(read(device, &tensor, rows, cols).iter().all(|v| *v == 0.0), "tensors start zeroed");
        let mut want = data.values(rows * cols);
        device.write(&mut tensor, 0, &want).expect("write");
        let last = data.values(cols);
        device.write(&mut tensor, rows - 1, &last).expect("write of the last row");
        want[(rows - 1) * cols..].copy_from_slice(&last);
        assert_eq!(read(device, &tensor, rows, cols), want);
        let mut out = vec![7.0];
        device.read(&tensor, rows / 2..rows, cols / 2..cols, &mut out).expect("read of a rectangle");
        let part: Vec<f32> = want.chunks_exact(cols).skip(rows / 2).flat_map(|r| &r[cols / 2..]).copied().collect();
        assert_eq!(out[0], 7.0, "reads append");
        assert_eq!(out[1..], part);
    }
}

/// A staged read returns the bytes of a plain read, whole or in part, also with other work queued in between. A device
/// without a queue does the plain read.
pub fn reads_ahead_are_reads<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(7);
    for (rows, cols) in [(1, 1), (3, 40), (17, 172)] {
        let mut tensors = [device.tensor(rows, cols).expect("tensor"), device.tensor(rows, cols).expect("tensor")];
        let values = [data.values(rows * cols), data.values(rows * cols)];
        for (at, (tensor, values)) in tensors.iter_mut().zip(&values).enumerate() {
            device.write(tensor, 0, values).expect("write");
            if let Some(queue) = device.queued() {
                queue.read_ahead(at, tensor, rows / 2..rows, cols / 2..cols).expect("read_ahead");
            }
        }
        for at in [1, 0] {
            let (rows, cols, mut out) = (rows / 2..rows, cols / 2..cols, vec![7.0]);
            if let Some(queue) = device.queued() {
                while queue.reached(at).expect("reached").is_some() {}
                queue.read_staged(at, &tensors[at], rows.clone(), cols.clone(), &mut out).expect("read_staged");
            } else {
                device.read(&tensors[at], rows.clone(), cols.clone(), &mut out).expect("read");
            }
            let part = values[at].chunks_exact(cols.end).skip(rows.start).flat_map(|r| &r[cols.start..]);
            assert_eq!(out[0], 7.0, "reads append");
            assert_eq!(out[1..], part.copied().collect::<Vec<f32>>());
        }
    }
}

/// KV round trips exactly, slots start zeroed, and neighbours and other layers are untouched.
pub fn kv_bytes_round_trip<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(2);
    for dtype in KvDType::ALL {
        for (kv_heads, head_dim) in [(1, 40), (4, 64), (2, 6)] {
            let shape = KvShape { layers: 3, kv_heads, head_dim, dtype };
            let (slots, token) = (37u32, shape.layer_token_bytes());
            let mut kv = device.kv(shape, slots as usize).expect("kv");
            assert_eq!(device.kv_shape(&kv), shape);
            let (bytes, _) = data.stored_kv(shape, 5);
            device.kv_write(&mut kv, 1, 11, &bytes).expect("kv_write");
            let (odd, _) = data.stored_kv(shape, 1);
            device.kv_write(&mut kv, 1, slots - 1, &odd).expect("kv_write of the last slot");
            let mut want = vec![0; slots as usize * token];
            want[11 * token..16 * token].copy_from_slice(&bytes);
            want[(slots as usize - 1) * token..].copy_from_slice(&odd);
            let mut got = vec![9];
            device.kv_read(&kv, 1, 0, slots, &mut got).expect("kv_read");
            assert_eq!(got[0], 9, "reads append");
            assert_eq!(got[1..], want, "{shape:?}");
            let pieces = [(1, slots - 1, 1), (0, 5, 2), (1, 9, 4), (1, 13, 4)];
            let pieces = pieces.map(|(layer, slot0, tokens)| KvPiece { layer, slot0, tokens });
            let mut together = vec![9];
            device.kv_read_pieces(&kv, &pieces, &mut together).expect("kv_read_pieces");
            got.truncate(1);
            for KvPiece { layer, slot0, tokens } in pieces {
                device.kv_read(&kv, layer as usize, slot0, tokens, &mut got).expect("kv_read of a piece");
            }
            assert!(together == got && got.len() == 1 + 11 * token, "pieces one behind the other, appended");
            for layer in [0, 2] {
                got.clear();
                device.kv_read(&kv, layer, 3, 20, &mut got).expect("kv_read");
                assert!(got.len() == 20 * token && got.iter().all(|b| *b == 0), "layer {layer} is untouched");
            }
        }
    }
}
