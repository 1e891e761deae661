//! Bad paths: loss and partition, through a relay.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/relay.rs"]
mod relay;
mod support;

use lagoon_transport::{Class, Frame};
use std::{sync::atomic::Ordering::Relaxed, time::Duration};
use support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lossy_path_delivers_everything_in_order() {
    let (a, mut b) = (node(), node());
    let path = relay::start(b.node.local_addr(), 3).await;
    let to_b = a.node.connect(path.addr, &[]).unwrap();
    for number in 0..300 {
        a.node.send(to_b, &control(number), PATIENCE).await.unwrap();
        a.node.send(to_b, &query(number, 20_000), PATIENCE).await.unwrap();
        a.node.send(to_b, &write(number, 40_000), PATIENCE).await.unwrap();
    }
    for number in 0..300 {
        assert_eq!(Frame::from(next(&mut b.partials).await.frame), query(number, 20_000));
        assert_eq!(Frame::from(next(&mut b.bulk).await.frame), write(number, 40_000));
        assert_eq!(next_number(&mut b.events).await, number);
    }
    assert!(path.lost.load(Relaxed) > 10, "the path lost too little to prove anything");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_ends_the_session_on_both_sides_and_heals() {
    let (mut a, mut b) = (node(), node());
    let path = relay::start(b.node.local_addr(), 0).await;
    let to_b = a.node.connect(path.addr, &[Class::Control, Class::Partials]).unwrap();
    a.node.try_send(to_b, &control(1)).unwrap();
    let (peer, _, incarnation) = next_up(&mut a.events).await;
    assert_eq!(peer, to_b);
    let (to_a, _, _) = next_up(&mut b.events).await;
    assert_eq!(next_number(&mut b.events).await, 1);

    path.cut.store(true, Relaxed);
    assert!(next_down(&mut a.events).await.1.contains("timed out"));
    assert!(next_down(&mut b.events).await.1.contains("timed out"));
    tokio::time::sleep(Duration::from_millis(500)).await;
    path.cut.store(false, Relaxed);

    let (peer, _, again) = next_up(&mut a.events).await;
    assert_eq!((peer, again), (to_b, incarnation), "the same peer, the same process");
    assert_eq!(next_up(&mut b.events).await.0, to_a);
    a.node.try_send(to_b, &control(2)).unwrap();
    assert_eq!(next_number(&mut b.events).await, 2);
    b.node.try_send(to_a, &query(3, 10)).unwrap();
    assert_eq!(Frame::from(next(&mut a.partials).await.frame), query(3, 10));
}
