//! `skein-coordinator`: plans who hosts what, keeps the ledger of work, shows the run.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use clap::error::ErrorKind;
use skein_coordinator::settings::{Cli, Command, StatusArgs, status_address};
use skein_coordinator::{http, show, start};
use tracing_subscriber::EnvFilter;

/// What is logged unless RUST_LOG says otherwise.
const LOGGED: &str = "warn,skein_coordinator=info,skein_protocol=info";

/// As clap and most tools use it: the command line makes no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // Both libraries that use TLS take the process's provider.
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        return failed("a TLS provider is installed already; this build is broken");
    }
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOGGED));
    let colors = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_ansi(colors).with_writer(std::io::stderr).init();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&format!("{error:#}")),
    }
}

fn run(cli: Cli) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let result = match cli.command {
        Command::Start(args) => runtime.block_on(start::start(args)),
        Command::Status(args) => runtime.block_on(status(&args)),
    };
    // Connections that are still being served do not keep the process.
    runtime.shutdown_background();
    result
}

async fn status(args: &StatusArgs) -> Result<()> {
    let status = http::fetch_status(status_address(&args.state)?).await?;
    let text = if args.json { serde_json::to_string_pretty(&status)? + "\n" } else { show::status_text(&status) };
    // A reader that has seen enough, such as `head`, is no failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn failed(problem: &str) -> ExitCode {
    let line: Vec<&str> = problem.split_whitespace().collect();
    eprintln!("error: {}", line.join(" "));
    ExitCode::FAILURE
}

/// Help as clap writes it; mistakes as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return if error.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if matches!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) {
        let _ = error.print();
        return ExitCode::from(USAGE);
    }
    // The first paragraphs say what is wrong; usage and a pointer to the help follow.
    let text = error.to_string();
    let problem = text.split("\n\nUsage:").next().unwrap_or_default();
    let line: Vec<&str> = problem.split_whitespace().collect();
    eprintln!("{}; see skein-coordinator --help", line.join(" ").trim_end_matches("For more information, try '--help'.").trim_end());
    ExitCode::from(USAGE)
}
