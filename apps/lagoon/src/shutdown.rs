//! Triggers of a server's stop: Ctrl-C, SIGTERM, or the end of standard input when the parent process has ended.

use crate::{log, scratch};
use anyhow::Context as _;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Time to say goodbye to peers and clients after the second signal; then the process ends.
const HURRY_MAX: Duration = Duration::from_secs(1);
/// Time to end in order after a stop began: open responses have 10 s of it, then the processes of `lagoon up` 5 s and its gManager 5 s.
const STOP_MAX: Duration = Duration::from_secs(30);

/// A token that is cancelled when the process should stop.
///
/// # Errors
/// When the system gives no thread or no signals.
pub(crate) fn token(with_stdin: bool) -> anyhow::Result<CancellationToken> {
    let ending = Ending::default();
    ending.serves();
    let stop = ending.stop.clone();
    follow_signals(with_stdin, ending, None)?;
    Ok(stop)
}

/// Runs a command that has temporary files, and drops it on a stop signal, so that it removes them.
pub(crate) async fn unless_stopped<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    // Signals are handled before the first file is created.
    let stop = token(false)?;
    tokio::select! {
        biased;
        () = stop.cancelled() => anyhow::bail!("stopped by a signal"),
        result = command => result,
    }
}

/// Signals to end an instance.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending {
    /// SIGTERM: it moves others' blocks away and finishes its requests, then stops.
    pub(crate) drain: CancellationToken,
    /// Stop now: a second signal, Ctrl-C, the end of standard input, or the drain took too long.
    pub(crate) stop: CancellationToken,
    /// Whether there is something to end in order.
    serves: Arc<AtomicBool>,
}

impl Ending {
    /// From now on the first signal ends the process in order. Until then, while it loads and is in no pool, it ends at once.
    pub(crate) fn serves(&self) {
        self.serves.store(true, SeqCst);
    }
}

/// As [`token`], but the first SIGTERM starts a drain of at most `drain_limit`, and until [`Ending::serves`] any signal ends the
/// process at once.
///
/// # Errors
/// As there.
pub(crate) fn graceful(with_stdin: bool, drain_limit: Duration) -> anyhow::Result<Ending> {
    let ending = Ending::default();
    follow_signals(with_stdin, ending.clone(), Some(drain_limit))?;
    Ok(ending)
}

/// Ends the process with an error, as [`leave`] does.
pub(crate) fn at_once(error: &str) -> ! {
    log::notice(&format!("error: {error}\n"));
    leave(1)
}

/// Ends the process, and runs neither destructors nor exit handlers on the way: those of a driver wait for a thread that hangs in it.
/// Nor does it leave a core dump, with prompts and keys in it. Only temporary folders are removed, and waiting log lines written.
pub(crate) fn leave(code: i32) -> ! {
    scratch::remove_own();
    log::end();
    #[cfg(unix)]
    signal_hook::low_level::exit(code);
    #[cfg(not(unix))]
    std::process::exit(code)
}

/// What asks a process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Interrupt,
    Terminate,
    StdinEnded,
}

impl Asked {
    fn is_signal(self) -> bool {
        self != Self::StdinEnded
    }
}

/// The signals of this process.
struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    /// `None`: its end means nothing, or was reported.
    stdin: Option<oneshot::Receiver<()>>,
}

/// Takes the signals, and starts the thread that ends the process of `ending` when they ask for it; with `drain_limit`, the first
/// SIGTERM drains it.
fn follow_signals(with_stdin: bool, ending: Ending, drain_limit: Option<Duration>) -> anyhow::Result<()> {
    const WHAT: &str = "watch for signals";
    let (taken, result) = mpsc::channel();
    let follow = move || {
        if let Err(error) = take_and_follow(with_stdin, &taken, &ending, drain_limit) {
            drop(taken.send(Err(error)));
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(follow).context(WHAT)?;
    result.recv().context(WHAT)?.context(WHAT)
}

/// The thread's life. Tells `taken` when signals do nothing by themselves any more.
fn take_and_follow(
    with_stdin: bool,
    taken: &mpsc::Sender<io::Result<()>>,
    ending: &Ending,
    drain_limit: Option<Duration>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::take(with_stdin)?;
        drop(taken.send(Ok(())));
        follow(&mut signals, ending, drain_limit).await;
        Ok(())
    })
}

/// Ends the process in the order of the signals; see the module's documentation.
async fn follow(signals: &mut Signals, ending: &Ending, drain_limit: Option<Duration>) {
    let first = signals.next().await;
    if !ending.serves.load(SeqCst) {
        tracing::warn!("stopped before it served");
        leave(0);
    }
    let mut hurried = false;
    if let Some(limit) = drain_limit.filter(|_| first == Asked::Terminate) {
        tracing::warn!("draining; a second signal stops at once");
        ending.drain.cancel();
        tokio::select! {
            next = signals.next() => hurried = next.is_signal(),
            () = tokio::time::sleep(limit) => tracing::warn!("the drain took too long; stopping"),
        }
    }
    ending.stop.cancel();
    loop {
        let limit = if hurried { HURRY_MAX } else { STOP_MAX };
        match tokio::time::timeout(limit, signals.next()).await {
            Ok(next) if next.is_signal() && !hurried => hurried = true,
            Ok(next) if !next.is_signal() => {}
            Ok(_) | Err(_) if hurried => leave(0),
            _ => at_once(&format!(
                "the process did not end within {} s of its stop\nhint: look for a hung driver (`dmesg`, `nvidia-smi`)",
                STOP_MAX.as_secs()
            )),
        }
    }
}

