//! One control connection once its substream stands: frames in, frames out, and one reason why it
//! ended. The same on both sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::control::ControlEvent;
use crate::id::NodeId;
use crate::limits;
use crate::wire::{self, CONTROL_HEADER_BYTES, ControlHeader, WireError};

/// The slowest at which a control message may trickle in, in bytes a second.
const RATE_MIN: u32 = 8 * 1024;
/// After the last word: how long the other side may take to hang up before we do.
const FAREWELL: Duration = Duration::from_secs(2);

/// How a session is to end.
#[derive(Clone, Debug)]
enum End {
    /// After what is queued.
    Flushed(String),
    /// At once.
    Now(String),
}

/// Where messages to one peer are put. Cheap to clone; never blocks.
#[derive(Clone)]
pub(super) struct Outbox {
    frames: mpsc::Sender<Vec<u8>>,
    bytes: Arc<AtomicUsize>,
    end: watch::Sender<Option<End>>,
}

/// The other end of an [`Outbox`].
pub(super) struct Inbox {
    frames: mpsc::Receiver<Vec<u8>>,
    bytes: Arc<AtomicUsize>,
    end: watch::Receiver<Option<End>>,
}

pub(super) fn outbox() -> (Outbox, Inbox) {
    let (frames, inbox) = mpsc::channel(limits::CONTROL_QUEUE);
    let (end, ended) = watch::channel(None);
    let bytes = Arc::new(AtomicUsize::new(0));
    (Outbox { frames, bytes: Arc::clone(&bytes), end }, Inbox { frames: inbox, bytes, end: ended })
}

impl Outbox {
    /// Queues a message. If the peer does not take what it is sent, or the message cannot be
    /// sent, the session ends.
    pub(super) fn push<T: bincode::Encode>(&self, message: &T) {
        match wire::control_frame(message) {
            Ok(frame) => self.push_frame(frame),
            Err(error) => self.end(End::Now(format!("a message for the other side is too large: {error}"))),
        }
    }

    fn push_frame(&self, frame: Vec<u8>) {
        if self.end.borrow().is_some() {
            return;
        }
        let len = frame.len();
        let queued = self.bytes.fetch_add(len, Ordering::Relaxed);
        if queued + len > limits::CONTROL_QUEUE_BYTES || self.frames.try_send(frame).is_err() {
            self.end(End::Now("the other side does not take what it is sent".to_owned()));
        }
    }

    /// Ends the session after what is queued.
    pub(super) fn finish(&self, reason: &str) {
        self.end(End::Flushed(reason.to_owned()));
    }

    /// Ends the session at once.
    pub(super) fn abort(&self, reason: &str) {
        self.end(End::Now(reason.to_owned()));
    }

    fn end(&self, end: End) {
        self.end.send_if_modified(|current| {
            let changes = current.is_none() || matches!((&current, &end), (Some(End::Flushed(_)), End::Now(_)));
            if changes {
                *current = Some(end);
            }
            changes
        });
    }
}

/// Makes of a message that cannot be decoded a reason and a frame that tells it, or nothing.
pub(super) type Explain = fn(&[u8]) -> Option<(String, Vec<u8>)>;

/// What is different about a peer's first message.
#[derive(Clone, Copy)]
pub(super) enum First {
    /// It comes from a stranger: smaller, and soon. If it is a hello of versions unknown here,
    /// what the function makes of it is the last thing the stranger hears.
    Stranger(Explain),
    /// Nothing.
    Known,
}

/// Carries messages until the session ends; the reason is for the user.
pub(super) async fn run<M, S>(node: NodeId, stream: S, outbox: Outbox, mut inbox: Inbox, first: First, events: mpsc::Sender<ControlEvent<M>>) -> String
where
    M: bincode::Decode<()>,
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let (reader, writer) = stream.split();
    let mut end = inbox.end.clone();
    let aborted = ended(&mut end, |end| matches!(end, End::Now(_)));
    let read = read(node, reader, &outbox, first, events);
    let write = write(writer, &mut inbox);
    tokio::pin!(aborted, read, write);
    let flushed = tokio::select! {
        reason = &mut aborted => return reason,
        reason = &mut read => return reason,
        reason = &mut write => reason,
    };
    // All is said: the other side hangs up when it has read it.
    if let Ok(reason) = flushed {
        let _ = timeout(FAREWELL, read).await;
        return reason;
    }
    flushed.unwrap_or_else(|reason| reason)
}

