//! The programs that a cluster consists of, and running one of them to its end.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::error::LocalError;
use super::stop::Stop;

/// Where our programs are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// `skein-coordinator`.
    pub coordinator: PathBuf,
    /// `skein-node`.
    pub node: PathBuf,
    /// A program whose `guard` command is [`super::guard::watch`].
    pub guard: Option<PathBuf>,
}

impl Programs {
    /// The programs in `folder`; `guard` is this program itself.
    pub fn within(folder: &Path, guard: Option<PathBuf>) -> Result<Self, LocalError> {
        let find = |program: &'static str| {
            let path = folder.join(program);
            if path.is_file() { Ok(path) } else { Err(LocalError::NoProgram { program, folder: folder.to_owned() }) }
        };
        Ok(Self { coordinator: find("skein-coordinator")?, node: find("skein-node")?, guard })
    }

    /// Runs `skein-node` with `arguments` to its end and gives what it printed. Its errors and
    /// progress go where ours go if `visible`.
    pub async fn ask_node(&self, arguments: &[&str], visible: bool, stop: &mut Stop) -> Result<String, LocalError> {
        let shown = format!("skein-node {}", arguments.join(" "));
        let mut command = Command::new(&self.node);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).process_group(0);
        command.stderr(if visible { Stdio::inherit() } else { Stdio::piped() });
        let failed = |words: String| LocalError::Command { command: shown.clone(), words };
        let child = command.spawn().map_err(|error| failed(error.to_string()))?;
        // Dropping the child kills it: a stop takes effect at once.
        let output = tokio::select! {
            output = child.wait_with_output() => output.map_err(|error| failed(error.to_string()))?,
            () = stop.requested() => return Err(LocalError::stopped()),
        };
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let words = errors.lines().rev().find(|line| !line.trim().is_empty());
            return Err(failed(words.map_or_else(|| output.status.to_string(), str::to_owned)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
