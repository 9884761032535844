//! Golden bytes: what each message looks like on the wire, pinned.
//!
//! `golden.txt` holds one line a message: its name and its whole frame in hexadecimal. If a test
//! here fails, the wire has changed. If that is meant, raise [`super::VERSIONS`] unless no other
//! build has spoken this version yet, write the file anew with
//! `SKEIN_UPDATE_GOLDEN=1 cargo test -p skein-protocol golden`, and review its diff.

use bytes::Bytes;

use super::Versions;
use super::control::*;
use super::data::*;
use crate::codec::Codec;
use crate::id::*;
use crate::placement::{Placement, Seat, Source, Standing};
use crate::set::BitSet;
use crate::tensor::{Payload, TensorMeta};
use crate::{limits, wire};

fn node(byte: u8) -> NodeId {
    NodeId([byte; 32])
}

fn hash(byte: u8) -> Hash {
    Hash([byte; 32])
}

fn set(numbers: &[usize]) -> BitSet {
    numbers.iter().copied().collect()
}

const FENCE: Fence = Fence { timeline: Timeline(2), step: Step(0x0102) };
const SUM: SumId = SumId { boot: 0xb007, count: 3 };
const ATTEMPT: Attempt = Attempt { lease: 4, retry: 1 };
const WORK: WorkId = WorkId { fence: FENCE, microbatch: Microbatch(7), attempt: ATTEMPT };
const GROUP: Group = Group(5);
const REDUCE: ReduceAttempt = ReduceAttempt(6);
const VERSION: Version = Version(0x0103);

fn commit() -> Commit {
    let scalars = Scalars { gradient_scale: 0.25, learning_rate: 3e-4, bias_correction1: 0.1, bias_correction2: 0.05, gradient_norm: 1.5 };
    Commit { fence: FENCE, previous: hash(1), groups: vec![(GROUP, REDUCE, hash(2))], scalars, loss: 5.5, signature: vec![9; 4] }
}

fn placement() -> Placement {
    let seat = |byte, standing| Seat { node: node(byte), span: Span::new(0, 3), standing, suspect: byte == 2, rate: 2.5 };
    Placement {
        epoch: Epoch(8),
        timeline: Timeline(2),
        base: Version(100),
        sources: vec![Source { group: GROUP, holders: vec![node(1)], root: hash(3) }],
        seats: vec![seat(1, Standing::Active), seat(2, Standing::Joining { from: VERSION })],
    }
}

fn shard() -> Shard {
    Shard { timeline: Timeline(2), group: GROUP, version: VERSION, root: hash(3) }
}

fn peer() -> Peer {
    Peer { node: node(4), addresses: vec!["192.0.2.1:7701".to_owned()], has_data: true }
}

fn to_coordinator() -> Vec<(&'static str, ToCoordinator)> {
    let hello = Hello {
        versions: Versions { min: 1, max: 2 },
        run: Some(RunId([6; 32])),
        role: Role::Worker,
        capability: Capability { flops: 1e12, memory: 1 << 33, compute_share: 0.5, fingerprint: hash(7) },
        data_addresses: vec!["192.0.2.2:7701".to_owned()],
        data: Some(hash(8)),
        timeline: Timeline(2),
        span: Some(Span::new(0, 3)),
        versions_held: vec![(GROUP, VERSION)],
        sums: vec![SumReport { sum: SUM, step: Step(0x0102), group: GROUP, counted: vec![(Use(1), set(&[0, 65]))], losses: vec![(Microbatch(65), 4.5)] }],
        shards: vec![shard()],
        commits: vec![commit()],
    };
    let done = Done { microbatch: Microbatch(7), attempt: ATTEMPT, uses: set(&[1, 2]), sums: vec![(GROUP, SUM)], loss: Some(5.25) };
    vec![
        ("Hello", ToCoordinator::Hello(Box::new(hello))),
        ("Heartbeat", ToCoordinator::Heartbeat),
        ("Done", ToCoordinator::Done { fence: FENCE, entries: vec![done] }),
        ("Lost", ToCoordinator::Lost { fence: FENCE, sums: vec![SUM] }),
        ("Reduced", ToCoordinator::Reduced { fence: FENCE, group: GROUP, attempt: REDUCE, digest: hash(2), squared_norms: vec![(Chunk(1), 0.5)] }),
        ("Applied", ToCoordinator::Applied { fence: FENCE, roots: vec![(GROUP, hash(3))] }),
        ("Ready", ToCoordinator::Ready { timeline: Timeline(2), span: Span::new(1, 4), version: VERSION }),
        ("Unreachable", ToCoordinator::Unreachable(node(4))),
        ("Leaving", ToCoordinator::Leaving),
        ("Saved", ToCoordinator::Saved { timeline: Timeline(2), shards: vec![shard()] }),
        ("Traffic", ToCoordinator::Traffic { links: "quic".to_owned(), sent_per_second: 1.5, received_per_second: 2.5 }),
        ("Lacks", ToCoordinator::Lacks { fence: FENCE, group: GROUP }),
        ("Returned", ToCoordinator::Returned { fence: FENCE, leases: vec![(Microbatch(7), ATTEMPT)] }),
        ("NotFinite", ToCoordinator::NotFinite { fence: FENCE, microbatch: Microbatch(7) }),
    ]
}

