//! The volunteer's program: reads the command line and does what it says.

#![expect(clippy::print_stdout, reason = "results go to stdout")]

mod commands;
mod settings;

use std::process::ExitCode;

use clap::Parser;

use settings::{Cli, Command, DataCommand};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.exit_code() == 0 => error.exit(),
        Err(error) => {
            // One line: what is wrong; where to read on.
            let text = error.to_string();
            let what = text.lines().next().unwrap_or_default();
            eprintln!("{what} (try `skein-node --help`)");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn,skein_node=info".into()))
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    // Two versions of it may be linked in; rustls must be told which provider to use.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes, without those that it tells itself.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Start(args) => commands::start::start(*args),
        Command::Identity { state } => commands::start::identity(&state),
        Command::Data { command: DataCommand::Build { out, tokenizer, valid, shard_tokens, json, files } } => {
            commands::data::build(out, tokenizer, files, valid, shard_tokens, json)
        }
        Command::Trigram { data, run, json } => commands::data::trigram(&data, run.as_deref(), json),
        Command::Solo(args) => commands::solo::solo(&args),
        Command::Init { run, data, out } => commands::model::init(&run, data.as_deref(), &out),
        Command::Import { model, state } => commands::model::import(&model, &state),
        Command::Generate(args) => commands::model::generate(&args),
        Command::Eval { model, data, sequences, json } => commands::model::eval(&model, &data, sequences, json),
        Command::Doctor { coordinator, state } => commands::doctor::doctor(coordinator.as_ref(), state.as_deref()),
        Command::Export { coordinator, out } => commands::model::export(&coordinator, &out),
    }
}
