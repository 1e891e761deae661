//! Suppresses Mesa's display errors on standard error.
//!
//! A Vulkan layer of Mesa asks the display server for the desktop's preferred GPU. A server has no display, and the
//! Wayland library prints "error: XDG_RUNTIME_DIR is invalid or not set" each time an adapter is listed, which looks
//! like a failure of the command. Only the environment turns that layer off, and changing it is safe only at a
//! process's start: so the process re-executes itself once, before anything else.

/// Re-executes this process with the layer turned off, if it would complain. Child processes inherit the setting.
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
    // `exec` returns only on failure; then the command goes on.
    let error = command.args(arguments).env(LAYER_OFF, "1").exec();
    tracing::debug!(%error, "not restarted");
}

/// Other systems have no such layer.
#[cfg(not(target_os = "linux"))]
pub(crate) fn restart_without_display_probe() {}
