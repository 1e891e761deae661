//! `--config FILE`: flags in a TOML file, with a table for each command.
//!
//! Keys are the long names of flags, and a command's only argument has its own name (`model`). Every table is checked against clap's
//! definition of the commands, whichever command runs. What the file sets for the command that runs is added to the command line, except
//! for flags that the command line or the environment sets: clap then checks and reads both alike.

use anyhow::{Context, bail, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Largest file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Flags that a file cannot set.
const NOT_IN_A_FILE: [&str; 3] = ["config", "help", "version"];
/// Similarity (Jaro) from which a name is suggested.
const SIMILAR: f64 = 0.7;

/// A command line with what a file adds.
#[derive(Debug, Default)]
pub(crate) struct Added {
    pub(crate) file: PathBuf,
    /// Arguments that the file adds.
    pub(crate) arguments: Vec<String>,
}

impl Added {
    /// The command line with the added arguments.
    pub(crate) fn to(&self, mut given: Vec<OsString>) -> Vec<OsString> {
        let end = given.iter().position(|argument| argument == "--").unwrap_or(given.len());
        given.splice(end..end, self.arguments.iter().map(OsString::from));
        given
    }
}

/// What the file that `given` names with `--config` adds to it; nothing without one.
///
/// # Errors
/// If the file cannot be read, or if a table or key of it is not a command or flag of `cli`; with a hint.
pub(crate) fn added(cli: &Command, given: &[OsString]) -> anyhow::Result<Added> {
    // Reading the command line may take a while: it looks host names up.
    if !given.iter().any(|argument| argument.as_encoded_bytes().starts_with(b"--config")) {
        return Ok(Added::default());
    }
    let Ok(matches) = cli.clone().ignore_errors(true).try_get_matches_from(given) else {
        // Help or the version was asked for.
        return Ok(Added::default());
    };
    let Some(file) = matches.get_one::<PathBuf>("config").cloned() else { return Ok(Added::default()) };
    let mut built = cli.clone();
    built.build();
    let read = || {
        let table = read(&file)?;
        check(&built, &table)?;
        arguments(&built, &table, &matches)
    };
    let arguments = read().with_context(|| format!("read {}", file.display()))?;
    Ok(Added { file, arguments })
}

fn read(file: &Path) -> anyhow::Result<Table> {
    let mut text = String::new();
    let opened = std::fs::File::open(file).context("open it\nhint: --config names a TOML file")?;
    opened.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).context("read it as text")?;
    ensure!(
        text.len() as u64 <= FILE_BYTES_MAX,
        "it is longer than {FILE_BYTES_MAX} bytes\nhint: --config names a TOML file"
    );
    Ok(text.parse()?)
}

/// A name of the table of `command`, for messages.
fn title(command: &Command) -> String {
    let path = command.get_bin_name().unwrap_or(command.get_name());
    match path.split_once(' ') {
        Some((_, path)) => format!("[{}]", path.replace(' ', ".")),
        None => "the file's top level".to_owned(),
    }
}

/// Refuses keys and tables that are no flags and commands, and values that no flag of that name can have.
fn check(command: &Command, table: &Table) -> anyhow::Result<()> {
    for (key, value) in table {
        match (command.find_subcommand(key), value) {
            (Some(of), Value::Table(inner)) => check(of, inner)?,
            (Some(_), _) => bail!("`{key}` is a command, and its value no table\nhint: [{key}] begins its flags"),
            (None, _) => drop(as_arguments(find(command, key)?, key, value)?),
        }
    }
    Ok(())
}

/// The flag or argument that a key means.
fn find<'a>(command: &'a Command, key: &str) -> anyhow::Result<&'a Arg> {
    let allowed = |arg: &&Arg| !NOT_IN_A_FILE.contains(&arg.get_id().as_str());
    let long = command
        .get_arguments()
        .filter(allowed)
        .find(|arg| arg.get_long() == Some(key) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&key)));
    if let Some(arg) = long.or_else(|| argument(command).filter(|arg| arg.get_id() == key)) {
        return Ok(arg);
    }
    bail!("{} has no key `{key}`\nhint: {}", title(command), nearest(command, key))
}

