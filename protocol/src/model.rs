//! The model's shape, and how it is cut: blocks are placed, groups are reduced, uses are counted.
//!
//! Block 0 is the embedding, blocks `1..=layers` are the transformer layers, the last block is the
//! head. Group `g` holds the parameters of block `g`; with a tied head, the head's projection is
//! group 0 once more, so the head block has two uses: the final norm (its own group) and the
//! embedding (group 0).

use serde::{Deserialize, Serialize};

use crate::id::{Block, Chunk, Group, Span, Use};
use crate::set::BitSet;

/// A decoder-only transformer in the shape of Llama; field names are those of `config.json` in
/// Hugging Face `transformers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward's inside.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// The longest sequence the model is meant for.
    pub max_position_embeddings: usize,
    /// Epsilon of the RMS norms.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Whether the head's projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
}

fn default_rms_norm_eps() -> f64 {
    1e-5
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_initializer_range() -> f64 {
    0.02
}

impl ModelConfig {
    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }
}

/// One tensor within its group's flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The tensor's name in Hugging Face `transformers`.
    pub name: String,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Where it starts in the group's buffer, in values; a multiple of [`TENSOR_ALIGN`].
    pub offset: usize,
}

impl TensorSpec {
    /// How many values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Tensors start at multiples of so many values (64 bytes of f32): results of CPU kernels can
/// depend on alignment.
pub const TENSOR_ALIGN: usize = 16;

/// A group's flat buffer: its tensors in order, each aligned, padding zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    /// The tensors, by ascending offset.
    pub tensors: Vec<TensorSpec>,
    /// Length of the buffer in values, padding included.
    pub len: usize,
}

impl GroupLayout {
    /// Lays out tensors of the given names and shapes.
    pub fn new(tensors: impl IntoIterator<Item = (String, Vec<usize>)>) -> Self {
        let mut len = 0;
        let mut specs = Vec::new();
        for (name, shape) in tensors {
            let spec = TensorSpec { name, shape, offset: len };
            len = (len + spec.len()).next_multiple_of(TENSOR_ALIGN);
            specs.push(spec);
        }
        Self { tensors: specs, len }
    }

    /// How many parameters, padding excluded.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(TensorSpec::len).sum()
    }

    /// How many chunks of `chunk_len` values cover the buffer.
    pub fn chunks(&self, chunk_len: usize) -> u32 {
        u32::try_from(self.len.div_ceil(chunk_len)).expect("a group has fewer than 2^32 chunks")
    }

    /// The values of one chunk; the last may be shorter.
    pub fn chunk_range(&self, chunk: Chunk, chunk_len: usize) -> std::ops::Range<usize> {
        let start = (chunk.0 as usize * chunk_len).min(self.len);
        start..(start + chunk_len).min(self.len)
    }
}

/// Everything that follows from the model's shape alone, whoever computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Structure {
    /// One layout a group; the index is the group's.
    pub groups: Vec<GroupLayout>,
    /// The (group, block) pair of each use; the index is the use's.
    pub uses: Vec<(Group, Block)>,
    /// Multiply-add work of each block, forward and backward, in FLOP per token.
    pub flops_per_token: Vec<f64>,
    /// Values per token of the boundary between two blocks.
    pub boundary: usize,
    /// Values that a block keeps per token for its backward, estimated.
    pub kept_per_token: Vec<usize>,
}

impl Structure {
    /// The structure of a Llama-shaped model trained on sequences of `length` tokens.
    pub fn llama(model: &ModelConfig, length: usize) -> Self {
        let (d, f, v) = (model.hidden_size, model.intermediate_size, model.vocab_size);
        let kv = model.num_key_value_heads * model.head_dim();
        let mut groups = vec![GroupLayout::new([("model.embed_tokens.weight".to_owned(), vec![v, d])])];
        for layer in 0..model.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            groups.push(GroupLayout::new([
                (name("input_layernorm"), vec![d]),
                (name("self_attn.q_proj"), vec![d, d]),
                (name("self_attn.k_proj"), vec![kv, d]),
                (name("self_attn.v_proj"), vec![kv, d]),
                (name("self_attn.o_proj"), vec![d, d]),
                (name("post_attention_layernorm"), vec![d]),
                (name("mlp.gate_proj"), vec![f, d]),
                (name("mlp.up_proj"), vec![f, d]),
                (name("mlp.down_proj"), vec![d, f]),
            ]));
        }
        let mut head = vec![("model.norm.weight".to_owned(), vec![d])];
        if !model.tie_word_embeddings {
            head.push(("lm_head.weight".to_owned(), vec![v, d]));
        }
        groups.push(GroupLayout::new(head));

