//! Over real sockets on the loopback interface. Waits are for conditions; the guard is for hangs.

use std::future::Future;

use bytes::Bytes;

use super::*;
use crate::codec::Codec;
use crate::id::{Chunk, Fence, Group, Hash, ReduceAttempt, Step, Timeline, Version};
use crate::message::data::PeerMessage;
use crate::net::delivery::Delivery;
use crate::net::tls::SERVER_NAME;
use crate::tensor::{Payload, TensorMeta};
use crate::wire;

type Events = mpsc::Receiver<LinkEvent>;

pub(super) struct Node {
    identity: Identity,
    pub(super) links: Links,
    events: Events,
}

pub(super) async fn guard<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

impl Node {
    pub(super) async fn start() -> Self {
        Self::start_with(Identity::generate(), "127.0.0.1:0", BTreeMap::new()).await
    }

    async fn start_with(identity: Identity, listen: &str, dial_override: BTreeMap<NodeId, SocketAddr>) -> Self {
        Self::start_as(identity, LinkSettings { dial_override, ..LinkSettings::new(listen.parse().expect("an address")) }).await
    }

    /// A node that has no QUIC, or nothing but it.
    async fn start_only(kind: Kind) -> Self {
        let settings = LinkSettings { kinds: [kind].into(), ..LinkSettings::new("127.0.0.1:0".parse().expect("an address")) };
        Self::start_as(Identity::generate(), settings).await
    }

    async fn start_as(identity: Identity, settings: LinkSettings) -> Self {
        let (links, events) = Links::start(&identity, settings).await.expect("a free port");
        Self { identity, links, events }
    }

    pub(super) fn id(&self) -> NodeId {
        self.identity.node_id()
    }

    pub(super) fn peer(&self) -> Peer {
        peer_at(self.id(), self.links.local_addr())
    }

    async fn next(&mut self, what: &str) -> LinkEvent {
        guard(what, self.events.recv()).await.expect("links are up")
    }

    pub(super) async fn next_frame(&mut self, what: &str) -> (NodeId, Frame) {
        match self.next(what).await {
            LinkEvent::Frame { from, frame } => (from, frame),
            LinkEvent::Down { reason, .. } => panic!("{what}: the link is down: {reason}"),
        }
    }

    pub(super) async fn next_down(&mut self, what: &str) -> (NodeId, String) {
        loop {
            if let LinkEvent::Down { peer, reason } = self.next(what).await {
                return (peer, reason);
            }
        }
    }
}

pub(super) fn peer_at(node: NodeId, address: SocketAddr) -> Peer {
    Peer { node, addresses: vec!["not an address".to_owned(), address.to_string()], has_data: false }
}

pub(super) fn small(number: u8) -> Frame {
    PeerMessage::NoBlob { hash: Hash([number; 32]) }.into()
}

pub(super) fn tensor(values: u32, seed: u32) -> Frame {
    let bytes: Vec<u8> = (0..values).flat_map(|index| (index.wrapping_mul(2_654_435_761) ^ seed).to_le_bytes()).collect();
    let message = PeerMessage::Contribution {
        fence: Fence { timeline: Timeline(0), step: Step(u64::from(seed)) },
        group: Group(1),
        attempt: ReduceAttempt(2),
        chunk: Chunk(seed),
    };
    Frame { message, payload: Some(Payload { meta: TensorMeta { len: values, codec: Codec::None }, bytes: bytes.into() }) }
}

#[tokio::test]
async fn frames_go_both_ways_between_three() {
    for kind in Kind::ALL {
        between_three(kind).await;
    }
}

