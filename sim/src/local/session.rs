//! One cluster from its first process to its last: starts it, watches it, does to it what its
//! description says, and stops it.
#![expect(clippy::disallowed_methods, reason = "drives real processes: its time is the real one")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde::Deserialize;
use skein_coordinator::status::Status;
use skein_protocol::config::RunConfig;
use skein_protocol::id::NodeId;
use tokio::process::Command;

use super::cluster::{Cluster, Happening};
use super::error::{LocalError, at};
use super::http;
use super::lines::Lines;
use super::process::Processes;
use super::programs::Programs;
use super::progress::Progress;
use super::stop::Stop;
use super::view::{Dip, Fate, Member, Scene, View};

/// Time between two looks at the cluster.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The coordinator's page takes at most so long.
const STATUS_BOUND: Duration = Duration::from_secs(2);
/// The coordinator says where it listens within so long.
const START_BOUND: Duration = Duration::from_secs(30);
/// A coordinator that was asked to stop has so long for its checkpoint.
const CHECKPOINT_BOUND: Duration = Duration::from_secs(25);
/// A node that was asked to stop has so long.
const NODE_BOUND: Duration = Duration::from_secs(5);
/// The coordinator's name among the processes; no node can have it.
const COORDINATOR: &str = "coordinator!";

/// Where a coordinator can be reached: its `endpoints.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Endpoints {
    /// Its addresses for nodes, key included, best first.
    pub control: Vec<String>,
    /// Where its page is served: `http://ip:port`.
    pub http: String,
}

impl Endpoints {
    /// Its best address for nodes; empty if it has none.
    pub fn address(&self) -> &str {
        self.control.first().map_or("", String::as_str)
    }
}

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The description, with paths that hold from here.
    pub cluster: Cluster,
    /// The run's configuration.
    pub run: RunConfig,
    /// The programs.
    pub programs: Programs,
}

/// How watching a cluster ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are committed; the processes still run.
    Finished,
    /// The user asked to stop; the processes are stopped and the run can be resumed.
    Interrupted,
}

/// A cluster of processes.
pub struct Session {
    plan: Plan,
    processes: Processes,
    view: Box<dyn View>,
    stop: Stop,
    progress: Progress,
    members: Vec<Member>,
    lines: Lines,
    endpoints: Endpoints,
    status: Option<Status>,
    /// Since when the coordinator has not answered.
    silent_since: Option<Instant>,
    began: Instant,
    dips: Vec<Dip>,
    event_seen: f64,
}

impl Session {
    /// Starts the coordinator and the first nodes, or all that are due when a run is resumed.
    pub async fn start(plan: Plan, progress: Progress, resume: bool, view: Box<dyn View>, mut stop: Stop) -> Result<Self, LocalError> {
        let began = Instant::now();
        let out = plan.cluster.cluster.out.clone();
        let mut processes = Processes::new(out.join("logs"), plan.programs.guard.as_deref()).map_err(at(&out))?;
        let names: Vec<String> = plan.cluster.nodes.iter().map(|node| node.name.clone()).collect();
        let lines = Lines::new(&plan.cluster.proxy, &names).await.map_err(at(&out))?;
        let endpoints = start_coordinator(&plan, &mut processes, resume, &mut stop).await?;
        // The coordinator has its log: from here on there is something to resume.
        let progress = Progress { steps: plan.run.run.steps, ..progress };
        progress.save(&out)?;
        let mut members = Vec::new();
        for name in &names {
            let id = identity(&plan.programs, &node_folder(&out, name), &mut stop).await?;
            members.push(Member { name: name.clone(), id, fate: Fate::Later });
        }
        let mut session = Self {
            plan,
            processes,
            view,
            stop,
            progress,
            members,
            lines,
            endpoints,
            status: None,
            silent_since: None,
            began,
            dips: Vec::new(),
            event_seen: -1.0,
        };
        session.lines.control(&session.plan.cluster.proxy, &names, session.endpoints.address()).await.map_err(at(&out))?;
        session.start_first().await?;
        Ok(session)
    }

