//! The tests' dependencies besides Rust: Mesa's software Vulkan driver, for the wgpu tests, and an etcd server, for
//! standby gManagers. Installed if possible, else named.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// Debian packages for one dependency of the tests.
struct Need {
    packages: &'static [&'static str],
    /// Its name, and the tests that need it.
    what: &'static str,
    consequence: &'static str,
    is_there: fn() -> bool,
}

const NEEDS: [Need; 2] = [
    Need {
        packages: &["mesa-vulkan-drivers", "libvulkan1"],
        what: "software Vulkan driver",
        consequence: "the wgpu tests cannot run",
        is_there: has_software_vulkan,
    },
    Need {
        packages: &["etcd-server"],
        what: "etcd server",
        consequence: "the tests of standby gManagers cannot run",
        is_there: has_etcd,
    },
];

/// A directory of our own for XDG_RUNTIME_DIR (Mesa warns without one), removed when dropped.
#[derive(Debug)]
pub(crate) struct RuntimeDir(PathBuf);

impl RuntimeDir {
    pub(crate) fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("lagoon-run-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))?;
        }
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        // Leftovers in the temporary directory are harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether `dir` holds a file whose name the test accepts.
fn any_file(dir: &str, accept: impl Fn(&str) -> bool) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| accept(&entry.file_name().to_string_lossy()))
}

/// Whether Mesa's software driver (lavapipe) and the loader are installed: the tests use it even beside a real GPU.
/// Drivers named in the environment count as a deliberate choice.
fn has_software_vulkan() -> bool {
    let driver = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"]
        .iter()
        .any(|dir| any_file(dir, |name| name.starts_with("lvp_icd") && name.ends_with(".json")));
    let libraries =
        ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
    let loader = libraries.iter().any(|dir| any_file(dir, |name| name.starts_with("libvulkan.so")));
    let named = std::env::var_os("VK_DRIVER_FILES").is_some() || std::env::var_os("VK_ICD_FILENAMES").is_some();
    loader && (driver || named)
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"))
}

fn apt_get(arguments: &[&str]) -> bool {
    Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn has_etcd() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join("etcd").is_file()) || Path::new("/usr/bin/etcd").is_file()
}

/// Installs missing dependencies on Linux, if this is root on a Debian; else says how.
pub(crate) fn prepare() {
    if !cfg!(target_os = "linux") {
        return;
    }
    NEEDS.iter().filter(|need| !(need.is_there)()).for_each(install);
}

fn install(need: &Need) {
    let Need { packages, what, consequence, .. } = need;
    let hint = format!("sudo apt-get install --no-install-recommends {}", packages.join(" "));
    if !is_root() || !Path::new("/usr/bin/apt-get").exists() {
        println!("no {what} was found: {consequence}");
        println!("hint: {hint}");
        return;
    }
    println!("no {what} was found: installing {}", packages.join(" "));
    let mut install = vec!["install", "-y", "-qq", "--no-install-recommends"];
    install.extend(*packages);
    // An update may fail (lists present, mirror away): only the installation decides.
    let updated = apt_get(&["update", "-qq"]);
    if !apt_get(&install) {
        println!("installing failed (package lists updated: {updated})");
        println!("hint: {hint}");
    }
}
