//! What coordinator, nodes and simulator agree on: vocabulary, the run's configuration, messages,
//! framing, codecs and manifests, and, with feature `net`, the links that carry them.
//!
//! Start at [`model`] (how a model is cut into blocks, groups and uses), then [`message`] (what
//! everyone says). This crate knows no tensors beyond their bytes and never depends on libtorch.
//!
//! # Glossary
//!
//! | word | meaning |
//! |---|---|
//! | run | one training of one model, named by a [`id::RunId`] |
//! | epoch | one version of the placement |
//! | timeline | rises when the run goes back to a checkpoint; older messages are void |
//! | step | one optimizer step over one global batch |
//! | version | the number of optimizer steps applied to a group |
//! | microbatch | the unit of work: a few sequences, named by (run, step, index) |
//! | block | the smallest part of the model that is placed |
//! | span | contiguous blocks that one node hosts |
//! | replica | a node that hosts a given block |
//! | route | the chain of (node, span) that one microbatch takes |
//! | feeder, host | the role that leases and routes microbatches; the role that computes them |
//! | parameter group | what is reduced and handed over as one |
//! | use | one block's use of one group |
//! | sum | one accumulator of gradients of one group at one host |
//! | ledger | the record of which microbatch counts in which sum |
//! | seal, commit, retire | a group's batch is complete; its reduced gradient is final; the new version is safe |

pub mod codec;
pub mod config;
pub mod fixed;
pub mod id;
pub mod limits;
pub mod manifest;
pub mod message;
pub mod model;
#[cfg(feature = "net")]
pub mod net;
pub mod placement;
pub mod set;
pub mod sign;
pub mod tensor;
pub mod time;
pub mod wire;
