//! Bad paths: loss and partition, through a relay.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/relay.rs"]
mod relay;
mod support;

use lagoon_protocol::{BulkFrame, PartialsFrame};
use lagoon_transport::{Bound, Class, Event, Frame, Node, PeerId, SendError, TransportConfig};
use std::{
    collections::BTreeSet,
    net::UdpSocket,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use support::*;
use tokio::sync::{Notify, watch};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lossy_path_delivers_everything_in_order() {
    let (a, mut b) = (node(), node());
    let path = relay::start(b.node.local_addr(), 3).await;
    let to_b = a.node.connect(path.addr, &[]).unwrap();
    for number in 0..300 {
        a.node.send(to_b, &control(number), TIMEOUT).await.unwrap();
        a.node.send(to_b, &query(number, 20_000), TIMEOUT).await.unwrap();
        a.node.send(to_b, &write(number, 40_000), TIMEOUT).await.unwrap();
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

/// Numbers its frames and sends them to whoever is `peer` until the task is aborted.
async fn send_numbers(node: Node, peer: PeerId) {
    for number in 0.. {
        for frame in [query(number, 500), write(number, 5_000)] {
            match node.try_send(peer, &frame) {
                // A frame that is not taken would be a gap of the sender's making: it is offered again.
                Err(SendError::Full) => drop(node.send(peer, &frame, TIMEOUT).await),
                other => other.unwrap(),
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Received frames of one class: their numbers grow, and within one session none is missing.
#[derive(Default)]
struct Ledger {
    last: Option<(u64, u64)>,
    sessions: BTreeSet<u64>,
}

impl Ledger {
    fn note(&mut self, session: u64, number: u64) {
        if let Some((last_session, last)) = self.last {
            assert!(session >= last_session, "session {session} after {last_session}");
            assert!(number > last, "{number} after {last}");
            assert!(session != last_session || number == last + 1, "a gap within a session: {number} after {last}");
        }
        self.last = Some((session, number));
        self.sessions.insert(session);
    }
}

/// Events and frames of one side.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// There is a session.
    up: bool,
    /// Sessions that have carried partials and bulk so far, and frames of each.
    sessions: [usize; 2],
    frames: [u64; 2],
}

impl Progress {
    /// Both classes have carried more since, in as many sessions more.
    fn is_beyond(&self, before: &Self, sessions: usize) -> bool {
        (0..2).all(|class| {
            self.frames[class] > before.frames[class] && self.sessions[class] >= before.sessions[class] + sessions
        })
    }
}

/// Receives until `end`, and returns the received events and frames.
async fn check_numbers(mut bound: Bound, seen: watch::Sender<Progress>, end: Arc<Notify>) {
    let (mut partials, mut bulk) = (Ledger::default(), Ledger::default());
    let mut now = *seen.borrow();
    loop {
        tokio::select! {
            () = end.notified() => return,
            Some(event) = bound.events.recv() => match event {
                Event::Up { .. } => now.up = true,
                Event::Down { .. } => now.up = false,
                _ => {}
            },
            Some(inbound) = bound.partials.recv() => {
                let PartialsFrame::Query { step, .. } = inbound.frame else { panic!() };
                partials.note(inbound.session, step.0);
                now.frames[0] += 1;
            }
            Some(inbound) = bound.bulk.recv() => {
                let BulkFrame::Write { lease, .. } = inbound.frame else { panic!() };
                bulk.note(inbound.session, lease.0);
                now.frames[1] += 1;
            }
        }
        now.sessions = [partials.sessions.len(), bulk.sessions.len()];
        seen.send_replace(now);
    }
}

/// Waits until both sides are as `is` wants them, against what they were.
async fn wait(sides: &mut [watch::Receiver<Progress>; 2], what: &str, is: impl Fn(usize, &Progress) -> bool) {
    for (side, seen) in sides.iter_mut().enumerate() {
        let found = tokio::time::timeout(3 * TIMEOUT, seen.wait_for(|now| is(side, now))).await;
        assert!(found.is_ok_and(|found| found.is_ok()), "{what}: side {side} has seen {:?}", seen.borrow());
    }
}

/// Both sides send all the time while the path is cut again and again, until the peers have given each other up and for
/// shorter than their silence may last, and loses datagrams: no session has a gap, and nothing comes twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_have_no_gaps_while_they_come_and_go() {
    let config = TransportConfig {
        idle_timeout: Duration::from_millis(300),
        keep_alive: Duration::from_millis(80),
        connect_deadline: Duration::from_millis(300),
        ..TransportConfig::default()
    };
    // Where the other one would dial it nobody answers: it would come past the path that is cut.
    let nobody = UdpSocket::bind(loopback()).unwrap();
    let announcing = TransportConfig { advertise: nobody.local_addr().ok(), ..config.clone() };
    let (a, mut b) = (node_at(loopback(), announcing), node_at(loopback(), config));
    let path = relay::start(b.node.local_addr(), 1).await;
    let to_b = a.node.connect(path.addr, &Class::ALL).unwrap();
    let (to_a, _, _) = next_up(&mut b.events).await;
    let (sending_a, sending_b) =
        (tokio::spawn(send_numbers(a.node.clone(), to_b)), tokio::spawn(send_numbers(b.node.clone(), to_a)));
    let (tell_a, seen_a) = watch::channel(Progress::default());
    let (tell_b, seen_b) = watch::channel(Progress { up: true, ..Progress::default() });
    let end = [(); 2].map(|()| Arc::new(Notify::new()));
    let checking = [
        tokio::spawn(check_numbers(a, tell_a, Arc::clone(&end[0]))),
        tokio::spawn(check_numbers(b, tell_b, Arc::clone(&end[1]))),
    ];
    let mut sides = [seen_a, seen_b];
    wait(&mut sides, "at first", |_, now| now.is_beyond(&Progress::default(), 1)).await;
    for long in [true, false, true, false, true] {
        path.cut.store(true, Relaxed);
        if long {
            wait(&mut sides, "the path is cut", |_, now| !now.up).await;
        } else {
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
        let before = [*sides[0].borrow(), *sides[1].borrow()];
        path.cut.store(false, Relaxed);
        let came_back = |side: usize, now: &Progress| now.is_beyond(&before[side], usize::from(long));
        wait(&mut sides, "the path is whole", came_back).await;
    }
    end.iter().for_each(|end| end.notify_one());
    for task in checking {
        task.await.unwrap();
    }
    sending_a.abort();
    sending_b.abort();
}
