//! Which parts of a grammar become lexemes of Lark.
//!
//! llguidance's lexer takes the longest match and looks back one byte only, while GBNF has no lexer. A part that refers to no recursive
//! rule becomes a lexeme, unless the longest match could take a text of it, or of another lexeme, too far: such a part is split into
//! its own parts, at last into single characters. So the sentences of the grammar stay what they are.

use super::chars::Chars;
use super::parse::{Expr, Rules};
use super::positions::Positions;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Sets of characters in all lexemes of a grammar with recursive rules, and in the expression that another one is.
const LEXED_MAX: usize = 8_000;
const REGULAR_MAX: usize = 64_000;
/// Pairs of positions in all lexemes.
const EDGES_MAX: usize = 1_000_000;
/// Pairs of positions, and rules, that the search for lexemes which are too long looks at.
const STEPS_MAX: usize = 20_000_000;
const TOO_LARGE: &str = "where its parts end is not found in time";

/// A part of a rule, in lexemes.
#[derive(Debug)]
pub(super) enum Node {
    Lexeme(usize),
    Seq(Vec<Node>),
    Any(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
    Rule(usize),
}

/// A grammar in lexemes.
#[derive(Debug)]
pub(super) struct Lexed {
    pub(super) start: Node,
    /// The rules that are left, by number.
    pub(super) rules: BTreeMap<usize, Node>,
    /// Expressions without rules; the empty text is none of theirs, even if one describes it.
    pub(super) lexemes: Vec<Expr>,
}

/// Divides a grammar into lexemes.
pub(super) fn lexed(rules: &Rules) -> Result<Lexed, String> {
    let shape = Shape::of(&rules.bodies);
    let start = Expr::Rule(rules.root);
    let mut split = BTreeSet::new();
    let mut steps = STEPS_MAX;
    loop {
        let mut builder = Builder {
            bodies: &rules.bodies,
            shape: &shape,
            split: &split,
            lexemes: Vec::new(),
            known: BTreeMap::new(),
            size: 0,
        };
        let start = builder.node(&start)?;
        let mut built = BTreeMap::new();
        let mut open: Vec<usize> = Vec::new();
        rules_of(&start, &mut open);
        while let Some(rule) = open.pop() {
            if let Entry::Vacant(place) = built.entry(rule) {
                rules_of(place.insert(builder.node(&rules.bodies[rule])?), &mut open);
            }
        }
        let lexed = Lexed { start, rules: built, lexemes: builder.lexemes };
        if lexed.rules.is_empty() {
            return Ok(lexed);
        }
        let greedy = too_greedy(&lexed, &mut steps)?;
        if greedy.is_empty() {
            return Ok(lexed);
        }
        split.extend(greedy);
    }
}

fn rules_of(node: &Node, out: &mut Vec<usize>) {
    match node {
        Node::Lexeme(_) => {}
        Node::Rule(rule) => out.push(*rule),
        Node::Seq(items) | Node::Any(items) => items.iter().for_each(|item| rules_of(item, out)),
        Node::Repeat(item, ..) => rules_of(item, out),
    }
}

/// What is known of each rule.
struct Shape {
    /// Whether it reaches no recursive rule.
    is_regular: Vec<bool>,
    /// Sets of characters of a regular rule, with those of the rules that it refers to.
    size: Vec<usize>,
}

impl Shape {
    fn of(bodies: &[Expr]) -> Self {
        let mut shape = Self { is_regular: vec![false; bodies.len()], size: vec![0; bodies.len()] };
        // A rule is regular once all that it refers to are; what never becomes so is recursive, or refers to what is.
        loop {
            let mut changed = false;
            for (rule, body) in bodies.iter().enumerate() {
                if !shape.is_regular[rule] && shape.regular(body) {
                    shape.is_regular[rule] = true;
                    shape.size[rule] = shape.size(body);
                    changed = true;
                }
            }
            if !changed {
                return shape;
            }
        }
    }

    fn regular(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Chars(_) => true,
            Expr::Seq(items) | Expr::Any(items) => items.iter().all(|item| self.regular(item)),
            Expr::Repeat(item, ..) => self.regular(item),
            Expr::Rule(rule) => self.is_regular[*rule],
        }
    }

    fn size(&self, expr: &Expr) -> usize {
        match expr {
            Expr::Chars(_) => 1,
            Expr::Seq(items) | Expr::Any(items) => {
                items.iter().fold(0_usize, |sum, item| sum.saturating_add(self.size(item)))
            }
            Expr::Repeat(item, ..) => self.size(item),
            Expr::Rule(rule) => self.size[*rule].max(1),
        }
    }
}

