//! The tour: text becomes data, a swarm learns from it while a node is killed and another comes,
//! then the model is measured, asked to write, and exported.
//!
//! Everything is done by the commands that a user has; each is shown before it runs.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use skein_protocol::id::Hash;

use super::command::{CommonArgs, read_plan, result_line, train, typed};
use super::error::{LocalError, at};
use super::programs::Programs;
use super::progress::{Begin, Progress};
use super::session::Session;
use super::stop::Stop;
use super::summary::{Showing, Summary};

/// Stands for the data's name in the run's template.
const MANIFEST: &str = "@MANIFEST@";
/// Words of held-out text that both models are asked to continue.
const PROMPT_WORDS: usize = 6;
/// Names of files in the out folder.
const RUN_FILE: &str = "run.toml";
const CLUSTER_FILE: &str = "cluster.toml";
const SUMMARY_FILE: &str = "summary.json";

/// Flags of `demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Folder with train.txt and valid.txt, as scripts/prose makes it
    #[arg(long, value_name = "DIR")]
    pub text: PathBuf,
    /// Folder for the tokenized data; what is there already is used again
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// The tokenizer: bytes, bpe:SIZE or a tokenizer.json
    #[arg(long, value_name = "WHICH", default_value = "bpe:1024")]
    pub tokenizer: String,
    /// The run's configuration, with @MANIFEST@ where the data's name goes
    #[arg(long, value_name = "FILE", default_value = "sim/demo/run.toml")]
    pub run: PathBuf,
    /// The cluster's description, with @RUN@, @OUT@ and @DATA@ for paths
    #[arg(long, value_name = "FILE", default_value = "sim/demo/cluster.toml")]
    pub cluster: PathBuf,
    /// Where state, logs and results go
    #[arg(long, value_name = "DIR", default_value = "out/demo")]
    pub out: PathBuf,
    /// Also train undisturbed in one process, and show both losses
    #[arg(long)]
    pub compare: bool,
    /// What is common to commands that start processes.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What `skein-node data build --json` prints.
#[derive(Clone, Debug, Deserialize)]
struct Built {
    manifest: Hash,
}

/// What `skein-node eval --json` prints.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Evaluated {
    loss: f64,
    bits_per_byte: f64,
}

/// What `skein-node trigram --json` prints.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Trigram {
    bits_per_byte: f64,
}

/// What `skein-node solo --json` prints.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Solo {
    final_loss: f32,
}

/// Runs the demo; the text for the user at its end.
pub async fn demo(args: DemoArgs) -> Result<Option<String>, LocalError> {
    let stop = Stop::on_signals().map_err(at(Path::new("signals")))?;
    let programs = args.common.programs()?;
    let mut tour = Tour { args, programs, stop };
    tour.run().await.map(Some)
}

struct Tour {
    args: DemoArgs,
    programs: Programs,
    stop: Stop,
}

impl Tour {
    async fn run(&mut self) -> Result<String, LocalError> {
        let (begin, command, out) = (self.args.common.begin(), typed(), self.args.out.clone());
        fs::create_dir_all(&out).map_err(at(&out))?;
        // Nothing of a run that is in the way is touched.
        Progress::check(&out, begin, &command)?;
        if begin != Begin::Resume {
            let manifest = self.data().await?;
            self.describe(manifest)?;
        }
        say("train: a swarm of processes on this machine");
        let plan = read_plan(&out.join(CLUSTER_FILE), None, self.programs.clone())?;
        let mut session = train(plan, begin, &command, self.stop.clone()).await?;
        say(&result_line(&session));
        match self.measure(&mut session).await {
            Err(LocalError::Stopped(_)) => Err(LocalError::Stopped(format!("stopped after training; go on with `{command} --resume`"))),
            other => other,
        }
    }

