//! The engine on libtorch: forward and backward of the model in [`crate::model`].
//!
//! Start at [`Torch`]. Leaves are views of the flat weight buffers on a CPU, copies of them on a
//! GPU. The autograd graph is cut at every block, inside spans too, so that a span computes the same
//! bits however the model is cut. Only `f_` forms of tch are called: the plain ones panic.

pub mod device;
mod raw;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use skein_protocol::codec::Codec;
use skein_protocol::config::{BatchSection, RunConfig};
use skein_protocol::id::{Block, Use};
use skein_protocol::model::Structure;
use tch::{Device, Kind, TchError, Tensor};

use super::core::{Backward, Compute, Forward, Gradients, Weights, Work};
use super::{EngineError, Samples};
use crate::model::head::cross_entropy;
use crate::model::{Llama, dimension};

impl From<TchError> for EngineError {
    fn from(error: TchError) -> Self {
        // The lines after the first are a backtrace through C++.
        let line = error.to_string().lines().next().unwrap_or("libtorch failed").to_owned();
        // CUDA and MPS say it in the first way, the CPU's allocator in the others.
        let no_room = ["out of memory", "can't allocate memory", "not enough memory"].iter().any(|sign| line.contains(sign));
        if no_room { Self::OutOfMemory(line) } else { Self::Device(line) }
    }
}

/// Computes blocks on libtorch.
pub struct Torch {
    model: Llama,
    structure: Structure,
    batch: BatchSection,
    samples: Box<dyn Samples>,
    device: Device,
    /// What every boundary between blocks is rounded to.
    edge: Option<Codec>,
}

impl Torch {
    /// Compute for the run's model on `device`, taking tokens from `samples`. Set the number of
    /// threads with [`device::set_threads`] on the thread that will compute.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(config: &RunConfig, samples: Box<dyn Samples>, device: Device) -> Result<Self, EngineError> {
        let model = Llama::new(&config.model, config.batch.length as usize, device)?;
        Ok(Self { model, structure: config.structure(), batch: config.batch, samples, device, edge: config.edge_codec() })
    }

    /// The weights of one block's uses, in order, as leaves.
    fn leaves(&self, weights: &Weights<'_>, block: Block) -> Result<Leaves, EngineError> {
        let mut leaves = Leaves { places: Vec::new(), tensors: Vec::new() };
        for (index, (group, _)) in self.structure.uses.iter().enumerate().filter(|(_, (_, user))| *user == block) {
            let one = Use(u16::try_from(index).expect("a model has fewer than 65536 uses"));
            let layout = self.structure.layout(*group);
            let buffer = weights.groups.get(group).ok_or_else(|| EngineError::Absent { what: format!("weights of group {group}") })?;
            if buffer.len() != layout.len {
                return Err(EngineError::WrongState { group: *group, found: 4 * buffer.len(), expected: 4 * layout.len });
            }
            for spec in &layout.tensors {
                let shape: Vec<i64> = spec.shape.iter().copied().map(dimension).collect();
                let view = raw::view(&buffer[spec.offset..spec.offset + spec.len()], &shape)?;
                leaves.places.push((one, spec.offset));
                leaves.tensors.push(view.f_to_device(self.device)?.f_set_requires_grad(true)?);
            }
        }
        Ok(leaves)
    }

    /// A boundary between blocks, rounded if the run rounds all of them.
    fn edge(&self, tensor: Tensor) -> Result<Tensor, EngineError> {
        match self.edge {
            Some(Codec::Bf16) => Ok(tensor.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float)?),
            _ => Ok(tensor),
        }
    }

    /// The boundary tensor before a span, as a leaf.
    fn boundary(&self, values: &[f32]) -> Result<Tensor, EngineError> {
        let (sequences, length, width) = (self.batch.sequences as usize, self.batch.length as usize, self.structure.boundary);
        if values.len() != sequences * length * width {
            return Err(EngineError::Device(format!("a boundary tensor has {} values, got {}", sequences * length * width, values.len())));
        }
        let shape = [dimension(sequences), dimension(length), dimension(width)];
        Ok(Tensor::f_from_slice(values)?.f_view(shape)?.f_to_device(self.device)?)
    }

    /// The microbatch's tokens: what goes in, i64 `[sequences, length]`, and what is predicted, i64 `[sequences * length]`.
    fn tokens(&mut self, work: Work) -> Result<(Tensor, Tensor), EngineError> {
        let tokens = self.samples.tokens(work.step, work.microbatch)?;
        let (sequences, length) = (self.batch.sequences as usize, self.batch.length as usize);
        if tokens.len() != sequences * (length + 1) {
            return Err(EngineError::Data(format!("a microbatch has {} tokens, got {}", sequences * (length + 1), tokens.len())));
        }
        let vocabulary = self.model.config().vocab_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(EngineError::Data(format!("token {token} is not in the model's vocabulary of {vocabulary}")));
        }
        let wide: Vec<i64> = tokens.into_iter().map(i64::from).collect();
        let length = dimension(length);
        let all = Tensor::f_from_slice(&wide)?.f_view([dimension(sequences), length + 1])?.f_to_device(self.device)?;
        Ok((all.f_narrow(1, 0, length)?, all.f_narrow(1, 1, length)?.f_reshape([-1])?))
    }
}

