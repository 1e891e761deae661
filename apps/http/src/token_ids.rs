//! Lists of token ids in requests.

use crate::error::ApiError;
use crate::fields::wrong_type;
use crate::json::{Json, Kind};
use std::collections::VecDeque;

/// The first `kept_max` of a list of token ids, and the length of the list. The caller checks them against the
/// vocabulary.
pub(crate) fn token_ids(name: &str, value: Json<'_>, kept_max: usize) -> Result<(Vec<u32>, usize), ApiError> {
    if value.kind() != Kind::List {
        return Err(wrong_type(name, "a list of token ids", value));
    }
    let (mut ids, mut count) = (Vec::new(), 0);
    for item in value.items() {
        let id = token_id(name, item)?;
        count += 1;
        if count <= kept_max {
            ids.push(id);
        }
    }
    Ok((ids, count))
}

fn token_id(name: &str, item: Json<'_>) -> Result<u32, ApiError> {
    item.read::<u32>().map_err(|_| wrong_type(name, "a list of token ids (whole numbers from 0)", item))
}

/// The last `kept_max` of a list of token ids.
pub(crate) fn last_token_ids(name: &str, value: Json<'_>, kept_max: usize) -> Result<Vec<u32>, ApiError> {
    let mut ids = VecDeque::new();
    for item in value.items() {
        if ids.len() == kept_max {
            ids.pop_front();
        }
        ids.push_back(token_id(name, item)?);
    }
    Ok(ids.into())
}

/// Refuses ids outside the vocabulary.
pub(crate) fn check_vocabulary(name: &str, ids: &[u32], vocab_size: u32) -> Result<(), ApiError> {
    match ids.iter().find(|id| **id >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let message = format!("the field `{name}` has token id {id}, but the vocabulary has {vocab_size} tokens");
            Err(ApiError::field(name, "invalid_value", message))
        }
    }
}
