//! What the demo found: `summary.json`, and the same for people.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `summary.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Mean loss of the first step, in nats a token.
    pub first_loss: f32,
    /// Mean loss of the last step, in nats a token.
    pub final_loss: f32,
    /// Loss on held-out text after training, in nats a token.
    pub validation_loss: f64,
    /// Bits per byte on held-out text after training.
    pub bits_per_byte: f64,
    /// Bits per byte of a trigram model on the same text.
    pub trigram_bits_per_byte: f64,
    /// Steps committed.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Tokens a second, from the first process to the last step.
    pub tokens_per_second: f64,
    /// Nodes that took part.
    pub nodes: usize,
    /// Nodes that were killed.
    pub killed: usize,
    /// Microbatches that did not count in every block.
    pub microbatches_lost: u64,
    /// Microbatches that had to be computed again.
    pub microbatches_redone: f64,
    /// Seconds of training.
    pub seconds: f64,
}

/// What the demo shows besides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Showing {
    /// Bits per byte on held-out text before training.
    pub bits_per_byte_before: f64,
    /// What both models were asked to continue.
    pub prompt: String,
    /// What the untrained model writes.
    pub before: String,
    /// What the trained model writes.
    pub after: String,
    /// The exported model.
    pub model: PathBuf,
    /// Final loss of the undisturbed process, and its loss on held-out text, if it was asked for.
    pub solo: Option<(f32, f64)>,
}

impl Showing {
    /// All of it in text.
    pub fn text(&self, summary: &Summary) -> String {
        let mut text = String::new();
        let mut line = |line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        line(String::new());
        let s = summary;
        line(format!(
            "{} steps, {} tokens in {:.0} s ({:.0} tokens/s) on {} nodes, {} of them killed",
            s.steps, s.tokens, s.seconds, s.tokens_per_second, s.nodes, s.killed
        ));
        line(format!("microbatches lost {}, redone {:.1}", s.microbatches_lost, s.microbatches_redone));
        line(format!("loss {:.3} to {:.3} nats a token, {:.3} on held-out text", s.first_loss, s.final_loss, s.validation_loss));
        line(String::new());
        line("bits per byte on held-out text".to_owned());
        line(format!("  before training  {:.3}", self.bits_per_byte_before));
        line(format!("  trigram model    {:.3}", s.trigram_bits_per_byte));
        line(format!("  after training   {:.3}", s.bits_per_byte));
        if let Some((loss, validation)) = self.solo {
            line(String::new());
            line("the same steps, undisturbed, in one process".to_owned());
            line(format!("  swarm  final loss {:.4}, held-out {:.4}", s.final_loss, s.validation_loss));
            line(format!("  solo   final loss {loss:.4}, held-out {validation:.4}"));
        }
        line(String::new());
        line(format!("\"{}\" goes on", self.prompt));
        line(format!("  before training: {}", quoted(&self.before, &self.prompt)));
        line(format!("  after training:  {}", quoted(&self.after, &self.prompt)));
        line(String::new());
        line(format!("The model is in {}: a folder that Hugging Face `transformers` loads.", self.model.display()));
        text
    }
}

/// What a model wrote after the prompt, on one line, without control characters.
fn quoted(written: &str, prompt: &str) -> String {
    const CHARACTERS_MAX: usize = 400;
    let rest = written.strip_prefix(prompt).unwrap_or(written);
    let shown: String = rest.chars().map(|c| if c.is_control() { ' ' } else { c }).take(CHARACTERS_MAX).collect();
    shown.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_what_others_read() {
        let json = serde_json::to_value(Summary::default()).expect("plain fields");
        let keys: Vec<&String> = json.as_object().expect("a table").keys().collect();
        let expected = [
            "bits_per_byte",
            "final_loss",
            "first_loss",
            "killed",
            "microbatches_lost",
            "microbatches_redone",
            "nodes",
            "seconds",
            "steps",
            "tokens",
            "tokens_per_second",
            "trigram_bits_per_byte",
            "validation_loss",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn people_see_before_and_after() {
        let showing = Showing {
            bits_per_byte_before: 3.5,
            prompt: "Once".to_owned(),
            before: "Once\u{7}\u{1b}[2Jxq".to_owned(),
            after: "Once upon\na time".to_owned(),
            solo: Some((4.0, 4.1)),
            ..Showing::default()
        };
        let text = showing.text(&Summary { bits_per_byte: 2.25, ..Summary::default() });
        for part in [
            "  before training  3.500\n",
            "  after training   2.250\n",
            "  before training: [2Jxq\n",
            "  after training:  upon a time\n",
            "  solo   final loss 4.0000, held-out 4.1000\n",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }
}
