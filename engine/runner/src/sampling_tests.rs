//! Tests of the sampler: exact where the result is determined, statistical with fixed seeds where it is drawn.

use super::*;

fn params() -> SamplingParams {
    SamplingParams { seed: 7, ..SamplingParams::default() }
}

/// How often each token is drawn in `n` draws.
fn histogram(logits: &[f32], params: &SamplingParams, n: u64) -> Vec<u64> {
    let mut sampler = Sampler::new();
    let mut counts = vec![0; logits.len()];
    for index in 0..n {
        counts[sampler.sample(logits, params, index, &[], None).unwrap().id as usize] += 1;
    }
    counts
}

/// Asserts by a chi-square statistic that the counts have the given probabilities; tokens of probability 0 must not
/// appear. The bound is beyond the 1 - 1e-6 quantile for the five degrees
/// of freedom that the tests have at most.
fn assert_distributed(counts: &[u64], probabilities: &[f64]) {
    let n = counts.iter().sum::<u64>() as f64;
    let mut statistic = 0.0;
    for (&count, &p) in counts.iter().zip(probabilities) {
        if p == 0.0 {
            assert_eq!(count, 0, "{counts:?} against {probabilities:?}");
        } else {
            statistic += (count as f64 - n * p).powi(2) / (n * p);
        }
    }
    assert!(statistic < 48.0, "chi-square {statistic}: {counts:?} against {probabilities:?}");
}

fn softmax(logits: &[f32], temperature: f64, keep: impl Fn(usize) -> bool) -> Vec<f64> {
    let weights: Vec<f64> =
        (0..logits.len()).map(|i| if keep(i) { (f64::from(logits[i]) / temperature).exp() } else { 0.0 }).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let greedy = SamplingParams { temperature: 0.0, ..params() };
    let mut sampler = Sampler::new();
    let mut pick = |logits: &[f32]| sampler.sample(logits, &greedy, 3, &[], None).unwrap().id;
    assert_eq!(pick(&[1.0, 5.0, 5.0, 2.0]), 1);
    assert_eq!(pick(&[-3.0]), 0);
    assert_eq!(pick(&[f32::NEG_INFINITY, f32::MIN, f32::NEG_INFINITY]), 1);
    assert_eq!(pick(&[f32::MAX, f32::MIN, f32::MAX]), 0);
}

#[test]
fn draws_follow_the_softmax_at_the_temperature() {
    let logits = [0.0, 1.0, 2.0, -1.0, f32::NEG_INFINITY, 0.5];
    for temperature in [0.5, 1.0, 2.0] {
        let params = SamplingParams { temperature, ..params() };
        let expected = softmax(&logits, f64::from(temperature), |_| true);
        assert_distributed(&histogram(&logits, &params, 40_000), &expected);
    }
}

#[test]
fn each_filter_keeps_what_it_says() {
    // Probabilities about 0.50, 0.30, 0.15, 0.05, in a shuffled order.
    let logits = [0.15f32.ln(), 0.50f32.ln(), 0.05f32.ln(), 0.30f32.ln()];
    let draw = |params: SamplingParams| histogram(&logits, &params, 20_000);
    let expect = |kept: &[usize]| softmax(&logits, 1.0, |i| kept.contains(&i));
    assert_distributed(&draw(SamplingParams { top_k: 2, ..params() }), &expect(&[1, 3]));
    assert_distributed(&draw(SamplingParams { top_k: 9, ..params() }), &expect(&[0, 1, 2, 3]));
    // 0.5 + 0.3 does not reach 0.9, so the third is kept too.
    assert_distributed(&draw(SamplingParams { top_p: 0.9, ..params() }), &expect(&[0, 1, 3]));
    assert_distributed(&draw(SamplingParams { top_p: 0.79, ..params() }), &expect(&[1, 3]));
    // Tokens under 0.2 * 0.5 go.
    assert_distributed(&draw(SamplingParams { min_p: 0.2, ..params() }), &expect(&[0, 1, 3]));
    // Of 0.5 and 0.3 renormalised, the first is 0.625: top-p is of what top-k left.
    assert_distributed(&draw(SamplingParams { top_k: 2, top_p: 0.6, ..params() }), &expect(&[1]));
    // And of what min-p left: of 0.5, 0.3, 0.15 the first two are 0.84.
    assert_distributed(&draw(SamplingParams { min_p: 0.2, top_p: 0.83, ..params() }), &expect(&[1, 3]));
    assert_distributed(&draw(SamplingParams { min_p: 0.0, top_p: 0.83, ..params() }), &expect(&[0, 1, 3]));
}

