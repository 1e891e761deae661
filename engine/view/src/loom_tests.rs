//! Every interleaving of one writer and its readers, on views so small that they can be explored.

use crate::*;
use loom::thread;
use std::net::SocketAddr;

fn at(port: u16) -> Location {
    Location { addr: SocketAddr::from(([10, 0, 0, 1], port)), host: port.into() }
}

fn explore(f: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(f);
}

fn ask(view: &SortedView, blocks: u32) -> Vec<Found> {
    view.ask(&Ask { debtor: 99, blocks, exclude: &[], tier: Tier::Any }).found
}

/// A reader that is overtaken by publications sees one of them whole: both creditors, each once.
#[test]
fn no_publication_hides_a_creditor() {
    explore(|| {
        let mut writer = ViewWriter::with_links(2, 0);
        let slots = [1, 2].map(|i| writer.add(i, Flags::default(), 0, at(7000)).unwrap());
        slots.iter().for_each(|s| writer.set_lendable(*s, 5));
        writer.publish();
        let view = writer.view();
        let reader = thread::spawn(move || {
            let mut found: Vec<_> = ask(&view, 0).iter().map(|f| f.instance).collect();
            found.sort_unstable();
            assert_eq!(found, [1, 2]);
        });
        // The order turns around, and is published twice, so that it comes into the reader's buffer.
        writer.set_lendable(slots[1], 9);
        writer.publish();
        writer.publish();
        reader.join().unwrap();
    });
}

/// A slot that changes hands never shows one instance's number with another's address.
#[test]
fn an_address_belongs_to_its_instance() {
    explore(|| {
        let mut writer = ViewWriter::with_links(1, 0);
        let slot = writer.add(1, Flags::default(), 0, at(1)).unwrap();
        writer.set_lendable(slot, 5);
        writer.publish();
        let view = writer.view();
        let reader = thread::spawn(move || {
            for f in ask(&view, 0) {
                assert_eq!(f.location, at(u16::try_from(f.instance).unwrap()));
            }
        });
        writer.remove(slot, 1);
        let slot = writer.add(2, Flags::default(), 0, at(2)).unwrap();
        writer.set_lendable(slot, 7);
        reader.join().unwrap();
    });
}

/// An instance that comes back somewhere else is named at the one or the other: only the generation tells them apart.
#[test]
fn a_location_is_whole() {
    explore(|| {
        let [old, new] = [1, 2].map(|n| {
            let addr = SocketAddr::from(([n, 0, 0, 0, 0, 0, 0, n], 7000));
            Location { addr, host: n.into() }
        });
        let mut writer = ViewWriter::with_links(1, 0);
        let slot = writer.add(1, Flags::default(), 0, old).unwrap();
        writer.set_lendable(slot, 5);
        writer.publish();
        let view = writer.view();
        let reader = thread::spawn(move || {
            for f in ask(&view, 0) {
                assert!([old, new].contains(&f.location), "{:?}", f.location);
            }
        });
        writer.remove(slot, 1);
        let slot = writer.add(1, Flags::default(), 0, new).unwrap();
        writer.set_lendable(slot, 7);
        reader.join().unwrap();
    });
}

/// Two debtors at once are sent to different creditors, and no booking is lost.
#[test]
fn competing_readers_spread() {
    explore(|| {
        let mut writer = ViewWriter::with_links(2, 0);
        for i in [1, 2] {
            let slot = writer.add(i, Flags::default(), 0, at(7000)).unwrap();
            writer.set_lendable(slot, 30);
        }
        writer.publish();
        let (a, b) = (writer.view(), writer.view());
        let other = thread::spawn(move || ask(&a, 20)[0].instance);
        let one = ask(&b, 20)[0].instance;
        assert_ne!(one, other.join().unwrap());
        // 10 are left at each: a third debtor's 20 take all of it.
        let third = ask(&b, 20);
        assert_eq!(third.len(), 2);
        let booked: Vec<u32> = [0, 1].map(|slot| writer.booked(slot)).to_vec();
        assert_eq!(booked, [30, 30]);
    });
}

/// After the writer has paused a row, a reader that starts does not name it; one in flight may.
#[test]
fn a_pause_is_seen() {
    explore(|| {
        let mut writer = ViewWriter::with_links(1, 0);
        let slot = writer.add(1, Flags::default(), 0, at(7000)).unwrap();
        writer.set_lendable(slot, 5);
        writer.publish();
        let view = writer.view();
        let early = writer.view();
        let reader = thread::spawn(move || ask(&early, 1).len());
        writer.set_flags(slot, Flags::PAUSED);
        assert!(ask(&view, 1).is_empty());
        reader.join().unwrap();
    });
}
