//! Every flag can stand in the file, what cannot is named, and the command line and the environment win over it.

use super::*;
use crate::Cli;
use crate::command_line::{self, Refused};
use clap::{ArgAction, CommandFactory as _};
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Arguments that a file with `text` adds to `line`.
fn added_to(line: &str, text: &str) -> anyhow::Result<Vec<String>> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let words = line.split(' ').map(OsString::from);
    let config = ["--config".into(), file.path().as_os_str().to_owned()];
    let mut arguments = added(&Cli::command(), &words.chain(config).collect::<Vec<_>>())?.arguments;
    arguments.sort();
    Ok(arguments)
}

fn refused(text: &str) -> String {
    format!("{:#}", added_to("lagoon serve m", text).unwrap_err())
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/lagoon.toml")
}

fn read_example(line: &str) -> Result<Cli, Refused> {
    let words = line.split(' ').map(OsString::from);
    command_line::read(words.chain([OsString::from("--config"), example().into()]).collect())
}

#[test]
fn a_table_is_for_its_command() {
    let text = "log = 'info'\n[serve]\nkv-tokens = 64\nprefix-cache = false\njson = true\nexpose-logits = false\n\
                [up]\nkv-tokens = 32\nauto-roles = true\n[gateway]\nbackend = ['a:1', 'b:2']\n";
    let serve = ["--json", "--kv-tokens=64", "--log=info", "--prefix-cache=off"];
    assert_eq!(added_to("lagoon serve m", text).unwrap(), serve);
    assert_eq!(added_to("lagoon up", text).unwrap(), ["--auto-roles", "--kv-tokens=32", "--log=info"]);
    assert_eq!(added_to("lagoon gateway", text).unwrap(), ["--backend=a:1", "--backend=b:2", "--log=info"]);
    assert_eq!(added_to("lagoon status", text).unwrap(), ["--log=info"]);
}

#[test]
fn a_commands_only_argument_can_stand_in_the_file() {
    let text = "[serve]\nmodel = 'a'\nkv-tokens = 64\n";
    assert_eq!(added_to("lagoon serve", text).unwrap(), ["--kv-tokens=64", "a"]);
    assert_eq!(added_to("lagoon serve b", text).unwrap(), ["--kv-tokens=64"]);
}

#[test]
fn tables_are_nested_as_commands_are() {
    let text = "[kv]\nurl = 'http://a:1'\n[kv.ls]\njson = true\nurl = 'http://b:1'\n";
    assert_eq!(added_to("lagoon kv ls", text).unwrap(), ["--json", "--url=http://b:1"]);
    assert_eq!(added_to("lagoon kv plan", text).unwrap(), ["--url=http://a:1"]);
}

#[test]
fn the_command_line_wins_over_the_file() {
    let text = "log = 'info'\n[serve]\nkv-tokens = 64\nname = 'a'\n";
    assert_eq!(added_to("lagoon --log=debug serve m --kv-tokens 8", text).unwrap(), ["--name=a"]);
    assert_eq!(added_to("lagoon serve m --log=debug --name=x", text).unwrap(), ["--kv-tokens=64"]);
    // Before `--`, behind which there are no flags.
    let added = Added { file: PathBuf::new(), arguments: vec!["--json".to_owned()] };
    let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
    assert_eq!(added.to(words("lagoon serve -- m")), words("lagoon serve --json -- m"));
}

/// Some values take a while to read: host names are looked up.
#[test]
fn without_a_file_no_value_is_read() {
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let slow = move |text: &str| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok::<_, String>(text.to_owned())
    };
    let cli = Command::new("lagoon").arg(Arg::new("config").long("config").value_parser(clap::value_parser!(PathBuf)));
    let cli = cli.arg(Arg::new("peer").long("peer").value_parser(slow));
    assert!(added(&cli, &["lagoon", "--peer=a"].map(OsString::from)).unwrap().arguments.is_empty());
    assert_eq!(reads.load(Ordering::SeqCst), 0);
    assert!(added(&cli, &["lagoon", "--peer=a", "--config=no/such/file"].map(OsString::from)).is_err());
    assert_eq!(reads.load(Ordering::SeqCst), 1);
}

