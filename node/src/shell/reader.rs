//! Reads a run without taking part: its configuration, its newest checkpoint, its tokenizer.

#![expect(clippy::wildcard_enum_match_arm, reason = "a reader looks for one answer and ignores all else")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use skein_protocol::config::{ConfigError, RunConfig};
use skein_protocol::id::{Group, Hash, NodeId, RunId, Timeline, Version};
use skein_protocol::limits::{HEARTBEAT_EVERY, STATE_CHUNK_BYTES, TENSOR_BYTES_MAX};
use skein_protocol::message::VERSIONS;
use skein_protocol::message::control::{Capability, FromCoordinator, Hello, Role, ToCoordinator, Welcome};
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::net::NetError;
use skein_protocol::net::control::{ControlClient, ControlEvent, CoordinatorAddress};
use skein_protocol::net::identity::Identity;
use skein_protocol::net::links::{LinkEvent, LinkSettings, Links};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::engine::Snapshot;

/// How long a node has to answer before the next one is asked.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Chunks asked for at once.
const WINDOW: u32 = 8;

/// Why a run could not be read. One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The network could not be set up, or the coordinator not reached.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The coordinator's configuration is not valid.
    #[error("the coordinator's configuration is not valid: {0}")]
    Config(#[from] ConfigError),
    /// The coordinator ended the connection.
    #[error("the coordinator ended the connection: {0}")]
    Refused(String),
    /// There is no checkpoint yet.
    #[error("the run has no complete checkpoint yet: wait for the next one, or lower checkpoint.every_steps")]
    NoCheckpoint,
    /// Nobody who is here has it.
    #[error("no node that is here has {0}: start a node that has it, with its old --state folder")]
    Nowhere(String),
}

/// A run as a reader sees it.
pub struct Reader {
    _keeper: Keeper,
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    welcome: Box<Welcome>,
    config: RunConfig,
}

impl Reader {
    /// Connects to the coordinator and hears of the run.
    ///
    /// # Errors
    /// If it cannot be reached or refuses.
    pub async fn connect(coordinator: &CoordinatorAddress) -> Result<Self, ReadError> {
        let identity = Identity::generate();
        let local = coordinator.socket_addr().is_some_and(|address| address.ip().is_loopback());
        let listen: SocketAddr = if local { ([127, 0, 0, 1], 0).into() } else { ([0, 0, 0, 0], 0).into() };
        let settings = LinkSettings::new(listen);
        let (links, events) = Links::start(&identity, settings).await?;
        let (client, mut control) = ControlClient::connect(&identity, coordinator).await?;
        client.send(&ToCoordinator::Hello(Box::new(hello(&links))));
        let welcome = loop {
            match control.recv().await {
                Some(ControlEvent::Message(_, FromCoordinator::Welcome(welcome))) => break welcome,
                Some(ControlEvent::Message(_, FromCoordinator::Refused { reason }) | ControlEvent::Down { reason, .. }) => {
                    return Err(ReadError::Refused(reason));
                }
                Some(ControlEvent::Up(_) | ControlEvent::Message(..)) => {}
                None => return Err(ReadError::Refused("closed".to_owned())),
            }
        };
        let config = RunConfig::from_toml(&welcome.config)?;
        links.set_peers(&welcome.peers);
        Ok(Self { _keeper: Keeper::new(client, control), links, events, welcome, config })
    }

    /// The run's configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The run.
    pub fn run(&self) -> RunId {
        self.welcome.run
    }

    /// The version of the newest complete checkpoint.
    ///
    /// # Errors
    /// If there is none.
    pub fn version(&self) -> Result<Version, ReadError> {
        self.welcome.checkpoint.as_ref().map(|(version, _)| *version).ok_or(ReadError::NoCheckpoint)
    }

    /// Fetches every group's state at the newest complete checkpoint; `progress` hears bytes.
    ///
    /// # Errors
    /// If there is none, or nobody here has some group.
    pub async fn checkpoint(&mut self, mut progress: impl FnMut(u64)) -> Result<Vec<Snapshot>, ReadError> {
        let (version, roots) = self.welcome.checkpoint.clone().ok_or(ReadError::NoCheckpoint)?;
        let mut snapshots = Vec::new();
        for (group, root) in roots {
            let peers: Vec<NodeId> = self.welcome.peers.iter().map(|peer| peer.node).collect();
            let mut found = None;
            for peer in peers {
                found = self.group_from(peer, group, version, root, &mut progress).await;
                if found.is_some() {
                    break;
                }
            }
            snapshots.push(found.ok_or_else(|| ReadError::Nowhere(format!("group {group} of the checkpoint of version {version}")))?);
        }
        Ok(snapshots)
    }

    async fn group_from(&mut self, peer: NodeId, group: Group, version: Version, root: Hash, progress: &mut impl FnMut(u64)) -> Option<Snapshot> {
        let timeline: Timeline = self.welcome.placement.timeline;
        let ask = PeerMessage::FetchSnapshot { timeline, group, version };
        let answer = self.ask(
            peer,
            ask,
            |message| matches!(message, PeerMessage::SnapshotManifest { group: g, .. } | PeerMessage::Unavailable { group: g, .. } if *g == group),
        );
        let PeerMessage::SnapshotManifest { byte_len, chunks, .. } = answer.await?.message else { return None };
        let expected = self.config.structure().groups.get(usize::from(group.0))?.len * 4;
        let byte_len = usize::try_from(byte_len).ok()?;
        if Hash::root(&chunks) != root || !byte_len.is_multiple_of(expected) || byte_len > expected * 8 {
            return None;
        }
        let fetch = |chunk| PeerMessage::FetchStateChunk { group, version, chunk };
        let number = |message: &PeerMessage| match message {
            PeerMessage::StateChunk { group: g, version: v, chunk } if (*g, *v) == (group, version) => Some(*chunk),
            _ => None,
        };
        let bytes = self.chunks(peer, &chunks, fetch, number, progress).await?;
        (bytes.len() == byte_len).then_some(Snapshot { group, version, bytes, chunks })
    }

