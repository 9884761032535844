//! The lines between the processes: which of them lead through a proxy of ours, and to where.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use super::cluster::ProxySection;
use super::proxy::Proxy;

/// The proxies of a cluster.
#[derive(Debug, Default)]
pub struct Lines {
    /// By (who dials, who is dialled).
    data: BTreeMap<(String, String), Proxy>,
    /// By node: its connection to the coordinator.
    control: BTreeMap<String, Proxy>,
    /// Where each node's data plane is told to listen.
    listen: BTreeMap<String, SocketAddr>,
    drop: f64,
}

impl Lines {
    /// Sets up the proxies that `section` asks for between the nodes `names`. Must be called
    /// within a tokio runtime.
    pub async fn new(section: &ProxySection, names: &[String]) -> io::Result<Self> {
        let mut lines = Self { drop: section.drop, ..Self::default() };
        if section.any() {
            for name in names {
                lines.listen.insert(name.clone(), free_port()?);
            }
        }
        for from in names {
            for to in names.iter().filter(|to| *to != from && section.between(from, to)) {
                // Each direction draws its own losses.
                let seed = section.seed.wrapping_add(lines.data.len() as u64);
                let proxy = Proxy::udp(lines.listen[to], seed).await?;
                proxy.set(section.drop, false);
                lines.data.insert((from.clone(), to.clone()), proxy);
            }
        }
        Ok(lines)
    }

    /// Sets up the proxies to the coordinator, which listens at `coordinator`, if `section` asks
    /// for them.
    pub async fn control(&mut self, section: &ProxySection, names: &[String], coordinator: &str) -> io::Result<()> {
        if section.control {
            let target = socket_in(coordinator).ok_or_else(|| io::Error::other(format!("{coordinator} names no address and port")))?;
            for name in names {
                self.control.insert(name.clone(), Proxy::tcp(target).await?);
            }
        }
        Ok(())
    }

    /// The coordinator's address as `name` is told it.
    pub fn coordinator_for(&self, name: &str, address: &str) -> String {
        let proxy = self.control.get(name).zip(socket_in(address));
        proxy.map_or_else(|| address.to_owned(), |(proxy, target)| readdress(address, target, proxy.address()))
    }

    /// What the command line of `name` says about its lines; `ids` are the nodes' identities.
    pub fn arguments(&self, name: &str, ids: &BTreeMap<String, String>) -> Vec<String> {
        let mut arguments = Vec::new();
        if let Some(listen) = self.listen.get(name) {
            arguments.extend(["--listen".to_owned(), listen.to_string()]);
        }
        for ((from, to), proxy) in &self.data {
            if from == name
                && let Some(id) = ids.get(to)
            {
                arguments.extend(["--dial-override".to_owned(), format!("{id}={}", proxy.address())]);
            }
        }
        arguments
    }

    /// Cuts or mends the line between two nodes, whoever dialled.
    pub fn cut(&self, a: &str, b: &str, cut: bool) {
        for (from, to) in [(a, b), (b, a)] {
            if let Some(proxy) = self.data.get(&(from.to_owned(), to.to_owned())) {
                proxy.set(self.drop, cut);
            }
        }
    }
}

/// A port on loopback that is free now. Another process may take it before it is used; the node
/// then says so.
fn free_port() -> io::Result<SocketAddr> {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// The `ip:port` in an address, in either of the forms `..ip:port` and `/ip4/ip/tcp/port..`.
fn socket_in(address: &str) -> Option<SocketAddr> {
    let parts: Vec<&str> = address.split('/').collect();
    let multi = parts.windows(4).find_map(|four| match four {
        ["ip4" | "ip6", ip, "tcp", port] => Some(SocketAddr::new(ip.parse().ok()?, port.parse().ok()?)),
        _ => None,
    });
    multi.or_else(|| address.rsplit('@').next()?.parse().ok())
}

fn readdress(address: &str, from: SocketAddr, to: SocketAddr) -> String {
    let multi = |socket: SocketAddr| format!("/ip4/{}/tcp/{}", socket.ip(), socket.port());
    address.replace(&multi(from), &multi(to)).replace(&from.to_string(), &to.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn addresses_of_both_forms_lead_elsewhere() {
        let to = "127.0.0.1:9".parse().expect("an address");
        for (address, expected) in [("/ip4/127.0.0.1/tcp/7001/p2p/12D3Koo", "/ip4/127.0.0.1/tcp/9/p2p/12D3Koo"), ("ab12@127.0.0.1:7001", "ab12@127.0.0.1:9")] {
            let from = socket_in(address).expect("has a port");
            assert_eq!(readdress(address, from, to), expected);
        }
        assert_eq!(socket_in("example"), None);
    }

    #[tokio::test]
    async fn each_direction_has_its_own_proxy() {
        let section = ProxySection { pairs: vec![["a".to_owned(), "b".to_owned()]], ..ProxySection::default() };
        let lines = Lines::new(&section, &names(&["a", "b", "c"])).await.expect("loopback");
        let ids = BTreeMap::from([("a", "id-a"), ("b", "id-b"), ("c", "id-c")].map(|(name, id)| (name.to_owned(), id.to_owned())));
        let (a, b, c) = (lines.arguments("a", &ids), lines.arguments("b", &ids), lines.arguments("c", &ids));
        assert!(a[2] == "--dial-override" && a[3].starts_with("id-b=127.0.0.1:") && a.len() == 4, "{a:?}");
        assert!(b[3].starts_with("id-a=127.0.0.1:") && b[3][5..] != a[3][5..], "{b:?}");
        assert!(c[0] == "--listen" && c.len() == 2, "{c:?}");
    }

    #[tokio::test]
    async fn without_proxies_nothing_is_said() {
        let lines = Lines::new(&ProxySection::default(), &names(&["a", "b"])).await.expect("loopback");
        assert!(lines.arguments("a", &BTreeMap::new()).is_empty());
        assert_eq!(lines.coordinator_for("a", "k@127.0.0.1:1"), "k@127.0.0.1:1");
    }
}
