//! The program as people see it: its screens, and its output into a closed pipe.
#![allow(clippy::unwrap_used, reason = "tests")]

mod pipes;
mod screens;

use std::process::{Command, Stdio};

/// A command of the program, without this machine's configuration.
fn lagoon(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lagoon"));
    command.args(arguments).stdin(Stdio::null());
    let own =
        |name: &str| ["LAGOON_", "HF_", "COLUMNS", "NO_COLOR", "CLICOLOR"].iter().any(|start| name.starts_with(start));
    for (name, _) in std::env::vars().filter(|(name, _)| own(name)) {
        command.env_remove(name);
    }
    // Else the program starts itself again, for the sake of Mesa.
    command.env("NODEVICE_SELECT", "1");
    command
}

/// A path in the repository.
fn path(relative: &str) -> String {
    format!("{}/../../{relative}", env!("CARGO_MANIFEST_DIR"))
}