#[test]
fn filters_act_after_the_temperature() {
    // At temperature 10 the probabilities are nearly equal, so that 0.9 takes all four.
    let logits = [0.0f32, 1.0, 2.0, 3.0];
    let params = SamplingParams { temperature: 10.0, top_p: 0.9, ..params() };
    assert_distributed(&histogram(&logits, &params, 20_000), &softmax(&logits, 10.0, |_| true));
}

#[test]
fn extremes_leave_the_likeliest() {
    let logits = [1.0, 3.0, 3.0, 2.0];
    for params in [
        SamplingParams { top_k: 1, ..params() },
        SamplingParams { top_p: 1e-9, ..params() },
        SamplingParams { top_p: f32::MIN_POSITIVE, top_k: 3, ..params() },
    ] {
        assert_eq!(histogram(&logits, &params, 500), [0, 500, 0, 0], "{params:?}");
    }
    // Only exact ties survive these.
    for params in
        [SamplingParams { min_p: 1.0, ..params() }, SamplingParams { temperature: f32::MIN_POSITIVE, ..params() }]
    {
        let counts = histogram(&logits, &params, 2_000);
        assert_distributed(&counts, &[0.0, 0.5, 0.5, 0.0]);
    }
    let wide = [f32::MAX, f32::MIN, 0.0];
    assert_eq!(histogram(&wide, &params(), 100), [100, 0, 0]);
}

#[test]
fn top_p_over_a_large_vocabulary_matches_a_plain_sort() {
    // Enough nearly equal tokens that several rounds of ranking are needed.
    let logits: Vec<f32> = (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65_536.0).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l).exp()).collect();
    let total: f64 = weights.iter().sum();
    for top_p in [0.001f32, 0.3, 0.75, 0.999] {
        let mut sum = 0.0;
        let reached = |&&i: &&usize| {
            let before = sum < f64::from(top_p) * total;
            sum += weights[i];
            before
        };
        let expected: Vec<usize> = order.iter().take_while(reached).copied().collect();
        let mut sampler = Sampler::new();
        sampler.sample(&logits, &SamplingParams { top_p, ..params() }, 0, &[], None).unwrap();
        let mut kept: Vec<usize> = sampler.kept.iter().map(|candidate| candidate.id as usize).collect();
        let mut expected_ids = expected.clone();
        kept.sort_unstable();
        expected_ids.sort_unstable();
        assert_eq!(kept, expected_ids, "top_p {top_p}");
    }
}

#[test]
fn a_draw_depends_on_seed_and_index_alone() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
    let draw = |seed, indices: &mut dyn Iterator<Item = u64>| -> Vec<u32> {
        let params = SamplingParams { seed, top_k: 40, top_p: 0.95, ..params() };
        let mut sampler = Sampler::new();
        indices.map(|index| sampler.sample(&logits, &params, index, &[], None).unwrap().id).collect()
    };
    let forward = draw(1, &mut (0..64));
    let mut backward = draw(1, &mut (0..64).rev());
    backward.reverse();
    assert_eq!(forward, backward);
    assert_ne!(forward, draw(2, &mut (0..64)));
    // Neighbouring seeds and indices are unrelated: no diagonal repeats.
    assert_ne!(draw(2, &mut (0..63)), forward[1..]);
}

#[test]
fn rounding_of_the_logits_does_not_change_draws() {
    let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 1.3).sin() * 4.0).collect();
    let rounded: Vec<f32> = logits.iter().zip(0..).map(|(l, i)| l + [1e-6, -1e-6][i % 2]).collect();
    let params = SamplingParams { temperature: 0.8, top_k: 0, top_p: 1.0, ..params() };
    let (mut a, mut b) = (Sampler::new(), Sampler::new());
    let same = |i: &u64| {
        a.sample(&logits, &params, *i, &[], None).unwrap().id == b.sample(&rounded, &params, *i, &[], None).unwrap().id
    };
    assert_eq!((0..2000).filter(same).count(), 2000);
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits = [2.0f32, f32::NEG_INFINITY, 4.0, 2.0, -1.0];
    let exact = |i: usize| {
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        f64::from(logits[i]) - sum.ln()
    };
    let ask = |n, temperature| {
        let params = SamplingParams { logprobs: Some(n), temperature, top_k: 1, ..params() };
        Sampler::new().sample(&logits, &params, 0, &[], None).unwrap().logprobs.unwrap()
    };
    for temperature in [0.0, 0.3, 5.0] {
        let found = ask(3, temperature);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 0, 3]);
        assert!((f64::from(found.chosen) - exact(2)).abs() < 1e-6);
        for (id, logprob) in found.top {
            assert!((f64::from(logprob) - exact(id as usize)).abs() < 1e-6);
        }
    }
    assert!(ask(0, 1.0).top.is_empty());
    // Impossible tokens are not alternatives.
    assert_eq!(ask(20, 1.0).top.len(), 4);
    assert_eq!(Sampler::new().sample(&logits, &params(), 0, &[], None).unwrap().logprobs, None);
}

