//! A run's configuration (`run.toml`): valid once built.

use serde::{Deserialize, Serialize};

use crate::codec::Codec;
use crate::fixed::FixedPoint;
use crate::id::{Hash, NodeId, RunId, Step};
use crate::limits;
use crate::message::control::Scalars;
use crate::model::{ModelConfig, Structure};

/// Everything that makes a run, from `run.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The run itself.
    pub run: RunSection,
    /// The model's shape.
    pub model: ModelConfig,
    /// What it learns from.
    pub data: DataSection,
    /// The global batch.
    pub batch: BatchSection,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: OptimizerSection,
    /// Encodings on the wire.
    #[serde(default)]
    pub wire: WireSection,
    /// Reduction.
    #[serde(default)]
    pub reduce: ReduceSection,
    /// Placement.
    #[serde(default)]
    pub placement: PlacementSection,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointSection,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSection {
    /// A name for people.
    pub name: String,
    /// All randomness derives from it.
    #[serde(default)]
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// How steps follow each other.
    #[serde(default)]
    pub mode: Mode,
}

/// How steps follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Step `s` runs on version `s` of every block.
    #[default]
    Sync,
    /// `Sync` with sums in fixed point, which do not depend on the order of their terms: the same
    /// seed gives the same weights, bit for bit, whatever dies or joins, on one kind of device.
    Exact,
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSection {
    /// Hash of the manifest that `skein-node data build` printed.
    pub manifest: Hash,
    /// Hash of the manifest of imported weights (`skein-node import`); version 0 is drawn from
    /// the seed without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<Hash>,
}

/// `[batch]`: a step is `microbatches x sequences x length` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSection {
    /// Microbatches a step.
    pub microbatches: u32,
    /// Sequences a microbatch.
    pub sequences: u32,
    /// Tokens a sequence that are predicted.
    pub length: u32,
}

impl BatchSection {
    /// Tokens of one microbatch.
    pub fn tokens_per_microbatch(&self) -> usize {
        self.sequences as usize * self.length as usize
    }

    /// Tokens of one step.
    pub fn tokens_per_step(&self) -> u64 {
        u64::from(self.microbatches) * self.tokens_per_microbatch() as u64
    }
}

/// `[optimizer]`: AdamW with linear warm-up and cosine decay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSection {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// The learning rate ends at this share of its peak.
    pub final_share: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of tensors with two or more dimensions.
    pub weight_decay: f64,
    /// The gradient's norm is clipped to this; 0 turns it off.
    pub clip: f64,
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self { learning_rate: 3e-4, warmup_steps: 100, final_share: 0.1, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 1.0 }
    }
}

/// `[wire]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WireSection {
    /// Activations and their gradients between hosts.
    pub boundary: Codec,
    /// Gradients on their way to the chunk's owner.
    pub scatter: Codec,
    /// Reduced gradients on their way to everyone.
    pub gather: Codec,
}

/// `[reduce]`
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReduceSection {
    /// Values of a chunk: the unit of reduction and of norms.
    pub chunk: usize,
    /// Mode `exact`: the largest magnitude that one value of one microbatch's gradient may have;
    /// larger ones are clamped, and counted. The smaller it is, the finer the steps of fixed point.
    pub exact_limit: f64,
    /// The largest norm that the gradient of one use of one microbatch may have: a larger one is no
    /// honest gradient, is added nowhere, and is computed elsewhere.
    pub norm_limit: f64,
}

impl Default for ReduceSection {
    fn default() -> Self {
        Self { chunk: 256 * 1024, exact_limit: 1024.0, norm_limit: 1e6 }
    }
}

/// `[placement]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementSection {
    /// Nodes to wait for before the first placement.
    pub nodes_min: usize,
    /// Cut the model into so many spans; 0 lets the planner choose.
    pub spans: usize,
    /// Replicas wanted of each block.
    pub replicas: usize,
}

impl Default for PlacementSection {
    fn default() -> Self {
        Self { nodes_min: 1, spans: 0, replicas: 2 }
    }
}

/// `[checkpoint]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 saves only the end.
    pub every_steps: u64,
    /// Complete checkpoints to keep.
    pub keep: usize,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { every_steps: 50, keep: 2 }
    }
}

