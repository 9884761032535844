//! TLS over TCP as links use it, for where QUIC cannot go: several connections a link, so that what
//! is urgent never waits behind bulk and one that stalls does not hold the others.
//!
//! Each connection, a lane, carries frames of one class both ways. A frame is cut into pieces, and
//! between two pieces goes what cannot wait: acknowledgements, pings. A frame is acknowledged once
//! it was taken by the process, not by the system.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf, split};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_rustls::{TlsConnector, TlsStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::arrivals::{self, Arrivals, Came, ReadFrameError};
use super::delivery::{DELIVERY_BYTES, Delivery};
use super::lock;
use super::outgoing::{Class, Outgoing};
use super::path::{Code, End};
use super::tls::{Remote, SERVER_NAME, Tls};
use crate::id::NodeId;
use crate::limits;
use crate::wire::{self, DataHeader, WireError};

/// Our protocol, so that a node never talks to another program by mistake.
pub(super) const ALPN: &[u8] = b"skein-lane/1";
/// What each lane carries. The first also has the pings and the farewell.
pub(super) const LANES: [Class; 5] = [Class::Control, Class::Boundary, Class::Reduction, Class::Reduction, Class::State];
/// What a lane begins with: the name of its link, and its place among the lanes.
pub(super) const HELLO_BYTES: usize = 9;
/// What the side that was dialled says when the link is let in.
pub(super) const WELCOME: u8 = 100;

/// Between two pieces of this length acknowledgements go out: a tenth of a second at 2.6 Mbit/s.
const PIECE: usize = 32 * 1024;
/// The connection says something at least so often.
const PING_EVERY: Duration = Duration::from_millis(400);
/// A farewell takes at most so long.
const FAREWELL: Duration = Duration::from_secs(1);
/// Acknowledgements that wait to be sent on one lane; more than frames the peer may have under way.
const NOTES_WAITING: usize = limits::LINK_STREAMS_MAX as usize;

/// The kinds of records.
const BEGIN: u8 = 1;
const PIECES: u8 = 2;
const ACK: u8 = 3;
const PING: u8 = 4;
const PONG: u8 = 5;
const CLOSE: u8 = 6;

/// One TLS connection of a link.
pub(super) type Stream = TlsStream<TcpStream>;

/// Dials all lanes of a link and waits until the other side has let it in.
pub(super) async fn dial(tls: &Tls, node: NodeId, address: SocketAddr) -> Result<(Vec<Stream>, Remote), String> {
    let config = Arc::new(tls.client(node, ALPN).map_err(|error| error.to_string())?);
    let connector = TlsConnector::from(config);
    let name: u64 = super::random();
    let lanes = (0..LANES.len()).map(|lane| dial_lane(&connector, address, name, lane));
    let streams = futures::future::try_join_all(lanes).await?;
    let remote = streams.first().and_then(remote).ok_or("no Ed25519 key")?;
    Ok((streams, remote))
}