impl Compute for Torch {
    type Graph = Graph;
    type Gradients = TorchGradients;

    fn forward(&mut self, weights: &Weights<'_>, work: Work, input: Option<&[f32]>) -> Result<Forward<Graph>, EngineError> {
        let head = self.model.head();
        let (first, last) = (work.span.contains(Block(0)), work.span.contains(head));
        let (tokens, targets) = if first || last { self.tokens(work).map(|(tokens, targets)| (Some(tokens), Some(targets)))? } else { (None, None) };
        let mut boundary = match (tokens.filter(|_| first), input) {
            (Some(tokens), None) => tokens,
            (None, Some(values)) => self.boundary(values)?,
            (Some(_), Some(_)) => return Err(EngineError::Device("the embedding takes no boundary tensor".to_owned())),
            (None, None) => return Err(EngineError::Absent { what: format!("boundary tensor before block {}", work.span.first) }),
        };
        let (mut blocks, mut loss) = (Vec::with_capacity(work.span.len()), None);
        for block in work.span.blocks() {
            let leaves = self.leaves(weights, block)?;
            // Tokens have no gradient.
            let input = if block == Block(0) { None } else { Some(boundary.f_set_requires_grad(true)?) };
            let mut output = self.model.forward(block, &leaves.tensors, input.as_ref().unwrap_or(&boundary))?;
            if let Some(targets) = targets.as_ref().filter(|_| block == head) {
                output = cross_entropy(&output, targets)?;
                loss = Some(output.f_double_value(&[])? as f32);
            }
            boundary = self.edge(output.f_detach()?)?;
            blocks.push(BlockGraph { leaves, input, output });
        }
        let output = if last { None } else { Some(to_host(&boundary)?) };
        Ok(Forward { graph: Graph { blocks }, output, loss })
    }

    fn input_gradient(&mut self, graph: &Graph, gradient: Option<&[f32]>) -> Result<Vec<f32>, EngineError> {
        let mut gradient = gradient.map(|values| self.boundary(values)).transpose()?;
        for block in graph.blocks.iter().rev() {
            let input = block.input.as_ref().ok_or_else(|| EngineError::Device("the gradient of tokens was asked for".to_owned()))?;
            gradient = Tensor::f_run_backward(&[block.root(gradient.as_ref())?], &[input], true, false)?.pop().map(|made| self.edge(made)).transpose()?;
        }
        gradient.as_ref().map_or_else(|| Err(EngineError::Device("autograd gave no gradient".to_owned())), to_host)
    }

