//! Matchers: grammars of every kind, where answers may end, drafts, aborted steps, reasoning, bounds.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "each test uses a part")]
mod common;

use common::{Model, constraint, model, models};
use lagoon_grammar::{AnswerMatcher, Next};
use lagoon_types::{Constraint, Grammar, Reasoning};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use std::sync::Arc;

fn text(model: &Model, tokens: &[u32]) -> String {
    model.tokenizer.decode(tokens, false)
}

fn choice(texts: &[&str]) -> Arc<Constraint> {
    constraint(Grammar::Choice(texts.iter().map(|text| (*text).to_owned()).collect()))
}

#[test]
fn answers_are_sentences_of_their_grammar() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let lark = "start: greeting (\", \" NAME)* \"!\"\ngreeting: \"hello\" | \"good day\"\nNAME: /[A-Z][a-z]{1,6}/\n";
    for model in models() {
        for _ in 0..20 {
            let answer = |grammar: Grammar, rng: &mut ChaCha8Rng| text(&model, &model.draw(&constraint(grammar), rng));
            let number = answer(Grammar::Regex("^-?[0-9]{1,3}(\\.5)?$".to_owned()), &mut rng);
            assert!(number.parse::<f64>().is_ok_and(|number| number.abs() < 1000.0), "{number}");
            let texts = ["yes", "yes, of course", "a\n\"b\"\\", "日本"];
            let chosen = answer(Grammar::Choice(texts.map(str::to_owned).to_vec()), &mut rng);
            assert!(texts.contains(&chosen.as_str()), "{chosen:?}");
            let greeting = answer(Grammar::Lark(lark.to_owned()), &mut rng);
            assert!(greeting.ends_with('!') && greeting.starts_with(['h', 'g']), "{greeting}");
        }
    }
}

#[test]
fn an_answer_may_end_only_where_its_grammar_may() {
    for model in models() {
        let matcher = model.matcher(&choice(&["ab", "abc"]), &[]);
        let mut answer = String::new();
        loop {
            let next = model.next(&matcher, &[]).remove(0);
            if matches!(next, Next::Nothing) {
                break;
            }
            let allowed = model.allowed(&next);
            assert_eq!(allowed.contains(&model.end), answer == "ab", "{answer:?}");
            // No other token without text, and none behind the tokenizer's.
            let others = allowed.iter().filter(|id| **id != model.end);
            assert!(others.clone().all(|id| !model.tokenizer.token_bytes(*id).is_empty()), "{allowed:?}");
            let token = *others.min_by_key(|id| model.tokenizer.token_bytes(**id).len()).unwrap();
            answer.push_str(std::str::from_utf8(&model.tokenizer.token_bytes(token)).unwrap());
            let ended = matcher.take(token);
            matcher.push(&[token]);
            assert_eq!(ended, answer == "abc", "{answer:?}");
        }
        assert_eq!(answer, "abc");
        let matcher = model.matcher(&choice(&["ab", "abc"]), &[]);
        let tokens = model.tokenizer.encode("ab", false).unwrap();
        let tokens: Vec<u32> = if text(&model, &tokens) == "ab" { tokens } else { panic!("{tokens:?}") };
        if tokens.iter().all(|id| !model.tokenizer.token_bytes(*id).starts_with(b" ")) {
            matcher.push(&tokens);
            assert!(model.allowed(&model.next(&matcher, &[])[0]).contains(&model.end));
            assert!(matcher.take(model.end), "the end has been drawn");
            matcher.push(&[model.end]);
            assert!(matches!(model.next(&matcher, &[])[0], Next::Nothing));
        }
    }
}

/// The rows of drafts are what single tokens would have had, and a draft that is not taken leaves nothing.
#[test]
fn drafts_and_aborted_steps_leave_nothing() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let schema = r#"{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}, "required": ["a", "b"]}"#;
    let constraint = constraint(Grammar::JsonSchema(schema.to_owned()));
    for model in models() {
        let answer = model.draw(&constraint, &mut rng);
        let plain = model.matcher(&constraint, &[]);
        let drafted = model.matcher(&constraint, &[]);
        let masks = |next: &Next| next.mask().map(<[u32]>::to_vec);
        let single: Vec<_> = answer
            .iter()
            .map(|token| {
                let mask = masks(&model.next(&plain, &[])[0]);
                plain.push(&[*token]);
                mask
            })
            .collect();
        let mut at = 0;
        while at < answer.len() {
            let end = (at + 1 + rng.random_range(0..4usize)).min(answer.len());
            let mut drafts = answer[at..end - 1].to_vec();
            let wrong = rng.random_bool(0.3);
            if wrong {
                drafts.extend([model.vocab - 1, 3]);
            }
            let rows = model.next(&drafted, &drafts);
            assert_eq!(rows.len(), drafts.len() + 1);
            for (row, expected) in rows.iter().zip(&single[at..end]) {
                assert_eq!(masks(row), *expected, "{} drafts at {at}", drafts.len());
            }
            assert!(!wrong || rows.iter().rev().take(2).all(|row| matches!(row, Next::Any)));
            // A step that is aborted behind its draws.
            if rng.random_bool(0.3) {
                drafted.take(answer[at]);
                continue;
            }
            answer[at..end].iter().for_each(|token| _ = drafted.take(*token));
            drafted.push(&answer[at..end]);
            at = end;
        }
        // Elsewhere, from the tokens alone.
        for at in [1, answer.len() / 2, answer.len() - 1] {
            let again = model.matcher(&constraint, &answer[..at]);
            assert_eq!(masks(&model.next(&again, &[])[0]), single[at], "{at}");
        }
    }
}

