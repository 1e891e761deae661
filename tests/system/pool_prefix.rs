//! One prefix cache over the pool: a document longer than an instance's memory is computed once, and later questions lease
//! its blocks where they lie.

use lagoon_kv::{BlockHash, IdentityRoot};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::{CachedTokens, GenerateRequest, KvDType, ModelHash, RequestOptions};
use std::collections::BTreeSet;

const BLOCK: u32 = 4;
/// Tokens of the document, a whole number of blocks, and of a question about it.
pub(crate) const DOCUMENT: usize = 100;
pub(crate) const QUESTION: usize = 5;

fn spec() -> Spec {
    Spec { rows: false, ..Spec::cpu(12) }
}

pub(crate) fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", BLOCK)
}

/// The document and the `n`th question about it.
pub(crate) fn question(n: u64) -> Vec<u32> {
    [prompt(1, DOCUMENT, 128), prompt(100 + n, QUESTION, 128)].concat()
}

/// Asks a question at a node and waits for its answer and the next summaries. Returns the tokens of its prompt that were
/// computed.
pub(crate) fn ask(world: &mut World, node: usize, n: u64) -> u32 {
    let id = world.submit(node, greedy(question(n), 4));
    world.run();
    world.run_for(2_500);
    let log = &world.requests[id];
    assert!(matches!(log.end, Some(Ok(_))), "{:?}", log.end);
    log.request.prompt.len() as u32 - log.prompt.0
}

/// Tokens that a question computes at most if all of the document is cached.
pub(crate) const OWN: u32 = QUESTION as u32 + BLOCK;

#[test]
fn a_document_longer_than_an_instance_is_computed_once() {
    for order in [[0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0], [2, 4, 2, 3, 0, 1], [1, 3, 3, 1, 2, 4]] {
        let mut world = World::pool(pool(), None, &vec![Spec { step_ms: 5, ..spec() }; 5]);
        let computed: Vec<u32> = (0..6).map(|n| ask(&mut world, order[n as usize], n)).collect();
        println!("{order:?}: {computed:?}");
        assert_eq!(computed[0] as usize, DOCUMENT + QUESTION);
        assert!(computed[1..].iter().all(|tokens| *tokens <= OWN), "{order:?}: {computed:?}");
        // Usage says what lay elsewhere, and instances count the same.
        let mut found = CachedTokens::default();
        for log in &world.requests {
            assert_eq!(log.found.total(), u64::from(log.prompt.0));
            assert_eq!(
                log.found.pool > 0,
                log.prompt.0 > 0,
                "an instance holds a part of the document: {:?}",
                log.found
            );
            found += log.found;
        }
        let mut counted = CachedTokens::default();
        let status = world.nodes().map(|node| world.live(node).status().prefix);
        let saved_ms: u64 = status.inspect(|of| counted += of.found).map(|of| of.saved_ms).sum();
        assert_eq!(counted, found);
        assert!(saved_ms > 0, "{order:?}");
        assert_equals_single("one document", &world, &pool());
        world.check_empty();
    }
}

/// Tokens of the document that a node caches.
pub(crate) fn share(world: &World, node: usize) -> u32 {
    let hashes: BTreeSet<BlockHash> = chain(world, node).into_iter().collect();
    let pool = &world.live(node).rmanager().pool;
    pool.hashes().filter(|hash| hashes.contains(*hash)).count() as u32 * BLOCK
}

/// Block hashes of the document.
fn chain(world: &World, node: usize) -> Vec<BlockHash> {
    let shape = world.shape(node);
    let root = IdentityRoot {
        model: ModelHash(shape.model_hash.as_slice().try_into().unwrap()),
        adapter: b"",
        dtype: KvDType::F32,
        rope: b"",
        block_tokens: BLOCK,
    };
    BlockHash::chain(&root, &prompt(1, DOCUMENT, 128))
}

