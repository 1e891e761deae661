//! The compared systems: a pool behind its gateway, and the same processes on their own behind a router of this
//! benchmark.

use anyhow::{Context, Result, ensure};
use lagoon_benches::cluster::{Lagoon, Process, Up, counters, late_share, status};
use lagoon_benches::pace::Pace;
use lagoon_sim::paper::dispatch::{CHARGE_US, Dispatch, View, choose, work_us};
use lagoon_sim::paper::hardware::Timing;
use lagoon_sim::paper::measure::System as Simulated;
use lagoon_sim::paper::mixed::Mix;
use lagoon_sim::paper::traces::Request;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tokens of an rBlock.
const BLOCK_TOKENS: u32 = 16;
/// Time between two readings of an instance's free memory: the gateway's.
const READ_EVERY: Duration = Duration::from_millis(100);

/// Where requests go, and what became of them.
pub(crate) trait Route: Send + Sync {
    fn choose(&self, at: usize, request: &Request) -> SocketAddr;
    /// A token of a request came.
    fn token(&self, at: usize);
    /// A request ended or failed.
    fn ended(&self, at: usize);
}

/// A gateway dispatches by itself.
impl Route for SocketAddr {
    fn choose(&self, _: usize, _: &Request) -> SocketAddr {
        *self
    }

    fn token(&self, _: usize) {}

    fn ended(&self, _: usize) {}
}

/// A system of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct System {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Instances that lend to each other, behind the gateway, which dispatches by this policy of `--dispatch`. All of them
    /// compute prompts of at least `joint_from` tokens of the trace together.
    Pool { instances: u32, lend_percent: u32, dispatch: &'static str, joint_from: Option<f64> },
    /// Processes on their own: how many instances each stands for, and its efficiency.
    Alone { processes: Vec<(u32, f64)>, dispatch: Dispatch },
}

/// Sizes of all processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) pace: Pace,
    /// Tokens of the trace that one of its tokens stands for.
    pub(crate) tokens: f64,
    pub(crate) step_tokens: u32,
    pub(crate) port: u16,
    /// Prefix caches, if any.
    pub(crate) cache: Option<Cache>,
}

/// Sizes of instances with a prefix cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cache {
    pub(crate) block_tokens: u32,
    pub(crate) kv_tokens: u32,
}

impl Sizes {
    fn flags(&self, instances: u32) -> Vec<String> {
        // Without a cache every prompt is its own.
        let whole = Cache { block_tokens: BLOCK_TOKENS, kv_tokens: self.pace.kv_tokens };
        let Cache { block_tokens, kv_tokens } = self.cache.unwrap_or(whole);
        let kv_tokens = format!("--kv-tokens={}", kv_tokens * instances);
        let (rows, block) = (format!("--step-tokens={}", self.step_tokens), format!("--block-tokens={block_tokens}"));
        let cache = if self.cache.is_some() { "--prefix-cache=on" } else { "--prefix-cache=off" };
        // Chunks are sized for the objective's time between tokens.
        let rest = ["--max-running=64", "--max-queue=4096", cache, "--target-tbt-ms=90"].map(str::to_owned);
        [vec![kv_tokens, rows, block], rest.to_vec()].concat()
    }

    /// The modelled device as the dispatch's prediction sees it.
    pub(crate) fn timing(&self) -> Timing {
        let Pace { kv_tokens, prompt_scale, .. } = self.pace;
        Mix { kv_tokens, prompt_scale, ..Mix::default() }.setting(Simulated::Multi).timing
    }
}

impl Kind {
    /// A pool as it is by default, but for joint prefill.
    pub(crate) const fn pool(instances: u32, joint_from: Option<f64>) -> Self {
        Self::Pool { instances, lend_percent: 100, dispatch: "least-work", joint_from }
    }
}

/// A started system. Ends with its processes.
pub(crate) struct Started {
    pub(crate) route: Arc<dyn Route>,
    https: Vec<String>,
    _up: Option<Up>,
    _processes: Vec<Process>,
    _reader: Option<Reader>,
}

impl Started {
    /// The largest share of an instance's modelled time by which the arithmetic fell behind.
    pub(crate) fn late_share(&self) -> Result<f64> {
        self.https.iter().map(|http| late_share(http)).try_fold(0.0, |most: f64, late| Ok(most.max(late?)))
    }

    /// Prompts since the start that several instances computed to their end, and those for which none could help.
    pub(crate) fn joint_prompts(&self) -> Result<[f64; 2]> {
        let names = ["completed", "alone"].map(|result| format!("lagoon_joint_prefills_total{{result=\"{result}\"}}"));
        self.https.iter().try_fold([0.0; 2], |[completed, alone], http| {
            let of = counters(http, names.each_ref().map(String::as_str))?;
            Ok([completed + of[0], alone + of[1]])
        })
    }
}

impl System {
    pub(crate) fn start(&self, lagoon: &Lagoon, sizes: &Sizes) -> Result<Started> {
        match &self.kind {
            Kind::Pool { instances, lend_percent, dispatch, joint_from } => {
                let mut own = vec![
                    format!("--instances={instances}"),
                    format!("--lend-percent={lend_percent}"),
                    format!("--dispatch={dispatch}"),
                ];
                if let Some(tokens) = joint_from {
                    let tokens = crate::hits::whole(tokens / sizes.tokens);
                    let joint = [("prefill-instances", *instances), ("prefill-instances-tokens", tokens)];
                    own.extend(joint.map(|(flag, value)| format!("--{flag}={value}")));
                }
                pool(lagoon, sizes, &own)
            }
            Kind::Alone { processes, dispatch } => alone(lagoon, sizes, processes, *dispatch),
        }
    }
}

