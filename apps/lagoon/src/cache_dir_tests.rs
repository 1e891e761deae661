//! Tests of the cache directory against real files.

use super::*;
use bytes::Bytes;
use std::io::{Seek as _, SeekFrom, Write as _};

const SHAPE: BlockShape = BlockShape { layers: 2, block_tokens: 4, layer_token_bytes: 8 };

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn kv(n: u8) -> BlockKv {
    (0..2).map(|layer| Bytes::from(vec![n.wrapping_mul(3) + layer; 32])).collect()
}

/// An open directory for so many blocks.
fn open(dir: &Path, blocks: u64) -> Files {
    Files::open(dir, blocks * PAGE_BYTES, SHAPE).unwrap()
}

/// As the writing thread does it.
fn put(files: &Files, n: u8) -> Vec<BlockHash> {
    let evicted = files.make_room(&hash(n));
    files.write(&hash(n), &kv(n)).unwrap();
    evicted
}

#[test]
fn blocks_are_found_again_in_their_order_and_within_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("a").join("cache");
    let files = open(&dir, 3);
    for n in 1..=3 {
        assert_eq!(put(&files, n), []);
    }
    assert_eq!(files.read(&hash(1)), Ok(kv(1)));
    assert_eq!(put(&files, 4), [hash(2)], "the least recently used");
    assert_eq!(files.read(&hash(2)), Err(DiskLoss::Missing));
    assert_eq!(files.index().bytes(), 3 * PAGE_BYTES);
    drop(files);
    // Modification times are the order; a coarse clock gives equal ones, so they are set apart.
    let files = open(&dir, 3);
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
    for (at, n) in (0..).zip([3, 1, 4]) {
        File::open(files.path(&hash(n))).unwrap().set_modified(start + Duration::from_secs(at)).unwrap();
    }
    drop(files);
    // A smaller bound evicts at once.
    let files = open(&dir, 2);
    assert_eq!(files.index().hashes().copied().collect::<Vec<_>>(), [hash(1), hash(4)]);
    assert!(!files.path(&hash(3)).exists());
    for n in [1, 4] {
        assert_eq!(files.read(&hash(n)), Ok(kv(n)));
    }
}

#[test]
fn damaged_files_are_never_answered_from() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = SHAPE.file_bytes();
    // Every byte, and every length.
    for at in 0..bytes {
        for truncated in [false, true] {
            let files = open(dir.path(), 3);
            put(&files, 7);
            let path = files.path(&hash(7));
            let mut file = File::options().read(true).write(true).open(&path).unwrap();
            if truncated {
                file.set_len(at).unwrap();
            } else {
                let before = fs::read(&path).unwrap()[usize::try_from(at).unwrap()];
                file.seek(SeekFrom::Start(at)).unwrap();
                file.write_all(&[before ^ 0x20]).unwrap();
            }
            assert_eq!(files.read(&hash(7)), Err(DiskLoss::Damaged), "byte {at}, {truncated}");
            assert!(!path.exists(), "it is removed");
            assert!(files.index().is_empty());
        }
    }
}

#[test]
fn a_file_of_another_block_or_shape_is_not_answered_from() {
    let dir = tempfile::tempdir().unwrap();
    let files = open(dir.path(), 9);
    put(&files, 1);
    put(&files, 2);
    fs::rename(files.path(&hash(1)), files.path(&hash(2))).unwrap();
    assert_eq!(files.read(&hash(2)), Err(DiskLoss::Damaged));
    put(&files, 3);
    drop(files);
    let other = BlockShape { layers: 4, layer_token_bytes: 4, ..SHAPE };
    assert_eq!(other.file_bytes(), SHAPE.file_bytes());
    let files = Files::open(dir.path(), 9 * PAGE_BYTES, other).unwrap();
    assert_eq!(files.read(&hash(3)), Err(DiskLoss::Damaged));
}

#[test]
fn one_process_has_a_directory_and_leaves_other_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let files = open(dir.path(), 3);
    put(&files, 1);
    let path = files.path(&hash(1));
    let error = Files::open(dir.path(), 1 << 20, SHAPE).unwrap_err().to_string();
    assert!(error.contains("in use by another process") && error.contains("hint: "), "{error}");
    let notes = dir.path().join("notes.txt");
    fs::write(&notes, "mine").unwrap();
    fs::write(path.with_file_name("notes"), "mine").unwrap();
    let incomplete = path.with_extension(NEW);
    fs::write(&incomplete, "half").unwrap();
    drop(files);
    let files = open(dir.path(), 1);
    put(&files, 2);
    assert!(notes.exists() && path.with_file_name("notes").exists() && !incomplete.exists() && !path.exists());
}

