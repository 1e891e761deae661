//! KV in 8 bits (`--kv-dtype fp8`): what it costs in accuracy, and that it is lent, moved, transferred and found like any other.

use crate::moves::{moved, placed, run_to_token};
use lagoon_backend::{Device, cpu::CpuDevice};
use lagoon_instance::RemotePolicy;
use lagoon_model::ModelSpec;
use lagoon_tests::cluster::check::assert_same;
use lagoon_tests::cluster::compare::{prompt, single};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};
use lagoon_tests::single::{STEP_ROWS, Session};
use lagoon_types::{DType, KvDType, KvShape};
use serde::Deserialize;

/// The difference that KV in 8 bits makes to the logits of a golden's median position, at most: that of its largest one, in standard
/// deviations of all logits.
const MEDIAN_ERROR: f32 = 0.5;

/// Logits of a golden's last positions, decoded one by one.
fn decoded<D: Device>(golden: &Golden, device: D, kv_dtype: KvDType) -> Vec<Vec<f32>> {
    let tokens = &golden.description.tokens;
    let mut spec = ModelSpec::open(&golden.dir).unwrap();
    golden.description.max_model_len.into_iter().for_each(|tokens| spec.limit_context(tokens).unwrap());
    let mut session = Session::of(device, &golden.dir, &spec, tokens.len(), Some(kv_dtype));
    let before = tokens.len() - golden.rows;
    let mut chunks: Vec<usize> = tokens[..before].chunks(STEP_ROWS).map(<[u32]>::len).collect();
    let prompt = chunks.len();
    chunks.extend(vec![1; golden.rows]);
    session.logits(tokens, &chunks).into_iter().skip(prompt).map(|(_, logits)| logits).collect()
}

/// The largest differences of a position's logits: that of the median position, and of all. A mixture's router may choose another expert
/// where two are nearly alike, which changes a position's logits by any amount.
fn error(a: &[Vec<f32>], b: &[Vec<f32>]) -> [f32; 2] {
    let mut all: Vec<f32> = a.iter().zip(b).map(|(a, b)| max_diff(a, b)).collect();
    all.sort_by(f32::total_cmp);
    [all[all.len() / 2], all[all.len() - 1]]
}

/// The table of docs/guide: every golden's logits with KV in 16 bits and in 8, against KV in f32.
#[test]
fn the_error_of_every_golden() {
    let (mut medians, mut largest) = (Vec::new(), 0f32);
    for name in models() {
        let golden = Golden::load(name);
        let of = |dtype| decoded(&golden, CpuDevice::new(), dtype);
        let wide = of(KvDType::F32);
        let relative = |dtype| error(&of(dtype), &wide).map(|diff| diff / golden.description.logit_std);
        let [f16, bf16, fp8] = [KvDType::F16, KvDType::BF16, KvDType::Fp8].map(relative);
        println!("{name}: median and largest error: f16 {f16:.4?}, bf16 {bf16:.4?}, fp8 {fp8:.4?}");
        assert!(fp8[0] <= MEDIAN_ERROR, "{name}: {fp8:?}");
        medians.push(fp8[0]);
        largest = largest.max(fp8[1]);
    }
    medians.sort_by(f32::total_cmp);
    println!(
        "fp8: medians {:.3} in the middle, at most {:.3}; largest {largest:.3}",
        medians[medians.len() / 2],
        medians[medians.len() - 1]
    );
}

/// Codes are the same on each backend, but for elements whose last bits differ before they are rounded.
#[test]
fn wgpu_stores_what_the_cpu_stores() {
    for name in ["llama3_old", "gemma2", "gpt_oss", "deepseek_v3"] {
        let golden = Golden::load(name);
        let device = match lagoon_tests::wgpu() {
            Ok(device) => device,
            Err(reason) => return lagoon_tests::skip("wgpu_stores_what_the_cpu_stores", &reason),
        };
        let [wgpu, cpu] = [decoded(&golden, device, KvDType::Fp8), decoded(&golden, CpuDevice::new(), KvDType::Fp8)];
        let diff = error(&wgpu, &cpu).map(|diff| diff / golden.description.logit_std);
        println!("{name}: {diff:.5?}");
        assert!(diff[0] <= MEDIAN_ERROR / 4.0, "{name}: {diff:?}");
    }
}

fn pool(kv_dtype: KvDType) -> PoolSpec {
    PoolSpec { kv_dtype, ..PoolSpec::golden("head_dim_64", 4) }
}

/// Differences by order of sums flip codes, each by a part of the whole error.
fn tolerance() -> f32 {
    MEDIAN_ERROR / 4.0 * Golden::load("head_dim_64").description.logit_std
}

fn kv_shape(spec: &PoolSpec) -> KvShape {
    ModelSpec::open(&spec.dir).unwrap().kv_shape(spec.kv_dtype)
}

