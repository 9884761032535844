//! Checkpoint shards on disk: the state of one group at one version.
//!
//! `v000123/g0004.safetensors` holds the weights by their Hugging Face names and the optimizer's
//! vectors as `optimizer.m.<name>` and `optimizer.v.<name>`, so that other programs can look inside.
//! `v000123/g0004.json`, written last, says that the shard is complete and what its hashes are: a
//! shard without it does not exist. Each file is written under another name, flushed to disk and
//! renamed. File names come from numbers alone, never from a peer.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use skein_protocol::id::{Group, Hash, RunId, Timeline, Version};
use skein_protocol::message::control::Shard;
use skein_protocol::model::{GroupLayout, TensorSpec};

use crate::engine::Snapshot;

#[cfg(test)]
mod tests;

/// What stands before a tensor's name, in the order of a snapshot's vectors.
const PREFIXES: [&str; 3] = ["", "optimizer.m.", "optimizer.v."];
/// The format of manifests that this build writes and reads.
const FORMAT: u32 = 1;
/// A manifest is no longer than this.
const MANIFEST_BYTES_MAX: u64 = 4096;

/// Why a shard could not be saved or read. One line for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{}: cannot {action}: {reason}", path.display())]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's words.
        reason: String,
    },
    /// There is no such shard, or it was never completed.
    #[error("{}: no complete checkpoint shard here: use an older version, or let the node fetch this one from others", path.display())]
    Missing {
        /// The file that is not there.
        path: PathBuf,
    },
    /// The file is not what was written.
    #[error("{}: {problem}: delete this file; the previous complete checkpoint, or other nodes, have the state", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The shard is whole, and of something else.
    #[error("{}: {problem}: point --state at the folder of this run", path.display())]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// What it belongs to.
        problem: String,
    },
    /// The state handed in to be saved does not fit the group's layout.
    #[error("the state of group {group} does not fit its layout: {problem}")]
    Unfit {
        /// The group.
        group: Group,
        /// What is wrong.
        problem: String,
    },
}

/// What a manifest says about its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: u32,
    run: RunId,
    timeline: Timeline,
    group: Group,
    version: Version,
    /// Root of the snapshot's chunk hashes.
    root: Hash,
    /// Length of the safetensors file.
    bytes: u64,
    /// Hash of the safetensors file.
    file: Hash,
}

/// A manifest as it is on disk: what it says and a hash of that.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    check: Hash,
}

/// Makes a shard durable under `dir`. It exists once this returns, or not at all.
pub fn save(dir: &Path, snapshot: &Snapshot, layout: &GroupLayout, run: RunId, timeline: Timeline) -> Result<Shard, CheckpointError> {
    let (group, version, root) = (snapshot.group, snapshot.version, snapshot.root());
    check_fits(snapshot, layout)?;
    let folder = version_dir(dir, version);
    fs::create_dir_all(&folder).map_err(|error| failed(&folder, "create the folder", &error))?;
    sync_dir(dir)?;
    let (file, manifest_file) = (shard_path(dir, version, group), manifest_path(dir, version, group));
    // A shard of the same name from before the run went back must not vouch for the new file.
    remove_if_there(&manifest_file)?;
    sync_dir(&folder)?;

    let partial = file.with_extension("safetensors.partial");
    write_tensors(&partial, snapshot, layout, run)?;
    let (bytes, hash) = sync_and_hash(&partial)?;
    rename(&partial, &file)?;
    sync_dir(&folder)?;
    write_manifest(&manifest_file, Manifest { format: FORMAT, run, timeline, group, version, root, bytes, file: hash })?;
    sync_dir(&folder)?;
    Ok(Shard { timeline, group, version, root })
}

/// Reads and verifies a shard: every byte of it is as it was saved.
pub fn load(dir: &Path, run: RunId, group: Group, version: Version, layout: &GroupLayout) -> Result<Snapshot, CheckpointError> {
    let manifest = read_manifest(&manifest_path(dir, version, group), run, group, version)?;
    let path = shard_path(dir, version, group);
    open(&path, &read(&path)?, &manifest, layout)
}

/// The state in the bytes of a shard, each of which must be as the manifest vouches.
fn open(path: &Path, bytes: &[u8], manifest: &Manifest, layout: &GroupLayout) -> Result<Snapshot, CheckpointError> {
    let corrupt = |problem: String| CheckpointError::Corrupt { path: path.to_owned(), problem };
    if bytes.len() as u64 != manifest.bytes {
        return Err(corrupt(format!("{} bytes long, its manifest says {}", bytes.len(), manifest.bytes)));
    }
    if Hash::of(bytes) != manifest.file {
        return Err(corrupt("its hash is not the one in its manifest".to_owned()));
    }
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| corrupt(format!("not a safetensors file: {error}")))?;
    let state = gather(&tensors, layout).map_err(|problem| CheckpointError::Foreign { path: path.to_owned(), problem })?;
    let snapshot = Snapshot::new(manifest.group, manifest.version, Bytes::from(state));
    if snapshot.root() == manifest.root { Ok(snapshot) } else { Err(corrupt("its tensors do not add up to the root in its manifest".to_owned())) }
}

