//! Proxies on loopback that stand between two processes and can lose datagrams and cut the line.
//!
//! One [`Proxy`] serves one direction of dialling: whoever dials its address talks to its target.
//! A cut line swallows datagrams, and holds bytes of TCP connections back without closing them, as
//! a cable that is pulled out does. Losses are drawn from a seed, one draw a datagram, in the order
//! of their arrival.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Senders that one proxy tells apart; the one that came first makes room for another.
const SENDERS_MAX: usize = 64;
/// The longest UDP datagram.
const DATAGRAM_BYTES_MAX: usize = 65_536;
/// Bytes of a TCP connection under way in one direction.
const PIPE_BYTES: usize = 64 * 1024;

/// What the line does to what passes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Line {
    /// Share of the datagrams that are lost. TCP repeats what is lost, so it has no meaning there.
    drop: f64,
    /// Nothing passes.
    cut: bool,
}

/// A listening address in front of another process's.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    line: watch::Sender<Line>,
    target: watch::Sender<SocketAddr>,
    task: AbortHandle,
}

/// Losses, drawn in order.
#[derive(Clone, Debug)]
struct Dice(Arc<Mutex<ChaCha8Rng>>);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(ChaCha8Rng::seed_from_u64(seed))))
    }

    /// Whether the line lets the next datagram through.
    fn passes(&self, line: Line) -> bool {
        // A poisoned lock still holds a generator that works.
        let draw: f64 = self.0.lock().unwrap_or_else(PoisonError::into_inner).random();
        !line.cut && draw >= line.drop
    }
}

impl Proxy {
    /// A proxy for datagrams to `target`. Must be called within a tokio runtime.
    pub async fn udp(target: SocketAddr, seed: u64) -> io::Result<Self> {
        let front = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?);
        let (line, target) = (watch::Sender::new(Line::default()), watch::Sender::new(target));
        let address = front.local_addr()?;
        let task = tokio::spawn(serve_udp(front, target.subscribe(), line.subscribe(), Dice::new(seed))).abort_handle();
        Ok(Self { address, line, target, task })
    }

    /// A proxy for TCP connections to `target`. Must be called within a tokio runtime.
    pub async fn tcp(target: SocketAddr) -> io::Result<Self> {
        let front = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (line, target) = (watch::Sender::new(Line::default()), watch::Sender::new(target));
        let address = front.local_addr()?;
        let task = tokio::spawn(serve_tcp(front, target.subscribe(), line.subscribe())).abort_handle();
        Ok(Self { address, line, target, task })
    }

    /// Where to dial instead of the target.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on a share of `drop_probability` (0 to 1) of the datagrams is lost, and nothing
    /// passes if `cut`.
    pub fn set(&self, drop_probability: f64, cut: bool) {
        self.line.send_replace(Line { drop: drop_probability, cut });
    }

    /// Whoever is new from now on talks to `target`.
    pub fn retarget(&self, target: SocketAddr) {
        self.target.send_replace(target);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Forwards datagrams; each sender gets a socket of its own towards the target, so that answers
/// find their way back. Ends only when its task is aborted, and with it those it started.
async fn serve_udp(front: Arc<UdpSocket>, target: watch::Receiver<SocketAddr>, line: watch::Receiver<Line>, dice: Dice) {
    let mut senders: BTreeMap<SocketAddr, (u64, Arc<UdpSocket>, AbortHandle)> = BTreeMap::new();
    let mut answers = JoinSet::new();
    let mut seen = 0;
    let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        // An error here is an ICMP message about an earlier datagram: nothing to do with the next.
        let Ok((length, sender)) = front.recv_from(&mut datagram).await else { continue };
        if !dice.passes(*line.borrow()) {
            continue;
        }
        if !senders.contains_key(&sender) {
            let aim = *target.borrow();
            let Ok(back) = back_socket(aim).await else { continue };
            if senders.len() >= SENDERS_MAX
                && let Some(oldest) = senders.iter().min_by_key(|(_, (age, ..))| *age).map(|(sender, _)| *sender)
                && let Some((_, _, task)) = senders.remove(&oldest)
            {
                task.abort();
            }
            while answers.try_join_next().is_some() {}
            let task = answers.spawn(return_answers(Arc::clone(&back), Arc::clone(&front), sender, line.clone(), dice.clone()));
            senders.insert(sender, (seen, back, task));
            seen += 1;
        }
        if let Some((_, back, _)) = senders.get(&sender) {
            // A datagram that cannot be sent is a datagram lost.
            let _ = back.send(&datagram[..length]).await;
        }
    }
}

async fn back_socket(target: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let back = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    back.connect(target).await?;
    Ok(Arc::new(back))
}

async fn return_answers(back: Arc<UdpSocket>, front: Arc<UdpSocket>, sender: SocketAddr, line: watch::Receiver<Line>, dice: Dice) {
    let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        let Ok(length) = back.recv(&mut datagram).await else { continue };
        if dice.passes(*line.borrow()) {
            let _ = front.send_to(&datagram[..length], sender).await;
        }
    }
}

/// Forwards connections. Ends only when its task is aborted, and with it those it started.
async fn serve_tcp(front: TcpListener, target: watch::Receiver<SocketAddr>, line: watch::Receiver<Line>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((near, _)) = front.accept().await else { continue };
        while connections.try_join_next().is_some() {}
        if connections.len() < SENDERS_MAX {
            connections.spawn(forward(near, target.clone(), line.clone()));
        }
    }
}

async fn forward(near: TcpStream, target: watch::Receiver<SocketAddr>, mut line: watch::Receiver<Line>) {
    let aim = *target.borrow();
    if line.wait_for(|line| !line.cut).await.is_err() {
        return;
    }
    let Ok(far) = TcpStream::connect(aim).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
    tokio::join!(pump(near_read, far_write, line.clone()), pump(far_read, near_write, line));
}