async fn between_three(kind: Kind) {
    let mut nodes = [Node::start_only(kind).await, Node::start_only(kind).await, Node::start_only(kind).await];
    let peers: Vec<Peer> = nodes.iter().map(Node::peer).collect();
    for node in &nodes {
        node.links.set_peers(&peers);
    }
    let ids: Vec<NodeId> = nodes.iter().map(Node::id).collect();
    for (from, node) in nodes.iter().enumerate() {
        for to in ids.iter().filter(|to| **to != node.id()) {
            node.links.send(*to, small(from as u8));
            node.links.send(*to, tensor(8 * 1024 * 1024, from as u32));
            node.links.send(*to, tensor(0, from as u32));
            node.links.send(*to, tensor(3, from as u32));
        }
    }
    for node in &mut nodes {
        let mut left: Vec<(NodeId, Frame)> = Vec::new();
        for (from, id) in ids.iter().enumerate().filter(|(_, id)| **id != node.id()) {
            left.push((*id, small(from as u8)));
            left.extend([8 * 1024 * 1024, 0, 3].map(|values| (*id, tensor(values, from as u32))));
        }
        while !left.is_empty() {
            let came = node.next_frame("frames of both others").await;
            let place = left.iter().position(|expected| *expected == came).expect("as it was sent, once");
            left.swap_remove(place);
        }
        for (peer, stats) in node.links.stats() {
            assert!(ids.contains(&peer) && peer != node.id());
            assert_eq!((stats.kind, stats.bytes_received), (kind, 32 * 1024 * 1024 + 12));
        }
    }
}

#[tokio::test]
async fn the_largest_reduction_chunk_passes() {
    for kind in Kind::ALL {
        largest_chunk(kind).await;
    }
}

