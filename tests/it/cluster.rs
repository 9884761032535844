//! Real programs on loopback: starts them, watches them, ends them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use skein_coordinator::status::Status;
use tempfile::TempDir;

/// A guard against hanging, not a limit on how long things may take.
const GUARD: Duration = Duration::from_secs(150);
/// Between two looks at a condition.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A program of ours, beside the test executable.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let path = test.ancestors().nth(2).expect("a target folder").join(name);
    assert!(path.is_file(), "{} is missing: cargo build -p skein-node, then -p skein-coordinator -p skein-sim", path.display());
    path
}

/// Runs a program to its end.
pub(crate) fn run(name: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program(name));
    command.args(arguments).env("OMP_NUM_THREADS", "1").env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    command.output().expect("the program starts")
}

/// Runs a program that must succeed; what it printed.
pub(crate) fn output(name: &str, arguments: &[&str]) -> String {
    let output = run(name, arguments);
    assert!(output.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Looks until `found` finds something.
pub(crate) fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(it) = found() {
            return it;
        }
        assert!(begun.elapsed() < GUARD, "waited in vain for {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A coordinator and nodes, each with a folder of its own, and their data.
pub(crate) struct Cluster {
    folder: TempDir,
    coordinator: Option<Child>,
    nodes: BTreeMap<String, Child>,
    control_port: u16,
}

impl Cluster {
    /// A folder with data and a `run.toml`; nothing runs yet. `settings` are appended to the
    /// tables `[run]`, `[placement]` and `[checkpoint]` in this order.
    pub(crate) fn new(run: &str, placement: &str, checkpoint: &str) -> Self {
        let cluster = Self { folder: tempfile::tempdir().expect("a temporary folder"), coordinator: None, nodes: BTreeMap::new(), control_port: 0 };
        std::fs::write(cluster.path("text.txt"), text()).expect("written");
        let built = output("skein-node", &["data", "build", "--json", "--out", &cluster.shown("data"), &cluster.shown("text.txt")]);
        let built: serde_json::Value = serde_json::from_str(built.trim()).expect("JSON");
        let manifest = built["manifest"].as_str().expect("a hash");
        let config = format!(
            "[run]\nname = \"test\"\n{run}\n\
             [model]\nvocab_size = 256\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 4\nnum_attention_heads = 2\n\
             num_key_value_heads = 1\nmax_position_embeddings = 32\ntie_word_embeddings = true\n\
             [data]\nmanifest = \"{manifest}\"\n\
             [batch]\nmicrobatches = 8\nsequences = 2\nlength = 32\n\
             [optimizer]\nlearning_rate = 3e-3\nwarmup_steps = 5\n\
             [reduce]\nchunk = 4096\n\
             [placement]\n{placement}\n[checkpoint]\n{checkpoint}\n"
        );
        std::fs::write(cluster.path("run.toml"), config).expect("written");
        cluster
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Changes a piece of `run.toml`.
    pub(crate) fn edit_run(&self, from: &str, to: &str) {
        let path = self.path("run.toml");
        let text = std::fs::read_to_string(&path).expect("written before");
        assert!(text.contains(from), "no `{from}` in run.toml");
        std::fs::write(&path, text.replace(from, to)).expect("written");
    }

    /// Starts the coordinator, on the port it had before if it had one.
    pub(crate) fn start_coordinator(&mut self, resume: bool) {
        let state = self.path("coordinator");
        let _ = std::fs::remove_file(state.join("endpoints.json"));
        let listen = format!("127.0.0.1:{}", self.control_port);
        let mut command = Command::new(program("skein-coordinator"));
        command.args(["start", "--run", &self.shown("run.toml"), "--state", &self.shown("coordinator"), "--listen", &listen]);
        if resume {
            command.arg("--resume");
        }
        self.coordinator = Some(self.spawn("coordinator", &mut command));
        let endpoints = wait_for("endpoints.json", || read_json(&state.join("endpoints.json")));
        let address = endpoints["control"][0].as_str().expect("an address").to_owned();
        self.control_port = address.split('/').nth(4).and_then(|port| port.parse().ok()).expect("a port");
    }

    pub(crate) fn address(&self) -> String {
        let endpoints = read_json(&self.path("coordinator").join("endpoints.json")).expect("the coordinator is up");
        endpoints["control"][0].as_str().expect("an address").to_owned()
    }

    /// Starts a node with its folder, bringing the data along.
    pub(crate) fn start_node(&mut self, name: &str, more: &[&str]) {
        let mut command = Command::new(program("skein-node"));
        command.args(["start", "--coordinator", &self.address(), "--state", &self.shown(name), "--data", &self.shown("data")]).args(more);
        let child = self.spawn(name, &mut command);
        assert!(self.nodes.insert(name.to_owned(), child).is_none(), "{name} runs already");
    }

    /// Starts a program that logs into a file of its own. What the tests read in it does not depend
    /// on whoever runs them.
    fn spawn(&self, name: &str, command: &mut Command) -> Child {
        let log = std::fs::File::options().create(true).append(true).open(self.path(&format!("{name}.log"))).expect("a log");
        let plain = command.env("OMP_NUM_THREADS", "1").env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
        plain.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("the program starts")
    }

    pub(crate) fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// SIGKILL.
    pub(crate) fn kill_node(&mut self, name: &str) {
        let mut child = self.nodes.remove(name).expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    /// SIGKILL.
    pub(crate) fn kill_coordinator(&mut self) {
        let mut child = self.coordinator.take().expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    /// SIGTERM, and waits for the end.
    pub(crate) fn stop_coordinator(&mut self) {
        let mut child = self.coordinator.take().expect("it runs");
        terminate(&child);
        assert!(wait_for("the coordinator's end", || child.try_wait().expect("it is ours")).success());
    }

    /// SIGTERM, and waits for the end of every node.
    pub(crate) fn stop_nodes(&mut self) {
        for child in self.nodes.values() {
            terminate(child);
        }
        for (name, mut child) in std::mem::take(&mut self.nodes) {
            let status = wait_for("a node's end", || child.try_wait().expect("it is ours"));
            assert!(status.success(), "{name}: {}", self.log(&name));
        }
    }

    /// Whether every node process still is the one that was started.
    pub(crate) fn all_nodes_run(&mut self) -> bool {
        self.nodes.values_mut().all(|child| child.try_wait().expect("it is ours").is_none())
    }

    pub(crate) fn status(&self) -> Option<Status> {
        let endpoints = read_json(&self.path("coordinator").join("endpoints.json"))?;
        let address = endpoints["http"].as_str()?.strip_prefix("http://")?.to_owned();
        let mut stream = TcpStream::connect(&address).ok()?;
        stream.set_read_timeout(Some(GUARD)).ok()?;
        stream.write_all(format!("GET /status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// Waits until the status is as wanted.
    pub(crate) fn until(&mut self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let mut last = None;
        let begun = Instant::now();
        loop {
            for (name, child) in
                self.nodes.iter_mut().map(|(name, child)| (name.as_str(), child)).chain(self.coordinator.iter_mut().map(|child| ("coordinator", child)))
            {
                if let Some(status) = child.try_wait().expect("it is ours") {
                    let log = std::fs::read_to_string(self.folder.path().join(format!("{name}.log"))).unwrap_or_default();
                    panic!("{name} ended ({status}) while waiting for {what}: {log}");
                }
            }
            if let Some(status) = self.status() {
                if wanted(&status) {
                    return status;
                }
                last = Some(status);
            }
            if begun.elapsed() > GUARD {
                let logs: Vec<String> = self.nodes.keys().map(|name| format!("{name}: {}", self.log(name))).collect();
                panic!("waited in vain for {what}: {last:#?}\ncoordinator: {}\n{}", self.log("coordinator"), logs.join("\n"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.nodes.values_mut().chain(&mut self.coordinator) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn terminate(child: &Child) {
    let done = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
    assert!(done.success(), "the process is there");
}

pub(crate) fn read_json(path: &Path) -> Option<serde_json::Value> {
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

/// Text with something to learn in it: made-up words by a rule, 200 kB.
fn text() -> String {
    let syllables = ["ka", "lo", "mi", "ne", "ru", "sta", "ti", "vo"];
    let mut state = 12_345u32;
    let mut text = String::new();
    while text.len() < 200_000 {
        let word = (0..1 + state % 3).map(|index| syllables[((state >> (4 * index)) % 8) as usize]).collect::<String>();
        text.push_str(&word);
        text.push(if state.is_multiple_of(11) { '\n' } else { ' ' });
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) >> 3;
    }
    text
}
