//! Getting a data set from peers: a state machine without I/O.
//!
//! The manifest comes first and is checked against the data set's name; then the files it lists,
//! one after another, each in chunks from several peers at once. Whoever drives it sends what
//! [`Fetch::next`] asks for and hands in what comes. Memory is bounded by one file
//! (`limits::SHARD_BYTES_MAX`, `limits::TOKENIZER_BYTES_MAX`). A chunk is proved right only together with
//! its whole file; so when a file of several peers is wrong, it is fetched again from one peer
//! alone, and whose chunks prove wrong then is asked no more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use skein_protocol::id::{Hash, NodeId};
use skein_protocol::limits::{BLOB_TIME_MAX, BLOBS_IN_FLIGHT, BLOBS_IN_FLIGHT_PER_PEER, MANIFEST_BYTES_MAX, STATE_CHUNK_BYTES};
use skein_protocol::manifest::{DataManifest, FileEntry, ManifestError};
use skein_protocol::time::Time;

/// A request to send: `FetchBlob { hash, chunk }` to `peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Whom to ask.
    pub peer: NodeId,
    /// For which file.
    pub hash: Hash,
    /// For which chunk of [`STATE_CHUNK_BYTES`].
    pub chunk: u32,
}

/// A file that is complete and verified, to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Its hash.
    pub hash: Hash,
    /// All of it.
    pub bytes: Bytes,
    /// Whether it is the manifest. It comes last: where it is, the data set is complete.
    pub is_manifest: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchProgress {
    /// Bytes of files that are here, and of the chunks of the present one.
    pub done: u64,
    /// Bytes of all files; none until the manifest is here.
    pub total: Option<u64>,
}

/// What a peer sent cannot be used. The fetch goes on without it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Nobody asked this peer for that, or not any more.
    #[error("a chunk that was not asked for")]
    Unasked,
    /// The chunk or its file has the wrong length.
    #[error("file {} has {expected} bytes, the peer says {found}, or sent a chunk that does not fit", hash.short())]
    WrongLength {
        /// The file.
        hash: Hash,
        /// Its length, or the most it may have.
        expected: u64,
        /// What the peer says.
        found: u64,
    },
    /// The whole file has another hash.
    #[error("file {} came damaged", hash.short())]
    Corrupt {
        /// The file.
        hash: Hash,
    },
    /// The manifest has the right hash, and cannot be used: no peer can mend that.
    #[error("the run's data cannot be used: {0}")]
    Manifest(#[from] ManifestError),
}

/// The state of fetching one data set.
#[derive(Debug)]
pub struct Fetch {
    name: Hash,
    have: BTreeSet<Hash>,
    peers: BTreeMap<NodeId, Peer>,
    manifest: Option<Bytes>,
    queue: VecDeque<FileEntry>,
    current: Option<Assembly>,
    completed: VecDeque<Fetched>,
    /// Bytes of complete files, and of all.
    done: u64,
    total: Option<u64>,
    failed: bool,
}

#[derive(Debug, Default)]
struct Peer {
    lacks: BTreeSet<Hash>,
    /// Requests it let pass their deadline: who has more is asked later.
    missed: u32,
    in_flight: usize,
    /// It sent what cannot be right.
    banned: bool,
}

impl Peer {
    fn in_flight_max(&self) -> usize {
        if self.missed == 0 { BLOBS_IN_FLIGHT_PER_PEER } else { 1 }
    }
}

/// One file on its way.
#[derive(Debug)]
struct Assembly {
    hash: Hash,
    /// Known from the manifest; the manifest's own from the first answer.
    byte_len: Option<u64>,
    chunks: Vec<Option<(NodeId, Bytes)>>,
    asked: BTreeMap<u32, (NodeId, Time)>,
    sources: BTreeSet<NodeId>,
    /// After a damaged file: from one peer alone.
    alone: bool,
    /// Who sent which chunk of the damaged file, with the chunk's hash: who lied shows when the
    /// file is right.
    evidence: Vec<(usize, NodeId, Hash)>,
}

impl Assembly {
    fn new(hash: Hash, byte_len: Option<u64>, alone: bool) -> Self {
        let chunks = byte_len.map_or(1, chunk_count);
        Self { hash, byte_len, chunks: vec![None; chunks], asked: BTreeMap::new(), sources: BTreeSet::new(), alone, evidence: Vec::new() }
    }
}