#[cfg(unix)]
impl Signals {
    /// Call it within a runtime.
    fn take(with_stdin: bool) -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        Ok(Self { interrupt, terminate, stdin: with_stdin.then(stdin_end) })
    }

    async fn next(&mut self) -> Asked {
        let Self { interrupt, terminate, stdin } = self;
        tokio::select! {
            Some(()) = interrupt.recv() => Asked::Interrupt,
            Some(()) = terminate.recv() => Asked::Terminate,
            () = ended(stdin) => Asked::StdinEnded,
        }
    }
}

/// Other systems have Ctrl-C only.
#[cfg(not(unix))]
impl Signals {
    fn take(with_stdin: bool) -> io::Result<Self> {
        Ok(Self { stdin: with_stdin.then(stdin_end) })
    }

    async fn next(&mut self) -> Asked {
        tokio::select! {
            Ok(()) = tokio::signal::ctrl_c() => Asked::Interrupt,
            () = ended(&mut self.stdin) => Asked::StdinEnded,
        }
    }
}

/// Resolves once at the end of standard input.
async fn ended(stdin: &mut Option<oneshot::Receiver<()>>) {
    if let Some(end) = stdin {
        let result = end.await;
        *stdin = None;
        if result.is_ok() {
            return;
        }
    }
    std::future::pending().await
}

/// Standard input, read on a thread of its own, which may block for the process's life.
fn stdin_end() -> oneshot::Receiver<()> {
    let (ended, end) = oneshot::channel();
    std::thread::spawn(move || {
        // An unreadable input has ended, too.
        drop(io::copy(&mut io::stdin().lock(), &mut io::sink()));
        // The receiver is gone only when the process ends anyway.
        let _ = ended.send(());
    });
    end
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};
    use std::process::{Child, Command, ExitStatus, Stdio};
    use std::time::Instant;

    /// Names what a process of these tests does.
    const ENDING: &str = "LAGOON_TEST_ENDS";
    /// Longest wait for a process: above [`STOP_MAX`].
    const TIMEOUT: Duration = Duration::from_secs(60);

    struct Unreached;

    impl Drop for Unreached {
        fn drop(&mut self) {
            std::process::exit(7);
        }
    }

    fn is_child(what: &str) -> bool {
        std::env::var(ENDING).is_ok_and(|child| child == what)
    }

    /// This test in a process of its own.
    fn child(test: &str, what: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("shutdown::tests::{test}"), "--nocapture"]).env(ENDING, what);
        command
    }

    fn wait_for_line(child: &mut Child, line: &str) {
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|read| read.unwrap().ends_with(line)), "no {line}");
    }

    fn terminate(child: &Child) {
        assert!(Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap().success());
    }

    fn end(mut child: Child) -> ExitStatus {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if Instant::now() > until {
                child.kill().unwrap();
                panic!("it does not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn say(line: &str) {
        log::announce(format_args!("\n{line}"));
    }

    fn hang() -> ! {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }

    /// It dumped its core, with the prompts and keys in it.
    #[test]
    fn a_process_says_why_and_ends_without_destructors() {
        if is_child("at once") {
            let _logging = log::start("warn");
            let _unreached = Unreached;
            at_once("the device hangs\nhint: look");
        }
        let mut command = child("a_process_says_why_and_ends_without_destructors", "at once");
        let ended = command.output().unwrap();
        let reply = String::from_utf8_lossy(&ended.stderr);
        assert!(reply.contains("error: the device hangs\nhint: look\n"), "{reply}");
        assert_eq!(ended.status.code(), Some(1), "{reply}");
    }

    /// It went on loading, however often it was asked to end.
    #[test]
    fn a_process_that_loads_ends_at_a_signal() {
        if is_child("loads") {
            let _unreached = Unreached;
            let _ending = graceful(false, TIMEOUT).unwrap();
            say("loading");
            hang();
        }
        let mut command = child("a_process_that_loads_ends_at_a_signal", "loads");
        let mut loading = command.stdout(Stdio::piped()).spawn().unwrap();
        wait_for_line(&mut loading, "loading");
        terminate(&loading);
        assert_eq!(end(loading).code(), Some(0));
    }

    /// The second signal waited for whatever the first one waited for.
    #[test]
    fn a_second_signal_ends_a_process_that_hangs() {
        if is_child("hangs") {
            let _unreached = Unreached;
            let ending = graceful(false, TIMEOUT).unwrap();
            ending.serves();
            say("serving");
            while !ending.drain.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            say("draining");
            hang();
        }
        let mut command = child("a_second_signal_ends_a_process_that_hangs", "hangs");
        let mut hung = command.stdout(Stdio::piped()).spawn().unwrap();
        for line in ["serving", "draining"] {
            wait_for_line(&mut hung, line);
            terminate(&hung);
        }
        assert_eq!(end(hung).code(), Some(0));
    }
}
