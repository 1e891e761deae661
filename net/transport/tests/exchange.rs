//! Nodes exchange frames of every class, in order, under back-pressure.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use lagoon_protocol::{BulkFrame, PartialsFrame};
use lagoon_transport::{Class, Event, SendError, TransportConfig};
use std::time::{Duration, Instant};
use support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_exchange_every_class_both_ways() {
    let (mut a, mut b) = (node(), node());
    let to_b = a.node.connect(b.node.local_addr(), &Class::ALL).unwrap();
    a.node.try_send(to_b, &control(1)).unwrap();
    a.node.try_send(to_b, &query(2, 100)).unwrap();
    a.node.try_send(to_b, &write(3, 3_000_000)).unwrap();
    let (to_a, addr, incarnation) = next_up(&mut b.events).await;
    assert_eq!((addr, incarnation), (a.node.local_addr(), a.node.incarnation()));
    assert_eq!(next_number(&mut b.events).await, 1);
    let inbound = next(&mut b.partials).await;
    assert_eq!(inbound.peer, to_a);
    assert_eq!(lagoon_transport::Frame::from(inbound.frame), query(2, 100));
    assert_eq!(lagoon_transport::Frame::from(next(&mut b.bulk).await.frame), write(3, 3_000_000));

    b.node.try_send(to_a, &query(5, 64)).unwrap();
    b.node.try_send(to_a, &write(6, 64)).unwrap();
    b.node.try_send(to_a, &control(4)).unwrap();
    assert_eq!(next_up(&mut a.events).await.0, to_b);
    assert_eq!(next_number(&mut a.events).await, 4);
    assert_eq!(next(&mut a.partials).await.peer, to_b);
    assert_eq!(next(&mut a.bulk).await.peer, to_b);

    let stats = a.node.stats(to_b, Class::Bulk).unwrap();
    assert_eq!((stats.frames_sent, stats.frames_received, stats.frames_dropped), (1, 1, 0));
    assert!(stats.bytes_sent > 3_000_000 && stats.bytes_received < 1000);
    let rtt = a.node.rtt(to_b).unwrap();
    assert!(rtt > Duration::ZERO && rtt < Duration::from_secs(1), "{rtt:?}");
    assert!(a.events.try_recv().is_none(), "one session, no other news");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_exchange_with_each_other() {
    let mut nodes = [node(), node(), node()];
    let addrs: Vec<_> = nodes.iter().map(|bound| bound.node.local_addr()).collect();
    for (from, bound) in nodes.iter().enumerate() {
        for (to, addr) in addrs.iter().enumerate() {
            if from != to {
                let peer = bound.node.connect(*addr, &[]).unwrap();
                let number = u64::try_from(from * 10 + to).unwrap();
                bound.node.try_send(peer, &control(number)).unwrap();
                bound.node.try_send(peer, &query(number, 8)).unwrap();
            }
        }
    }
    for (to, bound) in nodes.iter_mut().enumerate() {
        let mut got = Vec::new();
        let mut queries = Vec::new();
        for _ in 0..2 {
            got.push(next_number(&mut bound.events).await);
            let PartialsFrame::Query { step, .. } = next(&mut bound.partials).await.frame else { panic!() };
            queries.push(step.0);
        }
        got.sort_unstable();
        queries.sort_unstable();
        let want: Vec<_> =
            (0..3).filter(|from| *from != to).map(|from| u64::try_from(from * 10 + to).unwrap()).collect();
        assert_eq!(got, want);
        assert_eq!(queries, want);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_in_order_at_any_size() {
    let (a, mut b) = (node(), node());
    let to_b = a.node.connect(b.node.local_addr(), &[]).unwrap();
    let size = |number: u64| usize::try_from(2 + 2 * (number * 7919 % 30_000)).unwrap();
    let sender = tokio::spawn(async move {
        for number in 0..2_000 {
            a.node.send(to_b, &query(number, size(number)), TIMEOUT).await.unwrap();
        }
        a
    });
    for number in 0..2_000 {
        let frame = next(&mut b.partials).await.frame;
        assert_eq!(lagoon_transport::Frame::from(frame), query(number, size(number)));
    }
    let a = sender.await.unwrap();
    assert_eq!(a.node.stats(to_b, Class::Partials).unwrap().frames_sent, 2_000);
}

/// The reader stops; the sender gets `Full` while little memory is used; nothing is lost when it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn back_pressure_reaches_the_sender_and_loses_nothing() {
    let config = TransportConfig {
        queue_frames_max: 16,
        queue_bytes_max: 1 << 20,
        inbox_frames_max: 8,
        inbox_bytes_max: 1 << 20,
        window_bytes: 1 << 20,
        ..TransportConfig::default()
    };
    for class in [Class::Partials, Class::Bulk] {
        let (a, mut b) = (node_at(loopback(), config.clone()), node_at(loopback(), config.clone()));
        let to_b = a.node.connect(b.node.local_addr(), &[class]).unwrap();
        let frame = |number| if class == Class::Bulk { write(number, 40_000) } else { query(number, 40_000) };
        let mut sent = 0;
        let mut refusals = 0;
        // Full for a whole second: everything between the two owners is full.
        while refusals < 100 {
            match a.node.try_send(to_b, &frame(sent)) {
                Ok(()) => (sent, refusals) = (sent + 1, 0),
                Err(SendError::Full) => {
                    refusals += 1;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
        // Queues of 16 frames, of 8, and two windows (sent and unread) of 1 MiB: below 100 frames of 40 kB.
        assert!((24..120).contains(&sent), "{sent} frames were taken without a reader");
        assert!(b.partials.len().max(b.bulk.len()) <= 8);
        let waiting = a.node.send(to_b, &frame(sent), Duration::from_millis(50)).await;
        assert_eq!(waiting, Err(SendError::Deadline));
        // Another class is not delayed.
        a.node.try_send(to_b, &control(9)).unwrap();
        assert_eq!(next_number(&mut b.events).await, 9);
        for number in 0..sent {
            let got = match class {
                Class::Bulk => next(&mut b.bulk).await.frame.into(),
                _ => lagoon_transport::Frame::from(next(&mut b.partials).await.frame),
            };
            assert!(got == frame(number), "frame {number} of {sent}");
        }
        a.node.send(to_b, &frame(sent), TIMEOUT).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_dials_settle_on_one_session_and_lose_nothing() {
    for round in 0..20 {
        let (mut a, mut b) = (node(), node());
        let (addr_a, addr_b) = (a.node.local_addr(), b.node.local_addr());
        let (node_a, node_b) = (a.node.clone(), b.node.clone());
        let send = |node: lagoon_transport::Node, addr| async move {
            let peer = node.connect(addr, &Class::ALL).unwrap();
            for number in 0..50 {
                node.try_send(peer, &control(number)).unwrap();
                node.try_send(peer, &query(number, 64)).unwrap();
                node.try_send(peer, &write(number, 64)).unwrap();
            }
        };
        let (sent_a, sent_b) = (tokio::spawn(send(node_a, addr_b)), tokio::spawn(send(node_b, addr_a)));
        sent_a.await.unwrap();
        sent_b.await.unwrap();
        for bound in [&mut a, &mut b] {
            let mut ups = 0;
            let mut number = 0;
            while number < 50 {
                match next(&mut bound.events).await {
                    Event::Up { .. } => ups += 1,
                    Event::Control { message, .. } => {
                        assert_eq!(lagoon_transport::Frame::from(message), control(number));
                        number += 1;
                    }
                    other => panic!("round {round}: {other:?}"),
                }
            }
            assert_eq!(ups, 1, "round {round}");
            for number in 0..50 {
                let PartialsFrame::Query { step, .. } = next(&mut bound.partials).await.frame else { panic!() };
                let BulkFrame::Write { lease, .. } = next(&mut bound.bulk).await.frame else { panic!() };
                assert_eq!((step.0, lease.0), (number, number));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_in_order_delivers_what_was_sent() {
    let (a, mut b) = (node(), node());
    let to_b = a.node.connect(b.node.local_addr(), &Class::ALL).unwrap();
    for number in 0..200 {
        a.node.try_send(to_b, &write(number, 20_000)).unwrap();
        a.node.try_send(to_b, &control(number)).unwrap();
    }
    // The connections must exist: frames that wait for one when the node closes are dropped.
    let first = next(&mut b.bulk).await;
    assert_eq!(next_number(&mut b.events).await, 0);
    let closing = tokio::spawn(async move { a.node.close(TIMEOUT).await });
    assert_eq!(lagoon_transport::Frame::from(first.frame), write(0, 20_000));
    for number in 1..200 {
        assert_eq!(lagoon_transport::Frame::from(next(&mut b.bulk).await.frame), write(number, 20_000));
    }
    for number in 1..200 {
        assert_eq!(next_number(&mut b.events).await, number);
    }
    let (_, reason) = next_down(&mut b.events).await;
    assert!(reason.contains("bye"), "{reason}");
    closing.await.unwrap();
}

/// The peer reads nothing for a while: frames wait in its inbox, in QUIC's buffers there and here, and in the
/// queue here. A node that closes meanwhile loses none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_waits_for_a_peer_that_reads_late() {
    const FRAMES: u64 = 100;
    let small = TransportConfig { inbox_frames_max: 2, inbox_bytes_max: 64 << 10, ..TransportConfig::default() };
    let (mut a, mut b) = (node(), node_at(loopback(), small));
    let to_b = a.node.connect(b.node.local_addr(), &Class::ALL).unwrap();
    // Both must know of each other: frames for a peer that is not connected are dropped.
    next_up(&mut a.events).await;
    next_up(&mut b.events).await;
    for number in 0..FRAMES {
        a.node.send(to_b, &write(number, 20_000), TIMEOUT).await.unwrap();
        a.node.send(to_b, &query(number, 20_000), TIMEOUT).await.unwrap();
    }
    let closing = tokio::spawn(async move { a.node.close(TIMEOUT).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!closing.is_finished(), "nobody has read what was sent");
    for number in 0..FRAMES {
        assert_eq!(lagoon_transport::Frame::from(next(&mut b.bulk).await.frame), write(number, 20_000));
        assert_eq!(lagoon_transport::Frame::from(next(&mut b.partials).await.frame), query(number, 20_000));
    }
    let (_, reason) = next_down(&mut b.events).await;
    assert!(reason.contains("bye"), "{reason}");
    closing.await.unwrap();
}

/// Datagram batches over the kernel's limit vanish silently, and each then costs a retransmission timer of tens of
/// milliseconds. A hundred round trips of such messages show it, on a busy machine too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_messages_do_not_wait_for_retransmissions() {
    let (mut a, mut b) = (node(), node());
    let to_b = a.node.connect(b.node.local_addr(), &[Class::Partials]).unwrap();
    let echo = b.node.clone();
    tokio::spawn(async move {
        while let Some(inbound) = b.partials.recv().await {
            echo.send(inbound.peer, &inbound.frame.into(), TIMEOUT).await.unwrap();
        }
    });
    let mut times = Vec::new();
    for number in 0..100 {
        let start = Instant::now();
        a.node.send(to_b, &query(number, 131_072), TIMEOUT).await.unwrap();
        next(&mut a.partials).await;
        times.push(start.elapsed());
    }
    times.sort();
    assert!(times[50] < Duration::from_millis(10), "the median round trip takes {:?}", times[50]);
}
