//! GBNF's text as rules.

use super::chars::Chars;
use std::collections::BTreeMap;

/// Largest number of a repetition.
const REPEAT_MAX: u32 = 10_000;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Expr {
    Chars(Chars),
    Seq(Vec<Expr>),
    Any(Vec<Expr>),
    /// So many times, without an end if the larger number is `None`.
    Repeat(Box<Expr>, u32, Option<u32>),
    Rule(usize),
}

/// The rules of a grammar. Each name that is referred to has one.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) bodies: Vec<Expr>,
    pub(super) root: usize,
}

/// What is wrong, and on which line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) line: usize,
    pub(super) what: String,
}

impl Rules {
    /// The grammar without parts that never end, such as a rule that always calls itself; `None` if nothing is left.
    pub(super) fn finite(self) -> Option<Self> {
        let mut ends = vec![false; self.bodies.len()];
        loop {
            let new: Vec<bool> = self.bodies.iter().map(|body| may_end(body, &ends)).collect();
            if new == ends {
                break;
            }
            ends = new;
        }
        // Nothing refers to the others any more.
        let bodies = self.bodies.iter().map(|body| finite(body, &ends).unwrap_or(Expr::Seq(Vec::new()))).collect();
        ends[self.root].then_some(Self { bodies, root: self.root })
    }
}

/// Whether an expression has a text, if rules have one where `ends` says so.
fn may_end(expr: &Expr, ends: &[bool]) -> bool {
    match expr {
        Expr::Chars(_) => true,
        Expr::Rule(rule) => ends[*rule],
        Expr::Seq(items) => items.iter().all(|item| may_end(item, ends)),
        Expr::Any(items) => items.iter().any(|item| may_end(item, ends)),
        Expr::Repeat(item, min, _) => *min == 0 || may_end(item, ends),
    }
}

/// An expression without the parts that never end, if rules end where `ends` says so.
fn finite(expr: &Expr, ends: &[bool]) -> Option<Expr> {
    match expr {
        Expr::Chars(_) => Some(expr.clone()),
        Expr::Rule(rule) => ends[*rule].then(|| expr.clone()),
        Expr::Seq(items) => items.iter().map(|item| finite(item, ends)).collect::<Option<_>>().map(Expr::Seq),
        Expr::Any(items) => {
            let items: Vec<Expr> = items.iter().filter_map(|item| finite(item, ends)).collect();
            (!items.is_empty()).then(|| any(items))
        }
        Expr::Repeat(item, min, max) => match finite(item, ends) {
            Some(item) => Some(repeat(item, *min, *max)),
            None => (*min == 0).then(|| Expr::Seq(Vec::new())),
        },
    }
}

