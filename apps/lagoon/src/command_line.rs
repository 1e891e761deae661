//! Reading the process's command line: the file of `--config`, clap, and the messages for what cannot be read.

use crate::{Cli, config_file, foreign_flags, in_words};
use clap::{CommandFactory as _, Parser as _};
use std::ffi::OsString;
use std::io::Write as _;

/// Exit code for a command line that cannot be read.
const USAGE: i32 = 2;

/// Why a command line was refused.
#[derive(Debug)]
pub(crate) enum Refused {
    /// By clap: also help and versions, which go to standard output.
    Clap(clap::Error),
    /// A message with a hint.
    Message(String),
}

impl Refused {
    /// Prints it and ends the process.
    fn exit(self) -> ! {
        match self {
            Self::Clap(error) => error.exit(),
            Self::Message(text) => {
                // A closed standard error is no reason to panic.
                let _ = std::io::stderr().write_all(text.as_bytes());
                std::process::exit(USAGE)
            }
        }
    }
}

/// Reads this process's command line; ends the process if that is not possible.
pub(crate) fn parse() -> Cli {
    read(std::env::args_os().collect()).unwrap_or_else(|refused| refused.exit())
}

/// Reads a command line.
pub(crate) fn read(given: Vec<OsString>) -> Result<Cli, Refused> {
    let added = config_file::added(&Cli::command(), &given).map_err(|error| Refused::Message(in_words(&error)))?;
    let arguments = added.to(given);
    Cli::try_parse_from(&arguments).map_err(|error| {
        let words: Vec<String> = arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        match foreign_flags::explain(&error, &words) {
            Some(text) => Refused::Message(text),
            None if added.arguments.is_empty() || !error.use_stderr() => Refused::Clap(error),
            None => {
                let file = added.file.display();
                Refused::Message(format!("{error}hint: {file} adds {}\n", names(&added.arguments)))
            }
        }
    })
}

/// The names of arguments, without values, which may be secret.
fn names(arguments: &[String]) -> String {
    let name = |argument: &String| argument.split_once('=').map_or(argument.clone(), |(name, _)| name.to_owned());
    arguments.iter().map(name).collect::<Vec<_>>().join(", ")
}
