//! A small process of its own that ends what this one started, should this one die without doing
//! so (SIGKILL, a crash, no memory left).
//!
//! It reads process ids from a pipe. The kernel closes the pipe however its writer dies; what is
//! still on the list then is asked to end, and made to when it does not.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// How often the guard looks whether a process has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// So long a process may take to end after it was asked to: a checkpoint is written meanwhile.
const PATIENCE: Duration = Duration::from_secs(25);

/// The writing end: the process that starts others.
#[derive(Debug)]
pub struct Guard {
    list: Option<ChildStdin>,
    process: Child,
}

impl Guard {
    /// Starts `program guard`, which must end in [`watch`].
    pub fn start(program: &Path) -> io::Result<Self> {
        let mut command = Command::new(program);
        // Its own group: a Ctrl-C at the terminal is not for it.
        command.arg("guard").process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn()?;
        Ok(Self { list: process.stdin.take(), process })
    }

    /// Puts a process on the list.
    pub fn add(&mut self, id: u32) -> io::Result<()> {
        self.write('+', id)
    }

    /// Takes a process off the list: it has ended.
    pub fn remove(&mut self, id: u32) -> io::Result<()> {
        self.write('-', id)
    }

    fn write(&mut self, sign: char, id: u32) -> io::Result<()> {
        let Some(list) = &mut self.list else { return Ok(()) };
        writeln!(list, "{sign}{id}")?;
        list.flush()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.list.take());
        // Everything on the list has ended by now as a rule; the guard sees that and ends too.
        let _ = self.process.wait();
    }
}

/// The guard itself: reads the list from `input` to its end, then ends what is on it, in order.
pub fn watch(input: impl io::Read) {
    watch_with(input, PATIENCE);
}

fn watch_with(input: impl io::Read, patience: Duration) {
    let mut list: Vec<Pid> = Vec::new();
    for line in BufReader::new(input).lines() {
        let Ok(line) = line else { break };
        let Some((sign, id)) = line.split_at_checked(1) else { continue };
        let Some(pid) = id.parse().ok().and_then(Pid::from_raw) else { continue };
        list.retain(|other| *other != pid);
        if sign == "+" {
            list.push(pid);
        }
    }
    // The first is the coordinator, which needs the others for its checkpoint.
    if let Some((first, rest)) = list.split_first() {
        end(&[*first], patience);
        end(rest, patience / 4);
    }
}

/// Asks processes to end, and makes them end after `patience`.
fn end(list: &[Pid], patience: Duration) {
    for pid in list {
        let _ = kill_process(*pid, Signal::TERM);
    }
    let mut waited = Duration::ZERO;
    while list.iter().any(|pid| is_alive(*pid)) {
        if waited >= patience {
            for pid in list {
                let _ = kill_process(*pid, Signal::KILL);
            }
            return;
        }
        std::thread::sleep(LOOK_EVERY);
        waited += LOOK_EVERY;
    }
}

fn is_alive(pid: Pid) -> bool {
    test_kill_process(pid).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn sleeper(script: &str) -> (Child, String) {
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("sh is there");
        // It has set up what it does on a signal once it says so.
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it speaks");
        let id = child.id().to_string();
        (child, id)
    }

    #[test]
    fn what_is_on_the_list_ends_with_it() {
        let (mut kind, kind_id) = sleeper("echo ready; exec sleep 60");
        let (mut stubborn, stubborn_id) = sleeper("trap '' TERM; echo ready; while :; do sleep 0.05; done");
        let (mut other, other_id) = sleeper("echo ready; exec sleep 60");
        // Zombies still answer signal 0, so each is reaped while the guard works.
        let reapers = [std::thread::spawn(move || kind.wait()), std::thread::spawn(move || stubborn.wait())];
        watch_with(format!("+{kind_id}\n+{other_id}\nnonsense\n\n+{stubborn_id}\n-{other_id}\n").as_bytes(), Duration::from_millis(400));
        let signals: Vec<Option<i32>> = reapers.map(|reaper| reaper.join().expect("no panic").expect("reaped").signal()).to_vec();
        assert_eq!(signals, [Some(15), Some(9)]);
        assert!(other.try_wait().expect("ours").is_none(), "taken off the list");
        other.kill().expect("ours");
        other.wait().expect("ours");
    }
}
