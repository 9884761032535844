//! The loop around the machine: what happens goes in, what it wants done is done, in order.
//!
//! The driver owns clock, log and connections. Everything that several events of one moment want
//! saved is saved by one append, before anything else they want is done; if it cannot be saved,
//! nothing is done any more.

use std::future::Future;
use std::time::Duration;

use skein_protocol::id::NodeId;
use skein_protocol::message::control::FromCoordinator;
use skein_protocol::time::Time;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::machine::{Action, Coordinator, Event};
use crate::record::Record;
use crate::status::Status;
use crate::store::{Store, StoreError};

/// How long a stop waits for the checkpoint.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(20);

/// Events handled before what they want is done: they share one append to the log.
const EVENTS_AT_ONCE: usize = 64;

/// Questions for the status that may wait.
pub const QUESTIONS_MAX: usize = 16;

/// A question for the run's status; the answer goes into it.
pub type Question = oneshot::Sender<Status>;

/// A machine as the driver sees it.
pub trait Machine {
    /// Takes one event in; what is to be done comes out.
    fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>);

    /// When to come with [`Event::Timer`] if nothing else happens.
    fn next_timeout(&self) -> Option<Time>;

    /// The run at a moment.
    fn status(&self, now: Time) -> Status;
}

impl Machine for Coordinator {
    fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.handle(now, event, actions);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.next_timeout()
    }

    fn status(&self, now: Time) -> Status {
        self.status(now)
    }
}

/// The connections to the nodes.
pub trait Control {
    /// What happens next; `None` when nothing can happen any more. May be dropped and called again.
    fn next(&mut self) -> impl Future<Output = Option<Event>> + Send;

    /// What has happened already, if anything has.
    fn try_next(&mut self) -> Option<Event>;

    /// Queues a message; a node that does not take its messages is disconnected.
    fn send(&mut self, to: NodeId, message: FromCoordinator);

    /// Ends a node's connection after what was sent before.
    fn disconnect(&mut self, node: NodeId);
}

/// What a user can ask for while it runs.
#[derive(Debug)]
pub struct Requests {
    /// One item per signal: the first stops in order, the second at once.
    pub stops: mpsc::Receiver<()>,
    /// Questions for the status.
    pub questions: mpsc::Receiver<Question>,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything worth saving was saved.
    Stopped,
    /// The user did not want to wait, or waiting took too long.
    Unsaved,
}

/// Why it ended.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The log takes nothing more.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The control plane is gone.
    #[error("the control plane has ended; start again with --resume")]
    ControlEnded,
}

/// A machine, its log and its connections.
#[derive(Debug)]
pub struct Driver<M, S, C> {
    machine: M,
    store: S,
    control: C,
    start: Instant,
    stop_time_max: Duration,
    actions: Vec<Action>,
    /// When a stop that was asked for ends without a checkpoint.
    stop_by: Option<Instant>,
}

impl<M: Machine, S: Store, C: Control> Driver<M, S, C> {
    /// Time begins now.
    pub fn new(machine: M, store: S, control: C) -> Self {
        Self { machine, store, control, start: Instant::now(), stop_time_max: STOP_TIME_MAX, actions: Vec::new(), stop_by: None }
    }

    /// Runs until the user stops it or the log fails.
    pub async fn run(&mut self, mut requests: Requests) -> Result<End, DriverError> {
        loop {
            let timer = self.machine.next_timeout().map(|time| self.start + Duration::from_nanos(time.0));
            let event = tokio::select! {
                event = self.control.next() => event.ok_or(DriverError::ControlEnded)?,
                () = sleep_until(timer) => Event::Timer,
                Some(()) = requests.stops.recv() => {
                    if self.stop_by.is_some() {
                        return Ok(End::Unsaved);
                    }
                    self.stop_by = Some(Instant::now() + self.stop_time_max);
                    Event::Stop
                }
                Some(question) = requests.questions.recv() => {
                    // Whoever asked may have gone.
                    let _ = question.send(self.status());
                    continue;
                }
                () = sleep_until(self.stop_by) => return Ok(End::Unsaved),
            };
            if self.react(event)? {
                return Ok(End::Stopped);
            }
        }
    }