#[test]
fn the_environment_wins_over_the_file() {
    let cli = Command::new("lagoon").arg(Arg::new("config").long("config").value_parser(clap::value_parser!(PathBuf)));
    // Cargo sets this variable for tests.
    let cli = cli.arg(Arg::new("name").long("name").env("CARGO_PKG_NAME")).arg(Arg::new("other").long("other"));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"name = 'file'\nother = 'file'\n").unwrap();
    let given = ["lagoon".into(), "--config".into(), file.path().as_os_str().to_owned()];
    assert_eq!(added(&cli, &given).unwrap().arguments, ["--other=file"]);
}

#[test]
fn unknown_keys_are_refused_in_every_table_with_the_nearest_name() {
    let text = refused("[serve]\nkv_tokens = 64\n");
    assert!(text.contains("[serve] has no key `kv_tokens`\nhint: did you mean `kv-tokens`?"), "{text}");
    assert!(refused("[gateway]\nlistn = 'a:1'\n").contains("hint: did you mean `listen`?"));
    assert!(refused("[kv.ls]\nurrl = 'x'\n").contains("[kv.ls] has no key `urrl`\nhint: did you mean `url`?"));
    assert!(
        refused("[sreve]\nkv-tokens = 64\n")
            .contains("the file's top level has no key `sreve`\nhint: did you mean `serve`?")
    );
    assert!(
        refused("[serve]\nxyzzy = 1\n").contains("hint: keys are flags without their dashes: `lagoon serve --help`")
    );
    for key in NOT_IN_A_FILE {
        assert!(refused(&format!("[serve]\n{key} = 'x'\n")).contains("has no key"), "{key}");
    }
    // Of several arguments, it would not be clear which the command line gives.
    assert!(refused("[quantize]\nmodel = 'x'\n").contains("has no key `model`"));
}

#[test]
fn values_that_no_flag_can_have_are_refused() {
    assert!(refused("[serve]\njson = 'yes'\n").contains("hint: it is true or false"));
    assert!(refused("[serve]\nkv-tokens = {}\n").contains("hint: it is a text or a number"));
    assert!(refused("serve = 3\n").contains("hint: [serve] begins its flags"));
    assert!(refused("[serve\n").contains("read "));
    let missing = added(&Cli::command(), &["lagoon", "status", "--config=no/such/file"].map(OsString::from));
    assert!(format!("{:#}", missing.unwrap_err()).contains("no/such/file"));
}

/// What clap refuses is reported with the names of what the file adds.
#[test]
fn clap_checks_what_the_file_says() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"[serve]\nkv-tokens = 'many'\napi-key = 'secret'\n").unwrap();
    let given = ["lagoon".into(), "serve".into(), "m".into(), "--config".into(), file.path().as_os_str().to_owned()];
    let Err(Refused::Message(text)) = command_line::read(given.to_vec()) else { panic!("it was read") };
    assert!(text.contains("invalid value 'many' for '--kv-tokens <N>'"), "{text}");
    assert!(text.contains(" adds --api-key, --kv-tokens\n") && !text.contains("secret"), "{text}");
}

/// No list of keys stands beside the flags: each flag of each command is one.
#[test]
fn every_flag_of_every_command_is_a_key() {
    fn walk(command: &Command, keys: &mut usize) {
        for arg in command.get_arguments().filter(|arg| !NOT_IN_A_FILE.contains(&arg.get_id().as_str())) {
            let Some(key) = arg.get_long() else { continue };
            let value = if arg.get_action().takes_values() { Value::from("x") } else { Value::from(true) };
            check(command, &Table::from_iter([(key.to_owned(), value)])).unwrap();
            assert!(matches!(arg.get_action(), ArgAction::Set | ArgAction::Append | ArgAction::SetTrue), "{key}");
            *keys += 1;
        }
        command.get_subcommands().filter(|of| of.get_name() != "help").for_each(|of| walk(of, keys));
    }
    let mut cli = Cli::command();
    cli.build();
    let mut keys = 0;
    walk(&cli, &mut keys);
    assert!(keys > 100, "{keys}");
}

#[test]
fn the_example_of_the_guide_is_read() {
    let table = read(&example()).unwrap();
    for command in table.iter().filter(|(_, value)| value.is_table()).map(|(name, _)| name) {
        if let Err(refused) = read_example(&format!("lagoon {command}")) {
            panic!("[{command}]: {refused:?}");
        }
    }
    for command in ["serve", "up", "gmanager", "gateway"] {
        assert!(table.contains_key(command), "{command}");
    }
}
