//! Scenarios: one run written down, with what goes wrong in it and what must come of it.
//!
//! A scenario is a file in TOML. Every key but `title` has a default; times are in seconds.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use skein_node::engine::toy;
use skein_protocol::codec::Codec;
use skein_protocol::config::Mode;

use crate::fault::CrashPoint;
use crate::judge::judge;
use crate::plan::{Ending, Plan};
use crate::schedule::{Planned, When};

/// One run, what goes wrong in it, and what must come of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it shows, for people.
    pub title: String,
    /// The numbered rules of docs/protocol.md whose interleaving it runs.
    #[serde(default)]
    pub rules: Vec<u8>,
    /// The toy model and its run.
    #[serde(default)]
    pub run: RunTable,
    /// Who takes part.
    #[serde(default)]
    pub nodes: NodesTable,
    /// What goes wrong, and when.
    #[serde(default)]
    pub faults: Vec<Planned>,
    /// What must come of it beside what is demanded of every run.
    #[serde(default)]
    pub expect: Expect,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunTable {
    /// Seed of the weights, the samples and the links.
    pub seed: u64,
    /// `sync` or `exact`.
    pub mode: Mode,
    /// Layers; the model has a block more at either end.
    pub layers: usize,
    /// Whether embedding and head share their weights.
    pub tied: bool,
    /// Microbatches a step.
    pub microbatches: u32,
    /// Steps.
    pub steps: u64,
    /// A checkpoint every so many steps; 0 for none but the last.
    pub checkpoint_every: u64,
    /// Of activations and their gradients: `none` or `bf16`.
    pub boundary: Codec,
}

impl Default for RunTable {
    fn default() -> Self {
        Self { seed: 1, mode: Mode::Exact, layers: 2, tied: true, microbatches: 4, steps: 10, checkpoint_every: 2, boundary: Codec::None }
    }
}

/// `[nodes]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodesTable {
    /// Speed of each; there are as many nodes as speeds.
    pub speeds: Vec<f64>,
    /// When each starts; at once where there are fewer.
    pub starts: Vec<f64>,
    /// The run begins with so many; 0 for all that start at once.
    pub minimum: usize,
    /// Into how many spans the model is cut; 0 leaves it to the planner.
    pub spans: usize,
    /// Replicas wanted of each block.
    pub replicas: usize,
    /// Frames travel up to so much longer.
    pub jitter: f64,
}

impl Default for NodesTable {
    fn default() -> Self {
        Self { speeds: vec![1.0; 4], starts: Vec::new(), minimum: 0, spans: 2, replicas: 2, jitter: 0.0 }
    }
}

/// `[expect]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Expect {
    /// Whether every fault must find somebody to strike.
    pub all_strike: bool,
    /// The timeline at the end: 1 if the run never went back to a checkpoint.
    pub timeline: Option<u32>,
    /// At most so many microbatches were computed again, in whole ones.
    pub redone_at_most: Option<f64>,
    /// At least so much was computed again: the faults did strike.
    pub redone_at_least: Option<f64>,
    /// Commits, all timelines together.
    pub commits: Option<usize>,
    /// Something of this is among what the coordinator reported.
    pub reported: Option<String>,
    /// The run ends within so many seconds.
    pub within: Option<f64>,
}