/// Why a configuration is no good. One line for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not TOML, or a value of the wrong type.
    #[error("{0}")]
    Parse(String),
    /// A key that nobody knows.
    #[error("unknown key `{key}`{}", nearest.as_ref().map(|near| format!(": did you mean `{near}`?")).unwrap_or_default())]
    UnknownKey {
        /// The key.
        key: String,
        /// The known key most like it.
        nearest: Option<String>,
    },
    /// A value out of range.
    #[error("{key} = {value}: {problem}")]
    Value {
        /// Which setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

impl RunConfig {
    /// Parses and checks a `run.toml`.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| parse_error(&error))?;
        config.check()?;
        Ok(config)
    }

    /// The canonical text: what nodes receive.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is plain tables")
    }

    /// The structure of the run's model.
    pub fn structure(&self) -> Structure {
        Structure::llama(&self.model, self.batch.length as usize)
    }

    /// The run's name: binds the coordinator's key and all that affects training.
    pub fn run_id(&self, coordinator: NodeId) -> RunId {
        // How often to save, whom to wait for and what it is called do not change what is learned.
        let mut training = self.clone();
        training.run.name.clear();
        training.placement = PlacementSection::default();
        training.checkpoint = CheckpointSection::default();
        let mut hasher = blake3::Hasher::new_derive_key("skein run id v1");
        hasher.update(&coordinator.0);
        hasher.update(training.to_toml().as_bytes());
        RunId(*hasher.finalize().as_bytes())
    }

    /// How contributions travel to the chunk's owner.
    pub fn scatter_codec(&self) -> Codec {
        match self.run.mode {
            Mode::Sync => self.wire.scatter,
            Mode::Exact => Codec::Fixed,
        }
    }

    /// Fixed point of the run's sums in mode `exact`.
    pub fn fixed_point(&self, structure: &Structure) -> Option<FixedPoint> {
        let uses = structure.group_ids().map(|group| structure.uses_of_group(group).len()).max().unwrap_or(1);
        let terms = self.batch.microbatches.saturating_mul(u32::try_from(uses).unwrap_or(u32::MAX));
        (self.run.mode == Mode::Exact).then(|| FixedPoint::new(terms, self.reduce.exact_limit))
    }

    /// What every boundary between two blocks is rounded to in mode `exact`, inside a span too, so
    /// that where the model is cut changes nothing. (In `sync` only what is sent is rounded.)
    pub fn edge_codec(&self) -> Option<Codec> {
        (self.run.mode == Mode::Exact && self.wire.boundary != Codec::None).then_some(self.wire.boundary)
    }

    /// Learning rate of `step`: linear warm-up, then cosine from the peak to its final share.
    pub fn learning_rate(&self, step: Step) -> f64 {
        let o = &self.optimizer;
        if step.0 < o.warmup_steps {
            return o.learning_rate * (step.0 + 1) as f64 / o.warmup_steps as f64;
        }
        let rest = self.run.steps.saturating_sub(o.warmup_steps).max(1) as f64;
        let progress = ((step.0 - o.warmup_steps) as f64 / rest).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        o.learning_rate * (o.final_share + (1.0 - o.final_share) * cosine)
    }

    /// The scalars of `step`, given the squared norm of the sum over the whole batch.
    pub fn scalars(&self, step: Step, squared_norm: f64) -> Scalars {
        let divisor = f64::from(self.batch.microbatches);
        let norm = squared_norm.sqrt() / divisor;
        let clip = self.optimizer.clip;
        let clipping = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
        let t = i32::try_from(step.0 + 1).unwrap_or(i32::MAX);
        Scalars {
            gradient_scale: (clipping / divisor) as f32,
            learning_rate: self.learning_rate(step) as f32,
            bias_correction1: (1.0 - self.optimizer.beta1.powi(t)) as f32,
            bias_correction2: (1.0 - self.optimizer.beta2.powi(t)) as f32,
            gradient_norm: norm as f32,
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let m = &self.model;
        for (key, value) in [
            ("run.steps", self.run.steps as usize),
            ("model.vocab_size", m.vocab_size),
            ("model.hidden_size", m.hidden_size),
            ("model.intermediate_size", m.intermediate_size),
            ("model.num_hidden_layers", m.num_hidden_layers),
            ("model.num_attention_heads", m.num_attention_heads),
            ("model.num_key_value_heads", m.num_key_value_heads),
            ("batch.microbatches", self.batch.microbatches as usize),
            ("batch.sequences", self.batch.sequences as usize),
            ("batch.length", self.batch.length as usize),
            ("reduce.chunk", self.reduce.chunk),
            ("placement.replicas", self.placement.replicas),
            ("checkpoint.keep", self.checkpoint.keep),
        ] {
            require(value > 0, key, value, "must be at least 1")?;
        }
        require(m.hidden_size.is_multiple_of(m.num_attention_heads), "model.hidden_size", m.hidden_size, "must be a multiple of num_attention_heads")?;
        require(m.head_dim().is_multiple_of(2), "model.hidden_size", m.hidden_size, "the width of a head must be even (rotary embedding)")?;
        require(
            m.num_attention_heads.is_multiple_of(m.num_key_value_heads),
            "model.num_key_value_heads",
            m.num_key_value_heads,
            "must divide num_attention_heads",
        )?;
        require(m.num_hidden_layers < 60_000, "model.num_hidden_layers", m.num_hidden_layers, "must be below 60000")?;
        require(self.batch.length as usize <= m.max_position_embeddings, "batch.length", self.batch.length, "must not be above model.max_position_embeddings")?;
        let microbatches = self.batch.microbatches as usize;
        require(microbatches < limits::SET_MEMBERS_MAX, "batch.microbatches", microbatches, "must be below 65536")?;
        let chunk = self.reduce.chunk;
        require(chunk <= limits::CHUNK_LEN_MAX && chunk.is_multiple_of(16), "reduce.chunk", chunk, "must be a multiple of 16, at most 16777216")?;
        require(
            self.placement.spans <= m.num_hidden_layers + 2,
            "placement.spans",
            self.placement.spans,
            "a span has at least one block, and there are num_hidden_layers + 2",
        )?;
        let limit = self.reduce.exact_limit;
        require((1e-6..=1e9).contains(&limit), "reduce.exact_limit", limit, "must be between 1e-6 and 1e9")?;
        let norm = self.reduce.norm_limit;
        require((1e-3..=1e15).contains(&norm), "reduce.norm_limit", norm, "must be between 1e-3 and 1e15")?;
        if self.run.mode == Mode::Exact {
            let lossy = "is not none, and mode exact reduces without loss: leave it out";
            require(self.wire.scatter == Codec::None, "wire.scatter", "bf16", lossy)?;
            require(self.wire.gather == Codec::None, "wire.gather", "bf16", lossy)?;
        }
        let boundary = self.batch.tokens_per_microbatch().saturating_mul(m.hidden_size).saturating_mul(4);
        require(
            boundary <= limits::TENSOR_BYTES_MAX,
            "batch.sequences",
            self.batch.sequences,
            "a microbatch's boundary tensor is over 256 MiB: use fewer sequences",
        )?;
        self.check_optimizer()
    }

    fn check_optimizer(&self) -> Result<(), ConfigError> {
        let o = &self.optimizer;
        require(o.learning_rate.is_finite() && o.learning_rate > 0.0, "optimizer.learning_rate", o.learning_rate, "must be above 0")?;
        require((0.0..=1.0).contains(&o.final_share), "optimizer.final_share", o.final_share, "must be between 0 and 1")?;
        require((0.0..1.0).contains(&o.beta1), "optimizer.beta1", o.beta1, "must be from 0 to below 1")?;
        require((0.0..1.0).contains(&o.beta2), "optimizer.beta2", o.beta2, "must be from 0 to below 1")?;
        require(o.epsilon.is_finite() && o.epsilon > 0.0, "optimizer.epsilon", o.epsilon, "must be above 0")?;
        require(o.weight_decay.is_finite() && o.weight_decay >= 0.0, "optimizer.weight_decay", o.weight_decay, "must be at least 0")?;
        require(o.clip.is_finite() && o.clip >= 0.0, "optimizer.clip", o.clip, "must be at least 0 (0 turns clipping off)")
    }
}