#[test]
fn tokens_outside_of_the_grammar_fail_the_answer() {
    let [model, _] = models();
    let matcher = model.matcher(&choice(&["ab"]), &model.tokenizer.encode("xyz", false).unwrap());
    let failed = model.next(&matcher, &[1, 2]);
    assert!(matches!(&failed[0], Next::Failed(_)) && failed.len() == 3, "{failed:?}");
    let nothing = AnswerMatcher::new(choice(&["ab"]), &[]);
    assert!(nothing.poll(None), "it is known to fail");
    let mut out = Vec::new();
    nothing.next(&[], &mut out);
    assert!(matches!(&out[..], [Next::Failed(why)] if why.contains("no tokenizer")), "{out:?}");
}

/// The grammar holds from the first token behind the reasoning on.
#[test]
fn reasoning_is_free_and_what_follows_is_not() {
    let [model, _] = models();
    let (open, close, until) = (5, 9, 11);
    let grammar = Grammar::Choice(vec!["ab".to_owned()]);
    let of = |reasoning: Reasoning| Arc::new(Constraint { grammar: grammar.clone(), reasoning: Some(reasoning) });
    let plain = model.allowed(&model.next(&model.matcher(&constraint(grammar.clone()), &[]), &[])[0]);
    let think = Reasoning { is_open: true, opens: Some(open), ends: vec![close], until: None, may_end: false };
    let is_free = |next: &Next| {
        let allowed = model.allowed(next);
        allowed.len() == model.vocab as usize - 1 && !allowed.contains(&model.end)
    };

    let matcher = model.matcher(&of(think.clone()), &[]);
    let rows = model.next(&matcher, &[7, close, plain[0]]);
    assert!(is_free(&rows[0]) && is_free(&rows[1]), "within it");
    assert_eq!(model.allowed(&rows[2]), plain, "behind its end");
    matcher.push(&[7]);
    assert!(is_free(&model.next(&matcher, &[])[0]), "the drafts left nothing");
    assert!(!matcher.take(close));
    matcher.push(&[close]);
    assert_eq!(model.allowed(&model.next(&matcher, &[])[0]), plain);

    // It may begin with the answer, or not.
    let begins = of(Reasoning { is_open: false, ..think.clone() });
    let first = model.allowed(&model.next(&model.matcher(&begins, &[]), &[])[0]);
    assert!(first.contains(&open) && plain.iter().all(|id| first.contains(id)) && first.len() <= plain.len() + 1);
    assert!(is_free(&model.next(&model.matcher(&begins, &[open]), &[])[0]));
    assert!(!is_free(&model.next(&model.matcher(&begins, &plain[..1]), &[])[0]), "there is none");

    // A header of two tokens, then the mark behind it; the answer may end before.
    let header = of(Reasoning { is_open: true, opens: None, ends: vec![close, 3], until: Some(until), may_end: true });
    for (answer, is_content) in
        [(&[close][..], false), (&[close, 3], false), (&[close, 3, 8], false), (&[close, 3, 8, until], true)]
    {
        let next = model.next(&model.matcher(&header, answer), &[]).remove(0);
        match next {
            Next::Any => assert!(!is_content, "{answer:?}"),
            next => assert!(is_content && model.allowed(&next) == plain, "{answer:?}"),
        }
    }
}

/// A model without a token at the end of answers ends where nothing may follow.
#[test]
fn without_a_token_for_the_end_an_answer_ends_where_nothing_may_follow() {
    let [model, _] = models();
    let vocab = model.end.min(u32::try_from(model.tokenizer.vocab_size()).unwrap());
    let grammars = lagoon_grammar::Grammars::new(Arc::clone(&model.tokenizer), vocab, &[]);
    let model = Model { grammars, vocab, ..model };
    let answer = model.draw(&choice(&["ab", "cd"]), &mut ChaCha8Rng::seed_from_u64(3));
    assert!(["ab", "cd"].contains(&text(&model, &answer).as_str()));
}

