//! Versioned, size-capped bytes: encoding, and frames around it. The only file that names bincode.
//!
//! Everything here is a pure function over byte slices, used by the shells in the same order: read
//! a header of fixed length, let it say how much follows (or refuse, before anything is allocated),
//! read that, decode it.
//!
//! | frame | header | then |
//! |---|---|---|
//! | control | `SKNc`, framing version u16, length u32 | the message; an empty one only says "accepted" |
//! | data | `SKNd`, framing version u16, length u32, codec u8, values u32 | the message, the tensor's bytes |
//!
//! Integers are little endian; codec 0 says that no tensor follows. The framing version stands for
//! this table alone: messages have versions of their own, agreed on in the hello, so that a
//! mismatch of those can still be told to the user.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bytes::Bytes;

use crate::codec::Codec;
use crate::limits;
use crate::message::Versions;
use crate::message::data::{Frame, PeerMessage};
use crate::tensor::{Payload, TensorMeta};

/// Version of the framing. Never changes with the messages.
pub const FRAMING_VERSION: u16 = 1;
/// Length of a control frame's header in bytes.
pub const CONTROL_HEADER_BYTES: usize = 10;
/// Length of a data frame's header in bytes.
pub const DATA_HEADER_BYTES: usize = 15;

const CONTROL_MAGIC: [u8; 4] = *b"SKNc";
const DATA_MAGIC: [u8; 4] = *b"SKNd";
/// Decoded values may take so many times the length of their encoding in memory.
const GROWTH: usize = 4;

/// Encodes a value of ours. Fixed-width integers, little endian: equal values, equal bytes.
pub fn encode<T: bincode::Encode>(value: &T) -> Vec<u8> {
    bincode::encode_to_vec(value, bincode::config::standard().with_fixed_int_encoding()).expect("encoding to memory does not fail")
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Longer than allowed.
    #[error("{len} bytes, at most {max} allowed")]
    TooLong {
        /// What was announced or came.
        len: usize,
        /// The cap.
        max: usize,
    },
    /// The bytes end too early.
    #[error("{len} bytes where {needed} belong")]
    Truncated {
        /// What came.
        len: usize,
        /// What was announced.
        needed: usize,
    },
    /// The other side is not Skein, or the stream is out of step.
    #[error("not a frame: it starts with {0:02x?}")]
    Magic([u8; 4]),
    /// The other side frames in another way.
    #[error("framing version {got}, this build speaks {ours}: update the older side", ours = FRAMING_VERSION)]
    Version {
        /// What the frame says.
        got: u16,
    },
    /// Not what was expected.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// A tensor behind a message that has none, or of the wrong kind.
    #[error("unexpected payload: {0}")]
    Payload(&'static str),
    /// Bytes after the end of the message.
    #[error("{0} bytes after the end of the message")]
    Trailing(usize),
}

/// Decodes a value from all of `bytes`, allocating at most in proportion to `max`, whatever the
/// lengths inside claim.
pub fn decode<T: bincode::Decode<()>>(bytes: &[u8], max: usize) -> Result<T, WireError> {
    if bytes.len() > max {
        return Err(WireError::TooLong { len: bytes.len(), max });
    }
    // bincode's limit is a constant: the smallest that covers the cap.
    let decoded = if max <= limits::STRANGER_BYTES_MAX {
        decode_limited::<T, { limits::STRANGER_BYTES_MAX * GROWTH }>(bytes)
    } else if max <= limits::DATA_HEADER_BYTES_MAX {
        decode_limited::<T, { limits::DATA_HEADER_BYTES_MAX * GROWTH }>(bytes)
    } else {
        decode_limited::<T, { limits::CONTROL_BYTES_MAX * GROWTH }>(bytes)
    };
    let (value, used) = decoded?;
    if used == bytes.len() { Ok(value) } else { Err(WireError::Trailing(bytes.len() - used)) }
}

fn decode_limited<T: bincode::Decode<()>, const LIMIT: usize>(bytes: &[u8]) -> Result<(T, usize), WireError> {
    let config: Configuration<LittleEndian, Fixint, Limit<LIMIT>> = bincode::config::standard().with_fixed_int_encoding().with_limit::<LIMIT>();
    bincode::decode_from_slice(bytes, config).map_err(|error| WireError::Malformed(error.to_string()))
}

/// The header of a control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    /// Length of the message in bytes; 0 is the answer "accepted" and no message.
    pub message_len: usize,
}

