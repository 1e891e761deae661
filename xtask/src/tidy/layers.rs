//! Rules on crates' dependencies: the three floors, the tiers within the engine, and the libraries with one owner.

use super::Finding;
use crate::workspace::Member;

/// A crate's floor. A crate depends only on crates of lower floors; on the middle floor, also on its own side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Floor {
    /// engine/, with its tier: a crate depends only on crates of lower tiers.
    Engine(u8),
    /// shaders/, cuda/ or net/: side by side, without dependencies on each other.
    Middle(&'static str),
    Apps,
    /// tests/ and benches/ may depend on all others.
    Outside,
    /// xtask depends on none of the others.
    Tool,
}

/// `{types, view} <- {protocol, kv, text, backend} <- {cluster, transfer, model, pace, grammar} <- runner <- {instance, quantize}`.
const TIERS: [(&str, u8); 14] = [
    ("types", 0),
    ("view", 0),
    ("protocol", 1),
    ("kv", 1),
    ("text", 1),
    ("backend", 1),
    ("cluster", 2),
    ("transfer", 2),
    ("model", 2),
    ("pace", 2),
    ("grammar", 2),
    ("runner", 3),
    ("instance", 4),
    ("quantize", 4),
];

/// Libraries that only the named directories may depend on.
const OWNERS: [(&str, &[&str]); 6] = [
    ("llguidance", &["engine/grammar"]),
    ("cudarc", &["cuda"]),
    ("wgpu", &["shaders"]),
    ("naga", &["shaders"]),
    ("quinn", &["net/transport"]),
    ("tokio", &["net/transport", "apps/*"]),
];

fn floor(dir: &str) -> Option<Floor> {
    let (top, rest) = dir.split_once('/').unwrap_or((dir, ""));
    match top {
        "engine" => TIERS.iter().find(|(name, _)| *name == rest).map(|(_, tier)| Floor::Engine(*tier)),
        "shaders" => Some(Floor::Middle("shaders")),
        "cuda" => Some(Floor::Middle("cuda")),
        "net" => Some(Floor::Middle("net")),
        "apps" => Some(Floor::Apps),
        "tests" | "benches" => Some(Floor::Outside),
        "xtask" => Some(Floor::Tool),
        _ => None,
    }
}

fn may_name(from: Floor, to: Floor) -> bool {
    match (from, to) {
        (Floor::Engine(a), Floor::Engine(b)) => b < a,
        (Floor::Middle(_), Floor::Engine(_)) => true,
        (Floor::Middle(a), Floor::Middle(b)) => a == b,
        (Floor::Apps, Floor::Engine(_) | Floor::Middle(_) | Floor::Apps) => true,
        (Floor::Outside, Floor::Engine(_) | Floor::Middle(_) | Floor::Apps) => true,
        _ => false,
    }
}

fn owns(owners: &[&str], dir: &str) -> bool {
    owners.iter().any(|owner| match owner.strip_suffix("/*") {
        Some(top) => dir.split_once('/').is_some_and(|(first, _)| first == top),
        None => *owner == dir,
    })
}

/// Dependencies between members that go up or sideways, and libraries used by a crate that does not own them.
pub(super) fn check(members: &[Member]) -> Vec<Finding> {
    let mut out = Vec::new();
    for member in members {
        let Some(from) = floor(&member.dir) else {
            let message = "this directory is on no floor of the house; xtask/src/tidy/layers.rs lists them";
            out.push(Finding::new("layer", member.dir.clone(), message));
            continue;
        };
        for name in &member.dependencies {
            let subject = format!("{} -> {name}", member.name);
            if let Some(target) = members.iter().find(|m| m.name == *name) {
                let allowed = target.name == member.name || floor(&target.dir).is_some_and(|to| may_name(from, to));
                if !allowed {
                    let message = format!("{} must not depend on {} (ARCHITECTURE.md)", member.dir, target.dir);
                    out.push(Finding::new("layer", subject, message));
                }
            } else if let Some((_, owners)) = OWNERS.iter().find(|(library, _)| library == name)
                && !owns(owners, &member.dir)
            {
                let message = format!("only {} may depend on {name}", owners.join(", "));
                out.push(Finding::new("owner", subject, message));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All crates, without dependencies.
    fn house() -> Vec<Member> {
        let mut dirs: Vec<String> = TIERS.iter().map(|(name, _)| format!("engine/{name}")).collect();
        let rest =
            ["shaders", "cuda", "net/wire", "net/transport", "apps/http", "apps/lagoon", "tests", "benches", "xtask"];
        dirs.extend(rest.map(str::to_owned));
        dirs.into_iter().map(|dir| Member { name: dir.clone(), dir, dependencies: Default::default() }).collect()
    }

    fn broken(from: &str, to: &str) -> Vec<&'static str> {
        let mut members = house();
        members.iter_mut().find(|m| m.dir == from).unwrap().dependencies.insert(to.to_owned());
        check(&members).into_iter().map(|f| f.rule).collect()
    }

    #[test]
    fn allowed_edges() {
        let edges = "engine/kv>engine/types engine/cluster>engine/protocol engine/model>engine/backend \
             engine/runner>engine/cluster engine/instance>engine/text shaders>engine/backend cuda>engine/instance \
             net/transport>net/wire apps/lagoon>cuda apps/lagoon>apps/http tests>apps/http benches>shaders cuda>cudarc \
             shaders>naga net/transport>quinn apps/http>tokio xtask>serde";
        for edge in edges.split_whitespace() {
            let (from, to) = edge.split_once('>').unwrap();
            assert!(broken(from, to).is_empty(), "{edge}");
        }
    }

    #[test]
    fn forbidden_edges() {
        let edges = "engine/types>engine/kv engine/kv>engine/protocol engine/transfer>engine/cluster engine/model>engine/cluster \
             engine/runner>engine/instance engine/backend>shaders engine/instance>net/wire engine/types>apps/http \
             shaders>cuda cuda>net/wire net/wire>shaders net/transport>apps/http apps/lagoon>tests engine/kv>xtask \
             xtask>engine/types tests>benches";
        for edge in edges.split_whitespace() {
            let (from, to) = edge.split_once('>').unwrap();
            assert_eq!(broken(from, to), ["layer"], "{edge}");
        }
    }

    #[test]
    fn libraries_with_an_owner() {
        for edge in
            ["engine/backend>wgpu", "net/wire>tokio", "benches>quinn", "apps/lagoon>cudarc", "cuda>naga", "tests>tokio"]
        {
            let (from, to) = edge.split_once('>').unwrap();
            assert_eq!(broken(from, to), ["owner"], "{edge}");
        }
    }

    #[test]
    fn a_crate_on_no_floor_is_found() {
        for dir in ["engine/new", "misc"] {
            let mut members = house();
            members.push(Member { name: "x".into(), dir: dir.into(), dependencies: Default::default() });
            assert_eq!(check(&members).len(), 1, "{dir}");
        }
    }
}