/// Whether the first statement of a text is one of GBNF.
pub(crate) fn begins_as_gbnf(text: &str) -> bool {
    let lines = text.lines().map(str::trim_start);
    let statement = lines.into_iter().find(|line| !line.is_empty() && !line.starts_with('#'));
    statement.is_some_and(|line| {
        let name = line.chars().take_while(|c| is_name(*c)).count();
        name > 0 && line[name..].trim_start().starts_with("::=")
    })
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Reads a grammar.
pub(super) fn parse(text: &str) -> Result<Rules, Wrong> {
    let mut reader = Reader { text, at: 0, names: BTreeMap::new(), bodies: Vec::new(), uses: Vec::new() };
    reader.space(true);
    while reader.peek().is_some() {
        reader.rule()?;
    }
    let Reader { names, bodies, uses, .. } = reader;
    let end = text.lines().count().max(1);
    let root = names.get("root").filter(|rule| bodies[**rule].is_some()).copied();
    let root = root.ok_or_else(|| Wrong { line: end, what: "there is no rule `root`".to_owned() })?;
    let missing = uses.iter().zip(&bodies).find(|(_, body)| body.is_none());
    if let Some(((name, line), _)) = missing {
        return Err(Wrong { line: *line, what: format!("there is no rule `{name}`") });
    }
    Ok(Rules { bodies: bodies.into_iter().flatten().collect(), root })
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    names: BTreeMap<&'a str, usize>,
    /// By rule; `None` until it is defined.
    bodies: Vec<Option<Expr>>,
    /// Where each rule stands first.
    uses: Vec<(&'a str, usize)>,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn line(&self) -> usize {
        self.text[..self.at].bytes().filter(|byte| *byte == b'\n').count() + 1
    }

    fn wrong<T>(&self, what: impl Into<String>) -> Result<T, Wrong> {
        Err(Wrong { line: self.line(), what: what.into() })
    }

    fn eat(&mut self, mark: &str) -> bool {
        let there = self.rest().starts_with(mark);
        self.at += if there { mark.len() } else { 0 };
        there
    }

    /// Skips blanks and comments; line breaks, too, if they are `allowed`.
    fn space(&mut self, allowed: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\r' => self.at += 1,
                '\n' if allowed => self.at += 1,
                '#' => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let end = self.rest().find(|c| !is_name(c)).unwrap_or(self.rest().len());
        let name = &self.rest()[..end];
        self.at += end;
        (!name.is_empty()).then_some(name)
    }

    /// The number of the rule `name`.
    fn number(&mut self, name: &'a str) -> usize {
        let line = self.line();
        *self.names.entry(name).or_insert_with(|| {
            self.bodies.push(None);
            self.uses.push((name, line));
            self.bodies.len() - 1
        })
    }

    fn rule(&mut self) -> Result<(), Wrong> {
        let Some(name) = self.name() else { return self.wrong("a rule must begin here, as `name ::= …`") };
        let number = self.number(name);
        if self.bodies[number].is_some() {
            return self.wrong(format!("there are two rules `{name}`"));
        }
        self.space(false);
        if !self.eat("::=") {
            return self.wrong(format!("`::=` must follow `{name}`"));
        }
        self.space(true);
        let body = self.alternatives(false)?;
        self.bodies[number] = Some(body);
        self.space(true);
        Ok(())
    }

    fn alternatives(&mut self, nested: bool) -> Result<Expr, Wrong> {
        let mut all = vec![self.sequence(nested)?];
        loop {
            // An alternative may stand on the next line, where no rule begins with `|`.
            let before = self.at;
            self.space(true);
            if !self.eat("|") {
                self.at = before;
                break;
            }
            self.space(true);
            all.push(self.sequence(nested)?);
        }
        self.space(nested);
        match self.peek() {
            None | Some('\n') if !nested => {}
            Some(')') if nested => {}
            None => return self.wrong("a `)` is missing"),
            Some(c) => return self.wrong(format!("`{c}` was not expected")),
        }
        Ok(any(all))
    }

    fn sequence(&mut self, nested: bool) -> Result<Expr, Wrong> {
        let mut all = Vec::new();
        loop {
            self.space(nested);
            let Some(item) = self.item()? else { break };
            all.push(self.repeated(item)?);
        }
        Ok(sequence(all))
    }

    /// One element, if one stands here.
    fn item(&mut self) -> Result<Option<Expr>, Wrong> {
        let Some(c) = self.peek() else { return Ok(None) };
        Ok(Some(match c {
            '"' => self.literal()?,
            '[' => self.class()?,
            '.' => {
                self.at += 1;
                Expr::Chars(Chars::all())
            }
            '(' => {
                self.at += 1;
                let group = self.alternatives(true)?;
                self.at += 1;
                group
            }
            '<' | '!' => {
                return self.wrong(
                    "tokens (`<…>`) are not supported\nhint: special tokens are never part of an answer's text",
                );
            }
            c if is_name(c) => {
                let name = self.name().unwrap_or_default();
                Expr::Rule(self.number(name))
            }
            _ => return Ok(None),
        }))
    }

    fn repeated(&mut self, mut item: Expr) -> Result<Expr, Wrong> {
        loop {
            let before = self.at;
            self.space(false);
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    item = self.counted(item)?;
                    continue;
                }
                _ => {
                    self.at = before;
                    return Ok(item);
                }
            };
            self.at += 1;
            item = repeat(item, min, max);
        }
    }

    /// `{n}`, `{n,}` or `{n,m}` behind an element.
    fn counted(&mut self, item: Expr) -> Result<Expr, Wrong> {
        self.at += 1;
        let Some(min) = self.count()? else { return self.wrong("a number must follow `{`") };
        let max = if self.eat(",") { self.count()? } else { Some(min) };
        if !self.eat("}") {
            return self.wrong("a `}` is missing");
        }
        if max.is_some_and(|max| max < min) {
            return self.wrong(format!("`{{{min},{}}}` has no number of times", max.unwrap_or(0)));
        }
        Ok(repeat(item, min, max))
    }

    fn count(&mut self) -> Result<Option<u32>, Wrong> {
        self.space(false);
        let end = self.rest().find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest().len());
        let digits = &self.rest()[..end];
        self.at += end;
        self.space(false);
        if digits.is_empty() {
            return Ok(None);
        }
        match digits.parse().ok().filter(|count| *count <= REPEAT_MAX) {
            Some(count) => Ok(Some(count)),
            None => self.wrong(format!("{digits} repetitions are more than {REPEAT_MAX}")),
        }
    }

    fn literal(&mut self) -> Result<Expr, Wrong> {
        self.at += 1;
        let mut all = Vec::new();
        while !self.eat("\"") {
            match self.char()? {
                Some(c) => all.push(Expr::Chars(Chars::one(c))),
                None => return self.wrong("a `\"` is missing"),
            }
        }
        Ok(sequence(all))
    }

    fn class(&mut self) -> Result<Expr, Wrong> {
        self.at += 1;
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        while !self.eat("]") {
            let Some(from) = self.char()? else { return self.wrong("a `]` is missing") };
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let to = if is_range {
                self.at += 1;
                self.char()?
            } else {
                Some(from)
            };
            let Some(to) = to else { return self.wrong("a `]` is missing") };
            if to < from {
                return self.wrong(format!("the range {from:?} to {to:?} has no character"));
            }
            ranges.push((from.into(), to.into()));
        }
        let chars = Chars::of(ranges, negated);
        if chars.is_empty() {
            return self.wrong("the class has no character");
        }
        Ok(Expr::Chars(chars))
    }

    /// A character of a literal or a class; `None` where the line ends.
    fn char(&mut self) -> Result<Option<char>, Wrong> {
        let Some(c) = self.peek().filter(|c| *c != '\n') else { return Ok(None) };
        self.at += c.len_utf8();
        if c != '\\' {
            return Ok(Some(c));
        }
        let Some(escaped) = self.peek() else { return Ok(None) };
        self.at += escaped.len_utf8();
        let digits = match escaped {
            'n' => return Ok(Some('\n')),
            'r' => return Ok(Some('\r')),
            't' => return Ok(Some('\t')),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_punctuation() => return Ok(Some(c)),
            c => return self.wrong(format!("`\\{c}` is no escape")),
        };
        let hex = self.rest().get(..digits).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let found = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        self.at += hex.map_or(0, str::len);
        match found {
            Some(c) => Ok(Some(c)),
            None => self.wrong(format!("{digits} hexadecimal digits of a character must follow `\\{escaped}`")),
        }
    }
}

fn sequence(mut all: Vec<Expr>) -> Expr {
    if all.len() == 1 { all.remove(0) } else { Expr::Seq(all) }
}

fn any(mut all: Vec<Expr>) -> Expr {
    if all.len() == 1 { all.remove(0) } else { Expr::Any(all) }
}

fn repeat(item: Expr, min: u32, max: Option<u32>) -> Expr {
    match max {
        Some(0) => Expr::Seq(Vec::new()),
        max => Expr::Repeat(Box::new(item), min, max),
    }
}
