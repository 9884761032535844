//! Who a process is: an Ed25519 key in a file, and the addresses that name one.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use libp2p::identity::{Keypair, PublicKey, ed25519};
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

use crate::id::NodeId;
use crate::sign::Signer;

/// An Ed25519 key pair: the name of a process, and its proof.
#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
    node: NodeId,
}

/// Why a key file is no good. One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Others can read the file.
    #[error("{path}: others can read this key (mode {mode:o}); run `chmod 600 {path}`")]
    Permissions {
        /// The file.
        path: String,
        /// Its permissions.
        mode: u32,
    },
    /// The file is no key.
    #[error("{path}: not a key (64 hexadecimal digits); restore it from a backup, or delete it to get a new name")]
    Content {
        /// The file.
        path: String,
    },
    /// The file cannot be read or made.
    #[error("{path}: cannot {what} the key file: {error}; choose another place for it, or make this one accessible")]
    Io {
        /// The file.
        path: String,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
}

impl Identity {
    /// A new identity that exists in memory only.
    pub fn generate() -> Self {
        Self::new(ed25519::Keypair::generate())
    }

    /// The identity in the file at `path`; a new one is put there if there is no file.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        let fail = |what, error| IdentityError::Io { path: path.display().to_string(), what, error };
        match fs::read(path) {
            Ok(bytes) => Self::from_file(path, &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create(path, &ed25519::SecretKey::generate()).map_err(|error| fail("create", error))?;
                // Read back: another process may have been first.
                Self::from_file(path, &fs::read(path).map_err(|error| fail("read", error))?)
            }
            Err(error) => Err(fail("read", error)),
        }
    }

    /// The public key: this process's name.
    pub fn node_id(&self) -> NodeId {
        self.node
    }

    /// The name in the form that addresses carry.
    pub fn peer_id(&self) -> PeerId {
        self.keypair.public().to_peer_id()
    }

    pub(super) fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    fn from_file(path: &Path, bytes: &[u8]) -> Result<Self, IdentityError> {
        check_permissions(path)?;
        let content = || IdentityError::Content { path: path.display().to_string() };
        let text = std::str::from_utf8(bytes).map_err(|_| content())?;
        let mut secret = [0; 32];
        hex::decode_to_slice(text.trim_ascii(), &mut secret).map_err(|_| content())?;
        let secret = ed25519::SecretKey::try_from_bytes(&mut secret).map_err(|_| content())?;
        Ok(Self::new(secret.into()))
    }

    fn new(keypair: ed25519::Keypair) -> Self {
        let node = NodeId(keypair.public().to_bytes());
        Self { keypair: keypair.into(), node }
    }
}

impl fmt::Debug for Identity {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.node.short())
    }
}

impl Signer for Identity {
    fn sign(&self, bytes: &[u8]) -> Vec<u8> {
        self.keypair.sign(bytes).expect("an Ed25519 key signs anything")
    }

    fn verify(&self, signer: NodeId, bytes: &[u8], signature: &[u8]) -> bool {
        public_key(signer).is_some_and(|key| key.verify(bytes, signature))
    }
}

/// The public key that a node's name is; `None` if it is not a point of the curve.
pub(super) fn public_key(node: NodeId) -> Option<PublicKey> {
    ed25519::PublicKey::try_from_bytes(&node.0).ok().map(PublicKey::from)
}

/// Writes the key beside its place and links it there, so that a half-written key is never found
/// and of two processes that try one wins.
fn create(path: &Path, secret: &ed25519::SecretKey) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".new-{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let _ = fs::remove_file(&beside);
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&beside)?;
    let written = writeln!(file, "{}", hex::encode(secret)).and_then(|()| file.sync_all());
    let linked = written.and_then(|()| match fs::hard_link(&beside, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    });
    let removed = fs::remove_file(&beside);
    linked.and(removed)
}

#[cfg(unix)]
fn check_permissions(path: &Path) -> Result<(), IdentityError> {
    use std::os::unix::fs::PermissionsExt;
    let display = path.display().to_string();
    let mode = fs::metadata(path).map_err(|error| IdentityError::Io { path: display.clone(), what: "look at", error })?.permissions().mode() & 0o777;
    if mode & 0o077 == 0 { Ok(()) } else { Err(IdentityError::Permissions { path: display, mode }) }
}

#[cfg(not(unix))]
fn check_permissions(_path: &Path) -> Result<(), IdentityError> {
    Ok(())
}

/// Where a coordinator listens and who it is, as in `/ip4/192.0.2.1/tcp/7700/p2p/12D3KooW..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorAddress {
    /// The coordinator.
    pub node: NodeId,
    /// Its key as addresses carry it.
    pub peer: PeerId,
    /// Where to dial, without the key.
    pub dial: Multiaddr,
}