#[test]
fn what_is_no_grammar_is_refused() {
    let [model, _] = models();
    let deep = format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    let chain: String = (0..6000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    for (grammar, part) in [
        (Grammar::Lark("root ::= \"a\"\nb ::= (c".to_owned()), "GBNF: line 2"),
        (Grammar::Lark("start: nowhere".to_owned()), "not valid"),
        (Grammar::Lark(String::new()), "not valid"),
        (Grammar::Lark(deep), "brackets"),
        (Grammar::Lark("a".repeat(200_000)), "bytes"),
        (Grammar::Lark(format!("start: r0\n{chain}")), "lines"),
        (Grammar::Regex("(".to_owned()), "not valid"),
        (Grammar::Regex("(?=a)b".to_owned()), "not valid"),
        (Grammar::Regex("[^\\x00-\\U0010FFFF]".to_owned()), "not valid"),
        (Grammar::JsonSchema("{".to_owned()), "not JSON"),
        (Grammar::JsonSchema("{\"type\": \"wrong\"}".to_owned()), "not valid"),
        (Grammar::JsonSchema("{\"properties\": {\"a\": {\"not\": {}}}}".to_owned()), "`not` at `properties.a`"),
        (Grammar::JsonSchema("{\"$ref\": \"#/$defs/none\"}".to_owned()), "not valid"),
        (Grammar::Choice(Vec::new()), "1 to"),
        (Grammar::Choice(vec![String::new()]), "none of them empty"),
    ] {
        let error = model.grammars.check(&grammar).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
    // As deep as is allowed, and chains as long.
    let nested = format!("start: {}\"a\"{}", "(".repeat(4000), ")".repeat(4000));
    let chain: String = (0..1900).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    for grammar in [nested, format!("start: r0\n{chain}r1900: \"a\"\n")] {
        let result = model.grammars.check(&Grammar::Lark(grammar));
        assert!(result.is_ok() || result.unwrap_err().to_string().contains("not valid"));
    }
}

/// Expensive grammars end by their bounds, and others go on.
#[test]
fn grammars_that_are_too_complex_are_refused_or_fail_their_answer() {
    let [model, _] = models();
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for regex in ["(a|b)*a(a|b){12}", "((a{1,50}){1,50}){1,50}", "(.*a.*b.*c.*d.*){20}", "[ab]{1,60000}"] {
        let constraint = constraint(Grammar::Regex(regex.to_owned()));
        if model.grammars.check(&constraint.grammar).is_err() {
            continue;
        }
        let matcher = model.matcher(&constraint, &[]);
        for _ in 0..60 {
            let next = model.next(&matcher, &[]).remove(0);
            if !matches!(next, Next::Of(_)) {
                break;
            }
            let allowed = model.allowed(&next);
            let token = allowed[rng.random_range(0..allowed.len())];
            matcher.push(&[token]);
        }
    }
    assert_eq!(model.grammars.check(&Grammar::Regex("ab".to_owned())), Ok(()));
}

/// White space between the parts of JSON ends: a model that prefers it goes on nevertheless.
#[test]
fn compact_json_has_no_white_space() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "null"}},
        "required": ["a", "b"]});
    let compact = constraint(Grammar::JsonSchema(lagoon_grammar::without_white_space(schema).to_string()));
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    for model in models() {
        for _ in 0..10 {
            let answer = text(&model, &model.draw(&compact, &mut rng));
            assert!(
                serde_json::from_str::<serde_json::Value>(&answer).is_ok() && !answer.contains(char::is_whitespace),
                "{answer}"
            );
        }
    }
}

#[test]
fn white_space_between_parts_ends() {
    let model = model(&[]);
    let newline = model.tokenizer.encode("\n", false).unwrap()[0];
    let constraint = constraint(Grammar::JsonSchema(r#"{"type": "array", "items": {"type": "null"}}"#.to_owned()));
    let matcher = model.matcher(&constraint, &model.tokenizer.encode("[", false).unwrap());
    let mut lines = 0;
    while model.allowed(&model.next(&matcher, &[])[0]).contains(&newline) {
        matcher.push(&[newline]);
        lines += 1;
        assert!(lines < 10, "endless");
    }
    assert_eq!(lines, 2);
    matcher.push(&model.tokenizer.encode(&format!("{}null]", " ".repeat(32)), false).unwrap());
    assert!(!matches!(model.next(&matcher, &[])[0], Next::Failed(_)));
}