/// The run's shards under `dir`, by version and group, as far as their manifests tell: complete
/// when written and of the right length, contents unread. A folder that does not exist holds none.
pub fn list(dir: &Path, run: RunId) -> Result<Vec<Shard>, CheckpointError> {
    let mut shards = Vec::new();
    for version in versions(dir)? {
        for name in names(&version_dir(dir, version))? {
            let Some(group) = number(&name, "g", 4, ".json").and_then(|number| u16::try_from(number).ok()).map(Group) else { continue };
            match complete(dir, run, group, version) {
                Ok(shard) => shards.push(shard),
                Err(error) => tracing::warn!(%group, %version, "skipping a checkpoint shard: {error}"),
            }
        }
    }
    shards.sort_unstable_by_key(|shard| (shard.version, shard.group));
    Ok(shards)
}

/// Deletes all shards of versions below `keep_from`. Manifests go first, so that what is half
/// deleted does not exist.
pub fn prune(dir: &Path, keep_from: Version) -> Result<(), CheckpointError> {
    for version in versions(dir)?.into_iter().filter(|version| *version < keep_from) {
        let folder = version_dir(dir, version);
        for name in names(&folder)?.iter().filter(|name| name.ends_with(".json")) {
            remove_if_there(&folder.join(name))?;
        }
        sync_dir(&folder)?;
        fs::remove_dir_all(&folder).map_err(|error| failed(&folder, "delete the folder", &error))?;
    }
    Ok(())
}

/// The folder of a version.
fn version_dir(dir: &Path, version: Version) -> PathBuf {
    dir.join(format!("v{version:0>6}"))
}

fn shard_path(dir: &Path, version: Version, group: Group) -> PathBuf {
    version_dir(dir, version).join(format!("g{group:0>4}.safetensors"))
}

fn manifest_path(dir: &Path, version: Version, group: Group) -> PathBuf {
    version_dir(dir, version).join(format!("g{group:0>4}.json"))
}

/// The number in a name exactly as we write it.
fn number(name: &str, prefix: &str, width: usize, suffix: &str) -> Option<u64> {
    let number: u64 = name.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()?;
    (name == format!("{prefix}{number:0>width$}{suffix}")).then_some(number)
}

/// The versions that have a folder, ascending.
fn versions(dir: &Path) -> Result<Vec<Version>, CheckpointError> {
    let mut versions: Vec<Version> = names(dir)?.iter().filter_map(|name| number(name, "v", 6, "")).map(Version).collect();
    versions.sort_unstable();
    Ok(versions)
}

/// The names in a folder; none if it does not exist.
fn names(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(dir, "list the folder", &error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| failed(dir, "list the folder", &error))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// A shard whose manifest is good and whose file has the right length.
fn complete(dir: &Path, run: RunId, group: Group, version: Version) -> Result<Shard, CheckpointError> {
    let manifest = read_manifest(&manifest_path(dir, version, group), run, group, version)?;
    let path = shard_path(dir, version, group);
    let len = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) => return Err(unreadable(&path, &error)),
    };
    if len == manifest.bytes {
        Ok(Shard { timeline: manifest.timeline, group, version, root: manifest.root })
    } else {
        Err(CheckpointError::Corrupt { path, problem: format!("{len} bytes long, its manifest says {}", manifest.bytes) })
    }
}

/// The state must have the layout's length, and zeros between tensors, which a file does not keep.
fn check_fits(snapshot: &Snapshot, layout: &GroupLayout) -> Result<(), CheckpointError> {
    let unfit = |problem| Err(CheckpointError::Unfit { group: snapshot.group, problem });
    let expected = PREFIXES.len() * 4 * layout.len;
    if snapshot.bytes.len() != expected {
        return unfit(format!("{} bytes, expected {expected}", snapshot.bytes.len()));
    }
    let ends = layout.tensors.iter().skip(1).map(|tensor| tensor.offset).chain([layout.len]);
    let gaps: Vec<_> = layout.tensors.iter().zip(ends).map(|(tensor, end)| 4 * (tensor.offset + tensor.len())..4 * end).collect();
    let clean = snapshot.bytes.chunks(4 * layout.len).all(|vector| gaps.iter().all(|gap| vector[gap.clone()].iter().all(|byte| *byte == 0)));
    if clean { Ok(()) } else { unfit("its padding is not zero".to_owned()) }
}

/// Each vector's tensors: its name in the file, and where its bytes are in a snapshot.
fn places(layout: &GroupLayout) -> impl Iterator<Item = (String, &TensorSpec, std::ops::Range<usize>)> {
    PREFIXES.iter().enumerate().flat_map(move |(vector, prefix)| {
        layout.tensors.iter().map(move |tensor| {
            let start = 4 * (vector * layout.len + tensor.offset);
            (format!("{prefix}{}", tensor.name), tensor, start..start + 4 * tensor.len())
        })
    })
}

