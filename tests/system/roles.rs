//! Instances change roles while they serve: work of the old role is finished, nothing is lost or left behind, and
//! every answer equals a single instance's.

use lagoon_cluster::{BalancerConfig, GManager, GManagerConfig, SwitchedBy};
use lagoon_protocol::{AdminBody, AdminReply, AdminRole, Role};
use lagoon_tests::cluster::check::{assert_same, error_of};
use lagoon_tests::cluster::compare::{assert_equals_single, f32_tolerance, prompt, single};
use lagoon_tests::cluster::{PoolSpec, Rng, Spec, World, greedy};
use lagoon_types::RequestError;
use lagoon_types::limits::{ROLE_GRACE_MS, TRANSFER_READ_MS};

fn role_of(world: &World, node: usize) -> (Role, Option<Role>) {
    let status = world.live(node).status();
    (status.role, status.becoming)
}

/// The gManager's reply to `lagoon role`.
fn ask(world: &mut World, node: usize, role: Role) -> AdminReply {
    let instance = world.id(node).unwrap().0;
    world.admin(AdminBody::Role(AdminRole { instance, role: role.into() }))
}

fn order(world: &mut World, node: usize, role: Role) {
    let reply = ask(world, node, role);
    assert_eq!(reply.error, "");
    world.run_until(|w| {
        let is = role_of(w, node);
        (is == (role, None) || is.1 == Some(role)) && known(w, node) == is
    });
}

/// A node's role and target role as the gManager knows them.
fn known(world: &World, node: usize) -> (Role, Option<Role>) {
    let id = world.id(node).unwrap().0;
    let rows = world.gmanager().status(world.now_ms());
    let row = rows.iter().find(|row| row.instance == id).unwrap();
    let becoming = row.heartbeat.as_ref().and_then(|h| h.role.as_deref()?.becoming);
    (row.role(), becoming.map(|role| Role::try_from(role).unwrap()))
}

fn wait_role(world: &mut World, node: usize, role: Role) {
    world.run_until(|w| role_of(w, node) == (role, None));
}

/// Waits until a node can read the KV of `workers` workers.
fn wait_workers(world: &mut World, node: usize, workers: usize) {
    world.run_until(|w| w.live(node).status().prefill.workers == workers);
}

fn pool(spec: &PoolSpec, seed: Option<u64>, specs: &[Spec]) -> World {
    let workers = specs.iter().filter(|s| s.role.prefills()).count();
    let mut world = World::pool(spec.clone(), seed, specs);
    let decoders = (0..).zip(specs).filter(|(_, s)| s.role == Role::Decode);
    decoders.for_each(|(node, _)| wait_workers(&mut world, node, workers));
    world
}

fn leaves_nothing(world: &mut World) {
    world.check_empty();
    assert!(world.nodes().all(|node| world.exports(node) == 0));
}

/// A prefill worker decodes for a while and then prefills again, under constant load.
fn there_and_back(push: bool) {
    let spec = PoolSpec::golden("llama3_old", 4);
    let with = |of: Spec| Spec { push, step_ms: 4, ..of };
    let specs = [with(Spec::prefill(60)), with(Spec::prefill(60)), with(Spec::decode(60))];
    let mut world = pool(&spec, None, &specs);
    let mut sent = 0;
    let mut traffic = |world: &mut World, nodes: &[usize], requests: usize| {
        for n in 0..requests {
            world.run_for(15);
            sent += 1;
            world.submit(nodes[n % nodes.len()], greedy(prompt(sent, 20 + (sent as usize * 13) % 50, 128), 8));
        }
    };
    traffic(&mut world, &[2], 4);
    world.run_until(|w| w.live(0).status().prefill.jobs > 0);
    order(&mut world, 0, Role::Decode);
    traffic(&mut world, &[2], 4);
    wait_role(&mut world, 0, Role::Decode);
    wait_workers(&mut world, 0, 1);
    wait_workers(&mut world, 2, 1);
    traffic(&mut world, &[0, 2], 10);
    let decoded = world.live(0).status().prefill;
    assert!(decoded.pulled > 0 && decoded.own == 0, "{decoded:?}");
    let computed = decoded.jobs_done;
    order(&mut world, 0, Role::Prefill);
    traffic(&mut world, &[2], 4);
    wait_role(&mut world, 0, Role::Prefill);
    wait_workers(&mut world, 2, 2);
    assert_eq!(world.live(0).status().prefill.workers, 0, "it reads nobody any more");
    traffic(&mut world, &[2], 8);
    world.run();
    let done = world.live(0).status().prefill;
    assert!(done.jobs_done > computed && done.away == 0, "{done:?}");
    assert_eq!(world.live(2).status().prefill.own, 0);
    assert_equals_single("there and back", &world, &spec);
    leaves_nothing(&mut world);
}