struct Builder<'a> {
    bodies: &'a [Expr],
    shape: &'a Shape,
    /// Parts that are no lexemes.
    split: &'a BTreeSet<Expr>,
    lexemes: Vec<Expr>,
    known: BTreeMap<Expr, usize>,
    /// Sets of characters so far.
    size: usize,
}

impl Builder<'_> {
    fn node(&mut self, expr: &Expr) -> Result<Node, String> {
        if self.shape.regular(expr) {
            return self.regular(expr);
        }
        Ok(match expr {
            Expr::Seq(items) => {
                let mut nodes = Vec::new();
                let mut together: Vec<&Expr> = Vec::new();
                for item in items {
                    if self.shape.regular(item) {
                        together.push(item);
                        continue;
                    }
                    nodes.extend(self.together(&mut together, Expr::Seq)?);
                    nodes.push(self.node(item)?);
                }
                nodes.extend(self.together(&mut together, Expr::Seq)?);
                Node::Seq(nodes)
            }
            Expr::Any(items) => {
                let mut together: Vec<&Expr> = items.iter().filter(|item| self.shape.regular(item)).collect();
                let mut nodes: Vec<Node> = self.together(&mut together, Expr::Any)?.into_iter().collect();
                for item in items.iter().filter(|item| !self.shape.regular(item)) {
                    nodes.push(self.node(item)?);
                }
                Node::Any(nodes)
            }
            Expr::Repeat(item, min, max) => Node::Repeat(Box::new(self.node(item)?), *min, *max),
            Expr::Rule(rule) => Node::Rule(*rule),
            Expr::Chars(_) => self.regular(expr)?,
        })
    }

    /// The node of regular parts that stand together.
    fn together(&mut self, items: &mut Vec<&Expr>, of: fn(Vec<Expr>) -> Expr) -> Result<Option<Node>, String> {
        match items.len() {
            0 => Ok(None),
            1 => self.regular(items.remove(0)).map(Some),
            _ => self.regular(&of(items.drain(..).cloned().collect())).map(Some),
        }
    }

    fn regular(&mut self, expr: &Expr) -> Result<Node, String> {
        self.size = self.size.saturating_add(self.shape.size(expr));
        let recursive = self.shape.is_regular.iter().any(|regular| !regular);
        let most = if recursive { LEXED_MAX } else { REGULAR_MAX };
        if self.size > most {
            return Err(format!("with its rules put into each other it has more than {most} sets of characters"));
        }
        let expr = self.inlined(expr);
        Ok(self.lexeme(expr))
    }

    fn inlined(&self, expr: &Expr) -> Expr {
        match expr {
            Expr::Chars(_) => expr.clone(),
            Expr::Seq(items) => Expr::Seq(items.iter().map(|item| self.inlined(item)).collect()),
            Expr::Any(items) => Expr::Any(items.iter().map(|item| self.inlined(item)).collect()),
            Expr::Repeat(item, min, max) => Expr::Repeat(Box::new(self.inlined(item)), *min, *max),
            Expr::Rule(rule) => self.inlined(&self.bodies[*rule]),
        }
    }

    fn lexeme(&mut self, expr: Expr) -> Node {
        if is_empty(&expr) {
            return Node::Seq(Vec::new());
        }
        if self.split.contains(&expr) {
            let parts =
                |builder: &mut Self, items: Vec<Expr>| items.into_iter().map(|item| builder.lexeme(item)).collect();
            return match expr {
                Expr::Seq(items) => Node::Seq(parts(self, items)),
                Expr::Any(items) => Node::Any(parts(self, items)),
                Expr::Repeat(item, min, max) => Node::Repeat(Box::new(self.lexeme(*item)), min, max),
                Expr::Chars(_) | Expr::Rule(_) => unreachable!("one character is never too long"),
            };
        }
        let nullable = is_nullable(&expr);
        let next = self.lexemes.len();
        let number = *self.known.entry(expr).or_insert_with_key(|expr| {
            self.lexemes.push(expr.clone());
            next
        });
        let lexeme = Node::Lexeme(number);
        if nullable { Node::Repeat(Box::new(lexeme), 0, Some(1)) } else { lexeme }
    }
}

/// Whether an expression without rules describes the empty text only.
fn is_empty(expr: &Expr) -> bool {
    match expr {
        Expr::Seq(items) | Expr::Any(items) => items.iter().all(is_empty),
        Expr::Repeat(item, ..) => is_empty(item),
        Expr::Chars(_) | Expr::Rule(_) => false,
    }
}

/// Whether an expression without rules describes the empty text, too.
pub(super) fn is_nullable(expr: &Expr) -> bool {
    match expr {
        Expr::Seq(items) => items.iter().all(is_nullable),
        Expr::Any(items) => items.iter().any(is_nullable),
        Expr::Repeat(item, min, _) => *min == 0 || is_nullable(item),
        Expr::Chars(_) | Expr::Rule(_) => false,
    }
}

