//! What hosting a span takes in memory.

use skein_protocol::config::BatchSection;
use skein_protocol::id::Span;
use skein_protocol::model::Structure;

/// Bytes a parameter takes at its host, all of f32: weights in two generations (8), two moments
/// (8), the open sum (4), the reduced result (4), and the gradient of the microbatch at work (4).
pub const BYTES_PER_PARAMETER: u64 = 28;

/// Microbatches whose activations a host holds at once: one at work, one waiting on either side,
/// and the slot that is kept for redo.
pub const MICROBATCHES_HELD: u64 = 4;

/// Boundary tensors that a host keeps of each microbatch: input and output, and the gradients of both.
const BOUNDARIES_HELD: u64 = 4;

const BYTES_PER_VALUE: u64 = 4;

/// Bytes that a host of `span` needs: state of the span's groups, and activations of a few microbatches.
pub fn span_bytes(structure: &Structure, batch: &BatchSection, span: Span) -> u64 {
    let parameters: u64 = structure.groups_of(span).into_iter().map(|group| structure.layout(group).len as u64).sum();
    let kept: u64 = span.blocks().map(|block| structure.kept_per_token[usize::from(block.0)] as u64).sum();
    let values_per_token = kept.saturating_add(BOUNDARIES_HELD * structure.boundary as u64);
    let activations = (batch.tokens_per_microbatch() as u64).saturating_mul(values_per_token).saturating_mul(MICROBATCHES_HELD * BYTES_PER_VALUE);
    parameters.saturating_mul(BYTES_PER_PARAMETER).saturating_add(activations)
}

/// Bytes as a person reads them: `1.2 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // 1023.95 would be printed as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skein_protocol::model::GroupLayout;

    #[test]
    fn state_and_activations_are_counted_and_a_tied_head_holds_the_embedding() {
        let groups = [64, 32, 16].map(|len| GroupLayout::new([("w".to_owned(), vec![len])])).to_vec();
        let batch = BatchSection { microbatches: 4, sequences: 2, length: 8 };
        let structure = Structure::new(groups, true, vec![1.0; 3], 10, vec![5, 7, 9]);
        // 16 tokens, 4 microbatches, 4 bytes: 256 bytes for each value a token keeps.
        assert_eq!(span_bytes(&structure, &batch, Span::new(0, 1)), 64 * 28 + 256 * (5 + 40));
        assert_eq!(span_bytes(&structure, &batch, Span::new(1, 3)), (64 + 32 + 16) * 28 + 256 * (7 + 9 + 40));
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!([0, 1023, 1024, 1_288_490_189, u64::MAX].map(human_bytes), ["0 B", "1023 B", "1.0 KiB", "1.2 GiB", "16384.0 PiB"]);
        assert_eq!(human_bytes(1024 * 1024 - 1), "1.0 MiB");
    }
}
