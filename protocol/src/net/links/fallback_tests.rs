//! Paths that open and close between two nodes, by a line in the middle that a test can cut.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::Instant;

use super::tests::{Node, guard, peer_at, small, tensor};
use super::*;
use crate::message::data::PeerMessage;

/// A line to one node's port for whoever dials its address; datagrams can be swallowed.
struct Line {
    address: SocketAddr,
    /// Whether datagrams pass.
    datagrams: Arc<AtomicBool>,
}

impl Line {
    async fn to(target: SocketAddr) -> Self {
        let (datagrams, (socket, listener)) = (Arc::new(AtomicBool::new(true)), bind("127.0.0.1:0".parse().expect("an address")).expect("a free port"));
        let address = socket.local_addr().expect("bound");
        socket.set_nonblocking(true).and_then(|()| listener.set_nonblocking(true)).expect("sockets");
        let (socket, listener) = (UdpSocket::from_std(socket).expect("a socket"), TcpListener::from_std(listener).expect("a socket"));
        tokio::spawn(carry_datagrams(Arc::new(socket), target, Arc::clone(&datagrams)));
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(target).await.expect("the node listens");
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
        Self { address, datagrams }
    }

    fn let_datagrams_pass(&self, pass: bool) {
        self.datagrams.store(pass, Ordering::Relaxed);
    }
}

/// For one sender at a time.
async fn carry_datagrams(front: Arc<UdpSocket>, target: SocketAddr, pass: Arc<AtomicBool>) {
    let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.expect("a free port"));
    back.connect(target).await.expect("an address");
    let (sender, known) = watch::channel(None);
    let (returning, passes, answers) = (Arc::clone(&front), Arc::clone(&pass), Arc::clone(&back));
    tokio::spawn(async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(len) = answers.recv(&mut buffer).await {
            let to: Option<SocketAddr> = *known.borrow();
            if let Some(to) = to.filter(|_| passes.load(Ordering::Relaxed)) {
                let _ = returning.send_to(&buffer[..len], to).await;
            }
        }
    });
    let mut buffer = vec![0; 65_536];
    while let Ok((len, from)) = front.recv_from(&mut buffer).await {
        sender.send_replace(Some(from));
        if pass.load(Ordering::Relaxed) {
            let _ = back.send(&buffer[..len]).await;
        }
    }
}

/// Two nodes; the first dials the second through a line.
async fn in_line() -> (Node, Node, Line) {
    let b = Node::start().await;
    let line = Line::to(b.links.local_addr()).await;
    let a = Node::start().await;
    a.links.set_peers(&[peer_at(b.id(), line.address)]);
    // It knows no way of its own.
    b.links.set_peers(&[Peer { addresses: Vec::new(), ..a.peer() }]);
    (a, b, line)
}

async fn until_kind(a: &Node, b: NodeId, kind: Kind) {
    guard("another path", async {
        while a.links.stats()[&b].kind != kind {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn where_datagrams_are_swallowed_tcp_carries_the_link() {
    let (mut a, mut b, line) = in_line().await;
    line.let_datagrams_pass(false);
    let begun = Instant::now();
    a.links.send(b.id(), tensor(100_000, 1));
    assert_eq!(b.next_frame("by TCP").await, (a.id(), tensor(100_000, 1)));
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!(a.links.stats()[&b.id()].kind, Kind::Tcp);
    b.links.send(a.id(), tensor(100_000, 2));
    assert_eq!(a.next_frame("and back").await, (b.id(), tensor(100_000, 2)));
    // As soon as QUIC can go it does.
    line.let_datagrams_pass(true);
    until_kind(&a, b.id(), Kind::Quic).await;
    a.links.send(b.id(), small(3));
    assert_eq!(b.next_frame("by QUIC").await, (a.id(), small(3)));
    // TCP stands by: what is on its way when datagrams are swallowed again goes there.
    line.let_datagrams_pass(false);
    let begun = Instant::now();
    a.links.send(b.id(), tensor(100_000, 4));
    assert_eq!(b.next_frame("by TCP again").await, (a.id(), tensor(100_000, 4)));
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}

const FRAMES: u32 = 240;

/// Takes all frames, each of which must come once; the longest wait for one. The line is cut on the way.
async fn take_all(node: &mut Node, cut: Option<&Line>) -> Duration {
    let (mut seen, mut last, mut longest) = (BTreeSet::new(), Instant::now(), Duration::ZERO);
    while seen.len() < FRAMES as usize {
        if let Some(line) = cut.filter(|_| seen.len() == FRAMES as usize / 4) {
            line.let_datagrams_pass(false);
        }
        let (_, frame) = node.next_frame("all of them").await;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        let PeerMessage::Contribution { chunk, .. } = frame.message else { panic!("{frame:?}") };
        assert_eq!(frame, tensor(50_000, chunk.0));
        assert!(seen.insert(chunk.0), "{chunk:?} came twice");
    }
    longest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datagrams_swallowed_in_mid_transfer_cost_no_frame_and_repeat_none() {
    let (mut a, mut b, line) = in_line().await;
    let (id_a, id_b) = (a.id(), b.id());
    a.links.send(id_b, small(0));
    b.next_frame("linked").await;
    for number in 0..FRAMES {
        a.links.send(id_b, tensor(50_000, number));
        b.links.send(id_a, tensor(50_000, number));
    }
    let (waited_b, waited_a) = tokio::join!(take_all(&mut b, Some(&line)), take_all(&mut a, None));
    assert!(waited_a.max(waited_b) < Duration::from_secs(3), "{waited_a:?}, {waited_b:?}");
    assert_eq!(a.links.stats()[&id_b].kind, Kind::Tcp);
    // Nothing more comes.
    a.links.send(id_b, small(1));
    assert_eq!(b.next_frame("the last").await, (id_a, small(1)));
    b.links.send(id_a, small(2));
    assert_eq!(a.next_frame("the last").await, (id_b, small(2)));
}
