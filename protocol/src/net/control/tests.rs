//! Over real sockets on the loopback interface. Waits are for conditions; the guard is for hangs.

use std::future::Future;

use super::*;
use crate::id::{Fence, Step, Timeline, Version};
use crate::message::control::{Capability, Hello, Role};

type Events<M> = mpsc::Receiver<ControlEvent<M>>;

async fn guard<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

async fn next<M>(what: &str, events: &mut Events<M>) -> ControlEvent<M> {
    guard(what, events.recv()).await.unwrap_or_else(|| panic!("no more events: {what}"))
}

async fn next_down<M: std::fmt::Debug>(what: &str, events: &mut Events<M>) -> (NodeId, String) {
    loop {
        match next(what, events).await {
            ControlEvent::Down { node, reason } => return (node, reason),
            ControlEvent::Up(_) | ControlEvent::Message(..) => {}
        }
    }
}

fn local() -> Vec<Multiaddr> {
    vec!["/ip4/127.0.0.1/tcp/0".parse().expect("an address")]
}

async fn server(identity: &Identity) -> (ControlServer, Events<ToCoordinator>, CoordinatorAddress) {
    // Connections without a substream end at once, so every test sees that ours does not.
    let started = ControlServer::start_with(identity, local(), Duration::from_millis(300));
    let (server, events) = guard("start", started).await.expect("a free port");
    let address = CoordinatorAddress::new(identity, server.addresses()[0].clone());
    (server, events, address)
}

async fn client(identity: &Identity, address: &CoordinatorAddress) -> (ControlClient, Events<FromCoordinator>) {
    let (client, mut events) = guard("connect", ControlClient::connect(identity, address)).await.expect("the server listens");
    assert_eq!(next("up at the client", &mut events).await, ControlEvent::Up(address.node));
    (client, events)
}

/// A peer that speaks libp2p and writes what it likes.
struct Rude {
    stream: Stream,
    _driver: AbortOnDrop,
}

impl Rude {
    async fn connect(identity: &Identity, address: &CoordinatorAddress) -> Self {
        let mut swarm = swarm::build(identity, Duration::from_secs(60), false).expect("a swarm");
        guard("dial", dial(&mut swarm, address)).await.expect("the server listens");
        let control = swarm.behaviour().streams.new_control();
        let driver = AbortOnDrop(tokio::spawn(drive(swarm)));
        Self { stream: guard("open", open(control, address)).await.expect("accepted"), _driver: driver }
    }

    async fn write(&mut self, bytes: &[u8]) {
        // The server may hang up in the middle.
        let _ = self.stream.write_all(bytes).await;
        let _ = self.stream.flush().await;
    }
}

fn hello() -> Hello {
    Hello {
        versions: VERSIONS,
        run: None,
        role: Role::Worker,
        capability: Capability::default(),
        data_addresses: Vec::new(),
        data: None,
        timeline: Timeline(0),
        span: None,
        versions_held: Vec::new(),
        sums: Vec::new(),
        shards: Vec::new(),
        commits: Vec::new(),
    }
}

#[tokio::test]
async fn messages_go_both_ways_until_the_client_leaves() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let (client, mut at_client) = client(&node, &address).await;
    assert_eq!(next("up at the server", &mut at_server).await, ControlEvent::Up(node.node_id()));

    let said = ToCoordinator::Hello(Box::new(hello()));
    client.send(&said);
    assert_eq!(next("hello", &mut at_server).await, ControlEvent::Message(node.node_id(), said));
    for step in 0..100 {
        client.send(&ToCoordinator::Applied { fence: Fence { timeline: Timeline(0), step: Step(step) }, roots: Vec::new() });
        server.send(node.node_id(), &FromCoordinator::Finished { version: Version(step) });
    }
    for step in 0..100 {
        let message = ToCoordinator::Applied { fence: Fence { timeline: Timeline(0), step: Step(step) }, roots: Vec::new() };
        assert_eq!(next("applied", &mut at_server).await, ControlEvent::Message(node.node_id(), message));
        let message = FromCoordinator::Finished { version: Version(step) };
        assert_eq!(next("finished", &mut at_client).await, ControlEvent::Message(coordinator.node_id(), message));
    }
    // Silence is no reason to hang up: more than the idle time of the server passes.
    assert!(timeout(Duration::from_secs(1), at_server.recv()).await.is_err());

    client.send(&ToCoordinator::Leaving);
    drop(client);
    assert_eq!(next("last words", &mut at_server).await, ControlEvent::Message(node.node_id(), ToCoordinator::Leaving));
    assert_eq!(next_down("down", &mut at_server).await.0, node.node_id());
    assert_eq!(next_down("down", &mut at_client).await, (coordinator.node_id(), "closed by this node".to_owned()));
}