    /// The run as it stands.
    pub fn status(&self) -> Status {
        self.machine.status(self.now())
    }

    /// The connections, to end them; the log is closed.
    pub fn into_control(self) -> C {
        self.control
    }

    /// Handles an event and those that have come with it; whether the machine has stopped.
    fn react(&mut self, first: Event) -> Result<bool, DriverError> {
        let mut next = Some(first);
        for _ in 0..EVENTS_AT_ONCE {
            let Some(event) = next else { break };
            self.machine.handle(self.now(), event, &mut self.actions);
            next = self.control.try_next();
        }
        // Taken from the queue already, so it must be handled, however many there are.
        if let Some(event) = next {
            self.machine.handle(self.now(), event, &mut self.actions);
        }
        self.perform()
    }

    /// Saves all that is to be saved, then does the rest in order.
    fn perform(&mut self) -> Result<bool, DriverError> {
        let actions = std::mem::take(&mut self.actions);
        let records: Vec<Record> =
            actions.iter().filter_map(|action| if let Action::Save(records) = action { Some(records) } else { None }).flatten().cloned().collect();
        self.store.append(&records)?;
        let mut stopped = false;
        for action in actions {
            match action {
                Action::Save(_) => {}
                Action::Send { to, message } => self.control.send(to, message),
                Action::Disconnect(node) => self.control.disconnect(node),
                Action::Report(line) => tracing::info!("{line}"),
                Action::Stopped => stopped = true,
            }
        }
        Ok(stopped)
    }

    fn now(&self) -> Time {
        Time::default() + self.start.elapsed()
    }
}

