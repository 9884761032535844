//! What a person sees of a running cluster: a live view on a terminal, lines elsewhere.
//!
//! What is shown follows from [`Scene`] alone; the two views differ in where they put it.

use std::io::IsTerminal;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use skein_coordinator::status::{NodeStatus, Status};

/// Lines go to a log at most so often, in seconds.
const LINE_EVERY_SECONDS: f64 = 2.0;

/// What became of a node that we started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// An event will start it.
    Later,
    /// It runs.
    Runs {
        /// Whether an event started it.
        fresh: bool,
    },
    /// An event killed it when so many steps were committed.
    Killed(u64),
    /// It ended by itself: how, and its last words.
    Ended(String),
}

/// One node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name in the cluster's description.
    pub name: String,
    /// Its identity, as the coordinator may call it.
    pub id: String,
    /// What became of it.
    pub fate: Fate,
}

/// What there is to see at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// Seconds since the cluster was started.
    pub seconds: f64,
    /// The coordinator's view; `None` until it has answered once.
    pub status: Option<&'a Status>,
    /// The nodes, in the description's order.
    pub members: &'a [Member],
    /// What stands in the way of a fresh status, if anything.
    pub trouble: Option<&'a str>,
}

/// Shows a cluster.
pub trait View {
    /// Shows how things stand.
    fn show(&mut self, scene: &Scene<'_>);
    /// Shows something that happened.
    fn note(&mut self, line: &str);
    /// Nothing more will be shown.
    fn end(&mut self);
}

/// The view for where the errors go: live on a terminal, lines elsewhere.
pub fn for_this_terminal() -> Box<dyn View> {
    if std::io::stderr().is_terminal() { Box::new(Live::new()) } else { Box::new(Lines::new(|line| eprintln!("{line}"))) }
}

impl Scene<'_> {
    /// The run in one line.
    fn run_line(&self) -> String {
        let Some(status) = self.status else { return self.trouble.unwrap_or("waiting for the coordinator").to_owned() };
        let mut parts = vec![format!("step {}/{}", status.step, status.steps)];
        if let Some((_, loss)) = status.losses.last() {
            parts.push(format!("loss {loss:.3}"));
        }
        if status.tokens_per_second > 0.0 {
            parts.push(format!("{:.0} tokens/s", status.tokens_per_second));
        }
        if let Some(left) = status.seconds_left.filter(|_| status.step < status.steps) {
            parts.push(format!("{} left", minutes(left)));
        }
        match (self.trouble, &status.waiting_for) {
            (Some(trouble), _) => parts.push(trouble.to_owned()),
            (None, Some(what)) => parts.push(format!("waiting for {what}")),
            (None, None) if status.step == 0 => parts.push(status.state.clone()),
            (None, None) => {}
        }
        parts.join("  ")
    }

    fn node_status(&self, member: &Member) -> Option<&NodeStatus> {
        let called = |node: &&NodeStatus| node.node == member.name || (node.node.len() >= 8 && member.id.starts_with(&node.node));
        self.status?.nodes.iter().find(called)
    }

    /// A node in one line: name, state, span, share of the work, link, rate.
    fn node_line(&self, member: &Member) -> String {
        let name = &member.name;
        match &member.fate {
            Fate::Later => format!("{name:<8} not started yet"),
            Fate::Killed(step) => format!("{name:<8} killed (SIGKILL) at step {step}"),
            Fate::Ended(how) => format!("{name:<8} ended: {how}"),
            Fate::Runs { fresh } => {
                let name = if *fresh { format!("{name} (new)") } else { name.clone() };
                let Some(node) = self.node_status(member) else { return format!("{name:<8} starting") };
                let span = if node.span.is_empty() { "no blocks".to_owned() } else { format!("blocks {}", node.span) };
                let sent = if node.bytes_per_second > 0.0 { format!(" {}/s", bytes(node.bytes_per_second)) } else { String::new() };
                let (share, link) = (node.share * 100.0, format!("{}{sent}", if node.link.is_empty() { "-" } else { &node.link }));
                format!("{name:<8} {:<8} {span:<12} {share:>3.0}% of the work  {link}  {:.1} microbatches/s", node.state, node.rate)
            }
        }
    }

