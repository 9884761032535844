//! What the user asks for: flags and `run.toml`, checked once.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use skein_protocol::config::{ConfigError, RunConfig};
use skein_protocol::id::NodeId;
use skein_protocol::net::Multiaddr;

use crate::record::Record;
use crate::state::{Endpoints, StateError};
use crate::store::LOG_FILE;

/// Coordinates one training run: plans who hosts what, counts the work, keeps the log.
#[derive(Debug, Parser)]
#[command(name = "skein-coordinator", version, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a run, or go on with one
    #[command(after_help = START_EXAMPLE)]
    Start(StartArgs),
    /// Show how a run stands
    #[command(after_help = STATUS_EXAMPLE)]
    Status(StatusArgs),
}

const START_EXAMPLE: &str = "\
Examples:
  skein-coordinator start --run run.toml --state state --listen 0.0.0.0:7700
  skein-coordinator start --run run.toml --state state --listen 0.0.0.0:7700 --resume

It prints the address that nodes are given, and writes it to endpoints.json in the state folder.
Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.";

const STATUS_EXAMPLE: &str = "\
Examples:
  skein-coordinator status --state state
  skein-coordinator status --state 127.0.0.1:7701 --json";

/// Flags of `start`.
#[derive(Clone, Debug, Args)]
pub struct StartArgs {
    /// The run's configuration
    #[arg(long, value_name = "FILE")]
    pub run: PathBuf,
    /// Folder for the log, the key and endpoints.json; made if missing
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// Where nodes connect: IP:PORT or a multiaddr; port 0 takes a free one
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub listen: Multiaddr,
    /// Where /status is served: IP:PORT
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub http: SocketAddr,
    /// Go on with the run in the state folder
    #[arg(long)]
    pub resume: bool,
}

/// Flags of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// The coordinator's state folder, or where it serves /status: IP:PORT
    #[arg(long, value_name = "DIR|ADDR")]
    pub state: PathBuf,
    /// Print all of it as JSON
    #[arg(long)]
    pub json: bool,
}

/// What is wrong with what the user asks for. One line: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The configuration cannot be read.
    #[error("cannot read {} ({problem}); check --run", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
    /// The configuration is no good.
    #[error("{}: {}", path.display(), one_line(error))]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        error: ConfigError,
    },
    /// A run is there and nobody said to go on with it.
    #[error("{} already holds a run; add --resume to go on with it, or choose another --state", path.display())]
    AlreadyBegun {
        /// The state folder.
        path: PathBuf,
    },
    /// There is nothing to go on with.
    #[error("{} holds no run to resume; check --state, or leave out --resume to start one", path.display())]
    NothingToResume {
        /// The state folder.
        path: PathBuf,
    },
    /// The configuration is that of another run.
    #[error("{} is not the run in {}: {differences}; put these back, or choose another --state for a new run", run.display(), state.display())]
    AnotherRun {
        /// The configuration file.
        run: PathBuf,
        /// The state folder.
        state: PathBuf,
        /// Which settings differ, and how.
        differences: String,
    },
    /// The log begins with something else than the run's configuration.
    #[error("{} does not begin with a run's configuration; choose another --state", path.display())]
    NoRun {
        /// The state folder.
        path: PathBuf,
    },
    /// Neither a folder nor an address.
    #[error("`{0}` is neither a state folder nor IP:PORT; give one of them to --state")]
    NoCoordinator(String),
    /// The state folder does not help.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Reads and checks a `run.toml`.
pub fn read_config(path: &Path) -> Result<RunConfig, SettingsError> {
    let text = std::fs::read_to_string(path).map_err(|error| SettingsError::Unreadable { path: path.to_owned(), problem: error.to_string() })?;
    RunConfig::from_toml(&text).map_err(|error| SettingsError::Config { path: path.to_owned(), error })
}

/// Whether there is a log to go on with, if that is asked for. Touches nothing.
pub fn check_log_exists(args: &StartArgs) -> Result<(), SettingsError> {
    let missing = args.resume && !args.state.join(LOG_FILE).exists();
    if missing { Err(SettingsError::NothingToResume { path: args.state.clone() }) } else { Ok(()) }
}