fn write_tensors(path: &Path, snapshot: &Snapshot, layout: &GroupLayout, run: RunId) -> Result<(), CheckpointError> {
    let bad = |error: safetensors::SafeTensorError| CheckpointError::Io { path: path.to_owned(), action: "write the file", reason: error.to_string() };
    let mut tensors = Vec::new();
    for (name, tensor, range) in places(layout) {
        tensors.push((name, TensorView::new(Dtype::F32, tensor.shape.clone(), &snapshot.bytes[range]).map_err(bad)?));
    }
    // One entry: the order of several in the file would be random.
    let about = serde_json::json!({ "run": run, "group": snapshot.group, "version": snapshot.version, "root": snapshot.root() });
    let metadata = [("skein".to_owned(), about.to_string())].into();
    safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(bad)
}

/// A snapshot's bytes out of a file's tensors, which must be exactly the layout's.
fn gather(tensors: &SafeTensors<'_>, layout: &GroupLayout) -> Result<Vec<u8>, String> {
    let mut state = vec![0; PREFIXES.len() * 4 * layout.len];
    let mut expected = 0;
    for (name, tensor, range) in places(layout) {
        let found = tensors.tensor(&name).map_err(|_| format!("it has no tensor `{name}`"))?;
        if found.dtype() != Dtype::F32 || found.shape() != tensor.shape {
            return Err(format!("`{name}` is {:?} {:?}, expected F32 {:?}", found.dtype(), found.shape(), tensor.shape));
        }
        state[range].copy_from_slice(found.data());
        expected += 1;
    }
    if tensors.len() == expected { Ok(state) } else { Err(format!("it has {} tensors, expected {expected}", tensors.len())) }
}

fn write_manifest(path: &Path, manifest: Manifest) -> Result<(), CheckpointError> {
    let partial = path.with_extension("json.partial");
    let mut file = File::create(&partial).map_err(|error| failed(&partial, "create the file", &error))?;
    file.write_all(&seal(manifest)).and_then(|()| file.sync_all()).map_err(|error| failed(&partial, "write the file", &error))?;
    rename(&partial, path)
}

/// The bytes of a manifest on disk: equal manifests, equal bytes.
fn seal(manifest: Manifest) -> Vec<u8> {
    let check = Hash::of(&json(&manifest));
    json(&Sealed { manifest, check })
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain fields become JSON")
}

fn read_manifest(path: &Path, run: RunId, group: Group, version: Version) -> Result<Manifest, CheckpointError> {
    let len = fs::metadata(path).map_err(|error| unreadable(path, &error))?.len();
    if len > MANIFEST_BYTES_MAX {
        return Err(CheckpointError::Corrupt { path: path.to_owned(), problem: "too long for a manifest".to_owned() });
    }
    check_manifest(path, &read(path)?, run, group, version)
}

fn check_manifest(path: &Path, bytes: &[u8], run: RunId, group: Group, version: Version) -> Result<Manifest, CheckpointError> {
    let corrupt = |problem: &str| CheckpointError::Corrupt { path: path.to_owned(), problem: problem.to_owned() };
    let sealed: Sealed = serde_json::from_slice(bytes).map_err(|error| corrupt(&format!("not a manifest: {error}")))?;
    let manifest = sealed.manifest;
    // Bytes, not values: even a change that means the same is a change.
    if seal(manifest.clone()) != bytes {
        return Err(corrupt("not as it was written"));
    }
    let foreign = |problem| Err(CheckpointError::Foreign { path: path.to_owned(), problem });
    if manifest.format != FORMAT {
        return foreign(format!("its format is {}, this program reads {FORMAT}", manifest.format));
    }
    if (manifest.group, manifest.version) != (group, version) {
        return Err(corrupt(&format!("it is the manifest of group {} at version {}", manifest.group, manifest.version)));
    }
    if manifest.run != run {
        return foreign(format!("it belongs to run {}, not to {}", manifest.run.short(), run.short()));
    }
    Ok(manifest)
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    fs::read(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &io::Error) -> CheckpointError {
    if error.kind() == io::ErrorKind::NotFound { CheckpointError::Missing { path: path.to_owned() } } else { failed(path, "read the file", error) }
}

fn failed(path: &Path, action: &'static str, error: &io::Error) -> CheckpointError {
    CheckpointError::Io { path: path.to_owned(), action, reason: error.to_string() }
}

/// Flushes a file to disk; its length and hash as read back.
fn sync_and_hash(path: &Path) -> Result<(u64, Hash), CheckpointError> {
    let read_back = || {
        let file = File::options().read(true).write(true).open(path)?;
        file.sync_all()?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file)?;
        Ok((hasher.count(), Hash(*hasher.finalize().as_bytes())))
    };
    read_back().map_err(|error| failed(path, "flush the file", &error))
}

fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).map_err(|error| failed(to, "rename the file into place", &error))
}

fn remove_if_there(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path, "delete the file", &error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Flushes a folder, so that what was renamed or made in it stays so. Only Unix needs and allows it.
fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    if cfg!(unix) {
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(|error| failed(dir, "flush the folder", &error))?;
    }
    Ok(())
}
