//! Cycles in the debt graph (Infinite-LLM v1 §4.5), in bounded time.
//!
//! The graph is directed: an edge leads from a debtor to its creditor. The paper's listing (depth first, a visited
//! neighbour other than the parent closes a cycle) is for undirected graphs: on a debt graph it reports false cycles (two
//! debtors of one creditor) and misses pairs that owe each other. This search takes strongly connected components, where
//! every node lies on a cycle, and in each the shortest cycle through its first node, which freezes few members.

use lagoon_types::InstanceId;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The debt graph: creditors by debtor, with the rBlocks owed.
pub(super) type Graph = BTreeMap<InstanceId, BTreeMap<InstanceId, u32>>;

/// Bounds of one search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) cycles_max: usize,
    pub(super) members_max: usize,
    /// Visited edges of all passes.
    pub(super) edges_max: usize,
}

/// Disjoint cycles, each a list of debtors: each owes the next, and the last owes the first. Starts at the nodes from
/// `first` on, then those before it.
pub(super) fn find(graph: &Graph, first: InstanceId, bounds: Bounds) -> Vec<Vec<InstanceId>> {
    let mut found = Vec::new();
    let mut spent = 0;
    let mut work: Vec<BTreeSet<InstanceId>> = vec![graph.keys().copied().collect()];
    while let Some(nodes) = work.pop() {
        for component in components(graph, &nodes, &mut spent) {
            if found.len() >= bounds.cycles_max || spent >= bounds.edges_max {
                return found;
            }
            let start = component.range(first..).next().or(component.first()).copied().expect("a component has nodes");
            let cycle = shortest_through(graph, &component, start, &mut spent);
            let mut rest = component;
            if cycle.len() <= bounds.members_max {
                cycle.iter().for_each(|member| _ = rest.remove(member));
                found.push(cycle);
            } else {
                rest.remove(&start);
            }
            work.push(rest);
        }
    }
    found
}

fn creditors<'a>(
    graph: &'a Graph,
    within: &'a BTreeSet<InstanceId>,
    debtor: InstanceId,
) -> impl Iterator<Item = InstanceId> + 'a {
    graph.get(&debtor).into_iter().flat_map(BTreeMap::keys).copied().filter(|c| within.contains(c))
}

/// The strongly connected components of at least two nodes of the graph restricted to `nodes` (Tarjan, without
/// recursion: a chain of ten thousand debts must not overflow the stack).
fn components(graph: &Graph, nodes: &BTreeSet<InstanceId>, spent: &mut usize) -> Vec<BTreeSet<InstanceId>> {
    let mut search = Tarjan::default();
    for root in nodes {
        if !search.index.contains_key(root) {
            search.run(graph, nodes, *root, spent);
        }
    }
    search.found
}

#[derive(Default)]
struct Tarjan {
    /// Order of discovery, and the earliest node that is reachable and still on the stack.
    index: BTreeMap<InstanceId, (usize, usize)>,
    stack: Vec<InstanceId>,
    on_stack: BTreeSet<InstanceId>,
    found: Vec<BTreeSet<InstanceId>>,
}

impl Tarjan {
    fn discover(&mut self, node: InstanceId) {
        let order = self.index.len();
        self.index.insert(node, (order, order));
        self.stack.push(node);
        self.on_stack.insert(node);
    }

    fn lower(&mut self, node: InstanceId, to: usize) {
        let entry = self.index.get_mut(&node).expect("discovered");
        entry.1 = entry.1.min(to);
    }

    fn run(&mut self, graph: &Graph, nodes: &BTreeSet<InstanceId>, root: InstanceId, spent: &mut usize) {
        self.discover(root);
        let mut path = vec![(root, creditors(graph, nodes, root).collect::<VecDeque<_>>())];
        while let Some((node, todo)) = path.last_mut() {
            let node = *node;
            *spent += 1;
            match todo.pop_front() {
                Some(next) => match self.index.get(&next).copied() {
                    None => {
                        self.discover(next);
                        path.push((next, creditors(graph, nodes, next).collect()));
                    }
                    Some((order, _)) if self.on_stack.contains(&next) => self.lower(node, order),
                    Some(_) => {}
                },
                None => {
                    path.pop();
                    let (order, low) = self.index[&node];
                    if let Some((parent, _)) = path.last() {
                        self.lower(*parent, low);
                    }
                    if order == low {
                        self.close(node);
                    }
                }
            }
        }
    }

    /// Closes the component of `root`, its first node: the nodes from `root` up on the stack.
    fn close(&mut self, root: InstanceId) {
        let from = self.stack.iter().rposition(|n| *n == root).expect("a root is on the stack");
        let component: BTreeSet<InstanceId> = self.stack.drain(from..).collect();
        component.iter().for_each(|n| _ = self.on_stack.remove(n));
        if component.len() > 1 {
            self.found.push(component);
        }
    }
}