/// Lent KV in 8 bits gives a single instance's answers, with about half of the bytes of 16.
#[test]
fn a_pool_gives_a_single_instances_answers_with_half_of_the_bytes() {
    let request = greedy(prompt(90, 100, 128), 8);
    for (remote, kind) in [(RemotePolicy::Ship, "write"), (RemotePolicy::Fetch, "data")] {
        let sent = [KvDType::F16, KvDType::Fp8].map(|kv_dtype| {
            let pool = pool(kv_dtype);
            let alone = single(&pool, std::slice::from_ref(&request));
            let spec = |blocks| Spec { remote, wire: DType::F32, ..Spec::cpu(blocks) };
            let mut world = World::pool(pool.clone(), None, &[spec(6), spec(14), spec(14)]);
            world.submit(0, request.clone());
            world.run();
            let diff = assert_same(&format!("{kv_dtype}, {remote:?}"), &world.requests[0], &alone[0], tolerance());
            println!("{kv_dtype}, {remote:?}: {diff:e}, {:?} {kind} frames and bytes", world.sent(kind));
            world.check_empty();
            (world.sent(kind), kv_shape(&pool).layer_token_bytes() as f64)
        });
        let [((frames, wide), wide_token), ((same, narrow), narrow_token)] = sent;
        assert_eq!(frames, same, "{remote:?}: the same frames");
        let headers = frames as f64 * 64.0;
        assert!((narrow as f64) < wide as f64 * narrow_token / wide_token + headers, "{remote:?}: {narrow} of {wide}");
    }
}

/// Blocks with codes and scales move while their sequence decodes.
#[test]
fn blocks_move() {
    let pool = pool(KvDType::Fp8);
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(40), Spec::cpu(30), Spec::cpu(30)]);
    let request = greedy(prompt(200, 50, 128), 40);
    world.submit(0, request.clone());
    run_to_token(&mut world, 0, 2);
    moved(&mut world, 0, 6, 0, 1);
    assert_eq!(placed(&world, 0)[&1], 6);
    moved(&mut world, 0, 3, 1, 2);
    moved(&mut world, 0, 3, 1, 0);
    world.run();
    assert_same("moved", &world.requests[0], &single(&pool, &[request])[0], tolerance());
    world.check_empty();
}

/// A prefix is found by what its blocks' KV depends on, its type included.
#[test]
fn a_prefix_is_found() {
    let pool = pool(KvDType::Fp8);
    let mut world = World::single(pool.clone(), Spec::cpu(40));
    let request = greedy(prompt(201, 50, 128), 8);
    for _ in 0..2 {
        world.submit(0, request.clone());
        world.run();
    }
    assert_eq!(world.live(0).status().prefix.hit_tokens, 48);
    let alone = single(&pool, &[request]);
    for log in &world.requests {
        assert_same("found", log, &alone[0], tolerance());
    }
    world.check_empty();
}

/// A prompt that is computed elsewhere is read with its scales: exactly the bytes of its tokens.
#[test]
fn a_prompt_is_computed_elsewhere_and_read() {
    for (push, staged) in [(false, false), (true, false), (false, true)] {
        let pool = pool(KvDType::Fp8);
        let stage = |spec: Spec| Spec { stage_blocks: staged.then_some(spec.blocks), ..spec };
        let specs = [stage(Spec::prefill(40)), stage(Spec { push, ..Spec::decode(40) })];
        let mut world = World::pool(pool.clone(), None, &specs);
        world.run_until(|w| w.live(1).status().prefill.workers == 1);
        let request = greedy(prompt(1, 50, 128), 12);
        world.submit(1, request.clone());
        world.run();
        let alone = single(&pool, std::slice::from_ref(&request));
        assert_same("disaggregated", &world.requests[0], &alone[0], tolerance());
        let status = world.live(1).status().prefill;
        assert_eq!((status.pulled, status.own), (1, 0), "{status:?}");
        // The last token of a prompt is computed by the decode worker.
        let bytes = kv_shape(&pool).token_bytes() as u64;
        assert!([49, 50].contains(&(status.bytes / bytes)) && status.bytes.is_multiple_of(bytes), "{status:?}");
        world.check_empty();
        assert_eq!(world.exports(0), 0);
    }
}

#[derive(Deserialize)]
struct Question {
    prompt_suffix: String,
    answer: String,
}

/// The bundled model finds every pass key of its document behind 12,000 tokens of other text, 32,000 in all, as with KV in 16 bits.
#[test]
fn pass_keys_are_found_at_32k() {
    const TOKENS: usize = 32_000;
    let dir = lagoon_tests::root().join("models/passkey");
    let tokenizer = lagoon_text::Tokenizer::open(&dir).unwrap();
    let document = std::fs::read_to_string(dir.join("document.txt")).unwrap();
    let questions: Vec<Question> =
        serde_json::from_str(&std::fs::read_to_string(dir.join("questions.json")).unwrap()).unwrap();
    let filler: Vec<&str> = document.lines().filter(|line| !line.contains("pass key")).collect();
    let whole = tokenizer.encode(&document, true).unwrap();
    let mut front = tokenizer.encode(&(filler.join("\n") + "\n"), true).unwrap();
    front.truncate(TOKENS - whole.len());
    // The document's own beginning-of-sequence token stays out.
    let tokens = [&front[..], &whole[1..]].concat();
    for kv_dtype in [KvDType::F16, KvDType::Fp8] {
        let mut session = Session::open(CpuDevice::new(), &dir, TOKENS + 64, Some(kv_dtype));
        tokens.chunks(STEP_ROWS).for_each(|chunk| drop(session.feed(chunk)));
        let right = questions.iter().filter(|question| {
            session.rewind(tokens.len());
            let asked = tokenizer.encode(&question.prompt_suffix, false).unwrap();
            let mut answer = vec![session.feed(&asked).token.unwrap()];
            while answer.len() < question.answer.len() + 1 {
                let last = *answer.last().unwrap();
                answer.push(session.feed(&[last]).token.unwrap());
            }
            tokenizer.decode(&answer, true).trim() == question.answer
        });
        let (right, all) = (right.count(), questions.len());
        println!("KV in {kv_dtype}: {right} of {all} pass keys at {} tokens", tokens.len());
        assert_eq!(right, all, "KV in {kv_dtype}");
    }
}