impl ControlHeader {
    /// Reads a header and holds it against the cap `max` in bytes.
    pub fn parse(bytes: &[u8; CONTROL_HEADER_BYTES], max: usize) -> Result<Self, WireError> {
        let message_len = common_header(&bytes[..], CONTROL_MAGIC)?;
        if message_len > max { Err(WireError::TooLong { len: message_len, max }) } else { Ok(Self { message_len }) }
    }
}

/// A control message as one frame. Fails only if it is over [`limits::CONTROL_BYTES_MAX`].
pub fn control_frame<T: bincode::Encode>(message: &T) -> Result<Vec<u8>, WireError> {
    framed(CONTROL_MAGIC, &[], &encode(message), limits::CONTROL_BYTES_MAX)
}

/// The frame that says "accepted": a header without message.
pub fn control_accepted() -> Vec<u8> {
    framed(CONTROL_MAGIC, &[], &[], 0).expect("nothing is not too long")
}

/// Decodes one whole control frame.
pub fn decode_control<T: bincode::Decode<()>>(bytes: &[u8], max: usize) -> Result<T, WireError> {
    let (header, rest) = bytes.split_first_chunk().ok_or(WireError::Truncated { len: bytes.len(), needed: CONTROL_HEADER_BYTES })?;
    let header = ControlHeader::parse(header, max)?;
    decode(exactly(rest, header.message_len)?, max)
}

/// The versions that a hello claims, though the rest of it may be of a version unknown here: a
/// hello begins, for ever, with a zero u32 and two u16.
pub fn hello_versions(message: &[u8]) -> Option<Versions> {
    match *message.first_chunk::<8>()? {
        [0, 0, 0, 0, a, b, c, d] => Some(Versions { min: u16::from_le_bytes([a, b]), max: u16::from_le_bytes([c, d]) }),
        _ => None,
    }
}

/// The header of a data frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// Length of the message in bytes.
    pub message_len: usize,
    /// The tensor that follows it.
    pub payload: Option<TensorMeta>,
}

impl DataHeader {
    /// Reads a header and holds it against the caps of the data plane.
    pub fn parse(bytes: &[u8; DATA_HEADER_BYTES]) -> Result<Self, WireError> {
        let message_len = common_header(&bytes[..], DATA_MAGIC)?;
        if message_len > limits::DATA_HEADER_BYTES_MAX {
            return Err(WireError::TooLong { len: message_len, max: limits::DATA_HEADER_BYTES_MAX });
        }
        let [.., codec, a, b, c, d] = *bytes;
        let len = u32::from_le_bytes([a, b, c, d]);
        let payload = match codec {
            0 if len == 0 => None,
            0 => return Err(WireError::Malformed("values without a codec".to_owned())),
            tag => Some(TensorMeta { len, codec: codec_of(tag)? }),
        };
        let header = Self { message_len, payload };
        if header.payload_len() > limits::TENSOR_BYTES_MAX {
            return Err(WireError::TooLong { len: header.payload_len(), max: limits::TENSOR_BYTES_MAX });
        }
        Ok(header)
    }

    /// Length of the tensor in bytes.
    pub fn payload_len(&self) -> usize {
        self.payload.map_or(0, TensorMeta::byte_len)
    }

    /// Decodes the message, and refuses a payload that is not for it: call this before making
    /// room for the payload.
    pub fn message(&self, bytes: &[u8]) -> Result<PeerMessage, WireError> {
        let message = decode(exactly(bytes, self.message_len)?, limits::DATA_HEADER_BYTES_MAX)?;
        let Some(meta) = self.payload else { return Ok(message) };
        let (max, raw) = payload_rule(&message).ok_or(WireError::Payload("this message has none"))?;
        if (meta.codec == Codec::Raw) != raw {
            return Err(WireError::Payload(if raw { "a tensor where raw bytes belong" } else { "raw bytes where a tensor belongs" }));
        }
        if self.payload_len() > max {
            return Err(WireError::TooLong { len: self.payload_len(), max });
        }
        Ok(message)
    }