async fn dial_lane(connector: &TlsConnector, address: SocketAddr, link: u64, lane: usize) -> Result<Stream, String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    tune(&stream);
    let server = ServerName::try_from(SERVER_NAME).map_err(|error| error.to_string())?;
    let mut stream = TlsStream::Client(connector.connect(server, stream).await.map_err(|error| error.to_string())?);
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&link.to_le_bytes());
    hello[8] = lane as u8;
    stream.write_all(&hello).await.map_err(|error| error.to_string())?;
    stream.flush().await.map_err(|error| error.to_string())?;
    match stream.read_u8().await {
        Ok(WELCOME) => Ok(stream),
        Ok(code) => Err(Code::from_byte(code).map_or("refused", Code::explain).to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// What every lane's socket is asked for; the system may not have it.
pub(super) fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(stream).set_tcp_congestion(b"bbr");
}

/// Who the other side of a lane is.
pub(super) fn remote(stream: &Stream) -> Option<Remote> {
    let (_, connection) = stream.get_ref();
    let certificates: Vec<_> = connection.peer_certificates()?.iter().map(|certificate| certificate.clone().into_owned()).collect();
    Remote::of(&certificates)
}

/// A link over TCP. It ends when it is dropped.
pub(super) struct Lanes {
    state: Arc<State>,
    lanes: Vec<Lane>,
    writers: TaskTracker,
    _stop: DropGuard,
}

struct State {
    remote: SocketAddr,
    /// Records that came.
    heard: AtomicU64,
    rtt: Mutex<Option<Duration>>,
    pinged: Mutex<(u32, Option<Instant>)>,
    end: watch::Sender<Option<End>>,
    /// Who waits for a frame to be acknowledged.
    waiting: Mutex<BTreeMap<Delivery, oneshot::Sender<()>>>,
    /// What the other side is to be told.
    farewell: Mutex<Option<Code>>,
    stop: CancellationToken,
}

impl State {
    /// The first end counts.
    fn over(&self, end: End) {
        self.end.send_if_modified(|known| {
            let first = known.is_none();
            if first {
                *known = Some(end);
            }
            first
        });
        self.stop.cancel();
    }
}

/// One of its connections.
struct Lane {
    class: Class,
    frames: mpsc::Sender<Sending>,
    notes: mpsc::Sender<Note>,
    /// Bytes of payload under way.
    bytes: AtomicUsize,
}

struct Sending {
    delivery: Delivery,
    outgoing: Outgoing,
}

/// What goes between pieces.
#[derive(Clone, Copy)]
enum Note {
    Ack(Delivery),
    Pong(u32),
}

impl Lanes {
    /// Takes over the connections, one for each of [`LANES`]; the frames that come.
    pub(super) fn start(
        streams: Vec<Stream>,
        remote: SocketAddr,
        arrivals: &Arc<Arrivals>,
        busy: impl Fn() -> bool + Clone + Send + Sync + 'static,
    ) -> (Self, mpsc::Receiver<Came>) {
        let state = Arc::new(State {
            remote,
            heard: AtomicU64::new(0),
            rtt: Mutex::default(),
            pinged: Mutex::default(),
            waiting: Mutex::default(),
            end: watch::Sender::new(None),
            farewell: Mutex::default(),
            stop: CancellationToken::new(),
        });
        let (came, receiver) = mpsc::channel(1);
        let (mut lanes, writers) = (Vec::new(), TaskTracker::new());
        for (place, (stream, class)) in streams.into_iter().zip(LANES).enumerate() {
            let (read, write) = split(stream);
            let (frames, frame_events) = mpsc::channel(1);
            let (notes, note_events) = mpsc::channel(NOTES_WAITING);
            writers.spawn(Writer { stream: write, frames: frame_events, notes: note_events, state: Arc::clone(&state), pings: place == 0 }.run());
            let reader = Reader {
                stream: BufReader::new(read),
                came: came.clone(),
                notes: notes.clone(),
                state: Arc::clone(&state),
                arrivals: Arc::clone(arrivals),
                class,
            };
            tokio::spawn(reader.run(busy.clone()));
            lanes.push(Lane { class, frames, notes, bytes: AtomicUsize::new(0) });
        }
        let stop = state.stop.clone().drop_guard();
        writers.close();
        (Self { state, lanes, writers, _stop: stop }, receiver)
    }

    /// Sends a frame; returns when the other process has it.
    pub(super) async fn send(&self, delivery: Delivery, outgoing: &Outgoing) -> Result<(), String> {
        let lane = self.lanes.iter().filter(|lane| lane.class == delivery.class).min_by_key(|lane| lane.bytes.load(Ordering::Relaxed));
        let Some(lane) = lane else { return Err("no lane for it".to_owned()) };
        let _load = Load::new(&lane.bytes, outgoing.payload.len());
        let (done, acknowledged) = oneshot::channel();
        lock(&self.state.waiting).insert(delivery, done);
        let sent = async {
            lane.frames.send(Sending { delivery, outgoing: outgoing.clone() }).await.ok()?;
            acknowledged.await.ok()
        };
        tokio::select! {
            biased;
            Some(()) = sent => Ok(()),
            () = self.state.stop.cancelled() => Err(self.ended().map_or_else(|| "ended".to_owned(), |end| end.reason)),
        }
    }

    /// Tells the other side that a frame was taken, or had been before.
    pub(super) fn acknowledge(&self, delivery: Delivery) {
        // Lanes of one class share nothing but the class: whichever has room will do.
        let mut lanes = self.lanes.iter().filter(|lane| lane.class == delivery.class);
        if !lanes.any(|lane| lane.notes.try_send(Note::Ack(delivery)).is_ok()) {
            self.abandon("acknowledgements are not taken");
        }
    }

    /// Ends the link, telling the other side why.
    pub(super) fn close(&self, code: Code, reason: &str) {
        lock(&self.state.farewell).get_or_insert(code);
        self.state.over(End { reason: reason.to_owned(), word: true });
    }

    /// Ends the link: nothing comes over it any more.
    pub(super) fn abandon(&self, reason: &str) {
        self.state.over(End { reason: reason.to_owned(), word: false });
    }

    /// Waits until the other side was told of the end, or could not be.
    pub(super) async fn left(&self) {
        self.writers.wait().await;
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        self.state.end.borrow().clone()
    }

    /// Waits for the end.
    pub(super) async fn closed(&self) -> End {
        let mut end = self.state.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        ended.ok().and_then(|end| end.clone()).unwrap_or_else(|| End { reason: "ended".to_owned(), word: false })
    }

    pub(super) fn rtt(&self) -> Option<Duration> {
        *lock(&self.state.rtt)
    }

    /// Records that came so far.
    pub(super) fn heard(&self) -> u64 {
        self.state.heard.load(Ordering::Relaxed)
    }

    pub(super) fn remote(&self) -> SocketAddr {
        self.state.remote
    }
}

/// Bytes that a lane has to carry while a frame is under way.
struct Load<'a>(&'a AtomicUsize, usize);

