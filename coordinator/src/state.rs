//! The coordinator's state folder: one process at a time, how often it was started, where it listens.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the file that says where a running coordinator listens.
pub const ENDPOINTS_FILE: &str = "endpoints.json";
/// Name of the coordinator's key file.
pub const IDENTITY_FILE: &str = "identity.key";
const LOCK_FILE: &str = "lock";
const BOOT_FILE: &str = "boot";

/// What is wrong with a state folder. One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file or folder cannot be used.
    #[error("cannot use {} ({problem}); choose another --state, or mend its rights", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
    /// Another process has it.
    #[error("{} is in use by another coordinator; stop it, or choose another --state", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A file does not hold what it should.
    #[error("{} holds no {expected}; {remedy}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        expected: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// No coordinator has been started there.
    #[error("{} holds no {ENDPOINTS_FILE}; start a coordinator with this --state, or give an address", path.display())]
    NoEndpoints {
        /// The folder.
        path: PathBuf,
    },
}

/// A state folder that is ours until this is dropped.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    // Held for its lock.
    _lock: File,
}

impl StateDir {
    /// Makes the folder if it is missing and takes it.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        std::fs::create_dir_all(path).map_err(|error| io_error(path, &error))?;
        let lock_path = path.join(LOCK_FILE);
        let lock = File::options().write(true).create(true).truncate(false).open(&lock_path).map_err(|error| io_error(&lock_path, &error))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(StateError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(io_error(&lock_path, &error)),
        }
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Counts one more start, durably, from 1.
    pub fn next_boot(&self) -> Result<u64, StateError> {
        let path = self.file(BOOT_FILE);
        let last = match std::fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().map_err(|_| StateError::Malformed {
                path: path.clone(),
                expected: "number",
                remedy: "write into it a number above that of all starts so far, such as 1000",
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0_u64,
            Err(error) => return Err(io_error(&path, &error)),
        };
        let boot = last.wrapping_add(1);
        write_atomically(&path, format!("{boot}\n").as_bytes())?;
        Ok(boot)
    }
}

/// Where a coordinator listens: `endpoints.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    /// Addresses of the control plane, with the key: what nodes are given.
    pub control: Vec<String>,
    /// Where the status is served: `http://127.0.0.1:port`.
    pub http: String,
    /// The coordinator's key as libp2p writes it.
    pub peer_id: String,
}

impl Endpoints {
    /// Writes them into the state folder: whole, or not at all.
    pub fn write(&self, state: &StateDir) -> Result<(), StateError> {
        let mut text = serde_json::to_vec_pretty(self).expect("plain strings");
        text.push(b'\n');
        write_atomically(&state.file(ENDPOINTS_FILE), &text)
    }

    /// Takes them away: nobody listens there, or not yet.
    pub fn remove(state: &StateDir) -> Result<(), StateError> {
        let path = state.file(ENDPOINTS_FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io_error(&path, &error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Reads those of the coordinator whose state folder this is.
    pub fn read(folder: &Path) -> Result<Self, StateError> {
        let path = folder.join(ENDPOINTS_FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(StateError::NoEndpoints { path: folder.to_owned() }),
            Err(error) => return Err(io_error(&path, &error)),
        };
        let remedy = "start the coordinator again, or give its address";
        serde_json::from_slice(&text).map_err(|_| StateError::Malformed { path, expected: "endpoints", remedy })
    }
}

/// Replaces a file so that a reader, or whoever comes after a crash, finds the old or the new one.
fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let unfinished = path.with_extension("new");
    let write = || {
        let mut file = File::create(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&unfinished, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    write().map_err(|error: std::io::Error| io_error(path, &error))
}

fn io_error(path: &Path, error: &std::io::Error) -> StateError {
    StateError::Io { path: path.to_owned(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_at_a_time() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("deep/state");
        let first = StateDir::open(&path).expect("opens");
        assert!(matches!(StateDir::open(&path), Err(StateError::InUse { .. })));
        drop(first);
        StateDir::open(&path).expect("free again");
    }

    #[test]
    fn starts_are_counted() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for expected in 1..4 {
            assert_eq!(StateDir::open(folder.path()).expect("opens").next_boot().expect("counts"), expected);
        }
        std::fs::write(folder.path().join(BOOT_FILE), "many").expect("writes");
        assert!(matches!(StateDir::open(folder.path()).expect("opens").next_boot(), Err(StateError::Malformed { .. })));
    }

    #[test]
    fn endpoints_are_read_as_written() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert!(matches!(Endpoints::read(folder.path()), Err(StateError::NoEndpoints { .. })));
        let state = StateDir::open(folder.path()).expect("opens");
        let endpoints = Endpoints { control: vec!["/ip4/127.0.0.1/tcp/1/p2p/x".to_owned()], http: "http://127.0.0.1:2".to_owned(), peer_id: "x".to_owned() };
        endpoints.write(&state).expect("writes");
        assert_eq!(Endpoints::read(folder.path()).expect("reads"), endpoints);
        std::fs::write(folder.path().join(ENDPOINTS_FILE), "{").expect("writes");
        assert!(matches!(Endpoints::read(folder.path()), Err(StateError::Malformed { .. })));
        for _ in 0..2 {
            Endpoints::remove(&state).expect("gone, and gone already");
        }
        assert!(matches!(Endpoints::read(folder.path()), Err(StateError::NoEndpoints { .. })));
    }
}