#[test]
fn a_prefill_worker_decodes_and_comes_back_pulling() {
    there_and_back(false);
}

#[test]
fn a_prefill_worker_decodes_and_comes_back_pushing() {
    there_and_back(true);
}

/// A worker that is ordered to decode finishes its running prefill and refuses new ones.
#[test]
fn a_prompt_in_progress_is_finished_before_the_role_changes() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let slow = Spec { step_ms: 40, ..Spec::prefill(60) };
    // The other one is too small for the prompt.
    let mut world = pool(&spec, None, &[slow, Spec::prefill(12), Spec::decode(60)]);
    world.submit(2, greedy(prompt(1, 90, 128), 8));
    world.run_until(|w| w.live(0).status().prefill.queued_tokens > 0);
    order(&mut world, 0, Role::Decode);
    assert_eq!(role_of(&world, 0), (Role::Prefill, Some(Role::Decode)));
    world.submit(2, greedy(prompt(2, 30, 128), 8));
    world.run_until(|w| w.requests[1].is_over());
    assert_eq!(world.live(1).status().prefill.jobs_done, 1, "it goes to the other one");
    wait_role(&mut world, 0, Role::Decode);
    let left = world.live(0).status().prefill;
    assert_eq!((left.jobs_done, left.jobs), (1, 0), "{left:?}");
    world.run();
    let status = world.live(2).status().prefill;
    assert_eq!((status.pulled, status.own, status.retried), (2, 0, 0), "{status:?}");
    assert_equals_single("finished", &world, &spec);
    leaves_nothing(&mut world);
}

/// Readers of a prefill worker's exports are not disturbed by its role change.
#[test]
fn exports_are_read_to_the_end_whatever_their_owner_is_by_then() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Spec::prefill(60), Spec::prefill(60), Spec::decode(60)]);
    world.slow_reads(2, Some(TRANSFER_READ_MS / 8));
    world.submit(2, greedy(prompt(1, 60, 128), 8));
    world.run_until(|w| w.live(2).status().prefill.pulling > 0);
    let worker = (0..2).find(|n| world.exports(*n) > 0).unwrap();
    order(&mut world, worker, Role::Decode);
    wait_role(&mut world, worker, Role::Decode);
    assert_eq!(world.live(2).status().prefill.pulling, 1, "it was read already");
    // It decodes meanwhile, beside the memory that is read.
    wait_workers(&mut world, worker, 1);
    let own = world.submit(worker, greedy(prompt(2, 40, 128), 6));
    world.run_until(|w| w.requests[own].is_over());
    assert!(world.exports(worker) > 0 && world.live(worker).status().blocks_lent > 0);
    world.run();
    let status = world.live(2).status().prefill;
    assert_eq!((status.pulled, status.retried), (1, 0), "{status:?}");
    assert_equals_single("read to the end", &world, &spec);
    leaves_nothing(&mut world);
}

/// KV left behind at a prefill worker is attended to there after it has become a decode worker.
#[test]
fn what_was_left_behind_is_attended_to_at_a_decode_worker() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let slow = Spec { step_ms: 40, ..Spec::decode(16) };
    let mut world = pool(&spec, None, &[Spec::prefill(40), Spec::prefill(8), slow]);
    world.submit(2, greedy(prompt(1, 110, 128), 12));
    world.run_until(|w| w.requests[0].tokens.len() >= 2);
    order(&mut world, 0, Role::Decode);
    wait_role(&mut world, 0, Role::Decode);
    assert!(!world.requests[0].is_over(), "it has ended already");
    world.run();
    assert!(world.sent("partial").0 > 0);
    assert_equals_single("left behind", &world, &spec);
    leaves_nothing(&mut world);
}

