//! Versioned, size-capped bytes. The only file that names bincode.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};

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
    /// Not what was expected.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// Bytes after the end of the message.
    #[error("{0} bytes after the end of the message")]
    Trailing(usize),
}

/// Decodes a value from all of `bytes`, allocating at most in proportion to their number.
pub fn decode<T: bincode::Decode<()>>(bytes: &[u8], max: usize) -> Result<T, WireError> {
    if bytes.len() > max {
        return Err(WireError::TooLong { len: bytes.len(), max });
    }
    const CONFIG: Configuration<LittleEndian, Fixint, Limit<{ crate::limits::CONTROL_BYTES_MAX * 4 }>> =
        bincode::config::standard().with_fixed_int_encoding().with_limit::<{ crate::limits::CONTROL_BYTES_MAX * 4 }>();
    let (value, used) = bincode::decode_from_slice(bytes, CONFIG).map_err(|error| WireError::Malformed(error.to_string()))?;
    if used == bytes.len() { Ok(value) } else { Err(WireError::Trailing(bytes.len() - used)) }
}