    /// A node in a word or three.
    fn node_word(&self, member: &Member) -> String {
        let name = &member.name;
        match &member.fate {
            Fate::Later => format!("{name} later"),
            Fate::Killed(_) => format!("{name} killed"),
            Fate::Ended(_) => format!("{name} ended"),
            Fate::Runs { .. } => match self.node_status(member) {
                None => format!("{name} starting"),
                Some(node) if node.state == "active" => format!("{name} {} {:.0}%", node.span, node.share * 100.0),
                Some(node) => format!("{name} {}", node.state),
            },
        }
    }
}

/// Seconds as `m:ss`.
fn minutes(seconds: f64) -> String {
    let seconds = seconds.round().max(0.0) as u64;
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

/// A number of bytes as people read it.
fn bytes(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.1} GB", count / 1e9),
        count if count >= 1e6 => format!("{:.1} MB", count / 1e6),
        count => format!("{:.0} kB", count / 1e3),
    }
}

/// A progress bar for the run, a line below it for each node, what happened above.
struct Live {
    all: MultiProgress,
    run: ProgressBar,
    nodes: Vec<ProgressBar>,
}

impl Live {
    fn new() -> Self {
        let all = MultiProgress::new();
        let run = all.add(ProgressBar::new(0));
        run.set_style(ProgressStyle::with_template("{bar:30} {msg}").expect("a template of ours"));
        Self { all, run, nodes: Vec::new() }
    }
}

impl View for Live {
    fn show(&mut self, scene: &Scene<'_>) {
        if let Some(status) = scene.status {
            self.run.set_length(status.steps);
            self.run.set_position(status.step);
        }
        self.run.set_message(scene.run_line());
        while self.nodes.len() < scene.members.len() {
            let line = self.all.add(ProgressBar::new(0));
            line.set_style(ProgressStyle::with_template("  {wide_msg}").expect("a template of ours"));
            self.nodes.push(line);
        }
        for (line, member) in self.nodes.iter().zip(scene.members) {
            line.set_message(scene.node_line(member));
        }
    }

    fn note(&mut self, line: &str) {
        // Without a terminal there is nobody to miss it.
        let _ = self.all.println(line);
    }

    fn end(&mut self) {
        for line in &self.nodes {
            line.abandon();
        }
        self.run.abandon();
        // What comes next begins on a line of its own.
        eprintln!();
    }
}

/// A line every few seconds.
struct Lines<W> {
    write: W,
    next: f64,
}

impl<W: FnMut(&str)> Lines<W> {
    fn new(write: W) -> Self {
        Self { write, next: 0.0 }
    }
}

impl<W: FnMut(&str)> View for Lines<W> {
    fn show(&mut self, scene: &Scene<'_>) {
        if scene.seconds < self.next {
            return;
        }
        self.next = scene.seconds + LINE_EVERY_SECONDS;
        let nodes: Vec<String> = scene.members.iter().map(|member| scene.node_word(member)).collect();
        (self.write)(&format!("{}  |  {}", scene.run_line(), nodes.join(", ")));
    }

    fn note(&mut self, line: &str) {
        (self.write)(line);
    }

    fn end(&mut self) {}
}

/// Watches throughput dip and recover after a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Dip {
    before: f64,
    lowest: f64,
    began: f64,
    over: bool,
}

impl Dip {
    /// A loss at `seconds`, when the swarm made `rate` tokens a second.
    pub fn new(seconds: f64, rate: f64) -> Self {
        Self { before: rate, lowest: rate, began: seconds, over: false }
    }

    /// The rate at a later moment; a line for the user once the rate is back within a tenth.
    pub fn observe(&mut self, seconds: f64, rate: f64) -> Option<String> {
        if self.over || self.before <= 0.0 {
            return None;
        }
        self.lowest = self.lowest.min(rate);
        // It must have fallen before it can have recovered.
        let fell = self.lowest < 0.9 * self.before;
        self.over = fell && rate >= 0.9 * self.before;
        self.over.then(|| {
            format!("throughput is back: {:.0} tokens/s before, {:.0} at worst, {rate:.0} after {:.0} s", self.before, self.lowest, seconds - self.began)
        })
    }