#[test]
fn a_creditor_that_dies_costs_its_share() {
    for dead in 1..5 {
        let mut world = World::pool(pool(), None, &vec![spec(); 5]);
        ask(&mut world, 0, 0);
        let lost = share(&world, dead);
        world.kill(dead);
        world.run_for(2_500);
        let asking = if dead == 4 { 3 } else { 4 };
        let computed: Vec<u32> =
            [0, asking, 0].into_iter().zip(1..).map(|(node, n)| ask(&mut world, node, n)).collect();
        println!("{dead}: {lost} tokens lost, {computed:?}");
        assert!(computed[0] <= OWN + lost, "node {dead} had {lost} tokens: {computed:?}");
        assert!(computed[1..].iter().all(|tokens| *tokens <= OWN), "{computed:?}");
        assert_equals_single("a dead creditor", &world, &pool());
        world.check_empty();
    }
}

/// The debtor's own part is lost with it; what its creditors had is found by others.
#[test]
fn a_debtor_that_dies_costs_its_share_whether_its_request_has_ended_or_not() {
    for ends in [true, false] {
        let mut world = World::pool(pool(), None, &vec![spec(); 5]);
        let id = world.submit(0, greedy(question(0), 20));
        world.run_until(|w| w.requests[id].tokens.len() >= 8);
        if ends {
            world.run();
        }
        world.run_for(1_500);
        let lost = share(&world, 0);
        assert!(lost > 0 && lost < DOCUMENT as u32);
        world.kill(0);
        // Until its leases have expired.
        world.run_for(20_000);
        let computed: Vec<u32> = [3, 1, 2].into_iter().zip(1..).map(|(node, n)| ask(&mut world, node, n)).collect();
        println!("{ends}: {lost} tokens lost, {computed:?}");
        assert!(computed[0] <= OWN + lost, "{lost}: {computed:?}");
        assert!(computed[1..].iter().all(|tokens| *tokens <= OWN), "{computed:?}");
        world.check_empty();
    }
}

#[test]
fn a_gmanager_that_dies_costs_nothing_once_another_one_knows_the_caches() {
    let mut world = World::pool(pool(), None, &vec![spec(); 5]);
    ask(&mut world, 0, 0);
    world.kill_gmanager();
    world.run_for(500);
    world.start_gmanager();
    world.run_for(3_000);
    assert!(ask(&mut world, 2, 1) <= OWN);
    assert_equals_single("another gManager", &world, &pool());
    world.check_empty();
}

#[test]
fn another_tenants_salt_finds_nothing() {
    let mut world = World::pool(pool(), None, &vec![spec(); 5]);
    let salted = |n: u64, salt: &str| {
        let request = greedy(question(n), 4);
        let options = RequestOptions { cache_salt: salt.into(), ..RequestOptions::default() };
        GenerateRequest { options, ..request }
    };
    for (n, salt, is_hit) in [(0, "a", false), (1, "b", false), (2, "", false), (3, "", true)] {
        let id = world.submit(n as usize, salted(n, salt));
        world.run();
        world.run_for(2_500);
        assert_eq!(world.requests[id].prompt.0 > 0, is_hit, "{n} {salt}");
    }
    assert_equals_single("tenants", &world, &pool());
    world.check_empty();
}

/// A summary that is older than an eviction costs a computation.
#[test]
fn what_was_evicted_since_the_summary_is_computed() {
    let mut world = World::pool(pool(), None, &vec![spec(); 5]);
    ask(&mut world, 0, 0);
    // Nodes evict all that they cache, and are asked before they have reported it.
    for node in 1..5 {
        let other = greedy(prompt(50 + node as u64, 38, 128), 2);
        world.submit(node, other);
    }
    world.run();
    let id = world.submit(2, greedy(question(1), 4));
    world.run();
    assert!(matches!(world.requests[id].end, Some(Ok(_))));
    assert_equals_single("a stale summary", &world, &pool());
    world.check_empty();
}
