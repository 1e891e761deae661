//! `lagoon certs`: the cluster's certificate authority and the nodes' certificates, as PEM files.
//!
//! Keys are readable by their owner only. Nothing is overwritten without --force.

use crate::log::outln;
use anyhow::{Context, bail};
use lagoon_transport::{ClusterCa, Identity, Issued, NodeRole, Roles, SERVER_NAME, Subject, describe};
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
        /// Name of the node, which its certificate carries, and of the files.
        name: String,
        /// Roles of the node: gmanager, instance, kv, gateway, operator (comma-separated).
        #[arg(long, value_name = "ROLE", value_delimiter = ',', default_value = "instance")]
        role: Vec<NodeRole>,
        /// Replace an existing certificate, for the key that is there; after `certs revoke`, or where NAME.key is gone, for a new
        /// key. The certificate before stays valid unless it is revoked first.
        #[arg(long)]
        force: bool,
    },
    /// Issue a node's certificate anew for the key that it has, for the same roles. Running nodes load it by themselves.
    Renew {
        /// Where the CA and the node's files are.
        dir: PathBuf,
        /// Name of the node whose certificate is renewed.
        name: String,
    },
    /// Put a node's certificate on the revocation list DIR/crl.pem, which every node gets (`--tls-crl`).
    Revoke {
        /// Where the CA, the node's certificate and the list are.
        dir: PathBuf,
        /// Name of the node whose certificate is revoked.
        name: String,
    },
    /// Show the names and the validity of the certificates in FILE.
    Show { file: PathBuf },
}

/// Runs the command.
pub(crate) fn run(args: CertsArgs) -> anyhow::Result<()> {
    match args.command {
        CertsCommand::Init { dir, name, force } => init(&dir, &name, force),
        CertsCommand::Issue { dir, name, role, force } => issue(&dir, &name, role.into_iter().collect(), force),
        CertsCommand::Renew { dir, name } => renew(&dir, &name),
        CertsCommand::Revoke { dir, name } => revoke(&dir, &name),
        CertsCommand::Show { file } => show(&file),
    }
}

fn init(dir: &Path, name: &str, force: bool) -> anyhow::Result<()> {
    let (cert, key) = (dir.join("ca.pem"), dir.join("ca.key"));
    refuse_to_overwrite(&[&cert, &key], force)?;
    create_private(dir).with_context(|| format!("creating {}", dir.display()))?;
    #[cfg(unix)]
    refuse_shared(dir)?;
    let ca = ClusterCa::generate(name)?;
    save(&key, &ca.key_pem(), true)?;
    save(&cert, ca.cert_pem(), false)?;
    outln!("{}\n{}", cert.display(), key.display());
    Ok(())
}

/// Creates a folder that only its owner may enter; an existing folder keeps its mode.
fn create_private(dir: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(dir)
}

/// Refuses an existing folder that others may enter: it may have another use, so its mode is not changed.
#[cfg(unix)]
fn refuse_shared(dir: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode =
        fs::metadata(dir).with_context(|| format!("reading the mode of {}", dir.display()))?.permissions().mode();
    if mode & 0o077 != 0 {
        bail!(
            "others than its owner may use {0} (mode {1:o}), where private keys would be\nhint: chmod 700 {0}, or name a new folder",
            dir.display(),
            mode & 0o7777
        );
    }
    Ok(())
}

