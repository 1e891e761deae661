//! Round trips and bulk rate of Lagoon's transport against a bare quinn echo and raw loopback TCP, interleaved in one
//! run, as ratios: `cargo bench -p lagoon-benches --bench transport -- [--json] [--rounds N]`.
//!
//! Bare quinn has its default tunables, one bidirectional stream and the same certificates. Both sides run in one
//! process, each on a runtime of its own with one thread, as two processes would; `--one-runtime` puts them on one.
//! Absolute numbers depend on the machine and its load; ratios less so.
#![allow(clippy::print_stdout, reason = "a benchmark prints its result")]

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Parser;
use lagoon_benches::measure::{commit, device, hardware_threads, median};
use lagoon_benches::quic::{Pem, Tuning, loopback};
use lagoon_protocol::{BulkFrame, PartialsFrame};
use lagoon_transport::{Bound, Class, ClusterCa, Frame, Node, NodeRole, PeerId, TransportConfig};
use lagoon_types::{Epoch, LeaseId, StepId};
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Handle,
};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Rounds over all parties; the medians of the rounds are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Round trips of one size in one round.
    #[arg(long, default_value_t = 400)]
    trips: usize,
    /// Bytes of one bulk transfer, in MiB.
    #[arg(long, default_value_t = 256)]
    bulk_mib: usize,
    /// Both sides on one runtime of two threads: no thread has to be woken for a message.
    #[arg(long)]
    one_runtime: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Bytes out and back of each kind of round trip; 8 KB out and 16 KB back is a layer of an 8B model for one row (partials in f32), 4 MB out
/// and back for 512 rows of a prompt (in bf16).
const SIZES: [(usize, usize); 5] =
    [(64, 64), (1 << 10, 2 << 10), (8 << 10, 16 << 10), (64 << 10, 128 << 10), (4 << 20, 4 << 20)];
/// Bytes of a bulk transfer that are written at once.
const CHUNK: usize = 1 << 20;
/// Most bytes of a request or reply.
const LARGEST: usize = 4 << 20;
/// Bytes of all round trips of one size in one round, at most.
const TRIPS_BYTES_MAX: usize = 256 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

/// A request asks for `back` bytes with its first four bytes.
fn request(out: usize, back: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![7; out];
    bytes.get_mut(..4).context("a request of four bytes or more")?.copy_from_slice(&u32::try_from(back)?.to_le_bytes());
    Ok(bytes)
}

fn reply_bytes(request: &[u8]) -> Result<usize> {
    let head: [u8; 4] = request.get(..4).context("a request of four bytes or more")?.try_into()?;
    Ok(usize::try_from(u32::from_le_bytes(head))?)
}

// --- Lagoon ---

struct Lagoon {
    a: Bound,
    b: Node,
    to_b: PeerId,
    received: tokio::sync::mpsc::Receiver<()>,
}

fn query(payload: Bytes) -> Frame {
    PartialsFrame::Query { step: StepId(1), layer: 0, rows: 1, queries: payload }.into()
}

impl Lagoon {
    async fn start(ca: &ClusterCa, bulk_bytes: usize, far: &Handle) -> Result<Self> {
        let bind = |name| {
            anyhow::Ok(Node::bind(loopback(), &ca.identity(name, NodeRole::Instance)?, TransportConfig::default())?)
        };
        let a = bind("a")?;
        let b = {
            let _far = far.enter();
            bind("b")?
        };
        let to_b = a.node.connect(b.node.local_addr(), &Class::ALL).context("a peer")?;
        let (done, received) = tokio::sync::mpsc::channel(1);
        let Bound { node, mut partials, mut bulk, events } = b;
        let echo = node.clone();
        far.spawn(async move {
            let _events = events;
            while let Some(inbound) = partials.recv().await {
                let PartialsFrame::Query { queries, .. } = inbound.frame else { bail!("not a query") };
                let reply = query(Bytes::from(vec![9; reply_bytes(&queries)?]));
                echo.send(inbound.peer, &reply, DEADLINE).await?;
            }
            anyhow::Ok(())
        });
        far.spawn(async move {
            let mut got = 0;
            while let Some(inbound) = bulk.recv().await {
                let BulkFrame::Write { kv, .. } = inbound.frame else { bail!("not a write") };
                got += kv.len();
                if got >= bulk_bytes {
                    got = 0;
                    done.send(()).await?;
                }
            }
            anyhow::Ok(())
        });
        Ok(Self { a, b: node, to_b, received })
    }

    async fn trip(&mut self, out: &Bytes, back: usize) -> Result<()> {
        self.a.node.try_send(self.to_b, &query(out.clone()))?;
        let reply = tokio::time::timeout(DEADLINE, self.a.partials.recv()).await?.context("a reply")?;
        match reply.frame {
            PartialsFrame::Query { queries, .. } if queries.len() == back => Ok(()),
            other => bail!("unexpected {other:?}"),
        }
    }

