//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use skein_node::data::tokenizer::TokenizerSpec;
use skein_node::engine::torch::device::DeviceChoice;
use skein_protocol::id::NodeId;
use skein_protocol::net::control::CoordinatorAddress;
use skein_protocol::net::links::Kind;

/// The Skein volunteer: trains one language model together with others.
#[derive(Debug, Parser)]
#[command(name = "skein-node", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Join a run and compute for it until it ends or Ctrl-C
    #[command(after_help = "Example:\n  skein-node start --coordinator /ip4/192.0.2.1/tcp/7700/p2p/12D3KooW.. --state ~/skein --compute-share 0.5")]
    Start(Box<StartArgs>),
    /// Print this node's name, making its key if there is none
    #[command(after_help = "Example:\n  skein-node identity --state ~/skein")]
    Identity {
        /// The node's folder
        #[arg(long, value_name = "DIR")]
        state: PathBuf,
    },
    /// Build, or look at, training data
    Data {
        /// What to do with it.
        #[command(subcommand)]
        command: DataCommand,
    },
    /// Train the run's model in this one process: the baseline and the reference
    #[command(after_help = "Example:\n  skein-node solo --run run.toml --data data --out model")]
    Solo(SoloArgs),
    /// Write the run's version 0, drawn from its seed, as a Hugging Face folder
    #[command(after_help = "Example:\n  skein-node init --run run.toml --data data --out untrained")]
    Init {
        /// The run's configuration
        #[arg(long, value_name = "FILE")]
        run: PathBuf,
        /// The run's data, for its tokenizer
        #[arg(long, value_name = "DIR")]
        data: Option<PathBuf>,
        /// The folder to write
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Turn a Hugging Face folder into version 0 of a run
    #[command(after_help = "Example:\n  skein-node import --model llama-folder --state ~/skein\nthen put what it prints into run.toml and start this node")]
    Import {
        /// The Hugging Face folder
        #[arg(long, value_name = "DIR")]
        model: PathBuf,
        /// The state folder of the node that will bring it
        #[arg(long, value_name = "DIR")]
        state: PathBuf,
    },
    /// Fetch the newest checkpoint of a run and write it as a Hugging Face folder
    #[command(after_help = "Example:\n  skein-node export --coordinator /ip4/192.0.2.1/tcp/7700/p2p/12D3KooW.. --out model")]
    Export {
        /// The coordinator's address, as it printed it
        #[arg(long, value_name = "ADDR")]
        coordinator: CoordinatorAddress,
        /// The folder to write
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Continue a text with an exported model
    #[command(after_help = "Example:\n  skein-node generate --model model --prompt 'The swarm' --tokens 100")]
    Generate(GenerateArgs),
    /// Measure an exported model on held-out text
    #[command(after_help = "Example:\n  skein-node eval --model model --data data")]
    Eval {
        /// The exported folder
        #[arg(long, value_name = "DIR")]
        model: PathBuf,
        /// The data
        #[arg(long, value_name = "DIR")]
        data: PathBuf,
        /// Sequences of held-out text to measure at most
        #[arg(long, value_name = "N", default_value_t = 4096)]
        sequences: u64,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Measure a trigram model on held-out text: the yardstick beside `eval`
    #[command(after_help = "Example:\n  skein-node trigram --data data")]
    Trigram {
        /// The data
        #[arg(long, value_name = "DIR")]
        data: PathBuf,
        /// The run that names the data, where the folder holds several
        #[arg(long, value_name = "FILE")]
        run: Option<PathBuf>,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Look for what is wrong here and say how to mend it
    #[command(after_help = "Example:\n  skein-node doctor --coordinator /ip4/192.0.2.1/tcp/7700/p2p/12D3KooW..")]
    Doctor {
        /// Also try to reach this coordinator
        #[arg(long, value_name = "ADDR")]
        coordinator: Option<CoordinatorAddress>,
        /// Also look at this state folder
        #[arg(long, value_name = "DIR")]
        state: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// The coordinator's address, as it printed it
    #[arg(long, value_name = "ADDR")]
    pub(crate) coordinator: CoordinatorAddress,
    /// This node's folder: key, checkpoints, fetched data
    #[arg(long, value_name = "DIR")]
    pub(crate) state: PathBuf,
    /// Data that this node brings along and serves to others
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Share of the time to compute, above 0 to 1
    #[arg(long, value_name = "SHARE", default_value = "1", value_parser = share)]
    pub(crate) compute_share: f32,
    /// Memory to lend, such as 2GiB; three quarters of what is free if not given
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory_limit: Option<u64>,
    /// Threads to compute with
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) threads: usize,
    /// The device: best, cpu, cuda, cuda:N or mps
    #[arg(long, value_name = "DEVICE", default_value = "best")]
    pub(crate) device: DeviceChoice,
    /// Where other nodes reach this one (UDP and TCP); port 0 lets the system choose
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    /// What may carry links to other nodes; the best that works is taken
    #[arg(long, value_name = "KINDS", default_value = "quic,tcp", value_delimiter = ',', value_parser = link_kind)]
    pub(crate) links: Vec<Kind>,
    /// Dial a node at another address than its own: NODE=IP:PORT
    #[arg(long, value_name = "NODE=IP:PORT", value_parser = dial_override, hide = true)]
    pub(crate) dial_override: Vec<(NodeId, SocketAddr)>,
    /// A name for people
    #[arg(long, value_name = "NAME", hide = true)]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SoloArgs {
    /// The run's configuration
    #[arg(long, value_name = "FILE")]
    pub(crate) run: PathBuf,
    /// The run's data
    #[arg(long, value_name = "DIR")]
    pub(crate) data: PathBuf,
    /// The Hugging Face folder that run.toml imports, if it does
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Write the trained model here as a Hugging Face folder
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Steps to run instead of the configuration's
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// Threads to compute with
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) threads: usize,
    /// The device: best, cpu, cuda, cuda:N or mps
    #[arg(long, value_name = "DEVICE", default_value = "best")]
    pub(crate) device: DeviceChoice,
    /// Shuffle each step's microbatches by this seed: shows what the order of additions does
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) order_seed: Option<u64>,
    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The exported folder
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: String,
    /// Tokens to add
    #[arg(long, value_name = "N", default_value_t = 80)]
    pub(crate) tokens: usize,
    /// 0 takes the likeliest token, 1 draws as the model says
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// The same seed draws the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Turn text files into token shards with a hashed manifest
    #[command(after_help = "Example:\n  skein-node data build --out data --tokenizer bpe:1024 book1.txt book2.txt")]
    Build {
        /// The folder that gets the data
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// bytes, bpe:SIZE, or a tokenizer.json
        #[arg(long, value_name = "WHICH", default_value = "bytes")]
        tokenizer: TokenizerSpec,
        /// Text to hold out; the last 5% of the files if none is given
        #[arg(long, value_name = "FILE")]
        valid: Vec<PathBuf>,
        /// Tokens of a shard
        #[arg(long, value_name = "N", default_value_t = 1 << 22)]
        shard_tokens: u64,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
        /// UTF-8 text files, in order
        #[arg(required = true, value_name = "FILES")]
        files: Vec<PathBuf>,
    },
}

fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("a share is above 0 and at most 1, such as 0.5".to_owned()),
    }
}

/// A number of bytes with a unit, such as `2GiB` or `500 MB`.
fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let unit: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        other => return Err(format!("unknown unit `{other}`: use MiB or GiB")),
    };
    match text[..digits].parse::<f64>() {
        Ok(number) if number > 0.0 => Ok((number * unit as f64) as u64),
        _ => Err("a size is a number with a unit, such as 2GiB".to_owned()),
    }
}

fn link_kind(text: &str) -> Result<Kind, String> {
    Kind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| "expected quic, tcp, or quic,tcp".to_owned())
}

fn dial_override(text: &str) -> Result<(NodeId, SocketAddr), String> {
    let (node, address) = text.split_once('=').ok_or("expected NODE=IP:PORT")?;
    let node = node.parse().map_err(|error| format!("{node}: {error}"))?;
    let address = address.parse().map_err(|error| format!("{address}: {error}"))?;
    Ok((node, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert_eq!(size("1.5 MB"), Ok(1_500_000));
        assert!(size("2 gigs").is_err() && size("GiB").is_err() && size("-1GiB").is_err());
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
