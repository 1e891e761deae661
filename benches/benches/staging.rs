//! Staging: copies of KV between a device store and a staging buffer in host memory, with which prefill and decode
//! workers on wgpu and CUDA transfer KV (`runner/src/stage.rs`). Rates are shares of the device's own readback and
//! upload of whole layers, in the same run, for contiguous KV and for rBlocks in random order. Also the delay of a
//! copy behind queued work of the device.
//!
//! `cargo bench --workspace --bench staging -- [--json] [--smoke]`. A missing backend is reported. Parties alternate
//! in every round, and medians are reported.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("memory beside the store is shared as Linux does");
}

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    run::main()
}

#[cfg(target_os = "linux")]
mod run {
    use anyhow::{Context, Result, ensure};
    use clap::Parser;
    use lagoon_backend::{Device, Mode, SharedArena, WeightSource};
    use lagoon_benches::measure::{commit, device, hardware_threads, median};
    use lagoon_benches::model::llama;
    use lagoon_cuda::{CudaDevice, CudaOptions, CudaProbe, kernels};
    use lagoon_model::ModelSpec;
    use lagoon_runner::{Command, Executor, ExecutorConfig, KvMemory, Report, StageId, StageWork};
    use lagoon_shaders::{AdapterChoice, WgpuDevice, list_adapters};
    use lagoon_types::{AttentionGeometry, DType, KvDType, KvSpace};
    use rand::{SeedableRng, seq::SliceRandom};
    use rand_chacha::ChaCha8Rng;
    use serde_json::{Value, json};
    use std::hint::black_box;
    use std::time::Instant;

    #[derive(Parser)]
    struct Args {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
        /// Rounds over all parties; the medians of the rounds are reported.
        #[arg(long, default_value_t = 7)]
        rounds: usize,
        /// KV of all layers, in MiB.
        #[arg(long, default_value_t = 64)]
        mib: usize,
        /// 4 MiB, one round: whether it works.
        #[arg(long)]
        smoke: bool,
        /// Given by `cargo bench`.
        #[arg(long, hide = true)]
        bench: bool,
    }

    const LAYERS: u32 = 2;
    const BLOCK_TOKENS: u32 = 16;
    const KV_DTYPE: KvDType = KvDType::F16;
    /// Size of the square matrices, and number of rows, of one piece of other work.
    const WORK_SIZE: usize = 256;
    /// Duration in seconds, and largest number, of the work pieces queued before a copy.
    const WORK_S: f64 = 5e-3;
    const WORK_CALLS_MAX: usize = 1024;

