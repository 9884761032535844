//! All about one node: what waits to be sent to it, its connections, and which of them carries what.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{Kind, LinkEvent, LinkStats, Shared, dial};
use crate::id::NodeId;
use crate::net::arrivals::{Arrivals, Came, ReadFrameError};
use crate::net::delivery::{Arrived, Delivery};
use crate::net::outgoing::{Outgoing, Queue, RateMeter};
use crate::net::path::{Code, End, Path};
use crate::net::tcp::Lanes;
use crate::net::tls::{Life, Remote};
use crate::net::{lock, quic, tcp};

/// A connection over which nothing came for so long is suspect: another is dialled. Both sides say
/// something several times as often.
const SUSPECT_AFTER: Duration = Duration::from_millis(1400);
/// A connection over which nothing came for so long is dead.
const DEAD_AFTER: Duration = Duration::from_secs(5);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// First and longest wait between attempts to find a better path.
const BETTER: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// First and longest wait between failed dials of one node.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

pub(super) struct Link {
    pub(super) node: NodeId,
    queue: Mutex<Queue>,
    /// Something is to be sent, or a connection changed.
    work: Notify,
    /// A connection is there, or one can be used again.
    pub(super) came: Notify,
    state: Mutex<LinkState>,
    arrived: Mutex<(Option<Life>, Arrived)>,
    sent: AtomicU64,
    received: AtomicU64,
    rate: Mutex<RateMeter>,
    pub(super) stop: CancellationToken,
}

#[derive(Default)]
struct LinkState {
    addresses: Vec<SocketAddr>,
    /// The process that the other side's connections are of.
    life: Option<Life>,
    /// Newest last.
    connections: Vec<Arc<Established>>,
    /// Why the last connection ended, if nobody wanted that: another is to take its place.
    lost: Option<String>,
    /// What carried the link last.
    kind: Option<Kind>,
}

pub(super) struct Established {
    path: Path,
    /// Whether we dialled.
    outgoing: bool,
    arrivals: Arc<Arrivals>,
    suspect: AtomicBool,
    /// What we found wrong with it.
    problem: Mutex<Option<String>>,
}

impl Established {
    /// Ends it for what came over it, or did not go.
    fn refuse(&self, problem: String) {
        self.path.close(Code::BadFrame, &problem);
        lock(&self.problem).get_or_insert(problem);
    }

    pub(super) async fn left(&self) {
        self.path.left().await;
    }

    fn is_fit(&self) -> bool {
        !self.suspect.load(Ordering::Relaxed) && self.path.ended().is_none()
    }
}

/// A connection that was just made.
pub(super) enum Fresh {
    Quic(quinn::Connection),
    Tcp(Vec<tcp::Stream>, SocketAddr),
}

/// Begins to serve a node.
pub(super) fn start(shared: &Arc<Shared>, node: NodeId) -> Arc<Link> {
    let link = Arc::new(Link {
        node,
        queue: Mutex::new(Queue::new(Arc::clone(&shared.sessions))),
        work: Notify::new(),
        came: Notify::new(),
        state: Mutex::default(),
        arrived: Mutex::default(),
        sent: AtomicU64::new(0),
        received: AtomicU64::new(0),
        rate: Mutex::default(),
        stop: shared.stop.child_token(),
    });
    let (shared, served) = (Arc::clone(shared), Arc::clone(&link));
    let runtime = shared.runtime.clone();
    runtime.spawn(async move {
        tokio::select! {
            () = shared.serve(&served) => {}
            () = served.stop.cancelled() => served.close_all(Code::UnknownPeer, "not a peer any more"),
        }
    });
    link
}