async fn largest_chunk(kind: Kind) {
    let (a, mut b) = (Node::start_only(kind).await, Node::start_only(kind).await);
    a.links.set_peers(&[b.peer()]);
    b.links.set_peers(&[a.peer()]);
    let frame = tensor(u32::try_from(limits::CHUNK_LEN_MAX).expect("fits"), 7);
    a.links.send(b.id(), frame.clone());
    assert_eq!(b.next_frame("64 MiB").await, (a.id(), frame));
    // It has arrived; that it was acknowledged follows.
    guard("delivered", async {
        while a.links.stats()[&b.id()].bytes_sent == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    guard("measured", async {
        while a.links.stats()[&b.id()].rtt.is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(a.links.stats()[&b.id()].rate > 0.0);
}

#[tokio::test]
async fn one_connection_serves_both_directions() {
    let (mut a, mut b) = (Node::start().await, Node::start().await);
    a.links.set_peers(&[b.peer()]);
    // b could not dial a: it knows no address.
    b.links.set_peers(&[Peer { addresses: Vec::new(), ..a.peer() }]);
    a.links.send(b.id(), small(1));
    assert_eq!(b.next_frame("there").await, (a.id(), small(1)));
    b.links.send(a.id(), small(2));
    assert_eq!(a.next_frame("and back").await, (b.id(), small(2)));
    assert_eq!((a.links.shared.endpoint.open_connections(), b.links.shared.endpoint.open_connections()), (1, 1));
}

#[tokio::test]
async fn strangers_are_refused() {
    for kind in Kind::ALL {
        a_stranger_is_refused(kind).await;
    }
}

async fn a_stranger_is_refused(kind: Kind) {
    let (mut a, mut b, mut friend) = (Node::start_only(kind).await, Node::start_only(kind).await, Node::start_only(kind).await);
    a.links.set_peers(&[b.peer()]);
    b.links.set_peers(&[friend.peer()]);
    friend.links.set_peers(&[b.peer()]);
    a.links.send(b.id(), small(1));
    let (peer, reason) = a.next_down("refused").await;
    assert_eq!(peer, b.id());
    assert!(reason.contains("not a peer of this run"), "{reason}");
    // Nor is anything sent to one.
    a.links.send(friend.id(), small(1));
    assert_eq!(a.next_down("unknown").await, (friend.id(), "not a peer of this run".to_owned()));
    friend.links.send(b.id(), small(2));
    assert_eq!(b.next("nothing of the stranger").await, LinkEvent::Frame { from: friend.id(), frame: small(2) });
    b.links.send(friend.id(), small(3));
    assert_eq!(friend.next_frame("back").await, (b.id(), small(3)));
}

#[tokio::test]
async fn a_newcomer_waits_at_the_door_until_it_is_known() {
    let (a, mut b) = (Node::start().await, Node::start().await);
    a.links.set_peers(&[b.peer()]);
    a.links.send(b.id(), small(1));
    guard("a stands at the door", async {
        while b.links.shared.endpoint.open_connections() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    b.links.set_peers(&[a.peer()]);
    assert_eq!(b.next_frame("let in").await, (a.id(), small(1)));
}

#[tokio::test]
async fn a_node_that_is_named_no_more_is_let_go() {
    let (mut a, mut b) = (Node::start().await, Node::start().await);
    a.links.set_peers(&[b.peer()]);
    b.links.set_peers(&[a.peer()]);
    a.links.send(b.id(), small(1));
    b.next_frame("linked").await;
    b.links.set_peers(&[]);
    assert_eq!(a.next_down("closed").await.0, b.id());
    assert!(b.links.stats().is_empty());
    b.links.set_peers(&[a.peer()]);
    a.links.send(b.id(), small(2));
    assert_eq!(b.next_frame("again").await, (a.id(), small(2)));
    // What it says then is not taken for what it said before.
    a.links.set_peers(&[]);
    b.next_down("let go").await;
    a.links.set_peers(&[b.peer()]);
    a.links.send(b.id(), small(3));
    assert_eq!(b.next_frame("a new link of the same process").await, (a.id(), small(3)));
}

/// Two nodes with a link from the first to the second, whose runtime is about to die.
fn linked() -> (tokio::runtime::Runtime, Node, tokio::runtime::Runtime, Node) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let (a, mut b) = (runtime.block_on(Node::start()), doomed.block_on(Node::start()));
    a.links.set_peers(&[b.peer()]);
    b.links.set_peers(&[a.peer()]);
    a.links.send(b.id(), small(1));
    doomed.block_on(b.next_frame("linked"));
    (runtime, a, doomed, b)
}

/// As a killed process: without a word.
fn kill(doomed: tokio::runtime::Runtime, node: Node) -> (Identity, SocketAddr) {
    let (identity, address) = (node.identity.clone(), node.links.local_addr());
    doomed.shutdown_timeout(Duration::from_secs(30));
    drop(node);
    (identity, address)
}

#[test]
fn a_dead_peer_is_noticed_and_found_again() {
    let (runtime, mut a, doomed, b) = linked();
    let (identity, address) = kill(doomed, b);
    runtime.block_on(async {
        let (peer, reason) = a.next_down("silence").await;
        assert_eq!((peer, reason.as_str()), (identity.node_id(), "silent, then no answer within 3 s"));
        // Nobody there: a dial fails, and says so.
        a.links.send(identity.node_id(), small(2));
        let (_, reason) = a.next_down("nobody").await;
        assert!(reason.contains("no answer"), "{reason}");
        let mut again = Node::start_with(identity, &address.to_string(), BTreeMap::new()).await;
        again.links.set_peers(&[a.peer()]);
        a.links.send(again.id(), small(3));
        assert_eq!(again.next_frame("back again").await, (a.id(), small(3)));
    });
}

#[test]
fn a_peer_that_comes_back_ends_its_former_connections() {
    let (runtime, mut a, doomed, b) = linked();
    let (identity, address) = kill(doomed, b);
    runtime.block_on(async {
        let mut again = Node::start_with(identity, &address.to_string(), BTreeMap::new()).await;
        again.links.set_peers(&[a.peer()]);
        // Not by silence: by a reset, as soon as anything is said on the old connection. What answers
        // then is another process.
        assert_eq!(a.next_down("reset").await, (again.id(), "reset by peer".to_owned()));
        a.links.send(again.id(), small(3));
        assert_eq!(again.next_frame("back again").await, (a.id(), small(3)));
    });
}

#[tokio::test]
async fn someone_else_at_the_address_is_not_talked_to() {
    let (mut a, mut b) = (Node::start().await, Node::start().await);
    let expected = Identity::generate().node_id();
    a.links.set_peers(&[peer_at(expected, b.links.local_addr())]);
    b.links.set_peers(&[a.peer()]);
    a.links.send(expected, small(1));
    assert_eq!(a.next_down("wrong key").await.0, expected);
    a.links.set_peers(&[b.peer()]);
    a.links.send(b.id(), small(2));
    assert_eq!(b.next_frame("the right one").await, (a.id(), small(2)));
}

#[tokio::test]
async fn the_dial_override_is_obeyed() {
    let mut b = Node::start().await;
    let overrides = BTreeMap::from([(b.id(), b.links.local_addr())]);
    let a = Node::start_with(Identity::generate(), "127.0.0.1:0", overrides).await;
    // Port 9 would discard it.
    a.links.set_peers(&[peer_at(b.id(), "127.0.0.1:9".parse().expect("an address"))]);
    b.links.set_peers(&[a.peer()]);
    a.links.send(b.id(), small(1));
    assert_eq!(b.next_frame("by the override").await, (a.id(), small(1)));
}

#[tokio::test]
async fn a_bad_frame_ends_its_own_connection_only() {
    let (a, mut b) = (Node::start().await, Node::start().await);
    let rude = Identity::generate();
    a.links.set_peers(&[b.peer()]);
    b.links.set_peers(&[a.peer(), peer_at(rude.node_id(), "127.0.0.1:9".parse().expect("an address"))]);
    a.links.send(b.id(), small(1));
    b.next_frame("linked").await;

    let named = Delivery { session: 0, class: crate::net::outgoing::Class::Control, number: 0 }.to_bytes();
    let tls = Tls::new(&rude).expect("a certificate");
    let endpoint = Endpoint::client("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let mut oversized = wire::data_head(&tensor(1, 1)).expect("short");
    oversized[11..15].copy_from_slice(&u32::MAX.to_le_bytes());
    let trailing = [wire::data_head(&small(9)).expect("short"), vec![0]].concat();
    let with_payload = [wire::data_head(&tensor(1, 1)).expect("short"), vec![0; 5]].concat();
    let truncated = [wire::data_head(&tensor(1, 1)).expect("short"), vec![0; 3]].concat();
    let mut other_version = wire::data_head(&small(9)).expect("short");
    other_version[4] = 7;
    for (bytes, part) in [
        (oversized, "at most"),
        (trailing, "after the end"),
        (with_payload, "after the end"),
        (truncated, "3 bytes where 4 belong"),
        (other_version, "framing version 7"),
        (vec![0xff; 100], "not a frame"),
        (Vec::new(), "0 bytes where"),
    ] {
        let config = quic::client(&tls, b.id(), quic::transport(Congestion::Bbr, false)).expect("a configuration");
        let connecting = endpoint.connect_with(config, b.links.local_addr(), SERVER_NAME).expect("an address");
        let connection = guard("handshake", connecting).await.expect("b listens");
        let mut stream = guard("let in", connection.open_uni()).await.expect("let in");
        guard("write", stream.write_all(&[&named[..], &bytes].concat())).await.expect("room");
        stream.finish().expect("open");
        let (peer, reason) = b.next_down(part).await;
        assert_eq!(peer, rude.node_id());
        assert!(reason.contains(part), "{reason}");
        guard("closed", connection.closed()).await;
    }
    a.links.send(b.id(), small(2));
    assert_eq!(b.next_frame("others are unharmed").await, (a.id(), small(2)));
}

#[tokio::test]
async fn a_peer_that_takes_nothing_is_down() {
    let mut a = Node::start().await;
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let silent = peer_at(Identity::generate().node_id(), socket.local_addr().expect("bound"));
    a.links.set_peers(std::slice::from_ref(&silent));
    let payload = Some(Payload::raw(Bytes::from_static(b"state")));
    for chunk in 0..=limits::DATA_QUEUE {
        let message = PeerMessage::StateChunk { group: Group(0), version: Version(0), chunk: chunk as u32 };
        a.links.send(silent.node, Frame { message, payload: payload.clone() });
    }
    assert_eq!(a.next_down("full").await, (silent.node, "it does not take what it is sent".to_owned()));
    a.links.send(silent.node, small(1));
    let (_, reason) = a.next_down("no answer").await;
    assert!(reason.contains("no answer within 3 s"), "{reason}");
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let a = Node::start().await;
    let settings = LinkSettings::new(a.links.local_addr());
    let error = Links::start(&Identity::generate(), settings).await.err();
    assert_eq!(error, Some(NetError::AddressInUse { address: format!("{} (UDP)", a.links.local_addr()) }));
}