    /// Starts the nodes that are there from the beginning; in a resumed run those that its past
    /// events left.
    async fn start_first(&mut self) -> Result<(), LocalError> {
        let past: Vec<usize> = self.progress.fired.clone();
        let killed: Vec<String> = past.iter().filter_map(|index| self.plan.cluster.events[*index].kill.clone()).collect();
        for name in self.plan.cluster.first_nodes().iter().filter(|name| !killed.contains(name)) {
            self.start_node(name, false)?;
        }
        for index in past {
            match self.plan.cluster.events[index].start.as_ref().filter(|name| killed.contains(name)) {
                // Started and killed since.
                Some(_) => {}
                None => self.happen(index, true).await?,
            }
        }
        Ok(())
    }

    /// Watches until the run is finished or the user asks to stop.
    pub async fn watch(&mut self) -> Result<Ending, LocalError> {
        let mut tick = tokio::time::interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = self.stop.requested() => {
                    self.interrupt().await?;
                    return Ok(Ending::Interrupted);
                }
            }
            self.look().await?;
            if self.status.as_ref().is_some_and(|status| status.state == "finished") {
                self.tell_of_dips();
                self.remember()?;
                return Ok(Ending::Finished);
            }
            self.tell_of_the_ended()?;
            for index in self.due() {
                self.happen(index, false).await?;
            }
        }
    }

    /// Where the coordinator can be reached.
    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// The coordinator's view when last seen.
    pub fn status(&self) -> Status {
        self.status.clone().unwrap_or_default()
    }

    /// How far the run is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Seconds since this session began, and those of earlier ones.
    pub fn seconds(&self) -> f64 {
        self.progress.seconds + self.began.elapsed().as_secs_f64()
    }

    /// Microbatches redone, in this session and earlier ones.
    pub fn redone(&self) -> f64 {
        self.progress.redone + self.status.as_ref().map_or(0.0, |status| status.microbatches_redone)
    }

    /// How many nodes took part.
    pub fn started(&self) -> usize {
        self.members.iter().filter(|member| member.fate != Fate::Later).count()
    }

    /// Names of the nodes that events killed.
    pub fn killed(&self) -> Vec<String> {
        self.members.iter().filter(|member| matches!(member.fate, Fate::Killed(_))).map(|member| member.name.clone()).collect()
    }

    /// All that was to be done with the run is done: there is nothing to resume.
    pub fn conclude(&mut self) -> Result<(), LocalError> {
        self.progress.finished = true;
        self.remember()
    }

    /// Stops everything: the coordinator first, since it needs the nodes to save what they hold.
    pub async fn stop(&mut self) -> Result<(), LocalError> {
        let mut insist = self.stop.clone();
        let kind = async {
            let error = at(&self.plan.cluster.cluster.out);
            let coordinator = [COORDINATOR.to_owned()];
            let stopped = match self.processes.stop(&coordinator, CHECKPOINT_BOUND).await {
                Ok(_) => self.processes.stop(&self.processes.names(), NODE_BOUND).await,
                Err(error) => Err(error),
            };
            stopped.map(drop).map_err(error)
        };
        tokio::select! {
            result = kind => result,
            // Asked a second time: what is left is killed when it is dropped.
            () = insist.insisted() => Ok(()),
        }
    }

    async fn interrupt(&mut self) -> Result<(), LocalError> {
        self.view.note("stopping: the coordinator saves a checkpoint first (once more to stop at once)");
        self.look().await?;
        self.stop().await?;
        self.remember()?;
        self.view.end();
        Ok(())
    }

    fn tell_of_dips(&mut self) {
        let rate = self.status.as_ref().map_or(0.0, |status| status.tokens_per_second);
        for line in self.dips.iter().filter_map(|dip| dip.at_the_end(rate)) {
            self.view.note(&line);
        }
        self.view.end();
    }

    /// Writes down what a resumed run has to know.
    fn remember(&self) -> Result<(), LocalError> {
        Progress { seconds: self.seconds(), redone: self.redone(), ..self.progress.clone() }.save(&self.plan.cluster.cluster.out)
    }

    /// Asks the coordinator how things stand, and shows it.
    async fn look(&mut self) -> Result<(), LocalError> {
        let page = http::get(&self.endpoints.http, "/status", STATUS_BOUND).await.ok();
        let status: Option<Status> = page.and_then(|page| serde_json::from_slice(&page).ok());
        match status {
            Some(status) => {
                self.silent_since = None;
                self.take(status)?;
            }
            None => {
                self.silent_since.get_or_insert_with(Instant::now);
            }
        }
        let trouble = self
            .silent_since
            .filter(|since| since.elapsed() > STATUS_BOUND)
            .map(|since| format!("the coordinator has not answered for {} s", since.elapsed().as_secs()));
        let seconds = self.began.elapsed().as_secs_f64();
        self.view.show(&Scene { seconds, status: self.status.as_ref(), members: &self.members, trouble: trouble.as_deref() });
        Ok(())
    }

    fn take(&mut self, status: Status) -> Result<(), LocalError> {
        for (seconds, line) in status.events.iter().filter(|(seconds, _)| *seconds > self.event_seen) {
            self.view.note(&format!("{seconds:>6.1} s  {line}"));
        }
        self.event_seen = status.events.last().map_or(self.event_seen, |(seconds, _)| self.event_seen.max(*seconds));
        let seconds = self.began.elapsed().as_secs_f64();
        for line in self.dips.iter_mut().filter_map(|dip| dip.observe(seconds, status.tokens_per_second)) {
            self.view.note(&line);
        }
        if self.progress.first_loss.is_none() {
            self.progress.first_loss = status.losses.first().filter(|(step, _)| *step <= 1).map(|(_, loss)| *loss);
        }
        self.progress.last_loss = status.losses.last().map(|(_, loss)| *loss).or(self.progress.last_loss);
        let advanced = status.step > self.progress.step;
        self.progress.step = status.step;
        self.status = Some(status);
        if advanced { self.remember() } else { Ok(()) }
    }

    /// Events that should have happened by now and have not.
    fn due(&self) -> Vec<usize> {
        let Some(status) = &self.status else { return Vec::new() };
        let events = self.plan.cluster.events.iter().enumerate();
        events.filter(|(index, event)| !self.progress.fired.contains(index) && status.step >= event.step(status.steps)).map(|(index, _)| index).collect()
    }

    /// Lets an event happen; `again` if it has happened before the run was resumed.
    async fn happen(&mut self, index: usize, again: bool) -> Result<(), LocalError> {
        let event = &self.plan.cluster.events[index];
        let step = if again { event.step(self.plan.run.run.steps) } else { self.progress.step };
        let happening = event.happening().expect("checked when parsed");
        if !again {
            self.progress.fired.push(index);
            self.remember()?;
        }
        match happening {
            Happening::Kill(name) => {
                let rate = self.status.as_ref().map_or(0.0, |status| status.tokens_per_second);
                let log = self.processes.log(&name);
                if self.processes.kill(&name).await.map_err(at(&log))?.is_some() && !again {
                    self.dips.push(Dip::new(self.began.elapsed().as_secs_f64(), rate));
                    self.view.note(&format!("step {step}: killed {name} with SIGKILL"));
                }
                self.fate(&name, Fate::Killed(step));
            }
            Happening::Start(name) => {
                self.start_node(&name, true)?;
                if !again {
                    self.view.note(&format!("step {step}: started {name}, a node that nobody has seen before"));
                }
            }
            Happening::Cut(a, b) => {
                self.lines.cut(&a, &b, true);
                self.view.note(&format!("step {step}: cut the line between {a} and {b}"));
            }
            Happening::Mend(a, b) => {
                self.lines.cut(&a, &b, false);
                self.view.note(&format!("step {step}: mended the line between {a} and {b}"));
            }
        }
        Ok(())
    }

    fn start_node(&mut self, name: &str, fresh: bool) -> Result<(), LocalError> {
        let ids: BTreeMap<String, String> = self.members.iter().map(|member| (member.name.clone(), member.id.clone())).collect();
        let section = self.plan.cluster.node(name).expect("checked when parsed");
        let address = self.lines.coordinator_for(name, self.endpoints.address());
        let mut command = Command::new(&self.plan.programs.node);
        command.args(["start", "--coordinator", &address, "--name", name]).arg("--state").arg(node_folder(&self.plan.cluster.cluster.out, name));
        if let Some(data) = self.plan.cluster.cluster.data.as_ref().filter(|_| section.data) {
            command.arg("--data").arg(data);
        }
        if let Some(share) = section.compute_share {
            command.args(["--compute-share", &share.to_string()]);
        }
        if let Some(limit) = &section.memory_limit {
            command.args(["--memory-limit", limit]);
        }
        if let Some(threads) = section.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        command.args(self.lines.arguments(name, &ids));
        self.processes.start(name, command).map_err(at(&self.plan.programs.node))?;
        self.fate(name, Fate::Runs { fresh });
        Ok(())
    }

    fn fate(&mut self, name: &str, fate: Fate) {
        if let Some(member) = self.members.iter_mut().find(|member| member.name == name) {
            member.fate = fate;
        }
    }

    /// Notes who ended by themselves. Without the coordinator, or without any node, there is
    /// nothing to wait for.
    fn tell_of_the_ended(&mut self) -> Result<(), LocalError> {
        for (name, how) in self.processes.ended().map_err(at(&self.plan.cluster.cluster.out))? {
            let words = self.processes.last_words(&name);
            if name == COORDINATOR {
                return Err(ended(&self.processes, "the coordinator", COORDINATOR, how));
            }
            self.view.note(&format!("{name} ended ({how}): {words}"));
            self.fate(&name, Fate::Ended(if words.is_empty() { how.to_string() } else { words }));
            if !self.members.iter().any(|member| matches!(member.fate, Fate::Runs { .. })) {
                return Err(ended(&self.processes, &format!("the last node, {name},"), &name, how));
            }
        }
        Ok(())
    }
}

