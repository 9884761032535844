//! `skein-sim local`: a cluster as its description says, from start to end.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use skein_protocol::config::RunConfig;

use super::cluster::Cluster;
use super::error::{LocalError, at};
use super::programs::Programs;
use super::progress::{Begin, Progress};
use super::session::{Ending, Plan, Session};
use super::stop::Stop;
use super::view;

/// Flags of `local`.
#[derive(Clone, Debug, Args)]
pub struct LocalArgs {
    /// The cluster's description
    #[arg(long, value_name = "FILE")]
    pub cluster: PathBuf,
    /// Where state, logs and results go, instead of what the description says
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What is common to commands that start processes.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Flags of all commands that start processes.
#[derive(Clone, Debug, Args)]
pub struct CommonArgs {
    /// Go on with the unfinished run in the out folder
    #[arg(long, conflicts_with = "fresh")]
    pub resume: bool,
    /// Begin anew, whatever run is in the out folder
    #[arg(long)]
    pub fresh: bool,
    /// The folder that has skein-coordinator and skein-node [default: where skein-sim is]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
}

impl CommonArgs {
    /// What to do about a run that is there.
    pub fn begin(&self) -> Begin {
        match (self.resume, self.fresh) {
            (true, _) => Begin::Resume,
            (false, true) => Begin::Fresh,
            (false, false) => Begin::Plain,
        }
    }

    /// The programs to start.
    pub fn programs(&self) -> Result<Programs, LocalError> {
        let this = std::env::current_exe().map_err(at(Path::new("skein-sim")))?;
        let beside = this.parent().unwrap_or(Path::new(".")).to_owned();
        Programs::within(self.bin_dir.as_deref().unwrap_or(&beside), Some(this))
    }
}

/// What the user typed, without what says how to begin.
pub fn typed() -> String {
    let plain = |word: &String| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,@+".contains(c));
    let quote = |word: String| if plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) };
    std::env::args().filter(|word| word != "--resume" && word != "--fresh").map(quote).collect::<Vec<_>>().join(" ")
}

/// Reads a cluster's description and the configuration of its run.
pub fn read_plan(file: &Path, out: Option<PathBuf>, programs: Programs) -> Result<Plan, LocalError> {
    let text = fs::read_to_string(file).map_err(at(file))?;
    let config = |path: &Path| {
        let path = path.to_owned();
        move |problem| LocalError::Config { path, problem }
    };
    let mut cluster = Cluster::from_toml(&text).map_err(config(file))?.located(file.parent().unwrap_or(Path::new("")));
    if let Some(out) = out {
        cluster.cluster.out = out;
    }
    let path = &cluster.cluster.run;
    let run = RunConfig::from_toml(&fs::read_to_string(path).map_err(at(path))?).map_err(config(path))?;
    Ok(Plan { cluster, run, programs })
}

/// Trains as `plan` says, to the end of the run; the cluster still runs then.
pub async fn train(plan: Plan, begin: Begin, command: &str, stop: Stop) -> Result<Session, LocalError> {
    let progress = Progress::begin(&plan.cluster.cluster.out, begin, command)?;
    let mut session = Session::start(plan, progress, begin == Begin::Resume, view::for_this_terminal(), stop).await?;
    match session.watch().await? {
        Ending::Finished => Ok(session),
        Ending::Interrupted => {
            let Progress { step, steps, .. } = session.progress();
            Err(LocalError::Stopped(format!("stopped at step {step} of {steps}; go on with `{command} --resume`")))
        }
    }
}

/// Runs `skein-sim local`.
pub async fn local(args: LocalArgs) -> Result<(), LocalError> {
    let stop = Stop::on_signals().map_err(at(Path::new("signals")))?;
    let plan = read_plan(&args.cluster, args.out.clone(), args.common.programs()?)?;
    let mut session = train(plan, args.common.begin(), &typed(), stop).await?;
    eprintln!("{}", result_line(&session));
    session.conclude()?;
    session.stop().await
}

/// What a finished run came to, in one line.
pub fn result_line(session: &Session) -> String {
    let status = session.status();
    let loss = |loss: Option<f32>| loss.map_or_else(|| "?".to_owned(), |loss| format!("{loss:.3}"));
    let (first, last) = (loss(session.progress().first_loss), loss(session.progress().last_loss));
    format!(
        "{} steps in {:.0} s, loss {first} to {last} nats a token; microbatches: lost {}, redone {:.1}",
        status.step,
        session.seconds(),
        status.microbatches_lost,
        session.redone()
    )
}