impl<'a> Load<'a> {
    fn new(bytes: &'a AtomicUsize, more: usize) -> Self {
        bytes.fetch_add(more, Ordering::Relaxed);
        Self(bytes, more)
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

struct Writer {
    stream: WriteHalf<Stream>,
    frames: mpsc::Receiver<Sending>,
    notes: mpsc::Receiver<Note>,
    state: Arc<State>,
    /// Whether it is this lane that pings and says farewell.
    pings: bool,
}

impl Writer {
    async fn run(mut self) {
        let stop = self.state.stop.clone();
        let ended = tokio::select! {
            result = self.write() => result.err().map_or_else(|| "ended".to_owned(), |error| error.to_string()),
            () = stop.cancelled() => String::new(),
        };
        self.state.over(End { reason: ended, word: false });
        // Nobody is to wait for what was under way.
        lock(&self.state.waiting).clear();
        let code = lock(&self.state.farewell).filter(|_| self.pings);
        let farewell = async {
            if let Some(code) = code {
                // If a frame was cut, the other side reads no more than that the link is over.
                self.stream.write_all(&[CLOSE, code as u8]).await?;
            }
            self.stream.shutdown().await
        };
        let _ = timeout(FAREWELL, farewell).await;
    }

    async fn write(&mut self) -> std::io::Result<()> {
        let mut pings = interval(PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                Some(note) = self.notes.recv() => write_note(&mut self.stream, note).await?,
                _ = pings.tick(), if self.pings => self.ping().await?,
                Some(sending) = self.frames.recv() => self.frame(sending, &mut pings).await?,
                else => return Ok(()),
            }
            if self.notes.is_empty() && self.frames.is_empty() {
                self.stream.flush().await?;
            }
        }
    }

    async fn ping(&mut self) -> std::io::Result<()> {
        let number = {
            let mut pinged = lock(&self.state.pinged);
            // One at a time: its answer is a measure of the path.
            if pinged.1.is_some() {
                return Ok(());
            }
            *pinged = (pinged.0.wrapping_add(1), Some(Instant::now()));
            pinged.0
        };
        let mut record = [PING, 0, 0, 0, 0];
        record[1..].copy_from_slice(&number.to_le_bytes());
        self.stream.write_all(&record).await
    }

    async fn frame(&mut self, sending: Sending, pings: &mut tokio::time::Interval) -> std::io::Result<()> {
        let Sending { delivery, outgoing } = sending;
        let mut begin = Vec::with_capacity(1 + DELIVERY_BYTES + outgoing.head.len());
        begin.push(BEGIN);
        begin.extend_from_slice(&delivery.to_bytes());
        begin.extend_from_slice(&outgoing.head);
        self.stream.write_all(&begin).await?;
        let mut rest: Bytes = outgoing.payload;
        while !rest.is_empty() {
            while let Ok(note) = self.notes.try_recv() {
                write_note(&mut self.stream, note).await?;
            }
            if self.pings && futures::FutureExt::now_or_never(pings.tick()).is_some() {
                self.ping().await?;
            }
            let piece = rest.split_to(rest.len().min(PIECE));
            let mut header = [PIECES, 0, 0, 0, 0];
            header[1..].copy_from_slice(&(piece.len() as u32).to_le_bytes());
            self.stream.write_all(&header).await?;
            self.stream.write_all(&piece).await?;
        }
        Ok(())
    }
}

async fn write_note(stream: &mut (impl AsyncWrite + Unpin), note: Note) -> std::io::Result<()> {
    match note {
        Note::Ack(delivery) => {
            let mut record = [ACK; 1 + DELIVERY_BYTES];
            record[1..].copy_from_slice(&delivery.to_bytes());
            stream.write_all(&record).await
        }
        Note::Pong(number) => {
            let mut record = [PONG, 0, 0, 0, 0];
            record[1..].copy_from_slice(&number.to_le_bytes());
            stream.write_all(&record).await
        }
    }
}

struct Reader {
    stream: BufReader<ReadHalf<Stream>>,
    came: mpsc::Sender<Came>,
    notes: mpsc::Sender<Note>,
    state: Arc<State>,
    arrivals: Arc<Arrivals>,
    class: Class,
}

impl Reader {
    async fn run(mut self, busy: impl Fn() -> bool) {
        let (state, stop) = (Arc::clone(&self.state), self.state.stop.clone());
        tokio::select! {
            error = self.read(busy) => match error {
                ReadFrameError::Cut(reason) => state.over(End { reason, word: false }),
                error @ (ReadFrameError::Bad(_) | ReadFrameError::Stalled) => {
                    lock(&state.farewell).get_or_insert(Code::BadFrame);
                    state.over(End { reason: error.to_string(), word: true });
                }
            },
            () = stop.cancelled() => {}
        }
    }