fn ended(processes: &Processes, called: &str, name: &str, how: ExitStatus) -> LocalError {
    LocalError::Ended { name: called.to_owned(), how: how.to_string(), words: processes.last_words(name), log: processes.log(name) }
}

fn node_folder(out: &Path, name: &str) -> PathBuf {
    out.join("nodes").join(name)
}

/// Starts the coordinator and waits until it says where it listens.
async fn start_coordinator(plan: &Plan, processes: &mut Processes, resume: bool, stop: &mut Stop) -> Result<Endpoints, LocalError> {
    let state = plan.cluster.cluster.out.join("coordinator");
    fs::create_dir_all(&state).map_err(at(&state))?;
    let file = state.join("endpoints.json");
    // What an earlier start wrote would lead us to a stranger's port.
    if file.exists() {
        fs::remove_file(&file).map_err(at(&file))?;
    }
    let mut command = Command::new(&plan.programs.coordinator);
    command.args(["start", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--run"]).arg(&plan.cluster.cluster.run).arg("--state").arg(&state);
    if resume {
        command.arg("--resume");
    }
    processes.start(COORDINATOR, command).map_err(at(&plan.programs.coordinator))?;
    let waiting = async {
        loop {
            if let Ok(bytes) = fs::read(&file)
                && let Ok(endpoints) = serde_json::from_slice(&bytes)
            {
                return Ok(endpoints);
            }
            if let Some((_, how)) = processes.ended().map_err(at(&state))?.into_iter().next() {
                return Err(ended(processes, "the coordinator", COORDINATOR, how));
            }
            tokio::time::sleep(LOOK_EVERY / 10).await;
        }
    };
    let too_long = || LocalError::TooLong(format!("the coordinator has not said where it listens after {} s", START_BOUND.as_secs()));
    tokio::select! {
        result = tokio::time::timeout(START_BOUND, waiting) => result.map_err(|_| too_long())?,
        () = stop.requested() => Err(LocalError::stopped()),
    }
}

/// The identity of the node whose state is in `folder`; made if there is none.
async fn identity(programs: &Programs, folder: &Path, stop: &mut Stop) -> Result<String, LocalError> {
    fs::create_dir_all(folder).map_err(at(folder))?;
    let shown = folder.display().to_string();
    let answer = programs.ask_node(&["identity", "--state", &shown], false, stop).await?;
    let id: Option<NodeId> = answer.split_whitespace().next_back().and_then(|word| word.parse().ok());
    let wrong = || LocalError::Answer {
        command: format!("skein-node identity --state {shown}"),
        answer: answer.trim().to_owned(),
        problem: "expected 64 hexadecimal digits".to_owned(),
    };
    id.map(|id| id.to_string()).ok_or_else(wrong)
}

#[cfg(test)]
mod tests;
