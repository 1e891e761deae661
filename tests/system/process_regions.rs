//! Prefill and decode workers as processes on one device (the fake driver): KV passes through shared device regions,
//! or through the host if that is impossible; also when a process is killed meanwhile.

use crate::process_disaggregated::connected;
use crate::process_up::golden_prompt;
use lagoon_backend::{SharedRegion, SharedRegions};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers};
use lagoon_tests::faults::number;
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Client, Server, completion, kill, logits, signal, token_ids};
use lagoon_transport::direct::{ArenaServer, HostError, fetch_arena, fetch_region};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

/// Largest difference of logits between local prefill and prefill elsewhere.
const TOLERANCE: f32 = 1.5e-5;
const FLAGS: [&str; 7] = [
    "--backend=cuda",
    "--calibrate=off",
    "--block-tokens=8",
    "--kv-tokens=512",
    "--step-tokens=32",
    "--max-running=4",
    "--expose-logits",
];

/// Paths of the fake driver and its kernels for processes.
pub(crate) struct OnFake(PathBuf, PathBuf);

impl OnFake {
    pub(crate) fn find(name: &str) -> Option<Self> {
        let libraries = crate::cuda::shim::library().and_then(|kernels| Ok((kernels, crate::cuda::fake::build()?)));
        let (kernels, driver) = libraries.map_err(|reason| lagoon_tests::skip(name, &reason)).ok()?;
        Some(Self(driver.parent().unwrap().to_owned(), kernels))
    }