    /// Everything after training; the text for the user.
    async fn measure(&mut self, session: &mut Session) -> Result<String, LocalError> {
        let (out, seconds) = (self.args.out.clone(), session.seconds());
        let run = shown(&out.join(RUN_FILE));
        let (untrained, model) = (out.join("untrained"), out.join("model"));
        let address = session.endpoints().address().to_owned();
        self.node(&["export", "--coordinator", &address, "--out", &shown(&model)]).await?;
        session.stop().await?;

        say("measure: held-out text, before training, after it, and by a trigram model");
        let data = shown(&self.args.data);
        self.node(&["init", "--run", &run, "--data", &data, "--out", &shown(&untrained)]).await?;
        let before = self.eval(&untrained).await?;
        let after = self.eval(&model).await?;
        let trigram: Trigram = self.json(&["trigram", "--run", &run, "--data", &data, "--json"]).await?;
        let prompt = prompt(&self.args.text.join("valid.txt"))?;
        let mut showing = Showing {
            bits_per_byte_before: before.bits_per_byte,
            before: self.generate(&untrained, &prompt).await?,
            after: self.generate(&model, &prompt).await?,
            prompt,
            model,
            solo: None,
        };
        if self.args.compare {
            showing.solo = Some(self.solo(&run).await?);
        }
        let summary = summarize(session, seconds, after, trigram);
        let path = out.join(SUMMARY_FILE);
        let json = serde_json::to_string_pretty(&summary).expect("plain fields");
        fs::write(&path, json + "\n").map_err(at(&path))?;
        session.conclude()?;
        Ok(showing.text(&summary))
    }

    /// Makes the data from the text, unless that was done before; its name.
    async fn data(&mut self) -> Result<Hash, LocalError> {
        let about = fs::read_to_string(self.args.text.join("about.json")).ok().and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok());
        let word = |key: &str| about.as_ref().and_then(|about| about[key].as_str()).unwrap_or("unknown").to_owned();
        say(&format!("text: {}, hash {}", word("what"), word("hash")));
        let (train, valid) = (self.args.text.join("train.txt"), self.args.text.join("valid.txt"));
        let made = self.args.data.join(format!("{}.json", self.args.tokenizer.replace(['/', ':'], "-")));
        let known = fs::read_to_string(&made).ok().and_then(|text| serde_json::from_str::<Built>(&text).ok());
        if let Some(built) = known {
            return Ok(built.manifest);
        }
        let (out, tokenizer) = (shown(&self.args.data), self.args.tokenizer.clone());
        let answer = self.node(&["data", "build", "--out", &out, "--tokenizer", &tokenizer, "--valid", &shown(&valid), "--json", &shown(&train)]).await?;
        let built: Built = understood("data build --json", &answer)?;
        // Written last: data without this file is made again.
        fs::write(&made, answer).map_err(at(&made))?;
        Ok(built.manifest)
    }

    /// Writes the run's configuration and the cluster's description into the out folder.
    fn describe(&self, manifest: Hash) -> Result<(), LocalError> {
        let absolute = |path: &Path| std::path::absolute(path).map(|path| shown(&path)).map_err(at(path));
        let out = &self.args.out;
        let run = fs::read_to_string(&self.args.run).map_err(at(&self.args.run))?.replace(MANIFEST, &manifest.to_string());
        let cluster = fs::read_to_string(&self.args.cluster).map_err(at(&self.args.cluster))?;
        let cluster = cluster.replace("@RUN@", RUN_FILE).replace("@OUT@", &shown(out)).replace("@DATA@", &absolute(&self.args.data)?);
        for (name, text) in [(RUN_FILE, run), (CLUSTER_FILE, cluster)] {
            let path = out.join(name);
            fs::write(&path, text).map_err(at(&path))?;
        }
        Ok(())
    }

    async fn eval(&mut self, model: &Path) -> Result<Evaluated, LocalError> {
        let data = shown(&self.args.data);
        self.json(&["eval", "--model", &shown(model), "--data", &data, "--json"]).await
    }

    async fn generate(&mut self, model: &Path, prompt: &str) -> Result<String, LocalError> {
        self.node(&["generate", "--model", &shown(model), "--prompt", prompt, "--seed", "1"]).await
    }

    /// The same steps in one process: its final loss, and its loss on held-out text.
    async fn solo(&mut self, run: &str) -> Result<(f32, f64), LocalError> {
        say("compare: the same steps, undisturbed, in one process");
        let (data, model) = (shown(&self.args.data), self.args.out.join("solo"));
        let solo: Solo = self.json(&["solo", "--run", run, "--data", &data, "--out", &shown(&model), "--json"]).await?;
        Ok((solo.final_loss, self.eval(&model).await?.loss))
    }

    async fn json<T: DeserializeOwned>(&mut self, arguments: &[&str]) -> Result<T, LocalError> {
        let answer = self.node(arguments).await?;
        understood(&arguments.join(" "), &answer)
    }

    async fn node(&mut self, arguments: &[&str]) -> Result<String, LocalError> {
        say(&format!("skein-node {}", arguments.join(" ")));
        self.programs.ask_node(arguments, true, &mut self.stop).await
    }
}

