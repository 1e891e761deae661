//! `lagoon completions` and `lagoon man`: written from clap's definition of the commands.

use crate::Cli;
use crate::log::{out, outln};
use anyhow::Context;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use std::path::PathBuf;

/// `lagoon completions`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell that reads them.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs) {
    out!("{}", text(args.shell));
}

fn text(shell: Shell) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut shown(), "lagoon", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// The commands that people use: generators of some shells list hidden ones, too.
fn shown() -> Command {
    let cli = Cli::command();
    let commands = cli.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("lagoon").version(env!("CARGO_PKG_VERSION")).args(cli.get_arguments().cloned()).subcommands(commands)
}

/// `lagoon man`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The directory that they are written to; made if it is not there.
    dir: PathBuf,
}

/// Writes a page for each command.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let ManArgs { dir } = args;
    let write = || {
        std::fs::create_dir_all(dir)?;
        clap_mangen::generate_to(Cli::command(), dir)
    };
    write().with_context(|| format!("write manual pages to {}", dir.display()))?;
    outln!("manual pages in {}: man {}", dir.display(), dir.join("lagoon.1").display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn every_shell_has_the_commands_and_flags() {
        for shell in Shell::value_variants() {
            let text = text(*shell);
            for word in ["gmanager", "quantize", "kv-tokens", "completions"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
            assert!(!text.contains("cuda-trial"), "{shell}: hidden commands");
        }
    }

    #[test]
    fn every_command_has_a_page() {
        fn names(command: &Command, prefix: &str, out: &mut Vec<String>) {
            let name = if prefix.is_empty() {
                command.get_name().to_owned()
            } else {
                format!("{prefix}-{}", command.get_name())
            };
            for of in command.get_subcommands().filter(|of| !of.is_hide_set()) {
                names(of, &name, out);
            }
            out.push(name);
        }
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        man(&ManArgs { dir: pages.clone() }).unwrap();
        let mut expected = Vec::new();
        names(&Cli::command(), "", &mut expected);
        assert!(expected.len() > 20, "{expected:?}");
        for name in expected {
            let text =
                std::fs::read_to_string(pages.join(format!("{name}.1"))).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(text.contains(".SH NAME"), "{name}");
        }
        let serve = std::fs::read_to_string(pages.join("lagoon-serve.1")).unwrap();
        assert!(serve.contains("kv\\-tokens"), "{serve}");
        assert!(!pages.join("lagoon-cuda-trial.1").exists());
    }
}
