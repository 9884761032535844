//! The run's data: opened where it is, fetched from peers where it is not, served to others.

use std::path::{Path, PathBuf};

use skein_protocol::id::{Hash, NodeId};
use skein_protocol::message::control::Peer;
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::tensor::Payload;
use skein_protocol::time::Time;

use crate::data::DataError;
use crate::data::fetch::{Fetch, FetchError, FetchProgress};
use crate::data::store::{Store, plan_fetch, save_fetched};

/// Data of this node: a set to serve, and the run's, once it is here.
pub struct DataDesk {
    folder: PathBuf,
    store: Option<Store>,
    fetching: Option<(Hash, Fetch)>,
}

impl DataDesk {
    /// Serves what lies in `given`, if anything; fetched data goes to `folder`.
    ///
    /// # Errors
    /// If `given` holds no usable data.
    pub fn new(folder: PathBuf, given: Option<&Path>) -> Result<Self, DataError> {
        let store = given.map(Store::open_only).transpose()?;
        Ok(Self { folder, store, fetching: None })
    }

    /// The data set that can be served.
    pub fn name(&self) -> Option<Hash> {
        self.store.as_ref().map(Store::name)
    }

    /// The run's data, if it is here: given, or fetched before.
    pub fn open(&mut self, name: Hash) -> Result<Option<&Store>, DataError> {
        if self.name() != Some(name) {
            match Store::open(&self.folder, name) {
                Ok(store) => self.store = Some(store),
                Err(_) if self.fetching.as_ref().is_none_or(|(wanted, _)| *wanted != name) => {
                    self.fetching = Some((name, plan_fetch(&self.folder, name)?));
                    return Ok(None);
                }
                Err(_) => return Ok(None),
            }
        }
        self.fetching = None;
        Ok(self.store.as_ref())
    }

    /// Nodes that may have it.
    pub fn peers(&mut self, me: NodeId, peers: &[Peer]) {
        if let Some((_, fetch)) = &mut self.fetching {
            for peer in peers.iter().filter(|peer| peer.has_data && peer.node != me) {
                fetch.peer_up(peer.node);
            }
        }
    }

    /// A link is down.
    pub fn link_down(&mut self, peer: NodeId) {
        if let Some((_, fetch)) = &mut self.fetching {
            fetch.peer_down(peer);
        }
    }

    /// What to ask now.
    pub fn asks(&mut self, now: Time) -> Vec<(NodeId, Frame)> {
        let Some((_, fetch)) = &mut self.fetching else { return Vec::new() };
        std::iter::from_fn(|| fetch.next(now)).map(|ask| (ask.peer, Frame::from(PeerMessage::FetchBlob { hash: ask.hash, chunk: ask.chunk }))).collect()
    }

    /// When to call [`DataDesk::asks`] again.
    pub fn next_timeout(&self) -> Option<Time> {
        self.fetching.as_ref().and_then(|(_, fetch)| fetch.next_timeout())
    }

    /// How far fetching is.
    pub fn progress(&self) -> Option<FetchProgress> {
        self.fetching.as_ref().map(|(_, fetch)| fetch.progress())
    }

    /// Takes a data message in; what to answer. Other messages come back.
    ///
    /// # Errors
    /// If the data cannot be saved, or no peer could ever send what is wanted.
    pub fn take(&mut self, from: NodeId, frame: Frame) -> Result<Taken, DataError> {
        match frame.message {
            PeerMessage::FetchBlob { hash, chunk } => {
                let blob = self.store.as_ref().and_then(|store| store.read_chunk(hash, chunk));
                Ok(Taken::Answer(match blob {
                    Some(blob) => Frame { message: PeerMessage::Blob { hash, chunk, byte_len: blob.byte_len }, payload: Some(Payload::raw(blob.bytes)) },
                    None => Frame::from(PeerMessage::NoBlob { hash }),
                }))
            }
            PeerMessage::Blob { hash, chunk, byte_len } => {
                if let (Some((name, fetch)), Some(payload)) = (&mut self.fetching, frame.payload) {
                    match fetch.blob(from, hash, chunk, byte_len, payload.bytes) {
                        Ok(()) => {}
                        Err(FetchError::Manifest(source)) => return Err(DataError::Manifest { path: self.folder.join(name.to_string()), source }),
                        Err(error) => tracing::warn!(peer = from.short(), "{error}"),
                    }
                    while let Some(fetched) = fetch.take_completed() {
                        save_fetched(&self.folder, &fetched)?;
                    }
                }
                Ok(Taken::Nothing)
            }
            PeerMessage::NoBlob { hash } => {
                if let Some((_, fetch)) = &mut self.fetching {
                    fetch.no_blob(from, hash);
                }
                Ok(Taken::Nothing)
            }
            PeerMessage::Forward { .. }
            | PeerMessage::Backward { .. }
            | PeerMessage::Missing { .. }
            | PeerMessage::Finished { .. }
            | PeerMessage::HopFailed { .. }
            | PeerMessage::Contribution { .. }
            | PeerMessage::ReducedChunk { .. }
            | PeerMessage::FetchReduced { .. }
            | PeerMessage::FetchSnapshot { .. }
            | PeerMessage::SnapshotManifest { .. }
            | PeerMessage::FetchStateChunk { .. }
            | PeerMessage::StateChunk { .. }
            | PeerMessage::Unavailable { .. } => Ok(Taken::Other(frame)),
        }
    }
}

/// What became of a frame.
pub enum Taken {
    /// To be sent back.
    Answer(Frame),
    /// Used up.
    Nothing,
    /// Not about data.
    Other(Frame),
}