fn chunk_count(byte_len: u64) -> usize {
    usize::try_from(byte_len.div_ceil(STATE_CHUNK_BYTES as u64)).expect("limits bound every file").max(1)
}

impl Fetch {
    /// Fetches the data set called `name`, without the files of `have`.
    pub fn new(name: Hash, have: BTreeSet<Hash>) -> Self {
        let current = Some(Assembly::new(name, None, false));
        Self {
            name,
            have,
            peers: BTreeMap::new(),
            manifest: None,
            queue: VecDeque::new(),
            current,
            completed: VecDeque::new(),
            done: 0,
            total: None,
            failed: false,
        }
    }

    /// A peer can be asked. Said again of a known peer, it is asked again for what it lacked.
    pub fn peer_up(&mut self, peer: NodeId) {
        self.peers.entry(peer).or_default().lacks.clear();
    }

    /// A peer is gone: what it was asked for is asked of others.
    pub fn peer_down(&mut self, peer: NodeId) {
        if self.peers.get(&peer).is_some_and(|known| !known.banned) {
            self.peers.remove(&peer);
        }
        self.release(peer);
    }

    /// The next request to send, if any may be sent now. Call until there is none.
    pub fn next(&mut self, now: Time) -> Option<Ask> {
        self.expire(now);
        let current = self.current.as_ref()?;
        if current.asked.len() >= BLOBS_IN_FLIGHT {
            return None;
        }
        let chunk = (0_u32..).zip(&current.chunks).find(|(chunk, bytes)| bytes.is_none() && !current.asked.contains_key(chunk))?.0;
        let peer = self.choose()?;
        let known = self.peers.get_mut(&peer).expect("just chosen");
        known.in_flight += 1;
        // Longer after each miss, so that a slow peer gets a chunk through at some time.
        let patience = BLOB_TIME_MAX * 2_u32.pow(known.missed.min(6));
        let current = self.current.as_mut().expect("looked at above");
        current.asked.insert(chunk, (peer, now + patience));
        if current.alone {
            current.sources.insert(peer);
        }
        Some(Ask { peer, hash: current.hash, chunk })
    }

    /// When [`Fetch::next`] should be called even if nothing comes.
    pub fn next_timeout(&self) -> Option<Time> {
        self.current.as_ref()?.asked.values().map(|(_, due)| *due).min()
    }

    /// A chunk came. What it completes waits in [`Fetch::take_completed`].
    pub fn blob(&mut self, peer: NodeId, hash: Hash, chunk: u32, byte_len: u64, bytes: Bytes) -> Result<(), FetchError> {
        let current = self.current.as_mut().filter(|current| current.hash == hash).ok_or(FetchError::Unasked)?;
        if current.asked.get(&chunk).is_none_or(|(asked, _)| *asked != peer) {
            return Err(FetchError::Unasked);
        }
        current.asked.remove(&chunk);
        if let Some(known) = self.peers.get_mut(&peer) {
            known.in_flight -= 1;
        }
        // The manifest's length is its sender's claim, within a bound, until its hash proves it.
        let most = current.byte_len.unwrap_or(MANIFEST_BYTES_MAX as u64);
        let fits = current.byte_len.map_or((1..=most).contains(&byte_len), |known| known == byte_len);
        let expected = byte_len.saturating_sub(u64::from(chunk) * STATE_CHUNK_BYTES as u64).min(STATE_CHUNK_BYTES as u64);
        if !fits || bytes.len() as u64 != expected {
            self.ban(peer);
            return Err(FetchError::WrongLength { hash, expected: most, found: byte_len });
        }
        if current.byte_len.is_none() {
            current.byte_len = Some(byte_len);
            current.chunks.resize(chunk_count(byte_len), None);
        }
        current.chunks[chunk as usize] = Some((peer, bytes));
        current.sources.insert(peer);
        if current.chunks.iter().any(Option::is_none) {
            return Ok(());
        }
        let complete = self.current.take().expect("looked at above");
        self.complete(complete)
    }