/// A decode worker finishes its requests. Those in flight to it are served too; later ones are redirected.
#[test]
fn a_decode_worker_finishes_its_requests_before_it_computes_prompts() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let slow = Spec { step_ms: 100, ..Spec::decode(60) };
    let mut world = pool(&spec, None, &[Spec::prefill(60), slow, Spec::decode(60)]);
    world.submit(1, greedy(prompt(1, 40, 128), 40));
    world.run_until(|w| w.requests[0].tokens.len() > 2);
    let reply = ask(&mut world, 2, Role::Prefill);
    assert_eq!(reply.error, "");
    // The first is the last one that takes requests now.
    let reply = ask(&mut world, 1, Role::Prefill);
    assert!(reply.error.contains("the last one that takes requests"), "{reply:?}");
    order(&mut world, 2, Role::Decode);
    order(&mut world, 1, Role::Prefill);
    let late = world.submit(1, greedy(prompt(2, 30, 128), 4));
    world.run_for(ROLE_GRACE_MS + 100);
    let refused = world.submit(1, greedy(prompt(3, 30, 128), 4));
    assert!(matches!(error_of(&world.requests[refused]), RequestError::NotServing(why) if why.contains("role")));
    assert!(world.requests[late].is_over() && !world.requests[0].is_over());
    assert_eq!(role_of(&world, 1), (Role::Decode, Some(Role::Prefill)));
    wait_role(&mut world, 1, Role::Prefill);
    assert!(world.requests[0].is_over());
    // A client without the news is redirected.
    let refused = world.submit(1, greedy(prompt(3, 30, 128), 4));
    assert!(matches!(error_of(&world.requests[refused]), RequestError::NotServing(why) if why.contains("role")));
    wait_workers(&mut world, 2, 2);
    for n in 0..6 {
        world.submit(2, greedy(prompt(10 + n, 60, 128), 4));
    }
    world.run();
    assert!(world.live(1).status().prefill.jobs_done > 0);
    let done: Vec<usize> =
        (0..world.requests.len()).filter(|n| matches!(world.requests[*n].end, Some(Ok(_)))).collect();
    assert_eq!(done.len(), world.requests.len() - 2);
    equal_single("a decode worker leaves", &world, &spec, &done);
    leaves_nothing(&mut world);
}

/// Asserts that these requests equal a single instance's.
fn equal_single(what: &str, world: &World, spec: &PoolSpec, requests: &[usize]) {
    let asked: Vec<_> = requests.iter().map(|n| world.requests[*n].request.clone()).collect();
    let single = single(spec, &asked);
    let tolerance = f32_tolerance(&single);
    for (n, single) in requests.iter().zip(&single) {
        assert_same(&format!("{what}, request {n}"), &world.requests[*n], single, tolerance);
    }
}

/// The gManager that ordered a change dies: the change goes on, and the next gManager learns of it.
#[test]
fn a_change_goes_on_over_gmanagers() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let slow = Spec { step_ms: 60, ..Spec::prefill(60) };
    let mut world = pool(&spec, None, &[slow, Spec::prefill(60), Spec::decode(60)]);
    world.submit(2, greedy(prompt(1, 100, 128), 8));
    world.submit(2, greedy(prompt(2, 100, 128), 8));
    world.run_until(|w| w.live(0).status().prefill.queued_tokens > 0);
    order(&mut world, 0, Role::Decode);
    world.kill_gmanager();
    world.start_gmanager();
    world.run_until(|w| (0..3).all(|n| w.live(n).status().registered));
    world.run_for(50);
    let row = &world.gmanager().status(world.now_ms())[0];
    let becoming = row.heartbeat.as_ref().and_then(|h| h.role.as_deref()?.becoming);
    assert_eq!((row.role(), becoming), (Role::Prefill, Some(Role::Decode.into())));
    wait_role(&mut world, 0, Role::Decode);
    wait_workers(&mut world, 0, 1);
    wait_workers(&mut world, 2, 1);
    world.submit(0, greedy(prompt(3, 30, 128), 8));
    // A process registers with its current role.
    world.kill_gmanager();
    world.start_gmanager();
    world.run_for(600);
    assert_eq!(role_of(&world, 0), (Role::Decode, None));
    world.run();
    assert_equals_single("over gManagers", &world, &spec);
    leaves_nothing(&mut world);
}

/// An instance of both roles becomes either, and back.
#[test]
fn an_instance_that_does_both_becomes_either() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let both = || Spec { share: true, ..Spec::cpu(60) };
    let mut world = pool(&spec, None, &[both(), both(), both()]);
    let serve = |world: &mut World, nodes: &[usize], seed: u64| {
        for (n, node) in nodes.iter().enumerate() {
            world.submit(*node, greedy(prompt(seed + n as u64, 50, 128), 6));
        }
        world.run();
    };
    serve(&mut world, &[0, 1, 2], 0);
    assert!(world.nodes().all(|n| world.live(n).status().prefill.pulled == 0));
    order(&mut world, 0, Role::Prefill);
    wait_role(&mut world, 0, Role::Prefill);
    order(&mut world, 1, Role::Decode);
    wait_role(&mut world, 1, Role::Decode);
    // Two workers: the dedicated one comes first.
    wait_workers(&mut world, 1, 2);
    serve(&mut world, &[1, 2], 10);
    let pulled = |world: &World, node: usize| world.live(node).status().prefill.pulled;
    assert_eq!((pulled(&world, 1), pulled(&world, 2)), (1, 0));
    assert_eq!(world.live(0).status().prefill.jobs_done, 1);
    order(&mut world, 1, Role::Instance);
    wait_role(&mut world, 1, Role::Instance);
    order(&mut world, 0, Role::Instance);
    wait_role(&mut world, 0, Role::Instance);
    serve(&mut world, &[0, 1, 2], 20);
    assert_eq!(pulled(&world, 1), 1, "it computes its own prompts again");
    assert_equals_single("both", &world, &spec);
    leaves_nothing(&mut world);
}