impl Default for Expect {
    fn default() -> Self {
        Self { all_strike: true, timeline: None, redone_at_most: None, redone_at_least: None, commits: None, reported: None, within: None }
    }
}

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// What is wrong, and where in the text.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let scenario: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text.get(..span.start).unwrap_or(text).matches('\n').count());
            format!("line {line}: {}", error.message())
        })?;
        let nodes = scenario.nodes.speeds.len();
        if !(1..=200).contains(&nodes) || scenario.nodes.speeds.iter().any(|speed| !(0.001..=1000.0).contains(speed)) {
            return Err("nodes.speeds: between 1 and 200 nodes with speeds from 0.001 to 1000".to_owned());
        }
        if scenario.nodes.starts.iter().chain([&scenario.nodes.jitter]).any(|seconds| !(0.0..=1e6).contains(seconds)) {
            return Err("nodes.starts, nodes.jitter: seconds, not below 0".to_owned());
        }
        if scenario.run.layers > 64 || !(1..=64).contains(&scenario.run.microbatches) || !(1..=100_000).contains(&scenario.run.steps) {
            return Err("run: at most 64 layers, 1 to 64 microbatches, 1 to 100000 steps".to_owned());
        }
        if let Some(stranger) = scenario.faults.iter().flat_map(|planned| planned.nodes()).find(|node| *node >= nodes) {
            return Err(format!("a fault names node {stranger}; the {nodes} nodes are numbered from 0"));
        }
        Ok(scenario)
    }

    /// The run that it describes.
    pub fn plan(&self) -> Plan {
        let RunTable { seed, mode, layers, tied, microbatches, steps, checkpoint_every, boundary } = self.run;
        let mut config = toy::config(layers, tied, microbatches, steps);
        config.run.mode = mode;
        config.run.seed = seed;
        config.checkpoint.every_steps = checkpoint_every;
        config.wire.boundary = boundary;
        config.placement.spans = self.nodes.spans;
        config.placement.replicas = self.nodes.replicas;
        let starts: Vec<Duration> = self.nodes.starts.iter().copied().map(Duration::from_secs_f64).collect();
        let late = starts.iter().filter(|start| !start.is_zero()).count();
        config.placement.nodes_min = if self.nodes.minimum > 0 { self.nodes.minimum } else { self.nodes.speeds.len() - late };
        let mut plan = Plan::new(config, self.nodes.speeds.len());
        plan.speeds.clone_from(&self.nodes.speeds);
        plan.starts = starts;
        plan.seed = seed;
        plan.jitter = Duration::from_secs_f64(self.nodes.jitter);
        plan.faults.clone_from(&self.faults);
        plan
    }

    /// Runs it and judges it.
    ///
    /// # Errors
    /// What did not come out as it must.
    pub fn run(&self) -> Result<Ending, String> {
        let ending = judge(&self.plan()).map_err(|violation| violation.to_string())?;
        self.check(&ending)?;
        Ok(ending)
    }

    fn check(&self, ending: &Ending) -> Result<(), String> {
        if self.expect.all_strike && ending.faults_struck < self.faults.len() {
            let missed = self.faults.iter().find_map(|planned| self.was_missed(planned, ending));
            let why = missed.map_or_else(|| "one found nobody to strike".to_owned(), |(point, reached)| format!("{point:?} was reached {reached} times only"));
            return Err(format!("{} of {} faults struck: {why}", ending.faults_struck, self.faults.len()));
        }
        let expect = &self.expect;
        let redone = ending.status.microbatches_redone;
        let seconds = ending.time.as_secs_f64();
        let was_reported = |text: &String| ending.status.events.iter().any(|(_, line)| line.contains(text));
        let wrong = [
            expect.timeline.filter(|timeline| *timeline != ending.status.timeline).map(|wanted| format!("timeline {}, not {wanted}", ending.status.timeline)),
            expect.redone_at_most.filter(|most| redone > *most).map(|most| format!("{redone} microbatches were redone, at most {most} may be")),
            expect.redone_at_least.filter(|least| redone < *least).map(|least| format!("{redone} microbatches were redone, at least {least} must be")),
            expect.commits.filter(|commits| *commits != ending.commits).map(|wanted| format!("{} commits, not {wanted}", ending.commits)),
            expect.reported.as_ref().filter(|text| !was_reported(text)).map(|text| format!("nothing was reported like `{text}`: {:?}", ending.status.events)),
            expect.within.filter(|within| seconds > *within).map(|within| format!("it took {seconds:.3} s, at most {within} s may pass")),
        ];
        wrong.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    fn was_missed(&self, planned: &Planned, ending: &Ending) -> Option<(CrashPoint, usize)> {
        match planned.when {
            When::At(_) => None,
            When::Reached { point, nth, .. } => {
                let times = ending.reached.get(&point).copied().unwrap_or_default();
                (times <= nth).then_some((point, times))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Fault;

    #[test]
    fn a_scenario_is_read_as_it_was_written() {
        let scenario = Scenario {
            title: "x".to_owned(),
            faults: vec![
                Planned { when: When::At(Duration::from_millis(250)), fault: Fault::KillCoordinator },
                Planned {
                    when: When::Reached { point: CrashPoint::MidBackward, node: Some(1), nth: 2 },
                    fault: Fault::Kill { node: 1, returns: Duration::from_secs(1), wiped: true },
                },
            ],
            ..Scenario::default()
        };
        let text = toml::to_string(&scenario).expect("it can be written");
        assert_eq!(Scenario::from_toml(&text), Ok(scenario), "{text}");
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |text: &str| Scenario::from_toml(text).expect_err("it is wrong");
        assert!(wrong("title = 'x'\n[run]\nstep = 3").contains("line 3: unknown field `step`"));
        assert!(wrong("title = 'x'\n[[faults]]\nwhen = { at = -1.0 }\nfault = 'kill-coordinator'").contains("negative"));
        assert!(wrong("title = 'x'\n[[faults]]\nwhen = { at = 1.0 }\nfault = { flap = { node = 4 } }").contains("node 4"));
    }

    #[test]
    fn a_fault_that_never_strikes_fails_the_scenario() {
        let text = "title = 'x'\n[run]\nsteps = 2\n[[faults]]\nwhen = { reached = { point = 'draining' } }\nfault = { flap = { node = 0 } }";
        let problem = Scenario::from_toml(text).expect("it is well formed").run().expect_err("nobody drains");
        assert!(problem.contains("0 of 1 faults struck"), "{problem}");
    }
}
