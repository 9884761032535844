//! One function a subcommand.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use skein_protocol::config::RunConfig;

pub(crate) mod data;
pub(crate) mod doctor;
pub(crate) mod model;
pub(crate) mod solo;
pub(crate) mod start;

/// Reads and checks a run's configuration.
pub(crate) fn read_config(path: &Path) -> anyhow::Result<RunConfig> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    RunConfig::from_toml(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

/// A bar on a terminal, a line now and then elsewhere.
pub(crate) struct Progress {
    bar: ProgressBar,
    total: u64,
    said: std::time::Instant,
}

impl Progress {
    #[expect(clippy::disallowed_methods, reason = "a progress bar is about time")]
    pub(crate) fn new(total: u64, template: &str) -> Self {
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, total, said: std::time::Instant::now() }
    }

    /// At `done`, with a word about it.
    #[expect(clippy::disallowed_methods, reason = "a progress bar is about time")]
    pub(crate) fn at(&mut self, done: u64, message: String) {
        self.bar.set_position(done);
        if self.bar.is_hidden() && self.said.elapsed() > Duration::from_secs(2) {
            eprintln!("{done} of {}: {message}", self.total);
            self.said = std::time::Instant::now();
        }
        self.bar.set_message(message);
    }

    pub(crate) fn total(&mut self, total: u64) {
        self.total = total;
        self.bar.set_length(total);
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
