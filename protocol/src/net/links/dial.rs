//! Finding a way to a node: all its addresses and all kinds at once, the best kind with a start.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::link::{Established, Fresh, Link};
use super::{Kind, Shared};
use crate::net::tls::{Remote, SERVER_NAME};
use crate::net::{quic, tcp};

/// A dial takes at most so long.
const DIAL_MAX: Duration = Duration::from_secs(3);
/// A better kind has so long before the next is tried beside it.
const START: Duration = Duration::from_millis(300);

/// Dials a node, unless it comes to us meanwhile, or is heard again.
pub(super) async fn connect(shared: &Arc<Shared>, link: &Arc<Link>, not_before: Instant) -> Result<Arc<Established>, String> {
    let came = async {
        loop {
            link.came.notified().await;
            if let Some(established) = link.fit() {
                return established;
            }
        }
    };
    let dialled = async {
        sleep_until(not_before).await;
        let (again, until) = (link.had_connection(), Instant::now() + DIAL_MAX);
        let result = dial(shared, link, &shared.kinds.iter().copied().collect::<Vec<_>>()).await;
        if again && result.is_err() {
            // It may be the other side alone that can dial.
            sleep_until(until).await;
        }
        result
    };
    tokio::select! {
        established = came => Ok(established),
        dialled = dialled => dialled,
    }
}

/// Looks for a better path than TCP.
pub(super) async fn better(shared: Arc<Shared>, link: Arc<Link>) {
    tokio::select! {
        found = dial(&shared, &link, &[Kind::Quic]) => match found {
            Ok(_) => link.came.notify_one(),
            Err(reason) => tracing::debug!(peer = %link.node.short(), reason, "no better path"),
        },
        () = link.stop.cancelled() => {}
    }
}

/// Dials all addresses of a node; the first that answers with its key wins.
async fn dial(shared: &Arc<Shared>, link: &Arc<Link>, kinds: &[Kind]) -> Result<Arc<Established>, String> {
    let addresses = match shared.dial_override.get(&link.node) {
        Some(address) => vec![*address],
        None => link.addresses(),
    };
    let mut problem = "no address is known".to_owned();
    let mut attempts = FuturesUnordered::new();
    for (place, kind) in kinds.iter().enumerate() {
        for address in &addresses {
            let (address, start) = (*address, START * u32::try_from(place).unwrap_or(0));
            let one = async move {
                sleep(start).await;
                match kind {
                    Kind::Quic => dial_quic(shared, link, address).boxed().await,
                    Kind::Tcp => dial_tcp(shared, link, address).boxed().await,
                }
            };
            attempts.push(one.map(move |result| (*kind, address, result)));
        }
    }
    let first = async {
        while let Some((kind, address, result)) = attempts.next().await {
            match result {
                Ok(fresh) => return Some(fresh),
                Err(error) => problem = format!("{address} ({}): {error}", kind.name()),
            }
        }
        None
    };
    match timeout(DIAL_MAX, first).await {
        Ok(Some((fresh, remote))) => {
            if let Fresh::Quic(connection) = &fresh {
                quic::admit(connection);
            }
            Ok(shared.establish(link, fresh, remote, true))
        }
        Ok(None) => Err(problem),
        Err(_) => Err(format!("no answer within {} s", DIAL_MAX.as_secs())),
    }
}

async fn dial_quic(shared: &Shared, link: &Link, address: SocketAddr) -> Result<(Fresh, Remote), String> {
    let transport = &shared.transports[usize::from(!address.ip().is_loopback())];
    let config = quic::client(&shared.tls, link.node, Arc::clone(transport)).map_err(|error| error.to_string())?;
    let connecting = shared.endpoint.connect_with(config, address, SERVER_NAME).map_err(|error| error.to_string())?;
    let connection = connecting.await.map_err(|error| error.to_string())?;
    let remote = quic::remote(&connection).ok_or("no Ed25519 key")?;
    Ok((Fresh::Quic(connection), remote))
}

async fn dial_tcp(shared: &Shared, link: &Link, address: SocketAddr) -> Result<(Fresh, Remote), String> {
    let (streams, remote) = tcp::dial(&shared.tls, link.node, address).await?;
    Ok((Fresh::Tcp(streams, address), remote))
}
