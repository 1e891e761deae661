//! Keeps Mesa's talk of displays off standard error.
//!
//! A Vulkan layer of Mesa asks the display server which GPU the desktop prefers. On a server there is none, and the
//! Wayland library prints "error: XDG_RUNTIME_DIR is invalid or not set" each time an adapter is listed, which reads as
//! a failure of the command. Only the environment turns that layer off, and only at a process's start may the
//! environment be changed safely: so the process replaces itself once, before it has done anything.

/// Replaces this process by itself with the layer turned off, where it would complain. Child processes inherit it.
#[cfg(target_os = "linux")]
pub(crate) fn restart_without_display_probe() {
    use std::os::unix::process::CommandExt as _;
    const LAYER_OFF: &str = "NODEVICE_SELECT";
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if set("XDG_RUNTIME_DIR") || set(LAYER_OFF) {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let mut arguments = std::env::args_os();
    let mut command = std::process::Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // It returns only if it failed; then the command goes on, with the complaint.
    let error = command.args(arguments).env(LAYER_OFF, "1").exec();
    tracing::debug!(%error, "not restarted");
}

/// Other systems have no such layer.
#[cfg(not(target_os = "linux"))]
pub(crate) fn restart_without_display_probe() {}
