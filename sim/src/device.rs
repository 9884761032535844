//! Devices of the world: how long a task takes on one.

use std::time::Duration;

use skein_node::engine::Task;

/// Time for one block forward on a device of speed 1.
const BLOCK_TIME: Duration = Duration::from_millis(4);

/// How long `task` takes at `speed`.
pub(crate) fn duration(task: &Task, speed: f64) -> Duration {
    let blocks = match task {
        Task::Forward { key, .. } | Task::InputGradient { key, .. } => key.span.len() as f64,
        Task::Backward { key, .. } => 2.0 * key.span.len() as f64,
        Task::Apply { .. } | Task::TakeSnapshot { .. } | Task::Install { .. } => 0.5,
        Task::Reset
        | Task::Draw { .. }
        | Task::Forget { .. }
        | Task::Add { .. }
        | Task::Discard { .. }
        | Task::DropSums { .. }
        | Task::EncodeChunk { .. }
        | Task::ReduceChunk { .. }
        | Task::StoreChunk { .. }
        | Task::DropReduction { .. }
        | Task::Retire { .. } => 0.05,
    };
    BLOCK_TIME.mul_f64(blocks / speed)
}
