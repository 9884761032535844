//! Who comes: handshakes under way are few, and nobody is let in whom [`super::Links::set_peers`]
//! has not named.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quinn::Incoming;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsStream};

use super::link::{Fresh, Link};
use super::{Kind, Shared};
use crate::id::NodeId;
use crate::limits;
use crate::net::path::Code;
use crate::net::tcp::{self, HELLO_BYTES, LANES, WELCOME};
use crate::net::{lock, quic};

/// How long a node that is not known yet may wait at the door: the coordinator tells some nodes
/// of a newcomer a moment before others.
const DOOR_MAX: Duration = Duration::from_secs(1);
/// Connections in the middle of a handshake or at the door.
const HANDSHAKES_MAX: usize = 128;
/// With more than so many, an address must prove itself before a handshake.
const HANDSHAKES_TRUSTED: usize = 32;
/// A listener that fails is asked again after so long.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);

/// Lets nodes in that come over QUIC.
pub(super) async fn accept_quic(shared: Arc<Shared>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while let Some(incoming) = shared.endpoint.accept().await {
        if !shared.kinds.contains(&Kind::Quic) {
            incoming.ignore();
            continue;
        }
        let Ok(handshake) = Arc::clone(&handshakes).try_acquire_owned() else {
            incoming.refuse();
            continue;
        };
        let busy = handshakes.available_permits() < HANDSHAKES_MAX - HANDSHAKES_TRUSTED;
        if busy && !incoming.remote_address_validated() && incoming.may_retry() {
            let _ = incoming.retry();
            continue;
        }
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let address = incoming.remote_address();
            if let Err(reason) = let_in_quic(&shared, incoming).await {
                tracing::debug!(%address, reason, "a connection was not let in");
            }
            drop(handshake);
        });
    }
}

async fn let_in_quic(shared: &Arc<Shared>, incoming: Incoming) -> Result<(), String> {
    let server = &shared.servers[usize::from(!incoming.remote_address().ip().is_loopback())];
    let connecting = incoming.accept_with(Arc::clone(server)).map_err(|error| error.to_string())?;
    let connection = timeout(limits::HANDSHAKE_TIME_MAX, connecting).await.map_err(|_| "handshake too slow".to_owned())?.map_err(|error| error.to_string())?;
    let remote = quic::remote(&connection).ok_or_else(|| "no Ed25519 key".to_owned())?;
    let Some(link) = known(shared, remote.node).await else {
        connection.close(Code::UnknownPeer.to_quic(), Code::UnknownPeer.explain().as_bytes());
        return Err(format!("{} is not a peer of this run", remote.node.short()));
    };
    quic::admit(&connection);
    shared.establish(&link, Fresh::Quic(connection), remote, false);
    link.came.notify_one();
    Ok(())
}

/// The link to a node, once it is a peer.
async fn known(shared: &Shared, node: NodeId) -> Option<Arc<Link>> {
    let mut changed = shared.changed.subscribe();
    let known = async {
        loop {
            if let Some(link) = lock(&shared.links).get(&node).cloned() {
                return link;
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    timeout(DOOR_MAX, known).await.ok()
}

/// Lanes of links that are not complete yet, by the name that the dialling node gave the link.
type Porch = Mutex<BTreeMap<(NodeId, u64), Vec<(usize, tcp::Stream, OwnedSemaphorePermit)>>>;

/// Lets nodes in that come over TCP.
pub(super) async fn accept_tcp(shared: Arc<Shared>, listener: TcpListener, acceptor: TlsAcceptor) {
    // A link is so many connections.
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX * LANES.len()));
    let porch: Arc<Porch> = Arc::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.stop.cancelled() => return,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Too many open files, or the like: others may close theirs.
                tracing::debug!(%error, "a listener has trouble");
                sleep(LISTEN_AGAIN).await;
                continue;
            }
        };
        let Ok(handshake) = Arc::clone(&handshakes).try_acquire_owned() else { continue };
        let (shared, acceptor, porch) = (Arc::clone(&shared), acceptor.clone(), Arc::clone(&porch));
        tokio::spawn(async move {
            let come_in = async {
                tokio::select! {
                    result = let_in_tcp(&shared, &acceptor, &porch, stream, address, handshake) => result,
                    () = shared.stop.cancelled() => Ok(()),
                }
            };
            if let Err(reason) = come_in.await {
                tracing::debug!(%address, reason, "a connection was not let in");
            }
        });
    }
}

async fn let_in_tcp(
    shared: &Arc<Shared>,
    acceptor: &TlsAcceptor,
    porch: &Porch,
    stream: TcpStream,
    address: SocketAddr,
    handshake: OwnedSemaphorePermit,
) -> Result<(), String> {
    tcp::tune(&stream);
    let introduced = async {
        let mut stream = TlsStream::Server(acceptor.accept(stream).await.map_err(|error| error.to_string())?);
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).await.map_err(|error| error.to_string())?;
        Ok::<_, String>((stream, hello))
    };
    let (stream, hello) = timeout(limits::HANDSHAKE_TIME_MAX, introduced).await.map_err(|_| "handshake too slow".to_owned())??;
    let remote = tcp::remote(&stream).ok_or_else(|| "no Ed25519 key".to_owned())?;
    let [name @ .., lane] = hello;
    let (link, lane) = ((remote.node, u64::from_le_bytes(name)), usize::from(lane));
    let Some(lanes) = gather(porch, link, lane, stream, handshake)? else {
        // Whoever comes last goes on for all, or they leave together.
        sleep(limits::HANDSHAKE_TIME_MAX).await;
        lock(porch).remove(&link);
        return Ok(());
    };
    let mut streams: Vec<tcp::Stream> = lanes;
    let answer = |code: u8| async move {
        for stream in &mut streams {
            stream.write_all(&[code]).await.map_err(|error| error.to_string())?;
            stream.flush().await.map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(streams)
    };
    let Some(link) = known(shared, remote.node).await else {
        let _ = timeout(limits::HANDSHAKE_TIME_MAX, answer(Code::UnknownPeer as u8)).await;
        return Err(format!("{} is not a peer of this run", remote.node.short()));
    };
    let streams = timeout(limits::HANDSHAKE_TIME_MAX, answer(WELCOME)).await.map_err(|_| "handshake too slow".to_owned())??;
    shared.establish(&link, Fresh::Tcp(streams, address), remote, false);
    link.came.notify_one();
    Ok(())
}

/// Puts a lane to the others of its link; all of them in order once they are complete.
fn gather(porch: &Porch, link: (NodeId, u64), lane: usize, stream: tcp::Stream, handshake: OwnedSemaphorePermit) -> Result<Option<Vec<tcp::Stream>>, String> {
    if lane >= LANES.len() {
        return Err(format!("there is no lane {lane}"));
    }
    let mut porch = lock(porch);
    let lanes = porch.entry(link).or_default();
    if lanes.iter().any(|(other, ..)| *other == lane) {
        return Err(format!("lane {lane} is there already"));
    }
    lanes.push((lane, stream, handshake));
    if lanes.len() < LANES.len() {
        return Ok(None);
    }
    let mut lanes = porch.remove(&link).unwrap_or_default();
    lanes.sort_by_key(|(lane, ..)| *lane);
    Ok(Some(lanes.into_iter().map(|(_, stream, _)| stream).collect()))
}