/// Roles change at any time in a shuffled, delayed pool, with common prefixes, cancellations and cut connections.
#[test]
fn shuffled_pools_change_roles_and_give_the_same_tokens() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut changed = 0;
    for seed in 0..16 {
        let with = |of: Spec| Spec { push: seed % 2 == 1, step_ms: seed % 3, ..of };
        let specs = [Spec::prefill(40), Spec::prefill(30), Spec::decode(40), Spec::decode(30)].map(with);
        let mut world = pool(&spec, Some(seed), &specs);
        let mut rng = Rng::new(seed);
        let beginning = prompt(7, 24, 128);
        for n in 0..24 {
            let takes = |node: &usize| role_of(&world, *node).0.serves() && role_of(&world, *node).1.is_none();
            let nodes: Vec<usize> = (0..4).filter(takes).collect();
            let node = nodes[rng.below(nodes.len() as u64) as usize];
            let mut tokens = if rng.below(2) == 0 { beginning.clone() } else { Vec::new() };
            tokens.extend(prompt(100 + n, 3 + rng.below(50) as usize, 128));
            let request = world.submit(node, greedy(tokens, 1 + rng.below(10) as u32));
            world.run_for(rng.below(40));
            match rng.below(8) {
                0 => world.cancel(request),
                1 => world.cut(rng.below(4) as usize, node, rng.below(300)),
                2..5 => {
                    let role = [Role::Prefill, Role::Decode, Role::Instance][rng.below(3) as usize];
                    changed += usize::from(ask(&mut world, rng.below(4) as usize, role).error.is_empty());
                }
                _ => {}
            }
        }
        world.run();
        // No request fails; cancelled ones are not compared.
        let over = |n: &usize| !world.requests[*n].cancelled && matches!(world.requests[*n].end, Some(Ok(_)));
        let done: Vec<usize> = (0..world.requests.len()).filter(over).collect();
        let failed = world.requests.iter().filter(|l| matches!(l.end, Some(Err(_)))).count();
        assert_eq!(failed, 0, "seed {seed}: {}", world.describe());
        equal_single(&format!("seed {seed}"), &world, &spec, &done);
        world.run_for(20_000);
        leaves_nothing(&mut world);
    }
    assert!(changed > 60, "{changed}");
}

/// The gManager's balancer changes roles: first answers queue, then prompts do.
#[test]
fn the_balancer_moves_an_instance_there_and_back() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let balancer = BalancerConfig { sustain_ms: 1_000, dwell_ms: 3_000, window_ms: 1_000, spare_load: 0.5 };
    let mut world = World::new(spec.clone(), None);
    let config = GManagerConfig { balancer: Some(balancer), ..GManagerConfig::default() };
    *world.gmanager_mut() = GManager::with_config(config);
    let with = |of: Spec| Spec { step_ms: 20, running: 4, queue: 64, ..of };
    for spec in [Spec::prefill(60), Spec::prefill(60), Spec::decode(60)] {
        world.add(with(spec));
    }
    wait_workers(&mut world, 2, 2);
    let switches = |w: &World| {
        let gmanager = w.gmanager();
        gmanager.role_switches().collect::<Vec<_>>()
    };
    let mut sent = 0;
    let mut submit = |world: &mut World, node: usize, tokens: usize, answer: u32| {
        sent += 1;
        world.submit(node, greedy(prompt(sent, tokens, 128), answer))
    };
    // Short prompts and long answers, more than the batch holds.
    (0..24).for_each(|_| _ = submit(&mut world, 2, 8, 80));
    world.run_until(|w| !switches(w).is_empty());
    assert!(world.now_ms() > 3_000, "it had seen too little");
    let by = SwitchedBy::Balancer;
    assert_eq!(switches(&world), [(Role::Prefill, Role::Decode, by, 1)]);
    world.run_until(|w| (0..2).any(|n| role_of(w, n) == (Role::Decode, None)));
    let moved = (0..2).find(|n| role_of(&world, *n).0 == Role::Decode).unwrap();
    world.run();
    assert_eq!(switches(&world).len(), 1, "one prefill worker is left");
    // Long prompts and short answers.
    for n in 0..60 {
        let _ = submit(&mut world, [2, moved][n % 2], 100, 2);
    }
    world.run_until(|w| switches(w).len() > 1);
    let [there, back] = [(Role::Prefill, Role::Decode, by, 1), (Role::Decode, Role::Prefill, by, 1)];
    assert_eq!(switches(&world), [there, back]);
    world.run_until(|w| (0..3).filter(|n| role_of(w, *n) == (Role::Prefill, None)).count() == 2);
    world.run();
    assert_equals_single("balanced", &world, &spec);
    leaves_nothing(&mut world);
}
