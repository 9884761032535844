//! What a local run remembers about itself between starts (`local.json` in its folder).

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::{LocalError, at};

const FILE: &str = "local.json";
/// What a run leaves in its folder besides.
const FOLDERS: [&str; 3] = ["coordinator", "nodes", "logs"];

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Whether all that was to be done with the run is done.
    pub finished: bool,
    /// Steps committed when last seen.
    pub step: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Which events have happened, by their place in the description.
    pub fired: Vec<usize>,
    /// Loss of the first step, in nats a token.
    pub first_loss: Option<f32>,
    /// Loss of the last step that was seen, in nats a token.
    pub last_loss: Option<f32>,
    /// Seconds that earlier starts took.
    pub seconds: f64,
    /// Microbatches that earlier starts redid.
    pub redone: f64,
}

/// What to do about a run that is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Begin; an unfinished run is in the way, a finished one is replaced.
    Plain,
    /// Go on with an unfinished run.
    Resume,
    /// Begin; whatever is there is replaced.
    Fresh,
}

impl Progress {
    /// Whether a run may begin in `out`: what to go on from. `command` is what the user typed.
    pub fn check(out: &Path, begin: Begin, command: &str) -> Result<Self, LocalError> {
        let unfinished = Self::read(out)?.filter(|progress| !progress.finished);
        match (begin, unfinished) {
            (Begin::Resume, Some(progress)) => Ok(progress),
            (Begin::Resume, None) => Err(LocalError::NothingToResume { out: out.to_owned() }),
            (Begin::Plain, Some(Self { step, steps, .. })) => Err(LocalError::Unfinished { out: out.to_owned(), step, steps, command: command.to_owned() }),
            (Begin::Plain | Begin::Fresh, _) => Ok(Self::default()),
        }
    }

    /// The same, and makes `out` ready: unless it is gone on with, what an earlier run left is gone.
    pub fn begin(out: &Path, begin: Begin, command: &str) -> Result<Self, LocalError> {
        let progress = Self::check(out, begin, command)?;
        if begin != Begin::Resume {
            clear(out)?;
        }
        Ok(progress)
    }

    /// Writes it down, all or nothing.
    pub fn save(&self, out: &Path) -> Result<(), LocalError> {
        let (path, draft) = (out.join(FILE), out.join("local.json.new"));
        let text = serde_json::to_string_pretty(self).expect("plain fields");
        fs::write(&draft, text).map_err(at(&draft))?;
        fs::rename(&draft, &path).map_err(at(&path))
    }

    fn read(out: &Path) -> Result<Option<Self>, LocalError> {
        let path = out.join(FILE);
        match fs::read(&path) {
            // A file that makes no sense is a run of which nothing is known: it is in the way.
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(at(&path)(error)),
        }
    }
}

/// Removes what an earlier run left, and nothing else.
fn clear(out: &Path) -> Result<(), LocalError> {
    fs::create_dir_all(out).map_err(at(out))?;
    let folders: Vec<PathBuf> = FOLDERS.iter().map(|name| out.join(name)).filter(|folder| folder.exists()).collect();
    for folder in folders {
        fs::remove_dir_all(&folder).map_err(at(&folder))?;
    }
    let file = out.join(FILE);
    if file.exists() { fs::remove_file(&file).map_err(at(&file)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_run_is_not_lost_by_accident() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("out");
        assert!(matches!(Progress::begin(&out, Begin::Resume, "x"), Err(LocalError::NothingToResume { .. })));
        assert_eq!(Progress::begin(&out, Begin::Plain, "x").expect("nothing there"), Progress::default());
        let half = Progress { step: 12, steps: 50, fired: vec![0], ..Progress::default() };
        half.save(&out).expect("a folder of ours");
        fs::create_dir(out.join("nodes")).expect("a folder of ours");
        fs::write(out.join("mine.txt"), "kept").expect("a folder of ours");

        assert_eq!(Progress::check(&out, Begin::Fresh, "x").expect("allowed"), Progress::default());
        let error = Progress::begin(&out, Begin::Plain, "skein-sim local --cluster c.toml").expect_err("in the way");
        let expected = "holds a run that stopped at step 12 of 50: go on with `skein-sim local --cluster c.toml --resume`, or begin anew with `skein-sim local --cluster c.toml --fresh`";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert_eq!(Progress::begin(&out, Begin::Resume, "x").expect("there"), half);
        assert!(out.join("nodes").exists());

        assert_eq!(Progress::begin(&out, Begin::Fresh, "x").expect("replaced"), Progress::default());
        assert!(!out.join("nodes").exists() && out.join("mine.txt").exists());
    }

    #[test]
    fn a_finished_run_is_replaced() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Progress { finished: true, ..Progress::default() }.save(folder.path()).expect("a folder of ours");
        assert!(matches!(Progress::begin(folder.path(), Begin::Resume, "x"), Err(LocalError::NothingToResume { .. })));
        assert_eq!(Progress::begin(folder.path(), Begin::Plain, "x").expect("replaced"), Progress::default());
    }
}