    fn backward(&mut self, graph: Graph, gradient: Option<&[f32]>) -> Result<Backward<TorchGradients>, EngineError> {
        let mut gradient = gradient.map(|values| self.boundary(values)).transpose()?;
        let mut gradients = TorchGradients { uses: BTreeMap::new(), squared_norms: BTreeMap::new() };
        // Each block's graph is freed as soon as it is done.
        for block in graph.blocks.into_iter().rev() {
            gradient = block.backward(gradient.as_ref(), &mut gradients)?.map(|made| self.edge(made)).transpose()?;
        }
        let gradient = gradient.as_ref().map(to_host).transpose()?;
        Ok(Backward { gradient, gradients })
    }
}

/// One block's weights within its graph.
struct Leaves {
    /// The use and the offset in its group's layout of each tensor.
    places: Vec<(Use, usize)>,
    tensors: Vec<Tensor>,
}

/// What forward keeps of a span: one graph for each block.
pub struct Graph {
    blocks: Vec<BlockGraph>,
}

struct BlockGraph {
    leaves: Leaves,
    /// The boundary before the block; none at the embedding.
    input: Option<Tensor>,
    /// The boundary after the block, or the loss.
    output: Tensor,
}

impl BlockGraph {
    /// Computes the gradients of the block's weights and input, given that of its output; none stands for a loss's 1.
    fn backward(self, gradient: Option<&Tensor>, gradients: &mut TorchGradients) -> Result<Option<Tensor>, EngineError> {
        let root = self.root(gradient)?;
        let Self { leaves, input, output: _ } = self;
        let sources: Vec<&Tensor> = leaves.tensors.iter().chain(&input).collect();
        let mut made = Tensor::f_run_backward(&[root], &sources, false, false)?;
        let below = if input.is_some() { made.pop() } else { None };
        for ((one, offset), tensor) in leaves.places.into_iter().zip(made) {
            let tensor = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
            // While the values are still in the cache.
            *gradients.squared_norms.entry(one).or_default() += squared_norm(raw::values(&tensor)?);
            gradients.uses.entry(one).or_default().push((offset, tensor));
        }
        Ok(below)
    }

    /// The scalar whose gradients are wanted.
    fn root(&self, gradient: Option<&Tensor>) -> Result<Tensor, EngineError> {
        match gradient {
            // The derivative of the product with a constant is that constant, bit for bit.
            Some(gradient) => Ok(self.output.f_view([-1])?.f_dot(&gradient.f_view([-1])?)?),
            None => Ok(self.output.shallow_clone()),
        }
    }
}

/// Gradients as libtorch made them: by use, each tensor with its offset in the group's layout.
pub struct TorchGradients {
    uses: BTreeMap<Use, Vec<(usize, Tensor)>>,
    squared_norms: BTreeMap<Use, f64>,
}

impl Gradients for TorchGradients {
    fn squared_norm(&self, one: Use) -> f64 {
        self.squared_norms.get(&one).copied().unwrap_or_default()
    }

    fn add_to(&self, one: Use, sum: &mut [f32], first: bool) {
        let mut end = 0;
        for (offset, tensor) in self.uses.get(&one).into_iter().flatten() {
            let values = raw::values(tensor).expect("backward made it contiguous on the CPU");
            let place = &mut sum[*offset..*offset + values.len()];
            if first {
                place.copy_from_slice(values);
                sum[end..*offset].fill(0.0);
                end = *offset + values.len();
            } else {
                place.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        if first {
            sum[end..].fill(0.0);
        }
    }
}

/// The sum of the values' squares: what is not finite, or too large to be squared, makes it so too.
fn squared_norm(values: &[f32]) -> f64 {
    // In lanes, so that the compiler makes vectors of it, and in pieces, so that f32 is good enough.
    let piece = |piece: &[f32]| {
        let mut lanes = [0f32; 16];
        for values in piece.chunks(lanes.len()) {
            lanes.iter_mut().zip(values).for_each(|(lane, value)| *lane += value * value);
        }
        lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>()
    };
    values.chunks(4096).map(piece).sum()
}

/// A copy of a tensor's values.
fn to_host(tensor: &Tensor) -> Result<Vec<f32>, EngineError> {
    Ok(raw::values(&tensor.f_to_device(Device::Cpu)?.f_contiguous()?)?.to_vec())
}
