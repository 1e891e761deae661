//! `lagoon certs`: the cluster's certificate authority and the nodes' certificates, as PEM files.
//!
//! Keys are readable by their owner only, and nothing is overwritten unasked.
#![allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]

use anyhow::{Context, bail};
use lagoon_transport::{ClusterCa, Issued, SERVER_NAME, describe};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// `lagoon certs`.
#[derive(Debug, clap::Args)]
pub(crate) struct CertsArgs {
    #[command(subcommand)]
    command: CertsCommand,
}

#[derive(Debug, clap::Subcommand)]
enum CertsCommand {
    /// Make a cluster CA: DIR/ca.pem, which every node gets, and DIR/ca.key, which stays here.
    Init {
        dir: PathBuf,
        /// Name of the cluster, for people.
        #[arg(long, default_value = "lagoon")]
        name: String,
        /// Replace an existing CA. Every certificate that it issued becomes worthless.
        #[arg(long)]
        force: bool,
    },
    /// Issue a node's certificate and key: DIR/NAME.pem and DIR/NAME.key.
    Issue {
        /// Where `certs init` made the CA.
        dir: PathBuf,
        /// Name of the node, for people and for the files.
        name: String,
        /// Replace existing files.
        #[arg(long)]
        force: bool,
    },
    /// Show the names and the validity of the certificates in FILE.
    Show { file: PathBuf },
}

/// Runs the command.
pub(crate) fn run(args: CertsArgs) -> anyhow::Result<()> {
    match args.command {
        CertsCommand::Init { dir, name, force } => init(&dir, &name, force),
        CertsCommand::Issue { dir, name, force } => issue(&dir, &name, force),
        CertsCommand::Show { file } => show(&file),
    }
}

fn init(dir: &Path, name: &str, force: bool) -> anyhow::Result<()> {
    let (cert, key) = (dir.join("ca.pem"), dir.join("ca.key"));
    refuse_to_overwrite(&[&cert, &key], force)?;
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let ca = ClusterCa::generate(name)?;
    save(&key, &ca.key_pem(), true)?;
    save(&cert, ca.cert_pem(), false)?;
    println!("{}\n{}", cert.display(), key.display());
    Ok(())
}

fn issue(dir: &Path, name: &str, force: bool) -> anyhow::Result<()> {
    if name.is_empty() || name == "ca" || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        bail!("a node's name consists of letters, digits, '-', '_' and '.', and is not \"ca\": {name:?}");
    }
    let (cert, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
    refuse_to_overwrite(&[&cert, &key], force)?;
    let (ca_cert, ca_key) = (dir.join("ca.pem"), dir.join("ca.key"));
    if !ca_key.exists() {
        bail!("there is no CA in {0}\nhint: lagoon certs init {0}", dir.display());
    }
    let ca = ClusterCa::from_pem(&read(&ca_cert)?, &read(&ca_key)?)?;
    let Issued { cert_pem, key_pem } = ca.issue(name)?;
    save(&key, &key_pem, true)?;
    save(&cert, &cert_pem, false)?;
    println!("{}\n{}", cert.display(), key.display());
    Ok(())
}

fn show(file: &Path) -> anyhow::Result<()> {
    let infos = describe(&read(file)?).with_context(|| format!("reading {}", file.display()))?;
    for info in infos {
        println!("subject     {}", info.subject);
        println!("issuer      {}", info.issuer);
        println!("kind        {}", if info.is_ca { "certificate authority" } else { "node" });
        println!("names       {}", info.names.join(", "));
        println!("not before  {}", info.not_before);
        println!("not after   {}", info.not_after);
        if !info.is_ca && !info.names.iter().any(|name| name == SERVER_NAME) {
            println!("note        not valid for {SERVER_NAME:?}: peers will refuse it");
        }
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

fn refuse_to_overwrite(paths: &[&Path], force: bool) -> anyhow::Result<()> {
    match paths.iter().find(|path| path.exists()) {
        Some(path) if !force => bail!("{} exists\nhint: --force replaces it", path.display()),
        _ => Ok(()),
    }
}

/// Writes a whole file or none: to a name of its own, then renamed. A secret one is created for its owner only.
fn save(path: &Path, text: &str, secret: bool) -> anyhow::Result<()> {
    let context = || format!("writing {}", path.display());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let draft = path.with_file_name(name);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    if secret {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    #[cfg(not(unix))]
    let _ = secret;
    if draft.exists() {
        // Left by a run that was cut short.
        fs::remove_file(&draft).with_context(context)?;
    }
    let mut file = options.open(&draft).with_context(context)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(context)?;
    fs::rename(&draft, path).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_transport::Identity;

    #[test]
    fn a_cluster_is_made_shown_and_never_overwritten_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("certs");
        init(&dir, "test", false).unwrap();
        issue(&dir, "node-a", false).unwrap();
        let path = |name: &str| dir.join(name);
        Identity::load(&path("ca.pem"), &path("node-a.pem"), &path("node-a.key")).unwrap();

        let infos = describe(&fs::read_to_string(path("node-a.pem")).unwrap()).unwrap();
        assert_eq!(infos[0].subject, "CN=node-a");
        assert_eq!(infos[0].issuer, "CN=test cluster CA");
        assert_eq!(infos[0].names, [SERVER_NAME]);
        assert!(!infos[0].is_ca && infos[0].not_after > infos[0].not_before);
        show(&path("ca.pem")).unwrap();

        let before = fs::read(path("ca.key")).unwrap();
        assert!(init(&dir, "test", false).unwrap_err().to_string().contains("--force"));
        assert!(issue(&dir, "node-a", false).unwrap_err().to_string().contains("--force"));
        assert_eq!(fs::read(path("ca.key")).unwrap(), before);
        init(&dir, "test", true).unwrap();
        assert_ne!(fs::read(path("ca.key")).unwrap(), before);
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), "test", false).unwrap();
        issue(dir.path(), "n", false).unwrap();
        for name in ["ca.key", "n.key"] {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(issue(dir.path(), "n", false).unwrap_err().to_string().contains("certs init"));
        assert!(issue(dir.path(), "../n", false).unwrap_err().to_string().contains("letters"));
        let file = dir.path().join("x");
        fs::write(&file, "nothing").unwrap();
        assert!(format!("{:#}", show(&file).unwrap_err()).contains("no certificate"));
    }
}