#[test]
fn nonsense_is_an_error() {
    let mut sampler = Sampler::new();
    let mut sample = |logits: &[f32], params: &SamplingParams| sampler.sample(logits, params, 0, &[], None);
    let nan = sample(&[0.0, f32::NAN, 1.0], &params());
    assert_eq!(nan, Err(SampleError::BadLogit { token: 1, value: "NaN".to_owned() }));
    let infinite = sample(&[0.0, 1.0, f32::INFINITY], &SamplingParams { temperature: 0.0, ..params() });
    assert_eq!(infinite, Err(SampleError::BadLogit { token: 2, value: "inf".to_owned() }));
    assert_eq!(sample(&[], &params()), Err(SampleError::Nothing));
    assert_eq!(sample(&[f32::NEG_INFINITY; 4], &params()), Err(SampleError::Nothing));
    for bad in [
        SamplingParams { temperature: -1.0, ..params() },
        SamplingParams { temperature: f32::NAN, ..params() },
        SamplingParams { top_p: 0.0, ..params() },
        SamplingParams { top_p: 1.5, ..params() },
        SamplingParams { min_p: -0.1, ..params() },
        SamplingParams { min_p: f32::NAN, ..params() },
        SamplingParams { presence_penalty: 2.5, ..params() },
        SamplingParams { frequency_penalty: f32::NAN, ..params() },
        SamplingParams { repetition_penalty: 0.0, ..params() },
    ] {
        assert!(matches!(sample(&[0.0, 1.0], &bad), Err(SampleError::BadParameter { .. })), "{bad:?}");
    }
}

/// `min_tokens` bans what would end the sequence.
#[test]
fn banned_tokens_are_never_drawn_and_count_for_log_probabilities() {
    let logits = [0.5, 3.0, 2.0, 2.0];
    let mut sampler = Sampler::new();
    let greedy = SamplingParams { temperature: 0.0, logprobs: Some(4), ..params() };
    let picked = |sampler: &mut Sampler, banned: &[u32]| sampler.sample(&logits, &greedy, 0, banned, None).unwrap();
    assert_eq!(
        [picked(&mut sampler, &[]).id, picked(&mut sampler, &[1]).id, picked(&mut sampler, &[1, 2]).id],
        [1, 2, 3]
    );
    let (free, banned) = (picked(&mut sampler, &[]).logprobs.unwrap(), picked(&mut sampler, &[1]).logprobs.unwrap());
    assert_eq!((&free.top, banned.chosen), (&banned.top, free.top[1].1));
    let draw = |params: &SamplingParams| {
        let mut counts = [0; 4];
        for index in 0..20_000 {
            counts[Sampler::new().sample(&logits, params, index, &[1], None).unwrap().id as usize] += 1;
        }
        counts
    };
    // As if the logit were negative infinity: top-k and min-p count what is left.
    let without = [0.5, f32::NEG_INFINITY, 2.0, 2.0];
    for params in
        [params(), SamplingParams { top_k: 2, ..params() }, SamplingParams { min_p: 0.9, top_p: 0.9, ..params() }]
    {
        assert_eq!(draw(&params), histogram(&without, &params, 20_000)[..], "{params:?}");
    }
    assert_eq!(sampler.sample(&logits, &greedy, 0, &[0, 1, 2, 3], None), Err(SampleError::Excluded));
}

/// As if the logits had the biases in them; log-probabilities are those of the model.
#[test]
fn biases_are_added_before_anything_else() {
    let logits = [0.5, 3.0, 2.0, 2.0];
    let biased = [0.5, 1.0, 2.0, 2.5];
    let logit_bias: std::sync::Arc<[(u32, f32)]> = [(1, -2.0), (3, 0.5), (9, 100.0)].into();
    let mut sampler = Sampler::new();
    for params in [
        SamplingParams { temperature: 0.0, ..params() },
        SamplingParams { top_k: 2, ..params() },
        SamplingParams { min_p: 0.4, top_p: 0.8, temperature: 0.7, ..params() },
    ] {
        let with = SamplingParams { logit_bias: logit_bias.clone(), ..params.clone() };
        for banned in [&[][..], &[3]] {
            for index in 0..2_000 {
                let expected = sampler.sample(&biased, &params, index, banned, None).unwrap();
                assert_eq!(sampler.sample(&logits, &with, index, banned, None).unwrap(), expected, "{with:?}");
            }
        }
        assert!(params.fits_device_sampling() && !with.fits_device_sampling());
    }
    let greedy = SamplingParams { temperature: 0.0, logprobs: Some(4), ..params() };
    let plain = sampler.sample(&logits, &greedy, 0, &[], None).unwrap();
    let shifted = sampler.sample(&logits, &SamplingParams { logit_bias, ..greedy.clone() }, 0, &[], None).unwrap();
    assert_eq!((plain.id, shifted.id), (1, 3));
    let (plain, shifted) = (plain.logprobs.unwrap(), shifted.logprobs.unwrap());
    assert_eq!((&shifted.top, shifted.chosen), (&plain.top, plain.top[2].1));
    let bad = SamplingParams { logit_bias: [(1, f32::NAN)].into(), ..greedy };
    assert!(matches!(
        sampler.sample(&logits, &bad, 0, &[], None),
        Err(SampleError::BadParameter { name: "logit_bias", .. })
    ));
}

