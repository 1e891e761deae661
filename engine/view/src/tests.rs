//! One thread: whom the view names.

use crate::*;

fn at(instance: u32) -> Location {
    Location { addr: format!("10.0.0.{instance}:7000").parse().unwrap(), host: u64::from(instance) << 40 }
}

/// Instances 1, 2, … that lend so much.
fn view(lendable: &[u32]) -> (ViewWriter, Vec<Slot>) {
    let mut writer = ViewWriter::new(64);
    let slots = (1..).zip(lendable).map(|(i, blocks)| {
        let slot = writer.add(i, Flags::default(), 0, at(i)).unwrap();
        writer.set_lendable(slot, *blocks);
        slot
    });
    let slots = slots.collect();
    writer.publish();
    (writer, slots)
}

fn names(view: &SortedView, debtor: u32, blocks: u32, tier: Tier) -> Vec<u32> {
    view.ask(&Ask { debtor, blocks, exclude: &[], tier }).found.iter().map(|f| f.instance).collect()
}

#[test]
fn the_most_available_first() {
    let (writer, _) = view(&[90, 10, 30, 0, 20, 5]);
    let v = writer.view();
    assert_eq!(names(&v, 1, 0, Tier::Any), [3, 5, 2]);
    let answer = v.ask(&Ask { debtor: 3, blocks: 0, exclude: &[1], tier: Tier::Any });
    assert_eq!(answer.found[0], Found { instance: 5, location: at(5), lendable: 20 });
    assert_eq!(names(&v, 77, 0, Tier::Any), [1, 3, 5], "a debtor that is not in the view");
}

/// A reader compares a window of rows itself: only the published order brings the best of 50 into it.
#[test]
fn the_most_available_first_beyond_a_window() {
    let (mut writer, slots) = view(&(1..=50).collect::<Vec<_>>());
    let v = writer.view();
    assert_eq!(names(&v, 77, 0, Tier::Any), [50, 49, 48]);
    writer.set_flags(slots[49], Flags::BORROWS);
    writer.set_lendable(slots[2], 60);
    writer.publish();
    assert_eq!(names(&v, 77, 0, Tier::Any), [3, 49, 48], "who borrows is in a later group");
    let (writer, _) = view(&[7; 50]);
    assert_eq!(names(&writer.view(), 77, 0, Tier::Any), [1, 2, 3], "equals by their numbers");
}

#[test]
fn bookings_spread_debtors_until_the_next_report_of_the_row() {
    let (mut writer, slots) = view(&[0, 30, 30, 30]);
    let v = writer.view();
    let firsts: Vec<_> = (0..3).map(|_| names(&v, 1, 20, Tier::Any)[0]).collect();
    assert_eq!(firsts, [2, 3, 4]);
    assert_eq!(names(&v, 1, 40, Tier::Any).len(), 3, "booked out, yet who says so is the creditor");
    writer.set_lendable(slots[2], 5);
    assert_eq!(names(&v, 1, 1, Tier::Any)[0], 3);
}

#[test]
fn more_than_a_window_of_debtors_is_spread() {
    let (writer, _) = view(&[10; 50]);
    let v = writer.view();
    let mut firsts: Vec<_> = (0..49).map(|_| names(&v, 1, 10, Tier::Any)[0]).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, (2..=50).collect::<Vec<_>>());
}

#[test]
fn flags_count_at_once() {
    let (mut writer, slots) = view(&[0, 30, 20, 10]);
    let v = writer.view();
    writer.set_flags(slots[1], Flags::PAUSED);
    assert_eq!(names(&v, 1, 0, Tier::Any), [3, 4]);
    writer.set_flags(slots[1], Flags::default());
    writer.set_flags(slots[2], Flags::BARRED);
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 4]);
    writer.set_flags(slots[2], Flags::BORROWS);
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 4, 3], "who borrows comes last");
    writer.cap_lendable(slots[1], 3);
    assert_eq!(names(&v, 1, 0, Tier::Any), [4, 2, 3]);
    writer.remove(slots[3], 4);
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 3]);
    // The slot is another's: the old order may still name it, under its new number.
    writer.add(9, Flags::default(), 0, at(9)).unwrap();
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 3]);
}