impl Link {
    pub(super) fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        lock(&self.state).addresses = addresses;
    }

    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        lock(&self.state).addresses.clone()
    }

    /// Puts a frame at the end of the queue, if there is room.
    pub(super) fn push(&self, outgoing: Outgoing) -> bool {
        let fits = lock(&self.queue).push(outgoing);
        if fits {
            self.work.notify_one();
        }
        fits
    }

    /// Forgets what waits and what is on its way.
    pub(super) fn give_up(&self) {
        lock(&self.queue).clear();
        let mut state = lock(&self.state);
        (state.life, state.lost) = (None, None);
    }

    /// Ends all connections.
    pub(super) fn close_all(&self, code: Code, reason: &str) {
        for established in std::mem::take(&mut lock(&self.state).connections) {
            established.path.close(code, reason);
        }
    }

    pub(super) fn connections(&self) -> Vec<Arc<Established>> {
        lock(&self.state).connections.clone()
    }

    pub(super) fn stats(&self) -> LinkStats {
        let fit = self.fit();
        LinkStats {
            kind: fit.as_ref().map(|established| established.path.kind()).or(lock(&self.state).kind).unwrap_or(Kind::Quic),
            rtt: fit.and_then(|established| established.path.rtt()),
            bytes_sent: self.sent.load(Ordering::Relaxed),
            bytes_received: self.received.load(Ordering::Relaxed),
            rate: lock(&self.rate).rate(),
        }
    }

    /// The best connection that works, of these the newest.
    pub(super) fn fit(&self) -> Option<Arc<Established>> {
        let state = lock(&self.state);
        state.connections.iter().rev().filter(|established| established.is_fit()).min_by_key(|established| established.path.kind()).cloned()
    }

    /// Ends connections that are silent if another works: what is on its way goes on that one.
    fn leave_silent(&self) {
        let silent: Vec<_> = {
            let mut state = lock(&self.state);
            if !state.connections.iter().any(|established| established.is_fit()) {
                return;
            }
            state.connections.extract_if(.., |established| !established.is_fit()).collect()
        };
        for established in silent {
            established.path.close(Code::Replaced, Code::Replaced.explain());
        }
    }

    /// Whether there was a connection that nobody wanted to end, and there is none that works.
    pub(super) fn had_connection(&self) -> bool {
        let state = lock(&self.state);
        let suspect = !state.connections.is_empty() && !state.connections.iter().any(|established| established.is_fit());
        suspect || state.lost.is_some()
    }

    /// Whether a connection is needed: for a frame, or because one was lost that others may need.
    fn wants_connection(&self) -> bool {
        self.had_connection() || lock(&self.queue).is_ready()
    }

    /// Whether a frame is new.
    fn is_new(&self, life: Life, delivery: Delivery) -> Result<bool, String> {
        let mut arrived = lock(&self.arrived);
        if arrived.0 != Some(life) {
            *arrived = (Some(life), Arrived::default());
        }
        arrived.1.take(delivery).map_err(|error| error.to_string())
    }
}

impl Shared {
    /// Sends what is queued for one node, and keeps a connection that is in use, for ever.
    async fn serve(self: &Arc<Self>, link: &Arc<Link>) {
        let (mut backoff, mut not_before) = (BACKOFF.0, Instant::now());
        let (mut better, mut look_at) = (BETTER.0, Instant::now());
        loop {
            let second_best = link.fit().is_some_and(|established| established.path.kind() != Kind::Quic && self.kinds.contains(&Kind::Quic));
            tokio::select! {
                () = link.work.notified() => {}
                () = sleep_until(look_at), if second_best => {
                    look_at = Instant::now() + better;
                    better = (better * 2).min(BETTER.1);
                    self.runtime.spawn(dial::better(Arc::clone(self), Arc::clone(link)));
                }
            }
            link.leave_silent();
            while link.wants_connection() {
                let established = match link.fit() {
                    Some(established) => established,
                    None => match dial::connect(self, link, not_before).await {
                        Ok(established) => {
                            (backoff, better, look_at) = (BACKOFF.0, BETTER.0, Instant::now() + BETTER.0);
                            established
                        }
                        Err(reason) => {
                            not_before = Instant::now() + backoff;
                            backoff = (backoff * 2).min(BACKOFF.1);
                            self.lost(link, reason);
                            continue;
                        }
                    },
                };
                lock(&link.state).lost = None;
                let Some((delivery, outgoing)) = lock(&link.queue).start() else { continue };
                lock(&link.rate).start(Instant::now().into_std());
                tokio::spawn(Arc::clone(self).deliver(Arc::clone(link), established, delivery, outgoing));
            }
        }
    }