fn require(holds: bool, key: &'static str, value: impl ToString, problem: &str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::Value { key, value: value.to_string(), problem: problem.to_owned() }) }
}

/// Turns serde's message about an unknown field into one that names the nearest known key; every
/// TOML file that a user writes is read through it.
pub fn parse_error(error: &toml::de::Error) -> ConfigError {
    let message = error.message();
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let mut quoted = rest.split('`');
        let key = quoted.next().unwrap_or_default().to_owned();
        let known = quoted.skip(1).step_by(2);
        let nearest = known.map(|name| (distance(&key, name), name)).min().filter(|(d, name)| *d <= name.len().max(key.len()) / 2);
        return ConfigError::UnknownKey { key, nearest: nearest.map(|(_, name)| name.to_owned()) };
    }
    ConfigError::Parse(error.to_string().trim_end().to_owned())
}

/// Edit distance (Levenshtein): insertions, deletions and substitutions.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#"
        [run]
        name = "test"
        steps = 100
        [model]
        vocab_size = 256
        hidden_size = 64
        intermediate_size = 128
        num_hidden_layers = 2
        num_attention_heads = 4
        num_key_value_heads = 2
        max_position_embeddings = 64
        [data]
        manifest = "0000000000000000000000000000000000000000000000000000000000000000"
        [batch]
        microbatches = 4
        sequences = 2
        length = 64
        [optimizer]
        warmup_steps = 10
    "#;

    #[test]
    fn canonical_text_is_the_same_configuration() {
        let config = RunConfig::from_toml(RUN).expect("valid");
        assert_eq!(RunConfig::from_toml(&config.to_toml()).expect("valid"), config);
    }

    #[test]
    fn an_unknown_key_names_the_nearest_known_one() {
        let error = RunConfig::from_toml(&RUN.replace("warmup_steps", "warmup_step")).expect_err("unknown key");
        assert_eq!(error.to_string(), "unknown key `warmup_step`: did you mean `warmup_steps`?");
        let error = RunConfig::from_toml(&RUN.replace("[optimizer]", "[optimiser]")).expect_err("unknown table");
        assert_eq!(error.to_string(), "unknown key `optimiser`: did you mean `optimizer`?");
    }

    #[test]
    fn values_out_of_range_are_named() {
        let error = RunConfig::from_toml(&RUN.replace("num_key_value_heads = 2", "num_key_value_heads = 3")).expect_err("3 does not divide 4");
        assert_eq!(error.to_string(), "model.num_key_value_heads = 3: must divide num_attention_heads");
    }

    #[test]
    fn the_run_id_binds_what_affects_training_and_nothing_else() {
        let id = |text: &str| RunConfig::from_toml(text).expect("valid").run_id(NodeId([7; 32]));
        assert_eq!(id(RUN), id(&RUN.replace("\"test\"", "\"other\"")));
        assert_ne!(id(RUN), id(&RUN.replace("steps = 100", "steps = 101")));
        assert_ne!(id(RUN), RunConfig::from_toml(RUN).expect("valid").run_id(NodeId([8; 32])));
    }

    #[test]
    fn the_learning_rate_warms_up_and_decays() {
        let config = RunConfig::from_toml(RUN).expect("valid");
        assert!((config.learning_rate(Step(0)) - 3e-5).abs() < 1e-12);
        assert!((config.learning_rate(Step(10)) - 3e-4).abs() < 1e-12);
        assert!((config.learning_rate(Step(100)) - 3e-5).abs() < 1e-12);
    }

    #[test]
    fn clipping_scales_to_the_norm() {
        let config = RunConfig::from_toml(RUN).expect("valid");
        // Sum of norm 8 over 4 microbatches: mean of norm 2, clipped to 1.
        let scalars = config.scalars(Step(0), 64.0);
        assert_eq!((scalars.gradient_norm, scalars.gradient_scale), (2.0, 0.125));
        assert_eq!(config.scalars(Step(0), 4.0).gradient_scale, 0.25);
    }
}
