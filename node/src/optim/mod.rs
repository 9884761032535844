//! Optimizers over flat f32 buffers: a fixed sequence of correctly rounded operations, so that
//! every kind of host gets the same weights from the same reduced gradient.

pub mod adamw;
