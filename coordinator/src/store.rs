//! The log on disk: [`Record`]s in order, durable before anything that relies on them.
//!
//! [`RedbStore`] keeps it in one redb file behind an injectable backend, so that every operation
//! on the disk can fail in a test; [`MemStore`] is for the simulator.
//!
//! Each append is one transaction in two phases: after a crash the log is whole, with the newest
//! append in it or not, and in it if `append` had returned. Each record carries a BLAKE3 checksum
//! over its place and bytes, and redb checks its own pages on open: damage is an error, never a
//! shorter log. (One bit of the file's header cannot be told from a crash before the newest
//! append was acknowledged: the one that names the newer of two states. The commits that nodes
//! keep make up for it.)

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, StorageError, TableDefinition};
use skein_protocol::limits;
use skein_protocol::wire;

use crate::record::Record;

/// Name of the log's file in the state folder.
pub const LOG_FILE: &str = "log.redb";

/// Version of what records mean and how they are written. A log of another version is refused.
const FORMAT: u64 = 1;
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("skein.meta");
const FORMAT_KEY: &str = "format";
/// The place of a record, from 0, to its checksum and bytes.
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("skein.log.1");
const CHECKSUM_BYTES: usize = 32;
/// Memory that the database may use for its cache; the log is written, and read once.
const CACHE_BYTES: usize = 8 * 1024 * 1024;

/// Where the log is kept.
pub trait Store {
    /// Adds records to the end of the log, all or none. When this returns `Ok`, they are durable.
    /// After an error the store takes nothing more: what is on disk is known again only after a restart.
    fn append(&mut self, records: &[Record]) -> Result<(), StoreError>;

    /// The whole log, in order.
    fn load(&mut self) -> Result<Vec<Record>, StoreError>;
}

/// What went wrong with the log. One line for the user: which file, what, what to do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened or read.
    #[error("cannot open {}: {problem}; check that the folder exists and is yours to write", path.display())]
    Open {
        /// The log's file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// Another process has it.
    #[error("{} is in use by another coordinator; stop it, or choose another --state", path.display())]
    InUse {
        /// The log's file.
        path: PathBuf,
    },
    /// The file is damaged.
    #[error("{} is damaged ({problem}); put back a copy of it, or start a new run in another --state", path.display())]
    Damaged {
        /// The log's file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Written by a build that writes logs differently.
    #[error("{} is a log of format {found}, this build reads format {FORMAT}; use the skein-coordinator that wrote it, or another --state", path.display())]
    Format {
        /// The log's file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// Records could not be made durable.
    #[error("cannot write {}: {problem}; make room or mend the disk, then start again with --resume", path.display())]
    Write {
        /// The log's file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
}

/// The log in one redb file.
#[derive(Debug)]
pub struct RedbStore {
    path: PathBuf,
    database: Database,
    /// Records in the log.
    len: u64,
    failed: bool,
}

impl RedbStore {
    /// Opens the log at `path`, or begins one. Checks all of an existing file.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        if !path.exists() {
            Self::create(path)?;
        }
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).map_err(|error| unopened(path, &error))?;
        let backend = FileBackend::new(file).map_err(|error| open_failure(path, &error))?;
        Self::with_backend(path, backend)
    }

    /// Makes an empty log under another name first: a crash while redb writes its header would
    /// leave a file that it does not open again.
    fn create(path: &Path) -> Result<(), StoreError> {
        let unopened = |error: std::io::Error| unopened(path, &error);
        let unfinished = path.with_extension("new");
        let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&unfinished).map_err(unopened)?;
        let backend = FileBackend::new(file).map_err(|error| open_failure(&unfinished, &error))?;
        let store = Self::with_backend(&unfinished, backend)?;
        store.database.close().map_err(|error| open_failure(&unfinished, &error))?;
        std::fs::rename(&unfinished, path).map_err(unopened)?;
        // The new name is durable only after its folder is.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(unopened)
    }

    /// Opens or begins a log on any storage; `path` is its name in messages.
    pub fn with_backend(path: &Path, backend: impl StorageBackend) -> Result<Self, StoreError> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
        let database = builder.create_with_backend(backend).map_err(|error| open_failure(path, &error))?;
        let mut store = Self { path: path.to_owned(), database, len: 0, failed: false };
        match store.format()? {
            None => store.write(|transaction| {
                transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
                transaction.open_table(LOG)?;
                Ok(())
            })?,
            Some(FORMAT) => {}
            Some(found) => return Err(StoreError::Format { path: store.path, found }),
        }
        store.len = store.load()?.len() as u64;
        Ok(store)
    }

    /// The format that the file says it has; `None` if it is new.
    fn format(&self) -> Result<Option<u64>, StoreError> {
        let transaction = self.database.begin_read().map_err(|error| self.damaged(&error))?;
        match transaction.open_table(META) {
            Ok(meta) => {
                let format = meta.get(FORMAT_KEY).map_err(|error| self.damaged(&error))?;
                format.map(|value| Some(value.value())).ok_or_else(|| self.damaged(&"it does not say its format"))
            }
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(self.damaged(&error)),
        }
    }

    fn write(&mut self, body: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>) -> Result<(), StoreError> {
        let path = &self.path;
        let failure = |problem: String| StoreError::Write { path: path.clone(), problem };
        if self.failed {
            return Err(failure("an earlier write failed".to_owned()));
        }
        // Until the commit is through, nobody knows what is on disk.
        self.failed = true;
        let mut transaction = self.database.begin_write().map_err(|error| failure(error.to_string()))?;
        transaction.set_two_phase_commit(true);
        body(&transaction).map_err(|error| failure(error.to_string()))?;
        transaction.commit().map_err(|error| failure(error.to_string()))?;
        self.failed = false;
        Ok(())
    }

    fn damaged(&self, problem: &impl ToString) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), problem: problem.to_string() }
    }

    fn record(&self, place: u64, value: &[u8]) -> Result<Record, StoreError> {
        let (sum, bytes) = value.split_at_checked(CHECKSUM_BYTES).ok_or_else(|| self.damaged(&format!("record {place} is cut short")))?;
        if checksum(place, bytes).as_bytes() != sum {
            return Err(self.damaged(&format!("record {place} does not match its checksum")));
        }
        wire::decode(bytes, limits::CONTROL_BYTES_MAX).map_err(|error| self.damaged(&format!("record {place}: {error}")))
    }
}