/// Whether `args` may go on with, or begin, the log as it is found.
pub fn check_resume(args: &StartArgs, config: &RunConfig, coordinator: NodeId, log: &[Record]) -> Result<(), SettingsError> {
    let path = args.state.clone();
    let Some(first) = log.first() else { return Ok(()) };
    if !args.resume {
        return Err(SettingsError::AlreadyBegun { path });
    }
    let Record::Run { config: text } = first else { return Err(SettingsError::NoRun { path }) };
    let begun = RunConfig::from_toml(text).map_err(|error| SettingsError::Config { path: args.state.join(LOG_FILE), error })?;
    if begun.run_id(coordinator) == config.run_id(coordinator) {
        return Ok(());
    }
    Err(SettingsError::AnotherRun { run: args.run.clone(), state: path, differences: differences(&begun, config) })
}

/// Where `status` asks: the address itself, or what the state folder says.
pub fn status_address(state: &Path) -> Result<SocketAddr, SettingsError> {
    let text = state.to_string_lossy();
    if !state.is_dir()
        && let Some(address) = http_address(&text)
    {
        return Ok(address);
    }
    if !state.is_dir() {
        return Err(SettingsError::NoCoordinator(text.into_owned()));
    }
    let endpoints = Endpoints::read(state)?;
    http_address(&endpoints.http).ok_or(SettingsError::NoCoordinator(endpoints.http))
}

fn http_address(text: &str) -> Option<SocketAddr> {
    text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/').parse().ok()
}

/// Where to listen: `127.0.0.1:0` means `/ip4/127.0.0.1/tcp/0`.
fn listen_address(text: &str) -> Result<Multiaddr, String> {
    let help = "expected IP:PORT such as 0.0.0.0:7700, or a multiaddr such as /ip4/0.0.0.0/tcp/7700";
    let multiaddr = if text.starts_with('/') {
        text.to_owned()
    } else {
        let address: SocketAddr = text.parse().map_err(|_| help.to_owned())?;
        format!("/{}/{}/tcp/{}", if address.is_ipv4() { "ip4" } else { "ip6" }, address.ip(), address.port())
    };
    multiaddr.parse().map_err(|_| help.to_owned())
}

/// The settings that make two configurations different runs, as `key = new (was old)`.
fn differences(old: &RunConfig, new: &RunConfig) -> String {
    let (old, new) = (flat(old), flat(new));
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let missing = String::from("unset");
    let mut lines = Vec::new();
    // What does not change the run's name may differ; see `RunConfig::run_id`.
    for key in keys.into_iter().filter(|key| *key != "run.name" && !key.starts_with("placement.") && !key.starts_with("checkpoint.")) {
        let (was, is) = (old.get(key).unwrap_or(&missing), new.get(key).unwrap_or(&missing));
        if was != is {
            lines.push(format!("{key} = {is} (was {was})"));
        }
    }
    lines.join(", ")
}

fn flat(config: &RunConfig) -> BTreeMap<String, String> {
    let table: toml::Table = config.to_toml().parse().expect("written by us");
    let sections = table.iter().filter_map(|(section, value)| Some((section, value.as_table()?)));
    sections.flat_map(|(section, keys)| keys.iter().map(move |(key, value)| (format!("{section}.{key}"), value.to_string()))).collect()
}

