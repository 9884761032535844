//! The description of a local cluster (`cluster.toml`): who takes part, what happens to them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use skein_protocol::config::{ConfigError, parse_error};

/// Processes that one machine is asked to run at most.
const NODES_MAX: usize = 64;

/// Everything in a `cluster.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// What they train and where their files go.
    pub cluster: ClusterSection,
    /// The nodes, those included that an event starts.
    #[serde(rename = "node", default)]
    pub nodes: Vec<NodeSection>,
    /// What happens on the way.
    #[serde(rename = "event", default)]
    pub events: Vec<EventSection>,
    /// What stands between the nodes.
    #[serde(default)]
    pub proxy: ProxySection,
}

/// `[cluster]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSection {
    /// The run's configuration; a relative path starts at the cluster file's folder.
    pub run: PathBuf,
    /// Where state, logs and results go; a relative path starts at the working folder.
    pub out: PathBuf,
    /// The run's data, for the nodes with `data = true`; a relative path starts at the cluster
    /// file's folder.
    #[serde(default)]
    pub data: Option<PathBuf>,
}

/// `[[node]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSection {
    /// Its name, also of its folder.
    pub name: String,
    /// Share of the time it computes, above 0 to 1.
    #[serde(default)]
    pub compute_share: Option<f64>,
    /// Memory it lends, such as `2GiB`.
    #[serde(default)]
    pub memory_limit: Option<String>,
    /// Threads it computes with.
    #[serde(default)]
    pub threads: Option<usize>,
    /// Whether it is given the run's data; the others fetch what they need from those.
    #[serde(default = "yes")]
    pub data: bool,
}

fn yes() -> bool {
    true
}

/// `[[event]]`: one moment and one thing that happens then.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventSection {
    /// When so many steps are committed.
    #[serde(default)]
    pub at_step: Option<u64>,
    /// When this share of the run's steps is committed, 0 to 1.
    #[serde(default)]
    pub at_fraction: Option<f64>,
    /// SIGKILL this node.
    #[serde(default)]
    pub kill: Option<String>,
    /// Start this node, which nobody has seen before.
    #[serde(default)]
    pub start: Option<String>,
    /// Nothing passes between these two any more; needs a proxy between them.
    #[serde(default)]
    pub cut: Option<[String; 2]>,
    /// Everything passes again between these two.
    #[serde(default)]
    pub mend: Option<[String; 2]>,
}

/// `[proxy]`: nodes reach each other through a process of ours that can lose and cut.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProxySection {
    /// Between all pairs.
    pub all: bool,
    /// Between these pairs, in both directions.
    pub pairs: Vec<[String; 2]>,
    /// Between the coordinator and each node.
    pub control: bool,
    /// Share of the datagrams that are lost, 0 to 1.
    pub drop: f64,
    /// What the losses are drawn from.
    pub seed: u64,
}

/// A thing that happens to a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// SIGKILL this node.
    Kill(String),
    /// Start this node.
    Start(String),
    /// Nothing passes between these two.
    Cut(String, String),
    /// Everything passes between these two.
    Mend(String, String),
}

impl EventSection {
    /// The number of committed steps, of a run of `steps`, at which it happens.
    pub fn step(&self, steps: u64) -> u64 {
        self.at_step.unwrap_or_else(|| (self.at_fraction.unwrap_or(0.0) * steps as f64).round() as u64)
    }

    /// What happens. Exactly one thing, once checked.
    pub fn happening(&self) -> Option<Happening> {
        let kill = self.kill.clone().map(Happening::Kill);
        let start = self.start.clone().map(Happening::Start);
        let cut = self.cut.clone().map(|[a, b]| Happening::Cut(a, b));
        let mend = self.mend.clone().map(|[a, b]| Happening::Mend(a, b));
        let mut all = [kill, start, cut, mend].into_iter().flatten();
        let one = all.next()?;
        if all.next().is_some() { None } else { Some(one) }
    }
}

impl ProxySection {
    /// Whether there is a proxy between nodes `a` and `b`.
    pub fn between(&self, a: &str, b: &str) -> bool {
        self.all || self.pairs.iter().any(|[x, y]| (x == a && y == b) || (x == b && y == a))
    }

    /// Whether there is any proxy between nodes.
    pub fn any(&self) -> bool {
        self.all || !self.pairs.is_empty()
    }
}