    /// Puts message and payload together.
    pub fn frame(&self, message: PeerMessage, payload: Bytes) -> Result<Frame, WireError> {
        exactly(&payload, self.payload_len())?;
        Ok(Frame { message, payload: self.payload.map(|meta| Payload { meta, bytes: payload }) })
    }
}

/// Header and message of a data frame; the payload's bytes follow as they are. Fails if the
/// receiver would refuse it.
pub fn data_head(frame: &Frame) -> Result<Vec<u8>, WireError> {
    let meta = frame.payload.as_ref().map(|payload| payload.meta);
    let mut tail = [0; 5];
    if let Some(payload) = &frame.payload {
        exactly(&payload.bytes, payload.meta.byte_len())?;
        tail[0] = codec_tag(payload.meta.codec);
        tail[1..].copy_from_slice(&payload.meta.len.to_le_bytes());
    }
    let message = encode(&frame.message);
    let header = DataHeader { message_len: message.len(), payload: meta };
    if header.payload_len() > limits::TENSOR_BYTES_MAX {
        return Err(WireError::TooLong { len: header.payload_len(), max: limits::TENSOR_BYTES_MAX });
    }
    framed(DATA_MAGIC, &tail, &message, limits::DATA_HEADER_BYTES_MAX)
}

/// Decodes one whole data frame.
pub fn decode_data(bytes: &[u8]) -> Result<Frame, WireError> {
    let (header, rest) = bytes.split_first_chunk().ok_or(WireError::Truncated { len: bytes.len(), needed: DATA_HEADER_BYTES })?;
    let header = DataHeader::parse(header)?;
    let (message, payload) = rest.split_at_checked(header.message_len).ok_or(WireError::Truncated { len: rest.len(), needed: header.message_len })?;
    let message = header.message(message)?;
    header.frame(message, Bytes::copy_from_slice(exactly(payload, header.payload_len())?))
}

/// Longest payload of a message in bytes and whether it is raw; `None` if it has no payload.
fn payload_rule(message: &PeerMessage) -> Option<(usize, bool)> {
    match message {
        PeerMessage::Forward { .. } | PeerMessage::Backward { .. } => Some((limits::TENSOR_BYTES_MAX, false)),
        PeerMessage::Contribution { .. } | PeerMessage::ReducedChunk { .. } => Some((limits::CHUNK_LEN_MAX * 4, false)),
        PeerMessage::StateChunk { .. } | PeerMessage::Blob { .. } => Some((limits::STATE_CHUNK_BYTES, true)),
        PeerMessage::Missing { .. }
        | PeerMessage::Finished { .. }
        | PeerMessage::HopFailed { .. }
        | PeerMessage::FetchReduced { .. }
        | PeerMessage::FetchSnapshot { .. }
        | PeerMessage::SnapshotManifest { .. }
        | PeerMessage::FetchStateChunk { .. }
        | PeerMessage::Unavailable { .. }
        | PeerMessage::FetchBlob { .. }
        | PeerMessage::NoBlob { .. } => None,
    }
}

fn codec_tag(codec: Codec) -> u8 {
    match codec {
        Codec::None => 1,
        Codec::Bf16 => 2,
        Codec::Raw => 3,
        Codec::Fixed => 4,
    }
}

fn codec_of(tag: u8) -> Result<Codec, WireError> {
    match tag {
        1 => Ok(Codec::None),
        2 => Ok(Codec::Bf16),
        3 => Ok(Codec::Raw),
        4 => Ok(Codec::Fixed),
        other => Err(WireError::Malformed(format!("codec {other} is unknown"))),
    }
}

fn framed(magic: [u8; 4], tail: &[u8], message: &[u8], max: usize) -> Result<Vec<u8>, WireError> {
    let len = u32::try_from(message.len()).ok().filter(|_| message.len() <= max).ok_or(WireError::TooLong { len: message.len(), max })?;
    let mut frame = Vec::with_capacity(DATA_HEADER_BYTES + message.len());
    frame.extend_from_slice(&magic);
    frame.extend_from_slice(&FRAMING_VERSION.to_le_bytes());
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(tail);
    frame.extend_from_slice(message);
    Ok(frame)
}

