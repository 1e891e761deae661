//! Memory is kept for the oldest pool-sized request, and requests that need none of it are not delayed.

use super::*;
use lagoon_protocol::{Load, OldestWaiting};

/// Instance `i` says that its head needs `blocks` and came `waits_ms` ago; more than its 100 blocks, unless 0.
fn beat(gm: &mut GManager, i: u32, seq: u64, free: u32, head: (u32, u32), now: u64) -> Option<OldestWaiting> {
    let (blocks, waits_ms) = head;
    let queue_blocks = if blocks > 0 { vec![blocks] } else { Vec::new() };
    let load = Load { batch: 1, queue_blocks, head_waits_ms: waits_ms, ..Load::default() };
    let m = Heartbeat { load: Some(load), placements_full: true, ..heartbeat(i, seq, free) };
    gm.on_heartbeat(&m, now).oldest_waiting
}

#[test]
fn those_that_lend_most_keep_memory_for_the_oldest_pool_sized_head() {
    let mut gm = pool(&[0, 10, 30, 20, 40]);
    let ms = u32::try_from(limits::OLDEST_WAITING_MS).unwrap();
    // A young request is not the oldest waiting one, and a request that fits its instance has no age.
    assert_eq!(beat(&mut gm, 1, 2, 0, (210, ms - 1), 20_000), None);
    assert_eq!(beat(&mut gm, 2, 2, 10, (90, 0), 20_000), None);
    assert_eq!(beat(&mut gm, 5, 2, 40, (0, 0), 20_000), None);
    // 110 more than its own, and some for what is kept there: two instances, 5 and 3, the freest.
    assert_eq!(beat(&mut gm, 1, 3, 0, (210, ms + 250), 20_251), Some(OldestWaiting { debtor: 1, waits_ms: ms + 250 }));
    let oldest_waiting = |waits_ms| Some(OldestWaiting { debtor: 1, waits_ms });
    assert_eq!(beat(&mut gm, 5, 3, 40, (0, 0), 20_300), oldest_waiting(ms + 299));
    assert_eq!(beat(&mut gm, 3, 3, 30, (0, 0), 20_300), oldest_waiting(ms + 299));
    assert_eq!(beat(&mut gm, 4, 3, 20, (0, 0), 20_300), None);
    // An older one takes over; when it has its memory, the other one's turn comes again.
    beat(&mut gm, 2, 3, 10, (150, ms * 3), 20_350);
    assert_eq!(beat(&mut gm, 5, 4, 40, (0, 0), 20_400).map(|e| e.debtor), Some(2));
    beat(&mut gm, 2, 4, 10, (0, 0), 20_450);
    assert_eq!(beat(&mut gm, 5, 5, 40, (0, 0), 20_500).map(|e| e.debtor), Some(1));
    // Its debtor is silent: no instance keeps memory.
    let later = 20_500 + limits::HEARTBEAT_STALE_MS;
    for i in 2..=5 {
        beat(&mut gm, i, 10, 40, (0, 0), later);
    }
    gm.tick(later + 1);
    assert_eq!(beat(&mut gm, 5, 11, 40, (0, 0), later + 2), None);
}