fn from_coordinator() -> Vec<(&'static str, FromCoordinator)> {
    let welcome = Welcome {
        version: 1,
        run: RunId([6; 32]),
        config: "[run]".to_owned(),
        placement: placement(),
        step: Step(0x0102),
        peers: vec![peer()],
        commits: vec![commit()],
        live_sums: vec![SUM],
        retired: Some(Step(0x0100)),
        checkpoint: Some((VERSION, vec![(GROUP, hash(3))])),
    };
    let grant = Grant { microbatch: Microbatch(7), lease: 4, mask: set(&[2]), holders: vec![(Span::new(0, 3), node(1))], last: true };
    let verdict = Verdict { microbatch: Microbatch(7), sums: vec![(GROUP, SUM)], counted: set(&[1]), dropped: set(&[2]) };
    let seal = Seal {
        fence: FENCE,
        group: GROUP,
        attempt: REDUCE,
        cover: vec![CoverPart { node: node(1), sum: SUM, pairs: 12 }],
        receivers: vec![node(1), node(2)],
        owners: vec![SliceOwner { node: node(1), first: Chunk(0), end: Chunk(9) }],
        gather: Codec::Bf16,
    };
    vec![
        ("Welcome", FromCoordinator::Welcome(Box::new(welcome))),
        ("Refused", FromCoordinator::Refused { reason: "no".to_owned() }),
        ("Placement", FromCoordinator::Placement(Box::new(placement()))),
        ("Peers", FromCoordinator::Peers(vec![peer()])),
        ("Lease", FromCoordinator::Lease { fence: FENCE, grants: vec![grant] }),
        ("Counted", FromCoordinator::Counted { fence: FENCE, verdicts: vec![verdict] }),
        ("Void", FromCoordinator::Void { fence: FENCE, sums: vec![SUM] }),
        ("Seal", FromCoordinator::Seal(Box::new(seal))),
        ("Commit", FromCoordinator::Commit(Box::new(commit()))),
        ("Retire", FromCoordinator::Retire { fence: FENCE }),
        ("Checkpoint", FromCoordinator::Checkpoint { timeline: Timeline(2), version: VERSION, groups: vec![GROUP] }),
        ("CheckpointComplete", FromCoordinator::CheckpointComplete { version: VERSION, keep_from: Version(1) }),
        ("Finished", FromCoordinator::Finished { version: VERSION }),
        ("Notice", FromCoordinator::Notice { text: "step 3".to_owned() }),
    ]
}

fn frames() -> Vec<(&'static str, Frame)> {
    let tensor = |codec: Codec| Payload { meta: TensorMeta { len: 2, codec }, bytes: Bytes::from(vec![0x3f; codec.byte_len(2)]) };
    let hop = |byte, first| Hop { node: node(byte), span: Span::new(first, first + 2) };
    let route = Route { feeder: node(3), hops: vec![hop(1, 0), hop(2, 2)], last: false };
    let forward = PeerMessage::Forward { work: WORK, mask: set(&[0, 1, 3]), route, hop: 1 };
    let with = |message, payload| Frame { message, payload: Some(payload) };
    vec![
        ("Forward", with(forward, tensor(Codec::Bf16))),
        ("Backward", with(PeerMessage::Backward { work: WORK, hop: 1 }, tensor(Codec::None))),
        ("Missing", PeerMessage::Missing { work: WORK, hop: 1, backward: true }.into()),
        ("Finished", PeerMessage::Finished { work: WORK }.into()),
        ("HopFailed", PeerMessage::HopFailed { work: WORK, hop: 1, refused: false }.into()),
        ("Contribution", with(PeerMessage::Contribution { fence: FENCE, group: GROUP, attempt: REDUCE, chunk: Chunk(1) }, tensor(Codec::None))),
        ("ReducedChunk", with(PeerMessage::ReducedChunk { fence: FENCE, group: GROUP, attempt: REDUCE, chunk: Chunk(1) }, tensor(Codec::Bf16))),
        ("FetchReduced", PeerMessage::FetchReduced { fence: FENCE, group: GROUP, attempt: REDUCE }.into()),
        ("FetchSnapshot", PeerMessage::FetchSnapshot { timeline: Timeline(2), group: GROUP, version: VERSION }.into()),
        ("SnapshotManifest", PeerMessage::SnapshotManifest { group: GROUP, version: VERSION, byte_len: 99, chunks: vec![hash(4)] }.into()),
        ("FetchStateChunk", PeerMessage::FetchStateChunk { group: GROUP, version: VERSION, chunk: 2 }.into()),
        ("StateChunk", with(PeerMessage::StateChunk { group: GROUP, version: VERSION, chunk: 2 }, Payload::raw(Bytes::from_static(b"state")))),
        ("Unavailable", PeerMessage::Unavailable { group: GROUP, version: VERSION }.into()),
        ("FetchBlob", PeerMessage::FetchBlob { hash: hash(5), chunk: 2 }.into()),
        ("Blob", with(PeerMessage::Blob { hash: hash(5), chunk: 2, byte_len: 99 }, Payload::raw(Bytes::from_static(b"blob")))),
        ("NoBlob", PeerMessage::NoBlob { hash: hash(5) }.into()),
    ]
}

