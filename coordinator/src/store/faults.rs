//! A disk that fails and forgets, for tests.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use redb::StorageBackend;

/// A disk in memory: what is on the platter, and what was written since the last sync.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// What a reader sees.
    current: Vec<u8>,
    /// What survives a loss of power for certain.
    synced: Vec<u8>,
    /// Writes since the last sync, oldest first.
    unsynced: Vec<(usize, Vec<u8>)>,
    operations: u64,
    /// Operations from this one on fail.
    fails_from: Option<u64>,
}

/// What of the unsynced writes survives.
#[derive(Clone, Copy, Debug)]
pub(super) enum Survives {
    /// The process died: the system writes everything.
    Everything,
    /// The power failed, and nothing was written.
    Nothing,
    /// The power failed, and some writes had happened, in any order.
    Some(u64),
}

impl Disk {
    /// Holding these bytes, all synced.
    pub(super) fn holding(bytes: Vec<u8>) -> Self {
        let state = State { current: bytes.clone(), synced: bytes, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// From the given operation on everything fails.
    pub(super) fn fail_from(&self, operation: u64) {
        self.lock().fails_from = Some(operation);
    }

    /// Operations so far.
    pub(super) fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// All bytes, as a process sees them.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.lock().current.clone()
    }

    /// The disk after a crash.
    pub(super) fn crashed(&self, survives: Survives) -> Self {
        let state = self.lock();
        match survives {
            Survives::Everything => Self::holding(state.current.clone()),
            Survives::Nothing => Self::holding(state.synced.clone()),
            Survives::Some(seed) => {
                // The file's length is journaled by the file system; its contents are not.
                let mut bytes = state.synced.clone();
                bytes.resize(state.current.len(), 0);
                let mut random = seed;
                for (offset, data) in &state.unsynced {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let end = offset + data.len();
                    if (random >> 40).is_multiple_of(2) && end <= bytes.len() {
                        bytes[*offset..end].copy_from_slice(data);
                    }
                }
                Self::holding(bytes)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics holding it")
    }

    fn operate(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let operation = state.operations;
        state.operations += 1;
        if state.fails_from.is_some_and(|first| operation >= first) { Err(io::Error::other("injected")) } else { Ok(state) }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.operate()?.current.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.operate()?;
        let start = offset as usize;
        let source = state.current.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(source);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.operate()?.current.resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.operate()?;
        state.synced = state.current.clone();
        state.unsynced.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.operate()?;
        let (start, end) = (offset as usize, offset as usize + data.len());
        if end > state.current.len() {
            state.current.resize(end, 0);
        }
        state.current[start..end].copy_from_slice(data);
        state.unsynced.push((start, data.to_vec()));
        Ok(())
    }
}