/// The shortest cycle through `start`, which is in a strongly connected component of at least two nodes.
fn shortest_through(
    graph: &Graph,
    component: &BTreeSet<InstanceId>,
    start: InstanceId,
    spent: &mut usize,
) -> Vec<InstanceId> {
    let mut reached_from: BTreeMap<InstanceId, InstanceId> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for next in creditors(graph, component, node) {
            *spent += 1;
            if next == start {
                let mut cycle = vec![node];
                while let Some(before) = reached_from.get(cycle.last().expect("not empty")) {
                    cycle.push(*before);
                }
                cycle.reverse();
                return cycle;
            }
            if let Entry::Vacant(new) = reached_from.entry(next) {
                new.insert(node);
                queue.push_back(next);
            }
        }
    }
    unreachable!("every node of a strongly connected component lies on a cycle")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NO_BOUNDS: Bounds = Bounds { cycles_max: usize::MAX, members_max: usize::MAX, edges_max: usize::MAX };

    fn graph(edges: &[(u32, u32)]) -> Graph {
        let mut graph = Graph::new();
        for (a, b) in edges.iter().filter(|(a, b)| a != b) {
            graph.entry(InstanceId(*a)).or_default().insert(InstanceId(*b), 1);
        }
        graph
    }

    fn owes(graph: &Graph, a: InstanceId, b: InstanceId) -> bool {
        graph.get(&a).is_some_and(|c| c.contains_key(&b))
    }

    /// Length of the shortest way from `a` to `b` over at least one edge that avoids `without` (Floyd-Warshall).
    fn distances(graph: &Graph, nodes: u32, without: &BTreeSet<InstanceId>) -> Vec<Vec<u32>> {
        let far = u32::MAX / 4;
        let there = |i: u32| !without.contains(&InstanceId(i));
        let edge = |a, b| there(a) && there(b) && owes(graph, InstanceId(a), InstanceId(b));
        let mut d: Vec<Vec<u32>> =
            (0..nodes).map(|a| (0..nodes).map(|b| if edge(a, b) { 1 } else { far }).collect()).collect();
        for k in 0..nodes as usize {
            for a in 0..nodes as usize {
                for b in 0..nodes as usize {
                    d[a][b] = d[a][b].min(d[a][k] + d[k][b]);
                }
            }
        }
        d
    }

    #[test]
    fn directed_graphs_are_searched_as_such() {
        let search = |edges: &[(u32, u32)]| find(&graph(edges), InstanceId(0), NO_BOUNDS);
        // Two debtors of one creditor, and a chain: no cycle, though undirected searches see the first as one.
        assert!(search(&[(1, 2), (3, 2), (1, 3)]).is_empty());
        assert!(search(&[(1, 2), (2, 3), (3, 4)]).is_empty());
        // Two that owe each other: a cycle that the paper's parent check skips.
        assert_eq!(search(&[(1, 2), (2, 1)]), [[InstanceId(1), InstanceId(2)]]);
        // The shortest through the first node, not the long way round.
        assert_eq!(search(&[(1, 2), (2, 3), (3, 1), (2, 1)])[0].len(), 2);
    }

    #[test]
    fn a_long_chain_of_debts_overflows_no_stack_and_stays_within_its_bound() {
        let edges: Vec<(u32, u32)> = (0..20_000).map(|i| (i, (i + 1) % 20_000)).collect();
        let graph = graph(&edges);
        assert_eq!(find(&graph, InstanceId(0), NO_BOUNDS)[0].len(), 20_000);
        let bounds = Bounds { members_max: 8, ..NO_BOUNDS };
        assert!(find(&graph, InstanceId(0), bounds).is_empty());
        assert!(find(&graph, InstanceId(0), Bounds { edges_max: 100, ..NO_BOUNDS }).is_empty());
    }

    proptest! {
        #[test]
        fn what_is_found_agrees_with_brute_force(edges in prop::collection::vec((0u32..7, 0u32..7), 0..24), first in 0u32..7) {
            let graph = graph(&edges);
            let found = find(&graph, InstanceId(first), NO_BOUNDS);
            let mut used = BTreeSet::new();
            for cycle in &found {
                prop_assert!(cycle.len() >= 2);
                for (at, member) in cycle.iter().enumerate() {
                    prop_assert!(owes(&graph, *member, cycle[(at + 1) % cycle.len()]));
                    prop_assert!(used.insert(*member), "a member of two cycles");
                }
            }
            // The first is as short as any through its first node; what is left over has no cycle at all.
            if let Some(cycle) = found.first() {
                let all = distances(&graph, 7, &BTreeSet::new());
                let start = cycle[0].0 as usize;
                prop_assert_eq!(cycle.len(), all[start][start] as usize);
            }
            let rest = distances(&graph, 7, &used);
            prop_assert!((0..7).all(|i| rest[i][i] > 7), "a cycle was missed");
        }
    }
}