    /// A line for the user at the end, if the rate never came back.
    pub fn at_the_end(&self, rate: f64) -> Option<String> {
        (!self.over && self.before > 0.0)
            .then(|| format!("throughput: {:.0} tokens/s before the loss, {:.0} at worst, {rate:.0} at the end", self.before, self.lowest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        Status {
            state: "training".to_owned(),
            step: 12,
            steps: 250,
            losses: vec![(11, 6.25)],
            tokens_per_second: 3210.4,
            seconds_left: Some(75.2),
            nodes: vec![
                NodeStatus {
                    node: "a".to_owned(),
                    state: "active".to_owned(),
                    span: "0-2".to_owned(),
                    share: 0.31,
                    link: "quic".to_owned(),
                    rate: 5.13,
                    bytes_per_second: 1.25e6,
                    ..NodeStatus::default()
                },
                NodeStatus { node: "0123456789".to_owned(), state: "joining".to_owned(), ..NodeStatus::default() },
            ],
            ..Status::default()
        }
    }

    fn member(name: &str, id: &str, fate: Fate) -> Member {
        Member { name: name.to_owned(), id: id.to_owned(), fate }
    }

    fn members() -> Vec<Member> {
        vec![
            member("a", "ffff", Fate::Runs { fresh: false }),
            member("b", "eeee", Fate::Killed(9)),
            member("e", "0123456789abcdef", Fate::Runs { fresh: true }),
            member("f", "dddd", Fate::Later),
        ]
    }

    #[test]
    fn every_node_has_a_line() {
        let (status, members) = (status(), members());
        let scene = Scene { seconds: 1.0, status: Some(&status), members: &members, trouble: None };
        let lines: Vec<String> = members.iter().map(|member| scene.node_line(member)).collect();
        assert_eq!(lines[0], "a        active   blocks 0-2    31% of the work  quic 1.2 MB/s  5.1 microbatches/s");
        assert_eq!(lines[1], "b        killed (SIGKILL) at step 9");
        assert_eq!(lines[2], "e (new)  joining  no blocks      0% of the work  -  0.0 microbatches/s");
        assert_eq!(lines[3], "f        not started yet");
    }

    #[test]
    fn lines_come_every_other_second() {
        let (status, members) = (status(), members());
        let mut written = Vec::new();
        let mut view = Lines::new(|line: &str| written.push(line.to_owned()));
        for seconds in [0.0, 0.25, 1.75, 2.0] {
            view.show(&Scene { seconds, status: Some(&status), members: &members, trouble: None });
        }
        view.note("something");
        view.show(&Scene { seconds: 4.0, status: None, members: &[], trouble: None });
        assert_eq!(written.len(), 4);
        assert_eq!(written[0], "step 12/250  loss 6.250  3210 tokens/s  1:15 left  |  a 0-2 31%, b killed, e joining, f later");
        assert_eq!(written[3], "waiting for the coordinator  |  ");
    }

    #[test]
    fn what_it_waits_for_is_shown() {
        let mut status = status();
        status.waiting_for = Some("a host for blocks 3-5".to_owned());
        let scene = Scene { seconds: 0.0, status: Some(&status), members: &[], trouble: None };
        assert!(scene.run_line().ends_with("left  waiting for a host for blocks 3-5"), "{}", scene.run_line());
        let scene = Scene { trouble: Some("the coordinator does not answer"), ..scene };
        assert!(scene.run_line().ends_with("left  the coordinator does not answer"), "{}", scene.run_line());
    }

    #[test]
    fn a_dip_is_over_once_the_rate_is_back() {
        let mut dip = Dip::new(10.0, 1000.0);
        assert_eq!(dip.observe(10.5, 990.0), None);
        assert_eq!(dip.observe(11.0, 400.0), None);
        assert_eq!(dip.at_the_end(400.0).expect("still low"), "throughput: 1000 tokens/s before the loss, 400 at worst, 400 at the end");
        assert_eq!(dip.observe(14.0, 950.0).expect("back"), "throughput is back: 1000 tokens/s before, 400 at worst, 950 after 4 s");
        assert_eq!((dip.observe(15.0, 950.0), dip.at_the_end(950.0)), (None, None));
    }

    #[test]
    fn amounts_are_readable() {
        assert_eq!([bytes(999.0), bytes(2.5e6), bytes(3e9)], ["1 kB", "2.5 MB", "3.0 GB"]);
        assert_eq!([minutes(59.6), minutes(3661.0)], ["1:00", "61:01"]);
    }
}
