//! Sessions with shell scripts in the place of coordinator and node, and a page that the test
//! writes.

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::*;
use crate::local::progress::Begin;

const RUN: &str = r#"
[run]
name = "test"
steps = 10
[model]
vocab_size = 256
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[data]
manifest = "0000000000000000000000000000000000000000000000000000000000000000"
[batch]
microbatches = 4
sequences = 2
length = 64
"#;

const CLUSTER: &str = r#"
[cluster]
run = "run.toml"
out = "OUT"
data = "data"
[[node]]
name = "a"
compute_share = 0.5
[[node]]
name = "b"
[[node]]
name = "c"
data = false
memory_limit = "2GiB"
threads = 1
[[event]]
at_fraction = 0.5
kill = "b"
[[event]]
at_step = 7
start = "c"
"#;

const COORDINATOR: &str = r#"#!/bin/sh
all="$*"
while [ $# -gt 0 ]; do
  [ "$1" = --state ] && state=$2
  shift
done
FAIL
echo "$all" > "$state/arguments"
trap 'echo coordinator >> "$state/../order"; exit 0' TERM
echo '{"control": ["/ip4/127.0.0.1/tcp/7/p2p/key"], "http": "http://HTTP", "peer_id": "key"}' > "$state/draft" && mv "$state/draft" "$state/endpoints.json"
while :; do sleep 0.02; done
"#;

const NODE: &str = r#"#!/bin/sh
all="$*"
command=$1
while [ $# -gt 0 ]; do
  [ "$1" = --state ] && state=$2
  shift
done
name=$(basename "$state")
if [ "$command" = identity ]; then
  printf '%064x\n' "'$name"
  exit 0
fi
trap 'echo node >> "$state/../../order"; exit 0' TERM
echo "$$" > "$state/pid"
echo "$all" > "$state/arguments"
while :; do sleep 0.02; done
"#;

#[derive(Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl View for Notes {
    fn show(&mut self, _: &Scene<'_>) {}

    fn note(&mut self, line: &str) {
        self.0.lock().expect("no test panics with it").push(line.to_owned());
    }

    fn end(&mut self) {}
}

/// A folder with scripts, and a page about the run.
struct Stage {
    folder: tempfile::TempDir,
    status: watch::Sender<Status>,
    http: String,
}

impl Stage {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let http = listener.local_addr().expect("bound").to_string();
        let status = watch::Sender::new(Status { state: "training".to_owned(), steps: 10, tokens_per_second: 1000.0, ..Status::default() });
        let page = status.subscribe();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let body = serde_json::to_string(&*page.borrow()).expect("plain fields");
                let _ = stream.write_all(format!("HTTP/1.0 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await;
            }
        });
        Self { folder: tempfile::tempdir().expect("a temporary folder"), status, http }
    }

    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text.replace("HTTP", &self.http)).expect("a folder of ours");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a file of ours");
        path
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn plan(&self, failure: &str) -> Plan {
        let cluster = Cluster::from_toml(&CLUSTER.replace("OUT", &self.out().display().to_string())).expect("valid");
        let programs =
            Programs { coordinator: self.script("coordinator", &COORDINATOR.replace("FAIL", failure)), node: self.script("node", NODE), guard: None };
        Plan { cluster: cluster.located(self.folder.path()), run: RunConfig::from_toml(RUN).expect("valid"), programs }
    }

    async fn session(&self, begin: Begin) -> (Session, watch::Sender<u32>, Arc<Mutex<Vec<String>>>) {
        let (sender, stop) = Stop::by_hand();
        let notes = Notes::default();
        let written = Arc::clone(&notes.0);
        let progress = Progress::begin(&self.out(), begin, "x").expect("as the test wants it");
        let session = Session::start(self.plan(""), progress, begin == Begin::Resume, Box::new(notes), stop).await.expect("starts");
        (session, sender, written)
    }

    fn arguments(&self, of: &str) -> String {
        fs::read_to_string(self.out().join(of).join("arguments")).unwrap_or_default()
    }

    /// Waits until `condition` holds; the runner's hang guard ends it if it never does.
    async fn until(&self, condition: impl Fn() -> bool) {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn started(&self, name: &str) {
        self.until(|| self.arguments(&format!("nodes/{name}")).ends_with('\n')).await;
    }

    fn at_step(&self, step: u64) {
        self.status.send_modify(|status| status.step = step);
    }

    fn order(&self) -> Vec<String> {
        fs::read_to_string(self.out().join("order")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn a_run_with_a_kill_and_a_fresh_node() {
    let stage = Stage::new().await;
    let (mut session, _sender, notes) = stage.session(Begin::Plain).await;
    let story = async {
        stage.started("a").await;
        stage.started("b").await;
        assert_eq!(stage.arguments("nodes/c"), "", "c comes later");
        stage.status.send_modify(|status| status.losses = vec![(0, 6.9)]);
        stage.at_step(5);
        stage.until(|| notes.lock().expect("no panic").iter().any(|line| line == "step 5: killed b with SIGKILL")).await;
        stage.at_step(8);
        stage.started("c").await;
        stage.status.send_modify(|status| (status.step, status.state, status.microbatches_redone) = (10, "finished".to_owned(), 2.5));
    };
    let (ending, ()) = tokio::join!(session.watch(), story);
    assert_eq!(ending.expect("goes well"), Ending::Finished);
    let (out, folder) = (stage.out(), stage.folder.path());
    let expected = format!(
        "start --coordinator /ip4/127.0.0.1/tcp/7/p2p/key --name a --state {0}/nodes/a --data {1}/data --compute-share 0.5\n",
        out.display(),
        folder.display()
    );
    assert_eq!(stage.arguments("nodes/a"), expected);
    let expected = format!("start --coordinator /ip4/127.0.0.1/tcp/7/p2p/key --name c --state {}/nodes/c --memory-limit 2GiB --threads 1\n", out.display());
    assert_eq!(stage.arguments("nodes/c"), expected);
    assert_eq!((session.killed(), session.redone()), (vec!["b".to_owned()], 2.5));
    assert_eq!((session.progress().first_loss, session.progress().fired.clone()), (Some(6.9), vec![0, 1]));

    session.conclude().expect("a folder of ours");
    session.stop().await.expect("goes well");
    assert_eq!(stage.order(), ["coordinator", "node", "node"], "the coordinator ends first, and b cannot say anything");
    assert!(session.processes.names().is_empty());
    assert!(Progress::begin(&out, Begin::Resume, "x").is_err(), "it is finished");
}

#[tokio::test]
async fn an_interrupted_run_goes_on_with_who_was_left() {
    let stage = Stage::new().await;
    let (mut session, sender, _) = stage.session(Begin::Plain).await;
    let story = async {
        stage.started("a").await;
        stage.started("b").await;
        stage.at_step(8);
        stage.started("c").await;
        sender.send_modify(|count| *count += 1);
    };
    let (ending, ()) = tokio::join!(session.watch(), story);
    assert_eq!(ending.expect("goes well"), Ending::Interrupted);
    assert_eq!(stage.order(), ["coordinator", "node", "node"]);
    assert!(session.processes.names().is_empty());
    assert!(!stage.arguments("coordinator").contains("--resume"));
    drop(session);

    for name in ["a", "b", "c"] {
        fs::remove_file(stage.out().join("nodes").join(name).join("arguments")).expect("it was started before");
    }
    let (mut session, sender, _) = stage.session(Begin::Resume).await;
    stage.started("a").await;
    stage.started("c").await;
    sender.send_modify(|count| *count += 1);
    assert_eq!(session.watch().await.expect("goes well"), Ending::Interrupted);
    assert_eq!(stage.arguments("nodes/b"), "", "b stays dead");
    assert!(stage.arguments("coordinator").trim_end().ends_with("--resume"));
    assert_eq!(session.killed(), ["b"]);
}

#[tokio::test]
async fn a_coordinator_that_fails_is_quoted() {
    let stage = Stage::new().await;
    let (_sender, stop) = Stop::by_hand();
    let plan = stage.plan("echo 'error: run.toml: it is full of eels' >&2; exit 2");
    let error = Session::start(plan, Progress::default(), false, Box::new(Notes::default()), stop).await.err().expect("fails");
    let expected = "the coordinator ended (exit status: 2): error: run.toml: it is full of eels (all it said is in ";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[tokio::test]
async fn a_coordinator_that_dies_later_ends_the_watch() {
    let stage = Stage::new().await;
    let (mut session, _sender, _) = stage.session(Begin::Plain).await;
    stage.started("a").await;
    session.processes.terminate(super::COORDINATOR);
    let error = session.watch().await.expect_err("there is nothing to watch");
    assert!(error.to_string().starts_with("the coordinator ended (exit status: 0)"), "{error}");
}

#[tokio::test]
async fn nodes_that_end_by_themselves_are_told_of() {
    let stage = Stage::new().await;
    let (mut session, _sender, notes) = stage.session(Begin::Plain).await;
    stage.started("a").await;
    stage.started("b").await;
    session.processes.terminate("a");
    session.processes.terminate("b");
    let error = session.watch().await.expect_err("nobody is left");
    assert!(error.to_string().starts_with("the last node, "), "{error}");
    assert!(notes.lock().expect("no panic").iter().any(|line| line.starts_with("a ended (exit status: 0)")));
}