fn pool(lagoon: &Lagoon, sizes: &Sizes, own: &[String]) -> Result<Started> {
    let up = lagoon.up(&[own, &sizes.flags(1)].concat(), sizes.port)?;
    let gateway = SocketAddr::from(([127, 0, 0, 1], sizes.port));
    let state = status(&gateway.to_string())?;
    let rows = state["instances"].as_array().context("no instances")?;
    let https = rows.iter().filter_map(|row| Some(row["http_addr"].as_str()?.to_owned())).collect();
    Ok(Started { route: Arc::new(gateway), https, _up: Some(up), _processes: Vec::new(), _reader: None })
}

fn alone(lagoon: &Lagoon, sizes: &Sizes, processes: &[(u32, f64)], dispatch: Dispatch) -> Result<Started> {
    let mut started = Vec::new();
    for (at, (instances, efficiency)) in processes.iter().enumerate() {
        let profile = sizes.pace.of(*instances, *efficiency).profile(&lagoon.model)?;
        let pace = lagoon.dir.join(format!("pace-{at}.json"));
        std::fs::write(&pace, serde_json::to_vec(&profile)?)?;
        started.push(lagoon.alone(&pace, &sizes.flags(*instances))?);
    }
    let https: Vec<String> = started.iter().map(|p| Ok(p.announced("http")?.to_owned())).collect::<Result<_>>()?;
    let server = |(http, (instances, efficiency)): (&String, &(u32, f64))| -> Result<Server> {
        let kv_tokens = u64::from(sizes.pace.kv_tokens) * u64::from(*instances);
        let free_tokens = i64::try_from(kv_tokens)?;
        Ok(Server { addr: http.parse()?, kv_tokens, faster: f64::from(*instances) * efficiency, free_tokens })
    };
    let servers = https.iter().zip(processes).map(server).collect::<Result<Vec<_>>>()?;
    ensure!(!servers.is_empty(), "a system has processes");
    let router = Arc::new(Router { dispatch, timing: sizes.timing(), state: Mutex::new(State::new(servers)) });
    let reader = Reader::start(Arc::clone(&router));
    Ok(Started { route: router, https, _up: None, _processes: started, _reader: Some(reader) })
}

/// A process as the router sees it.
#[derive(Clone, Copy, Debug)]
struct Server {
    addr: SocketAddr,
    kv_tokens: u64,
    /// Its rates over an instance's.
    faster: f64,
    /// As last read.
    free_tokens: i64,
}

/// A request on its way.
#[derive(Debug)]
struct Open {
    server: usize,
    request: Request,
    generated: u32,
}

#[derive(Debug)]
struct State {
    servers: Vec<Server>,
    open: BTreeMap<usize, Open>,
    /// Time, server and context of what was sent lately.
    recent: Vec<(Instant, usize, i64)>,
    turn: usize,
}

impl State {
    fn new(servers: Vec<Server>) -> Self {
        Self { servers, open: BTreeMap::new(), recent: Vec::new(), turn: 0 }
    }
}

/// Dispatch for processes on their own, by the simulator's rules.
struct Router {
    dispatch: Dispatch,
    timing: Timing,
    state: Mutex<State>,
}

impl Router {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self, state: &State, at: usize) -> View {
        let server = &state.servers[at];
        let open = state.open.values().filter(|open| open.server == at);
        let work = |open: &Open| work_us(&self.timing, server.kv_tokens, &open.request, open.generated, true);
        View {
            free_tokens: server.free_tokens,
            recent_tokens: state.recent.iter().filter(|(_, to, _)| *to == at).map(|(_, _, tokens)| tokens).sum(),
            work_us: open.map(work).sum::<f64>() / server.faster,
            holds_tokens: server.kv_tokens,
        }
    }
}

impl Route for Router {
    fn choose(&self, at: usize, request: &Request) -> SocketAddr {
        let mut state = self.state();
        let now = Instant::now();
        state.recent.retain(|(sent, _, _)| now.duration_since(*sent) < Duration::from_micros(CHARGE_US));
        let tokens = u64::from(request.context_tokens());
        // By length first: only a process that holds the request gets it.
        let views: Vec<View> = (0..state.servers.len()).map(|place| self.view(&state, place)).collect();
        let server = choose(self.dispatch, &views, tokens, state.turn).unwrap_or(0);
        state.turn += 1;
        state.recent.push((now, server, i64::from(request.context_tokens())));
        state.open.insert(at, Open { server, request: *request, generated: 0 });
        state.servers[server].addr
    }

    fn token(&self, at: usize) {
        if let Some(open) = self.state().open.get_mut(&at) {
            open.generated += 1;
        }
    }

    fn ended(&self, at: usize) {
        self.state().open.remove(&at);
    }
}

/// A thread that reads the processes' free memory.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start(router: Arc<Router>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let reads = matches!(router.dispatch, Dispatch::FreeMemory | Dispatch::FreeLessRecent);
        let thread = std::thread::spawn(move || {
            let addrs: Vec<SocketAddr> = router.state().servers.iter().map(|s| s.addr).collect();
            while reads && !stopped.load(Ordering::Relaxed) {
                for (at, addr) in addrs.iter().enumerate() {
                    // One that does not reply keeps its last state.
                    let Ok(status) = status(&addr.to_string()) else { continue };
                    let Some(blocks) = status["blocks_free"].as_i64() else { continue };
                    router.state().servers[at].free_tokens = blocks * i64::from(BLOCK_TOKENS);
                }
                std::thread::sleep(READ_EVERY);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }
}
