//! The processes that this one started: whatever happens, none of them stays.
//!
//! Each is in a process group of its own, so that a Ctrl-C at the terminal reaches only us and we
//! decide the order in which they end. Dropping [`Processes`] kills what is left (a panic drops
//! too); the [`Guard`] covers the rest.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::guard::Guard;

/// How often we look whether processes have ended while we wait for them.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How often we look whether killed processes are gone before we leave them to the guard.
const REAP_LOOKS: usize = 400;

/// Processes by name.
#[derive(Debug)]
pub struct Processes {
    running: BTreeMap<String, Child>,
    logs: PathBuf,
    guard: Option<Guard>,
}

impl Processes {
    /// None yet. Their output will go to one file each in the folder `logs`; `guard` is a program
    /// as [`Guard::start`] wants it.
    pub fn new(logs: PathBuf, guard: Option<&Path>) -> io::Result<Self> {
        fs::create_dir_all(&logs)?;
        Ok(Self { running: BTreeMap::new(), logs, guard: guard.map(Guard::start).transpose()? })
    }

    /// Starts `command` under `name`.
    pub fn start(&mut self, name: &str, mut command: Command) -> io::Result<()> {
        let log = File::options().create(true).append(true).open(self.log(name))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).env("NO_COLOR", "1").process_group(0).kill_on_drop(true);
        let child = command.spawn()?;
        if let (Some(guard), Some(id)) = (&mut self.guard, child.id()) {
            guard.add(id)?;
        }
        self.running.insert(name.to_owned(), child);
        Ok(())
    }

    /// Where the output of `name` goes.
    pub fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    /// Whether `name` was started and has not been seen to end.
    pub fn is_running(&self, name: &str) -> bool {
        self.running.contains_key(name)
    }

    /// Names of those that run.
    pub fn names(&self) -> Vec<String> {
        self.running.keys().cloned().collect()
    }

    /// SIGKILL, and waits for the end; how it ended, if it ran.
    pub async fn kill(&mut self, name: &str) -> io::Result<Option<ExitStatus>> {
        let Some(child) = self.running.get_mut(name) else { return Ok(None) };
        let id = child.id();
        // An error means that it has ended by itself: waiting says how.
        let _ = child.start_kill();
        let status = child.wait().await?;
        self.running.remove(name);
        self.forget(id);
        Ok(Some(status))
    }

    /// SIGTERM. Says nothing about whether it ends.
    pub fn terminate(&self, name: &str) {
        let id = self.running.get(name).and_then(Child::id).and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = id {
            // The process may have ended by itself meanwhile: it is not reaped, so the id is still its.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Those that have ended since the last call, and how.
    pub fn ended(&mut self) -> io::Result<Vec<(String, ExitStatus)>> {
        let mut ended = Vec::new();
        for (name, child) in &mut self.running {
            let id = child.id();
            if let Some(status) = child.try_wait()? {
                ended.push((name.clone(), status, id));
            }
        }
        for (name, _, id) in &ended {
            self.running.remove(name);
            self.forget(*id);
        }
        Ok(ended.into_iter().map(|(name, status, _)| (name, status)).collect())
    }

    /// Waits until those in `names` have ended, at most for `bound`; whether they have.
    pub async fn wait(&mut self, names: &[String], bound: Duration) -> io::Result<bool> {
        let all_ended = async {
            loop {
                self.ended()?;
                if !names.iter().any(|name| self.is_running(name)) {
                    return Ok(());
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::time::timeout(bound, all_ended).await.map_or(Ok(false), |result: io::Result<()>| result.map(|()| true))
    }

    /// Asks those in `names` to end and makes them end after `bound`; whether asking was enough.
    pub async fn stop(&mut self, names: &[String], bound: Duration) -> io::Result<bool> {
        for name in names {
            self.terminate(name);
        }
        let kindly = self.wait(names, bound).await?;
        for name in names {
            self.kill(name).await?;
        }
        Ok(kindly)
    }

    /// The last line that `name` wrote that says something, without what only a log needs.
    pub fn last_words(&self, name: &str) -> String {
        tail(&self.log(name)).unwrap_or_default()
    }

    fn forget(&mut self, id: Option<u32>) {
        if let (Some(guard), Some(id)) = (&mut self.guard, id) {
            // A guard that is gone only means that nobody guards us.
            let _ = guard.remove(id);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            let _ = child.start_kill();
        }
        // A killed process is gone at once unless the kernel is at work for it. Reaped and taken off
        // the guard's list here, it does not keep the guard.
        for _ in 0..REAP_LOOKS {
            if self.ended().is_err() || self.running.is_empty() {
                break;
            }
            std::thread::sleep(LOOK_EVERY / 5);
        }
    }
}

/// The last line in a file that is not empty.
fn tail(path: &Path) -> io::Result<String> {
    const TAIL_BYTES: u64 = 4096;
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn processes(folder: &Path) -> Processes {
        Processes::new(folder.join("logs"), None).expect("a fresh folder")
    }

    /// Waits for a process to say that it is ready for signals.
    async fn ready(processes: &Processes, name: &str) {
        while processes.last_words(name) != "ready" {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    #[tokio::test]
    async fn output_goes_to_a_file_and_an_end_is_seen_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut processes = processes(folder.path());
        processes.start("a", shell("echo one; echo two >&2; echo; exit 3")).expect("sh is there");
        let mut ended = Vec::new();
        while processes.is_running("a") {
            ended.extend(processes.ended().expect("ours"));
            tokio::time::sleep(LOOK_EVERY).await;
        }
        assert_eq!(ended.iter().map(|(name, status)| (name.as_str(), status.code())).collect::<Vec<_>>(), [("a", Some(3))]);
        assert_eq!(processes.last_words("a"), "two");
    }

    #[tokio::test]
    async fn asking_is_enough_or_it_is_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut processes = processes(folder.path());
        processes.start("kind", shell("echo ready; exec sleep 60")).expect("sh is there");
        processes.start("stubborn", shell("trap '' TERM; echo ready; while :; do sleep 0.05; done")).expect("sh is there");
        ready(&processes, "kind").await;
        ready(&processes, "stubborn").await;
        assert!(processes.stop(&["kind".to_owned()], LONG).await.expect("ours"));
        assert!(!processes.stop(&["stubborn".to_owned()], Duration::from_millis(200)).await.expect("ours"));
        assert!(processes.names().is_empty());
    }

    #[tokio::test]
    async fn whoever_drops_them_kills_them() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut processes = processes(folder.path());
        processes.start("a", shell("echo $$; exec sleep 60")).expect("sh is there");
        while processes.last_words("a").is_empty() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let pid = Pid::from_raw(processes.last_words("a").parse().expect("a number")).expect("not 0");
        drop(processes);
        assert!(rustix::process::test_kill_process(pid).is_err(), "it is dead and reaped");
    }

    #[tokio::test]
    async fn a_kill_is_a_sigkill() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut processes = processes(folder.path());
        processes.start("a", shell("exec sleep 60")).expect("sh is there");
        assert_eq!(processes.kill("a").await.expect("ours").and_then(|status| status.signal()), Some(9));
        assert!(!processes.is_running("a") && processes.kill("a").await.expect("nothing to do").is_none());
    }
}