    /// No connection comes about.
    fn lost(&self, link: &Link, problem: String) {
        let (before, silent) = {
            let mut state = lock(&link.state);
            (state.lost.take(), std::mem::take(&mut state.connections))
        };
        let reason = match (before, silent.is_empty()) {
            (Some(before), _) => format!("{before}, then {problem}"),
            (None, false) => format!("silent, then {problem}"),
            (None, true) => problem,
        };
        for established in silent {
            established.path.close(Code::Replaced, "you were silent");
        }
        self.fail(link, reason);
    }

    async fn deliver(self: Arc<Self>, link: Arc<Link>, established: Arc<Established>, delivery: Delivery, outgoing: Outgoing) {
        let bytes = outgoing.payload.len();
        let sent = established.path.send(delivery, &outgoing).await;
        lock(&link.rate).done(Instant::now().into_std(), if sent.is_ok() { bytes } else { 0 });
        match sent {
            Ok(()) => {
                lock(&link.queue).done(delivery, bytes);
                link.sent.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Err(reason) => {
                tracing::debug!(peer = %link.node.short(), reason, "a frame is to go another way");
                lock(&link.queue).again(delivery, outgoing);
                if established.path.ended().is_none() {
                    established.refuse(reason);
                }
            }
        }
        link.work.notify_one();
    }

    /// Puts a fresh connection to use. Earlier ones of its kind that came from there are stale: a
    /// node dials where it knows of none that works.
    pub(super) fn establish(self: &Arc<Self>, link: &Arc<Link>, fresh: Fresh, remote: Remote, outgoing: bool) -> Arc<Established> {
        let arrivals = Arc::new(Arrivals::new());
        let (path, lanes) = match fresh {
            Fresh::Quic(connection) => (Path::Quic(connection), None),
            Fresh::Tcp(streams, address) => {
                let events = self.events.clone();
                let (lanes, came) = Lanes::start(streams, address, &arrivals, move || events.capacity() == 0);
                (Path::Tcp(lanes), Some(came))
            }
        };
        let established = Arc::new(Established { path, outgoing, arrivals, suspect: AtomicBool::new(false), problem: Mutex::default() });
        let (stale, begun_anew) = {
            let mut state = lock(&link.state);
            let begun_anew = state.life.replace(remote.life).is_some_and(|life| life != remote.life);
            let kind = established.path.kind();
            state.kind = Some(kind);
            let is_stale = |older: &Arc<Established>| begun_anew || !older.is_fit() || (older.path.kind() == kind && !outgoing && !older.outgoing);
            let stale: Vec<_> = state.connections.extract_if(.., |older| is_stale(older)).collect();
            state.connections.push(Arc::clone(&established));
            (stale, begun_anew.then(|| state.lost.take().unwrap_or_else(|| "it has begun anew".to_owned())))
        };
        for older in stale {
            older.path.close(Code::Replaced, Code::Replaced.explain());
        }
        if let Some(reason) = begun_anew {
            lock(&link.queue).clear();
            self.report_down(link.node, reason);
        }
        tracing::debug!(peer = %link.node.short(), address = %established.path.remote(), kind = established.path.kind().name(), outgoing, "link is up");
        let (shared, served, taken) = (Arc::clone(self), Arc::clone(link), Arc::clone(&established));
        self.runtime.spawn(async move {
            match (&taken.path, lanes) {
                (Path::Quic(connection), _) => shared.receive_quic(&served, &taken, connection, remote.life).await,
                (Path::Tcp(lanes), Some(came)) => shared.receive_tcp(&served, lanes, came, remote.life).await,
                (Path::Tcp(_), None) => {}
            }
            let end = taken.path.closed().await;
            shared.ended(&served, &taken, end);
        });
        self.runtime.spawn(watch(Arc::clone(link), Arc::clone(&established)));
        established
    }

    /// A connection has ended.
    fn ended(&self, link: &Link, established: &Arc<Established>, end: End) {
        let alone = {
            let mut state = lock(&link.state);
            let known = state.connections.len();
            state.connections.retain(|other| !Arc::ptr_eq(other, established));
            // Those that were replaced are not listed any more.
            let alone = state.connections.is_empty() && known > 0;
            if alone && !end.word {
                state.lost = Some(end.reason.clone());
            }
            alone
        };
        if alone && end.word {
            self.fail(link, lock(&established.problem).take().unwrap_or(end.reason));
        }
        link.work.notify_one();
    }

    /// Takes frames until the connection ends.
    async fn receive_quic(self: &Arc<Self>, link: &Arc<Link>, established: &Arc<Established>, connection: &quinn::Connection, life: Life) {
        while let Ok(stream) = connection.accept_uni().await {
            let (shared, link, established) = (Arc::clone(self), Arc::clone(link), Arc::clone(established));
            // As many as the peer may have streams.
            self.runtime.spawn(async move {
                let busy = || shared.events.capacity() == 0;
                let problem = match quic::read_frame(stream, &established.arrivals, busy).await {
                    Ok(came) => shared.take(&link, life, came).await.err(),
                    Err(ReadFrameError::Cut(reason)) => {
                        tracing::debug!(peer = %link.node.short(), reason, "a frame was cut off");
                        None
                    }
                    Err(error @ (ReadFrameError::Bad(_) | ReadFrameError::Stalled)) => Some(error.to_string()),
                };
                if let Some(problem) = problem {
                    established.refuse(problem);
                }
            });
        }
    }

    async fn receive_tcp(self: &Arc<Self>, link: &Arc<Link>, lanes: &Lanes, mut came: mpsc::Receiver<Came>, life: Life) {
        while let Some(one) = came.recv().await {
            let delivery = one.delivery;
            match self.take(link, life, one).await {
                Ok(()) => lanes.acknowledge(delivery),
                Err(problem) => lanes.close(Code::BadFrame, &problem),
            }
        }
    }

    /// Hands a frame on, unless it has come before.
    async fn take(&self, link: &Link, life: Life, came: Came) -> Result<(), String> {
        let Came { delivery, frame, room } = came;
        if link.is_new(life, delivery)? {
            let bytes = frame.payload.as_ref().map_or(0, |payload| payload.bytes.len());
            link.received.fetch_add(bytes as u64, Ordering::Relaxed);
            let _ = self.events.send(LinkEvent::Frame { from: link.node, frame }).await;
        }
        drop(room);
        Ok(())
    }
}

/// Holds a connection suspect while nothing comes over it.
async fn watch(link: Arc<Link>, established: Arc<Established>) {
    let mut looks = interval(LOOK_EVERY);
    let (mut heard, mut since) = (established.path.heard(), Instant::now());
    while established.path.ended().is_none() {
        tokio::select! {
            _ = looks.tick() => {}
            _ = established.path.closed() => return,
        }
        let now = established.path.heard();
        if now != heard {
            (heard, since) = (now, Instant::now());
        }
        let suspect = since.elapsed() >= SUSPECT_AFTER;
        if established.suspect.swap(suspect, Ordering::Relaxed) != suspect {
            tracing::debug!(peer = %link.node.short(), kind = established.path.kind().name(), suspect, "silence on a link");
            if suspect { link.work.notify_one() } else { link.came.notify_one() }
        }
        if since.elapsed() >= DEAD_AFTER && established.path.kind() != Kind::Quic {
            established.path.abandon("timed out");
        }
    }
}