    async fn bulk(&mut self, bytes: usize) -> Result<()> {
        let kv = Bytes::from(vec![3; CHUNK]);
        for _ in 0..bytes / CHUNK {
            let (lease, epoch, kv) = (LeaseId(1), Epoch(1), kv.clone());
            let frame = BulkFrame::Write { lease, epoch, layer: 0, offset: 0, tokens: 1, kv }.into();
            self.a.node.send(self.to_b, &frame, DEADLINE).await?;
        }
        tokio::time::timeout(DEADLINE, self.received.recv()).await?.context("the end of a transfer")
    }
}

// --- bare quinn and TCP: a stream whose far end answers each length-prefixed request ---

/// Serves requests: 4 bytes of length, then the request; a length of 0 announces a bulk transfer of 8 bytes' size.
async fn serve<R: AsyncReadExt + Unpin, W: AsyncWriteExt + Unpin>(mut recv: R, mut send: W) -> Result<()> {
    let reply = vec![9; LARGEST];
    let mut buffer = vec![0; LARGEST];
    loop {
        let length = usize::try_from(recv.read_u32_le().await?)?;
        if length == 0 {
            let mut left = usize::try_from(recv.read_u64_le().await?)?;
            while left > 0 {
                let want = left.min(buffer.len());
                left -= recv.read(buffer.get_mut(..want).context("room")?).await?;
            }
            send.write_all(&[1]).await?;
            continue;
        }
        let request = buffer.get_mut(..length).context("a request of at most 4 MiB")?;
        recv.read_exact(request).await?;
        let back = reply_bytes(request)?;
        send.write_all(reply.get(..back).context("a reply of at most 4 MiB")?).await?;
    }
}

struct Stream<R, W> {
    recv: R,
    send: W,
    buffer: Vec<u8>,
}

impl<R: AsyncReadExt + Unpin, W: AsyncWriteExt + Unpin> Stream<R, W> {
    async fn trip(&mut self, framed: &[u8], back: usize) -> Result<()> {
        self.send.write_all(framed).await?;
        self.recv.read_exact(self.buffer.get_mut(..back).context("room")?).await?;
        Ok(())
    }

    async fn bulk(&mut self, bytes: usize) -> Result<()> {
        self.send.write_all(&0u32.to_le_bytes()).await?;
        self.send.write_all(&u64::try_from(bytes)?.to_le_bytes()).await?;
        let chunk = vec![3; CHUNK];
        for _ in 0..bytes / CHUNK {
            self.send.write_all(&chunk).await?;
        }
        self.recv.read_u8().await?;
        Ok(())
    }
}

type Quinn = (Stream<quinn::RecvStream, quinn::SendStream>, quinn::Endpoint);

async fn start_quinn(ca: &ClusterCa, far: &Handle) -> Result<Quinn> {
    let pem = Pem::issue(ca, "quinn")?;
    let server = {
        let _far = far.enter();
        pem.listen(Tuning::Stock)?
    };
    let addr = server.local_addr()?;
    far.spawn(async move {
        let connection = server.accept().await.context("a connection")?.await?;
        let (send, recv) = connection.accept_bi().await?;
        serve(recv, send).await
    });
    let (endpoint, connection) = pem.connect(addr, Tuning::Stock).await?;
    let (send, recv) = connection.open_bi().await?;
    Ok((Stream { recv, send, buffer: vec![0; LARGEST] }, endpoint))
}

async fn start_tcp(far: &Handle) -> Result<Stream<tokio::net::tcp::OwnedReadHalf, tokio::net::tcp::OwnedWriteHalf>> {
    let listener = far.spawn(TcpListener::bind(loopback())).await??;
    let addr = listener.local_addr()?;
    far.spawn(async move {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (recv, send) = stream.into_split();
        serve(recv, send).await
    });
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (recv, send) = stream.into_split();
    Ok(Stream { recv, send, buffer: vec![0; LARGEST] })
}

// --- measuring ---

/// Medians of one party: microseconds per round trip of each size, and Gbit/s.
#[derive(Default)]
struct Party {
    rounds_us: [Vec<f64>; SIZES.len()],
    rounds_gbit: Vec<f64>,
}

impl Party {
    fn trip_us(&self, size: usize) -> f64 {
        median(self.rounds_us.get(size).cloned().unwrap_or_default())
    }

    fn gbit(&self) -> f64 {
        median(self.rounds_gbit.clone())
    }
}