async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    use super::*;
    use skein_protocol::id::Version;

    type Script = Box<dyn FnMut(Event, &mut Vec<Action>) + Send>;

    /// Does as the test says.
    struct Scripted {
        script: Script,
        timeout: Option<Time>,
    }

    impl Machine for Scripted {
        fn handle(&mut self, _now: Time, event: Event, actions: &mut Vec<Action>) {
            (self.script)(event, actions);
        }

        fn next_timeout(&self) -> Option<Time> {
            self.timeout
        }

        fn status(&self, _now: Time) -> Status {
            Status { name: "scripted".to_owned(), ..Status::default() }
        }
    }

    /// What was done, in order.
    #[derive(Clone, Default)]
    struct Journal(Arc<Mutex<Vec<String>>>);

    impl Journal {
        fn note(&self, line: String) {
            self.0.lock().expect("not poisoned").push(line);
        }

        fn lines(&self) -> Vec<String> {
            self.0.lock().expect("not poisoned").clone()
        }
    }

    struct Disk {
        journal: Journal,
        full: bool,
    }

    impl Store for Disk {
        fn append(&mut self, records: &[Record]) -> Result<(), StoreError> {
            if self.full && !records.is_empty() {
                return Err(StoreError::Write { path: PathBuf::from("log"), problem: "disk full".to_owned() });
            }
            if !records.is_empty() {
                self.journal.note(format!("append {}", records.len()));
            }
            Ok(())
        }

        fn load(&mut self) -> Result<Vec<Record>, StoreError> {
            Ok(Vec::new())
        }
    }

    struct Wires {
        journal: Journal,
        events: VecDeque<Event>,
    }

    impl Control for Wires {
        async fn next(&mut self) -> Option<Event> {
            match self.events.pop_front() {
                Some(event) => Some(event),
                None => std::future::pending().await,
            }
        }

        fn try_next(&mut self) -> Option<Event> {
            self.events.pop_front()
        }

        fn send(&mut self, to: NodeId, _message: FromCoordinator) {
            self.journal.note(format!("send {}", to.0[0]));
        }

        fn disconnect(&mut self, node: NodeId) {
            self.journal.note(format!("disconnect {}", node.0[0]));
        }
    }

    fn node(index: u8) -> NodeId {
        NodeId([index; 32])
    }

    fn save(count: u64) -> Action {
        Action::Save((0..count).map(|version| Record::Checkpoint { version: Version(version) }).collect())
    }

    fn send(to: u8) -> Action {
        Action::Send { to: node(to), message: FromCoordinator::Notice { text: String::new() } }
    }

    fn driver(events: Vec<Event>, full: bool, timeout: Option<Time>, script: Script) -> (Driver<Scripted, Disk, Wires>, Journal) {
        let journal = Journal::default();
        let store = Disk { journal: journal.clone(), full };
        let control = Wires { journal: journal.clone(), events: events.into() };
        (Driver::new(Scripted { script, timeout }, store, control), journal)
    }

    fn requests() -> (mpsc::Sender<()>, mpsc::Sender<Question>, Requests) {
        let (stop, stops) = mpsc::channel(2);
        let (question, questions) = mpsc::channel(QUESTIONS_MAX);
        (stop, question, Requests { stops, questions })
    }

    #[tokio::test]
    async fn events_of_one_moment_share_an_append_that_precedes_what_relies_on_it() {
        let script: Script = Box::new(|event, actions| match event {
            Event::Connected(node) => actions.extend([send(node.0[0]), save(2), send(node.0[0] + 1)]),
            Event::Disconnected(node) => actions.extend([save(1), Action::Disconnect(node), Action::Stopped]),
            Event::Received { .. } | Event::Stop | Event::Timer => unreachable!("not sent"),
        });
        let (mut driver, journal) = driver(vec![Event::Connected(node(1)), Event::Disconnected(node(9))], false, None, script);
        let (_stop, _question, requests) = requests();
        assert_eq!(driver.run(requests).await.expect("no failure"), End::Stopped);
        assert_eq!(journal.lines(), ["append 3", "send 1", "send 2", "disconnect 9"]);
    }

    #[tokio::test]
    async fn nothing_is_done_once_the_log_has_failed() {
        let script: Script = Box::new(|_, actions| actions.extend([send(1), save(1), send(2), Action::Stopped]));
        let (mut driver, journal) = driver(vec![Event::Connected(node(1))], true, None, script);
        let (_stop, _question, requests) = requests();
        let error = driver.run(requests).await.expect_err("the disk is full");
        assert_eq!(error.to_string(), "cannot write log: disk full; make room or mend the disk, then start again with --resume");
        assert_eq!(journal.lines(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn the_timer_fires_and_a_stop_stops() {
        let (tell, mut told) = mpsc::channel(1);
        let script: Script = Box::new(move |event, actions| match event {
            // Full when this has been told already.
            Event::Timer => drop(tell.try_send(())),
            Event::Stop => actions.push(Action::Stopped),
            Event::Connected(_) | Event::Received { .. } | Event::Disconnected(_) => unreachable!("not sent"),
        });
        let (mut driver, _) = driver(Vec::new(), false, Some(Time(1)), script);
        let (stop, _question, requests) = requests();
        let running = tokio::spawn(async move { driver.run(requests).await });
        told.recv().await.expect("the timer fires");
        stop.send(()).await.expect("it listens");
        assert_eq!(running.await.expect("no panic").expect("no failure"), End::Stopped);
    }

    #[tokio::test]
    async fn a_question_is_answered_and_a_second_stop_does_not_wait() {
        let (mut driver, _) = driver(Vec::new(), false, None, Box::new(|_, _| {}));
        let (stop, question, requests) = requests();
        let running = tokio::spawn(async move { driver.run(requests).await });
        let (ask, answer) = oneshot::channel();
        question.send(ask).await.expect("it listens");
        assert_eq!(answer.await.expect("an answer").name, "scripted");
        stop.send(()).await.expect("it listens");
        stop.send(()).await.expect("it listens");
        assert_eq!(running.await.expect("no panic").expect("no failure"), End::Unsaved);
    }

    #[tokio::test]
    async fn a_stop_that_takes_too_long_ends_unsaved() {
        let (mut driver, _) = driver(Vec::new(), false, None, Box::new(|_, _| {}));
        driver.stop_time_max = Duration::from_millis(5);
        let (stop, _question, requests) = requests();
        stop.send(()).await.expect("it listens");
        assert_eq!(driver.run(requests).await.expect("no failure"), End::Unsaved);
    }
}