        // Six FLOP a parameter and token (forward 2, backward 4), and attention's products:
        // 12 x width x half the context.
        let layer_flops = 6.0 * (2 * d * d + 2 * kv * d + 3 * d * f) as f64 + 6.0 * (d * length) as f64;
        let layer_kept = 8 * d + 2 * kv + 3 * f;
        let mut flops_per_token = vec![layer_flops; model.num_hidden_layers + 2];
        let mut kept_per_token = vec![layer_kept; model.num_hidden_layers + 2];
        (flops_per_token[0], kept_per_token[0]) = (2.0 * d as f64, d);
        (flops_per_token[model.num_hidden_layers + 1], kept_per_token[model.num_hidden_layers + 1]) = (6.0 * (d * v) as f64, 3 * v + d);
        Self::new(groups, model.tie_word_embeddings, flops_per_token, d, kept_per_token)
    }

    /// A structure from its parts: one group and one block for each layout; `tied` adds group 0 to the last block.
    pub fn new(groups: Vec<GroupLayout>, tied: bool, flops_per_token: Vec<f64>, boundary: usize, kept_per_token: Vec<usize>) -> Self {
        let count = u16::try_from(groups.len()).expect("a model has fewer than 65536 blocks");
        let mut uses: Vec<(Group, Block)> = (0..count).map(|index| (Group(index), Block(index))).collect();
        if tied {
            uses.push((Group(0), Block(count - 1)));
        }
        Self { groups, uses, flops_per_token, boundary, kept_per_token }
    }

    /// How many blocks.
    pub fn blocks(&self) -> usize {
        self.groups.len()
    }

    /// All blocks as one span.
    pub fn whole(&self) -> Span {
        Span::new(0, u16::try_from(self.blocks()).expect("checked when built"))
    }

    /// The groups in order.
    pub fn group_ids(&self) -> impl Iterator<Item = Group> + use<> {
        (0..u16::try_from(self.groups.len()).expect("checked when built")).map(Group)
    }

    /// The layout of `group`.
    pub fn layout(&self, group: Group) -> &GroupLayout {
        &self.groups[usize::from(group.0)]
    }

    /// The uses by the blocks of `span`, as use indices.
    pub fn uses_of(&self, span: Span) -> BitSet {
        self.uses.iter().enumerate().filter(|(_, (_, block))| span.contains(*block)).map(|(index, _)| index).collect()
    }

    /// The uses of `group`, as use indices.
    pub fn uses_of_group(&self, group: Group) -> BitSet {
        self.uses.iter().enumerate().filter(|(_, (g, _))| *g == group).map(|(index, _)| index).collect()
    }

    /// All uses.
    pub fn all_uses(&self) -> BitSet {
        BitSet::below(self.uses.len())
    }

    /// The group of a use.
    pub fn group_of(&self, one: Use) -> Group {
        self.uses[usize::from(one.0)].0
    }

    /// The groups that a host of `span` holds, ascending.
    pub fn groups_of(&self, span: Span) -> Vec<Group> {
        self.group_ids().filter(|group| self.uses.iter().any(|(g, block)| g == group && span.contains(*block))).collect()
    }

    /// Parameters of the whole model.
    pub fn parameters(&self) -> usize {
        self.groups.iter().map(GroupLayout::parameters).sum()
    }

    /// Work of a span in FLOP per token, forward and backward.
    pub fn span_flops(&self, span: Span) -> f64 {
        span.blocks().map(|block| self.flops_per_token[usize::from(block.0)]).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(tied: bool) -> ModelConfig {
        ModelConfig {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            max_position_embeddings: 16,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            tie_word_embeddings: tied,
            initializer_range: 0.02,
        }
    }

    #[test]
    fn a_tied_head_is_a_second_use_of_the_embedding() {
        let structure = Structure::llama(&tiny(true), 16);
        assert_eq!(structure.uses.len(), 5);
        assert_eq!(structure.groups_of(Span::new(2, 4)), [Group(0), Group(2), Group(3)]);
        assert_eq!(structure.uses_of_group(Group(0)).iter().collect::<Vec<_>>(), [0, 4]);
        assert_eq!(structure.uses_of(Span::new(0, 1)).iter().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn parameters_are_counted_without_padding() {
        // Embedding 80, layer 2*8 + 2*64 + 2*32 + 3*96 = 496, head 8 + 80.
        assert_eq!(Structure::llama(&tiny(false), 16).parameters(), 80 + 2 * 496 + 88);
    }

    #[test]
    fn tensors_are_aligned_and_chunks_cover_the_buffer() {
        let layout = GroupLayout::new([("a".to_owned(), vec![5]), ("b".to_owned(), vec![3, 7])]);
        assert_eq!((layout.tensors[1].offset, layout.len, layout.parameters()), (16, 48, 26));
        assert_eq!(layout.chunks(20), 3);
        assert_eq!(layout.chunk_range(Chunk(2), 20), 40..48);
    }
}