/// Why text is no coordinator's address. One line for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not a multiaddress.
    #[error("`{text}` is not an address ({problem}): copy the one that the coordinator printed, like {EXAMPLE}")]
    Form {
        /// What was given.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The key is missing.
    #[error("`{text}` lacks the coordinator's key: it should end in /p2p/12D3KooW.., as the coordinator printed it")]
    NoKey {
        /// What was given.
        text: String,
    },
    /// The key is not Ed25519.
    #[error("`{text}`: the key in it is not an Ed25519 key; copy the address that the coordinator printed")]
    KeyKind {
        /// What was given.
        text: String,
    },
}

const EXAMPLE: &str = "/ip4/192.0.2.1/tcp/7700/p2p/12D3KooW..";

impl CoordinatorAddress {
    /// The address of the coordinator `identity` that listens at `dial`.
    pub fn new(identity: &Identity, dial: Multiaddr) -> Self {
        Self { node: identity.node_id(), peer: identity.peer_id(), dial }
    }

    /// The whole address, key included.
    pub fn to_multiaddr(&self) -> Multiaddr {
        self.dial.clone().with(Protocol::P2p(self.peer))
    }
}

impl fmt::Display for CoordinatorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_multiaddr().fmt(f)
    }
}

impl FromStr for CoordinatorAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let form = |problem: String| AddressError::Form { text: text.to_owned(), problem };
        let mut dial: Multiaddr = text.trim().parse().map_err(|error: libp2p::multiaddr::Error| form(error.to_string()))?;
        let Some(Protocol::P2p(peer)) = dial.iter().last() else {
            return Err(AddressError::NoKey { text: text.to_owned() });
        };
        dial.pop();
        let node = super::node_id(&peer).ok_or_else(|| AddressError::KeyKind { text: text.to_owned() })?;
        let parts: Vec<Protocol<'_>> = dial.iter().collect();
        match parts[..] {
            [Protocol::Ip4(_) | Protocol::Ip6(_) | Protocol::Dns(_) | Protocol::Dns4(_) | Protocol::Dns6(_), Protocol::Tcp(port)] if port != 0 => {
                Ok(Self { node, peer, dial })
            }
            _ => Err(form("expected an IP address or name and a TCP port".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_made_once_and_read_ever_after() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("deep/node.key");
        let first = Identity::load_or_create(&path).expect("created");
        let again = Identity::load_or_create(&path).expect("read");
        assert_eq!(first.node_id(), again.node_id());
        assert_eq!(fs::read_dir(folder.path().join("deep")).expect("a folder").count(), 1);
        assert!(again.verify(first.node_id(), b"said", &first.sign(b"said")));
        assert!(!again.verify(first.node_id(), b"else", &first.sign(b"said")));
        assert!(!again.verify(Identity::generate().node_id(), b"said", &first.sign(b"said")));
        assert!(!again.verify(first.node_id(), b"said", b""));
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("node.key");
        Identity::load_or_create(&path).expect("created");
        assert_eq!(fs::metadata(&path).expect("exists").permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("ours");
        let error = Identity::load_or_create(&path).expect_err("too wide").to_string();
        assert!(error.contains("chmod 600") && error.contains("node.key"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_key_is_refused_and_kept() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("node.key");
        Identity::load_or_create(&path).expect("created");
        for content in ["", "hello", "abcd\n", "\u{fffd}"] {
            fs::write(&path, content).expect("ours");
            assert!(matches!(Identity::load_or_create(&path), Err(IdentityError::Content { .. })));
            assert_eq!(fs::read_to_string(&path).expect("still there"), content);
        }
    }

    #[test]
    fn names_convert_both_ways() {
        let identity = Identity::generate();
        assert_eq!(super::super::peer_id(identity.node_id()), Some(identity.peer_id()));
        assert_eq!(super::super::node_id(&identity.peer_id()), Some(identity.node_id()));
        assert_eq!(super::super::node_id(&PeerId::random()), None);
    }

    #[test]
    fn addresses_say_what_is_wrong_with_them() {
        let identity = Identity::generate();
        let good = format!("/ip4/192.0.2.1/tcp/7700/p2p/{}", identity.peer_id());
        let address: CoordinatorAddress = good.parse().expect("an address");
        assert_eq!((address.node, address.to_string()), (identity.node_id(), good.clone()));
        for (text, part) in [
            ("192.0.2.1:7700", "is not an address"),
            ("/ip4/192.0.2.1/tcp/7700", "lacks the coordinator's key"),
            ("/ip4/192.0.2.1/tcp/7700/p2p/12D3KooW", "is not an address"),
            (&good.replace("/tcp/", "/udp/"), "a TCP port"),
            (&good.replace("7700", "0"), "a TCP port"),
            (&format!("/ip4/192.0.2.1/tcp/1/p2p/{}", PeerId::random()), "not an Ed25519 key"),
        ] {
            let error = text.parse::<CoordinatorAddress>().expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
