//! The log under crashes, failing disks and flipped bits.

use std::path::Path;

use skein_protocol::id::{Group, Hash, NodeId, ReduceAttempt, Timeline, Version};
use skein_protocol::message::control::{Capability, Commit, Shard};

use super::faults::{Disk, Survives};
use super::*;

/// What the tests append, one inner list an append; the last is larger than a page.
fn appends() -> Vec<Vec<Record>> {
    let node = NodeId([3; 32]);
    let capability = Capability { flops: 1e9, memory: 1 << 30, compute_share: 1.0, fingerprint: Hash::of(b"kind") };
    let commit = Commit {
        fence: Default::default(),
        previous: Hash::of(b"before"),
        groups: (0..100).map(|group| (Group(group), ReduceAttempt(1), Hash::of(b"result"))).collect(),
        scalars: Default::default(),
        loss: 3.5,
        signature: vec![7; 64],
    };
    let shards = (0..200).map(|group| Shard { timeline: Timeline(0), group: Group(group), version: Version(1), root: Hash::of(b"root") }).collect();
    vec![
        vec![Record::Run { config: "steps = 1".to_owned() }],
        vec![Record::Timeline { timeline: Timeline(0), base: Version(0) }, Record::Member { node, capability }],
        vec![Record::Commit(commit)],
        vec![Record::Saved { node, shards }, Record::Checkpoint { version: Version(1) }, Record::Gone { node }],
    ]
}

fn open(disk: &Disk) -> Result<RedbStore, StoreError> {
    RedbStore::with_backend(Path::new("log.redb"), disk.clone())
}

/// Opens the log and appends until something fails; what was acknowledged.
fn write_all(disk: &Disk) -> Vec<Record> {
    let mut acknowledged = Vec::new();
    let Ok(mut store) = open(disk) else { return acknowledged };
    for records in appends() {
        if store.append(&records).is_err() {
            assert!(store.append(&records).is_err(), "nothing is taken after a failure");
            break;
        }
        acknowledged.extend(records);
    }
    acknowledged
}

#[test]
fn what_was_appended_is_loaded() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(LOG_FILE);
    for (index, records) in appends().iter().enumerate() {
        let mut store = RedbStore::open(&path).expect("opens");
        assert_eq!(store.load().expect("loads"), appends()[..index].concat());
        store.append(records).expect("appends");
    }
    assert_eq!(RedbStore::open(&path).expect("opens").load().expect("loads"), appends().concat());
}

#[test]
fn a_second_coordinator_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(LOG_FILE);
    let _first = RedbStore::open(&path).expect("opens");
    assert!(matches!(RedbStore::open(&path), Err(StoreError::InUse { .. })));
}

#[test]
fn a_crash_at_any_operation_loses_nothing_that_was_acknowledged() {
    let whole = Disk::default();
    let all = write_all(&whole);
    assert_eq!(all, appends().concat());
    let boundaries: Vec<usize> = (0..=appends().len()).map(|count| appends()[..count].concat().len()).collect();

    // Beginning a log is covered by another test: `RedbStore::create` does it beside the place.
    let empty = Disk::default();
    drop(open(&empty).expect("begins"));
    let mut cut_short = 0;
    for operation in 0..whole.operations() {
        let disk = empty.crashed(Survives::Nothing);
        disk.fail_from(operation);
        let acknowledged = write_all(&disk);
        let losses = [Survives::Everything, Survives::Nothing].into_iter().chain((0..8).map(|seed| Survives::Some(seed * 7919 + operation)));
        for survives in losses {
            let place = format!("operation {operation}, {survives:?}");
            let mut store = open(&disk.crashed(survives)).unwrap_or_else(|error| panic!("{place}: {error}"));
            let loaded = store.load().unwrap_or_else(|error| panic!("{place}: {error}"));
            assert!(loaded.len() >= acknowledged.len(), "{place}: {} of {} acknowledged", loaded.len(), acknowledged.len());
            assert!(boundaries.contains(&loaded.len()), "{place}: part of an append");
            assert_eq!(loaded, all[..loaded.len()], "{place}");
            store.append(&all[..1]).unwrap_or_else(|error| panic!("{place}: goes on: {error}"));
            cut_short += usize::from(loaded.len() < all.len());
        }
    }
    assert!(cut_short > 100, "the faults did not bite: {cut_short}");
}