#[tokio::test]
async fn large_messages_pass() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let (_client, mut at_client) = client(&node, &address).await;
    next("up", &mut at_server).await;
    let message = FromCoordinator::Notice { text: "x".repeat(limits::CONTROL_BYTES_MAX - 100) };
    server.send(node.node_id(), &message);
    assert_eq!(next("a long one", &mut at_client).await, ControlEvent::Message(coordinator.node_id(), message));
}

#[test]
fn a_killed_server_is_noticed_at_once() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let (server, _events, address) = doomed.block_on(server(&coordinator));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (_client, mut events) = client(&node, &address).await;
        doomed.shutdown_background();
        let down = timeout(Duration::from_secs(5), next_down("down", &mut events)).await.expect("well before any timer");
        assert_eq!(down.0, coordinator.node_id());
    });
    drop(server);
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_named() {
    let (coordinator, expected) = (Identity::generate(), Identity::generate());
    let (_server, mut events, address) = server(&coordinator).await;
    let wrong = CoordinatorAddress::new(&expected, address.dial.clone());
    let error = guard("connect", ControlClient::connect(&Identity::generate(), &wrong)).await.err().expect("someone else's key");
    let got = coordinator.peer_id().to_string();
    assert_eq!(error, NetError::WrongKey { address: address.dial.to_string(), expected: expected.peer_id().to_string(), got });
    // And the server is none the worse.
    let node = Identity::generate();
    let _client = client(&node, &address).await;
    assert_eq!(next("up", &mut events).await, ControlEvent::Up(node.node_id()));
}

#[tokio::test]
async fn nobody_there_and_port_taken_are_one_line_each() {
    let coordinator = Identity::generate();
    let (server, _events, address) = server(&coordinator).await;
    let taken = ControlServer::start(&Identity::generate(), vec![address.dial.clone()]).await.err();
    assert_eq!(taken, Some(NetError::AddressInUse { address: address.dial.to_string() }));
    guard("shutdown", server.shutdown()).await;
    let error = guard("connect", ControlClient::connect(&Identity::generate(), &address)).await.err().expect("nobody listens");
    assert!(error.to_string().contains("is the coordinator running?"), "{error}");
    let named = CoordinatorAddress { dial: Multiaddr::empty().with(Protocol::Udp(1)), ..address };
    assert!(guard("connect", ControlClient::connect(&Identity::generate(), &named)).await.is_err());
}

#[tokio::test]
async fn a_second_connection_replaces_the_first() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let (_first, mut at_first) = client(&node, &address).await;
    assert_eq!(next("first up", &mut at_server).await, ControlEvent::Up(node.node_id()));
    let (second, mut at_second) = client(&node, &address).await;
    assert_eq!(next_down("first down", &mut at_server).await.0, node.node_id());
    assert_eq!(next("second up", &mut at_server).await, ControlEvent::Up(node.node_id()));
    next_down("the first hears of it", &mut at_first).await;
    second.send(&ToCoordinator::Heartbeat);
    assert_eq!(next("second", &mut at_server).await, ControlEvent::Message(node.node_id(), ToCoordinator::Heartbeat));
    let message = FromCoordinator::Notice { text: "hello".to_owned() };
    server.send(node.node_id(), &message);
    assert_eq!(next("second", &mut at_second).await, ControlEvent::Message(coordinator.node_id(), message));
}

#[tokio::test]
async fn disconnecting_says_what_was_to_be_said() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let (_client, mut at_client) = client(&node, &address).await;
    next("up", &mut at_server).await;
    let message = FromCoordinator::Refused { reason: "y".repeat(1_000_000) };
    server.send(node.node_id(), &message);
    server.disconnect(node.node_id());
    assert_eq!(next("refused", &mut at_client).await, ControlEvent::Message(coordinator.node_id(), message));
    next_down("client", &mut at_client).await;
    let down = next_down("server", &mut at_server).await;
    assert_eq!(down, (node.node_id(), "disconnected by the coordinator".to_owned()));
}

