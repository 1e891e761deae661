//! A quiet pool generates the oracle's tokens, wherever the KV is; equal seeds give equal runs.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_instance::{Event, RemotePolicy};
use lagoon_sim::symbolic::{Oracle, Symbolic, Windows};
use lagoon_sim::{NodeSpec, PoolSpec, Rng, World};
use lagoon_types::{GenerateRequest, RequestOptions, SamplingParams, SeqId, TokenEvent};
use lagoon_wire::Class;

fn request(rng: &mut Rng, tokens: usize, max_tokens: u32) -> GenerateRequest {
    let prompt = (0..tokens).map(|_| u32::try_from(rng.below(4000)).unwrap()).collect();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    GenerateRequest {
        prompt,
        answered: 0,
        max_tokens,
        sampling,
        min_tokens: 0,
        stop_ids: Vec::new(),
        return_logits: false,
        options: RequestOptions::default(),
    }
}

fn run(world: &mut World<Symbolic>, us: u64) {
    let end = world.now_us() + us;
    while world.now_us() < end {
        world.step().unwrap();
    }
}

fn output(pool: &PoolSpec, seed: u64, request: &GenerateRequest) -> (Vec<u32>, u64, u64, u64) {
    let mut world = pool.world(seed);
    run(&mut world, 2_000_000);
    world.handle(1, Event::Submit { seq: SeqId(1), request: Box::new(request.clone()) });
    run(&mut world, 20_000_000);
    let (mut tokens, mut ended) = (Vec::new(), false);
    for emission in world.emitted.drain(..) {
        match emission.event {
            TokenEvent::Prompt { .. } | TokenEvent::Embedding { .. } => {}
            TokenEvent::Token { id, .. } => tokens.push(id),
            TokenEvent::Finished { .. } => ended = true,
            TokenEvent::Failed(error) => panic!("{error}"),
        }
    }
    assert!(ended, "{:?}", world.process(1).unwrap().instance.status());
    for (_, process) in world.live() {
        assert_eq!(process.runner.violations, Vec::<String>::new());
        assert_eq!(process.instance.status().blocks_free, process.instance.status().blocks_total);
    }
    (tokens, world.events(), world.fabric.traffic(Class::Control).1, world.fabric.traffic(Class::Bulk).0)
}

#[test]
fn a_pool_equals_the_oracle() {
    let mut rng = Rng::new(5);
    let request = request(&mut rng, 150, 40);
    let (pooled, rings) = (|w| Windows { pooled: Some(w), rings: None }, |w| Windows { pooled: None, rings: Some(w) });
    for (windows, remote) in [
        (Windows::default(), RemotePolicy::Ship),
        (Windows::default(), RemotePolicy::Fetch),
        (pooled(48), RemotePolicy::Ship),
        (pooled(48), RemotePolicy::Fetch),
        (rings(12), RemotePolicy::Ship),
        (rings(12), RemotePolicy::Fetch),
    ] {
        let node = NodeSpec { remote, ..NodeSpec::of(12) };
        let pool = PoolSpec { windows, ..PoolSpec::of(8, vec![node; 3]) };
        let mut oracle = Oracle::new(&request.prompt, windows);
        let expected: Vec<u32> = (0..40).map(|_| oracle.next_token()).collect();
        let (tokens, events, control, bulk) = output(&pool, 1, &request);
        assert_eq!(tokens, expected, "{windows:?} {remote:?}");
        assert!(bulk > 10, "nothing was remote: {bulk} bulk frames");
        assert_eq!(output(&pool, 1, &request), (tokens, events, control, bulk), "the same seed gives the same run");
    }
}