    /// Reads records until there are no more.
    async fn read(&mut self, busy: impl Fn() -> bool) -> ReadFrameError {
        loop {
            if let Err(error) = self.record(&busy).await {
                return error;
            }
        }
    }

    async fn record(&mut self, busy: &impl Fn() -> bool) -> Result<(), ReadFrameError> {
        let kind = self.stream.read_u8().await.map_err(ReadFrameError::cut)?;
        self.state.heard.fetch_add(1, Ordering::Relaxed);
        if kind == BEGIN { self.frame(busy).await } else { self.note(kind).await }
    }

    /// Reads a record that is no part of a frame.
    async fn note(&mut self, kind: u8) -> Result<(), ReadFrameError> {
        match kind {
            ACK => {
                let delivery = self.delivery().await?;
                if let Some(done) = lock(&self.state.waiting).remove(&delivery) {
                    let _ = done.send(());
                }
            }
            PING => {
                let number = self.stream.read_u32_le().await.map_err(ReadFrameError::cut)?;
                self.notes.send(Note::Pong(number)).await.map_err(ReadFrameError::cut)?;
            }
            PONG => {
                let number = self.stream.read_u32_le().await.map_err(ReadFrameError::cut)?;
                let (expected, at) = &mut *lock(&self.state.pinged);
                if let Some(at) = at.take_if(|_| *expected == number) {
                    let (sample, mut rtt) = (at.elapsed(), lock(&self.state.rtt));
                    *rtt = Some(rtt.map_or(sample, |before| (before * 7 + sample) / 8));
                }
            }
            CLOSE => {
                let code = self.stream.read_u8().await.map_err(ReadFrameError::cut)?;
                let reason = Code::from_byte(code).map_or("closed by the other side", Code::explain);
                self.state.over(End { reason: reason.to_owned(), word: true });
            }
            _ => return Err(WireError::Malformed(format!("a record of kind {kind}")).into()),
        }
        Ok(())
    }

