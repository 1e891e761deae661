//! A lexeme as an automaton over its characters (Glushkov's): what may stand first, last, and behind what.
//!
//! Repetitions count as endless ones, so that the automaton accepts what the lexeme accepts, and maybe more.

use super::chars::Chars;
use super::parse::Expr;
use std::collections::BTreeSet;

/// The automaton's positions, one a set of characters of the lexeme.
#[derive(Debug, Default)]
pub(super) struct Positions {
    chars: Vec<Chars>,
    first: Vec<usize>,
    is_last: Vec<bool>,
    follow: Vec<BTreeSet<usize>>,
    /// Pairs in `follow`.
    pub(super) edges: usize,
}

/// Where a part may begin and end, and whether it may be empty.
struct Part {
    first: Vec<usize>,
    last: Vec<usize>,
    nullable: bool,
}

impl Positions {
    /// The positions of `expr`, which refers to no rule.
    pub(super) fn of(expr: &Expr) -> Self {
        let mut all = Self::default();
        let Part { first, last, .. } = all.part(expr);
        all.first = first;
        all.is_last = vec![false; all.chars.len()];
        last.iter().for_each(|at| all.is_last[*at] = true);
        all
    }

    fn part(&mut self, expr: &Expr) -> Part {
        match expr {
            Expr::Chars(chars) => {
                let at = self.chars.len();
                self.chars.push(chars.clone());
                self.follow.push(BTreeSet::new());
                Part { first: vec![at], last: vec![at], nullable: false }
            }
            Expr::Seq(items) => {
                let mut whole = Part { first: Vec::new(), last: Vec::new(), nullable: true };
                for item in items {
                    let part = self.part(item);
                    self.join(&whole.last, &part.first);
                    if whole.nullable {
                        whole.first.extend_from_slice(&part.first);
                    }
                    if !part.nullable {
                        whole.last.clear();
                    }
                    whole.last.extend_from_slice(&part.last);
                    whole.nullable &= part.nullable;
                }
                whole
            }
            Expr::Any(items) => {
                let mut whole = Part { first: Vec::new(), last: Vec::new(), nullable: false };
                for item in items {
                    let part = self.part(item);
                    whole.first.extend_from_slice(&part.first);
                    whole.last.extend_from_slice(&part.last);
                    whole.nullable |= part.nullable;
                }
                whole
            }
            Expr::Repeat(item, min, max) => {
                let part = self.part(item);
                if *max != Some(1) {
                    self.join(&part.last, &part.first);
                }
                Part { nullable: part.nullable || *min == 0, ..part }
            }
            Expr::Rule(_) => Part { first: Vec::new(), last: Vec::new(), nullable: true },
        }
    }

    fn join(&mut self, from: &[usize], to: &[usize]) {
        for at in from {
            let before = self.follow[*at].len();
            self.follow[*at].extend(to);
            self.edges += self.follow[*at].len() - before;
        }
    }

    /// Characters that the lexeme may begin with.
    pub(super) fn first_chars(&self) -> Chars {
        let mut all = Chars::default();
        self.first.iter().for_each(|at| all.add(&self.chars[*at]));
        all
    }

    /// Whether a text of this lexeme, with one of the characters `after` behind it, may begin a longer text of `other`: the longest
    /// match would take it for that. `steps` is what is left of the search's bound.
    pub(super) fn search_overtaking(&self, other: &Self, after: &Chars, steps: &mut usize) -> bool {
        let mut seen = BTreeSet::new();
        let mut open = Vec::new();
        let mut meet = |from: &mut dyn Iterator<Item = (usize, usize)>, open: &mut Vec<(usize, usize)>| {
            for (a, b) in from {
                *steps = steps.saturating_sub(1);
                if self.chars[a].meets(&other.chars[b]) && seen.insert((a, b)) {
                    open.push((a, b));
                }
            }
        };
        let pairs = |left: Vec<usize>, right: Vec<usize>| {
            left.into_iter().flat_map(move |a| right.clone().into_iter().map(move |b| (a, b)))
        };
        meet(&mut pairs(self.first.clone(), other.first.clone()), &mut open);
        while let Some((a, b)) = open.pop() {
            if self.is_last[a] && other.follow[b].iter().any(|next| other.chars[*next].may_begin_alike(after)) {
                return true;
            }
            let (left, right) = (self.follow[a].iter().copied().collect(), other.follow[b].iter().copied().collect());
            meet(&mut pairs(left, right), &mut open);
        }
        false
    }
}