/// The numbers are by hand from the definitions of vLLM (`apply_penalties`) and transformers
/// (`RepetitionPenaltyLogitsProcessor`): a prompt of tokens 0 and 1, an answer of 1, 2, 2.
#[test]
fn penalties_are_those_of_vllm_and_transformers() {
    let logits = [4.0, -2.0, 3.0, 1.0];
    let counts = TokenCounts::new(&[1, 0, 0], &[1, 2, 2]);
    let adjusted = |params: &SamplingParams| {
        let mut out = Vec::new();
        adjust(&logits, params, (&[], None), Some(&counts), &mut out);
        out
    };
    let repetition = SamplingParams { repetition_penalty: 2.0, ..params() };
    // Prompt and answer, each token once: positive logits are divided, negative ones multiplied.
    assert_eq!(adjusted(&repetition), [2.0, -4.0, 1.5, 1.0]);
    // The answer alone: token 2 came twice, token 1 once; the prompt's 1 and 0 do not count.
    let frequency = SamplingParams { frequency_penalty: 0.5, ..params() };
    assert_eq!(adjusted(&frequency), [4.0, -2.5, 2.0, 1.0]);
    let presence = SamplingParams { presence_penalty: -0.25, ..params() };
    assert_eq!(adjusted(&presence), [4.0, -1.75, 3.25, 1.0]);
    // Together, and after the bias: (3 + 1) / 2 - 2 * 0.5 - 0.25 for token 2.
    let all = SamplingParams {
        logit_bias: [(2, 1.0)].into(),
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        ..repetition.clone()
    };
    assert_eq!(adjusted(&all), [2.0, -4.75, 0.75, 1.0]);
    // Any finite bias of a peer, with the strongest penalty: an extreme logit, and no failure of the step.
    let extreme = SamplingParams {
        logit_bias: [(2, f32::MAX), (1, -f32::MAX)].into(),
        repetition_penalty: 0.01,
        temperature: 0.0,
        ..params()
    };
    assert_eq!(adjusted(&extreme)[2], f32::MAX);
    assert_eq!(Sampler::new().sample(&logits, &extreme, 0, &[], Some(&counts)).unwrap().id, 2);
    for params in [repetition, frequency, presence, all] {
        assert!(!params.fits_device_sampling(), "{params:?}");
    }
}

#[test]
fn a_penalised_draw_is_the_draw_from_adjusted_logits() {
    let logits = [0.5, 3.0, 2.0, 2.5];
    let mut counts = TokenCounts::new(&[3], &[]);
    [1, 1, 2].iter().for_each(|token| counts.push(*token));
    assert_eq!(counts, TokenCounts::new(&[3], &[1, 1, 2]));
    let params = SamplingParams { frequency_penalty: 1.0, presence_penalty: 0.5, logprobs: Some(1), ..params() };
    let plain = SamplingParams { frequency_penalty: 0.0, presence_penalty: 0.0, ..params.clone() };
    let mut sampler = Sampler::new();
    for index in 0..2_000 {
        let penalised = sampler.sample(&logits, &params, index, &[], Some(&counts)).unwrap();
        assert_eq!(penalised.id, sampler.sample(&[0.5, 0.5, 0.5, 2.5], &plain, index, &[], None).unwrap().id);
        // Log-probabilities are the model's.
        assert_eq!(penalised.logprobs.unwrap().top[0].0, 1);
    }
}

#[test]
fn only_allowed_tokens_are_drawn() {
    let logits = [0.5, 3.0, 2.0, 2.5];
    let params = SamplingParams { allowed_token_ids: [0, 2, 9].into(), ..params() };
    let kept = [0.5, f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY];
    assert_eq!(histogram(&logits, &params, 20_000), histogram(&kept, &self::params(), 20_000));
    assert!(!params.fits_device_sampling());
    let none = SamplingParams { allowed_token_ids: [9].into(), ..params };
    assert_eq!(Sampler::new().sample(&logits, &none, 0, &[], None), Err(SampleError::Excluded));
}