    async fn delivery(&mut self) -> Result<Delivery, ReadFrameError> {
        let mut name = [0; DELIVERY_BYTES];
        self.stream.read_exact(&mut name).await.map_err(ReadFrameError::cut)?;
        arrivals::delivery(name)
    }

    async fn frame(&mut self, busy: &impl Fn() -> bool) -> Result<(), ReadFrameError> {
        let begin = async {
            let delivery = self.delivery().await?;
            let mut header = [0; wire::DATA_HEADER_BYTES];
            self.stream.read_exact(&mut header).await.map_err(ReadFrameError::cut)?;
            let header = DataHeader::parse(&header)?;
            let mut message = vec![0; header.message_len];
            self.stream.read_exact(&mut message).await.map_err(ReadFrameError::cut)?;
            Ok::<_, ReadFrameError>((delivery, header, header.message(&message)?))
        };
        let (delivery, header, message) = timeout(limits::HANDSHAKE_TIME_MAX, begin).await.map_err(|_| ReadFrameError::Stalled)??;
        if delivery.class != self.class {
            return Err(WireError::Malformed("a frame on another class's lane".to_owned()).into());
        }
        let len = header.payload_len();
        let room = self.arrivals.room(len).await;
        let payload = self.payload(len, busy).await?;
        let frame = header.frame(message, payload)?;
        self.came.send(Came { delivery, frame, room }).await.map_err(ReadFrameError::cut)
    }

    /// Reads pieces until the payload is whole, and what comes between them.
    async fn payload(&mut self, len: usize, busy: &impl Fn() -> bool) -> Result<Bytes, ReadFrameError> {
        let arrivals = Arc::clone(&self.arrivals);
        let (mut payload, mut pace) = (Vec::with_capacity(len), arrivals.pace());
        while payload.len() < len {
            let kind = timeout(pace.look_again(), self.stream.read_u8()).await;
            pace.check(&arrivals, busy)?;
            let Ok(kind) = kind else { continue };
            self.state.heard.fetch_add(1, Ordering::Relaxed);
            match kind.map_err(ReadFrameError::cut)? {
                PIECES => {}
                BEGIN => return Err(WireError::Truncated { len: payload.len(), needed: len }.into()),
                kind => {
                    self.note(kind).await?;
                    continue;
                }
            }
            let piece = self.stream.read_u32_le().await.map_err(ReadFrameError::cut)? as usize;
            if piece > len - payload.len() {
                return Err(WireError::Trailing(piece - (len - payload.len())).into());
            }
            let end = payload.len() + piece;
            while payload.len() < end {
                let left = (end - payload.len()) as u64;
                let mut rest = (&mut self.stream).take(left);
                let read = timeout(pace.look_again(), rest.read_buf(&mut payload)).await;
                pace.check(&arrivals, busy)?;
                let Ok(read) = read else { continue };
                match read.map_err(ReadFrameError::cut)? {
                    0 => return Err(ReadFrameError::cut("the connection ended within a frame")),
                    count => arrivals.add(count),
                }
                self.state.heard.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(payload.into())
    }
}