/// Median time of `trips` calls, in microseconds.
macro_rules! time_trips {
    ($trips:expr, $call:expr) => {{
        let mut times = Vec::with_capacity($trips);
        for _ in 0..$trips {
            let start = Instant::now();
            $call.await?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        median(times)
    }};
}

async fn measure(args: &Args, far: &Handle) -> Result<[Party; 3]> {
    let ca = ClusterCa::generate("bench")?;
    let bulk_bytes = args.bulk_mib << 20;
    let mut lagoon = Lagoon::start(&ca, bulk_bytes, far).await?;
    let (mut quinn, _endpoint) = start_quinn(&ca, far).await?;
    let mut tcp = start_tcp(far).await?;
    let mut parties: [Party; 3] = Default::default();
    // The first round warms up: connections, congestion windows, MTU discovery.
    for round in 0..=args.rounds {
        for (size, (out, back)) in SIZES.into_iter().enumerate() {
            let plain = request(out, back)?;
            let mut framed = u32::try_from(out)?.to_le_bytes().to_vec();
            framed.extend_from_slice(&plain);
            let plain = Bytes::from(plain);
            let trips = args.trips.min(TRIPS_BYTES_MAX / (out + back));
            let times = [
                time_trips!(trips, lagoon.trip(&plain, back)),
                time_trips!(trips, quinn.trip(&framed, back)),
                time_trips!(trips, tcp.trip(&framed, back)),
            ];
            for (party, time) in parties.iter_mut().zip(times) {
                party.rounds_us.get_mut(size).context("a size")?.extend((round > 0).then_some(time));
            }
        }
        let mut rates = [0.0; 3];
        for (index, rate) in rates.iter_mut().enumerate() {
            let start = Instant::now();
            match index {
                0 => lagoon.bulk(bulk_bytes).await?,
                1 => quinn.bulk(bulk_bytes).await?,
                _ => tcp.bulk(bulk_bytes).await?,
            }
            #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
            let bits = bulk_bytes as f64 * 8.0;
            *rate = bits / start.elapsed().as_secs_f64() / 1e9;
        }
        for (party, rate) in parties.iter_mut().zip(rates) {
            party.rounds_gbit.extend((round > 0).then_some(rate));
        }
    }
    lagoon.a.node.close(Duration::from_secs(1)).await;
    lagoon.b.close(Duration::from_secs(1)).await;
    Ok(parties)
}

fn report(args: &Args, parties: &[Party; 3]) {
    let [lagoon, quinn, tcp] = parties;
    if args.json {
        let trips = SIZES.iter().enumerate().map(|(size, (out, back))| {
            let (l, q, t) = (lagoon.trip_us(size), quinn.trip_us(size), tcp.trip_us(size));
            serde_json::json!({ "out_bytes": out, "back_bytes": back, "lagoon_us": l, "quinn_us": q, "tcp_us": t,
                "lagoon_over_quinn": l / q, "lagoon_over_tcp": l / t })
        });
        let (l, q, t) = (lagoon.gbit(), quinn.gbit(), tcp.gbit());
        let bulk = serde_json::json!({ "bytes": args.bulk_mib << 20, "lagoon_gbit_s": l, "quinn_gbit_s": q,
            "tcp_gbit_s": t, "lagoon_over_quinn": l / q, "lagoon_over_tcp": l / t });
        let trips: Vec<_> = trips.collect();
        let object = serde_json::json!({ "bench": "transport", "one_runtime": args.one_runtime, "device": device(), "commit": commit(), "rounds": args.rounds, "trips": args.trips,
            "hardware_threads": hardware_threads(), "round_trips": trips, "bulk": bulk });
        println!("{object:#}");
        return;
    }
    println!(
        "{:>16} {:>10} {:>10} {:>10} {:>13} {:>11}",
        "round trip", "lagoon us", "quinn us", "tcp us", "lagoon/quinn", "lagoon/tcp"
    );
    for (size, (out, back)) in SIZES.into_iter().enumerate() {
        let (l, q, t) = (lagoon.trip_us(size), quinn.trip_us(size), tcp.trip_us(size));
        let name = format!("{out}/{back} B");
        println!("{name:>16} {l:>10.1} {q:>10.1} {t:>10.1} {:>13.2} {:>11.2}", l / q, l / t);
    }
    let (l, q, t) = (lagoon.gbit(), quinn.gbit(), tcp.gbit());
    println!("{:>16} {l:>10.2} {q:>10.2} {t:>10.2} {:>13.2} {:>11.2}   (Gbit/s)", "bulk", l / q, l / t);
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = |threads| tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let near = runtime(if args.one_runtime { 2 } else { 1 })?;
    let apart = if args.one_runtime { None } else { Some(runtime(1)?) };
    let far = apart.as_ref().unwrap_or(&near).handle().clone();
    // On a worker thread, as the programs' own tasks are, not on the thread in block_on.
    let task = near.spawn(async move {
        let parties = measure(&args, &far).await?;
        report(&args, &parties);
        anyhow::Ok(())
    });
    near.block_on(task)?
}
