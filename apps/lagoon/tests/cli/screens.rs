//! Snapshots of screens at 80 and 120 columns, in apps/lagoon/tests/screens.
//!
//! `INSTA_UPDATE=always cargo test --release -p lagoon --test cli screens` accepts changes.

use super::{lagoon, path};
use std::process::Output;

const COLUMNS: [&str; 2] = ["80", "120"];

/// Compares a screen with its snapshot.
fn screen(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../screens");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn run(arguments: &[&str], columns: &str) -> Output {
    lagoon(arguments).env("COLUMNS", columns).output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// Names of all commands and their subcommands, as the program lists them.
fn commands() -> Vec<Vec<String>> {
    let listed = |path: &[&str]| {
        let help = text(run(&[path, &["--help"]].concat(), "120").stdout);
        let list =
            help.split_once("Commands:\n").map_or("", |(_, list)| list).lines().take_while(|line| !line.is_empty());
        // Descriptions that are wrapped begin further right.
        let names = list.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names: Vec<String> = names.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect();
        names.into_iter().filter(|name| name != "help").collect::<Vec<_>>()
    };
    let mut all = vec![vec![]];
    for command in listed(&[]) {
        all.push(vec![command.clone()]);
        all.extend(listed(&[&command]).into_iter().map(|inner| vec![command.clone(), inner]));
    }
    all
}

#[test]
fn helps() {
    let commands = commands();
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let words: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
        for columns in COLUMNS {
            let help = run(&words, columns);
            assert!(help.status.success(), "{words:?}");
            let help = text(help.stdout);
            let width: usize = columns.parse().unwrap();
            for line in help.lines() {
                // Usages and lists of values are not wrapped by clap.
                let whole = line.starts_with("Usage:") || line.split_whitespace().any(|word| word.len() > width / 2);
                assert!(whole || line.chars().count() <= width, "{words:?} at {columns} columns: {line}");
            }
            screen(&[&["help"], &words[..words.len() - 1], &[columns]].concat().join("-"), &help);
        }
    }
}

#[test]
fn errors_with_hints() {
    let model = path("models/passkey");
    let config = path("docs/guide/lagoon.toml");
    let cases: [(&str, &[&str], i32); 6] = [
        ("foreign-flag", &["serve", "MODEL", "--max-num-seqs", "8"], 2),
        ("no-counterpart", &["serve", "MODEL", "--tensor-parallel-size", "2"], 2),
        ("no-host", &["serve", "MODEL", "--gmanager", "gmanager"], 2),
        ("no-model", &["serve", "no/such/model/here", "--backend=cpu"], 1),
        ("too-few-tokens", &["serve", &model, "--backend=cpu", "--kv-tokens=4"], 1),
        ("no-server", &["chat", "--url", "http://127.0.0.1:1", "hello"], 1),
    ];
    for (name, arguments, code) in cases {
        for columns in COLUMNS {
            let ended = run(arguments, columns);
            assert_eq!(ended.status.code(), Some(code), "{ended:?}");
            assert!(ended.stdout.is_empty(), "{ended:?}");
            screen(&format!("error-{name}-{columns}"), &text(ended.stderr));
        }
    }
    let mixed = run(&["up", "--config", &config, "--prefill=1", "--decode=1"], "80");
    screen("error-file-80", &text(mixed.stderr).replace(&config, "lagoon.toml"));
}
