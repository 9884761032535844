//! Shards on disk, whole, damaged and half-written.

use super::*;
use crate::engine::Task;
use crate::engine::core::Core;
use crate::engine::toy::{self, Toy};
use crate::engine::{Engine, Outcome};
use crate::solo::solo;

const RUN: RunId = RunId([5; 32]);

struct Place {
    dir: tempfile::TempDir,
    core: Core<Toy>,
}

/// A toy engine at version 2, and an empty folder.
fn place() -> Place {
    let config = toy::config(2, true, 2, 10);
    let mut core = toy::engine(&config);
    let groups = core.structure().group_ids().collect();
    assert!(matches!(core.run(Task::Draw { groups }), Outcome::Finished));
    solo(&mut core, &config, &toy::structure(&config), Version(0), 2, &mut |_| {}).expect("trains");
    Place { dir: tempfile::tempdir().expect("a temporary folder"), core }
}

impl Place {
    fn layout(&self, group: u16) -> &GroupLayout {
        self.core.structure().layout(Group(group))
    }

    fn save(&self, group: u16, version: u64) -> Shard {
        let snapshot = Snapshot { version: Version(version), ..self.core.snapshot(Group(group)).expect("held") };
        save(self.dir.path(), &snapshot, self.layout(group), RUN, Timeline(3)).expect("saved")
    }

    fn load(&self, group: u16, version: u64) -> Result<Snapshot, CheckpointError> {
        load(self.dir.path(), RUN, Group(group), Version(version), self.layout(group))
    }

