//! A run's status as people read it in a terminal.

use std::fmt::Write;

use crate::status::{NodeStatus, Status};

/// Events shown at the end.
const EVENTS_SHOWN: usize = 8;

/// The status as lines of text: the run, its nodes, the newest events.
pub fn status_text(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        text.push_str(line.trim_end());
        text.push('\n');
    };
    let state = match &status.waiting_for {
        Some(what) if what.starts_with(&status.state) => what.clone(),
        Some(what) => format!("{}: {what}", status.state),
        None => status.state.clone(),
    };
    line(format!("run     {} ({}), {state}", status.name, status.run.get(..8).unwrap_or(&status.run)));
    let loss = status.losses.last().map(|(_, loss)| format!(", loss {loss:.4}")).unwrap_or_default();
    let left = status.seconds_left.map(|seconds| format!(", {} left", duration_text(seconds))).unwrap_or_default();
    line(format!("step    {} of {}{loss}, {} tokens/s{left}", status.step, status.steps, number_text(status.tokens_per_second)));
    let checkpoint = status.checkpoint.map_or_else(|| "none yet".to_owned(), |version| format!("step {version}"));
    line(format!(
        "work    {} tokens, lost {}, redone {:.1}; checkpoint: {checkpoint}",
        number_text(status.tokens as f64),
        status.microbatches_lost,
        status.microbatches_redone
    ));
    line(format!("place   epoch {}, timeline {}", status.epoch, status.timeline));
    line(String::new());
    line(if status.nodes.is_empty() { "no nodes".to_owned() } else { nodes_table(&status.nodes) });
    if !status.events.is_empty() {
        line(String::new());
    }
    for (seconds, event) in status.events.iter().rev().take(EVENTS_SHOWN).rev() {
        line(format!("{:>8}  {event}", duration_text(*seconds)));
    }
    text
}

fn nodes_table(nodes: &[NodeStatus]) -> String {
    let header = ["node", "state", "blocks", "share", "microbatches/s", "sends", "link", "claims"].map(str::to_owned);
    let rows = nodes.iter().map(|node| {
        [
            node.node.get(..8).unwrap_or(&node.node).to_owned(),
            node.state.clone(),
            node.span.clone(),
            format!("{:.0}%", node.share * 100.0),
            format!("{:.2}", node.rate),
            format!("{}B/s", number_text(node.bytes_per_second)),
            node.link.clone(),
            format!("{}FLOP/s", number_text(node.flops)),
        ]
    });
    let table: Vec<[String; 8]> = std::iter::once(header).chain(rows).collect();
    let mut widths = [0; 8];
    for row in &table {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &table {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            write!(line, "{cell:<width$}  ").expect("writing to a string does not fail");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// `1.5 M`; below a thousand without a unit.
fn number_text(value: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut scaled = value;
    let mut unit = 0;
    while scaled >= 999.95 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0}") } else { format!("{scaled:.1} {}", UNITS[unit]) }
}

/// `5 s`, `3 min 20 s`, `2 h 5 min`.
fn duration_text(seconds: f64) -> String {
    // A float beyond the range of the integer ends at its largest value.
    let seconds = seconds.max(0.0).round() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_shown_with_its_nodes_and_newest_events() {
        let node = NodeStatus {
            node: "12D3KooWabcdef".to_owned(),
            state: "active".to_owned(),
            span: "0-2".to_owned(),
            share: 0.25,
            link: "quic".to_owned(),
            rate: 3.5,
            bytes_per_second: 1.5e6,
            flops: 83e9,
        };
        let status = Status {
            name: "demo".to_owned(),
            run: "0123456789abcdef".to_owned(),
            state: "stalled".to_owned(),
            waiting_for: Some("waiting for a host for blocks 3-5".to_owned()),
            step: 7,
            steps: 250,
            losses: vec![(6, 5.0), (7, 4.25)],
            tokens: 28_672,
            tokens_per_second: 2048.0,
            seconds_left: Some(3725.0),
            checkpoint: Some(5),
            nodes: vec![node],
            events: (0..10).map(|i| (f64::from(i), format!("event {i}"))).collect(),
            ..Status::default()
        };
        let expected = "\
run     demo (01234567), stalled: waiting for a host for blocks 3-5
step    7 of 250, loss 4.2500, 2.0 k tokens/s, 1 h 2 min left
work    28.7 k tokens, lost 0, redone 0.0; checkpoint: step 5
place   epoch 0, timeline 0

node      state   blocks  share  microbatches/s  sends     link  claims
12D3KooW  active  0-2     25%    3.50            1.5 MB/s  quic  83.0 GFLOP/s
";
        let text = status_text(&status);
        assert!(text.starts_with(expected), "{text}");
        let events: Vec<&str> = text[expected.len()..].lines().collect();
        assert_eq!((events.len(), events[1], events[8]), (9, "     2 s  event 2", "     9 s  event 9"));
    }

    #[test]
    fn an_empty_status_is_shown_too() {
        assert!(status_text(&Status::default()).contains("no nodes"));
        let waiting =
            Status { name: "demo".to_owned(), state: "waiting".to_owned(), waiting_for: Some("waiting for nodes: 0 of 1".to_owned()), ..Status::default() };
        assert!(status_text(&waiting).starts_with("run     demo (), waiting for nodes: 0 of 1\n"));
    }

    #[test]
    fn numbers_and_durations() {
        assert_eq!([0.0, 999.0, 999.96, 1.5e6, 2e18].map(number_text), ["0", "999", "1.0 k", "1.5 M", "2000.0 P"]);
        assert_eq!([0.2, 59.6, 200.0, 7500.0, -1.0].map(duration_text), ["0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min", "0 s"]);
    }
}
