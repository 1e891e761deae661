//! GBNF: the sentences of a grammar are those that its matcher takes.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "each test uses a part")]
mod common;

use common::{Model, constraint, model};
use lagoon_grammar::Next;
use lagoon_types::Grammar;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;
use std::fmt::Write;

/// A part of a random grammar.
#[derive(Debug)]
enum Part {
    Text(&'static str),
    Class(&'static str),
    Rule(usize),
    Seq(Vec<Part>),
    Any(Vec<Part>),
    Repeat(Box<Part>, usize, Option<usize>),
}

const RULES: usize = 4;
const LETTERS: [char; 3] = ['a', 'b', 'c'];
/// Longest texts that are tried: all of them.
const LENGTH: usize = 5;

fn part(rng: &mut ChaCha8Rng, depth: u32, rule: usize) -> Part {
    let kind = rng.random_range(0..if depth == 0 { 4 } else { 8 });
    match kind {
        0 => Part::Text(["a", "b", "ab", "bca", "c", ""][rng.random_range(0..6)]),
        1 => Part::Class(["ab", "bc", "c", "abc"][rng.random_range(0..4)]),
        2 => Part::Text(["b", "aa", "abc"][rng.random_range(0..3)]),
        // Mostly a later rule: more of the grammar is regular.
        3 if rng.random_bool(0.7) && rule + 1 < RULES => Part::Rule(rng.random_range(rule + 1..RULES)),
        3 => Part::Rule(rng.random_range(0..RULES)),
        4 | 5 => Part::Seq((0..rng.random_range(1..4)).map(|_| part(rng, depth - 1, rule)).collect()),
        6 => Part::Any((0..rng.random_range(2..4)).map(|_| part(rng, depth - 1, rule)).collect()),
        _ => {
            let (min, max) = [(0, None), (1, None), (0, Some(1)), (2, Some(2)), (1, Some(3))][rng.random_range(0..5)];
            Part::Repeat(Box::new(part(rng, depth - 1, rule)), min, max)
        }
    }
}

fn write_part(part: &Part, out: &mut String) {
    match part {
        Part::Text(text) => write!(out, "\"{text}\"").unwrap(),
        Part::Class(chars) => write!(out, "[{chars}]").unwrap(),
        Part::Rule(0) => out.push_str("root"),
        Part::Rule(rule) => write!(out, "r-{rule}").unwrap(),
        Part::Seq(parts) | Part::Any(parts) => {
            out.push('(');
            for (at, inner) in parts.iter().enumerate() {
                out.push_str(if at > 0 && matches!(part, Part::Any(_)) { " | " } else { " " });
                write_part(inner, out);
            }
            out.push(')');
        }
        Part::Repeat(part, min, max) => {
            write_part(part, out);
            match max {
                None if *min == 0 => out.push('*'),
                None => out.push('+'),
                Some(1) => out.push('?'),
                Some(max) => write!(out, "{{{min},{max}}}").unwrap(),
            }
        }
    }
}

/// Where a part that begins at `from` may end, if rules may end as `table` says.
fn ends(part: &Part, text: &[u8], from: usize, table: &[Vec<BTreeSet<usize>>]) -> BTreeSet<usize> {
    match part {
        Part::Text(of) => text[from..].starts_with(of.as_bytes()).then_some(from + of.len()).into_iter().collect(),
        Part::Class(of) => {
            text.get(from).filter(|byte| of.as_bytes().contains(byte)).map(|_| from + 1).into_iter().collect()
        }
        Part::Rule(rule) => table[*rule][from].clone(),
        Part::Any(parts) => parts.iter().flat_map(|part| ends(part, text, from, table)).collect(),
        Part::Seq(parts) => parts.iter().fold(BTreeSet::from([from]), |at, part| {
            at.into_iter().flat_map(|from| ends(part, text, from, table)).collect()
        }),
        Part::Repeat(part, min, max) => {
            let mut out = BTreeSet::new();
            let mut at = BTreeSet::from([from]);
            for times in 0..=max.unwrap_or(min + text.len() + 1) {
                if times >= *min {
                    out.extend(&at);
                }
                at = at.into_iter().flat_map(|from| ends(part, text, from, table)).collect();
            }
            out
        }
    }
}

/// Whether the first of `rules` describes a text.
fn describes(rules: &[Part], text: &str) -> bool {
    let mut table = vec![vec![BTreeSet::new(); text.len() + 1]; rules.len()];
    loop {
        let before = table.clone();
        for (rule, part) in rules.iter().enumerate() {
            for (from, place) in table[rule].iter_mut().enumerate() {
                *place = ends(part, text.as_bytes(), from, &before);
            }
        }
        if table == before {
            return table[0][0].contains(&text.len());
        }
    }
}

/// The beginnings of `text` that are sentences of a grammar.
fn sentences(model: &Model, grammar: &str, text: &str) -> BTreeSet<String> {
    let matcher = model.matcher(&constraint(Grammar::Lark(grammar.to_owned())), &[]);
    let tokens = model.tokenizer.encode(text, false).unwrap();
    assert_eq!(tokens.len(), text.len());
    let mut out = BTreeSet::new();
    for (at, next) in model.next(&matcher, &tokens).iter().enumerate() {
        let (ends, goes_on) = match next {
            Next::Nothing => (true, false),
            Next::Of(_) => {
                let allowed = model.allowed(next);
                (allowed.contains(&model.end), tokens.get(at).is_some_and(|token| allowed.contains(token)))
            }
            other => panic!("{other:?} at {at} of {text:?}\n{grammar}"),
        };
        if ends {
            out.insert(text[..at].to_owned());
        }
        if !goes_on {
            break;
        }
    }
    out
}

fn texts() -> Vec<String> {
    (0..LENGTH).fold(vec![String::new()], |texts, _| {
        texts.iter().flat_map(|text| LETTERS.map(|letter| format!("{text}{letter}"))).collect()
    })
}

/// Sentences are the same as those of a recogniser that knows no lexemes: of recursive and ambiguous grammars, too.
#[test]
fn the_sentences_of_random_grammars_stay() {
    let model = model(&[]);
    let mut rng = ChaCha8Rng::seed_from_u64(18);
    let (mut recursive, mut found) = (0, 0);
    for _ in 0..150 {
        let rules: Vec<Part> = (0..RULES).map(|rule| part(&mut rng, 3, rule)).collect();
        let mut grammar = String::new();
        for (number, body) in rules.iter().enumerate() {
            let name = if number == 0 { "root".to_owned() } else { format!("r-{number}") };
            write!(grammar, "{name} ::= ").unwrap();
            write_part(body, &mut grammar);
            grammar.push('\n');
        }
        let wanted: BTreeSet<String> = texts()
            .iter()
            .flat_map(|text| (0..=text.len()).map(|len| text[..len].to_owned()))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .filter(|text| describes(&rules, text))
            .collect();
        // A grammar whose rules end beyond the texts, or never, says nothing here.
        if wanted.len() < 2 {
            continue;
        }
        let given: BTreeSet<String> = texts().iter().flat_map(|text| sentences(&model, &grammar, text)).collect();
        assert_eq!(given, wanted, "\n{grammar}");
        recursive += u32::from(grammar.lines().any(|line| line[1..].contains("root")));
        found += wanted.len();
    }
    println!("{recursive} grammars call their root again; {found} sentences");
    assert!(recursive > 10 && found > 1000, "{recursive} {found}");
}

/// White space that ends both a rule and the one around it, a text that another one begins, and Unicode.
#[test]
fn grammars_as_people_write_them() {
    let model = model(&[]);
    let sums = "# sums\nroot ::= (sum \"=\" ws term \"\\n\")+\nsum ::= term ([-+*/] ws term)*\n\
        term ::= name | number | \"(\" ws sum \")\" ws\nname ::= [a-z] [a-z0-9_]* ws\nnumber ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n";
    for (text, is_sentence) in
        [("a+1=b\n", true), ("(a_1 + 23) * c= (4)\n\n", true), ("a=1\nb=2\n", true), ("a=1", false), ("(a=1\n", false)]
    {
        assert_eq!(sentences(&model, sums, text).contains(text), is_sentence, "{text:?}");
    }
    let values = "root ::= value\nvalue ::= object | list | string | (\"true\" | \"null\") ws | [0-9]+ ws\n\
        object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n\
        list ::=\n  \"[\" ws (\n    value (\",\" ws value)*\n  )? \"]\" ws\n\
        string ::= \"\\\"\" ([^\"\\\\\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}))* \"\\\"\" ws\nws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";
    for (text, is_sentence) in [
        ("{\"a\": [1, true, null], \"\\u12aF\": {}}", true),
        ("{\n  \"a\": \"b\\n\"\n}\n", true),
        ("{\"a\": 1,}", false),
        ("{\"\\u12\": 1}", false),
        ("truer", false),
    ] {
        assert_eq!(sentences(&model, values, text).contains(text), is_sentence, "{text:?}");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let words =
        constraint(Grammar::Lark("root ::= word | \"(\" root \")\"\nword ::= [ぁ-ん]+ | [ァ-ヺ]+ \"!\"\n".to_owned()));
    for _ in 0..20 {
        let answer = model.tokenizer.decode(&model.draw(&words, &mut rng), true);
        let word = answer.trim_start_matches('(').trim_end_matches(')');
        let of = |from: char, to: char| word.trim_end_matches('!').chars().all(|c| (from..=to).contains(&c));
        assert!(!word.is_empty() && (of('ぁ', 'ん') || (of('ァ', 'ヺ') && word.ends_with('!'))), "{answer}");
    }
}