/// A child process has the parent's open files until it executes its program.
#[test]
fn a_directory_is_free_once_it_is_closed_although_processes_start() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let children = scope.spawn(|| {
            for _ in 0..100 {
                assert!(std::process::Command::new("true").status().unwrap().success());
            }
        });
        while !children.is_finished() {
            drop(open(dir.path(), 1));
        }
    });
}

#[test]
fn a_directory_that_cannot_be_made_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = format!("{:#}", Files::open(&file.join("cache"), 1 << 20, SHAPE).unwrap_err());
    assert!(error.contains("make the cache directory") && error.contains("hint: "), "{error}");
}

/// A write that fails is an event, and leaves nothing in the index.
#[tokio::test]
async fn what_cannot_be_written_is_reported_and_reading_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    // Where the folder of one block would be, there is a file.
    fs::write(dir.path().join("02"), "").unwrap();
    let (mut cache, found) = CacheDir::open(dir.path(), 8 * PAGE_BYTES, SHAPE).unwrap();
    assert!(matches!(found, DiskEvent::Found { bytes: 0, .. }));
    for n in [1, 2] {
        assert!(cache.carry_out(DiskEffect::Write { hash: hash(n), kv: kv(n) }).is_none());
        let Some(DiskEvent::Written { hash: of, result, evicted, bytes }) = next(Some(&mut cache)).await else {
            panic!("a write ends");
        };
        let expected = if n == 1 { Ok(()) } else { Err(DiskLoss::Failed) };
        assert_eq!((of, result, evicted, bytes), (hash(n), expected, vec![], Some(PAGE_BYTES)));
    }
    for (read, n) in [(5, 1), (6, 2)] {
        assert!(cache.carry_out(DiskEffect::Read { read, hash: hash(n) }).is_none());
        let Some(DiskEvent::Read { read: of, result }) = next(Some(&mut cache)).await else { panic!("a read ends") };
        assert_eq!(of, read);
        assert_eq!(result, if n == 1 { Ok(kv(1)) } else { Err(DiskLoss::Failed) });
    }
}

/// An order to remove all blocks comes after the writes before it, and leaves what is not the cache's.
#[tokio::test]
async fn all_blocks_are_removed_by_an_order() {
    let dir = tempfile::tempdir().unwrap();
    let notes = dir.path().join("notes.txt");
    fs::write(&notes, "mine").unwrap();
    let mut cache = CacheDir::open(dir.path(), 8 * PAGE_BYTES, SHAPE).unwrap().0;
    for n in [1, 2] {
        assert!(cache.carry_out(DiskEffect::Write { hash: hash(n), kv: kv(n) }).is_none());
    }
    let tenants = Tenants::default();
    assert!(cache.carry_out(DiskEffect::Drop { tenants }).is_none());
    for _ in [1, 2] {
        assert!(matches!(next(Some(&mut cache)).await, Some(DiskEvent::Written { result: Ok(()), .. })));
    }
    let Some(DiskEvent::Dropped { left, bytes: 0 }) = next(Some(&mut cache)).await else { panic!("an order ends") };
    assert_eq!(left, []);
    assert!(cache.carry_out(DiskEffect::Read { read: 5, hash: hash(1) }).is_none());
    let Some(DiskEvent::Read { result, .. }) = next(Some(&mut cache)).await else { panic!("a read ends") };
    assert_eq!(result, Err(DiskLoss::Missing));
    assert!(cache.carry_out(DiskEffect::Write { hash: hash(3), kv: kv(3) }).is_none());
    let Some(DiskEvent::Written { bytes, .. }) = next(Some(&mut cache)).await else { panic!("a write ends") };
    assert_eq!(bytes, Some(PAGE_BYTES), "the bound counts what is there");
    drop(cache);
    assert_eq!(scan(dir.path()).unwrap().len(), 1);
    assert!(notes.exists());
}

/// A directory smaller than a block takes none.
#[test]
fn a_bound_below_one_block_is_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::open(dir.path(), 100, SHAPE).unwrap();
    assert_eq!(files.make_room(&hash(1)), []);
    let error = files.write(&hash(1), &kv(1)).unwrap_err().to_string();
    assert!(error.contains("less than one rBlock"), "{error}");
}

#[test]
fn sizes_have_units() {
    assert_eq!(parse_bytes("123"), Ok(123));
    assert_eq!(parse_bytes("2K"), Ok(2048));
    assert_eq!(parse_bytes("500GiB"), Ok(500 << 30));
    assert_eq!(parse_bytes("1TB"), Ok(1 << 40));
    for wrong in ["", "G", "1X", "-1", "99999999T"] {
        assert!(parse_bytes(wrong).is_err(), "{wrong}");
    }
}