    /// The shape of an 8B model's KV, of fewer layers: 4 KiB a token and layer.
    fn model() -> ModelSpec {
        llama(
            LAYERS as usize,
            (4096, 14_336),
            AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128, latent: false },
        )
    }

    /// A worker's store with its staging buffer.
    struct Staged<D: Device> {
        executor: Executor<D>,
        arenas: Vec<SharedArena>,
        tokens: u32,
        stages: u64,
        /// Blocks in copy order: their places in the store and in the staging buffer.
        order: Vec<(u32, u32)>,
    }

    impl<D: Device> Staged<D> {
        fn new(device: D, tokens: u32) -> Result<Self> {
            let blocks = tokens / BLOCK_TOKENS;
            let config = ExecutorConfig {
                share_blocks: Some(BLOCK_TOKENS),
                stage_blocks: blocks,
                ..ExecutorConfig::alone(KvSpace::flat(blocks, BLOCK_TOKENS), KV_DTYPE, 16)
            };
            let executor = Executor::new(device, &model(), None, config)?;
            ensure!(executor.stages(), "the store itself can be read: nothing is staged");
            let KvMemory::Host(arenas) = executor.memory() else { anyhow::bail!("staged on the device") };
            let arenas = arenas.clone();
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let mut shuffled = || {
                let mut all: Vec<u32> = (0..blocks).map(|block| block * BLOCK_TOKENS).collect();
                all.shuffle(&mut rng);
                all
            };
            let order = shuffled().into_iter().zip(shuffled()).collect();
            Ok(Self { executor, arenas, tokens, stages: 0, order })
        }

        /// Seconds that staging of these pieces takes.
        fn stage(&mut self, inward: bool, pieces: Vec<(u32, u32, u32)>) -> Result<f64> {
            self.stages += 1;
            let stage = StageId(self.stages);
            let start = Instant::now();
            self.executor.push(Command::Stage(StageWork { stage, inward, layers: 0..LAYERS, pieces }));
            let mut ended = None;
            while ended.is_none() {
                let worked = self.executor.turn(&mut |report| {
                    if let Report::Staged { stage: of, error } = report
                        && of == stage
                    {
                        ended = Some(error);
                    }
                });
                ensure!(worked || ended.is_some(), "nothing is left to do");
            }
            match ended.flatten() {
                Some(error) => Err(error.into()),
                None => Ok(start.elapsed().as_secs_f64()),
            }
        }

        fn pieces(&self, together: bool) -> Vec<(u32, u32, u32)> {
            match together {
                true => vec![(0, 0, self.tokens)],
                false => self.order.iter().map(|(slot, beside)| (*slot, *beside, BLOCK_TOKENS)).collect(),
            }
        }

        fn out(&mut self, together: bool) -> Result<f64> {
            self.stage(false, self.pieces(together))
        }

        /// Seconds until the device has the KV, awaited by a read of one token.
        fn inward(&mut self, together: bool) -> Result<f64> {
            let written = self.stage(true, self.pieces(together))?;
            let (slot, beside, _) = self.pieces(together).last().copied().context("a piece")?;
            Ok(written + self.stage(false, vec![(slot, beside, 1)])?)
        }

        /// Checks that KV round trips.
        fn check(&mut self) -> Result<()> {
            for (layer, arena) in (1u8..).zip(&self.arenas) {
                let mut n = layer;
                let mut fill =
                    |bytes: &mut [u8]| bytes.iter_mut().for_each(|b| (*b, n) = (n, n.wrapping_mul(5).wrapping_add(7)));
                arena.fill(0, arena.bytes(), &mut fill)?;
            }
            let before: Vec<Vec<u8>> = self.content()?;
            self.inward(false)?;
            for arena in &self.arenas {
                arena.fill(0, arena.bytes(), &mut |bytes| bytes.fill(0))?;
            }
            self.out(false)?;
            ensure!(before == self.content()?, "what was staged in and out differs");
            Ok(())
        }

        fn content(&self) -> Result<Vec<Vec<u8>>> {
            self.arenas.iter().map(|arena| Ok(arena.read_lock(0, arena.bytes())?.to_vec())).collect()
        }
    }

    /// The device alone, without an executor.
    struct Bare<D: Device> {
        device: D,
        kv: D::Kv,
        tokens: u32,
        token_bytes: usize,
        layer: Vec<u8>,
        host: Vec<u8>,
        weight: D::Weight,
        x: D::Tensor,
        y: D::Tensor,
        work_calls: usize,
    }

    impl<D: Device> Bare<D> {
        fn new(mut device: D, tokens: u32) -> Result<Self> {
            let shape = model().kv_shape(KV_DTYPE);
            let kv = device.kv(shape, tokens as usize)?;
            let token_bytes = shape.layer_token_bytes();
            let bytes = tokens as usize * token_bytes;
            let mut values = Vec::new();
            DType::F16.encode(&vec![0.01; WORK_SIZE * WORK_SIZE], &mut values);
            let source = WeightSource::plain(DType::F16, WORK_SIZE, vec![(WORK_SIZE, values.into())]);
            let weight = device.weight(source)?;
            let (x, y) = (device.tensor(WORK_SIZE, WORK_SIZE)?, device.tensor(WORK_SIZE, WORK_SIZE)?);
            let (layer, host) = (vec![3; bytes], Vec::with_capacity(bytes));
            let mut bare = Self { device, kv, tokens, token_bytes, layer, host, weight, x, y, work_calls: 1 };
            // The first run compiles the kernels.
            bare.time(true, false)?;
            while bare.time(true, false)? < WORK_S && bare.work_calls < WORK_CALLS_MAX {
                bare.work_calls *= 2;
            }
            Ok(bare)
        }

        /// Seconds to read every layer, one call each.
        fn read(&mut self) -> Result<f64> {
            let start = Instant::now();
            for layer in 0..LAYERS as usize {
                self.host.clear();
                self.device.kv_read(&self.kv, layer, 0, self.tokens, &mut self.host)?;
            }
            Ok(start.elapsed().as_secs_f64())
        }

        fn write(&mut self) -> Result<f64> {
            let start = Instant::now();
            for layer in 0..LAYERS as usize {
                self.device.kv_write(&mut self.kv, layer, 0, &self.layer)?;
            }
            self.device.sync()?;
            Ok(start.elapsed().as_secs_f64())
        }

        fn memcpy(&mut self) -> Result<f64> {
            let start = Instant::now();
            for _ in 0..LAYERS {
                self.host.clear();
                self.host.extend_from_slice(black_box(&self.layer));
            }
            Ok(start.elapsed().as_secs_f64())
        }

        /// Seconds of other work, of a 1 MiB copy behind it, or of either alone.
        fn time(&mut self, work: bool, copy: bool) -> Result<f64> {
            let tokens = u32::try_from((1 << 20) / self.token_bytes)?.min(self.tokens);
            self.device.sync()?;
            let start = Instant::now();
            for _ in 0..if work { self.work_calls } else { 0 } {
                self.device.matmul(&self.x, &self.weight, WORK_SIZE, Mode::Set, &mut self.y)?;
            }
            self.host.clear();
            match copy {
                true => self.device.kv_read(&self.kv, 0, 0, tokens, &mut self.host)?,
                false => self.device.sync()?,
            }
            Ok(start.elapsed().as_secs_f64())
        }
    }

    const READ: &str = "read back, a layer a call";
    const WRITE: &str = "written, a layer a call";
    const MEMCPY: &str = "memcpy on the host";

    /// Measures one backend: its parties' rates, and a copy's delay.
    fn measure<D: Device>(open: impl Fn() -> Result<D>, args: &Args) -> Result<Value> {
        let layer_token_bytes = model().kv_shape(KV_DTYPE).layer_token_bytes();
        let bytes = args.mib << 20;
        let tokens = u32::try_from(bytes / (layer_token_bytes * LAYERS as usize))? / BLOCK_TOKENS * BLOCK_TOKENS;
        let bytes = tokens as usize * layer_token_bytes * LAYERS as usize;
        let (mut bare, mut staged) = (Bare::new(open()?, tokens)?, Staged::new(open()?, tokens)?);
        staged.check()?;
        let names = [
            (READ, READ),
            ("staged out, together", READ),
            ("staged out, rBlocks in any order", READ),
            (WRITE, WRITE),
            ("staged in, together", WRITE),
            ("staged in, rBlocks in any order", WRITE),
            (MEMCPY, MEMCPY),
        ];
        let mut rates: Vec<Vec<f64>> = vec![Vec::new(); names.len()];
        let mut waits: [Vec<f64>; 3] = Default::default();
        // The first round warms up.
        for round in 0..=args.rounds {
            let seconds = [
                bare.read()?,
                staged.out(true)?,
                staged.out(false)?,
                bare.write()?,
                staged.inward(true)?,
                staged.inward(false)?,
                bare.memcpy()?,
            ];
            let wait = [bare.time(true, false)?, bare.time(false, true)?, bare.time(true, true)?];
            if round > 0 {
                #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
                rates.iter_mut().zip(seconds).for_each(|(rates, s)| rates.push(bytes as f64 / s / 1e9));
                waits.iter_mut().zip(wait).for_each(|(waits, s)| waits.push(s * 1e6));
            }
        }
        let rates: Vec<f64> = rates.into_iter().map(median).collect();
        let of = |limit: &str| names.iter().position(|(name, _)| *name == limit).map_or(f64::NAN, |at| rates[at]);
        let rows: Vec<Value> = names
            .iter()
            .zip(&rates)
            .map(|((name, limit), rate)| json!({ "party": name, "gb_per_s": rate, "limit": limit, "of_limit": rate / of(limit) }))
            .collect();
        let [work, copy, both] = waits.map(median);
        let info = bare.device.info();
        Ok(
            json!({ "backend": info.backend, "device": info.name, "software": info.software, "bytes": bytes, "parties": rows,
            "behind_work": { "work_us": work, "copy_us": copy, "copy_behind_work_us": both,
                "share_of_work_waited": (both - copy) / work } }),
        )
    }

    fn wgpu(args: &Args) -> Result<Value> {
        let adapters = list_adapters();
        let usable = |software: bool| adapters.iter().any(|a| a.software == software && a.unusable.is_none());
        let choice = match (usable(false), usable(true)) {
            (true, _) => AdapterChoice::Gpu,
            (_, true) => AdapterChoice::Software,
            _ => return Ok(json!({ "backend": "wgpu", "absent": "no adapter" })),
        };
        measure(|| Ok(WgpuDevice::open(&choice)?), args)
    }

    fn cuda(args: &Args) -> Result<Value> {
        match lagoon_cuda::probe() {
            CudaProbe::Present { .. } => {
                measure(|| Ok(CudaDevice::open(kernels::FATBIN, CudaOptions::default())?), args)
            }
            CudaProbe::Absent { reason } => Ok(json!({ "backend": "cuda", "absent": reason })),
        }
    }

    fn print(backend: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if let Some(reason) = backend.get("absent") {
            println!("\n{}: not here: {}", text(&backend["backend"]), text(reason));
            return;
        }
        println!("\n{}: {}, {} bytes of KV", text(&backend["backend"]), text(&backend["device"]), backend["bytes"]);
        println!("{:<40} {:>9} {:>9}", "", "GB/s", "of limit");
        for row in backend["parties"].as_array().into_iter().flatten() {
            let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
            println!("{:<40} {:>9.2} {:>9.2}", text(&row["party"]), number("gb_per_s"), number("of_limit"));
        }
        let wait = |field: &str| backend["behind_work"][field].as_f64().unwrap_or(f64::NAN);
        println!(
            "a copy of 1 MiB takes {:.0} us, and {:.0} us behind {:.0} us of queued work: it waits for {:.2} of that",
            wait("copy_us"),
            wait("copy_behind_work_us"),
            wait("work_us"),
            wait("share_of_work_waited")
        );
    }

    pub(super) fn main() -> Result<()> {
        let mut args = Args::parse();
        let _ = args.bench;
        if args.smoke {
            (args.rounds, args.mib) = (1, 4);
        }
        let backends = [wgpu(&args)?, cuda(&args)?];
        if args.json {
            let object = json!({ "bench": "staging", "device": device(), "commit": commit(), "rounds": args.rounds,
                "hardware_threads": hardware_threads(), "backends": backends });
            println!("{object:#}");
        } else {
            backends.iter().for_each(print);
        }
        Ok(())
    }
}
