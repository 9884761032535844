//! How fast codecs and links are on this machine: `cargo run -p skein-protocol --features net --example goodput`.
//!
//! Both ends of the link run in this process, each on threads of its own.

#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use skein_protocol::codec::{Codec, check_finite};
use skein_protocol::id::{Chunk, Fence, Group, NodeId, ReduceAttempt};
use skein_protocol::message::control::Peer;
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::net::Identity;
use skein_protocol::net::links::{LinkEvent, LinkSettings, Links};
use skein_protocol::tensor::{Payload, TensorMeta};
use tokio::sync::mpsc;

fn main() {
    codecs();
    for (mib, frames) in [(1, 1024), (16, 64), (64, 16)] {
        link(mib, frames);
    }
}

/// Rates count the f32 side.
#[expect(clippy::disallowed_methods, reason = "it measures time")]
fn codecs() {
    const VALUES: usize = 4 * 1024 * 1024;
    let values: Vec<f32> = (0..VALUES).map(|index| index as f32 * 0.37 - 1e5).collect();
    let rate = |name: &str, mut run: Box<dyn FnMut() + '_>| {
        run();
        let (rounds, start) = (20, Instant::now());
        (0..rounds).for_each(|_| run());
        println!("{name:<22} {:6.2} GB/s", rounds as f64 * (VALUES * 4) as f64 / start.elapsed().as_secs_f64() / 1e9);
    };
    rate("check_finite", Box::new(|| check_finite(black_box(&values)).expect("finite")));
    for codec in [Codec::None, Codec::Bf16] {
        let mut bytes = vec![0; codec.byte_len(VALUES)];
        rate(&format!("{codec:?} encode"), Box::new(|| codec.encode(black_box(&values), &mut bytes)));
        let mut back = vec![0.0; VALUES];
        rate(&format!("{codec:?} decode"), Box::new(|| codec.decode(black_box(&bytes), &mut back).expect("finite")));
        rate(&format!("{codec:?} decode_add"), Box::new(|| codec.decode_add(black_box(&bytes), &mut back).expect("finite")));
    }
}

struct Node {
    runtime: tokio::runtime::Runtime,
    id: NodeId,
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
}

fn node() -> Node {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    let identity = Identity::generate();
    let settings = LinkSettings::new(([127, 0, 0, 1], 0).into());
    let (links, events) = runtime.block_on(Links::start(&identity, settings)).expect("a free port");
    Node { runtime, id: identity.node_id(), links, events }
}

#[expect(clippy::disallowed_methods, reason = "it measures time")]
fn link(mib: usize, frames: usize) {
    let (a, mut b) = (node(), node());
    let peer = |node: &Node| Peer { node: node.id, addresses: vec![node.links.local_addr().to_string()], has_data: false };
    a.links.set_peers(&[peer(&b)]);
    b.links.set_peers(&[peer(&a)]);
    let bytes = mib * 1024 * 1024;
    let meta = TensorMeta { len: u32::try_from(bytes / 4).expect("small"), codec: Codec::None };
    let payload = Payload { meta, bytes: vec![1; bytes].into() };
    let message = PeerMessage::Contribution { fence: Fence::default(), group: Group(0), attempt: ReduceAttempt(0), chunk: Chunk(0) };
    let mut send = |count: usize, queued: usize| {
        let (mut sent, mut came) = (0, 0);
        while came < count {
            while sent < count && sent < came + queued {
                a.links.send(b.id, Frame { message: message.clone(), payload: Some(payload.clone()) });
                sent += 1;
            }
            match b.runtime.block_on(b.events.recv()) {
                Some(LinkEvent::Frame { .. }) => came += 1,
                other => panic!("{other:?}"),
            }
        }
    };
    send(1, 1);
    let start = Instant::now();
    send(frames, 256 / mib.min(256) + 1);
    let took = start.elapsed();
    let stats = a.links.stats()[&b.id];
    println!(
        "link, {mib:>2} MiB frames    {:6.2} GB/s   (meter {:.2} GB/s, round trip {:?})",
        (frames * bytes) as f64 / took.as_secs_f64() / 1e9,
        stats.rate / 1e9,
        stats.rtt.unwrap_or(Duration::ZERO)
    );
}