/// Waits until the session is to end in a way that `matters`; the reason.
async fn ended(end: &mut watch::Receiver<Option<End>>, matters: fn(&End) -> bool) -> String {
    match end.wait_for(|end| end.as_ref().is_some_and(matters)).await.as_deref() {
        Ok(Some(End::Flushed(reason) | End::Now(reason))) => reason.clone(),
        Ok(None) | Err(_) => "closed".to_owned(),
    }
}

/// Writes frames until told to end (`Ok`) or until it fails.
async fn write<W: AsyncWrite + Unpin>(mut writer: W, inbox: &mut Inbox) -> Result<String, String> {
    let lost = |error: std::io::Error| format!("connection lost: {error}");
    loop {
        let frame = match inbox.frames.try_recv() {
            Ok(frame) => frame,
            Err(_) => {
                writer.flush().await.map_err(lost)?;
                tokio::select! {
                    biased;
                    frame = inbox.frames.recv() => match frame {
                        Some(frame) => frame,
                        None => return Ok("closed".to_owned()),
                    },
                    reason = ended(&mut inbox.end, |_| true) => {
                        writer.close().await.map_err(lost)?;
                        return Ok(reason);
                    }
                }
            }
        };
        writer.write_all(&frame).await.map_err(lost)?;
        inbox.bytes.fetch_sub(frame.len(), Ordering::Relaxed);
    }
}

/// Hands on messages until the stream ends or breaks.
async fn read<M, R>(node: NodeId, mut reader: R, outbox: &Outbox, mut first: First, events: mpsc::Sender<ControlEvent<M>>) -> String
where
    M: bincode::Decode<()>,
    R: AsyncRead + Unpin,
{
    loop {
        let (max, patience) = match first {
            First::Stranger(_) => (limits::STRANGER_BYTES_MAX, Some(limits::HANDSHAKE_TIME_MAX)),
            First::Known => (limits::CONTROL_BYTES_MAX, None),
        };
        let body = match read_frame(&mut reader, max, patience).await {
            Ok(Some(body)) => body,
            Ok(None) => continue,
            Err(reason) => return reason,
        };
        let message = match wire::decode(&body, max) {
            Ok(message) => message,
            Err(error) => {
                if let First::Stranger(explain) = first
                    && let Some((reason, answer)) = explain(&body)
                {
                    outbox.push_frame(answer);
                    outbox.finish(&reason);
                    // Nothing else it says is understood; the writer ends the session.
                    drain(reader).await;
                    return reason;
                }
                return format!("sent what is no message: {error}");
            }
        };
        first = First::Known;
        if events.send(ControlEvent::Message(node, message)).await.is_err() {
            return "nobody is interested any more".to_owned();
        }
    }
}

/// Reads one frame's message; `None` for the empty frame that only says "accepted".
pub(super) async fn read_frame<R: AsyncRead + Unpin>(reader: &mut R, max: usize, patience: Option<Duration>) -> Result<Option<Vec<u8>>, String> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    // Silence between frames is fine, silence within one is not.
    let (start, rest) = header.split_at_mut(1);
    let starts = reader.read_exact(start);
    match patience {
        Some(patience) => timeout(patience, starts).await.map_err(|_| "said nothing".to_owned())?,
        None => starts.await,
    }
    .map_err(|error| {
        if error.kind() == std::io::ErrorKind::UnexpectedEof { "connection closed by the other side".to_owned() } else { format!("connection lost: {error}") }
    })?;
    let within = |error: std::io::Error| format!("connection lost within a message: {error}");
    let slow = |_| "too slow within a message".to_owned();
    timeout(limits::HANDSHAKE_TIME_MAX, reader.read_exact(rest)).await.map_err(slow)?.map_err(within)?;
    let refused = |error: WireError| format!("sent what is no frame: {error}");
    let header = ControlHeader::parse(&header, max).map_err(refused)?;
    if header.message_len == 0 {
        return Ok(None);
    }
    let mut body = vec![0; header.message_len];
    let patience = limits::HANDSHAKE_TIME_MAX + Duration::from_secs(1) * u32::try_from(header.message_len).unwrap_or(u32::MAX) / RATE_MIN;
    timeout(patience, reader.read_exact(&mut body)).await.map_err(slow)?.map_err(within)?;
    Ok(Some(body))
}

/// Reads and forgets, so that the other side can finish and hang up.
async fn drain<R: AsyncRead + Unpin>(mut reader: R) {
    let mut rubbish = [0; 1024];
    let all = async { while reader.read(&mut rubbish).await.is_ok_and(|read| read > 0) {} };
    let _ = timeout(FAREWELL, all).await;
}
