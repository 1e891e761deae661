//! `lagoon`: the command line of the library, on this machine's own devices.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    lagoon::main(&lagoon::OwnDevices)
}