    fn list(&self) -> Vec<(u64, u16)> {
        list(self.dir.path(), RUN).expect("listed").iter().map(|shard| (shard.version.0, shard.group.0)).collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn a_shard_comes_back_as_it_was_saved() {
    let place = place();
    for group in 0..4 {
        let shard = place.save(group, 2);
        let snapshot = place.load(group, 2).expect("loaded");
        assert_eq!(Some(&snapshot), place.core.snapshot(Group(group)).as_ref());
        assert_eq!(shard, Shard { timeline: Timeline(3), group: Group(group), version: Version(2), root: snapshot.root() });
    }
    assert_eq!(place.list(), [(2, 0), (2, 1), (2, 2), (2, 3)]);
    let mut files = names(&place.path("v000002")).expect("listed");
    files.sort();
    assert_eq!(files[..3], ["g0000.json", "g0000.safetensors", "g0001.json"]);
    assert_eq!(files.len(), 8, "nothing half-written stays");
}

#[test]
fn other_programs_find_the_tensors_by_name() {
    let place = place();
    place.save(1, 2);
    let bytes = fs::read(place.path("v000002/g0001.safetensors")).expect("saved");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut names = tensors.names();
    names.sort_unstable();
    let expected = [
        "layers.0.bias",
        "layers.0.weight",
        "optimizer.m.layers.0.bias",
        "optimizer.m.layers.0.weight",
        "optimizer.v.layers.0.bias",
        "optimizer.v.layers.0.weight",
    ];
    assert_eq!(names, expected);
    let weight = tensors.tensor("layers.0.weight").expect("there");
    assert_eq!((weight.shape(), weight.data()), (&[16, 16][..], bytemuck::cast_slice(&place.core.weights(Group(1)).expect("held")[..256])));
    let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let about: serde_json::Value = serde_json::from_str(&metadata.metadata().as_ref().expect("metadata")["skein"]).expect("JSON");
    assert_eq!((&about["version"], &about["run"]), (&2.into(), &RUN.to_string().into()));
}

/// Every shortening, a lengthening, and every flip of one bit.
fn damages(good: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let cut = (0..good.len()).map(|len| good[..len].to_vec());
    let flipped = (0..good.len() * 8).map(|bit| {
        let mut bytes = good.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    });
    cut.chain([[good, b" "].concat()]).chain(flipped)
}

#[test]
fn every_truncation_and_every_flipped_bit_is_found() {
    let place = place();
    place.save(3, 2);
    let [file, manifest] = ["v000002/g0003.safetensors", "v000002/g0003.json"].map(|name| place.path(name));
    let [bytes, sealed] = [&file, &manifest].map(|path| fs::read(path).expect("saved"));
    let (group, version) = (Group(3), Version(2));
    for bad in damages(&sealed) {
        let result = check_manifest(&manifest, &bad, RUN, group, version);
        assert!(matches!(&result, Err(CheckpointError::Corrupt { path, .. }) if *path == manifest), "{result:?} of {}", String::from_utf8_lossy(&bad));
    }
    let good = check_manifest(&manifest, &sealed, RUN, group, version).expect("undamaged");
    for bad in damages(&bytes) {
        let result = open(&file, &bad, &good, place.layout(3));
        assert!(matches!(&result, Err(CheckpointError::Corrupt { path, .. }) if *path == file), "{result:?}");
    }
    // And through the file system.
    for (path, good) in [(&file, &bytes), (&manifest, &sealed)] {
        for bad in damages(good).step_by(good.len() / 2) {
            fs::write(path, bad).expect("written");
            let line = place.load(3, 2).expect_err("damaged").to_string();
            assert!(line.starts_with(&path.display().to_string()) && line.contains(": delete this file; "), "{line}");
        }
        fs::write(path, good).expect("written");
    }
    place.load(3, 2).expect("good again");
}

#[test]
fn swapped_files_are_found() {
    let place = place();
    for version in [2, 3] {
        place.save(1, version);
        place.save(2, version);
    }
    let swap = |a: &str, b: &str| {
        let (a, b, c) = (place.path(a), place.path(b), place.path("c"));
        for (from, to) in [(&a, &c), (&b, &a), (&c, &b)] {
            fs::rename(from, to).expect("renamed");
        }
    };
    // Two groups of one shape; the tensors alone, then the manifests too.
    swap("v000002/g0001.safetensors", "v000002/g0002.safetensors");
    assert!(matches!(place.load(1, 2), Err(CheckpointError::Corrupt { .. })));
    swap("v000002/g0001.json", "v000002/g0002.json");
    assert!(matches!(place.load(1, 2), Err(CheckpointError::Corrupt { .. })));
    // A whole version under another's name.
    swap("v000002", "v000003");
    assert!(matches!(place.load(1, 3), Err(CheckpointError::Corrupt { .. })));
    assert_eq!(place.list(), []);
}

#[test]
fn what_is_missing_or_incomplete_is_not_there() {
    let place = place();
    assert_eq!(list(&place.path("nowhere"), RUN), Ok(Vec::new()));
    assert_eq!(place.load(1, 2), Err(CheckpointError::Missing { path: place.path("v000002/g0001.json") }));
    for group in 0..4 {
        place.save(group, 2);
    }
    fs::remove_file(place.path("v000002/g0000.json")).expect("there");
    fs::remove_file(place.path("v000002/g0001.safetensors")).expect("there");
    fs::write(place.path("v000002/g0002.safetensors"), b"short").expect("written");
    fs::write(place.path("v000002/g3.json"), b"{}").expect("written");
    fs::create_dir(place.path("v3")).expect("made");
    assert_eq!(place.list(), [(2, 3)]);
    assert_eq!(place.load(1, 2), Err(CheckpointError::Missing { path: place.path("v000002/g0001.safetensors") }));
    let line = place.load(0, 2).expect_err("no manifest").to_string();
    assert!(line.ends_with("g0000.json: no complete checkpoint shard here: use an older version, or let the node fetch this one from others"), "{line}");
}

#[test]
fn a_crash_before_the_manifest_leaves_no_shard() {
    let place = place();
    place.save(1, 2);
    // As a crash in the second save of the same name leaves it: the new file, no manifest.
    let manifest = fs::read(place.path("v000002/g0001.json")).expect("saved");
    place.save(1, 2);
    fs::rename(place.path("v000002/g0001.json"), place.path("v000002/g0001.json.partial")).expect("renamed");
    assert_eq!(place.list(), []);
    place.save(1, 2);
    assert_eq!(fs::read(place.path("v000002/g0001.json")).expect("saved"), manifest, "equal state, equal bytes");
    assert_eq!(place.list(), [(2, 1)]);
}

#[test]
fn another_run_and_another_model_are_named() {
    let place = place();
    place.save(1, 2);
    let other = load(place.dir.path(), RunId([6; 32]), Group(1), Version(2), place.layout(1)).expect_err("another run");
    assert!(other.to_string().ends_with("it belongs to run 05050505, not to 06060606: point --state at the folder of this run"), "{other}");
    assert_eq!(list(place.dir.path(), RunId([6; 32])), Ok(Vec::new()));
    let other = load(place.dir.path(), RUN, Group(1), Version(2), place.layout(2)).expect_err("another layout");
    assert!(matches!(other, CheckpointError::Foreign { .. }), "{other}");
}

#[test]
fn a_state_that_does_not_fit_is_not_saved() {
    let place = place();
    let snapshot = place.core.snapshot(Group(1)).expect("held");
    assert!(matches!(save(place.dir.path(), &snapshot, place.layout(0), RUN, Timeline(3)), Err(CheckpointError::Unfit { .. })));
    let layout = GroupLayout::new([("a".to_owned(), vec![1])]);
    let stained = Snapshot::new(Group(0), Version(0), Bytes::from(vec![1; 12 * 16]));
    let error = save(place.dir.path(), &stained, &layout, RUN, Timeline(3)).expect_err("padding is not zero");
    assert_eq!(error.to_string(), "the state of group 0 does not fit its layout: its padding is not zero");
}

#[test]
fn pruning_keeps_the_versions_named() {
    let place = place();
    for version in [1, 5, 10, 1_000_000] {
        place.save(3, version);
    }
    fs::write(place.path("v000001/g0003.safetensors.partial"), b"left over").expect("written");
    fs::create_dir(place.path("v5")).expect("made");
    prune(place.dir.path(), Version(10)).expect("pruned");
    assert_eq!(place.list(), [(10, 3), (1_000_000, 3)]);
    let mut left = names(place.dir.path()).expect("listed");
    left.sort();
    assert_eq!(left, ["v000010", "v1000000", "v5"], "what is not ours stays");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let place = place();
    fs::write(place.path("file"), b"").expect("written");
    let snapshot = place.core.snapshot(Group(1)).expect("held");
    let error = save(&place.path("file"), &snapshot, place.layout(1), RUN, Timeline(3)).expect_err("a file is no folder");
    assert!(matches!(error, CheckpointError::Io { action: "create the folder", .. }), "{error}");
}
