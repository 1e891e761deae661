//! Random schemas: every answer drawn from what the matcher allows parses as JSON, and validates.
//!
//! `LAGOON_SCHEMAS` is the number of schemas.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "each test uses a part")]
mod common;
mod validator;

use common::{constraint, models};
use lagoon_types::Grammar;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use validator::Validator;

fn schemas() -> u64 {
    std::env::var("LAGOON_SCHEMAS").map_or(1000, |text| text.parse().unwrap())
}

const NAMES: &[&str] = &["a", "name", "née", "with space", "x\"y", "items", "not"];

/// Schemas at random, of the keywords that are supported.
struct Author(ChaCha8Rng);

impl Author {
    fn below(&mut self, n: u32) -> u32 {
        self.0.random_range(0..n)
    }

    fn yes(&mut self) -> bool {
        self.0.random_bool(0.5)
    }

    fn root(&mut self) -> Value {
        let defs = json!({
            "leaf": self.leaf(),
            "tree": {"type": "object", "properties": {"value": self.leaf(), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "required": ["next"], "additionalProperties": false},
        });
        let mut root = self.schema(3);
        root.as_object_mut().unwrap().insert("$defs".to_owned(), defs);
        root
    }

    fn schema(&mut self, depth: u32) -> Value {
        match self.below(if depth == 0 { 4 } else { 10 }) {
            0..=2 => self.leaf(),
            3 => json!({"$ref": if self.yes() { "#/$defs/leaf" } else { "#/$defs/tree" }}),
            4 | 5 => self.list(depth - 1),
            6 => {
                let options: Vec<Value> = (0..=self.below(3)).map(|_| self.schema(depth - 1)).collect();
                json!({"anyOf": options})
            }
            _ => self.object(depth - 1),
        }
    }

    fn leaf(&mut self) -> Value {
        match self.below(9) {
            0 => json!({"type": "boolean"}),
            1 => json!({"type": ["null", "integer"]}),
            2 => self.text(),
            3 => {
                let low = self.0.random_range(-200..200i64);
                let high = low + self.0.random_range(0..500i64);
                match self.below(3) {
                    0 => json!({"type": "integer", "minimum": low, "maximum": high}),
                    1 => json!({"type": "integer", "exclusiveMinimum": low}),
                    _ => json!({"type": "integer", "multipleOf": self.0.random_range(1..9i64)}),
                }
            }
            4 => {
                let low = self.0.random_range(-9.0..9.0f64);
                json!({"type": "number", "minimum": low, "maximum": low + self.0.random_range(0.5..100.0)})
            }
            5 => json!({"enum": ["red", 3, null, {"deep": [1, "two"]}, true]}),
            6 => json!({"const": NAMES.choose(&mut self.0).unwrap()}),
            7 => json!({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]}),
            _ => json!({"type": "string"}),
        }
    }

    fn text(&mut self) -> Value {
        match self.below(4) {
            0 => {
                let low = self.below(5);
                json!({"type": "string", "minLength": low, "maxLength": low + self.below(9)})
            }
            1 => {
                let patterns = ["^[a-z]{2,5}$", "^(ab|cd)*x?$", "^[0-9]+-[a-f]$", "e.e"];
                json!({"type": "string", "pattern": patterns.choose(&mut self.0).unwrap()})
            }
            2 => {
                let formats = ["date-time", "date", "time", "ipv4", "ipv6", "uuid", "email", "hostname"];
                // Validators bound the parts of addresses and names, which the formats' expressions do not.
                json!({"type": "string", "format": formats.choose(&mut self.0).unwrap(), "maxLength": 50})
            }
            _ => json!({"type": "string", "description": "anything", "title": "t"}),
        }
    }

    fn list(&mut self, depth: u32) -> Value {
        let low = self.below(3);
        let mut list = json!({"type": "array", "items": self.schema(depth)});
        if self.yes() {
            list["minItems"] = json!(low);
            list["maxItems"] = json!(low + self.below(3));
        }
        if self.below(4) == 0 {
            list["prefixItems"] = json!([self.leaf(), self.schema(depth)]);
        }
        list
    }

    fn object(&mut self, depth: u32) -> Value {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for name in NAMES {
            if self.below(3) == 0 {
                properties.insert((*name).to_owned(), self.schema(depth));
                if self.yes() {
                    required.push(*name);
                }
            }
        }
        let mut object = json!({"type": "object", "properties": properties, "required": required});
        match self.below(4) {
            0 => object["additionalProperties"] = self.leaf(),
            1 => {}
            _ => object["additionalProperties"] = json!(false),
        }
        object
    }
}

/// Whether all numbers of a value are small enough that a 64-bit float tells one from the next.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|number| number.abs() < 2_f64.powi(53)),
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(members) => members.values().all(is_exact),
        Value::Null | Value::Bool(_) | Value::String(_) => true,
    }
}

#[test]
fn every_answer_parses_and_validates() {
    let models = models();
    let mut author = Author(ChaCha8Rng::seed_from_u64(18));
    let mut values = 0;
    for number in 0..schemas() {
        let schema = author.root();
        let validator = Validator::of(&schema);
        let constraint = constraint(Grammar::JsonSchema(schema.to_string()));
        let model = &models[usize::try_from(number % 2).unwrap()];
        if let Err(error) = model.grammars.check(&constraint.grammar) {
            panic!("schema {number}, {schema}: {error}");
        }
        for _ in 0..2 {
            let answer = model.draw(&constraint, &mut author.0);
            let text = model.tokenizer.decode(&answer, false);
            serde_json::from_str::<IgnoredAny>(&text).unwrap_or_else(|error| panic!("{schema}: {text}: {error}"));
            // A number may be too large for 64 bits, or for the validator's arithmetic.
            let Ok(value) = serde_json::from_str::<Value>(&text) else { continue };
            if !is_exact(&value) {
                continue;
            }
            validator.validate(&value).unwrap_or_else(|why| panic!("schema {number}, {schema}: {text}: {why}"));
            values += 1;
        }
    }
    assert!(values >= schemas(), "{values}");
}