#[test]
fn tiers() {
    let (mut writer, slots) = view(&[0, 5, 90, 80, 7]);
    let v = writer.view();
    writer.set_flags(slots[2], Flags::HOST);
    writer.set_flags(slots[3], Flags::HOST);
    writer.publish();
    assert_eq!(names(&v, 1, 0, Tier::Any), [5, 2, 3], "device memory first");
    assert_eq!(names(&v, 1, 0, Tier::Device), [5, 2]);
    assert_eq!(names(&v, 1, 0, Tier::Host), [3, 4]);
    writer.set_flags(slots[1], Flags::BORROWS);
    writer.publish();
    assert_eq!(names(&v, 1, 0, Tier::Any), [5, 3, 4], "even host memory comes before who borrows");
    assert_eq!(names(&v, 1, 0, Tier::Device), [5, 2]);
}

#[test]
fn near_before_large_and_far_last() {
    let mut blocks = vec![0, 1];
    blocks.resize(60, 50);
    let (mut writer, slots) = view(&blocks);
    let v = writer.view();
    let link = |peer: u32, class| Link { peer, slot: Slot(peer - 1), class };
    writer.set_links(slots[0], &[link(2, 3), link(3, 14), link(4, 14)]);
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 5, 6]);
    assert_eq!(names(&v, 7, 0, Tier::Any), [3, 4, 5]);
    (4..60).for_each(|i| writer.set_flags(slots[i], Flags::PAUSED));
    assert_eq!(names(&v, 1, 0, Tier::Any), [2, 3, 4]);
}

#[test]
fn totals_leave_the_debtor_out() {
    let (mut writer, slots) = view(&[4, 30]);
    writer.set_totals(100, 34);
    let ask = |debtor| writer.view().ask(&Ask { debtor, blocks: 1, exclude: &[], tier: Tier::Any });
    assert_eq!((ask(1).blocks_total, ask(1).blocks_lendable), (100, 30));
    writer.set_flags(slots[0], Flags::BARRED);
    let ask = |debtor| writer.view().ask(&Ask { debtor, blocks: 1, exclude: &[], tier: Tier::Any });
    assert_eq!(ask(1).blocks_lendable, 34, "what is barred was taken out of the total already");
}

#[test]
fn only_the_registered_connection_is_answered() {
    let (mut writer, slots) = view(&[0, 30]);
    let ask = Ask { debtor: 1, blocks: 1, exclude: &[], tier: Tier::Any };
    assert_eq!(writer.view().ask_from(7, &ask), None);
    writer.set_conn(slots[0], 7);
    assert!(writer.view().ask_from(7, &ask).is_some());
    assert_eq!(writer.view().ask_from(8, &ask), None);
    assert_eq!(writer.view().ask_from(7, &Ask { debtor: 2, ..ask }), None);
    writer.remove(slots[0], 1);
    assert_eq!(writer.view().ask_from(7, &ask), None);
}

#[test]
fn the_view_may_be_full() {
    let mut writer = ViewWriter::new(2);
    let slots: Vec<_> = (1..=2).map(|i| writer.add(i, Flags::default(), 0, at(i)).unwrap()).collect();
    assert_eq!(writer.add(3, Flags::default(), 0, at(3)), None);
    writer.remove(slots[0], 1);
    assert_eq!(writer.add(3, Flags::default(), 0, at(3)), Some(slots[0]));
}

#[test]
fn threads_ask_while_the_writer_publishes() {
    let (mut writer, slots) = view(&[0, 1_000, 1_000, 1_000, 1_000]);
    let views: Vec<_> = (0..2).map(|_| writer.view()).collect();
    std::thread::scope(|scope| {
        for v in &views {
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let found = v.ask(&Ask { debtor: 1, blocks: 1, exclude: &[], tier: Tier::Any }).found;
                    assert_eq!(found.len(), 3);
                    assert!(found.iter().all(|f| f.location == at(f.instance)));
                }
            });
        }
        for i in 0..5_000u32 {
            writer.set_lendable(slots[1 + (i % 4) as usize], 1_000 + i % 7);
            writer.publish();
        }
    });
}
