//! The compute thread: owns the engine and all tensors, runs one task after another.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use skein_protocol::limits;
use tokio::sync::mpsc;

use crate::engine::{Engine, EngineError, Outcome, Task, WorkKey};

/// Where the time of the compute thread went.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct TimeSpent {
    /// Seconds in forward and backward.
    pub compute: f64,
    /// Seconds encoding and adding up chunks, hashing included.
    pub reduce: f64,
    /// Seconds adding gradients to sums.
    pub add: f64,
    /// Seconds in the optimizer.
    pub optimizer: f64,
    /// Seconds in everything else: snapshots, installs.
    pub other: f64,
    /// Seconds in which there was nothing to do.
    pub wait: f64,
    /// Seconds held back by the compute share.
    pub share: f64,
}

/// The compute thread of one engine. Dropping it ends the thread after the task it is at.
pub struct Compute {
    tasks: Option<SyncSender<Task>>,
    thread: Option<JoinHandle<()>>,
}

/// What comes back from the thread.
#[derive(Debug)]
pub enum Answer {
    /// A task is done.
    Outcome(Outcome),
    /// The engine could not be made.
    Failed(EngineError),
    /// Where the time went, after every optimizer step.
    Spent(TimeSpent),
}

impl Compute {
    /// Starts a thread that makes the engine and runs it, at most `share` of the time.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start<E: Engine>(
        make: impl FnOnce() -> Result<E, EngineError> + Send + 'static,
        share: f64,
        answers: mpsc::Sender<Answer>,
    ) -> std::io::Result<Self> {
        let (tasks, queue) = sync_channel(limits::ENGINE_QUEUE * 2);
        let thread = std::thread::Builder::new().name("compute".to_owned()).spawn(move || run(make, share, &queue, &answers))?;
        Ok(Self { tasks: Some(tasks), thread: Some(thread) })
    }

    /// Hands a task over; false if the thread is gone or, against its limit, full.
    pub fn submit(&self, task: Task) -> bool {
        self.tasks.as_ref().is_some_and(|tasks| tasks.try_send(task).is_ok())
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run<E: Engine>(make: impl FnOnce() -> Result<E, EngineError>, share: f64, queue: &Receiver<Task>, answers: &mpsc::Sender<Answer>) {
    let mut engine = match make() {
        Ok(engine) => engine,
        Err(error) => {
            let _ = answers.blocking_send(Answer::Failed(error));
            return;
        }
    };
    let mut spent = TimeSpent::default();
    // A duty cycle: after computing for t the device rests for t (1 / share - 1) before it
    // computes again. Short tasks that others wait for are not held back.
    let mut rest_until = Instant::now();
    let mut idle_since = Instant::now();
    while let Ok(task) = queue.recv() {
        let received = Instant::now();
        spent.wait += (received - idle_since).as_secs_f64();
        let kind = Kind::of(&task);
        let name = task.name();
        if kind == Kind::Compute && rest_until > received {
            std::thread::sleep(rest_until - received);
            spent.share += (rest_until - received).as_secs_f64();
        }
        if let Some(WorkKey { step, microbatch, span }) = task.computes() {
            tracing::trace!(target: "skein_node::work", step = step.0, microbatch = microbatch.0, first = span.first.0, end = span.end.0, "begins");
        }
        let begun = Instant::now();
        let outcome = engine.run(task);
        let took = begun.elapsed();
        if kind == Kind::Compute {
            rest_until = Instant::now() + rest(took, share);
        }
        kind.book(&mut spent, took);
        tracing::trace!(target: "skein_node::time", task = name, waited = (received - idle_since).as_secs_f64(), took = took.as_secs_f64());
        if answers.blocking_send(Answer::Outcome(outcome)).is_err() {
            return;
        }
        if kind == Kind::Optimizer && answers.blocking_send(Answer::Spent(spent)).is_err() {
            return;
        }
        idle_since = Instant::now();
    }
}

fn rest(took: Duration, share: f64) -> Duration {
    if share >= 1.0 { Duration::ZERO } else { took.mul_f64(1.0 / share.max(0.01) - 1.0) }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Compute,
    Reduce,
    Add,
    Optimizer,
    Other,
}

impl Kind {
    fn of(task: &Task) -> Self {
        match task {
            Task::Forward { .. } | Task::InputGradient { .. } | Task::Backward { .. } => Self::Compute,
            Task::EncodeChunk { .. } | Task::ReduceChunk { .. } | Task::StoreChunk { .. } => Self::Reduce,
            Task::Add { .. } => Self::Add,
            Task::Apply { .. } => Self::Optimizer,
            Task::Reset
            | Task::Draw { .. }
            | Task::Install { .. }
            | Task::Forget { .. }
            | Task::Discard { .. }
            | Task::DropSums { .. }
            | Task::DropReduction { .. }
            | Task::Retire { .. }
            | Task::TakeSnapshot { .. } => Self::Other,
        }
    }

    fn book(self, spent: &mut TimeSpent, took: Duration) {
        let slot = match self {
            Self::Compute => &mut spent.compute,
            Self::Reduce => &mut spent.reduce,
            Self::Add => &mut spent.add,
            Self::Optimizer => &mut spent.optimizer,
            Self::Other => &mut spent.other,
        };
        *slot += took.as_secs_f64();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::toy;

    #[test]
    fn a_share_of_a_quarter_rests_three_times_as_long_as_it_computes() {
        assert_eq!(rest(Duration::from_millis(10), 0.25), Duration::from_millis(30));
        assert_eq!(rest(Duration::from_millis(10), 1.0), Duration::ZERO);
    }

    #[test]
    fn tasks_are_answered_in_order_and_the_thread_ends_when_dropped() {
        let config = toy::config(1, false, 1, 1);
        let groups = toy::structure(&config).group_ids().collect();
        let (sender, mut answers) = mpsc::channel(8);
        let compute = Compute::start(move || Ok(toy::engine(&config)), 1.0, sender).expect("a thread");
        assert!(compute.submit(Task::Draw { groups }));
        assert!(compute.submit(Task::Reset));
        for _ in 0..2 {
            assert!(matches!(answers.blocking_recv(), Some(Answer::Outcome(Outcome::Finished))));
        }
        drop(compute);
        assert!(answers.blocking_recv().is_none());
    }

    #[test]
    fn an_engine_that_cannot_be_made_says_why() {
        let (sender, mut answers) = mpsc::channel(8);
        let make = || -> Result<crate::engine::core::Core<toy::Toy>, EngineError> { Err(EngineError::Device("none".to_owned())) };
        let _compute = Compute::start(make, 1.0, sender).expect("a thread");
        assert!(matches!(answers.blocking_recv(), Some(Answer::Failed(EngineError::Device(_)))));
    }
}
