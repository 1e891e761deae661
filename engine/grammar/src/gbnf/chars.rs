//! Sets of characters.

use std::fmt::Write;

const LAST: u32 = char::MAX as u32;

/// A set of characters as ranges of code points: ascending, apart from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Chars(Vec<(u32, u32)>);

impl Chars {
    /// All characters.
    pub(super) fn all() -> Self {
        Self(vec![(0, LAST)])
    }

    /// The characters of `ranges`, both ends included, or all others.
    pub(super) fn of(mut ranges: Vec<(u32, u32)>, negated: bool) -> Self {
        ranges.sort_unstable();
        let mut out: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match out.last_mut() {
                Some(last) if from <= last.1.saturating_add(1) => last.1 = last.1.max(to),
                _ => out.push((from, to)),
            }
        }
        if negated {
            let mut from = 0;
            let mut others = Vec::with_capacity(out.len() + 1);
            for (begin, end) in out {
                if from < begin {
                    others.push((from, begin - 1));
                }
                from = end + 1;
            }
            if from <= LAST {
                others.push((from, LAST));
            }
            out = others;
        }
        Self(out)
    }

    pub(super) fn one(c: char) -> Self {
        Self(vec![(c.into(), c.into())])
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the characters of another set.
    pub(super) fn add(&mut self, other: &Self) {
        if !other.0.iter().all(|range| self.0.iter().any(|have| have.0 <= range.0 && range.1 <= have.1)) {
            let mut ranges = std::mem::take(&mut self.0);
            ranges.extend_from_slice(&other.0);
            *self = Self::of(ranges, false);
        }
    }

    /// Whether both have a character.
    pub(super) fn meets(&self, other: &Self) -> bool {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.0.max(y.0) <= x.1.min(y.1) {
                return true;
            }
            if x.1 < y.1 {
                a.next()
            } else {
                b.next()
            };
        }
        false
    }

    /// Whether a character of one may begin with the same byte as one of the other.
    pub(super) fn may_begin_alike(&self, other: &Self) -> bool {
        let is_long = |set: &Self| set.0.last().is_some_and(|range| range.1 >= 0x80);
        self.meets(other) || (is_long(self) && is_long(other))
    }

    /// Writes it as a class of a regular expression.
    pub(super) fn write(&self, out: &mut String) {
        out.push('[');
        for (from, to) in &self.0 {
            // Surrogates are no characters: a class that ends or begins with one is cut.
            let from = if (0xd800..0xe000).contains(from) { 0xe000 } else { *from };
            let to = if (0xd800..0xe000).contains(to) { 0xd7ff } else { *to };
            if from <= to {
                write!(out, "\\x{{{from:X}}}-\\x{{{to:X}}}").expect("a string takes all");
            }
        }
        out.push(']');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_joined_met_and_negated() {
        let digits = Chars::of(vec![(0x35, 0x39), (0x30, 0x34)], false);
        assert_eq!(digits, Chars(vec![(0x30, 0x39)]));
        let others = Chars::of(vec![(0x30, 0x39)], true);
        assert_eq!(others, Chars(vec![(0, 0x2f), (0x3a, LAST)]));
        assert!(!digits.meets(&others) && others.meets(&Chars::one('a')) && digits.meets(&Chars::all()));
        let mut all = others;
        all.add(&digits);
        assert_eq!(all, Chars::all());
        assert!(Chars::of(vec![(0, LAST)], true).is_empty());
        assert!(
            Chars::one('あ').may_begin_alike(&Chars::one('い')) && !Chars::one('a').may_begin_alike(&Chars::one('い'))
        );
    }
}
