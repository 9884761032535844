//! Judges whole runs: the oracles that every schedule of faults must satisfy.
//!
//! O1, the ledger, is checked at every commit ([`crate::oracle`]). Here: O2, the weights and the
//! optimizer's state at the end are those of one undisturbed process, bit for bit; O3, the run ends
//! soon after the last fault has healed; O5, no node is refused or gives up. O4, what nodes keep is
//! bounded, is checked by the world at every event.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use skein_node::engine::{Engine, Task, toy};
use skein_node::solo::solo;
use skein_protocol::config::{Mode, RunConfig};
use skein_protocol::id::{Group, Hash, Version};

use crate::plan::{Ending, Plan};
use crate::world::World;

/// Virtual time within which a run must end, faults and their healing included.
pub const LIMIT: Duration = Duration::from_secs(120);

/// What a run violates.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Violation {
    /// O1, O4 or an assertion of the machines: something counted twice or not at all, a bound passed.
    #[error("{0}")]
    Assertion(String),
    /// O2: groups that differ from those of an undisturbed process.
    #[error("{0} differ from those of an undisturbed process")]
    Weights(String),
    /// O3: the run did not end.
    #[error("{0}")]
    Hang(String),
    /// O5: a node was refused or gave up.
    #[error("a node gave up: {0}")]
    Blame(String),
}

/// Root of every group's state after all steps of one undisturbed process.
///
/// # Panics
/// If the toy engine fails.
pub fn reference(config: &RunConfig) -> BTreeMap<Group, Hash> {
    let structure = toy::structure(config);
    let mut engine = toy::engine(config);
    engine.run(Task::Draw { groups: structure.group_ids().collect() });
    solo(&mut engine, config, &structure, Version(0), config.run.steps, &mut |_| {}).expect("the toy engine computes");
    structure.group_ids().map(|group| (group, engine.state_root(group).expect("it is held"))).collect()
}

/// Runs a plan to its end and checks the oracles. Bits are compared in mode `exact`; in `sync` they
/// depend on who added what.
///
/// # Errors
/// What is violated, in words.
pub fn judge(plan: &Plan) -> Result<Ending, Violation> {
    let run = || World::new(plan.clone()).run(LIMIT);
    let ending = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Violation::Assertion(text.unwrap_or_else(|| "it panicked".to_owned()))
    })?;
    if !ending.failures.is_empty() {
        return Err(Violation::Blame(ending.failures.join("; ")));
    }
    if ending.status.state != "finished" {
        let last: Vec<String> = ending.status.events.iter().rev().take(6).map(|event| format!("{event:?}")).collect();
        let status = &ending.status;
        return Err(Violation::Hang(format!("step {} after {LIMIT:?}, {}: {:?}; {last:#?}", status.step, status.state, status.waiting_for)));
    }
    if plan.config.run.mode != Mode::Exact {
        return Ok(ending);
    }
    let expected = reference(&plan.config);
    let is_saved = |(group, root): &(&Group, &Hash)| ending.saved.get(group).is_some_and(|saved| saved.iter().eq([*root]));
    let wrong: Vec<Group> = expected.iter().filter(|entry| !is_saved(entry)).map(|(group, _)| *group).collect();
    if !wrong.is_empty() {
        return Err(Violation::Weights(format!("groups {wrong:?} on the disks")));
    }
    let steps = Version(plan.config.run.steps);
    for (node, roots) in &ending.roots {
        if let Some((group, _)) = roots.iter().find(|(group, (version, root))| *version == steps && expected[group] != *root) {
            return Err(Violation::Weights(format!("weights of group {group} at {}", node.short())));
        }
    }
    Ok(ending)
}

/// The fewest first faults of a failing plan that make it fail, and how.
pub fn shortest_failing_prefix(plan: &Plan) -> Option<(usize, Violation)> {
    (0..=plan.faults.len()).find_map(|count| {
        let prefix = Plan { faults: plan.faults[..count].to_vec(), ..plan.clone() };
        judge(&prefix).err().map(|problem| (count, problem))
    })
}