    /// Fetches a data file by its hash.
    ///
    /// # Errors
    /// If nobody here has it.
    pub async fn blob(&mut self, hash: Hash) -> Result<Bytes, ReadError> {
        let peers: Vec<NodeId> = self.welcome.peers.iter().filter(|peer| peer.has_data).map(|peer| peer.node).collect();
        for peer in peers {
            if let Some(bytes) = self.blob_from(peer, hash).await {
                return Ok(bytes);
            }
        }
        Err(ReadError::Nowhere(format!("the data file {}", hash.short())))
    }

    async fn blob_from(&mut self, peer: NodeId, hash: Hash) -> Option<Bytes> {
        let mut bytes = BytesMut::new();
        loop {
            let chunk = u32::try_from(bytes.len() / STATE_CHUNK_BYTES).ok()?;
            let wanted = |message: &PeerMessage| match message {
                PeerMessage::Blob { hash: h, chunk: c, .. } => (*h, *c) == (hash, chunk),
                PeerMessage::NoBlob { hash: h } => *h == hash,
                _ => false,
            };
            let frame = self.ask(peer, PeerMessage::FetchBlob { hash, chunk }, wanted).await?;
            let PeerMessage::Blob { byte_len, .. } = frame.message else { return None };
            if byte_len > TENSOR_BYTES_MAX as u64 {
                return None;
            }
            bytes.extend_from_slice(&frame.payload?.bytes);
            if bytes.len() as u64 >= byte_len {
                return Some(bytes.freeze()).filter(|bytes| Hash::of(bytes) == hash);
            }
        }
    }

    /// Fetches chunks with these hashes from one node, a few at a time.
    async fn chunks(
        &mut self,
        peer: NodeId,
        hashes: &[Hash],
        fetch: impl Fn(u32) -> PeerMessage,
        number: impl Fn(&PeerMessage) -> Option<u32>,
        progress: &mut impl FnMut(u64),
    ) -> Option<Bytes> {
        let count = u32::try_from(hashes.len()).ok()?;
        let mut parts: Vec<Option<Bytes>> = vec![None; hashes.len()];
        let mut asked = 0;
        let mut waiting = BTreeSet::new();
        while asked < count || !waiting.is_empty() {
            while asked < count && waiting.len() < WINDOW as usize {
                self.links.send(peer, Frame::from(fetch(asked)));
                waiting.insert(asked);
                asked += 1;
            }
            let frame = self.answer(peer, |message| number(message).is_some() || matches!(message, PeerMessage::Unavailable { .. })).await?;
            let chunk = number(&frame.message).filter(|chunk| waiting.remove(chunk))?;
            let bytes = frame.payload?.bytes;
            if Hash::of(&bytes) != hashes[chunk as usize] {
                return None;
            }
            progress(bytes.len() as u64);
            parts[chunk as usize] = Some(bytes);
        }
        let mut whole = BytesMut::new();
        for part in parts {
            whole.extend_from_slice(&part?);
        }
        Some(whole.freeze())
    }

    async fn ask(&mut self, peer: NodeId, message: PeerMessage, wanted: impl Fn(&PeerMessage) -> bool) -> Option<Frame> {
        self.links.send(peer, Frame::from(message));
        self.answer(peer, wanted).await
    }

    /// The next wanted frame from `peer`; none if its link breaks or it takes too long.
    async fn answer(&mut self, peer: NodeId, wanted: impl Fn(&PeerMessage) -> bool) -> Option<Frame> {
        let answer = async {
            loop {
                match self.events.recv().await? {
                    LinkEvent::Frame { from, frame } if from == peer && wanted(&frame.message) => return Some(frame),
                    LinkEvent::Down { peer: down, .. } if down == peer => return None,
                    LinkEvent::Frame { .. } | LinkEvent::Down { .. } => {}
                }
            }
        };
        timeout(ANSWER_MAX, answer).await.ok().flatten()
    }
}

fn hello(links: &Links) -> Hello {
    Hello {
        versions: VERSIONS,
        run: None,
        role: Role::Reader,
        capability: Capability::default(),
        data_addresses: vec![links.local_addr().to_string()],
        data: None,
        timeline: Timeline(0),
        span: None,
        versions_held: Vec::new(),
        sums: Vec::new(),
        shards: Vec::new(),
        commits: Vec::new(),
    }
}

/// Keeps the control connection alive: reads what comes and says that the reader is there.
struct Keeper(tokio::task::JoinHandle<()>);

impl Keeper {
    fn new(client: ControlClient, mut control: mpsc::Receiver<ControlEvent<FromCoordinator>>) -> Self {
        Self(tokio::spawn(async move {
            let mut beat = tokio::time::interval(HEARTBEAT_EVERY);
            loop {
                tokio::select! {
                    event = control.recv() => if event.is_none() { return },
                    _ = beat.tick() => client.send(&ToCoordinator::Heartbeat),
                }
            }
        }))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}