/// Copies bytes while the line is whole; hands on the end of the stream too.
async fn pump(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, mut line: watch::Receiver<Line>) {
    let mut bytes = vec![0; PIPE_BYTES];
    loop {
        let read = from.read(&mut bytes).await.unwrap_or(0);
        if line.wait_for(|line| !line.cut).await.is_err() {
            return;
        }
        if read == 0 {
            let _ = to.shutdown().await;
            return;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Long enough for loopback on a busy machine; only tests that fail wait so long.
    const LONG: Duration = Duration::from_secs(30);
    /// What passes would be here by now; so long do we look for what must not come.
    const QUIET: Duration = Duration::from_millis(100);

    async fn socket() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("loopback");
        let address = socket.local_addr().expect("bound");
        (socket, address)
    }

    async fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
        let mut bytes = [0; 64];
        let (length, from) = tokio::time::timeout(LONG, socket.recv_from(&mut bytes)).await.expect("in time").expect("loopback");
        (bytes[..length].to_vec(), from)
    }

    #[tokio::test]
    async fn datagrams_go_there_and_back_for_each_sender() {
        let (server, target) = socket().await;
        let proxy = Proxy::udp(target, 1).await.expect("loopback");
        let (one, _) = socket().await;
        let (two, _) = socket().await;
        for (client, word) in [(&one, b"one"), (&two, b"two")] {
            client.send_to(word, proxy.address()).await.expect("loopback");
            let (got, from) = receive(&server).await;
            assert_eq!(got, word);
            server.send_to(word, from).await.expect("loopback");
        }
        assert_eq!(receive(&one).await, (b"one".to_vec(), proxy.address()));
        assert_eq!(receive(&two).await, (b"two".to_vec(), proxy.address()));
    }

    #[tokio::test]
    async fn a_cut_line_swallows_datagrams_until_it_is_mended() {
        let (server, target) = socket().await;
        let proxy = Proxy::udp(target, 1).await.expect("loopback");
        let (client, _) = socket().await;
        proxy.set(0.0, true);
        client.send_to(b"lost", proxy.address()).await.expect("loopback");
        let mut bytes = [0; 64];
        assert!(tokio::time::timeout(QUIET, server.recv_from(&mut bytes)).await.is_err());
        proxy.set(0.0, false);
        client.send_to(b"found", proxy.address()).await.expect("loopback");
        assert_eq!(receive(&server).await.0, b"found");
    }

    /// Which of 100 datagrams pass a line that loses half of them.
    async fn survivors(seed: u64) -> Vec<u8> {
        let (server, target) = socket().await;
        let proxy = Proxy::udp(target, seed).await.expect("loopback");
        let (client, _) = socket().await;
        proxy.set(0.5, false);
        for number in 0..100 {
            client.send_to(&[number], proxy.address()).await.expect("loopback");
        }
        // One of these is sure to pass; loopback keeps the order.
        for _ in 0..40 {
            client.send_to(b"end", proxy.address()).await.expect("loopback");
        }
        let mut got = Vec::new();
        loop {
            let (datagram, _) = receive(&server).await;
            if datagram == b"end" {
                return got;
            }
            got.extend(datagram);
        }
    }

    #[test]
    fn losses_follow_from_the_seed() {
        let line = Line { drop: 0.3, cut: false };
        let draws = |seed| {
            let dice = Dice::new(seed);
            (0..1000).map(|_| dice.passes(line)).collect::<Vec<bool>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let passed = draws(7).into_iter().filter(|passes| *passes).count();
        assert!((650..750).contains(&passed), "{passed} of 1000 passed a line that loses 30%");
    }

    #[tokio::test]
    async fn a_lossy_line_loses_some() {
        let passed = survivors(3).await;
        assert!((25..75).contains(&passed.len()), "{passed:?} passed");
        assert_eq!(passed, survivors(3).await);
    }

    #[tokio::test]
    async fn a_connection_survives_a_cut() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("loopback");
        let proxy = Proxy::tcp(server.local_addr().expect("bound")).await.expect("loopback");
        let mut client = TcpStream::connect(proxy.address()).await.expect("loopback");
        let (mut peer, _) = tokio::time::timeout(LONG, server.accept()).await.expect("in time").expect("loopback");
        let mut bytes = [0; 5];
        client.write_all(b"hello").await.expect("loopback");
        peer.read_exact(&mut bytes).await.expect("loopback");
        assert_eq!(&bytes, b"hello");
        proxy.set(0.0, true);
        client.write_all(b"later").await.expect("loopback");
        assert!(tokio::time::timeout(QUIET, peer.read_exact(&mut bytes)).await.is_err());
        proxy.set(0.0, false);
        // The timeout may not have consumed bytes: none had arrived.
        tokio::time::timeout(LONG, peer.read_exact(&mut bytes)).await.expect("in time").expect("loopback");
        assert_eq!(&bytes, b"later");
        drop(client);
        assert_eq!(tokio::time::timeout(LONG, peer.read(&mut bytes)).await.expect("in time").expect("the end is handed on"), 0);
    }

    #[tokio::test]
    async fn a_new_target_is_for_new_connections() {
        let (old, target) = socket().await;
        let (new, new_target) = socket().await;
        let proxy = Proxy::udp(target, 1).await.expect("loopback");
        let (client, _) = socket().await;
        client.send_to(b"old", proxy.address()).await.expect("loopback");
        assert_eq!(receive(&old).await.0, b"old");
        proxy.retarget(new_target);
        let (client, _) = socket().await;
        client.send_to(b"new", proxy.address()).await.expect("loopback");
        assert_eq!(receive(&new).await.0, b"new");
    }
}