fn summarize(session: &Session, seconds: f64, after: Evaluated, trigram: Trigram) -> Summary {
    let status = session.status();
    Summary {
        first_loss: session.progress().first_loss.unwrap_or(f32::NAN),
        final_loss: session.progress().last_loss.unwrap_or(f32::NAN),
        validation_loss: after.loss,
        bits_per_byte: after.bits_per_byte,
        trigram_bits_per_byte: trigram.bits_per_byte,
        steps: status.step,
        tokens: status.tokens,
        tokens_per_second: status.tokens as f64 / seconds.max(1e-9),
        nodes: session.started(),
        killed: session.killed().len(),
        microbatches_lost: status.microbatches_lost,
        microbatches_redone: session.redone(),
        seconds,
    }
}

/// The first words of held-out text that look like the beginning of a sentence.
fn prompt(valid: &Path) -> Result<String, LocalError> {
    let text = fs::read_to_string(valid).map_err(at(valid))?;
    let is_sentence = |line: &&str| line.starts_with(|c: char| c.is_ascii_uppercase()) && line.split_whitespace().count() > 2 * PROMPT_WORDS;
    let line = text.lines().find(is_sentence).or_else(|| text.lines().find(|line| !line.trim().is_empty())).unwrap_or("The");
    Ok(line.split_whitespace().take(PROMPT_WORDS).collect::<Vec<_>>().join(" "))
}

fn understood<T: DeserializeOwned>(command: &str, answer: &str) -> Result<T, LocalError> {
    // Results are the last line: a program may greet before.
    let line = answer.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    serde_json::from_str(answer).or_else(|_| serde_json::from_str(line)).map_err(|problem| LocalError::Answer {
        command: format!("skein-node {command}"),
        answer: line.to_owned(),
        problem: problem.to_string(),
    })
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn say(line: &str) {
    eprintln!("{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::cluster::Cluster;
    use skein_protocol::config::RunConfig;

    #[test]
    fn the_templates_of_the_demo_are_valid_and_fit_each_other() {
        let run = include_str!("../../demo/run.toml").replace(MANIFEST, &Hash::of(b"data").to_string());
        let run = RunConfig::from_toml(&run).expect("valid");
        let cluster = Cluster::from_toml(include_str!("../../demo/cluster.toml")).expect("valid");
        assert_eq!(cluster.first_nodes().len(), run.placement.nodes_min, "it waits for as many as there are");
        assert_eq!(cluster.first_nodes().len(), run.placement.spans * run.placement.replicas);
        let shares: f64 = cluster.first_nodes().iter().filter_map(|name| cluster.node(name)?.compute_share).sum();
        assert!(shares <= 2.0, "{shares} of two cores");
        assert!(cluster.events.iter().all(|event| event.step(run.run.steps) < run.run.steps));
    }

    #[test]
    fn the_prompt_is_the_beginning_of_a_sentence() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let check = |text: &str, expected: &str| {
            let path = folder.path().join("valid.txt");
            fs::write(&path, text).expect("a folder of ours");
            assert_eq!(prompt(&path).expect("there"), expected);
        };
        check("- a list\nShort.\nOne two three four five six seven eight nine ten eleven twelve thirteen.\n", "One two three four five six");
        check("\nonly this\n", "only this");
        check("", "The");
    }

    #[test]
    fn answers_are_json_perhaps_after_a_greeting() {
        let found: Trigram = understood("trigram", "hello\n{\"bits_per_byte\": 2.5}\n\n").expect("understood");
        assert!((found.bits_per_byte - 2.5).abs() < 1e-9);
        let pretty: Trigram = understood("trigram", "{\n  \"bits_per_byte\": 2.5\n}\n").expect("understood");
        assert!((pretty.bits_per_byte - 2.5).abs() < 1e-9);
        let error = understood::<Trigram>("trigram", "{}").expect_err("no key");
        assert!(error.to_string().starts_with("`skein-node trigram` says \"{}\": missing field `bits_per_byte`"), "{error}");
    }
}