/// The samples are of variants 0, 1, .. in order, and there is no further variant.
fn assert_all_variants<T: bincode::Decode<()>>(messages: &[Vec<u8>]) {
    for (tag, message) in messages.iter().enumerate() {
        assert_eq!(message[..4], u32::try_from(tag).expect("few").to_le_bytes(), "samples are in the order of the variants");
    }
    let next = u32::try_from(messages.len()).expect("few").to_le_bytes();
    let error = wire::decode::<T>(&next, 64).map(drop).expect_err("no such variant").to_string();
    assert!(error.contains("UnexpectedVariant"), "variant {} has no golden bytes: {error}", messages.len());
}

fn lines() -> Vec<String> {
    let line = |kind: &str, name: &str, frame: Vec<u8>| format!("{kind}::{name} {}", hex::encode(frame));
    let mut lines = Vec::new();
    lines.extend(to_coordinator().iter().map(|(name, message)| line("ToCoordinator", name, wire::control_frame(message).expect("short"))));
    lines.extend(from_coordinator().iter().map(|(name, message)| line("FromCoordinator", name, wire::control_frame(message).expect("short"))));
    for (name, frame) in frames() {
        let mut bytes = wire::data_head(&frame).expect("short");
        bytes.extend_from_slice(frame.payload.as_ref().map_or(&[], |payload| &payload.bytes[..]));
        lines.push(line("PeerMessage", name, bytes));
    }
    lines.push(line("Control", "accepted", wire::control_accepted()));
    lines
}

#[test]
fn every_variant_has_a_sample() {
    assert_all_variants::<ToCoordinator>(&to_coordinator().iter().map(|(_, message)| wire::encode(message)).collect::<Vec<_>>());
    assert_all_variants::<FromCoordinator>(&from_coordinator().iter().map(|(_, message)| wire::encode(message)).collect::<Vec<_>>());
    assert_all_variants::<PeerMessage>(&frames().iter().map(|(_, frame)| wire::encode(&frame.message)).collect::<Vec<_>>());
}

#[test]
fn golden_bytes_have_not_changed() {
    let lines = lines();
    if std::env::var_os("SKEIN_UPDATE_GOLDEN").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/message/golden.txt"), lines.join("\n") + "\n").expect("the sources are writable");
        return;
    }
    let pinned: Vec<&str> = include_str!("golden.txt").lines().collect();
    for (line, pinned) in lines.iter().zip(&pinned) {
        assert_eq!(line, pinned, "the wire has changed: see golden.rs for what to do");
    }
    assert_eq!(lines.len(), pinned.len(), "messages came or went: see golden.rs for what to do");
}

#[test]
fn golden_bytes_decode_to_what_was_encoded() {
    let pinned: Vec<Vec<u8>> =
        include_str!("golden.txt").lines().map(|line| hex::decode(line.split_once(' ').expect("name and bytes").1).expect("hexadecimal")).collect();
    let mut pinned = pinned.iter();
    for (name, message) in to_coordinator() {
        assert_eq!(wire::decode_control(pinned.next().expect(name), limits::CONTROL_BYTES_MAX), Ok(message));
    }
    for (name, message) in from_coordinator() {
        assert_eq!(wire::decode_control(pinned.next().expect(name), limits::CONTROL_BYTES_MAX), Ok(message));
    }
    for (name, frame) in frames() {
        assert_eq!(wire::decode_data(pinned.next().expect(name)), Ok(frame));
    }
}