/// A syntax error comes with a drawing of the place; its first line says where, its last what.
fn one_line(error: &ConfigError) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    lines.next_back().map_or_else(|| first.to_owned(), |last| format!("{first}: {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use skein_protocol::id::Version;

    const RUN: &str = r#"
        run = { name = "test", steps = 100 }
        batch = { microbatches = 4, sequences = 2, length = 64 }
        data = { manifest = "0000000000000000000000000000000000000000000000000000000000000000" }
        [model]
        vocab_size = 256
        hidden_size = 64
        intermediate_size = 128
        num_hidden_layers = 2
        num_attention_heads = 4
        num_key_value_heads = 2
        max_position_embeddings = 64
    "#;

    fn config(text: &str) -> RunConfig {
        RunConfig::from_toml(text).expect("valid")
    }

    fn args(resume: bool) -> StartArgs {
        StartArgs { run: "run.toml".into(), state: "state".into(), listen: Multiaddr::empty(), http: SocketAddr::from(([127, 0, 0, 1], 0)), resume }
    }

    fn resume(resume: bool, text: &str, log: &[Record]) -> String {
        match check_resume(&args(resume), &config(text), NodeId([1; 32]), log) {
            Ok(()) => "ok".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn going_on_takes_the_flag_a_log_and_the_same_run() {
        let log = [Record::Run { config: config(RUN).to_toml() }];
        assert_eq!(resume(false, RUN, &[]), "ok");
        assert_eq!(resume(true, RUN, &log), "ok");
        assert_eq!(resume(true, RUN, &[]), "ok", "stopped before its first record");
        let nothing = check_log_exists(&args(true)).expect_err("no such folder").to_string();
        assert_eq!(nothing, "state holds no run to resume; check --state, or leave out --resume to start one");
        check_log_exists(&args(false)).expect("a new run needs none");
        assert_eq!(resume(false, RUN, &log), "state already holds a run; add --resume to go on with it, or choose another --state");
        assert_eq!(resume(true, RUN, &[Record::Checkpoint { version: Version(1) }]), "state does not begin with a run's configuration; choose another --state");
        assert_eq!(resume(true, &RUN.replace("\"test\"", "\"renamed\""), &log), "ok", "the name is not part of the run");
        assert_eq!(
            resume(true, &RUN.replace("steps = 100", "steps = 200").replace("microbatches = 4", "microbatches = 8"), &log),
            "run.toml is not the run in state: batch.microbatches = 8 (was 4), run.steps = 200 (was 100); \
             put these back, or choose another --state for a new run"
        );
    }

    #[test]
    fn addresses_to_listen_on() {
        let listen = |text: &str| listen_address(text).map(|address| address.to_string());
        assert_eq!(listen("127.0.0.1:0"), Ok("/ip4/127.0.0.1/tcp/0".to_owned()));
        assert_eq!(listen("[::]:7700"), Ok("/ip6/::/tcp/7700".to_owned()));
        assert_eq!(listen("/ip4/0.0.0.0/tcp/1"), Ok("/ip4/0.0.0.0/tcp/1".to_owned()));
        assert!(listen("localhost").is_err() && listen("/nonsense").is_err());
    }

    #[test]
    fn where_status_asks() {
        let address = SocketAddr::from(([127, 0, 0, 1], 7701));
        assert_eq!(status_address(Path::new("127.0.0.1:7701")).expect("an address"), address);
        assert_eq!(status_address(Path::new("http://127.0.0.1:7701/")).expect("an address"), address);
        assert_eq!(
            status_address(Path::new("no/such/folder")).expect_err("neither").to_string(),
            "`no/such/folder` is neither a state folder nor IP:PORT; give one of them to --state"
        );
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert!(matches!(status_address(folder.path()), Err(SettingsError::State(StateError::NoEndpoints { .. }))));
    }

    #[test]
    fn a_bad_configuration_is_one_line_with_file_and_key() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("run.toml");
        let problem = |text: &str| {
            std::fs::write(&path, text).expect("writes");
            let line = read_config(&path).expect_err("bad").to_string();
            line.replace(&folder.path().display().to_string(), "DIR")
        };
        assert_eq!(problem(&RUN.replace("hidden_size = 64", "hidden_sise = 64")), "DIR/run.toml: unknown key `hidden_sise`: did you mean `hidden_size`?");
        assert_eq!(problem(&RUN.replace("steps = 100", "steps = 0")), "DIR/run.toml: run.steps = 0: must be at least 1");
        assert_eq!(problem("run = {").lines().count(), 1);
        let missing = read_config(&folder.path().join("other.toml")).expect_err("missing").to_string();
        assert!(missing.contains("other.toml") && missing.ends_with("check --run"), "{missing}");
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
