//! What can go wrong with a local cluster. One line each for the user.

use std::io;
use std::path::{Path, PathBuf};

use skein_protocol::config::ConfigError;

/// Why a local cluster cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// A file or folder.
    #[error("{}: {problem}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        problem: io::Error,
    },
    /// A file with a mistake in it.
    #[error("{}: {problem}", path.display())]
    Config {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        problem: ConfigError,
    },
    /// A program of ours is not where it should be.
    #[error("there is no {program} in {}: build it with `cargo build -p {program}`, or name the folder that has it with --bin-dir", folder.display())]
    NoProgram {
        /// Which.
        program: &'static str,
        /// Where it was sought.
        folder: PathBuf,
    },
    /// A run was begun here and not finished.
    #[error("{} holds a run that stopped at step {step} of {steps}: go on with `{command} --resume`, or begin anew with `{command} --fresh`", out.display())]
    Unfinished {
        /// Where.
        out: PathBuf,
        /// Steps committed.
        step: u64,
        /// Steps of the run.
        steps: u64,
        /// What was typed.
        command: String,
    },
    /// There is no run to go on with.
    #[error("{} holds no unfinished run: leave out --resume", out.display())]
    NothingToResume {
        /// Where.
        out: PathBuf,
    },
    /// A process ended that should not have.
    #[error("{name} ended ({how}): {words} (all it said is in {})", log.display())]
    Ended {
        /// Whose.
        name: String,
        /// How.
        how: String,
        /// Its last line.
        words: String,
        /// All of it.
        log: PathBuf,
    },
    /// Nothing of what was awaited, within the bound.
    #[error("{0}")]
    TooLong(String),
    /// A command said something that we do not understand.
    #[error("`{command}` says {answer:?}: {problem}")]
    Answer {
        /// The command.
        command: String,
        /// What it says.
        answer: String,
        /// What was expected.
        problem: String,
    },
    /// A command failed.
    #[error("`{command}` failed: {words}")]
    Command {
        /// The command.
        command: String,
        /// Its last line.
        words: String,
    },
    /// The user asked to stop: what became of it, and how to go on.
    #[error("{0}")]
    Stopped(String),
}

impl LocalError {
    /// The user asked to stop before there was anything to save.
    pub fn stopped() -> Self {
        Self::Stopped("stopped; nothing was begun that is lost".to_owned())
    }
}

/// Adds the file's name to an error about it.
pub fn at(path: &Path) -> impl FnOnce(io::Error) -> LocalError {
    let path = path.to_owned();
    move |problem| LocalError::File { path, problem }
}