impl Store for RedbStore {
    fn append(&mut self, records: &[Record]) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let mut values = Vec::with_capacity(records.len());
        for (place, record) in (self.len..).zip(records) {
            let bytes = wire::encode(record);
            if bytes.len() > limits::CONTROL_BYTES_MAX {
                let problem = format!("a record of {} bytes, at most {} allowed", bytes.len(), limits::CONTROL_BYTES_MAX);
                return Err(StoreError::Write { path: self.path.clone(), problem });
            }
            let mut value = checksum(place, &bytes).as_bytes().to_vec();
            value.extend_from_slice(&bytes);
            values.push((place, value));
        }
        self.write(|transaction| {
            let mut log = transaction.open_table(LOG)?;
            for (place, value) in &values {
                log.insert(place, value.as_slice())?;
            }
            Ok(())
        })?;
        self.len += records.len() as u64;
        Ok(())
    }

    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let transaction = self.database.begin_read().map_err(|error| self.damaged(&error))?;
        let log = transaction.open_table(LOG).map_err(|error| self.damaged(&error))?;
        let mut records = Vec::new();
        for entry in log.iter().map_err(|error| self.damaged(&error))? {
            let (place, value) = entry.map_err(|error| self.damaged(&error))?;
            if place.value() != records.len() as u64 {
                return Err(self.damaged(&format!("record {} is missing", records.len())));
            }
            records.push(self.record(place.value(), value.value())?);
        }
        Ok(records)
    }
}

fn checksum(place: u64, bytes: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_derive_key("skein log record v1");
    hasher.update(&place.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

fn unopened(path: &Path, error: &std::io::Error) -> StoreError {
    StoreError::Open { path: path.to_owned(), problem: error.to_string() }
}

fn open_failure(path: &Path, error: &DatabaseError) -> StoreError {
    let path = path.to_owned();
    if matches!(error, DatabaseError::DatabaseAlreadyOpen) {
        return StoreError::InUse { path };
    }
    let DatabaseError::Storage(StorageError::Io(io)) = error else {
        return StoreError::Damaged { path, problem: error.to_string() };
    };
    let problem = io.to_string();
    // A file without redb's magic number is no matter of rights or folders.
    if io.kind() == std::io::ErrorKind::InvalidData { StoreError::Damaged { path, problem } } else { StoreError::Open { path, problem } }
}

/// The log in memory: what survives a simulated crash.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemStore {
    records: Vec<Record>,
}

impl Store for MemStore {
    fn append(&mut self, records: &[Record]) -> Result<(), StoreError> {
        self.records.extend_from_slice(records);
        Ok(())
    }

    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        Ok(self.records.clone())
    }
}