#[tokio::test]
async fn bad_frames_end_their_own_connection_only() {
    let (coordinator, node) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let (_client, mut at_client) = client(&node, &address).await;
    next("up", &mut at_server).await;
    let heartbeat = wire::control_frame(&ToCoordinator::Heartbeat).expect("short");
    let huge = wire::control_frame(&ToCoordinator::Lost { fence: Fence::default(), sums: vec![Default::default(); 5000] }).expect("within the cap");
    let mut other_version = heartbeat.clone();
    other_version[4] = 7;
    let mut malformed = heartbeat.clone();
    malformed[wire::CONTROL_HEADER_BYTES] = 0xee;
    for (bytes, part) in [
        (huge.clone(), "at most 65536 allowed"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "not a frame"),
        (other_version, "framing version 7"),
        (malformed.clone(), "malformed"),
        ([heartbeat.clone(), malformed].concat(), "malformed"),
    ] {
        let rude = Identity::generate();
        let mut peer = Rude::connect(&rude, &address).await;
        peer.write(&bytes).await;
        let (who, reason) = next_down(part, &mut at_server).await;
        assert_eq!(who, rude.node_id());
        assert!(reason.contains(part), "{reason}");
    }
    // What is too much for a first message is not for a later one.
    let rude = Identity::generate();
    let mut peer = Rude::connect(&rude, &address).await;
    peer.write(&[heartbeat, huge].concat()).await;
    assert_eq!(next("up", &mut at_server).await, ControlEvent::Up(rude.node_id()));
    assert_eq!(next("heartbeat", &mut at_server).await, ControlEvent::Message(rude.node_id(), ToCoordinator::Heartbeat));
    assert!(matches!(next("a large one", &mut at_server).await, ControlEvent::Message(_, ToCoordinator::Lost { .. })));

    let message = FromCoordinator::Notice { text: "still here".to_owned() };
    server.send(node.node_id(), &message);
    assert_eq!(next("others", &mut at_client).await, ControlEvent::Message(coordinator.node_id(), message));
}

#[tokio::test]
async fn a_node_of_another_release_hears_why() {
    let coordinator = Identity::generate();
    let (_server, mut at_server, address) = server(&coordinator).await;
    let rude = Identity::generate();
    let mut peer = Rude::connect(&rude, &address).await;
    // A hello of versions 8 to 9: begins as ours does, the rest is unknown here.
    let mut frame = wire::control_frame(&[0xff_u8; 40]).expect("short");
    frame[wire::CONTROL_HEADER_BYTES..][..8].copy_from_slice(&[0, 0, 0, 0, 8, 0, 9, 0]);
    peer.write(&frame).await;
    let body = guard("answer", session::read_frame(&mut peer.stream, limits::CONTROL_BYTES_MAX, None)).await.expect("a frame").expect("a message");
    let answer: FromCoordinator = wire::decode(&body, limits::CONTROL_BYTES_MAX).expect("a message");
    assert!(matches!(answer, FromCoordinator::Refused { reason } if reason.contains("8 to 9")));
    drop(peer);
    assert!(next_down("down", &mut at_server).await.1.contains("8 to 9"));
}

#[tokio::test]
async fn a_peer_that_does_not_read_is_disconnected() {
    let (coordinator, lazy) = (Identity::generate(), Identity::generate());
    let (server, mut at_server, address) = server(&coordinator).await;
    let mut peer = Rude::connect(&lazy, &address).await;
    peer.write(&wire::control_frame(&ToCoordinator::Heartbeat).expect("short")).await;
    next("up", &mut at_server).await;
    next("heartbeat", &mut at_server).await;
    let message = FromCoordinator::Notice { text: "z".repeat(limits::CONTROL_BYTES_MAX / 2) };
    for _ in 0..2 * limits::CONTROL_QUEUE_BYTES / limits::CONTROL_BYTES_MAX + 8 {
        server.send(lazy.node_id(), &message);
    }
    let (who, reason) = next_down("down", &mut at_server).await;
    assert_eq!(who, lazy.node_id());
    assert!(reason.contains("does not take"), "{reason}");
}

#[tokio::test]
async fn many_may_come_at_once() {
    let coordinator = Identity::generate();
    let (server, mut at_server) = guard("start", ControlServer::start(&coordinator, local())).await.expect("a free port");
    let address = CoordinatorAddress::new(&coordinator, server.addresses()[0].clone());
    let identities: Vec<Identity> = (0..40).map(|_| Identity::generate()).collect();
    let clients = guard("connect", futures::future::join_all(identities.iter().map(|identity| ControlClient::connect(identity, &address)))).await;
    let clients: Vec<_> = clients.into_iter().map(|client| client.expect("the server listens")).collect();
    let mut up = std::collections::BTreeSet::new();
    while up.len() < clients.len() {
        if let ControlEvent::Up(node) = next("up", &mut at_server).await {
            up.insert(node);
        }
    }
    assert!(identities.iter().all(|identity| up.contains(&identity.node_id())));
}