    /// A peer does not have a file.
    pub fn no_blob(&mut self, peer: NodeId, hash: Hash) {
        // Only a file that is wanted now is remembered: a peer cannot make this set grow.
        if self.current.as_ref().is_some_and(|current| current.hash == hash) {
            if let Some(known) = self.peers.get_mut(&peer) {
                known.lacks.insert(hash);
            }
            self.release(peer);
        }
    }

    /// A file that is complete and verified, to be saved in this order. Take after each
    /// [`Fetch::blob`]: what is not taken stays in memory.
    pub fn take_completed(&mut self) -> Option<Fetched> {
        self.completed.pop_front()
    }

    /// Whether everything has been fetched and taken.
    pub fn is_done(&self) -> bool {
        self.current.is_none() && self.completed.is_empty() && !self.failed
    }

    /// Whether nobody who is known has what is wanted next: to wait for other peers.
    pub fn is_stuck(&self) -> bool {
        self.current.as_ref().is_some_and(|current| !self.peers.values().any(|peer| !peer.banned && !peer.lacks.contains(&current.hash)))
    }

    /// How far it is.
    pub fn progress(&self) -> FetchProgress {
        let partial = self.current.iter().filter(|current| current.hash != self.name).flat_map(|current| current.chunks.iter().flatten());
        FetchProgress { done: self.done + partial.map(|(_, bytes)| bytes.len() as u64).sum::<u64>(), total: self.total }
    }

    fn choose(&self) -> Option<NodeId> {
        let current = self.current.as_ref()?;
        let alone = current.sources.first().filter(|_| current.alone);
        let able = self.peers.iter().filter(|(id, peer)| {
            let allowed = alone.is_none_or(|only| only == *id);
            allowed && !peer.banned && !peer.lacks.contains(&current.hash) && peer.in_flight < peer.in_flight_max()
        });
        // Who missed deadlines is asked when nobody else is free.
        able.min_by_key(|(id, peer)| (peer.missed, peer.in_flight, **id)).map(|(id, _)| *id)
    }

    fn expire(&mut self, now: Time) {
        let Some(current) = &self.current else { return };
        let late: BTreeSet<NodeId> = current.asked.values().filter(|(_, due)| *due <= now).map(|(peer, _)| *peer).collect();
        for peer in late {
            if let Some(known) = self.peers.get_mut(&peer) {
                known.missed += 1;
            }
            self.release(peer);
        }
    }