impl Cluster {
    /// Parses and checks a `cluster.toml`.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let cluster: Self = toml::from_str(text).map_err(|error| parse_error(&error))?;
        cluster.check()?;
        Ok(cluster)
    }

    /// The same with paths that hold from the working folder, given the cluster file's folder.
    pub fn located(mut self, folder: &Path) -> Self {
        // An absolute path replaces the folder.
        self.cluster.run = folder.join(&self.cluster.run);
        self.cluster.data = self.cluster.data.map(|data| folder.join(data));
        self
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> Option<&NodeSection> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Names of the nodes that are there from the beginning, in the file's order.
    pub fn first_nodes(&self) -> Vec<String> {
        let later: BTreeSet<&String> = self.events.iter().filter_map(|event| event.start.as_ref()).collect();
        self.nodes.iter().map(|node| node.name.clone()).filter(|name| !later.contains(name)).collect()
    }

    fn check(&self) -> Result<(), ConfigError> {
        require(!self.nodes.is_empty(), "node", 0, "a cluster needs at least one [[node]]")?;
        require(self.nodes.len() <= NODES_MAX, "node", self.nodes.len(), "at most 64 nodes on one machine")?;
        let mut names = BTreeSet::new();
        for node in &self.nodes {
            let plain = !node.name.is_empty() && node.name.len() <= 32 && node.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
            require(plain, "node.name", &node.name, "must be 1 to 32 letters, digits, - or _")?;
            require(names.insert(&node.name), "node.name", &node.name, "two nodes have this name")?;
            if let Some(share) = node.compute_share {
                require(share > 0.0 && share <= 1.0, "node.compute_share", share, "must be above 0 and at most 1")?;
            }
            require(node.threads != Some(0), "node.threads", 0, "must be at least 1")?;
        }
        require((0.0..=1.0).contains(&self.proxy.drop), "proxy.drop", self.proxy.drop, "must be between 0 and 1")?;
        for name in self.proxy.pairs.iter().flatten() {
            self.known("proxy.pairs", name)?;
        }
        require(
            !self.first_nodes().is_empty(),
            "event.start",
            self.nodes.len(),
            "every node is started by an event: at least one must be there from the beginning",
        )?;
        self.check_events()
    }

    fn check_events(&self) -> Result<(), ConfigError> {
        let mut started: BTreeMap<&String, usize> = BTreeMap::new();
        for (index, event) in self.events.iter().enumerate() {
            let number = index + 1;
            require(event.at_step.is_some() != event.at_fraction.is_some(), "event", number, "needs one of at_step and at_fraction")?;
            if let Some(fraction) = event.at_fraction {
                require((0.0..=1.0).contains(&fraction), "event.at_fraction", fraction, "must be between 0 and 1")?;
            }
            require(event.happening().is_some(), "event", number, "needs one of kill, start, cut and mend")?;
            if let Some(name) = &event.kill {
                self.known("event.kill", name)?;
            }
            if let Some(name) = &event.start {
                self.known("event.start", name)?;
                let times = started.entry(name).or_default();
                *times += 1;
                require(*times == 1, "event.start", name, "a node starts once; give a second one another name")?;
            }
            for [a, b] in [&event.cut, &event.mend].into_iter().flatten() {
                self.known("event.cut", a)?;
                self.known("event.cut", b)?;
                require(self.proxy.between(a, b), "event.cut", format!("{a}, {b}"), "needs a proxy between them: see [proxy]")?;
            }
        }
        Ok(())
    }

    fn known(&self, key: &'static str, name: &str) -> Result<(), ConfigError> {
        require(self.node(name).is_some(), key, name, "there is no [[node]] of this name")
    }
}

fn require(holds: bool, key: &'static str, value: impl ToString, problem: &str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::Value { key, value: value.to_string(), problem: problem.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = r#"
        [cluster]
        run = "run.toml"
        out = "out/test"
        [[node]]
        name = "a"
        compute_share = 0.65
        [[node]]
        name = "b"
        [[node]]
        name = "c"
        [[event]]
        at_fraction = 0.5
        kill = "b"
        [[event]]
        at_step = 7
        start = "c"
    "#;

    fn check(from: &str, to: &str, expected: &str) {
        assert!(CLUSTER.contains(from), "{from} is in the example");
        let error = Cluster::from_toml(&CLUSTER.replace(from, to)).expect_err("must be refused");
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn events_have_a_step_and_fresh_nodes_wait_for_theirs() {
        let cluster = Cluster::from_toml(CLUSTER).expect("valid");
        assert_eq!(cluster.first_nodes(), ["a", "b"]);
        assert_eq!(cluster.events.iter().map(|event| event.step(251)).collect::<Vec<_>>(), [126, 7]);
        assert_eq!(cluster.events[0].happening(), Some(Happening::Kill("b".to_owned())));
    }

    #[test]
    fn mistakes_are_named() {
        check("compute_share", "compute_shard", "unknown key `compute_shard`: did you mean `compute_share`?");
        check("[[event]]\n        at_fraction", "[[events]]\n        at_fraction", "unknown key `events`: did you mean `event`?");
        check("0.65", "1.65", "node.compute_share = 1.65: must be above 0 and at most 1");
        check("kill = \"b\"", "kill = \"z\"", "event.kill = z: there is no [[node]] of this name");
        check("kill = \"b\"", "kill = \"b\"\nstart = \"b\"", "event = 1: needs one of kill, start, cut and mend");
        check("at_step = 7", "", "event = 2: needs one of at_step and at_fraction");
        check("name = \"b\"", "name = \"a\"", "node.name = a: two nodes have this name");
        check("name = \"b\"", "name = \"../b\"", "node.name = ../b: must be 1 to 32 letters, digits, - or _");
        check("kill = \"b\"", "cut = [\"a\", \"b\"]", "event.cut = a, b: needs a proxy between them: see [proxy]");
    }

    #[test]
    fn proxies_stand_between_the_pairs_that_are_named() {
        let cluster = Cluster::from_toml(&format!("{CLUSTER}\n[proxy]\npairs = [[\"a\", \"b\"]]")).expect("valid");
        assert!(cluster.proxy.between("b", "a") && !cluster.proxy.between("a", "c"));
    }
}