    fn start(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Server {
        self.start_plain(&[arguments, &FLAGS[..]].concat(), variables)
    }

    /// Starts a server with these arguments only.
    pub(crate) fn start_plain(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Server {
        let mut all: Vec<(&str, &OsStr)> = vec![
            ("LD_LIBRARY_PATH", self.0.as_os_str()),
            ("LAGOON_FAKE_KERNELS", self.1.as_os_str()),
            ("LAGOON_FAKE_PAGE", OsStr::new("4096")),
        ];
        all.extend(variables.iter().map(|(name, value)| (*name, OsStr::new(value))));
        Server::start_with(arguments, &all)
    }

    /// A pool, and its decode worker once it can read every prefill worker's KV.
    fn pool(&self, workers: u64, flags: &[&str], variables: &[(&str, &str)]) -> (Server, Client) {
        let (model, _) = golden_prompt();
        let prefill = format!("--prefill={workers}");
        let up = ["up", &model, &prefill, "--decode=1", "--port=0"];
        let pool = self.start(&[&up[..], flags].concat(), variables);
        let decoder = connected(&pool.client().get("/lagoon/status").json(), workers).remove(0);
        (pool, decoder)
    }
}

fn carried(status: &Value, path: &str) -> u64 {
    status["carried"]["bytes"][path].as_u64().unwrap_or(0)
}

/// Asserts that all KV came by this path, according to the metrics.
#[track_caller]
fn assert_carried(decoder: &Client, path: &str) {
    let status = decoder.wait_until("/lagoon/status", "all of it carried", |s| {
        carried(s, path) > 0 && carried(s, path) == number(s, "prefill/bytes")
    });
    assert_eq!(status["paths"][0]["path"], path, "{status}");
    let bytes = carried(&status, path);
    decoder.wait_for_text("/metrics", &format!("lagoon_transfer_path_bytes_total{{path=\"{path}\"}} {bytes}"));
}

/// On every path, the answers equal those of one instance on the device.
#[test]
fn cuda_workers_on_one_device_hand_kv_over_on_it() {
    let Some(on) = OnFake::find("cuda_workers_on_one_device_hand_kv_over_on_it") else { return };
    let (model, prompt) = golden_prompt();
    let reference = on.start(&["serve", &model, "--http=127.0.0.1:0"], &[]);
    let extra = json!({"return_logits": true});
    let none = ("LAGOON_FAKE_FAIL", "");
    let no_import = ("LAGOON_FAKE_FAIL", "cuMemImportFromShareableHandle 1 999");
    let cases = [
        (vec![], none, "same device", (1, 0)),
        (vec!["--kv-transfer=push"], none, "same device", (1, 0)),
        (vec![], no_import, "quic", (0, 1)),
        (vec!["--stage-memory=host"], none, "same host", (0, 0)),
    ];
    for (flags, variable, path, (mapped, refused)) in cases {
        let what = format!("{flags:?} {variable:?}");
        let (pool, decoder) = on.pool(1, &flags, &[variable]);
        for length in [100, 41, 7] {
            let expected = reference.client().complete(&prompt[..length], 6, &extra).json();
            let answer = pool.client().complete(&prompt[..length], 6, &extra).json();
            assert_eq!(token_ids(&answer), token_ids(&expected), "{what}, {length} tokens");
            for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
                let diff = max_diff(ours, theirs);
                assert!(diff <= TOLERANCE, "{what}, {length} tokens: {diff:e}");
            }
        }
        assert_carried(&decoder, path);
        let status = decoder.wait_until("/lagoon/status", "unstaged", |s| number(s, "prefill/stage_blocks_used") == 0);
        let prefill = |field: &str| number(&status, &format!("prefill/{field}"));
        assert_eq!((prefill("pulled"), prefill("own"), prefill("damaged_blocks")), (3, 0, 0), "{what}: {status}");
        let of = |field: &str| number(&status, &format!("carried/{field}"));
        assert_eq!((of("regions_mapped"), of("regions_refused")), (mapped, refused), "{what}: {status}");
        decoder.wait_for_text("/metrics", &format!("lagoon_transfer_regions_refused_total {refused}"));
        let output = pool.stop().stderr;
        assert_eq!(output.contains("goes through the host's memory"), refused > 0, "{what}: {output}");
    }
}

/// A prefill worker is killed with prompts in flight and its device memory mapped: the other one prefills them, and
/// the memory is unmapped.
#[test]
fn a_killed_worker_leaves_no_device_memory_mapped() {
    let Some(on) = OnFake::find("a_killed_worker_leaves_no_device_memory_mapped") else { return };
    let (_, prompt) = golden_prompt();
    let (pool, decoder) = on.pool(2, &[], &[]);
    decoder.wait_until("/lagoon/status", "both mapped", |s| number(s, "carried/regions_mapped") == 2);
    let client = pool.client();
    let bodies: Vec<Value> = (0..3)
        .map(|n| {
            let prompt: Vec<u32> = prompt.iter().cycle().skip(n).take(180).copied().collect();
            completion(&prompt, 20, &json!({"stream": true}))
        })
        .collect();
    // Prefill workers come first. It gets prompts, and completes none of them.
    let worker = pool.ready["pids"][0].as_u64().unwrap();
    signal(worker, "STOP");
    let mut streams: Vec<_> = bodies.iter().map(|body| client.stream("/v1/completions", body)).collect();
    decoder.wait_until("/lagoon/status", "the other one's are read", |s| {
        number(s, "prefill/pulled") > 0 && number(s, "prefill/away") > 0
    });
    // `up` would restart it at once.
    signal(pool.pid(), "STOP");
    kill(worker);
    decoder.wait_until("/lagoon/status", "one is left", |s| number(s, "carried/regions_mapped") == 1);
    signal(pool.pid(), "CONT");
    let mut output = Vec::new();
    for stream in &mut streams {
        let (events, done) = stream.rest();
        assert!(done, "{events:?}");
        output.push(events.iter().flat_map(token_ids).collect::<Vec<u32>>());
    }
    let status = decoder.wait_until("/lagoon/status", "it is replaced", |s| {
        number(s, "carried/regions_mapped") == 2 && number(s, "prefill/stage_blocks_used") == 0
    });
    assert_eq!((number(&status, "prefill/own"), number(&status, "prefill/pulled")), (0, 3), "{status}");
    assert!(number(&status, "prefill/retried") > 0, "{status}");
    assert_eq!(carried(&status, "same device"), number(&status, "prefill/bytes"), "{status}");
    decoder.wait_until("/lagoon/status", "nothing left", |s| s["blocks_free"] == s["blocks_total"]);
    decoder.wait_for_text("/metrics", "lagoon_transfer_regions_mapped 2");
    let (model, _) = golden_prompt();
    let reference = on.start(&["serve", &model, "--http=127.0.0.1:0"], &[]);
    for (body, output) in bodies.iter().zip(output) {
        let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        assert_eq!(output, token_ids(&reference.client().complete(&prompt, 20, &json!({})).json()));
    }
}

/// A shared device region is handed out only for its token, stays mapped after its owner stops handing it out, and is
/// no host arena.
#[test]
fn a_region_is_handed_out_for_its_token_only() {
    let Some(fake) = crate::cuda::driver("a_region_is_handed_out_for_its_token_only", 3) else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut device = CudaDevice::open(
        lagoon_cuda::kernels::FATBIN,
        CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() },
    )
    .unwrap();
    let theirs = device.region(5000).unwrap().1;
    let own: Arc<dyn SharedRegion> = device.region(5000).unwrap().1;
    theirs.write(7, b"written").unwrap();
    let server = ArenaServer::of_region(&dir.path().join("a.sock"), theirs.as_ref()).unwrap();
    let offer = server.arenas()[0].clone();
    assert_eq!((offer.bytes, offer.device.len()), (theirs.bytes(), 16));
    let mut forged = offer.clone();
    forged.token[0] ^= 1;
    assert!(matches!(fetch_region(&forged, &own), Err(HostError::Refused)));
    forged.token.pop();
    assert!(matches!(fetch_region(&forged, &own), Err(HostError::Token(31))));
    for (device, bytes) in [(vec![1; 15], offer.bytes), (vec![1; 16], offer.bytes), (offer.device.clone(), 4096)] {
        let other = lagoon_protocol::TransferArena { device, bytes, ..offer.clone() };
        assert!(fetch_region(&other, &own).is_err(), "{other:?}");
    }
    assert!(matches!(fetch_arena(&offer, offer.bytes), Err(HostError::Io { .. })), "it is no sealed file");
    assert_eq!(own.mapped(), 0);
    let mapped = fetch_region(&offer, &own).unwrap();
    drop((server, theirs));
    fetch_region(&offer, &own).unwrap_err();
    let mut out = [0; 7];
    mapped.read(7, &mut out).unwrap();
    assert_eq!((&out, own.mapped()), (b"written", 1));
    drop((mapped, own, device));
    fake.finish();
}
