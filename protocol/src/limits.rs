//! Every bound in one place. Nothing a peer sends can make anyone hold more than these.

use std::time::Duration;

/// Members of a [`crate::set::BitSet`] lie below this.
pub const SET_MEMBERS_MAX: usize = 65_536;
/// Length of an encoded message without its tensor, on the data plane.
pub const DATA_HEADER_BYTES_MAX: usize = 256 * 1024;
/// Length of an encoded control message.
pub const CONTROL_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Length of a tensor behind a data message.
pub const TENSOR_BYTES_MAX: usize = 256 * 1024 * 1024;
/// What may be allocated for a peer before it is authenticated and admitted.
pub const STRANGER_BYTES_MAX: usize = 64 * 1024;
/// Nodes of a run.
pub const NODES_MAX: usize = 10_000;
/// Members of one group that reduce directly.
pub const REDUCERS_MAX: usize = 16;
/// Values of a reduction chunk (run configuration) at most.
pub const CHUNK_LEN_MAX: usize = 16 * 1024 * 1024;
/// Bytes of one chunk of a state transfer or of a data shard.
pub const STATE_CHUNK_BYTES: usize = 1024 * 1024;
/// Length of a data manifest.
pub const MANIFEST_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Shards that a data manifest lists.
pub const SHARDS_MAX: usize = 16_384;
/// Length of a shard of tokens.
pub const SHARD_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Length of a tokenizer's file.
pub const TOKENIZER_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Tokens of a vocabulary.
pub const VOCAB_MAX: u32 = 4_194_304;
/// Bytes of text that one token stands for, on average over a data set.
pub const TOKEN_TEXT_BYTES_MAX: u64 = 1024;
/// Chunks of data asked of peers and not answered yet.
pub const BLOBS_IN_FLIGHT: usize = 8;
/// Chunks of data asked of one peer and not answered yet.
pub const BLOBS_IN_FLIGHT_PER_PEER: usize = 4;
/// A chunk of data that is not here after so long is asked of another peer.
pub const BLOB_TIME_MAX: Duration = Duration::from_secs(20);
/// Bytes of a link's kind that are shown.
pub const LINK_KIND_BYTES_MAX: usize = 32;
/// Control messages queued towards one peer before it is disconnected.
pub const CONTROL_QUEUE: usize = 4096;
/// Bytes of control messages queued towards one peer before it is disconnected.
pub const CONTROL_QUEUE_BYTES: usize = 64 * 1024 * 1024;
/// Data messages queued towards one peer before sending is refused.
pub const DATA_QUEUE: usize = 1024;
/// Events queued towards a machine by its shell.
pub const EVENT_QUEUE: usize = 4096;
/// Tasks queued at an engine beyond the running one.
pub const ENGINE_QUEUE: usize = 2;
/// Bytes of encoded tensors that an engine keeps to use again.
pub const POOLED_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Receive window of one data connection in bytes.
pub const LINK_WINDOW_BYTES: u32 = 32 * 1024 * 1024;
/// What the system is asked to hold of datagrams that the process has not taken yet. Where computing
/// keeps all cores busy the process takes them late, and what does not fit is lost and sent again
/// after tens of milliseconds. The system may allow less.
pub const SOCKET_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// Streams that a peer may have open at once on one data connection.
pub const LINK_STREAMS_MAX: u32 = 256;
/// A handshake, or the header of a frame, takes at most so long.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(5);
/// A node says something at least so often.
pub const HEARTBEAT_EVERY: Duration = Duration::from_millis(250);
/// Silence after which a node is suspect: work goes elsewhere.
pub const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// Silence after which a member is no member any more.
pub const LEASE: Duration = Duration::from_secs(10);
/// First wait before a node dials the coordinator again; doubles up to [`RECONNECT_MAX`].
pub const RECONNECT_MIN: Duration = Duration::from_millis(200);
/// Longest wait before a node dials the coordinator again.
pub const RECONNECT_MAX: Duration = Duration::from_secs(10);