/// What a part may begin with, and whether it may be empty.
type First = (Chars, bool);

/// The lexemes that the longest match would take too far.
fn too_greedy(lexed: &Lexed, steps: &mut usize) -> Result<Vec<Expr>, String> {
    let positions: Vec<Positions> = lexed.lexemes.iter().map(Positions::of).collect();
    if positions.iter().map(|of| of.edges).sum::<usize>() > EDGES_MAX {
        return Err("its repetitions of many alternatives are too large".to_owned());
    }
    let firsts: Vec<Chars> = positions.iter().map(Positions::first_chars).collect();
    let after = following(lexed, &firsts, steps)?;
    let mut found = Vec::new();
    for (number, long) in positions.iter().enumerate() {
        let overtakes = positions.iter().zip(&after).zip(&firsts).any(|((short, after), first)| {
            *steps > 0 && first.meets(&firsts[number]) && short.search_overtaking(long, after, steps)
        });
        if *steps == 0 {
            return Err(TOO_LARGE.to_owned());
        }
        if overtakes {
            found.push(lexed.lexemes[number].clone());
        }
    }
    Ok(found)
}

/// What may stand behind each lexeme.
fn following(lexed: &Lexed, firsts: &[Chars], steps: &mut usize) -> Result<Vec<Chars>, String> {
    let mut count = || {
        *steps = steps.saturating_sub(lexed.rules.len());
        if *steps > 0 { Ok(()) } else { Err(TOO_LARGE.to_owned()) }
    };
    let mut of_rules: BTreeMap<usize, First> = lexed.rules.keys().map(|rule| (*rule, First::default())).collect();
    loop {
        count()?;
        let new: BTreeMap<usize, First> =
            lexed.rules.iter().map(|(rule, node)| (*rule, first(node, firsts, &of_rules))).collect();
        if new == of_rules {
            break;
        }
        of_rules = new;
    }
    let mut walk =
        Walk { firsts, of_rules: &of_rules, lexemes: vec![Chars::default(); firsts.len()], rules: BTreeMap::new() };
    walk.node(&lexed.start, &Chars::default());
    loop {
        count()?;
        let before = walk.rules.clone();
        for (rule, node) in &lexed.rules {
            if let Some(after) = before.get(rule) {
                walk.node(node, after);
            }
        }
        if walk.rules == before {
            return Ok(walk.lexemes);
        }
    }
}

fn first(node: &Node, firsts: &[Chars], of_rules: &BTreeMap<usize, First>) -> First {
    match node {
        Node::Lexeme(number) => (firsts[*number].clone(), false),
        Node::Rule(rule) => of_rules[rule].clone(),
        Node::Seq(items) => first_of_all(items, firsts, of_rules),
        Node::Any(items) => items.iter().fold(First::default(), |(mut chars, nullable), item| {
            let (more, empty) = first(item, firsts, of_rules);
            chars.add(&more);
            (chars, nullable || empty)
        }),
        Node::Repeat(item, min, _) => {
            let (chars, nullable) = first(item, firsts, of_rules);
            (chars, nullable || *min == 0)
        }
    }
}

fn first_of_all(items: &[Node], firsts: &[Chars], of_rules: &BTreeMap<usize, First>) -> First {
    let mut chars = Chars::default();
    for item in items {
        let (more, nullable) = first(item, firsts, of_rules);
        chars.add(&more);
        if !nullable {
            return (chars, false);
        }
    }
    (chars, true)
}

/// Collects what may stand behind lexemes and rules.
struct Walk<'a> {
    firsts: &'a [Chars],
    of_rules: &'a BTreeMap<usize, First>,
    lexemes: Vec<Chars>,
    rules: BTreeMap<usize, Chars>,
}

impl Walk<'_> {
    fn node(&mut self, node: &Node, after: &Chars) {
        match node {
            Node::Lexeme(number) => self.lexemes[*number].add(after),
            Node::Rule(rule) => self.rules.entry(*rule).or_default().add(after),
            Node::Any(items) => items.iter().for_each(|item| self.node(item, after)),
            Node::Seq(items) => {
                let mut after = after.clone();
                for item in items.iter().rev() {
                    self.node(item, &after);
                    let (mut chars, nullable) = first(item, self.firsts, self.of_rules);
                    if nullable {
                        chars.add(&after);
                    }
                    after = chars;
                }
            }
            Node::Repeat(item, _, max) => {
                let mut after = after.clone();
                if *max != Some(1) {
                    after.add(&first(item, self.firsts, self.of_rules).0);
                }
                self.node(item, &after);
            }
        }
    }
}