fn issue(dir: &Path, name: &str, roles: Roles, force: bool) -> anyhow::Result<()> {
    if name.is_empty()
        || ["ca", "crl"].contains(&name)
        || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    {
        bail!("a node's name consists of letters, digits, '-', '_' and '.', and is not \"ca\" or \"crl\": {name:?}");
    }
    let (cert, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
    refuse_to_overwrite(&[&cert, &key], force)?;
    let ca = open_ca(dir)?;
    #[cfg(unix)]
    refuse_shared(dir)?;
    // A node that runs is known by its key, and a revoked certificate's key may be in others' hands.
    if key.exists() && !is_revoked(dir, &cert)? {
        let kept = ca.issue_for_key(name, roles, &read(&key)?);
        let issued = kept.with_context(|| format!("use {0}\nhint: without {0} a new key is made", key.display()))?;
        save(&cert, &issued.cert_pem, false)?;
    } else {
        let Issued { cert_pem, key_pem } = ca.issue(name, roles)?;
        save(&key, &key_pem, true)?;
        save(&cert, &cert_pem, false)?;
    }
    outln!("{}\n{}", cert.display(), key.display());
    Ok(())
}

/// Whether the certificate is on the CA's revocation list. False if either file is missing; a certificate that cannot be read
/// counts as revoked.
fn is_revoked(dir: &Path, cert: &Path) -> anyhow::Result<bool> {
    let list = dir.join("crl.pem");
    if !list.exists() || !cert.exists() {
        return Ok(false);
    }
    let Ok(subject) = Subject::from_pem(&read(cert)?) else { return Ok(true) };
    subject.is_on(&read(&list)?).with_context(|| format!("reading {}", list.display()))
}

fn open_ca(dir: &Path) -> anyhow::Result<ClusterCa> {
    let (cert, key) = (dir.join("ca.pem"), dir.join("ca.key"));
    if !key.exists() {
        bail!("there is no CA in {0}\nhint: lagoon certs init {0}", dir.display());
    }
    Ok(ClusterCa::from_pem(&read(&cert)?, &read(&key)?)?)
}

/// Renews a node's certificate with its present key, by which a connected node is identified.
fn renew(dir: &Path, name: &str) -> anyhow::Result<()> {
    let (ca, cert) = (open_ca(dir)?, dir.join(format!("{name}.pem")));
    let key = dir.join(format!("{name}.key"));
    if is_revoked(dir, &cert)? {
        bail!(
            "the certificate of {name} is revoked, and others may have its key\n\
             hint: lagoon certs issue {} {name} --role ROLE --force makes another key",
            dir.display()
        );
    }
    let before = Identity::load(&dir.join("ca.pem"), &cert, &key, None)
        .with_context(|| format!("load the certificate of {name}"))?;
    let Subject { node, roles, .. } = before.subject();
    let issued = ca.issue_for_key(node, *roles, &read(&key)?)?;
    save(&cert, &issued.cert_pem, false)?;
    outln!("{}", cert.display());
    Ok(())
}

fn revoke(dir: &Path, name: &str) -> anyhow::Result<()> {
    let (ca, file) = (open_ca(dir)?, dir.join("crl.pem"));
    let list = file.exists().then(|| read(&file)).transpose()?;
    let list = ca.revoke(list.as_deref(), &read(&dir.join(format!("{name}.pem")))?)?;
    save(&file, &list, false)?;
    outln!("{}", file.display());
    Ok(())
}

fn show(file: &Path) -> anyhow::Result<()> {
    let infos = describe(&read(file)?).with_context(|| format!("reading {}", file.display()))?;
    for info in infos {
        outln!("subject     {}", info.subject);
        outln!("issuer      {}", info.issuer);
        outln!("kind        {}", if info.is_ca { "certificate authority" } else { "node" });
        outln!("names       {}", info.names.join(", "));
        outln!("not before  {}", info.not_before);
        outln!("not after   {}", info.not_after);
        if !info.is_ca && !info.names.iter().any(|name| name == SERVER_NAME) {
            outln!("note        not valid for {SERVER_NAME:?}: peers will refuse it");
        }
        if !info.is_ca && !info.names.iter().any(|name| name.starts_with("lagoon://role/")) {
            outln!("note        it names no node and role: peers will refuse it; `lagoon certs issue` makes one");
        }
    }
    Ok(())
}

/// The subject of a certificate and its remaining days.
pub(crate) fn days_left(file: &Path) -> anyhow::Result<(String, i64)> {
    let subject = Subject::from_pem(&read(file)?).with_context(|| format!("read {}", file.display()))?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let left_s = subject.not_after_s - i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    Ok((format!("node {:?}, {}", subject.node, subject.roles), left_s.div_euclid(24 * 3600)))
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

/// Writes a file atomically: to a temporary name, then renamed. A secret one is readable by its owner only.
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
        // Left by an interrupted run.
        fs::remove_file(&draft).with_context(context)?;
    }
    let mut file = options.open(&draft).with_context(context)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(context)?;
    fs::rename(&draft, path).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv() -> Roles {
        NodeRole::Kv.into()
    }

    #[test]
    fn a_cluster_is_made_shown_and_never_overwritten_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("certs");
        init(&dir, "test", false).unwrap();
        issue(&dir, "node-a", kv(), false).unwrap();
        let path = |name: &str| dir.join(name);
        let load = || Identity::load(&path("ca.pem"), &path("node-a.pem"), &path("node-a.key"), None).unwrap();
        let issued = load();
        assert_eq!((&*issued.subject().node, issued.subject().roles), ("node-a", kv()));

        let infos = describe(&fs::read_to_string(path("node-a.pem")).unwrap()).unwrap();
        assert_eq!(infos[0].subject, "CN=node-a");
        assert_eq!(infos[0].issuer, "CN=test cluster CA");
        assert_eq!(infos[0].names, [SERVER_NAME, "lagoon://node/node-a", "lagoon://role/kv"]);
        assert!(!infos[0].is_ca && infos[0].not_after > infos[0].not_before);
        show(&path("ca.pem")).unwrap();

        // Renewed or replaced, it is the same node with the same key; revoked, it is on a list that nodes load, and the next one has
        // another key.
        renew(&dir, "node-a").unwrap();
        assert_eq!(load().subject(), issued.subject());
        issue(&dir, "node-a", NodeRole::Instance.into(), true).unwrap();
        assert_eq!((load().subject(), load().subject().roles), (issued.subject(), NodeRole::Instance.into()));
        revoke(&dir, "node-a").unwrap();
        revoke(&dir, "node-a").unwrap();
        Identity::load(&path("ca.pem"), &path("node-a.pem"), &path("node-a.key"), Some(&path("crl.pem"))).unwrap();
        assert!(renew(&dir, "node-a").unwrap_err().to_string().contains("--force"));
        issue(&dir, "node-a", kv(), true).unwrap();
        let anew = load();
        assert!(anew.subject() != issued.subject() && anew.subject().node == issued.subject().node);
        issue(&dir, "node-a", kv(), true).unwrap();
        assert_eq!(load().subject(), anew.subject());

        let before = fs::read(path("ca.key")).unwrap();
        assert!(init(&dir, "test", false).unwrap_err().to_string().contains("--force"));
        assert!(issue(&dir, "node-a", kv(), false).unwrap_err().to_string().contains("--force"));
        assert_eq!(fs::read(path("ca.key")).unwrap(), before);
        init(&dir, "test", true).unwrap();
        assert_ne!(fs::read(path("ca.key")).unwrap(), before);
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ca");
        init(&dir, "test", false).unwrap();
        issue(&dir, "n", kv(), false).unwrap();
        for (name, expected) in [("", 0o700), ("ca.key", 0o600), ("n.key", 0o600)] {
            let mode = fs::metadata(dir.join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, expected, "{name}");
        }
    }

    /// It was used as it was.
    #[cfg(unix)]
    #[test]
    fn a_folder_that_others_may_use_gets_no_key() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        for (mode, refused) in [(0o755, true), (0o710, true), (0o702, true), (0o700, false)] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let made = init(dir.path(), "test", false);
            assert_eq!(made.is_err_and(|error| error.to_string().contains("chmod 700")), refused, "{mode:o}");
            assert_eq!(dir.path().join("ca.key").exists(), !refused, "{mode:o}");
        }
        for (mode, refused) in [(0o755, true), (0o700, false)] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let issued = issue(dir.path(), "n", kv(), false);
            assert_eq!(issued.is_err_and(|error| error.to_string().contains("chmod 700")), refused, "{mode:o}");
            assert_eq!(dir.path().join("n.key").exists(), !refused, "{mode:o}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(issue(dir.path(), "n", kv(), false).unwrap_err().to_string().contains("certs init"));
        assert!(issue(dir.path(), "../n", kv(), false).unwrap_err().to_string().contains("letters"));
        let file = dir.path().join("x");
        fs::write(&file, "nothing").unwrap();
        assert!(format!("{:#}", show(&file).unwrap_err()).contains("no certificate"));
    }
}