#[test]
fn flipped_bits_are_found() {
    let disk = Disk::default();
    let all = write_all(&disk);
    let bytes = disk.bytes();
    let used: Vec<usize> = (0..bytes.len()).filter(|place| *place < 320 || bytes[*place] != 0).collect();
    // Every bit of the header, and one bit in some of the other bytes in use.
    let flips = used.iter().filter(|place| **place < 320).flat_map(|place| (0..8).map(move |bit| (*place, 1 << bit)));
    let flips = flips.chain(used.iter().filter(|place| **place >= 320).step_by(23).map(|place| (*place, 1_u8 << (place % 8))));
    let (mut found, mut harmless) = (0, 0);
    for (place, bit) in flips {
        let mut damaged = bytes.clone();
        damaged[place] ^= bit;
        match open(&Disk::holding(damaged)).and_then(|mut store| store.load()) {
            Err(_) => found += 1,
            // The byte that says which of two states is the newer: see the head of the module.
            Ok(loaded) if place == 9 => assert!(loaded == all || loaded == appends()[..3].concat(), "bit {bit:#x} of byte 9"),
            Ok(loaded) => {
                assert_eq!(loaded, all, "bit {bit:#x} of byte {place} went unnoticed");
                harmless += 1;
            }
        }
    }
    assert!(found > 100 && harmless > 0, "{found} found, {harmless} harmless");
}

#[test]
fn a_record_that_redb_holds_for_good_is_checked_too() {
    let disk = Disk::default();
    write_all(&disk);
    let database = Database::builder().create_with_backend(disk.clone()).expect("opens");
    let transaction = database.begin_write().expect("begins");
    {
        let mut log = transaction.open_table(LOG).expect("opens");
        let mut value = log.get(1).expect("reads").expect("there").value().to_vec();
        *value.last_mut().expect("not empty") ^= 1;
        log.insert(1, value.as_slice()).expect("writes");
    }
    transaction.commit().expect("commits");
    drop(database);
    let error = open(&disk).expect_err("damaged");
    assert_eq!(error.to_string(), "log.redb is damaged (record 1 does not match its checksum); put back a copy of it, or start a new run in another --state");
}

#[test]
fn a_record_that_is_missing_is_noticed() {
    let disk = Disk::default();
    write_all(&disk);
    let database = Database::builder().create_with_backend(disk.clone()).expect("opens");
    let transaction = database.begin_write().expect("begins");
    transaction.open_table(LOG).expect("opens").remove(2).expect("removes");
    transaction.commit().expect("commits");
    drop(database);
    assert!(open(&disk).expect_err("damaged").to_string().contains("record 2 is missing"));
}

#[test]
fn a_log_of_another_format_is_refused() {
    let disk = Disk::default();
    write_all(&disk);
    let database = Database::builder().create_with_backend(disk.clone()).expect("opens");
    let transaction = database.begin_write().expect("begins");
    transaction.open_table(META).expect("opens").insert(FORMAT_KEY, 2).expect("writes");
    transaction.commit().expect("commits");
    drop(database);
    assert_eq!(
        open(&disk).expect_err("another format").to_string(),
        "log.redb is a log of format 2, this build reads format 1; use the skein-coordinator that wrote it, or another --state"
    );
}

#[test]
fn a_log_whose_beginning_was_interrupted_is_begun_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(LOG_FILE);
    // What a crash while redb writes its header leaves.
    std::fs::write(path.with_extension("new"), vec![0; 100_000]).expect("writes");
    let mut store = RedbStore::open(&path).expect("begins");
    store.append(&appends().concat()).expect("appends");
    assert!(!path.with_extension("new").exists());
}

#[test]
fn a_file_that_is_no_log_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(LOG_FILE);
    std::fs::write(&path, vec![b'x'; 10_000]).expect("writes");
    assert!(matches!(RedbStore::open(&path), Err(StoreError::Damaged { .. })));
    assert!(matches!(RedbStore::open(&folder.path().join("missing").join(LOG_FILE)), Err(StoreError::Open { .. })));
}

#[test]
fn the_store_in_memory_keeps_the_order() {
    let mut store = MemStore::default();
    for records in appends() {
        store.append(&records).expect("memory does not fail");
    }
    assert_eq!(store.load().expect("memory does not fail"), appends().concat());
}
