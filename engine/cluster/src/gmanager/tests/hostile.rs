//! What instances may say of themselves, and what counts of it.

use super::*;
use crate::perf::Rates;
use lagoon_protocol::{BatchPoint, Calibration, Load};

/// Refused already as the first instance of a pool, where no other one's shape is compared.
#[test]
fn sizes_that_nothing_has_are_refused() {
    let refused = |change: fn(&mut Register), expected: &str| {
        let mut m = register(1);
        change(&mut m);
        let text = reason(GManager::default().on_register(&m, 0));
        assert!(text.contains(expected), "{text:?} should say {expected:?}");
    };
    refused(|m| m.shape.as_mut().unwrap().layers = u32::MAX, "layers is 4294967295: at most");
    refused(|m| m.shape.as_mut().unwrap().heads = 1 << 20, "heads is 1048576: at most");
    refused(|m| m.shape.as_mut().unwrap().head_dim = 1 << 20, "head_dim is 1048576: at most");
    refused(|m| m.blocks_total = u32::MAX, "exceed 32-bit slots");
    refused(|m| m.name = "n".repeat(1 << 20), "name has 1048576 bytes");
    refused(|m| m.http_addr = "n".repeat(257), "http_addr has 257 bytes");
    refused(|m| m.backend = "n".repeat(257), "backend has 257 bytes");
    let points = |n| (1..=n).map(|batch| BatchPoint { batch, step_us: 1.0 }).collect();
    let calibration = Calibration { batches: points(257), attention_us_per_ktoken: 1.0, ..Calibration::default() };
    assert!(Rates::new(&calibration, true).is_none());
    let text = reason(
        GManager::default().on_register(&Register { calibration: Some(Box::new(calibration)), ..register(1) }, 0),
    );
    assert!(text.contains("a calibration of 257 points"), "{text:?}");
    let calibration = Calibration { batches: points(256), attention_us_per_ktoken: 1.0, ..Calibration::default() };
    assert!(Rates::new(&calibration, true).is_some());
}

#[test]
fn a_debtor_counts_once_and_a_load_is_one_that_can_be() {
    let mut gm = pool(&[10, 10]);
    let debt = |blocks| Debt { debtor: 1, blocks };
    let load = Load { batch: u32::MAX, batch_max: u32::MAX, queue_blocks: vec![u32::MAX; 1_000], ..Load::default() };
    let m = Heartbeat { lent: vec![debt(u32::MAX), debt(u32::MAX), debt(3)], load: Some(load), ..heartbeat(2, 2, 10) };
    assert!(gm.on_heartbeat(&m, 0).known);
    assert_eq!(gm.ledger().len(), 1);
    let load = &gm.pool().instances[&InstanceId(2)].load;
    assert_eq!(load.queue_blocks.len(), limits::LOAD_QUEUE_MAX);
    let batch_max = u32::try_from(limits::STEP_ROWS_MAX).unwrap();
    assert_eq!((load.batch, load.batch_max), (batch_max, batch_max));
}