/// The command's argument that is no flag, if it is the only one: of several it would not be clear which are given.
fn argument(command: &Command) -> Option<&Arg> {
    let mut positionals = command.get_positionals();
    positionals.next().filter(|_| positionals.next().is_none())
}

/// The key that was probably meant, or where keys are listed.
fn nearest(command: &Command, key: &str) -> String {
    let flags = command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long);
    let flags = flags.filter(|name| !NOT_IN_A_FILE.contains(name));
    let argument = argument(command).map(|arg| arg.get_id().as_str());
    let commands = command.get_subcommands().filter(|of| !of.is_hide_set()).map(Command::get_name);
    let names = flags.chain(argument).chain(commands.filter(|name| *name != "help"));
    let likeness = names.map(|name| (strsim::jaro(key, name), name));
    match likeness.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(likeness, _)| *likeness >= SIMILAR) {
        Some((_, name)) => format!("did you mean `{name}`?"),
        None => format!("keys are flags without their dashes: `{} --help`", command.get_bin_name().unwrap_or("lagoon")),
    }
}

/// The arguments that `key = value` stands for.
fn as_arguments(arg: &Arg, key: &str, value: &Value) -> anyhow::Result<Vec<String>> {
    let takes = arg.get_action().takes_values();
    let optional = takes && arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    let switch = takes && arg.get_value_names().is_some_and(|names| names.iter().any(|name| name.as_str() == "on|off"));
    let text = match value {
        Value::Array(values) if takes => {
            let each = values.iter().map(|value| as_arguments(arg, key, value));
            return Ok(each.collect::<anyhow::Result<Vec<_>>>()?.concat());
        }
        Value::Boolean(set) if !takes || (optional && !switch) => {
            return Ok(set.then(|| format!("--{key}")).into_iter().collect());
        }
        Value::Boolean(set) if switch => if *set { "on" } else { "off" }.to_owned(),
        _ if !takes => bail!("`{key}` is {value}\nhint: it is true or false"),
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(_) | Value::Datetime(_) | Value::Array(_) | Value::Table(_) => {
            bail!("`{key}` has the value {value}\nhint: it is a text or a number, as after --{key}")
        }
    };
    Ok(vec![if arg.is_positional() { text } else { format!("--{key}={text}") }])
}

/// The arguments for the command that runs; a command's table comes before the tables that it is in.
fn arguments(root: &Command, table: &Table, matches: &ArgMatches) -> anyhow::Result<Vec<String>> {
    let mut levels = vec![(root, table, matches)];
    let (mut command, mut inner, mut below) = (root, Some(table), matches);
    while let Some((name, matches)) = below.subcommand() {
        (command, below) = (command.find_subcommand(name).context("a command without a definition")?, matches);
        inner = inner.and_then(|table| table.get(name)).and_then(Value::as_table);
        levels.extend(inner.map(|table| (command, table, matches)));
    }
    let (mut set, mut arguments) = (Vec::new(), Vec::new());
    for (command, table, matches) in levels.into_iter().rev() {
        for (key, value) in table.iter().filter(|(key, _)| command.find_subcommand(key).is_none()) {
            let arg = find(command, key)?;
            let id = arg.get_id().as_str();
            let given =
                [ValueSource::CommandLine, ValueSource::EnvVariable].map(Some).contains(&matches.value_source(id));
            if !given && !set.contains(&id) {
                arguments.extend(as_arguments(arg, key, value)?);
            }
            set.push(id);
        }
    }
    // Arguments without a name come last: one before them may lack its value.
    arguments.sort_by_key(|argument| !argument.starts_with("--"));
    Ok(arguments)
}

#[cfg(test)]
#[path = "config_file_tests.rs"]
mod tests;
