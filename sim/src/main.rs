//! `skein-sim`: swarms on this machine.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use skein_sim::explore::{self, RecoveryArgs, ReplayArgs, RunArgs};
use skein_sim::local::command::{LocalArgs, local};
use skein_sim::local::demo::{DemoArgs, demo};
use skein_sim::local::error::LocalError;
use skein_sim::local::guard;
use tracing_subscriber::EnvFilter;

/// As clap and most tools use it: the command line makes no sense.
const USAGE: u8 = 2;
/// As shells use it: ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Runs whole swarms on this machine.
#[derive(Debug, Parser)]
#[command(name = "skein-sim", version, arg_required_else_help = true)]
struct Cli {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
enum Command {
    /// Train the toy model in virtual time under a scenario or drawn schedules of faults, and judge every run
    #[command(after_help = RUN_EXAMPLE)]
    Run(RunArgs),
    /// Run one schedule again, with everything that happens in the log
    #[command(after_help = REPLAY_EXAMPLE)]
    Replay(ReplayArgs),
    /// Lose one of four nodes in virtual time again and again: how long its work waits, as JSON
    #[command(after_help = RECOVERY_EXAMPLE)]
    Recovery(RecoveryArgs),
    /// Start one coordinator and several nodes as processes, and watch them train
    #[command(after_help = LOCAL_EXAMPLE)]
    Local(LocalArgs),
    /// The tour: data, training with a loss on the way, evaluation, export
    #[command(after_help = DEMO_EXAMPLE)]
    Demo(DemoArgs),
    /// Ends the processes whose ids come in on stdin, once stdin ends
    #[command(hide = true)]
    Guard,
}

const RUN_EXAMPLE: &str = "\
Example:
  skein-sim run --seed 0 --seeds 1000
  skein-sim run tests/scenarios/kill.toml --seeds 100

Every drawn run has a model, a batch, nodes and faults of its own, all drawn from the seed. It must end with
the weights of one undisturbed process, bit for bit. A seed that fails is shown with how to replay it.";

const REPLAY_EXAMPLE: &str = "\
Example:
  skein-sim replay --seed 17 --faults 3 2> events.log > scenario.toml

What was drawn is printed as a scenario: `skein-sim run scenario.toml` runs it again.";

const RECOVERY_EXAMPLE: &str = "\
Example:
  skein-sim recovery --samples 200";

const LOCAL_EXAMPLE: &str = "\
Example:
  skein-sim local --cluster cluster.toml

Ctrl-C stops everything and leaves a checkpoint; the same command with --resume goes on from it.
docs/operating.md describes the cluster's description.";

const DEMO_EXAMPLE: &str = "\
Example:
  skein-sim demo --text text --data data

`make demo` prepares the text and runs it.";

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let usual = if matches!(cli.command, Command::Replay(_)) { "skein_sim=trace" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual));
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(std::io::stderr).init();
    let result = match cli.command {
        Command::Guard => {
            guard::watch(std::io::stdin());
            return ExitCode::SUCCESS;
        }
        Command::Run(args) => return explored(explore::run(&args)),
        Command::Replay(args) => return explored(explore::replay(&args)),
        Command::Recovery(args) => return explored(explore::recovery(&args)),
        Command::Local(args) => in_runtime(local(args)),
        Command::Demo(args) => in_runtime(async {
            if let Some(text) = demo(args).await? {
                // A reader that has seen enough, such as `head`, is no failure.
                let _ = std::io::stdout().write_all(text.as_bytes());
            }
            Ok(())
        }),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(LocalError::Stopped(line)) => {
            eprintln!("{line}");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => failed(&error.to_string()),
    }
}

fn explored(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            // A reader that has seen enough is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Everything here waits for others: one thread is enough, and leaves the rest to those who compute.
fn in_runtime(work: impl Future<Output = Result<(), LocalError>>) -> Result<(), LocalError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|problem| LocalError::File { path: "runtime".into(), problem })?.block_on(work)
}

fn failed(problem: &str) -> ExitCode {
    let line: Vec<&str> = problem.split_whitespace().collect();
    eprintln!("error: {}", line.join(" "));
    ExitCode::FAILURE
}

/// Help as clap writes it; mistakes as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // As above.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(USAGE);
    }
    // The first paragraphs say what is wrong; usage and a pointer to the help follow.
    let text = error.to_string();
    let problem = text.split("\n\nUsage:").next().unwrap_or_default();
    let line: Vec<&str> = problem.split_whitespace().collect();
    eprintln!("{}; see skein-sim --help", line.join(" ").trim_end_matches("For more information, try '--help'.").trim_end());
    ExitCode::from(USAGE)
}