/// What both headers begin with: magic, framing version, length of the message.
fn common_header(bytes: &[u8], expected: [u8; 4]) -> Result<usize, WireError> {
    let Some(&[m0, m1, m2, m3, v0, v1, l0, l1, l2, l3]) = bytes.first_chunk() else {
        return Err(WireError::Truncated { len: bytes.len(), needed: CONTROL_HEADER_BYTES });
    };
    let (magic, version) = ([m0, m1, m2, m3], u16::from_le_bytes([v0, v1]));
    if magic != expected {
        return Err(WireError::Magic(magic));
    }
    if version != FRAMING_VERSION {
        return Err(WireError::Version { got: version });
    }
    Ok(u32::from_le_bytes([l0, l1, l2, l3]) as usize)
}

fn exactly(bytes: &[u8], len: usize) -> Result<&[u8], WireError> {
    match bytes.len() {
        got if got < len => Err(WireError::Truncated { len: got, needed: len }),
        got if got > len => Err(WireError::Trailing(got - len)),
        _ => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::id::{Group, Hash, Version};
    use crate::message::control::{FromCoordinator, ToCoordinator};

    fn blob(bytes: usize) -> Frame {
        Frame { message: PeerMessage::Blob { hash: Hash::of(b"x"), chunk: 1, byte_len: 9 }, payload: Some(Payload::raw(Bytes::from(vec![7; bytes]))) }
    }

    fn whole(frame: &Frame) -> Vec<u8> {
        let mut bytes = data_head(frame).expect("within the caps");
        bytes.extend_from_slice(frame.payload.as_ref().map_or(&[], |payload| &payload.bytes[..]));
        bytes
    }

    #[test]
    fn control_frames_are_refused_for_what_is_wrong_with_them() {
        let good = control_frame(&FromCoordinator::Notice { text: "all is well".to_owned() }).expect("short");
        let check = |bytes: &[u8], max| decode_control::<FromCoordinator>(bytes, max).map(drop);
        assert_eq!(check(&good, 64), Ok(()));
        let len = good.len() - CONTROL_HEADER_BYTES;
        assert_eq!(check(&good, len - 1), Err(WireError::TooLong { len, max: len - 1 }));
        assert_eq!(check(&good[..5], 64), Err(WireError::Truncated { len: 5, needed: CONTROL_HEADER_BYTES }));
        assert_eq!(check(&good[..good.len() - 1], 64), Err(WireError::Truncated { len: len - 1, needed: len }));
        let mut longer = good.clone();
        longer.push(0);
        assert_eq!(check(&longer, 64), Err(WireError::Trailing(1)));
        longer[6] += 1; // announces the additional byte: the message itself ends before it
        assert_eq!(check(&longer, 64), Err(WireError::Trailing(1)));
        let mut other = good.clone();
        other[4] = 9;
        assert_eq!(check(&other, 64), Err(WireError::Version { got: 9 }));
        let mut other = good.clone();
        other[3] = b'd';
        assert_eq!(check(&other, 64), Err(WireError::Magic(DATA_MAGIC)));
        let mut other = good;
        other[CONTROL_HEADER_BYTES] = 200;
        assert!(matches!(check(&other, 64), Err(WireError::Malformed(_))));
    }

    #[test]
    fn a_header_is_refused_before_anything_follows_it() {
        let mut header = [0; CONTROL_HEADER_BYTES];
        header[..4].copy_from_slice(&CONTROL_MAGIC);
        header[4] = 1;
        header[6..].copy_from_slice(&u32::MAX.to_le_bytes());
        let max = limits::CONTROL_BYTES_MAX;
        assert_eq!(ControlHeader::parse(&header, max), Err(WireError::TooLong { len: u32::MAX as usize, max }));

        let mut header: [u8; DATA_HEADER_BYTES] = *whole(&blob(3)).first_chunk().expect("longer than a header");
        header[11..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(DataHeader::parse(&header), Err(WireError::TooLong { len: u32::MAX as usize, max: limits::TENSOR_BYTES_MAX }));
        header[10] = 200;
        assert!(matches!(DataHeader::parse(&header), Err(WireError::Malformed(_))));
        header[10] = 0;
        assert!(matches!(DataHeader::parse(&header), Err(WireError::Malformed(_))));
    }

    #[test]
    fn data_frames_come_back_and_payloads_belong_to_their_messages() {
        for frame in [blob(0), blob(1000), PeerMessage::Unavailable { group: Group(1), version: Version(2) }.into()] {
            assert_eq!(decode_data(&whole(&frame)), Ok(frame));
        }
        let bytes = whole(&blob(10));
        assert!(matches!(decode_data(&bytes[..bytes.len() - 1]), Err(WireError::Truncated { len: 9, needed: 10 })));
        assert_eq!(decode_data(&[&bytes[..], &[0]].concat()), Err(WireError::Trailing(1)));
        assert!(matches!(decode_data(&whole(&blob(limits::STATE_CHUNK_BYTES + 1))), Err(WireError::TooLong { .. })));

        let message = PeerMessage::NoBlob { hash: Hash::of(b"x") };
        let odd = Frame { message, payload: Some(Payload::raw(Bytes::from_static(b"x"))) };
        assert!(matches!(decode_data(&whole(&odd)), Err(WireError::Payload(_))));
        let mut tensor = blob(8);
        tensor.payload = Some(Payload { meta: TensorMeta { len: 2, codec: Codec::None }, bytes: Bytes::from_static(&[0; 8]) });
        assert!(matches!(decode_data(&whole(&tensor)), Err(WireError::Payload(_))));
    }

    #[test]
    fn a_length_that_lies_allocates_nothing() {
        for (count, max) in [(1_u64 << 40, 64), (u64::MAX, limits::CONTROL_BYTES_MAX), (300 * 1024, limits::STRANGER_BYTES_MAX)] {
            // `Peers` has a list of structs, `Notice` a string.
            for tag in [3_u32, 13] {
                let bytes = [&tag.to_le_bytes()[..], &count.to_le_bytes()].concat();
                let error = decode::<FromCoordinator>(&bytes, max).expect_err("the list is not there");
                assert!(error.to_string().contains("LimitExceeded"), "tag {tag}, {count} elements: {error}");
            }
        }
        let sets = [&2_u32.to_le_bytes()[..], &[0; 12], &(1_u64 << 40).to_le_bytes()].concat();
        assert!(decode::<ToCoordinator>(&sets, 64).is_err());
    }

    #[test]
    fn a_hello_of_the_future_still_tells_its_versions() {
        let mut bytes = vec![0, 0, 0, 0, 2, 0, 5, 0];
        bytes.extend([0xff; 90]);
        assert_eq!(hello_versions(&bytes), Some(Versions { min: 2, max: 5 }));
        assert_eq!(hello_versions(&bytes[..7]), None);
        assert_eq!(hello_versions(&[1, 0, 0, 0, 1, 0, 1, 0]), None);
    }

    fn never_larger(bytes: &[u8]) {
        if let Ok(message) = decode_control::<ToCoordinator>(bytes, limits::STRANGER_BYTES_MAX) {
            assert!(encode(&message).len() <= limits::STRANGER_BYTES_MAX);
        }
        if let Ok(message) = decode_control::<FromCoordinator>(bytes, limits::CONTROL_BYTES_MAX) {
            assert!(encode(&message).len() <= limits::CONTROL_BYTES_MAX);
        }
        if let Ok(frame) = decode_data(bytes) {
            assert!(encode(&frame.message).len() <= limits::DATA_HEADER_BYTES_MAX);
            assert_eq!(whole(&frame).len(), bytes.len());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic_and_never_grow(mut bytes in prop::collection::vec(any::<u8>(), 0..400), tag in 0_u8..20, data: bool, framed: bool) {
            if framed && bytes.len() > DATA_HEADER_BYTES + 4 {
                let head = if data { DATA_HEADER_BYTES } else { CONTROL_HEADER_BYTES };
                bytes[..4].copy_from_slice(if data { &DATA_MAGIC } else { &CONTROL_MAGIC });
                bytes[4..6].copy_from_slice(&FRAMING_VERSION.to_le_bytes());
                let len = (bytes.len() - head) as u32;
                bytes[6..10].copy_from_slice(&len.to_le_bytes());
                if data {
                    bytes[10..15].fill(0);
                }
                bytes[head..head + 4].copy_from_slice(&u32::from(tag).to_le_bytes());
                // Small numbers make plausible lengths.
                for byte in &mut bytes[head + 4..] {
                    *byte = if *byte < 160 { 0 } else { *byte % 8 };
                }
            }
            never_larger(&bytes);
        }
    }
}
