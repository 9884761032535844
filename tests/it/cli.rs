//! What the programs say: help texts and errors, one line each, as snapshots.
//!
//! After a change that is meant: `INSTA_UPDATE=always cargo test -p skein-tests cli`.

use crate::cluster::run;

fn help(program: &str, arguments: &[&str]) -> String {
    let output = run(program, &[arguments, &["--help"]].concat());
    assert!(output.status.success(), "{program} {arguments:?} --help");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    if !arguments.is_empty() && arguments != ["data"] {
        assert!(text.contains("Example"), "{program} {arguments:?} --help has an example");
    }
    text
}

/// What a command that must fail prints, with the folder's path cut out.
fn error(program: &str, arguments: &[&str], folder: &std::path::Path) -> String {
    let output = run(program, arguments);
    assert!(!output.status.success(), "{program} {arguments:?} succeeds");
    let text = String::from_utf8(output.stderr).expect("UTF-8").replace(&folder.display().to_string(), "DIR");
    // Log lines come before it; the error itself is the last line.
    text.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn help_of_the_node() {
    let commands = ["start", "identity", "solo", "init", "import", "export", "generate", "eval", "trigram", "doctor"];
    let mut all = help("skein-node", &[]);
    for command in commands {
        all += &format!("\n== {command} ==\n{}", help("skein-node", &[command]));
    }
    all += &format!("\n== data build ==\n{}", help("skein-node", &["data", "build"]));
    insta::assert_snapshot!(all);
}

#[test]
fn help_of_the_coordinator() {
    let mut all = help("skein-coordinator", &[]);
    for command in ["start", "status"] {
        all += &format!("\n== {command} ==\n{}", help("skein-coordinator", &[command]));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn help_of_the_simulator() {
    let mut all = help("skein-sim", &[]);
    for command in ["local", "demo"] {
        all += &format!("\n== {command} ==\n{}", help("skein-sim", &[command]));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let good = skein_node::engine::toy::config(2, false, 2, 3).to_toml();
    std::fs::write(path("good.toml"), &good).expect("written");
    std::fs::write(path("bad.toml"), good.replace("learning_rate", "learnin_rate")).expect("written");
    std::fs::write(path("range.toml"), good.replace("beta2 = 0.95", "beta2 = 1.5")).expect("written");
    let busy = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = busy.local_addr().expect("bound").port();
    let busy_address = format!("127.0.0.1:{port}");
    let nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDfe4pukwBCGU15Rk8a7GzgZFqwtuwanqksfGGuNamak8";
    let start = |run: &str, state: &str, listen: &str| {
        error("skein-coordinator", &["start", "--run", &path(run), "--state", &path(state), "--listen", listen], folder.path())
    };
    let node = |arguments: &[&str]| error("skein-node", arguments, folder.path());
    let all = [
        ("a mistyped key", start("bad.toml", "co", "127.0.0.1:0")),
        ("a value out of range", start("range.toml", "co", "127.0.0.1:0")),
        ("no such file", start("none.toml", "co", "127.0.0.1:0")),
        ("a port in use", start("good.toml", "co", &busy_address).replace(&port.to_string(), "PORT")),
        (
            "nothing to resume",
            error("skein-coordinator", &["start", "--run", &path("good.toml"), "--state", &path("co2"), "--listen", "127.0.0.1:0", "--resume"], folder.path()),
        ),
        ("no coordinator there", node(&["export", "--coordinator", nobody, "--out", &path("model")])),
        ("an address without a key", node(&["export", "--coordinator", "/ip4/127.0.0.1/tcp/1", "--out", &path("model")])),
        ("no data", node(&["trigram", "--data", &path("nothing")])),
        ("no model", node(&["eval", "--model", &path("nothing"), "--data", &path("nothing")])),
        ("no text", node(&["data", "build", "--out", &path("data"), &path("none.txt")])),
        ("a share above 1", node(&["start", "--coordinator", nobody, "--state", &path("a"), "--compute-share", "2"])),
    ];
    let text: Vec<String> = all.iter().map(|(what, line)| format!("{what}\n    {line}")).collect();
    insta::assert_snapshot!(text.join("\n"));
}