    /// Takes back what `peer` was asked for. A file from one peer alone starts afresh.
    fn release(&mut self, peer: NodeId) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.in_flight = 0;
        }
        let Some(current) = &mut self.current else { return };
        current.asked.retain(|_, (asked, _)| *asked != peer);
        if current.alone && current.sources.contains(&peer) {
            // The manifest's length was a claim of that peer too.
            let byte_len = current.byte_len.filter(|_| current.hash != self.name);
            let evidence = std::mem::take(&mut current.evidence);
            *current = Assembly { evidence, ..Assembly::new(current.hash, byte_len, true) };
        }
    }

    fn ban(&mut self, peer: NodeId) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.banned = true;
        }
        self.release(peer);
    }

    /// All chunks of a file are here: is it the file?
    fn complete(&mut self, complete: Assembly) -> Result<(), FetchError> {
        let chunks: Vec<(NodeId, Bytes)> = complete.chunks.into_iter().flatten().collect();
        let bytes: Bytes = chunks.iter().map(|(_, bytes)| bytes.as_ref()).collect::<Vec<_>>().concat().into();
        let hash = complete.hash;
        if Hash::of(&bytes) != hash {
            if let [only] = complete.sources.iter().collect::<Vec<_>>()[..] {
                self.ban(*only);
            }
            let byte_len = complete.byte_len.filter(|_| hash != self.name);
            let mut evidence = complete.evidence;
            if !complete.alone {
                evidence = chunks.iter().enumerate().map(|(chunk, (peer, bytes))| (chunk, *peer, Hash::of(bytes))).collect();
            }
            self.current = Some(Assembly { evidence, ..Assembly::new(hash, byte_len, true) });
            return Err(FetchError::Corrupt { hash });
        }
        for (chunk, peer, sent) in complete.evidence {
            if chunks.get(chunk).is_none_or(|(_, right)| Hash::of(right) != sent) {
                self.ban(peer);
            }
        }
        if hash == self.name {
            self.failed = true; // until the manifest proves usable
            let files = DataManifest::from_bytes(hash, &bytes)?.files();
            self.failed = false;
            self.total = Some(files.iter().map(|file| file.bytes).sum());
            self.manifest = Some(bytes);
            let (here, wanted): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| self.have.contains(&file.hash));
            self.done = here.iter().map(|file| file.bytes).sum();
            self.queue = wanted.into();
        } else {
            self.done += bytes.len() as u64;
            self.completed.push_back(Fetched { hash, bytes, is_manifest: false });
        }
        match self.queue.pop_front() {
            Some(file) => self.current = Some(Assembly::new(file.hash, Some(file.bytes), false)),
            None => self.completed.extend(self.manifest.take().map(|bytes| Fetched { hash: self.name, bytes, is_manifest: true })),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::store::{Store, plan_fetch, save_fetched, store_of};

    const A: NodeId = NodeId([1; 32]);
    const B: NodeId = NodeId([2; 32]);
    const C: NodeId = NodeId([3; 32]);

    /// Three shards of up to 2.1 chunks, and what one asks of them.
    struct World {
        folder: tempfile::TempDir,
        store: Store,
        fetch: Fetch,
        now: Time,
        asked: BTreeMap<NodeId, usize>,
        errors: Vec<FetchError>,
        saved: Vec<Fetched>,
    }

    fn world(peers: &[NodeId]) -> World {
        let folder = tempfile::tempdir().expect("temporary folder");
        let train: Vec<u16> = (0..2_500_000_u32).map(|i| (i * 7 % 65_521) as u16).collect();
        let store = store_of(folder.path(), &train, &[7; 40], 1_100_000);
        let mut fetch = Fetch::new(store.name(), BTreeSet::new());
        peers.iter().for_each(|peer| fetch.peer_up(*peer));
        World { folder, store, fetch, now: Time(0), asked: BTreeMap::new(), errors: Vec::new(), saved: Vec::new() }
    }

    impl World {
        fn asks(&mut self) -> Vec<Ask> {
            let asks: Vec<Ask> = std::iter::from_fn(|| self.fetch.next(self.now)).collect();
            asks.iter().for_each(|ask| *self.asked.entry(ask.peer).or_default() += 1);
            asks
        }

        fn answer(&mut self, ask: Ask, change: impl FnOnce(&mut Vec<u8>)) {
            let blob = self.store.read_chunk(ask.hash, ask.chunk).expect("asked within the file");
            let mut bytes = blob.bytes.to_vec();
            change(&mut bytes);
            if let Err(error) = self.fetch.blob(ask.peer, ask.hash, ask.chunk, blob.byte_len, bytes.into()) {
                self.errors.push(error);
            }
            self.saved.extend(std::iter::from_fn(|| self.fetch.take_completed()));
        }

        /// Answers everything until nothing is asked; `liar` spoils its chunks.
        fn run(&mut self, liar: Option<NodeId>) {
            loop {
                let asks = self.asks();
                if asks.is_empty() {
                    return;
                }
                for ask in asks {
                    self.answer(ask, |bytes| {
                        if liar == Some(ask.peer) {
                            bytes[0] ^= 1
                        }
                    });
                }
            }
        }

        fn check_complete(&self) {
            assert!(self.fetch.is_done(), "{:?}", self.fetch.progress());
            let folder = tempfile::tempdir().expect("temporary folder");
            self.saved.iter().for_each(|fetched| save_fetched(folder.path(), fetched).expect("writable"));
            assert!(self.saved.last().expect("saved something").is_manifest, "the manifest is saved last");
            Store::open(folder.path(), self.store.name()).expect("complete").verify(|_| ()).expect("intact");
        }
    }

    #[test]
    fn everything_comes_from_several_peers_within_bounds() {
        let mut world = world(&[A, B]);
        let first = world.asks();
        assert_eq!(first, [Ask { peer: A, hash: world.store.name(), chunk: 0 }], "the manifest's length is not known yet");
        world.answer(first[0], |_| ());
        world.run(None);
        world.check_complete();
        assert!(world.asked[&A] > 1 && world.asked[&B] > 1, "{:?}", world.asked);
        assert_eq!(world.fetch.progress().done, world.fetch.progress().total.expect("known"));
    }

    #[test]
    fn a_lost_peers_chunks_are_asked_of_another_and_the_rest_is_kept() {
        let mut world = world(&[A]);
        world.run_until_file_of(3);
        let asks = world.asks();
        assert_eq!(asks.len(), 3);
        world.answer(asks[1], |_| ());
        world.fetch.peer_down(A);
        assert!(world.fetch.is_stuck() && world.asks().is_empty());
        world.fetch.peer_up(B);
        let again: Vec<u32> = world.asks().iter().map(|ask| ask.chunk).collect();
        assert_eq!(again, [asks[0].chunk, asks[2].chunk]);
        assert_eq!(world.fetch.blob(A, asks[0].hash, 0, 2_200_000, Bytes::new()), Err(FetchError::Unasked), "the lost peer's late answer");
    }

    impl World {
        /// Goes on until a file of so many chunks is next.
        fn run_until_file_of(&mut self, chunks: usize) {
            while self.fetch.current.as_ref().expect("not done").chunks.len() != chunks {
                for ask in self.asks() {
                    self.answer(ask, |_| ());
                }
            }
        }
    }

    #[test]
    fn a_liar_is_found_by_fetching_from_one_alone_and_asked_no_more() {
        let mut world = world(&[A, B, C]);
        let first = world.asks()[0];
        world.answer(first, |_| ());
        world.run(Some(B));
        world.check_complete();
        assert!(world.errors.iter().all(|error| matches!(error, FetchError::Corrupt { .. })), "{:?}", world.errors);
        assert_eq!(world.errors.len(), 1, "one file was fetched twice: {:?}", world.errors);
        assert!(world.fetch.peers[&B].banned && !world.fetch.peers[&A].banned && !world.fetch.peers[&C].banned);
    }

    #[test]
    fn a_false_manifest_or_length_bans_its_sender() {
        let mut world = world(&[A, B, C]);
        let ask = world.asks()[0];
        world.answer(ask, |bytes| bytes[0] ^= 1);
        assert_eq!(world.errors, [FetchError::Corrupt { hash: world.store.name() }]);
        let ask = world.asks()[0];
        let error = world.fetch.blob(ask.peer, ask.hash, 0, u64::MAX, Bytes::new()).expect_err("too long");
        assert_eq!(error, FetchError::WrongLength { hash: ask.hash, expected: MANIFEST_BYTES_MAX as u64, found: u64::MAX });
        world.run(None);
        world.check_complete();
        assert!(world.fetch.peers[&A].banned && world.fetch.peers[&B].banned);
    }

    #[test]
    fn a_silent_peer_is_given_up_after_its_deadline_and_asked_last() {
        let mut world = world(&[A, B]);
        assert_eq!(world.asks()[0].peer, A);
        assert!(world.asks().is_empty());
        world.now = world.fetch.next_timeout().expect("something is due");
        assert_eq!(world.asks()[0].peer, B);
        // Alone again, the slow one gets one chunk at a time and twice the time.
        world.fetch.peer_down(B);
        let asks = world.asks();
        assert_eq!((asks.len(), asks[0].peer), (1, A));
        assert_eq!(world.fetch.next_timeout(), Some(world.now + BLOB_TIME_MAX * 2));
    }

    #[test]
    fn who_lacks_a_file_is_asked_again_when_it_comes_anew() {
        let mut world = world(&[A]);
        let ask = world.asks()[0];
        world.fetch.no_blob(A, ask.hash);
        assert!(world.fetch.is_stuck() && world.asks().is_empty());
        world.fetch.peer_up(A);
        world.run(None);
        world.check_complete();
    }

    #[test]
    fn what_is_here_already_is_not_fetched() {
        let mut world = world(&[]);
        let files = world.store.manifest().files();
        let damaged = files[1].hash;
        let path = world.folder.path().join("files").join(damaged.to_string());
        let intact = std::fs::read(&path).expect("just written");
        std::fs::write(&path, b"damaged").expect("writable");
        world.fetch = plan_fetch(world.folder.path(), world.store.name()).expect("readable");
        std::fs::write(&path, intact).expect("writable");
        world.fetch.peer_up(A);
        world.run(None);
        assert!(world.fetch.is_done());
        assert_eq!(world.saved.iter().map(|fetched| fetched.hash).collect::<Vec<_>>(), [damaged, world.store.name()]);
    }
}
